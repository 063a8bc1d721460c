"""Evaluation formats: which rows a model sees, and which target each position of a row scores.

In the training format every full chunk is scored as training sees it (Section 3.2). In a stride
format windows overlap and every target of a document is scored once (Section 4.6). Both are streams
of `RowBatch`, so that one loop scores either.
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
    """`training`, or windows of one row length each `stride` targets apart.

    Attributes:
        stride: None for the training format.
        reach: `chunk`, each target keeps the table fields of its training chunk; or `window`, the
            table searches the window's own inputs.
    """

    stride: int | None = None
    reach: str = "chunk"

    def __post_init__(self) -> None:
        if self.stride is not None and self.stride < 1:
            raise ValueError(f"stride must be at least 1; got {self.stride}.")
        if self.reach not in ("chunk", "window"):
            raise ValueError(f"reach must be 'chunk' or 'window'; got {self.reach!r}.")
        if self.stride is None and self.reach != "chunk":
            raise ValueError(
                "The training format has the reach of a chunk; --reach belongs to --format stride."
            )

    @property
    def name(self) -> str:
        """`training`, or such as `stride1024-chunk`."""
        return "training" if self.stride is None else f"stride{self.stride}-{self.reach}"


def load_targets(chunk_set: ChunkSet, split: str, full_chunks: bool) -> TargetSet:
    """Gather a split's targets with their classes' ingredients.

    Args:
        chunk_set: the prepared data.
        split: an evaluation split.
        full_chunks: drop each document's remainder, as training does; otherwise keep all targets.

    Raises:
        ValueError: if the split has no documents, or one without a full chunk.
    """
    documents = chunk_set.documents(split)
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
        order, distance = target_orders(document, chunk_set.bos_token_id, MAX_ORDER)
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


def iter_rows(
    targets: TargetSet, form: EvaluationFormat, plan: RowPlan, batch_size_tokens: int
) -> Iterator[RowBatch]:
    """Yield all rows of a target set, about `batch_size_tokens` inputs at a time.

    Raises:
        ValueError: if the row length does not fit the format.
    """
    if plan.table.dropout:
        plan = replace(plan, table=replace(plan.table, dropout=0.0))
    if form.stride is None:
        yield from _training_rows(targets, plan, batch_size_tokens)
    else:
        yield from _stride_rows(targets, form, plan, batch_size_tokens)


def _training_rows(targets: TargetSet, plan: RowPlan, batch_size_tokens: int) -> Iterator[RowBatch]:
    chunks = targets.tokens.reshape(-1, plan.chunk_length)
    index = np.arange(chunks.size).reshape(-1, plan.row_length)
    rows_per_chunk = plan.chunk_length // plan.row_length
    donors = None
    if plan.table.source == "foreign" and not plan.ablated:
        chunk_documents = targets.document[:: plan.chunk_length]
        donors = donor_chunks(chunk_documents, np.arange(len(chunks)), plan.table.seed)
    # Whole chunks make the table's fields; their rows may then be scored in several passes.
    chunks_per_step = max(1, batch_size_tokens // plan.chunk_length)
    rows_per_pass = max(1, batch_size_tokens // plan.row_length)
    for first in range(0, len(chunks), chunks_per_step):
        chosen = np.arange(first, min(first + chunks_per_step, len(chunks)))
        rows = chunk_rows(
            chunks[chosen],
            plan.row_length,
            plan.bos_token_id,
            table=plan.table,
            chunk_indices=chosen,
            foreign=None if donors is None else chunks[donors[chosen]],
            ablate=plan.ablated,
        )
        rows["target_index"] = index[first * rows_per_chunk :][: len(rows["input_ids"])]
        yield from _cut(rows, rows_per_pass)


def _stride_rows(
    targets: TargetSet, form: EvaluationFormat, plan: RowPlan, batch_size_tokens: int
) -> Iterator[RowBatch]:
    assert form.stride is not None
    rows_per_pass = max(1, batch_size_tokens // plan.row_length)
    waiting: list[dict[str, IntArray]] = []
    starts = targets.document_starts
    for start, end in pairwise(starts):
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
        rows["target_index"] = np.where(scored, rows["target_index"] + start, -1)
        waiting.append(rows)
        # Windows of several documents share a pass.
        if sum(len(part["input_ids"]) for part in waiting) >= rows_per_pass:
            joined = {name: np.concatenate([part[name] for part in waiting]) for name in rows}
            full = len(joined["input_ids"]) // rows_per_pass * rows_per_pass
            yield from _cut({name: part[:full] for name, part in joined.items()}, rows_per_pass)
            waiting = [{name: part[full:] for name, part in joined.items()}]
    if waiting:
        joined = {name: np.concatenate([part[name] for part in waiting]) for name in waiting[0]}
        yield from _cut(joined, rows_per_pass)


def _cut(rows: dict[str, IntArray], rows_per_pass: int) -> Iterator[RowBatch]:
    for first in range(0, len(rows["input_ids"]), rows_per_pass):
        part = {name: array[first : first + rows_per_pass] for name, array in rows.items()}
        yield RowBatch(
            input_ids=part["input_ids"],
            shift_labels=part["shift_labels"],
            target_index=part["target_index"],
            table={name: array for name, array in part.items() if name.startswith("table_")},
        )
