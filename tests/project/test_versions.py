"""The model's tests under the oldest transformers that is supported."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDEST = "transformers==5.17.0"


@pytest.mark.versions
@pytest.mark.timeout(900)
def test_model_under_the_oldest_transformers(tmp_path):
    """Everything but transformers comes from the current environment, through a .pth file."""
    venv.create(tmp_path / "old", with_pip=True)
    python = tmp_path / "old" / "bin" / "python"
    site = next((tmp_path / "old" / "lib").glob("python3.*/site-packages"))
    (site / "current.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    install = [python, "-m", "pip", "install", "--quiet", OLDEST]
    subprocess.run(install, check=True, timeout=300)
    found = subprocess.run(
        [python, "-c", "import transformers; print(transformers.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "5.17.0"
    assert Path(sys.executable) != python
    tests = ["tests/modeling_doctab", "tests/training", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [python, "-m", "pytest", *tests], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert " passed" in result.stdout
