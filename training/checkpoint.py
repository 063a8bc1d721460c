"""Atomic checkpoints: safetensors and JSON, verified by hash, never a pickle.

    checkpoints/update_000953/
        config.json, model.safetensors, *.py   a model folder that from_pretrained loads
        optimizer.safetensors                  PARAMETER/STATE, each in its own dtype
        state.json                             update, recipe and data hashes, size and sha256 of
                                               every file

A checkpoint is written into `.tmp_*` beside its place, every file is fsynced, `state.json` comes
last, and one rename makes it appear. A cut at any point leaves the older checkpoints untouched.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from training.tensor_file import TensorFile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STATE_FILE = "state.json"
OPTIMIZER_FILE = "optimizer.safetensors"
MODEL_FILE = "model.safetensors"
PREFIX = "update_"


def checkpoint_path(folder: Path, update: int) -> Path:
    """Where the checkpoint after `update` updates stands."""
    return folder / f"{PREFIX}{update:06d}"


def save_checkpoint(
    folder: Path,
    update: int,
    save_model: Callable[[Path], None],
    tensor_files: dict[str, TensorFile],
    facts: dict[str, Any],
) -> Path:
    """Write one checkpoint atomically.

    Args:
        folder: the run's `checkpoints/`.
        update: number of updates done.
        save_model: writes the model's files, but for its weights, into a folder.
        tensor_files: MODEL_FILE and OPTIMIZER_FILE, filled.
        facts: further JSON values for `state.json`.

    Raises:
        OSError: if it cannot be written; nothing half-written is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = checkpoint_path(folder, update)
    temporary = folder / f".tmp_{target.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        save_model(temporary)
        hashes = {}
        for name, tensors in tensor_files.items():
            save_file(tensors, temporary / name)
            hashes[name] = tensors.sha256()
        files = {}
        for path in sorted(temporary.iterdir()):
            if path.name not in hashes:
                _fsync(path)
                hashes[path.name] = file_sha256(path)
            files[path.name] = {"num_bytes": path.stat().st_size, "sha256": hashes[path.name]}
        state = {"update": update, **facts, "files": files}
        write_json(temporary / STATE_FILE, state)
        _fsync(temporary)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
        _fsync(folder)
    except SafetensorError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(_cannot_write(target, error)) from error
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(_cannot_write(target, error)) from error
    return target


def save_file(tensors: TensorFile, path: Path) -> None:
    """Write one safetensors file through to the disk."""
    tensors.write(path)


def _cannot_write(target: Path, error: Exception) -> str:
    return (
        f"cannot write checkpoint {target}: {error}. Older checkpoints are untouched; make room or "
        "choose another --output_dir, then continue with --resume auto."
    )


class CheckpointWriter:
    """Snapshots the training state and writes it in the background, at the lowest priority.

    Args:
        folder: the run's `checkpoints/`.
        keep_last: newest checkpoints to keep.
        keep_every: also keep every multiple of this many updates; 0 for none.
    """

    def __init__(self, folder: Path, keep_last: int, keep_every: int = 0) -> None:
        self.folder, self.keep_last, self.keep_every = folder, keep_last, keep_every
        self._pool = ThreadPoolExecutor(1, "checkpoint", initializer=_yield_to_training)
        self._pending: Future[Path] | None = None
        self._files: dict[str, TensorFile] = {}

    def save(
        self,
        update: int,
        model: PreTrainedModel,
        optimizer_state: dict[str, torch.Tensor],
        facts: dict[str, Any],
    ) -> None:
        """Copy the state and start to write it; waits for the checkpoint before.

        Raises:
            OSError: if the checkpoint before could not be written.
        """
        self.wait()
        self._snapshot(MODEL_FILE, model.state_dict())
        self._snapshot(OPTIMIZER_FILE, optimizer_state)

        def write() -> Path:
            path = save_checkpoint(
                self.folder,
                update,
                lambda target: model.save_pretrained(target, state_dict={}),
                self._files,
                facts,
            )
            prune_checkpoints(self.folder, self.keep_last, self.keep_every)
            return path

        self._pending = self._pool.submit(write)

    def _snapshot(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        if name not in self._files or not self._files[name].holds(tensors):
            self._files[name] = TensorFile(tensors)
        self._files[name].fill(tensors)

    def wait(self) -> None:
        """Return once nothing is being written.

        Raises:
            OSError: if what was being written could not be.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def failed(self) -> bool:
        """Whether the last write is known to have failed; `wait` raises its error."""
        return (
            self._pending is not None
            and self._pending.done()
            and self._pending.exception() is not None
        )

    def close(self) -> None:
        """Finish what is being written."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()


def _yield_to_training() -> None:
    """Let this thread have only what training on the same cores leaves over."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def prune_checkpoints(folder: Path, keep_last: int, keep_every: int = 0) -> list[Path]:
    """Delete all but the newest `keep_last` and every multiple of `keep_every`; return them."""
    paths = list_checkpoints(folder)
    removed = []
    for path in paths[:-keep_last] if keep_last else paths:
        if keep_every and _update_of(path) % keep_every == 0:
            continue
        shutil.rmtree(path)
        removed.append(path)
    return removed


def list_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    paths = [p for p in folder.iterdir() if p.name.startswith(PREFIX) and p.is_dir()]
    return sorted(paths, key=_update_of)


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """The checkpoint's state, after every file's size and hash were compared with it.

    Raises:
        ValueError: naming the file that is missing or differs.
    """
    try:
        state = json.loads((path / STATE_FILE).read_text())
        files = state["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {STATE_FILE} is missing or damaged ({error})") from error
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"{path}: {name} is missing")
        if file.stat().st_size != expected["num_bytes"] or file_sha256(file) != expected["sha256"]:
            raise ValueError(f"{path}: {name} is damaged (its size or sha256 differs)")
    return state


def latest_checkpoint(
    folder: Path, report: Callable[[str], None] = print
) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that verifies, and its state; says which ones it passes over."""
    for path in reversed(list_checkpoints(folder)):
        try:
            return path, verify_checkpoint(path)
        except ValueError as error:
            report(f"skipping a damaged checkpoint: {error}")
    return None


def load_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Model weights and optimizer state of a verified checkpoint, on the CPU."""
    return load_file(path / MODEL_FILE), load_file(path / OPTIMIZER_FILE)


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that the file is either the old one or the whole new one."""
    temporary = path.with_name(f".tmp_{path.name}")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    _fsync(temporary)
    temporary.replace(path)


def _update_of(path: Path) -> int:
    digits = path.name.removeprefix(PREFIX)
    return int(digits) if digits.isdigit() else -1


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
