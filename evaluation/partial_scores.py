"""What has been scored of a set so far, on disk: a cut costs the last seconds alone.

Every process appends small files of (target, results); none is ever rewritten. A later start, with
any number of processes, loads them all and scores the rest.
"""

from __future__ import annotations

import hashlib
import shutil
import time
import uuid
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from evaluation.records import RecordsHeader
from evaluation.scores import COLUMNS, Scores

SAVE_EVERY_SECONDS = 20.0
_KEY = "header_sha256"


class PartialScores:
    """One set's scores in the making: arrays in memory, and pieces in a folder.

    Args:
        folder: the pieces' place; all processes share it.
        header: what is being scored; pieces of anything else are ignored.
        num_targets: of the set.
        save_every_seconds: at most so much work is lost by a cut, and one batch.
    """

    def __init__(
        self,
        folder: Path,
        header: RecordsHeader,
        num_targets: int,
        save_every_seconds: float = SAVE_EVERY_SECONDS,
    ) -> None:
        self.folder = folder
        self.scores = Scores.empty(header, num_targets)
        self.done = np.zeros(num_targets, np.bool_)
        self._key = hashlib.sha256(header.to_json().encode()).hexdigest()
        self._save_every_seconds = save_every_seconds
        self._saved_at = time.monotonic()
        self._unsaved: list[dict[str, npt.NDArray[Any]]] = []

    def load(self) -> None:
        """Take over all pieces of this header; damaged ones and others are ignored."""
        for file in sorted(self.folder.glob("piece_*.npz")):
            try:
                with np.load(file, allow_pickle=False) as piece:
                    if str(piece[_KEY]) != self._key:
                        continue
                    columns = {name: piece[name] for name in ("place", *COLUMNS)}
            except (KeyError, ValueError, zipfile.BadZipFile, EOFError, OSError):
                continue
            self._take(columns)

    def add(self, **columns: npt.NDArray[Any]) -> None:
        """Add one batch's results: `place` [n], the targets' indices, and each column [n]."""
        self._take(columns)
        self._unsaved.append(columns)
        if time.monotonic() - self._saved_at >= self._save_every_seconds:
            self.save()

    def save(self) -> None:
        """Write what is not on disk yet as one more piece."""
        self._saved_at = time.monotonic()
        if not self._unsaved:
            return
        names = ("place", *COLUMNS)
        joined = {name: np.concatenate([part[name] for part in self._unsaved]) for name in names}
        self.folder.mkdir(parents=True, exist_ok=True)
        name = uuid.uuid4().hex
        temporary = self.folder / f".tmp_{name}.npz"
        with temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **{_KEY: np.array(self._key)}, **joined)
        temporary.replace(self.folder / f"piece_{name}.npz")
        self._unsaved = []

    def remove(self) -> None:
        """Delete the pieces: the scores stand complete elsewhere."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _take(self, columns: dict[str, npt.NDArray[Any]]) -> None:
        place = columns["place"]
        for name in COLUMNS:
            getattr(self.scores, name)[place] = columns[name]
        self.done[place] = True
