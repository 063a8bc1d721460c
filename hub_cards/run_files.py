"""Reading a run folder, or its copy on the Hub: results, gains, records, learning curve.

A repository that `hub_cards.push` made and the run it was made from are read alike.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


@dataclass(frozen=True)
class Sums:
    """One records file, summed over classes or over documents.

    Attributes:
        header: arm, seed, set, format, hashes, document ids.
        nats: [documents] summed losses.
        num_bytes: [documents] UTF-8 bytes.
        cell_targets: target cell -> targets in it.
        cell_nats: target cell -> summed losses.
    """

    header: dict[str, Any]
    nats: np.ndarray
    num_bytes: np.ndarray
    cell_targets: dict[str, int]
    cell_nats: dict[str, float]

    @property
    def num_targets(self) -> int:
        """Scored targets."""
        return sum(self.cell_targets.values())

    @property
    def bits_per_byte(self) -> float:
        """Sums before the ratio."""
        return float(self.nats.sum() / math.log(2) / self.num_bytes.sum())

    def cell_bits_per_byte(self, cell: str) -> float:
        """What a target cell contributes; the cells sum to `bits_per_byte`."""
        return float(self.cell_nats[cell] / math.log(2) / self.num_bytes.sum())

    def key(self) -> str:
        """`SET.FORMAT`, as gains.json names it."""
        suffix = "-ablated" if self.header["ablated"] else ""
        return f"{self.header['set_name']}.{self.header['format']}{suffix}"


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: if the file is missing or is not JSON; `remedy` says what to do.
    """
    if not path.is_file():
        raise ValueError(f"a card needs {path}, which does not exist: {remedy}.")
    try:
        return json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} must be JSON: {error}. Write it again: {remedy}.") from None


def read_sums(path: Path) -> Sums:
    """Read one records file.

    Raises:
        ValueError: if it is not a records file.
    """
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} must be a Parquet file of records: {error}.") from None
    metadata = table.schema.metadata or {}
    if b"doctab_records" not in metadata or b"doctab_class_names" not in metadata:
        raise ValueError(f"{path} has no records header. Score the run again.")
    header = json.loads(metadata[b"doctab_records"])
    names = json.loads(metadata[b"doctab_class_names"])
    document = table["document"].to_numpy()
    num_documents = len(header["document_ids"])
    classes = table["class"].to_numpy()
    targets = np.bincount(classes, table["targets"].to_numpy(), len(names))
    nats = np.bincount(classes, table["nats"].to_numpy(), len(names))
    cell_targets: dict[str, int] = {}
    cell_nats: dict[str, float] = {}
    for name, count, loss in zip(names, targets, nats, strict=True):
        cell = name.split(".")[0]
        cell_targets[cell] = cell_targets.get(cell, 0) + int(count)
        cell_nats[cell] = cell_nats.get(cell, 0.0) + float(loss)
    return Sums(
        header=header,
        nats=np.bincount(document, table["nats"].to_numpy(), num_documents),
        num_bytes=np.bincount(document, table["bytes"].to_numpy(), num_documents),
        cell_targets=cell_targets,
        cell_nats=cell_nats,
    )


def read_all_sums(run: Path) -> dict[str, Sums]:
    """Every records file of a run by `SET.FORMAT`."""
    found = [read_sums(path) for path in sorted((run / "records").glob("*.parquet"))]
    return {sums.key(): sums for sums in found}


def read_curve(run: Path) -> list[dict[str, Any]]:
    """The learning curve: one object an update, in order; a resumed update counts once."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    latest = {row["update"]: row for row in rows if "update" in row and "loss" in row}
    return [latest[update] for update in sorted(latest)]


def bootstrap(
    nats: np.ndarray, num_bytes: np.ndarray, num_resamples: int = 2000, seed: int = 0
) -> tuple[float, float] | None:
    """95% percentile interval of bits per byte over documents drawn with replacement.

    Args:
        nats: [documents] losses, or a baseline's losses minus these for a gain.
        num_bytes: [documents].
        num_resamples: draws.
        seed: of the draws; the same draws as `class_bpb` makes.

    Returns:
        The ends, or None for fewer than two documents.
    """
    if len(nats) < 2:
        return None
    generator = np.random.default_rng(seed)
    values = np.empty(num_resamples)
    for index in range(num_resamples):
        drawn = generator.integers(len(nats), size=len(nats))
        values[index] = nats[drawn].sum() / num_bytes[drawn].sum() / math.log(2)
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def file_sha256(path: Path) -> str:
    """sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
