"""The wheel holds the model alone, and the repository keeps its promises about itself."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_wheel_has_one_top_level_name(tmp_path):
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {n for n in names if not n.endswith(".dist-info")} == {"modeling_doctab"}


def test_rooms_import_only_what_the_design_allows():
    allowed = {
        "modeling_doctab": set(),
        "data_scripts": {"modeling_doctab"},
        "training": {"modeling_doctab", "data_scripts"},
        "evaluation": {"modeling_doctab", "data_scripts"},
        "hub_cards": set(),
    }
    pattern = re.compile(r"^\s*(?:from|import)\s+(\w+)", re.MULTILINE)
    for room, others in allowed.items():
        for path in (ROOT / room).rglob("*.py"):
            found = set(pattern.findall(path.read_text())) & set(allowed)
            assert found <= others | {room}, path


def test_version_is_stated_once_more_only_where_it_must():
    import modeling_doctab

    assert f'version = "{modeling_doctab.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"version: {modeling_doctab.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_a_wrong_python_is_named_before_anything_is_made(tmp_path):
    for name in ("Makefile", "requirements.txt", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    old = tmp_path / "python3.9"
    old.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'import sys; sys.version_info = (3, 9, 0); "
        'exec(sys.argv[1])\' "$2"\n'
    )
    old.chmod(0o755)
    command = ["make", "setup", f"PYTHON={old}"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode != 0
    assert "doctab needs Python 3.11 or newer" in result.stderr
    assert "is 3.9" in result.stderr
    assert not (tmp_path / ".venv").exists()
