"""Hashes that say which weights, which code and which commit a result came from."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Everything that decides a score, given weights and data.
_SCORING_CODE = ("evaluation", "data_scripts", "modeling_doctab")


def checkpoint_sha256(folder: Path) -> str:
    """Hash of the names and contents of a model folder's weight files and configuration."""
    return _files_sha256(
        {file.name: file for file in [*folder.glob("*.safetensors"), folder / "config.json"]}
    )


def code_sha256(root: Path = ROOT) -> str:
    """Hash of the Python files that decide a score; independent of git."""
    files = [file for name in _SCORING_CODE for file in (root / name).rglob("*.py")]
    return _files_sha256({file.relative_to(root).as_posix(): file for file in files})


def git_commit(root: Path = ROOT) -> tuple[str, int] | None:
    """The checkout's commit and its time in seconds since 1970; None outside a git checkout."""
    command = ["git", "-C", str(root), "log", "-1", "--format=%H %ct"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return None
    return found[0], int(found[1])


def _files_sha256(files: dict[str, Path]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        with files[name].open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()
