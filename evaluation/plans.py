"""A checkpoint on a set in a format: its rows, its records' header, and whether the three fit."""

from __future__ import annotations

from data_scripts.chunk_set import ChunkSet
from evaluation.checkpoints import Checkpoint
from evaluation.formats import EvaluationFormat, RowPlan
from evaluation.records import RecordsHeader


def make_header(
    checkpoint: Checkpoint,
    chunk_set: ChunkSet,
    set_name: str,
    form: EvaluationFormat,
    ablated: bool,
) -> RecordsHeader:
    """What the scores of a checkpoint on a set are headed by."""
    return RecordsHeader(
        arm=checkpoint.arm,
        seed=checkpoint.seed,
        baseline=checkpoint.baseline,
        set_name=set_name,
        format=form.name,
        ablated=ablated,
        reach=form.reach,
        has_table=checkpoint.has_table,
        table_source=checkpoint.table.source,
        table_orders=checkpoint.table.orders,
        chunk_length=chunk_set.chunk_length,
        row_length=row_plan(checkpoint, chunk_set, ablated).row_length,
        checkpoint_sha256=checkpoint.sha256,
        data_sha256=chunk_set.fingerprint,
        targets_sha256=chunk_set.target_sha256(set_name),
        document_ids=tuple(chunk_set.document_list(set_name)["ids"]),
    )


def row_plan(checkpoint: Checkpoint, chunk_set: ChunkSet, ablated: bool = False) -> RowPlan:
    """An arm's rows: as long as it was trained on, but no longer than the set's chunks."""
    return RowPlan(
        row_length=min(checkpoint.row_length, chunk_set.chunk_length),
        chunk_length=chunk_set.chunk_length,
        bos_token_id=chunk_set.bos_token_id,
        table=checkpoint.table,
        ablated=ablated,
    )


def default_stride(checkpoint: Checkpoint, chunk_set: ChunkSet) -> int:
    """Half a row, as in Section 4.6."""
    return max(1, row_plan(checkpoint, chunk_set).row_length // 2)


def check_fit(
    checkpoint: Checkpoint, chunk_set: ChunkSet, form: EvaluationFormat, ablated: bool
) -> None:
    """Refuse a checkpoint that cannot be scored on a set in a format.

    Raises:
        ValueError: if its vocabulary, table or row length does not fit.
    """
    length = chunk_set.chunk_length
    if checkpoint.vocab_size < chunk_set.vocab_size:
        raise ValueError(
            f"A model must know the chunk set's tokens; {checkpoint.arm} has "
            f"{checkpoint.vocab_size} ids, {chunk_set.path} {chunk_set.vocab_size}. Build a set "
            "with the model's tokenizer."
        )
    # Packed rows are whole documents to the table, shorter than any chunk it was trained on.
    fits = checkpoint.table_reach == length or (
        form.packed and (checkpoint.table_reach or 0) >= length
    )
    if checkpoint.has_table and not fits:
        raise ValueError(
            f"{checkpoint.arm}'s table reaches {checkpoint.table_reach} tokens, but the chunks of "
            f"{chunk_set.path} have {length}. Score it on chunks of the length it was trained on."
        )
    row_length = row_plan(checkpoint, chunk_set, ablated).row_length
    if length % row_length:
        raise ValueError(
            f"The row length must divide the chunk length; got {row_length} "
            f"({checkpoint.arm}) and {length}."
        )
    if ablated and not checkpoint.has_table:
        raise ValueError(f"{checkpoint.arm} has no table to ablate. Leave it out.")
    if form.stride is None:
        return
    if form.stride > row_length:
        raise ValueError(
            f"--stride must be at most the row length; got {form.stride} and {row_length} "
            f"({checkpoint.arm}). Larger strides would leave targets out."
        )
    if checkpoint.table.source != "document":
        raise ValueError(
            f"{checkpoint.arm} has {checkpoint.table.source} table fields, which are made for "
            "chunks: it can be scored in the training format alone."
        )
