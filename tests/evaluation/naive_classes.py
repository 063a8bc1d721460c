"""Section 3.5 in plain loops: orders, distances, visibility and cells, one target at a time."""

from __future__ import annotations

from collections.abc import Sequence


def target_order(
    tokens: Sequence[int], position: int, bos_token_id: int, max_order: int = 4
) -> tuple[int, int]:
    """Order and distance of the target `tokens[position]` within its whole document.

    The inputs are BOS and the targets before; the target at position t is predicted from input t.
    """
    inputs = [bos_token_id, *tokens]
    t = position
    for n in range(max_order, 0, -1):
        if t - n + 1 < 0:
            continue
        for s in range(t - 1, n - 2, -1):
            same_context = inputs[s - n + 1 : s + 1] == inputs[t - n + 1 : t + 1]
            if same_context and tokens[s] == tokens[t]:
                return n, t - s
    return 0, 0


def row_inputs(
    tokens: Sequence[int], row_start: int, row_length: int, bos_token_id: int
) -> list[tuple[int, int | None]]:
    """Inputs of the row whose slot 0 predicts target `row_start`: (token, its index as a target).

    Slot 0 shows BOS and stands for no target.
    """
    row: list[tuple[int, int | None]] = [(bos_token_id, None)]
    for slot in range(1, row_length):
        place = row_start + slot - 1
        if place < len(tokens):
            row.append((tokens[place], place))
    return row


def is_visible(
    tokens: Sequence[int], position: int, distance: int, row_start: int, row_length: int
) -> bool:
    """Whether the source, target `position - distance`, is an input before the target."""
    slot = position - row_start
    seen = row_inputs(tokens, row_start, row_length, -1)[: slot + 1]
    return distance > 0 and any(place == position - distance for _, place in seen)


def target_cell(order: int, distance: int, visible: bool, chunk_length: int) -> str:
    """Name of the target cell."""
    if order < 2:
        return f"order_{order}"
    sight = "visible" if visible else "hidden"
    for part, name in ((16, "1_16"), (8, "1_8"), (4, "1_4"), (2, "1_2"), (1, "1")):
        if distance * part <= chunk_length:
            return f"copy_to_{name}_{sight}"
    return f"copy_beyond_{sight}"


def table_cell(order: int, candidate: int, target: int) -> str:
    """Name of the table cell."""
    if order == 0:
        return "no_match"
    return f"match_{order}_{'right' if candidate == target else 'wrong'}"
