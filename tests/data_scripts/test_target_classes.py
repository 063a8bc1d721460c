from __future__ import annotations

import numpy as np
import pytest

from data_scripts.target_classes import target_orders

BOS = 99


def plain_target_orders(tokens, max_order=4):
    """Section 3.5 as it is written, in loops."""
    stream = [BOS, *tokens]
    result = []
    for i, target in enumerate(tokens):
        found = (0, 0)
        for n in range(1, min(max_order, i + 1) + 1):
            context = stream[i - n + 1 : i + 1]
            for end in range(i - 1, n - 2, -1):  # the context's end, latest first
                if stream[end - n + 1 : end + 1] == context and stream[end + 1] == target:
                    found = (n, i - end)
                    break
        result.append(found)
    return result


@pytest.mark.parametrize("max_order", [1, 2, 4, 7])
@pytest.mark.parametrize("num_ids", [1, 2, 4, 30])
def test_equals_the_definition(max_order, num_ids):
    tokens = np.random.default_rng(num_ids).integers(0, num_ids, 150)
    order, distance = target_orders(tokens, BOS, max_order)
    expected = plain_target_orders(tokens.tolist(), max_order)
    assert list(zip(order.tolist(), distance.tolist(), strict=True)) == expected
    assert order.dtype == np.int8
    assert distance.dtype == np.int32


def test_a_worked_example():
    # targets    a  b  c  a  b  c  a  d
    tokens = np.array([1, 2, 3, 1, 2, 3, 1, 4])
    order, distance = target_orders(tokens, BOS)
    # The second b repeats (a, b), the second c (a, b, c); (c, a) came back before d did not.
    assert order.tolist() == [0, 0, 0, 0, 1, 2, 3, 0]
    assert distance.tolist() == [0, 0, 0, 0, 3, 3, 3, 0]


def test_a_repeated_target_after_a_new_context_is_order_0():
    order, distance = target_orders(np.array([5, 6, 7, 6]), BOS)
    assert order.tolist() == [0, 0, 0, 0]
    assert distance.tolist() == [0, 0, 0, 0]


def test_no_targets():
    order, distance = target_orders(np.zeros(0, np.uint16), BOS)
    assert len(order) == len(distance) == 0


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"one document, \[num_targets\]; found shape \[2, 3\]"):
        target_orders(np.zeros((2, 3), int), BOS)
    with pytest.raises(ValueError, match="max_order must be 1 to 7; found 8"):
        target_orders(np.zeros(3, int), BOS, 8)


def test_the_documents_of_a_packed_row_are_apart():
    generator = np.random.default_rng(3)
    parts = [generator.integers(0, 4, length) for length in (40, 1, 25, 60)]
    row = np.concatenate([parts[0], *([BOS, *part] for part in parts[1:])])
    order, distance = target_orders(row, BOS)
    expected = [plain_target_orders(part.tolist()) for part in parts]
    joined = [*expected[0], *(field for part in expected[1:] for field in [(0, 0), *part])]
    assert list(zip(order.tolist(), distance.tolist(), strict=True)) == joined
