"""Short documents -> packed rows, as the reference's loader packs them, but frozen (Section 4.9).

Every row opens with BOS. Into the rest goes the longest document of a buffer that fits, its own BOS
before it, until none fits; then the shortest is cropped to fill the row, and its end is lost. There
is no padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

BUFFER_DOCUMENTS = 1000  # the reference's buffer ..
BATCH_DOCUMENTS = 128  # .. and how many documents at a time refill it


@dataclass
class PackedRow:
    """One packed row.

    Attributes:
        targets: [row_length], the row without its first BOS.
        segments: (first input position, index of the document) of each document in the row.
    """

    targets: np.ndarray
    segments: list[tuple[int, int]] = field(default_factory=list)


def pack_rows(
    batches: Iterable[list[np.ndarray]],
    row_length: int,
    bos_token_id: int,
    dtype: np.dtype,
    buffer_documents: int = BUFFER_DOCUMENTS,
) -> Iterator[PackedRow]:
    """Pack documents into rows by best fit.

    A row holds row_length + 1 ids, as the reference's: the inputs are all but the last, the targets
    all but the first. Ties go to the document that has been in the buffer for longest. When the
    documents run out, the buffer is emptied; what does not fill a row at the very end is left out.

    Args:
        batches: documents in order, [num_tokens] integers each, BOS not among them, as many at a
            time as refill the buffer.
        row_length: inputs, and targets, of a row.
        bos_token_id: what opens each document.
        dtype: of the rows.
        buffer_documents: refill the buffer before each placement until it holds so many.

    Yields:
        Full rows, in order.

    Raises:
        ValueError: if a size is out of range.
    """
    if row_length < 1 or buffer_documents < 1:
        raise ValueError(
            "row_length and buffer_documents must be at least 1; found "
            f"{row_length} and {buffer_documents}."
        )
    buffer = _Buffer(batches, buffer_documents)
    capacity = row_length + 1
    while True:
        row = np.empty(capacity, dtype)
        segments: list[tuple[int, int]] = []
        position = 0
        while position < capacity:
            buffer.refill()
            if not buffer.lengths.size:
                return
            # A document of n tokens takes n + 1 places. The last place of a row is a target only:
            # a document there shows nothing but its BOS.
            index, tokens = buffer.take(capacity - position)
            tokens = tokens[: capacity - position - 1]
            row[position] = bos_token_id
            row[position + 1 : position + 1 + len(tokens)] = tokens
            segments.append((position, index))
            position += 1 + len(tokens)
        yield PackedRow(row[1:], segments)


class _Buffer:
    """Documents that wait for a place, oldest first."""

    def __init__(self, batches: Iterable[list[np.ndarray]], buffer_documents: int) -> None:
        self._batches = iter(batches)
        self._waiting: list[tuple[int, np.ndarray]] = []
        self._size = buffer_documents
        self._num_read = 0
        self.lengths = np.empty(0, np.int64)  # BOS counted

    def refill(self) -> None:
        """Read batches until the buffer is full, or the documents run out."""
        while len(self._waiting) < self._size:
            batch = next(self._batches, None)
            if batch is None:
                return
            # Copied: a slice of a memory map would keep its whole file in memory.
            batch = [np.array(tokens) for tokens in batch]
            self._waiting += [(self._num_read + i, tokens) for i, tokens in enumerate(batch)]
            self._num_read += len(batch)
            new = np.array([len(tokens) + 1 for tokens in batch], np.int64)
            self.lengths = np.concatenate([self.lengths, new])

    def take(self, room: int) -> tuple[int, np.ndarray]:
        """The longest document that fits into `room` places, or else the shortest of all."""
        fitting = np.where(self.lengths <= room, self.lengths, -1)
        place = int(np.argmax(fitting))
        if fitting[place] < 0:
            place = int(np.argmin(self.lengths))
        self.lengths = np.delete(self.lengths, place)
        return self._waiting.pop(place)
