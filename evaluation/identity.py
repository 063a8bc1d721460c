"""Hashes that say which weights, which code and which commit a result came from."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The modules that scoring and judging import: everything that decides a verdict, given weights and
# data. The report, its tables and the building of data may change between the two.
_DECIDING_CODE = (
    "modeling_doctab/*.py",
    "evaluation/class_bpb/statistics.py",
    *(
        f"evaluation/{name}.py"
        for name in (
            *("checkpoints", "contrasts", "formats", "identity", "partial_scores", "plans"),
            *("protocol", "protocol_checks", "reach", "records", "registration", "rules", "score"),
            *("scores", "scoring"),
        )
    ),
    *(
        f"data_scripts/{name}.py"
        for name in ("chunk_set", "keyed_random", "lookup", "rows", "target_classes", "tokenizer")
    ),
)


def checkpoint_sha256(folder: Path) -> str:
    """Hash of the names and contents of a model folder's weight files and configuration."""
    return _files_sha256(
        {file.name: file for file in [*folder.glob("*.safetensors"), folder / "config.json"]}
    )


def refuse_stale(file: Path, scored_with: str, folder: Path, current: str) -> None:
    """Refuse records of a checkpoint that is no longer the run's.

    Args:
        file: the records.
        scored_with: hash of the checkpoint that they are of.
        folder: what holds the checkpoint now.
        current: its hash.

    Raises:
        ValueError: if the two differ.
    """
    if scored_with != current:
        raise ValueError(
            f"{file} is older than the checkpoint in {folder}: it was scored with "
            f"{scored_with[:12]}, the folder holds {current[:12]}. Score again."
        )


def code_sha256(root: Path = ROOT) -> str:
    """Hash of the Python files that decide a verdict; independent of git."""
    files = [file for pattern in _DECIDING_CODE for file in root.glob(pattern)]
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
