"""Scores: the per-target results of one arm on one set in one format, and records made from them.

An .npz of plain arrays, one value a target, and the records' header as JSON text. It is read with
pickles refused.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from evaluation.class_bpb.statistics import (
    IntArray,
    class_indices,
    sum_by_class,
    visible_sources,
)
from evaluation.formats import TargetSet
from evaluation.reach import reaches_further
from evaluation.records import ReachCounts, Records, RecordsHeader

COLUMNS = {
    "nats": np.float32,
    "table_order": np.int8,
    "table_right": np.bool_,
    "table_distance": np.int32,
    "slot": np.int32,
    "violation": np.bool_,
}


@dataclass(frozen=True)
class Scores:
    """One value a target, in the order of the target set.

    Attributes:
        header: what was scored; the same as the records'.
        nats: [targets] float32 losses.
        table_order, table_right, table_distance: [targets] the table's state as the model received
            it; for an arm without a table, what one would have returned.
        slot: [targets] position in the row of the input that predicts the target.
        violation: [targets] whether the table knew less there than the row shows (Section 4.6).
    """

    header: RecordsHeader
    nats: npt.NDArray[np.float32]
    table_order: npt.NDArray[np.int8]
    table_right: npt.NDArray[np.bool_]
    table_distance: npt.NDArray[np.int32]
    slot: npt.NDArray[np.int32]
    violation: npt.NDArray[np.bool_]

    @classmethod
    def empty(cls, header: RecordsHeader, num_targets: int) -> Scores:
        """Make room for a target set; losses are NaN until they are filled in."""
        columns: dict[str, Any] = {
            name: np.zeros(num_targets, dtype) for name, dtype in COLUMNS.items()
        }
        columns["nats"][:] = np.nan
        return cls(header=header, **columns)


def write_scores(scores: Scores, path: Path) -> None:
    """Write one .npz by way of a temporary file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp_{path.name}")
    columns = {name: getattr(scores, name) for name in COLUMNS}
    with temporary.open("wb") as file:
        np.savez(file, header=np.array(scores.header.to_json()), **columns)
    temporary.replace(path)


def read_scores(path: Path) -> Scores:
    """Read one scores file.

    Raises:
        ValueError: if it is not a scores file of this version, or its columns differ in length.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            header = RecordsHeader.from_json(str(file["header"]))
            columns = {name: file[name] for name in COLUMNS}
    except (KeyError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path} must be a scores file: {error}. Score again.") from None
    if len({column.shape for column in columns.values()}) != 1:
        raise ValueError(f"The columns of {path} must have one length. Score again.")
    return Scores(header=header, **columns)


def read_scores_header(path: Path) -> RecordsHeader:
    """Read a scores file's header without its arrays; errors as `read_scores`."""
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = sorted(set(COLUMNS) - set(file.files))
            if missing:
                raise KeyError(f"it lacks {', '.join(missing)}")
            return RecordsHeader.from_json(str(file["header"]))
    except (KeyError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path} must be a scores file: {error}. Score again.") from None


def score_classes(scores: Scores, targets: TargetSet) -> IntArray:
    """Class of every scored target, [targets] 0..125."""
    return class_indices(
        target_order=targets.order,
        target_distance=targets.distance,
        visible=visible_sources(targets.distance, scores.slot),
        table_order=scores.table_order,
        table_right=scores.table_right,
        chunk_length=scores.header.chunk_length,
    )


def make_records(scores: Scores, targets: TargetSet) -> Records:
    """Sum scores by document and class.

    Raises:
        ValueError: if the scores are of other targets, or a loss is not finite.
    """
    if len(scores.nats) != len(targets.tokens):
        raise ValueError(
            f"The scores must cover the {len(targets.tokens)} targets of the set; "
            f"they have {len(scores.nats)}. Score again."
        )
    if not np.isfinite(scores.nats).all():
        bad = int(np.flatnonzero(~np.isfinite(scores.nats))[0])
        document = targets.document_ids[int(targets.document[bad])]
        raise ValueError(
            f"Every loss must be finite; {scores.header.label} gives {scores.nats[bad]} at target "
            f"{bad}, in document {document}. Did its training diverge?"
        )
    classes = score_classes(scores, targets)
    count = len(targets.document_ids)
    sums = sum_by_class(targets.document, classes, scores.nats, targets.num_bytes, count)
    # The reference's table is zero for the same tokens as the exact one, the special ones.
    counted = targets.num_bytes > 0
    cell = targets.document[counted] * sums.nats.shape[1] + classes[counted]
    reference = np.bincount(cell, targets.reference_bytes[counted], minlength=sums.nats.size)
    return Records(
        header=scores.header,
        sums=sums,
        reference_bytes=reference.reshape(sums.nats.shape).astype(np.int64),
        reach=_reach_counts(scores, targets),
    )


def has_reach(header: RecordsHeader) -> bool:
    """Whether the invariant of `evaluation.reach` applies: the text's own lookup, not ablated."""
    return header.table_source == "document" and not header.ablated


def _reach_counts(scores: Scores, targets: TargetSet) -> ReachCounts | None:
    """Count `evaluation.reach`'s findings by document."""
    if not has_reach(scores.header):
        return None

    def count(chosen: npt.NDArray[np.bool_], weights: npt.NDArray[Any] | None = None) -> Any:
        picked = None if weights is None else weights[chosen].astype(np.float64)
        return np.bincount(targets.document[chosen], picked, len(targets.document_ids))

    return ReachCounts(
        positions=count(np.ones(len(scores.nats), np.bool_)),
        violations=count(scores.violation),
        violation_nats=count(scores.violation, scores.nats),
        further=count(reaches_further(scores.table_distance, scores.slot)),
    )
