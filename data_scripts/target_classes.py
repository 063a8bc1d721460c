"""Order and distance of every target over its whole document (Section 3.5).

These depend on the document alone, never on a model, a row or the table, so every arm's losses can
be split by the same classes.
"""

from __future__ import annotations

import numpy as np

from data_scripts.lookup import MAX_ORDER, lookup_rows
from data_scripts.rows import segments_at_bos


def target_orders(
    tokens: np.ndarray, bos_token_id: int, max_order: int = 4
) -> tuple[np.ndarray, np.ndarray]:
    """For every target, the longest context that stood before it earlier in the document.

    With z = [BOS, y_0, .., y_{N-1}], target y_i stands at z[i + 1] and its context ends at z[i].
    "The last n inputs occurred earlier, followed by y_i" says that the (n+1)-gram ending at y_i
    occurred earlier, so this is the table's lookup on z with one order more, minus one: a match of
    order 1 alone means only that the target itself is not new.

    In a packed row (Section 4.9) BOS opens every further document, and no occurrence is looked for
    across one; BOS itself as a target has order 0.

    Args:
        tokens: [num_targets] integers, the document's targets in order.
        bos_token_id: the id in front of the first target.
        max_order: the longest context to look for, 1 to 7.

    Returns:
        order: int8 [num_targets], the largest n whose context recurs with this target; 0 if none.
        distance: int32 [num_targets], positions back to the latest such occurrence; 0 at order 0.

    Raises:
        ValueError: if `tokens` is not one-dimensional, or `max_order` is out of range.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 1:
        raise ValueError(
            f"tokens must be one document, [num_targets]; found shape {list(tokens.shape)}. "
            "Call once for each document."
        )
    if not 1 <= max_order < MAX_ORDER:
        raise ValueError(f"max_order must be 1 to {MAX_ORDER - 1}; found {max_order}.")
    stream = np.empty((1, len(tokens) + 1), np.int64)
    stream[0, 0] = bos_token_id
    stream[0, 1:] = tokens
    segments = None
    if (stream[0, 1:] == bos_token_id).any():
        segments = segments_at_bos(stream, bos_token_id)
    fields = lookup_rows(stream, max_order + 1, segments)
    order = np.maximum(fields.order[0, 1:] - 1, 0).astype(np.int8)
    distance = np.where(order > 0, fields.distance[0, 1:], 0).astype(np.int32)
    return order, distance
