"""One arm against another on the same targets, from their records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt

from evaluation.class_bpb.statistics import (
    BY_BAND,
    BY_MATCH,
    BY_TABLE_STATE,
    BY_TARGET_CELL,
    Comparison,
    FloatArray,
    Grouping,
    bits_per_byte,
    compare,
    resample_counts,
)
from evaluation.records import Records, differing_fields

# Header fields that two arms must share before their difference means anything.
_SHARED = ("set_name", "format", "reach", "chunk_length", "data_sha256", "targets_sha256")

_MEANING = {
    "data_sha256": "data_sha256 (other documents, or another tokenizer)",
    "targets_sha256": "targets_sha256 (other targets)",
}


@dataclass(frozen=True)
class Contrast:
    """`arm` against `baseline`; gains are baseline minus arm, in bits per byte."""

    arm: Records
    baseline: Records
    comparison: Comparison

    @property
    def gain(self) -> float:
        """Bits per byte saved."""
        return self.comparison.gain

    def gain_by(self, partition: str) -> dict[str, float] | None:
        """Split the gain by a partition of the classes, a key of `PARTITIONS`.

        A target's class depends on its row (visibility) and on what the table returned. Arms of
        different row lengths are compared after summing over visibility only, and arms whose tables
        received different fields after summing over the table's state.

        Returns:
            Group name -> bits per byte, summing to `gain`; None where the two arms' groups do not
            hold the same targets.
        """
        grouping, depends_on = PARTITIONS[partition]
        mine, theirs = self.arm, self.baseline
        if any(getattr(mine.header, name) != getattr(theirs.header, name) for name in depends_on):
            return None
        counts = grouping.collapse(mine.sums.num_targets)
        if not np.array_equal(counts, grouping.collapse(theirs.sums.num_targets)):
            return None
        saved = grouping.collapse((theirs.sums.nats - mine.sums.nats).sum(axis=0))
        gains = saved / (np.log(2) * mine.sums.num_bytes.sum())
        return dict(zip(grouping.names, (float(gain) for gain in gains), strict=True))

    def part(self, partition: str, patterns: Sequence[str]) -> float:
        """What the groups whose names match contribute to the gain, in bits per byte.

        Args:
            partition: a key of `PARTITIONS`.
            patterns: names or patterns such as `*hidden`; a group counts once.

        Raises:
            ValueError: if the gain cannot be split so, or a pattern matches no group.
        """
        split = self.gain_by(partition)
        if split is None:
            raise ValueError(
                f"the gain of {self.arm.header.label} over {self.baseline.header.label} cannot be "
                f"split by {partition}: their rows or tables differ"
            )
        return sum(split[name] for name in matching_groups(partition, patterns))

    def intervals_by(
        self, partition: str, num_resamples: int = 2000, seed: int = 0
    ) -> dict[str, tuple[float, float]] | None:
        """Intervals of `gain_by`'s terms over documents; None where it is."""
        if self.gain_by(partition) is None or len(self.arm.header.document_ids) < 2:
            return None
        grouping, _ = PARTITIONS[partition]
        saved = grouping.collapse(self.baseline.sums.nats - self.arm.sums.nats)
        ends = class_intervals(saved, self.arm.sums.num_bytes, num_resamples, seed)
        return {
            name: (float(a), float(b)) for name, (a, b) in zip(grouping.names, ends, strict=True)
        }


def matching_groups(partition: str, patterns: Sequence[str]) -> list[str]:
    """Names of a partition's groups that match any of the patterns.

    Raises:
        ValueError: if there is no such partition, or a pattern matches no group.
    """
    if partition not in PARTITIONS:
        raise ValueError(f"a partition must be one of {', '.join(PARTITIONS)}; got {partition!r}")
    names = PARTITIONS[partition][0].names
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"{partition} has no group {pattern}; it has {', '.join(names)}")
    return [name for name in names if any(fnmatchcase(name, one) for one in patterns)]


def class_intervals(
    saved_nats: FloatArray, num_bytes: npt.NDArray[Any], num_resamples: int = 2000, seed: int = 0
) -> FloatArray:
    """95% document-bootstrap interval of each class's contribution to a gain.

    The draws are those of the gain's own interval (Section 3.6).

    Args:
        saved_nats: [documents, classes] baseline nats minus the arm's.
        num_bytes: [documents, classes] bytes of the targets.
        num_resamples: of the documents.
        seed: of the draws.

    Returns:
        [classes, 2] in bits per byte; NaN with fewer than two documents.
    """
    if len(saved_nats) < 2:
        return np.full((saved_nats.shape[1], 2), np.nan)
    size = num_bytes.sum(axis=1)
    gains = np.concatenate(
        [
            (counts @ saved_nats) / (np.log(2) * (counts @ size))[:, None]
            for counts in resample_counts(len(saved_nats), num_resamples, seed)
        ]
    )
    return np.quantile(gains, (0.025, 0.975), axis=0).T


# Partition -> its grouping, and the header fields that decide which group a target is in.
_TABLE_FIELDS = ("table_source", "table_orders", "ablated")
PARTITIONS: dict[str, tuple[Grouping, tuple[str, ...]]] = {
    "target_cell": (BY_TARGET_CELL, ("row_length",)),
    "band": (BY_BAND, ()),
    "table_state": (BY_TABLE_STATE, _TABLE_FIELDS),
    "match": (BY_MATCH, _TABLE_FIELDS),
}


def contrast(arm: Records, baseline: Records, num_resamples: int = 2000, seed: int = 0) -> Contrast:
    """Pair two arms and bootstrap their difference over documents (Section 3.6).

    Raises:
        ValueError: if they were not scored on the same targets in the same format and order.
    """
    ignored = [
        name for name in differing_fields(arm.header, baseline.header) if name not in _SHARED
    ]
    differing = differing_fields(arm.header, baseline.header, ignore=ignored)
    names = f"{arm.header.label} and {baseline.header.label}"
    if differing:
        found = "; ".join(
            f"{_MEANING.get(name, name)}: {getattr(arm.header, name)} and "
            f"{getattr(baseline.header, name)}"
            for name in differing
        )
        raise ValueError(f"{names} must be scored alike to be compared; found {found}.")
    if arm.header.document_ids != baseline.header.document_ids:
        raise ValueError(
            f"{names} must hold the same documents in the same order. Filter both by one list."
        )
    for name in ("num_targets", "num_bytes"):
        mine, theirs = getattr(arm.sums, name), getattr(baseline.sums, name)
        if not np.array_equal(mine.sum(axis=1), theirs.sum(axis=1)):
            raise ValueError(f"{names} must have the same {name} in every document. Score again.")
    # One column: what follows uses per-document totals, and the two arms' classes may differ.
    comparison = compare(
        nats=arm.sums.nats.sum(axis=1, keepdims=True),
        baseline_nats=baseline.sums.nats.sum(axis=1, keepdims=True),
        num_bytes=arm.sums.num_bytes.sum(axis=1, keepdims=True),
        num_resamples=num_resamples,
        seed=seed,
    )
    return Contrast(arm, baseline, comparison)


def records_bits_per_byte(records: Records) -> float:
    """Bits per byte of an arm, over exact bytes."""
    return bits_per_byte(records.sums.nats, records.sums.num_bytes)
