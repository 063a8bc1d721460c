"""The document table's lookup for training and scoring, on the CPU (Section 3.3).

For each order a hash table maps an n-gram to the last position where it ended. A slot holds only a
position: the n-gram itself is read from the row and compared, so a collision costs a probe and
never a wrong answer. A position enters the tables of the orders that its segment has room for, so
a position inside the segment is all that a match must be. Every position takes about one probe an
order, whatever the row looks like.

The kernels release the GIL, so a loader can look up several micro-batches in threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

try:
    import numba
except ImportError as error:  # reported when a lookup is asked for, so that `describe` still runs
    numba = None
    _numba_error = error

MAX_ORDER = 8  # of `max_order`; the hash tables grow with it
_PACKED_ORDERS = 4  # four 16-bit ids fill the 64-bit word of the fast kernel
_HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class TableFields(NamedTuple):
    """What the lookup returns, each [rows, length]. No match is 0 / -1 / 0.

    Attributes:
        order: int8, the length n of the longest match.
        candidate: int32, the token after the latest such match.
        distance: int32, how many positions back that match ended.
    """

    order: np.ndarray
    candidate: np.ndarray
    distance: np.ndarray


def lookup_rows(
    input_ids: np.ndarray,
    max_order: int = 4,
    segment_ids: np.ndarray | None = None,
    reach: int | None = None,
) -> TableFields:
    """Find, for every position, the latest earlier occurrence of its longest repeated suffix.

    Equals `modeling_doctab.naive.lookup_document_table` on each row.

    Args:
        input_ids: [rows, length] integers that fit in int32; each row is searched alone. A negative
            id is padding: no suffix that holds one matches.
        max_order: the longest suffix to look for, 1 to 8.
        segment_ids: [rows, length] integers; a segment is a maximal run of equal ids, and no n-gram
            and no match crosses from one into another. None: each row is one segment.
        reach: a match counts when it ended fewer than `reach` positions back. None: no limit.

    Returns:
        `TableFields`, each [rows, length].

    Raises:
        ValueError: if a shape, dtype, id, order or reach is out of range.
        ImportError: if numba cannot be imported.
    """
    input_ids = np.asarray(input_ids)
    _check_arguments(input_ids, max_order, segment_ids, reach)
    rows, length = input_ids.shape
    fields = TableFields(
        order=np.zeros((rows, length), np.int8),
        candidate=np.full((rows, length), -1, np.int32),
        distance=np.zeros((rows, length), np.int32),
    )
    if input_ids.size == 0:
        return fields
    if numba is None:
        raise ImportError(
            "data_scripts.lookup needs numba, which could not be imported "
            f"({_numba_error}). Install it: pip install 'numba>=0.61'."
        )
    smallest, largest = int(input_ids.min()), int(input_ids.max())
    if smallest < -(2**31) or largest >= 2**31:
        raise ValueError(
            f"input_ids must fit in int32; found {smallest} to {largest}. "
            "Look for a wrong dtype or an overflow where the ids were made."
        )
    tokens = np.ascontiguousarray(input_ids, dtype=np.int32)
    starts = _segment_starts(segment_ids, rows, length)
    num_slots = max(16, 1 << (2 * length - 1).bit_length())  # at most half full
    slots = np.empty((max_order, num_slots), np.int32)
    span = length if reach is None else reach
    if max_order <= _PACKED_ORDERS and smallest >= 0 and largest < 2**16:
        _lookup_packed(tokens, starts, max_order, span, slots, *fields)
    else:
        _lookup_general(tokens, starts, max_order, span, slots, *fields)
    return fields


def _check_arguments(
    input_ids: np.ndarray, max_order: int, segment_ids: np.ndarray | None, reach: int | None
) -> None:
    if input_ids.ndim != 2 or input_ids.dtype.kind not in "iu":
        raise ValueError(
            "input_ids must be integers of shape [rows, length]; found "
            f"{input_ids.dtype} of shape {list(input_ids.shape)}. Pass one row as ids[None, :]."
        )
    if not 1 <= max_order <= MAX_ORDER:
        raise ValueError(
            f"max_order must be 1 to {MAX_ORDER}; found {max_order}. The paper uses 4."
        )
    if reach is not None and reach < 1:
        raise ValueError(f"reach must be at least 1; found {reach}. Use None for no limit.")
    if segment_ids is not None and np.shape(segment_ids) != input_ids.shape:
        raise ValueError(
            f"segment_ids must have the shape of input_ids, {list(input_ids.shape)}; "
            f"found {list(np.shape(segment_ids))}."
        )


def _segment_starts(segment_ids: np.ndarray | None, rows: int, length: int) -> np.ndarray:
    """First position of each position's segment: int32 [rows, length]; [1, 1] if unsegmented."""
    if segment_ids is None:
        return np.zeros((1, 1), np.int32)
    segment_ids = np.asarray(segment_ids)
    is_start = np.ones((rows, length), bool)
    is_start[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = np.where(is_start, np.arange(length, dtype=np.int32), np.int32(0))
    return np.ascontiguousarray(np.maximum.accumulate(starts, axis=1))


def _compiled(kernel: Any) -> Any:
    """Compile on the first call; keep the machine code on disk where numba has a place for it."""
    if numba is None:
        return kernel
    try:
        return numba.njit(nogil=True, cache=True)(kernel)
    except RuntimeError:  # no writable cache folder: a read-only checkout, a zip
        return numba.njit(nogil=True)(kernel)


@_compiled
def _lookup_packed(tokens, starts, max_order, span, slots, order, candidate, distance):
    """Ids below 65,536 and orders to 4: the last four ids are one word, compared under a mask."""
    rows, length = tokens.shape
    last_slot = slots.shape[1] - 1
    shift = np.uint64(64)
    while (1 << (64 - int(shift))) <= last_slot:
        shift -= np.uint64(1)
    words = np.empty(length, np.uint64)
    segmented = starts.shape[1] == length and starts.shape[0] == rows
    for row in range(rows):
        slots[:] = -1
        word = np.uint64(0)
        for t in range(length):
            word = (word << np.uint64(16)) | np.uint64(tokens[row, t])
            words[t] = word
            start = starts[row, t] if segmented else 0
            known = True  # whether the suffix one shorter is in its table: if not, this one is new
            for n in range(1, min(max_order, t - start + 1) + 1):
                mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - 16 * n)
                key = word & mask
                mixed = key * _HASH_MULTIPLIER
                mixed = (mixed ^ (mixed >> np.uint64(32))) * _HASH_MULTIPLIER
                slot = np.int64(mixed >> shift)
                s = slots[n - 1, slot]
                while s >= 0 and not (known and (words[s] ^ word) & mask == np.uint64(0)):
                    slot = (slot + 1) & last_slot
                    s = slots[n - 1, slot]
                slots[n - 1, slot] = t
                known = s >= 0
                if known and s >= start and t - s < span:
                    order[row, t] = n
                    candidate[row, t] = tokens[row, s + 1]
                    distance[row, t] = t - s


@_compiled
def _lookup_general(tokens, starts, max_order, span, slots, order, candidate, distance):
    """Any ids, any order: the hash runs over the suffix, the comparison over the row."""
    rows, length = tokens.shape
    last_slot = slots.shape[1] - 1
    shift = np.uint64(64)
    while (1 << (64 - int(shift))) <= last_slot:
        shift -= np.uint64(1)
    segmented = starts.shape[1] == length and starts.shape[0] == rows
    for row in range(rows):
        slots[:] = -1
        ids = tokens[row]
        for t in range(length):
            start = starts[row, t] if segmented else 0
            known = True  # whether the suffix one shorter is in its table: if not, this one is new
            mixed = np.uint64(0)
            for n in range(1, min(max_order, t - start + 1) + 1):
                if ids[t - n + 1] < 0:
                    break
                mixed = (mixed ^ np.uint64(ids[t - n + 1])) * _HASH_MULTIPLIER
                mixed ^= mixed >> np.uint64(32)
                slot = np.int64((mixed * _HASH_MULTIPLIER) >> shift)
                s = slots[n - 1, slot]
                while s >= 0:
                    if known:
                        k = 0
                        while k < n and ids[s - k] == ids[t - k]:
                            k += 1
                        if k == n:
                            break
                    slot = (slot + 1) & last_slot
                    s = slots[n - 1, slot]
                slots[n - 1, slot] = t
                known = s >= 0
                if known and s >= start and t - s < span:
                    order[row, t] = n
                    candidate[row, t] = ids[s + 1]
                    distance[row, t] = t - s
