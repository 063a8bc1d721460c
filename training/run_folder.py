"""The run folder: whether a run begins, goes on or is done there, and who may write to it."""

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import IO, Any

import yaml

from data_scripts.chunk_set import ChunkSet
from training import checkpoint
from training.config import EXECUTION_KEYS, Recipe

_LOCK = ".lock"
_RUN_FILES = {"config.yaml", "metrics.jsonl", "checkpoints"}


def find_start(
    recipe: Recipe, chunk_set: ChunkSet, resume: bool, overwrite: bool
) -> tuple[Path, dict[str, Any]] | str | None:
    """Where the run begins: None (anew), a checkpoint with its state, or "done"; changes nothing.

    Raises:
        ValueError: if the folder holds another run, or a run that neither flag speaks of, or with
            `overwrite` something that is no run.
    """
    run_dir = recipe.run_dir
    if overwrite:
        _check_is_run(run_dir)
        return None
    found = checkpoint.latest_checkpoint(run_dir / "checkpoints")
    # A finished run may have lost its checkpoints: a study removes them.
    state = found[1] if found is not None else _finished(run_dir)
    if state is None:
        return None
    if not resume:
        raise ValueError(
            f"{run_dir} already holds a run. Continue it with --resume auto, start anew with "
            "--overwrite, or choose another --output_dir."
        )
    if state["recipe_sha256"] != recipe.sha256():
        changed = ", ".join(_changed_keys(state["recipe"], recipe.as_dict()))
        raise ValueError(
            f"{run_dir} was trained with another recipe; it differs in: {changed}. Undo the "
            "change, or start anew with --overwrite or another --output_dir."
        )
    if state["data_sha256"] != chunk_set.fingerprint:
        raise ValueError(
            f"{run_dir} was trained on another chunk set than {chunk_set.path} (manifest hash "
            f"{state['data_sha256'][:12]} against {chunk_set.fingerprint[:12]}). Point "
            "--chunk_set to the old one, or start anew with --overwrite."
        )
    if found is None or (
        state["update"] == recipe.training.num_updates and (run_dir / "results.json").exists()
    ):
        return "done"
    return found


def _finished(run_dir: Path) -> dict[str, Any] | None:
    """Hashes and recipe of a run that has its results, or None."""
    try:
        results = json.loads((run_dir / "results.json").read_text())
        recipe = yaml.safe_load((run_dir / "config.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return None
    if not (run_dir / "final" / "config.json").is_file():
        return None
    return {**{key: results[key] for key in ("recipe_sha256", "data_sha256")}, "recipe": recipe}


def _check_is_run(run_dir: Path) -> None:
    """Refuse to overwrite what is no run folder."""
    held = {path.name for path in run_dir.iterdir()} if run_dir.is_dir() else set()
    if not held <= {_LOCK, "status.json"} and not held & _RUN_FILES:
        raise ValueError(
            f"--overwrite deletes a run folder; {run_dir} holds none of "
            f"{', '.join(sorted(_RUN_FILES))}, but {', '.join(sorted(held)[:3])}. Choose another "
            "--output_dir."
        )


def claim_run_folder(run_dir: Path, overwrite: bool) -> IO[str]:
    """Lock the run folder for this process, and empty it if it is to be overwritten.

    Returns:
        The lock: it holds as long as the file is open.

    Raises:
        ValueError: if another process trains there.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = (run_dir / _LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(
            f"another process trains in {run_dir}. Wait for it, stop it with `touch "
            f"{run_dir / 'STOP'}`, or choose another --output_dir."
        ) from None
    except OSError:
        pass  # a file system without locks
    if overwrite:
        for path in run_dir.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _LOCK:
                path.unlink(missing_ok=True)
    return lock


def note_done(recipe: Recipe) -> None:
    """Make status.json say so, which a kill between the last two files would have prevented."""
    if int(os.environ.get("RANK", "0")) == 0:
        done = {"state": "done", "update": recipe.training.num_updates, "message": ""}
        checkpoint.write_json(recipe.run_dir / "status.json", done)


def _changed_keys(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    ignored = {"output_dir", "description", "data.chunk_set", "optimizer.shard_iterations"}
    ignored |= {f"training.{key}" for key in EXECUTION_KEYS}
    changed = []
    for key in sorted(set(old) | set(new)):
        name = prefix + key
        if isinstance(old.get(key), dict) and isinstance(new.get(key), dict):
            changed += _changed_keys(old[key], new[key], f"{name}.")
        elif old.get(key) != new.get(key) and name not in ignored:
            changed.append(f"{name} ({old.get(key)!r} then, {new.get(key)!r} now)")
    return changed
