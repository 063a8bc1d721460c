"""Target classes, their sums, bits per byte and the paired document bootstrap.

The classes of the paper's Sections 3.5 and 4.4 are defined here and nowhere else. A class is a
target cell (what the document holds, 14) times a table cell (what the table returned, 9).

Everything downstream needs only document x class sums of nats, bytes and targets: sums are taken in
float64 and before any ratio. The file needs numpy alone, so that it travels with the metric.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

MAX_ORDER = 4
# Copy bands end at these sixteenths of the chunk length; a sixth band lies beyond the chunk.
BAND_SIXTEENTHS = (1, 2, 4, 8, 16)
BAND_NAMES = ("to_1_16", "to_1_8", "to_1_4", "to_1_2", "to_1", "beyond")

TARGET_CELL_NAMES = (
    "order_0",
    "order_1",
    *(f"copy_{band}_{sight}" for band in BAND_NAMES for sight in ("visible", "hidden")),
)
TABLE_CELL_NAMES = (
    "no_match",
    *(f"match_{n}_{state}" for n in range(1, MAX_ORDER + 1) for state in ("right", "wrong")),
)
NUM_TARGET_CELLS = len(TARGET_CELL_NAMES)
NUM_TABLE_CELLS = len(TABLE_CELL_NAMES)
CLASS_NAMES = tuple(f"{t}.{s}" for t in TARGET_CELL_NAMES for s in TABLE_CELL_NAMES)
NUM_CLASSES = len(CLASS_NAMES)


# Targets handled at a time: their temporaries stay in a core's cache, where whole columns of ten
# million would be new memory from the system on every call.
_BLOCK = 1 << 16


class ClassSums(NamedTuple):
    """Sufficient statistics of one arm on one set: arrays of shape [documents, classes]."""

    nats: FloatArray
    num_targets: IntArray
    num_bytes: IntArray


@dataclass(frozen=True)
class Grouping:
    """A coarser partition of the 126 classes: `index[c]` is the group of class c."""

    names: tuple[str, ...]
    index: IntArray

    def collapse(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Sum the last axis, [..., 126], into groups, [..., groups]; the dtype is kept."""
        if values.shape[-1] != NUM_CLASSES:
            raise ValueError(
                f"The last axis must hold the {NUM_CLASSES} classes; got shape {values.shape}."
            )
        membership = self.index[:, None] == np.arange(len(self.names))
        return values @ membership.astype(values.dtype)


def _groupings() -> tuple[Grouping, Grouping, Grouping, Grouping]:
    target, table = np.divmod(np.arange(NUM_CLASSES), NUM_TABLE_CELLS)
    band = np.where(target < 2, target, 2 + (target - 2) // 2)
    # 0 no match, 1 right, 2 wrong
    state = np.where(table == 0, 0, 2 - table % 2)
    order_level = np.minimum(target, 2)
    match_level = np.where(table <= 2, table, 4 - table % 2)
    return (
        Grouping(TARGET_CELL_NAMES, target),
        Grouping(("order_0", "order_1", *(f"copy_{name}" for name in BAND_NAMES)), band),
        Grouping(
            tuple(
                f"{order}.{state_name}"
                for order in ("order_0", "order_1", "copy")
                for state_name in ("no_match", "right", "wrong")
            ),
            order_level * 3 + state,
        ),
        Grouping(
            ("no_match", "match_1_right", "match_1_wrong", "match_2_right", "match_2_wrong"),
            match_level,
        ),
    )


# Table 4 split by visibility; Table 4 itself; Table 5 (the target's order); Table 6 (the table's
# order, where `match_2` means a match of order 2 or more).
BY_TARGET_CELL, BY_BAND, BY_TABLE_STATE, BY_MATCH = _groupings()


def band_ends(chunk_length: int) -> tuple[int, ...]:
    """Return the last distance of each of the five bands inside the chunk, in tokens."""
    if chunk_length < 16:
        raise ValueError(
            f"chunk_length must be at least 16, or distance bands are empty; got {chunk_length}."
        )
    return tuple(chunk_length * part // 16 for part in BAND_SIXTEENTHS)


def visible_sources(target_distance: npt.ArrayLike, slot: npt.ArrayLike) -> BoolArray:
    """Tell whether the earlier occurrence of each target is an input of its row (Section 3.5).

    A target scored at slot t of a row has its source token at slot t - distance + 1. Slot 0 shows
    BOS, so the source must stand at slot 1 or later. Its context may be cut off. An order-0 target
    (distance 0) has no source.

    Args:
        target_distance: tokens back to the latest source, 0 where there is none.
        slot: the 0-based position in the row of the input that predicts the target; same shape.

    Returns:
        Booleans of the same shape.
    """
    distance = np.asarray(target_distance)
    return (distance > 0) & (distance <= np.asarray(slot))


def class_indices(
    target_order: npt.ArrayLike,
    target_distance: npt.ArrayLike,
    visible: npt.ArrayLike,
    table_order: npt.ArrayLike,
    table_right: npt.ArrayLike,
    chunk_length: int,
) -> IntArray:
    """Class of each target, 0..125: target cell * 9 + table cell (Sections 3.5 and 4.4).

    Args:
        target_order: [targets] 0..4, the longest context that was followed by this target before,
            anywhere in the document.
        target_distance: [targets] tokens back to the latest such place; 0 where the order is 0.
        visible: [targets] whether that source is an input of the row; read for copies only.
        table_order: [targets] 0..4, the match order that the model received; 0 is no match.
        table_right: [targets] whether the candidate is the target; read where there is a match.
        chunk_length: tokens; the distance bands end at fixed fractions of it.

    Returns:
        [targets] int64.

    Raises:
        ValueError: if lengths differ, an order is outside 0..4, or a distance does not fit its
            order.
    """
    columns = (
        np.asarray(target_order),
        np.asarray(target_distance),
        np.asarray(visible, dtype=bool),
        np.asarray(table_order),
        np.asarray(table_right, dtype=bool),
    )
    shapes = {column.shape for column in columns}
    if len(shapes) != 1:
        raise ValueError(f"All class columns must have one shape; got {sorted(shapes)}.")
    ends = band_ends(chunk_length)
    flat = [column.reshape(-1) for column in columns]
    classes = np.empty(flat[0].size, np.int64)
    for part in _blocks(classes.size):
        classes[part] = _block_classes(ends, *(column[part] for column in flat))
    return classes.reshape(columns[0].shape)


def _blocks(size: int) -> Iterator[slice]:
    return (slice(start, start + _BLOCK) for start in range(0, size, _BLOCK))


def _block_classes(
    ends: tuple[int, ...],
    order: npt.NDArray[Any],
    distance: npt.NDArray[Any],
    seen: BoolArray,
    matched: npt.NDArray[Any],
    right: BoolArray,
) -> npt.NDArray[np.int16]:
    """`class_indices` of some targets, each [targets]."""
    for name, column in (("target_order", order), ("table_order", matched)):
        if column.min() < 0 or column.max() > MAX_ORDER:
            raise ValueError(
                f"{name} must lie in 0..{MAX_ORDER}; got {column.min()} to {column.max()}."
            )
    if np.any((order == 0) != (distance == 0)) or np.any(distance < 0):
        raise ValueError(
            "target_distance must be 0 exactly where target_order is 0, and positive elsewhere. "
            "Take both from the same pass over the whole document."
        )
    # Small integers throughout: ten million targets take 0.1 s instead of 0.5.
    band = np.zeros(order.shape, np.int8)
    for end in ends:
        band += distance > end
    copy = (order >= 2).view(np.int8)
    # 0 and 1 are orders 0 and 1; from 2 on, visible and hidden copies of each band alternate.
    target = np.minimum(order.astype(np.int8), 2) + copy * (2 * band + ~seen)
    level = matched.astype(np.int8)
    table = np.maximum(2 * level - (right & (level > 0)), 0)
    return target.astype(np.int16) * NUM_TABLE_CELLS + table


def sum_by_class(
    document: npt.ArrayLike,
    class_index: npt.ArrayLike,
    nats: npt.ArrayLike,
    num_bytes: npt.ArrayLike,
    num_documents: int,
) -> ClassSums:
    """Sum nats, targets and bytes by document and class.

    Targets without bytes (special tokens) count neither as nats nor as targets, as in the
    reference's bits per byte.

    Args:
        document: [targets] 0..num_documents-1.
        class_index: [targets] 0..125, from `class_indices`.
        nats: [targets] negative log-likelihoods.
        num_bytes: [targets] UTF-8 bytes of each target token.
        num_documents: rows of the result.

    Returns:
        Sums of shape [num_documents, 126].

    Raises:
        ValueError: if shapes differ, an index is out of range, nats are not finite or bytes are
            negative.
    """
    documents, classes = np.asarray(document), np.asarray(class_index)
    losses, lengths = np.asarray(nats), np.asarray(num_bytes)
    shapes = {array.shape for array in (documents, classes, losses, lengths)}
    if len(shapes) != 1 or documents.ndim != 1:
        raise ValueError(f"The four columns must be [targets]; got shapes {sorted(shapes)}.")
    shape = (num_documents, NUM_CLASSES)
    sums = ClassSums(np.zeros(shape), np.zeros(shape, np.int64), np.zeros(shape, np.int64))
    for part in _blocks(len(losses)):
        finite = np.isfinite(losses[part])
        if not finite.all():
            bad = part.start + int(np.argmin(finite))
            raise ValueError(f"nats must be finite; target {bad} has {losses[bad]}.")
        _add_block(sums, documents[part], classes[part], losses[part], lengths[part])
    return sums


def _add_block(
    sums: ClassSums,
    documents: npt.NDArray[Any],
    classes: npt.NDArray[Any],
    nats: npt.NDArray[Any],
    num_bytes: npt.NDArray[Any],
) -> None:
    """Add some targets, each [targets], to the sums in place; `sum_by_class` says what counts."""
    if num_bytes.min() < 0:
        raise ValueError(f"num_bytes must not be negative; got {num_bytes.min()}.")
    counted = num_bytes > 0
    if not counted.all():
        documents, classes = documents[counted], classes[counted]
        nats, num_bytes = nats[counted], num_bytes[counted]
    if not len(documents):
        return
    for name, index, end in (("document", documents, len(sums.nats)), ("class", classes, 126)):
        if index.min() < 0 or index.max() >= end:
            raise ValueError(f"{name} indices must lie in 0..{end - 1}.")
    # Neighbouring targets are of few documents: their rows alone are summed.
    first, last = int(documents.min()), int(documents.max())
    cell = (documents.astype(np.int64) - first) * NUM_CLASSES + classes
    for total, weights in (
        (sums.nats, nats),
        (sums.num_targets, None),
        (sums.num_bytes, num_bytes),
    ):
        # A float64 weight holds every byte count below 2^53 exactly.
        found = np.bincount(cell, weights, (last - first + 1) * NUM_CLASSES)
        total[first : last + 1] += found.reshape(-1, NUM_CLASSES).astype(total.dtype, copy=False)


def bits_per_byte(nats: npt.ArrayLike, num_bytes: npt.ArrayLike) -> float:
    """Corpus bits per byte: all nats over ln 2 times all bytes.

    Raises:
        ValueError: if no bytes were scored.
    """
    total_bytes = float(np.sum(np.asarray(num_bytes, dtype=np.float64)))
    if total_bytes <= 0:
        raise ValueError("No bytes were scored, so bits per byte are undefined. Is the set empty?")
    return float(np.sum(np.asarray(nats, dtype=np.float64)) / (np.log(2) * total_bytes))


def contributions(nats: npt.NDArray[Any], num_bytes: npt.NDArray[Any]) -> FloatArray:
    """Split corpus bits per byte by class: [documents, classes] sums to [classes].

    Each class's nats are divided by the bytes of all classes, so the result sums to
    `bits_per_byte`; an empty class contributes 0.
    """
    return nats.sum(axis=0) / (np.log(2) * _total_bytes(num_bytes))


@dataclass(frozen=True)
class Comparison:
    """One arm against its baseline on the same targets; gains are baseline minus arm, in bpb."""

    gain: float
    gain_interval: tuple[float, float]
    gain_by_class: FloatArray
    documents_improved: float
    median_document_gain: float
    gain_without_top_decile: float


def compare(
    nats: FloatArray,
    baseline_nats: FloatArray,
    num_bytes: npt.NDArray[Any],
    num_resamples: int = 2000,
    seed: int = 0,
) -> Comparison:
    """Compare two arms scored on the same targets (Sections 3.6 and 4.10).

    Args:
        nats: [documents, classes] summed nats of the arm; the classes may be any partition.
        baseline_nats: [documents, classes] the same for its baseline.
        num_bytes: [documents, classes] bytes of the targets, shared by both.
        num_resamples: bootstrap resamples of the documents.
        seed: of the bootstrap.

    Returns:
        The gain with its 95% paired document-bootstrap interval, its split by class, the fraction
        of documents that improve, the median per-document gain, and the gain that remains without
        the tenth of the documents (rounded down) with the largest summed gain.

    Raises:
        ValueError: if the shapes differ, or a document has no bytes.
    """
    if not nats.shape == baseline_nats.shape == num_bytes.shape:
        raise ValueError(
            "The two arms and the bytes must be [documents, classes] of one shape; got "
            f"{nats.shape}, {baseline_nats.shape} and {num_bytes.shape}."
        )
    difference = baseline_nats - nats
    saved = difference.sum(axis=1)
    size = num_bytes.sum(axis=1)
    if size.size == 0 or size.min() <= 0:
        raise ValueError("Every document must have scored bytes; drop the empty ones first.")
    kept = np.argsort(saved, kind="stable")[: len(saved) - len(saved) // 10]
    return Comparison(
        gain=bits_per_byte(saved, size),
        gain_interval=bootstrap_interval(saved, size, num_resamples, seed),
        gain_by_class=contributions(difference, num_bytes),
        documents_improved=float(np.mean(saved > 0)),
        median_document_gain=float(np.median(saved / (np.log(2) * size))),
        gain_without_top_decile=bits_per_byte(saved[kept], size[kept]),
    )


def bootstrap_interval(
    saved_nats: npt.NDArray[Any],
    num_bytes: npt.NDArray[Any],
    num_resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> tuple[float, float]:
    """Percentile interval of a gain, resampling documents with replacement (Section 3.6).

    The draws depend on the seed and the number of documents alone, so swapping the two arms negates
    the interval, and every contrast on one set sees the same resamples.

    Args:
        saved_nats: [documents] baseline nats minus the arm's nats.
        num_bytes: [documents].
        num_resamples: at least 1.
        seed: of `numpy.random.default_rng`.
        level: two-sided coverage.

    Returns:
        The interval's ends in bits per byte; NaN with fewer than two documents, where the spread
        over documents cannot be known.

    Raises:
        ValueError: if num_resamples or level is out of range.
    """
    if num_resamples < 1 or not 0 < level < 1:
        raise ValueError(
            "num_resamples must be at least 1 and level between 0 and 1; "
            f"got {num_resamples} and {level}."
        )
    if len(saved_nats) < 2:
        warnings.warn("One document has no bootstrap interval; NaN is returned.", stacklevel=2)
        return (float("nan"), float("nan"))
    resampled = np.concatenate(
        [
            (counts @ saved_nats) / (np.log(2) * (counts @ num_bytes))
            for counts in resample_counts(len(saved_nats), num_resamples, seed)
        ]
    )
    low, high = np.quantile(resampled, ((1 - level) / 2, (1 + level) / 2))
    return (float(low), float(high))


def resample_counts(num_documents: int, num_resamples: int, seed: int) -> Iterator[FloatArray]:
    """Yield how often each document is drawn, in blocks [resamples, documents] of bounded size.

    Every row is one draw of `num_documents` documents with replacement and sums to that number.
    """
    generator = np.random.default_rng(seed)
    block = max(1, 2**22 // num_documents)
    for start in range(0, num_resamples, block):
        counts = np.empty((min(block, num_resamples - start), num_documents))
        for row in counts:
            drawn = generator.integers(num_documents, size=num_documents)
            row[:] = np.bincount(drawn, minlength=num_documents)
        yield counts


def grouping_labels(grouping: Grouping, chunk_length: int) -> list[str]:
    """Readable group names with distances in tokens, such as `copy (512, 1K] visible`."""
    ends = [_tokens(end) for end in band_ends(chunk_length)]
    spans = [f"({a}, {b}]" for a, b in zip(["0", *ends], ends, strict=False)]
    spans.append(f"beyond {ends[-1]}")
    return [_label(name, dict(zip(BAND_NAMES, spans, strict=True))) for name in grouping.names]


def _label(name: str, spans: dict[str, str]) -> str:
    for band, span in sorted(spans.items(), key=lambda item: -len(item[0])):
        if f"copy_{band}" in name:
            return name.replace(f"copy_{band}", f"copy {span}").replace("_", " ")
    named = name.replace("copy", "order ≥ 2").replace("match_2", "match ≥ 2")
    return named.replace("no_match", "no match").replace(".", ", ").replace("_", " ")


def _tokens(count: int) -> str:
    return f"{count // 1024}K" if count % 1024 == 0 else str(count)


def _total_bytes(num_bytes: npt.NDArray[Any]) -> float:
    total = float(num_bytes.sum())
    if total <= 0:
        raise ValueError("No bytes were scored, so contributions are undefined. Is the set empty?")
    return total


def document_index(documents: Sequence[int] | npt.NDArray[Any]) -> tuple[IntArray, IntArray]:
    """Number arbitrary document ids 0..n-1 in sorted order: (ids [n], index [targets])."""
    ids, index = np.unique(np.asarray(documents), return_inverse=True)
    return ids.astype(np.int64), index.astype(np.int64)
