"""Chunks, documents and packed rows -> what the model sees (Sections 3.2, 3.3, 4.6).

Training and scoring both call these functions, so they cannot disagree about a row. *The table
sees the chunk, the model sees the row*: the lookup runs on the chunk's inputs [BOS, y_0, y_1, ..]
and its result is then cut into rows together with them. Slot 0 of every row shows BOS to the model,
but keeps the chunk's table state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_scripts.keyed_random import keyed_bits, keyed_uniform
from data_scripts.lookup import MAX_ORDER, TableFields, lookup_rows

SOURCES = ("document", "foreign", "shuffled", "empty")
IGNORED_LABEL = -100  # cross entropy leaves these targets out

# One word for each use of randomness, so that no two uses of one seed can coincide.
_DROPOUT, _SHUFFLE, _DONOR = 1, 2, 3


@dataclass(frozen=True)
class TableOptions:
    """How the table's fields are made.

    Attributes:
        orders: the longest suffix that the lookup tries, 1 to 8 (the paper: 4).
        source: "document", the lookup; or a control. Two keep the fields' statistics and cut their
            tie to the text. "foreign": the fields of the same positions in a chunk of another
            document. "shuffled": at t the fields of a random position t' <= t of the same chunk,
            so that no field carries a token from after t. "empty": "no match" everywhere, which
            leaves the table one learned vector, added to every input.
        dropout: probability that a row gets "no match" at every position (Section 4.5).
        seed: of dropout and the controls; they are keyed by (seed, chunk, row or position).
    """

    orders: int = 4
    source: str = "document"
    dropout: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.orders <= MAX_ORDER:
            raise ValueError(f"orders must be 1 to {MAX_ORDER}; found {self.orders}.")
        if self.source not in SOURCES:
            raise ValueError(f"source must be one of {', '.join(SOURCES)}; found {self.source!r}.")
        if not 0.0 <= self.dropout <= 1.0:
            raise ValueError(f"dropout must be between 0 and 1; found {self.dropout}.")


def chunk_rows(
    targets: np.ndarray,
    row_length: int,
    bos_token_id: int,
    table: TableOptions | None = None,
    chunk_indices: np.ndarray | None = None,
    foreign: np.ndarray | None = None,
    ablate: bool = False,
) -> dict[str, np.ndarray]:
    """Cut chunks into rows in the training format, with the table's fields.

    The table is split where a target is BOS: chunks of one document never contain it, and packed
    rows (Section 4.9) are chunks of one row in which it opens every further document.

    Args:
        targets: [num_chunks, chunk_length] integers, the chunks' targets.
        row_length: inputs in a row; must divide `chunk_length`.
        bos_token_id: the input in slot 0 of every row, and of the stream that the table sees.
        table: None for an arm without a table: no fields are made.
        chunk_indices: [num_chunks], each chunk's index in its split; the key of dropout and
            shuffling, needed by those two only.
        foreign: [num_chunks, chunk_length], targets of the donors that `donor_chunks` names, needed
            by `source="foreign"` only.
        ablate: give "no match" at every position, to measure what a trained model uses.

    Returns:
        int64 arrays [num_chunks * chunk_length // row_length, row_length]; row r of chunk i is at
        i * rows_per_chunk + r. `input_ids` and `shift_labels` (the targets, aligned with the
        inputs); with a table also `table_order`, `table_candidate` and `table_distance`.

    Raises:
        ValueError: if the shapes do not fit, or an option lacks what it needs.
    """
    targets = _as_chunks(targets, "targets")
    num_chunks, chunk_length = targets.shape
    if row_length < 1 or chunk_length % row_length:
        raise ValueError(
            f"row_length must divide chunk_length; found {row_length} and {chunk_length}. "
            f"Use {chunk_length} divided by a whole number."
        )
    inputs = _streams(targets, bos_token_id)
    rows = {
        "input_ids": inputs.reshape(-1, row_length).copy(),
        "shift_labels": targets.reshape(-1, row_length),
    }
    rows["input_ids"][:, 0] = bos_token_id
    if table is None:
        return rows
    if ablate or table.source == "empty":
        return rows | _no_match(rows["input_ids"].shape)
    fields = _chunk_fields(inputs, bos_token_id, table, chunk_indices, foreign)
    by_row = [field.reshape(-1, row_length) for field in fields]
    if table.dropout > 0.0:
        keys = _required_indices(chunk_indices, num_chunks, "dropout")
        row_numbers = np.arange(chunk_length // row_length)
        uniform = keyed_uniform(table.seed, _DROPOUT, keys[:, None], row_numbers[None, :])
        dropped = (uniform < table.dropout).reshape(-1)
        for field, empty in zip(by_row, (0, -1, 0), strict=True):
            field[dropped] = empty
    return rows | _named(*by_row)


def packed_rows(
    targets: np.ndarray,
    bos_token_id: int,
    table: TableOptions | None = None,
    ablate: bool = False,
) -> dict[str, np.ndarray]:
    """Packed rows: every row opens with BOS, and so does every further document inside it.

    Attention and positions run over the whole row, as in the reference's loader; the table is split
    at BOS. Equal to `chunk_rows` with one row a chunk, plus the segments.

    Args:
        targets: [rows, row_length] integers, the rows without their first BOS.
        bos_token_id: the id that opens each document.
        table: as for `chunk_rows`; `source` must be "document" and `dropout` 0.
        ablate: as for `chunk_rows`.

    Returns:
        The arrays of `chunk_rows`, and `segment_ids` int64 [rows, row_length], 0 for the document
        that opens the row.

    Raises:
        ValueError: as `chunk_rows`.
    """
    targets = _as_chunks(targets, "targets")
    if table is not None and (table.source != "document" or table.dropout):
        raise ValueError(
            "packed_rows makes the fields of source 'document' without dropout; found "
            f"source {table.source!r}, dropout {table.dropout}. Use chunk_rows for the others."
        )
    rows = chunk_rows(targets, targets.shape[1], bos_token_id, table, ablate=ablate)
    return rows | {"segment_ids": segments_at_bos(rows["input_ids"], bos_token_id)}


def stride_windows(
    tokens: np.ndarray,
    window: int,
    stride: int,
    bos_token_id: int,
    table: TableOptions | None = None,
    reach: str = "chunk",
    chunk_length: int | None = None,
    ablate: bool = False,
) -> dict[str, np.ndarray]:
    """Cut a document into overlapping windows, each target scored once (Section 4.6).

    Window k starts at target k * stride with BOS in slot 0. The first window scores all its
    targets, a later one those that no earlier one has scored. The last may be short: it is filled
    up with BOS at its end, which a causal model cannot see from the targets before.

    Args:
        tokens: [num_targets] integers, one document's targets.
        window: inputs in a window.
        stride: targets between the starts of two windows, 1 to `window`.
        bos_token_id: the input in slot 0 of every window.
        table: None for an arm without a table; `source` must be "document" and `dropout` 0.
        reach: "chunk": each target's fields are those of the training chunk it lies in, wherever
            the windows are cut. "window": a lookup on the window's own inputs.
        chunk_length: needed for `reach="chunk"`; with "window" it bounds the distance of a match,
            if given, as in training.
        ablate: give "no match" at every position.

    Returns:
        int64 arrays [num_windows, window]: `input_ids`; `shift_labels`, -100 where the window does
        not score; `target_index`, the scored target's index in the document, -1 elsewhere; and with
        a table its three fields.

    Raises:
        ValueError: if the shapes do not fit, or an option lacks what it needs.
    """
    tokens = np.asarray(tokens)
    _check_windows(tokens, window, stride, table, reach, chunk_length)
    num_targets = len(tokens)
    num_windows = max(0, -(-(num_targets - window) // stride)) + (1 if num_targets else 0)
    starts = np.arange(num_windows)[:, None] * stride
    index = starts + np.arange(window)[None, :]
    inside = index < num_targets
    stream = np.append(np.int64(bos_token_id), tokens.astype(np.int64))
    inputs = np.where(inside, stream[np.minimum(index, num_targets)], bos_token_id)
    inputs[:, :1] = bos_token_id
    scored_before = np.where(starts > 0, starts - stride + window, 0)
    scored = inside & (index >= scored_before)
    rows = {
        "input_ids": inputs,
        "shift_labels": np.where(
            scored, stream[np.minimum(index + 1, num_targets)], np.int64(IGNORED_LABEL)
        ),
        "target_index": np.where(scored, index, -1),
    }
    if table is None:
        return rows
    if ablate:
        return rows | _no_match(inputs.shape)
    if reach == "window":
        return rows | _named(*lookup_rows(inputs, table.orders, reach=chunk_length))
    by_target = _document_fields(tokens, chunk_length, bos_token_id, table.orders)
    clipped = np.minimum(index, max(num_targets - 1, 0))
    fields = [
        np.where(inside, field[clipped], empty)
        for field, empty in zip(by_target, (0, -1, 0), strict=True)
    ]
    return rows | _named(*fields)


def donor_chunks(
    chunk_documents: np.ndarray, chunk_indices: np.ndarray, seed: int = 0
) -> np.ndarray:
    """The chunk of another document whose fields each chunk gets under `source="foreign"`.

    Args:
        chunk_documents: [num_chunks], the document of every chunk of the split.
        chunk_indices: [n], the chunks that need a donor.
        seed: `TableOptions.seed`.

    Returns:
        int64 [n], indices into the split; a pure function of seed and chunk.

    Raises:
        ValueError: if the split has chunks of one document only.
    """
    documents = np.asarray(chunk_documents)
    indices = np.asarray(chunk_indices, np.int64)
    if len(documents) == 0 or (documents == documents[0]).all():
        raise ValueError(
            "source 'foreign' needs chunks of at least two documents; this split has one. "
            "Use source 'shuffled', or a larger split."
        )
    num_chunks = np.uint64(len(documents))
    donors = np.empty(len(indices), np.int64)
    pending = np.arange(len(indices))
    attempt = 0
    while len(pending):  # rejection: each attempt is another draw, keyed by its number
        bits = keyed_bits(seed, _DONOR, indices[pending], attempt)
        donors[pending] = (bits % num_chunks).astype(np.int64)
        pending = pending[documents[donors[pending]] == documents[indices[pending]]]
        attempt += 1
    return donors


def segments_at_bos(input_ids: np.ndarray, bos_token_id: int) -> np.ndarray:
    """Number each row's documents from 0: int64 [rows, length]; a BOS after slot 0 opens one."""
    return np.cumsum(input_ids == bos_token_id, axis=1) - (input_ids[:, :1] == bos_token_id)


def _as_chunks(targets: np.ndarray, name: str) -> np.ndarray:
    targets = np.asarray(targets)
    if targets.ndim != 2 or targets.shape[1] < 1 or targets.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be integers of shape [num_chunks, chunk_length]; found "
            f"{targets.dtype} of shape {list(targets.shape)}."
        )
    return targets.astype(np.int64)


def _streams(targets: np.ndarray, bos_token_id: int) -> np.ndarray:
    """The inputs of whole chunks, [BOS, y_0, .., y_{C-2}]: int64 [num_chunks, chunk_length]."""
    inputs = np.empty(targets.shape, np.int64)
    inputs[:, 0] = bos_token_id
    inputs[:, 1:] = targets[:, :-1]
    return inputs


def _lookup_streams(inputs: np.ndarray, bos_token_id: int, orders: int) -> list[np.ndarray]:
    """Fields of chunk streams as int64, split at every BOS after slot 0."""
    segments = None
    if (inputs[:, 1:] == bos_token_id).any():
        segments = segments_at_bos(inputs, bos_token_id)
    return [field.astype(np.int64) for field in lookup_rows(inputs, orders, segments)]


def _chunk_fields(
    inputs: np.ndarray,
    bos_token_id: int,
    table: TableOptions,
    chunk_indices: np.ndarray | None,
    foreign: np.ndarray | None,
) -> list[np.ndarray]:
    """The fields of whole chunks from the table's source, before dropout."""
    if table.source == "foreign":
        if foreign is None:
            raise ValueError("source 'foreign' needs the donors' targets; pass foreign=.")
        donors = _as_chunks(foreign, "foreign")
        if donors.shape != inputs.shape:
            raise ValueError(
                f"foreign must have the shape of targets, {list(inputs.shape)}; "
                f"found {list(donors.shape)}."
            )
        inputs = _streams(donors, bos_token_id)
    fields = _lookup_streams(inputs, bos_token_id, table.orders)
    if table.source == "shuffled":
        keys = _required_indices(chunk_indices, len(inputs), "source 'shuffled'")
        positions = np.arange(inputs.shape[1])
        uniform = keyed_uniform(table.seed, _SHUFFLE, keys[:, None], positions[None, :])
        earlier = (uniform * (positions + 1)).astype(np.int64)
        fields = [np.take_along_axis(field, earlier, axis=1) for field in fields]
    return fields


def _document_fields(
    tokens: np.ndarray, chunk_length: int, bos_token_id: int, orders: int
) -> list[np.ndarray]:
    """Each target's fields in its training chunk, the last chunk possibly short: [num_targets]."""
    num_full = len(tokens) // chunk_length
    pieces = [tokens[: num_full * chunk_length].reshape(num_full, chunk_length)]
    if len(tokens) % chunk_length:
        pieces.append(tokens[None, num_full * chunk_length :])
    parts = [
        _lookup_streams(_streams(piece.astype(np.int64), bos_token_id), bos_token_id, orders)
        for piece in pieces
    ]
    return [np.concatenate([part[i].reshape(-1) for part in parts]) for i in range(3)]


def _check_windows(
    tokens: np.ndarray,
    window: int,
    stride: int,
    table: TableOptions | None,
    reach: str,
    chunk_length: int | None,
) -> None:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"tokens must be one document's integers, [num_targets]; found {tokens.dtype} of shape "
            f"{list(tokens.shape)}."
        )
    if not 1 <= stride <= window:
        raise ValueError(f"stride must be 1 to the window, {window}; found {stride}.")
    if reach not in ("chunk", "window"):
        raise ValueError(f"reach must be 'chunk' or 'window'; found {reach!r}.")
    if chunk_length is not None and chunk_length < 1:
        raise ValueError(f"chunk_length must be at least 1; found {chunk_length}.")
    if table is None:
        return
    if reach == "chunk" and chunk_length is None:
        raise ValueError("reach 'chunk' needs chunk_length; pass the chunk set's.")
    if table.source != "document" or table.dropout:
        raise ValueError(
            "stride_windows makes the fields of source 'document' without dropout; found "
            f"source {table.source!r}, dropout {table.dropout}. The controls live in chunk_rows."
        )


def _required_indices(
    chunk_indices: np.ndarray | None, num_chunks: int, needed_by: str
) -> np.ndarray:
    if chunk_indices is None or np.shape(chunk_indices) != (num_chunks,):
        found = "None" if chunk_indices is None else f"shape {list(np.shape(chunk_indices))}"
        raise ValueError(
            f"{needed_by} needs chunk_indices of shape [{num_chunks}], the chunks' places in their "
            f"split; found {found}."
        )
    return np.asarray(chunk_indices, np.int64)


def _named(order: np.ndarray, candidate: np.ndarray, distance: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "table_order": order.astype(np.int64, copy=False),
        "table_candidate": candidate.astype(np.int64, copy=False),
        "table_distance": distance.astype(np.int64, copy=False),
    }


def _no_match(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    fields = TableFields(
        np.zeros(shape, np.int64), np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
    )
    return _named(*fields)
