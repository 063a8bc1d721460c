"""The exact folder that goes to the Hub, copied file by file from an allow-list.

Nothing is uploaded from where it lies: each file is opened without following symbolic links, its
name must be on the list, its content is checked, and a copy goes into an empty folder.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import stat
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hub_cards.redaction import check_no_token

MODEL_FILES = (
    r"model\.safetensors",
    r"model-\d{5}-of-\d{5}\.safetensors",
    r"model\.safetensors\.index\.json",
    r"config\.json",
    r"generation_config\.json",
    r"[a-z_]+\.py",
)
TOKENIZER_FILES = (
    r"tokenizer\.json",
    r"tokenizer_config\.json",
    r"special_tokens_map\.json",
    r"ranks\.tiktoken",
    r"(reference_)?token_bytes\.npy",
)
RUN_FILES = (r"results\.json", r"gains\.json", r"metrics\.jsonl")
RECORD_FILES = (r"[\w.-]+\.parquet",)
CARD_FILES = (r"README\.md", r"recipe\.yaml", r"figures/[a-z_]+\.png")
METRIC_FILES = (r"README\.md", r"requirements\.txt", r"[a-z_]+\.py")
DATA_FILES = (
    r"README\.md",
    r"counts\.json",
    r"manifest\.json",
    r"(chunks|documents|confirmation)/\w+-\d{5}-of-\d{5}\.parquet",
    *(f"tokenizer/{pattern}" for pattern in TOKENIZER_FILES),
)
# What a push may replace or delete on the Hub; anything else there is somebody's own.
MODEL_REPOSITORY = (
    *MODEL_FILES,
    *TOKENIZER_FILES,
    *RUN_FILES,
    *(f"records/{pattern}" for pattern in RECORD_FILES),
    *CARD_FILES,
)
_REMOTE_CODE_IMPORTS = {"torch", "transformers"}
_GUARDED_IMPORTS = {"numba", "numpy"}  # inside try alone


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether an allow-list names this file."""
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def copy_allowed(source: Path, target: Path, patterns: Sequence[str]) -> list[str]:
    """Copy the files of a folder that the list names; returns the names of those it does not.

    Args:
        source: the folder; its subfolders are walked too.
        target: where the copies go.
        patterns: regular expressions for paths relative to `source`.

    Raises:
        ValueError: if a listed file is a symbolic link or fails its check.
    """
    left_out = []
    for folder, subfolders, files in os.walk(source):
        relative = Path(folder).relative_to(source)
        for name in [*files, *(s for s in subfolders if (Path(folder) / s).is_symlink())]:
            path = (relative / name).as_posix()
            if not matches(path, patterns):
                if not path.startswith("__pycache__/"):
                    left_out.append(path)
                continue
            copy_file(source / path, target / path)
        subfolders[:] = sorted(s for s in subfolders if not s.startswith("."))
    return sorted(left_out)


def copy_file(source: Path, target: Path) -> None:
    """Copy one regular file and check what it holds.

    Raises:
        ValueError: if it is a symbolic link or no regular file, or its content is refused.
    """
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if source.is_symlink():
            raise ValueError(
                f"{source} must be a regular file; it is a symbolic link, which may lead out of "
                "the folder. Copy the file there."
            ) from None
        raise ValueError(f"{source} must be readable; {error.strerror}.") from None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{source} must be a regular file; it is not.")
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as copy:
            shutil.copyfileobj(file, copy, 2**22)
    check_content(target, target.name)


def check_content(path: Path, name: str) -> None:
    """Refuse what could run or leak: pickles in any dress, foreign imports, tokens.

    Raises:
        ValueError: naming the file.
    """
    if name.endswith(".safetensors"):
        _check_safetensors(path, name)
    elif name.endswith(".npy"):
        try:
            np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError:
            raise ValueError(f"{name} must be a plain array; it is not one.") from None
    elif name.endswith(".parquet"):
        with path.open("rb") as file:
            if file.read(4) != b"PAR1":
                raise ValueError(f"{name} must be Parquet; it is not. Write it again.")
    elif name.endswith(".png"):
        pass
    else:
        check_no_token(path, name)


def _check_safetensors(path: Path, name: str) -> None:
    """The header must describe exactly the bytes that follow it."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (header_size,) = struct.unpack("<Q", file.read(8))
            if header_size > size:
                raise ValueError
            header = json.loads(file.read(header_size))
        header.pop("__metadata__", None)
        end = max(entry["data_offsets"][1] for entry in header.values())
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        raise ValueError(f"{name} must be safetensors; it is not. Save the model again.") from None
    if 8 + header_size + end != size:
        raise ValueError(
            f"{name} must have {8 + header_size + end} bytes by its header; found {size}. "
            "It was cut; save the model again."
        )


def check_remote_code(folder: Path) -> None:
    """Refuse remote code that imports more than torch, transformers and the standard library.

    Raises:
        ValueError: naming the file and the import.
    """
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text("utf-8"), path.name)
        guarded = {
            id(node)
            for block in ast.walk(tree)
            if isinstance(block, ast.Try)
            for statement in block.body
            for node in ast.walk(statement)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = {(node.module or "").split(".")[0]}
            else:
                continue
            allowed = _REMOTE_CODE_IMPORTS | set(sys.stdlib_module_names)
            allowed |= _GUARDED_IMPORTS if id(node) in guarded else set()
            if names - allowed:
                raise ValueError(
                    f"{path.name} must import torch and transformers alone; found "
                    f"{', '.join(sorted(names - allowed))}. It would not load elsewhere."
                )
