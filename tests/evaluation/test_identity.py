"""The hashes say what they are of: code that decides a verdict, and a model folder's content."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from evaluation.identity import ROOT, checkpoint_sha256, code_sha256, git_commit

# Modules of this project that scoring and judging import, as paths from the root.
_LOADED = """
import json, sys
from pathlib import Path
import evaluation.protocol, evaluation.scoring, modeling_doctab
root = Path.cwd()
files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
paths = [Path(file) for file in files if file]
own = [p.relative_to(root).as_posix() for p in paths if p.is_relative_to(root)]
rooms = ("evaluation/", "data_scripts/", "modeling_doctab/")
print(json.dumps([name for name in own if name.startswith(rooms)]))
"""


def copy_code(folder: Path) -> Path:
    for room in ("evaluation", "data_scripts", "modeling_doctab"):
        for file in (ROOT / room).rglob("*.py"):
            target = folder / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    return folder


def test_the_code_s_hash_covers_all_that_scoring_imports(tmp_path: Path) -> None:
    root = copy_code(tmp_path)
    before = code_sha256(root)
    assert before == code_sha256()
    found = subprocess.run(
        [sys.executable, "-c", _LOADED], cwd=ROOT, capture_output=True, text=True, check=True
    )
    modules = json.loads(found.stdout)
    assert {"evaluation/scoring.py", "modeling_doctab/modeling_doctab.py"} <= set(modules)
    for name in modules:
        if name.endswith(("__init__.py", "command_line.py")):
            continue  # docstrings, and the form of flags and errors
        content = (root / name).read_text()
        (root / name).write_text(content + "\n")
        assert code_sha256(root) != before, name
        (root / name).write_text(content)
    (root / "evaluation" / "report.py").write_text("")
    assert code_sha256(root) == before


def test_a_checkpoint_s_hash_follows_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = checkpoint_sha256(tmp_path)
    (tmp_path / "README.md").write_text("a card")
    assert checkpoint_sha256(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"weightz")
    assert checkpoint_sha256(tmp_path) != before


def test_the_commit_is_git_s_or_none(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        assert git_commit() is None  # an unpacked archive: no commit is made up
        return
    commit = git_commit()
    assert commit is not None
    assert commit[0] == found.stdout.strip()
