"""Evaluation formats: which rows a model sees, and which target each position of a row scores.

In the training format every full chunk is scored as training sees it (Section 3.2); on packed rows
that is the packed format (Section 4.9). In a stride format windows overlap and every target of a
document is scored once (Section 4.6). All are streams of `RowBatch`, so that one loop scores any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from data_scripts.chunk_set import ChunkSet
from data_scripts.rows import TableOptions, chunk_rows, donor_chunks, stride_windows
from data_scripts.target_classes import target_orders
from evaluation.class_bpb.statistics import MAX_ORDER

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TargetSet:
    """The scored targets of a split, in order, with what does not depend on an arm.

    Attributes:
        tokens: [targets] the targets' token ids.
        document: [targets] index into `document_ids`.
        order, distance: [targets] the target's own, over the whole document (Section 3.5).
        num_bytes, reference_bytes: [targets] exact, and by the reference's table.
        document_ids: the split's documents.
        document_starts: [documents + 1] where each document's targets begin.
    """

    tokens: IntArray
    document: IntArray
    order: npt.NDArray[np.int8]
    distance: npt.NDArray[np.int32]
    num_bytes: IntArray
    reference_bytes: IntArray
    document_ids: tuple[str, ...]
    document_starts: IntArray


class RowBatch(NamedTuple):
    """Rows for one forward pass, each array [rows, row_length].

    `target_index` is the place in the target set of the target that a position scores, -1 where it
    scores none. `table` holds `table_order`, `table_candidate` and `table_distance`.
    """

    input_ids: IntArray
    shift_labels: IntArray
    target_index: IntArray
    table: dict[str, IntArray]


@dataclass(frozen=True)
class EvaluationFormat:
    """`training`, `packed`, or windows of one row length each `stride` targets apart.

    Attributes:
        stride: None for the training and packed formats.
        reach: `chunk`, each target keeps the table fields of its training chunk; or `window`, the
            table searches the window's own inputs.
        packed: whether rows hold several documents, each opened by BOS.
    """

    stride: int | None = None
    reach: str = "chunk"
    packed: bool = False

    def __post_init__(self) -> None:
        if self.stride is not None and self.stride < 1:
            raise ValueError(f"stride must be at least 1; got {self.stride}.")
        if self.reach not in ("chunk", "window"):
            raise ValueError(f"reach must be 'chunk' or 'window'; got {self.reach!r}.")
        if self.stride is None and self.reach != "chunk":
            raise ValueError(
                "The training format has the reach of a chunk; --reach belongs to --format stride."
            )
        if self.packed and self.stride is not None:
            raise ValueError(
                "Stride windows need whole documents; this split holds packed rows. Score it with "
                "--format training."
            )

    @property
    def name(self) -> str:
        """`training`, `packed`, or such as `stride1024-chunk`."""
        if self.stride is None:
            return "packed" if self.packed else "training"
        return f"stride{self.stride}-{self.reach}"

    def on(self, chunk_set: ChunkSet, split: str) -> EvaluationFormat:
        """This format on a split: `training` means `packed` where rows hold several documents."""
        return replace(self, packed=is_packed(chunk_set, split))


def is_packed(chunk_set: ChunkSet, split: str) -> bool:
    """Whether the split's rows hold several documents, with BOS among the targets."""
    return chunk_set.content(split) == "packed"


def load_targets(
    chunk_set: ChunkSet, split: str, full_chunks: bool, registration: str | None = None
) -> TargetSet:
    """Gather a split's targets with their classes' ingredients.

    Args:
        chunk_set: the prepared data.
        split: an evaluation split.
        full_chunks: drop each document's remainder, as training does; otherwise keep all targets.
        registration: hash of the registration that opens a confirmation split (Section 3.6).

    Raises:
        ValueError: if the split has no documents, or one without a full chunk, or is a confirmation
            split without a registration.
    """
    documents = chunk_set.documents(split, opened_by=registration)
    if len(documents) == 0:
        raise ValueError(f"{split} must hold documents to be scored; it is empty.")
    token_bytes = np.asarray(chunk_set.token_bytes(), np.int64)
    reference_bytes = np.asarray(chunk_set.reference_token_bytes(), np.int64)
    tokens, orders, distances, lengths = [], [], [], []
    for index in range(len(documents)):
        document = np.asarray(documents.document(index)).astype(np.int64)
        length = len(document)
        if full_chunks:
            length -= length % chunk_set.chunk_length
        if length == 0:
            raise ValueError(
                f"Every document of {split} must have a full chunk of {chunk_set.chunk_length} "
                f"targets; {documents.ids[index]} has {len(document)}. Build the split without it."
            )
        # Orders look at the whole document, the scored part is cut afterwards.
        order, distance = _orders(document, chunk_set.bos_token_id)
        tokens.append(document[:length])
        orders.append(order[:length])
        distances.append(distance[:length])
        lengths.append(length)
    joined = np.concatenate(tokens)
    return TargetSet(
        tokens=joined,
        document=np.repeat(np.arange(len(lengths)), lengths),
        order=np.concatenate(orders),
        distance=np.concatenate(distances),
        num_bytes=token_bytes[joined],
        reference_bytes=reference_bytes[joined],
        document_ids=tuple(documents.ids),
        document_starts=np.concatenate([[0], np.cumsum(lengths)]),
    )


def _orders(
    tokens: IntArray, bos_token_id: int
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int32]]:
    """Order and distance of every target, [targets]; in packed rows within its own document."""
    order, distance = np.zeros(len(tokens), np.int8), np.zeros(len(tokens), np.int32)
    # A BOS target opens the next document; it has no bytes and no class of its own.
    edges = [-1, *np.flatnonzero(tokens == bos_token_id), len(tokens)]
    for before, end in pairwise(edges):
        part = slice(before + 1, end)
        if part.start < end:
            order[part], distance[part] = target_orders(tokens[part], bos_token_id, MAX_ORDER)
    return order, distance


@dataclass(frozen=True)
class RowPlan:
    """What decides the rows of one arm.

    `table` is made for every arm: an arm without a table is split by what one would have returned.
    """

    row_length: int
    chunk_length: int
    bos_token_id: int
    table: TableOptions
    ablated: bool = False


def score_units(targets: TargetSet, form: EvaluationFormat, plan: RowPlan) -> IntArray:
    """Ranges of targets that can be scored apart: int64 [units, 2], start and end.

    A unit is a chunk, or in a stride format a document.
    """
    if form.stride is not None:
        edges = targets.document_starts
    else:
        edges = np.arange(0, len(targets.tokens) + 1, plan.chunk_length)
    return np.stack([edges[:-1], edges[1:]], axis=1).astype(np.int64)


def iter_rows(
    targets: TargetSet,
    form: EvaluationFormat,
    plan: RowPlan,
    batch_size_tokens: int,
    units: IntArray | None = None,
    done: npt.NDArray[np.bool_] | None = None,
) -> Iterator[RowBatch]:
    """Yield the rows of a target set, about `batch_size_tokens` inputs at a time.

    Args:
        targets: the set.
        form: its format.
        plan: the arm's rows.
        batch_size_tokens: inputs in one batch; at least one row is always yielded.
        units: indices into `score_units`; all if None.
        done: [targets] targets that need no row any more.

    Raises:
        ValueError: if the row length does not fit the format.
    """
    if plan.table.dropout:
        plan = replace(plan, table=replace(plan.table, dropout=0.0))
    if units is None:
        units = np.arange(len(score_units(targets, form, plan)))
    if form.stride is None:
        parts = _training_rows(targets, plan, batch_size_tokens, units)
    else:
        parts = _stride_rows(targets, form, plan, units)
    yield from _batches(parts, max(1, batch_size_tokens // plan.row_length), done)


def _training_rows(
    targets: TargetSet, plan: RowPlan, batch_size_tokens: int, units: IntArray
) -> Iterator[dict[str, IntArray]]:
    chunks = targets.tokens.reshape(-1, plan.chunk_length)
    donors = None
    if plan.table.source == "foreign" and not plan.ablated:
        chunk_documents = targets.document[:: plan.chunk_length]
        donors = donor_chunks(chunk_documents, np.arange(len(chunks)), plan.table.seed)
    # Whole chunks make the table's fields; their rows may then be scored in several passes.
    chunks_per_step = max(1, batch_size_tokens // plan.chunk_length)
    for first in range(0, len(units), chunks_per_step):
        chosen = units[first : first + chunks_per_step]
        rows = chunk_rows(
            chunks[chosen],
            plan.row_length,
            plan.bos_token_id,
            table=plan.table,
            chunk_indices=chosen,
            foreign=None if donors is None else chunks[donors[chosen]],
            ablate=plan.ablated,
        )
        index = chosen[:, None] * plan.chunk_length + np.arange(plan.chunk_length)
        yield rows | {"target_index": index.reshape(-1, plan.row_length)}


def _stride_rows(
    targets: TargetSet, form: EvaluationFormat, plan: RowPlan, units: IntArray
) -> Iterator[dict[str, IntArray]]:
    assert form.stride is not None
    for start, end in score_units(targets, form, plan)[units]:
        rows = stride_windows(
            targets.tokens[start:end],
            plan.row_length,
            form.stride,
            plan.bos_token_id,
            table=plan.table,
            reach=form.reach,
            chunk_length=plan.chunk_length,
            ablate=plan.ablated,
        )
        scored = rows["target_index"] >= 0
        yield rows | {"target_index": np.where(scored, rows["target_index"] + start, -1)}


def _batches(
    parts: Iterator[dict[str, IntArray]],
    rows_per_batch: int,
    done: npt.NDArray[np.bool_] | None,
) -> Iterator[RowBatch]:
    """Cut and join rows into full batches (the last may be short), without the rows that are done.

    Rows of several units share a batch.
    """
    waiting: list[dict[str, IntArray]] = []
    for rows in parts:
        if done is not None:
            index = rows["target_index"]
            needed = ((index >= 0) & ~done[np.maximum(index, 0)]).any(axis=1)
            rows = {name: array[needed] for name, array in rows.items()}
        waiting.append(rows)
        count = sum(len(part["input_ids"]) for part in waiting)
        if count < rows_per_batch:
            continue
        joined = {name: np.concatenate([part[name] for part in waiting]) for name in rows}
        full = count // rows_per_batch * rows_per_batch
        for first in range(0, full, rows_per_batch):
            yield _row_batch(joined, slice(first, first + rows_per_batch))
        waiting = [{name: array[full:] for name, array in joined.items()}]
    if sum(len(part["input_ids"]) for part in waiting):
        joined = {name: np.concatenate([part[name] for part in waiting]) for name in waiting[0]}
        yield _row_batch(joined, slice(None))


def _row_batch(rows: dict[str, IntArray], part: slice) -> RowBatch:
    return RowBatch(
        input_ids=rows["input_ids"][part],
        shift_labels=rows["shift_labels"][part],
        target_index=rows["target_index"][part],
        table={name: array[part] for name, array in rows.items() if name.startswith("table_")},
    )
