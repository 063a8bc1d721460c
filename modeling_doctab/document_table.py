"""The document table as tensors (Section 3.3): whole rows, and the next token during generation."""

from typing import NamedTuple

import torch
from torch import nn


class DocumentTable(NamedTuple):
    """What the lookup returns for each position; int64 tensors [rows, length].

    Attributes:
        order: length n of the matched suffix in tokens; 0 at no match.
        candidate: the token that followed the latest match; -1 at no match.
        distance: t - s in tokens; 0 at no match.
    """

    order: torch.Tensor
    candidate: torch.Tensor
    distance: torch.Tensor


def lookup_document_table(
    input_ids: torch.Tensor,
    max_order: int = 4,
    segment_ids: torch.Tensor | None = None,
    reach: int | None = None,
) -> DocumentTable:
    """Look every position's context up in its row so far (Section 3.3).

    For position t, n is the largest number (at most `max_order`) such that the last n inputs
    x[t-n+1..t] occurred earlier in the row, ending at some s < t; the latest such s gives the
    candidate x[s+1] and the distance t - s.

    One stable sort an order: positions with the same n-gram become neighbours in order of
    position, so each one's predecessor is its latest earlier occurrence. An n-gram is identified
    by the pair of (n-1)-grams that end at t and t - 1, so ids stay below length^2 for any
    vocabulary.

    Args:
        input_ids: [rows, length] integers. A negative id is padding: it matches nothing.
        max_order: the longest suffix, 1 to 8 tokens.
        segment_ids: [rows, length] or None; neither a suffix nor a match crosses a change of id.
        reach: a match counts only if t - s < reach; where the longest match lies further back,
            the longest one inside counts. None for no limit.

    Returns:
        A DocumentTable on the device of `input_ids`.

    Raises:
        ValueError: if a shape, type or bound is wrong.
    """
    _check_lookup_arguments(input_ids, max_order, segment_ids, reach)
    ids = input_ids.long()
    rows, length = ids.shape
    order = torch.zeros_like(ids)
    distance = torch.zeros_like(ids)
    if length < 2:
        return DocumentTable(order, torch.full_like(ids, -1), distance)

    position = torch.arange(length, device=ids.device).expand(rows, length)
    key = _segmented_tokens(ids, segment_ids, position)
    for n in range(1, max_order + 1):
        gram, previous = _rank(key)
        gap = position - previous
        found = previous >= 0
        if reach is not None:
            found &= gap < reach
        order = torch.where(found, n, order)
        distance = torch.where(found, gap, distance)
        key = gram * length + nn.functional.pad(gram[:, :-1], (1, 0))
        # The first n positions have no (n+1)-gram: a key that stands nowhere else.
        key = torch.where(position < n, length * length + position, key)
    source = (position - distance + 1).clamp_max(length - 1)
    candidate = torch.where(order > 0, ids.gather(1, source), -1)
    return DocumentTable(order, candidate, distance)


def _segmented_tokens(
    ids: torch.Tensor, segment_ids: torch.Tensor | None, position: torch.Tensor
) -> torch.Tensor:
    """A key that equals another position's only for the same token in the same segment.

    A suffix that crosses a change of segment then contains the one place of that change, so it
    occurs nowhere else and never matches: no further check is needed.
    """
    length = ids.shape[1]
    key = ids
    if segment_ids is not None:
        changed = segment_ids[:, 1:] != segment_ids[:, :-1]
        run = nn.functional.pad(changed.long().cumsum(1), (1, 0))
        key = key * length + run
    return torch.where(ids < 0, -1 - position, key)


def _rank(key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Name equal keys of a row by one small number, and find each one's latest predecessor.

    Args:
        key: [rows, length].

    Returns:
        `name` [rows, length] in 0 .. length - 1, equal where the keys are equal; `previous`
        [rows, length], the last earlier position with the same key, or -1.
    """
    ordered, where = torch.sort(key, dim=1, stable=True)
    same = nn.functional.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
    before = nn.functional.pad(where[:, :-1], (1, 0))
    name = torch.empty_like(key).scatter_(1, where, (~same).long().cumsum(1) - 1)
    previous = torch.empty_like(key).scatter_(1, where, torch.where(same, before, -1))
    return name, previous


def lookup_last(
    history: torch.Tensor,
    max_order: int = 4,
    bos_token_id: int | None = None,
    reach: int | None = None,
) -> DocumentTable:
    """The table's fields at the last position of each row: one step of generation.

    Equals the last column of `lookup_document_table` on the same rows, split at BOS, at the cost
    of `max_order` comparisons of the history instead of as many sorts.

    Args:
        history: [rows, length >= 1] token ids so far; negative ids are padding.
        max_order: the longest suffix.
        bos_token_id: the id that opens a document; a match lies at or after the last one.
        reach: as in `lookup_document_table`.

    Returns:
        A DocumentTable of [rows, 1] tensors.
    """
    last = history.shape[1] - 1
    position = torch.arange(last, dtype=torch.int32, device=history.device)
    earlier, own = history[:, :-1], history[:, -1:]
    matches = (earlier == own) & (own >= 0)
    if bos_token_id is not None:
        # A document holds BOS once, so no longer suffix can cross its beginning and still match.
        is_bos = history == bos_token_id
        start = torch.where(is_bos[:, 1:], position + 1, 0).amax(1, keepdim=True) if last else 0
        matches &= position >= start
    if reach is not None:
        matches &= position > last - reach
    level = matches.to(torch.int32)
    for lag in range(1, min(max_order, last + 1)):
        own = history[:, last - lag : last - lag + 1]
        longer = (history[:, : last - lag] == own) & (own >= 0)
        matches = nn.functional.pad(longer & matches[:, lag:], (lag, 0))
        level += matches
    # The longest match wins, and among equals the latest: one maximum finds it.
    best = torch.where(level > 0, level * (last + 1) + position, 0)
    best = best.amax(1, keepdim=True).long() if last else history.new_zeros(len(history), 1)
    order = best // (last + 1)
    distance = torch.where(order > 0, last - best % (last + 1), 0)
    candidate = torch.where(order > 0, history.gather(1, (last - distance + 1).clamp_max(last)), -1)
    return DocumentTable(order, candidate, distance)


class DocumentTableEmbedding(nn.Module):
    """The tables E and G of Section 3.3: a lookup result becomes an input vector.

    E (`candidate_embedding`) is [orders x V, hidden_size], G (`state_embedding`) is
    [orders x buckets + 1, hidden_size], its last row for "no match". Both start at zero, so a
    model with the table starts identical to its base.
    """

    def __init__(self, vocab_size: int, hidden_size: int, orders: int, num_buckets: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.orders = orders
        self.num_buckets = num_buckets
        self.candidate_embedding = nn.Embedding(orders * vocab_size, hidden_size)
        self.state_embedding = nn.Embedding(orders * num_buckets + 1, hidden_size)

    def forward(self, table: DocumentTable, dtype: torch.dtype) -> torch.Tensor:
        """Sum of the candidate's and the state's vectors, [rows, length, hidden_size]."""
        matched = table.order > 0
        level = (table.order - 1).clamp_min(0)
        index = torch.where(matched, level * self.vocab_size + table.candidate, 0)
        candidate = self.candidate_embedding(index).to(dtype) * matched.unsqueeze(-1)
        return candidate + self.state_embedding(self.state(table)).to(dtype)

    def state(self, table: DocumentTable) -> torch.Tensor:
        """Row of G for each position, [rows, length]."""
        # Exact for every distance, where a floating-point log2 need not be.
        powers = 2 ** torch.arange(1, self.num_buckets, device=table.distance.device)
        bucket = torch.bucketize(table.distance.contiguous(), powers, right=True)
        row = (table.order - 1) * self.num_buckets + bucket
        return torch.where(table.order > 0, row, self.orders * self.num_buckets)


def hash_bigrams(input_ids: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Row of the hashed bigram table for (x[t-1], x[t]), [rows, length - 1] (Section 3.4).

    A 32-bit multiply-xor hash: h = x[t-1] * 0x9E3779B1 + x[t] * 0x85EBCA77; h ^= h >> 15;
    h *= 0xC2B2AE3D; h ^= h >> 13, each modulo 2^32; the row is h modulo `num_rows`.
    """
    mask = 0xFFFFFFFF
    h = (input_ids[:, :-1] * 0x9E3779B1 + input_ids[:, 1:] * 0x85EBCA77) & mask
    h = h ^ (h >> 15)
    h = (h * 0xC2B2AE3D) & mask
    h = h ^ (h >> 13)
    return h % num_rows


def _check_lookup_arguments(
    input_ids: torch.Tensor,
    max_order: int,
    segment_ids: torch.Tensor | None,
    reach: int | None,
) -> None:
    if input_ids.dim() != 2 or input_ids.is_floating_point():
        raise ValueError(
            "input_ids must be integers [rows, length]; got "
            f"{input_ids.dtype} {list(input_ids.shape)}."
        )
    if not 1 <= max_order <= 8:
        raise ValueError(f"max_order must be 1 to 8; got {max_order}.")
    if segment_ids is not None and segment_ids.shape != input_ids.shape:
        raise ValueError(
            f"segment_ids must have the shape of input_ids, {list(input_ids.shape)}; got "
            f"{list(segment_ids.shape)}."
        )
    if reach is not None and reach < 1:
        raise ValueError(f"reach must be at least 1 token; got {reach}. Use None for no limit.")
