"""Classes against plain loops; sums, gains and the bootstrap against independent ones."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import numpy as np
import pytest

from data_scripts.target_classes import target_orders
from evaluation.class_bpb import statistics
from evaluation.class_bpb.statistics import (
    BY_BAND,
    BY_MATCH,
    BY_TABLE_STATE,
    BY_TARGET_CELL,
    CLASS_NAMES,
    band_ends,
    bits_per_byte,
    bootstrap_interval,
    class_indices,
    compare,
    contributions,
    grouping_labels,
    sum_by_class,
    visible_sources,
)
from modeling_doctab import naive
from tests.evaluation import naive_classes

BOS = 30


@pytest.mark.parametrize(("chunk_length", "row_length"), [(64, 16), (64, 64), (48, 12)])
def test_classes_equal_plain_loops(chunk_length: int, row_length: int) -> None:
    rng = random.Random(chunk_length + row_length)
    # A small vocabulary, and a document of several chunks, so that every band occurs.
    tokens = [rng.choice(range(6)) for _ in range(4 * chunk_length)]
    order, distance = target_orders(np.array(tokens), BOS)
    slot = np.arange(len(tokens)) % row_length
    visible = visible_sources(distance, slot)
    table = []
    for start in range(0, len(tokens), chunk_length):
        stream = [BOS, *tokens[start : start + chunk_length - 1]]
        table += naive.lookup(stream)
    right = [candidate == y for (_, candidate, _), y in zip(table, tokens, strict=True)]
    found = class_indices(order, distance, visible, [n for n, _, _ in table], right, chunk_length)
    for i, y in enumerate(tokens):
        n, d = naive_classes.target_order(tokens, i, BOS)
        seen = naive_classes.is_visible(tokens, i, d, i - i % row_length, row_length)
        expected = ".".join(
            (
                naive_classes.target_cell(n, d, seen, chunk_length),
                naive_classes.table_cell(table[i][0], table[i][1], y),
            )
        )
        assert CLASS_NAMES[found[i]] == expected, (i, n, d)
    assert len(set(found.tolist())) > 20  # the text above exercises many classes


def test_the_partition_has_126_distinct_names() -> None:
    assert len(CLASS_NAMES) == len(set(CLASS_NAMES)) == 126
    assert statistics.NUM_TARGET_CELLS == 14
    assert statistics.NUM_TABLE_CELLS == 9


def test_a_source_at_slot_0_is_hidden() -> None:
    # At slot 5, a source 5 back was predicted at slot 0, so its token stands at slot 1. A source
    # 6 back would have to be the token at slot 0, where BOS stands.
    assert visible_sources([5, 6, 0], [5, 5, 5]).tolist() == [True, False, False]


@pytest.mark.parametrize("chunk_length", [8192, 1024, 50])
def test_bands_close_at_their_ends(chunk_length: int) -> None:
    ends = band_ends(chunk_length)
    for band, end in enumerate(ends):
        inside, outside = class_indices(
            [2, 2], [end, end + 1], [1, 1], [0, 0], [0, 0], chunk_length
        )
        assert CLASS_NAMES[inside].startswith(f"copy_{statistics.BAND_NAMES[band]}_visible")
        assert CLASS_NAMES[outside].startswith(f"copy_{statistics.BAND_NAMES[band + 1]}_visible")


def test_groupings_agree_with_the_names() -> None:
    for index, name in enumerate(CLASS_NAMES):
        target, table = name.split(".")
        assert BY_TARGET_CELL.names[BY_TARGET_CELL.index[index]] == target
        band = target.removesuffix("_visible").removesuffix("_hidden")
        assert BY_BAND.names[BY_BAND.index[index]] == band
        order = "copy" if target.startswith("copy") else target
        state = table if table == "no_match" else table.split("_")[-1]
        assert BY_TABLE_STATE.names[BY_TABLE_STATE.index[index]] == f"{order}.{state}"
        match = table.replace("_3_", "_2_").replace("_4_", "_2_")
        assert BY_MATCH.names[BY_MATCH.index[index]] == match


def test_collapse_keeps_totals_and_dtype() -> None:
    counts = np.random.default_rng(0).integers(0, 9, (5, 126))
    for grouping in (BY_BAND, BY_MATCH, BY_TABLE_STATE, BY_TARGET_CELL):
        collapsed = grouping.collapse(counts)
        assert collapsed.dtype == counts.dtype
        assert collapsed.sum(axis=1).tolist() == counts.sum(axis=1).tolist()
    with pytest.raises(ValueError, match="126 classes"):
        BY_BAND.collapse(counts[:, :5])


def test_labels_name_distances_in_tokens() -> None:
    assert grouping_labels(BY_BAND, 8192) == [
        "order 0",
        "order 1",
        "copy (0, 512]",
        "copy (512, 1K]",
        "copy (1K, 2K]",
        "copy (2K, 4K]",
        "copy (4K, 8K]",
        "copy beyond 8K",
    ]
    assert grouping_labels(BY_TARGET_CELL, 1024)[2:4] == [
        "copy (0, 64] visible",
        "copy (0, 64] hidden",
    ]
    assert grouping_labels(BY_TABLE_STATE, 1024)[-2:] == ["order ≥ 2, right", "order ≥ 2, wrong"]
    assert grouping_labels(BY_MATCH, 1024)[-1] == "match ≥ 2 wrong"


def make_sums(seed: int, documents: int = 30, targets: int = 4000):
    rng = np.random.default_rng(seed)
    document = np.sort(rng.integers(0, documents, targets))
    document[:documents] = np.arange(documents)  # every document has targets
    return (
        document,
        rng.integers(0, 126, targets),
        rng.exponential(2.0, targets).astype(np.float32),
        rng.integers(0, 6, targets) + (np.arange(targets) < documents),
        documents,
    )


def test_sums_equal_a_loop() -> None:
    document, classes, nats, num_bytes, count = make_sums(0)
    sums = sum_by_class(document, classes, nats, num_bytes, count)
    expected = np.zeros((count, 126)), np.zeros((count, 126)), np.zeros((count, 126))
    for d, c, loss, size in zip(document, classes, nats, num_bytes, strict=True):
        if size > 0:
            expected[0][d, c] += float(loss)
            expected[1][d, c] += 1
            expected[2][d, c] += size
    # bincount adds the same float64 numbers in the same order as the loop.
    for found, wanted in zip(sums, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_order_of_targets_changes_nothing_beyond_rounding() -> None:
    document, classes, nats, num_bytes, count = make_sums(1)
    sums = sum_by_class(document, classes, nats, num_bytes, count)
    p = np.random.default_rng(2).permutation(len(document))
    shuffled = sum_by_class(document[p], classes[p], nats[p], num_bytes[p], count)
    np.testing.assert_array_equal(shuffled.num_targets, sums.num_targets)
    np.testing.assert_allclose(shuffled.nats, sums.nats, rtol=1e-13)  # float64 sums of ~1 term


def test_blocks_change_nothing_beyond_rounding(monkeypatch) -> None:
    document, classes, nats, num_bytes, count = make_sums(4)
    nats = nats.astype(np.float64)
    num_bytes[7:14] = 0  # a block in which nothing counts
    rng = np.random.default_rng(5)
    order = rng.integers(0, 5, len(nats))
    columns = (order, (order > 0) * rng.integers(1, 20_000, len(nats)), nats > 2)
    columns += (rng.integers(0, 5, len(nats)), nats > 3)
    whole = sum_by_class(document, classes, nats, num_bytes, count)
    whole_classes = class_indices(*columns, 8192)
    monkeypatch.setattr(statistics, "_BLOCK", 7)
    assert len(nats) % 7
    found = sum_by_class(document, classes, nats, num_bytes, count)
    np.testing.assert_array_equal(found.num_targets, whole.num_targets)
    np.testing.assert_array_equal(found.num_bytes, whole.num_bytes)
    np.testing.assert_allclose(found.nats, whole.nats, rtol=1e-13)
    np.testing.assert_array_equal(class_indices(*columns, 8192), whole_classes)
    nats[16] = np.nan
    with pytest.raises(ValueError, match="nats must be finite; target 16 has nan"):
        sum_by_class(document, classes, nats, num_bytes, count)


def test_contributions_sum_to_bits_per_byte() -> None:
    sums = sum_by_class(*make_sums(3))
    parts = contributions(sums.nats, sums.num_bytes)
    # 1e-12: the promise to users; float64 adds 126 terms of about 0.01 each.
    assert abs(math.fsum(parts) - bits_per_byte(sums.nats, sums.num_bytes)) < 1e-12
    assert not parts[sums.num_targets.sum(axis=0) == 0].any()


def two_arms(seed: int = 4):
    document, classes, nats, num_bytes, count = make_sums(seed)
    noise = np.random.default_rng(seed + 100).normal(0.05, 0.5, len(nats))
    arm = sum_by_class(document, classes, nats, num_bytes, count)
    base = sum_by_class(document, classes, nats + noise, num_bytes, count)
    return arm, base


def test_bootstrap_equals_an_independent_loop() -> None:
    arm, base = two_arms()
    found = compare(arm.nats, base.nats, arm.num_bytes, num_resamples=200, seed=7)
    saved = [math.fsum(row) for row in base.nats - arm.nats]
    size = [int(row.sum()) for row in arm.num_bytes]
    generator = np.random.default_rng(7)
    gains = []
    for _ in range(200):
        drawn = generator.integers(len(saved), size=len(saved)).tolist()
        gains.append(math.fsum(saved[d] for d in drawn) / math.log(2) / sum(size[d] for d in drawn))
    gains.sort()

    def percentile(q: float) -> float:
        place = q * (len(gains) - 1)
        low = math.floor(place)
        return gains[low] + (place - low) * (gains[low + 1] - gains[low])

    # 1e-12: float64 sums of a few thousand nats, in another order.
    assert found.gain_interval == pytest.approx((percentile(0.025), percentile(0.975)), abs=1e-12)
    assert found.gain == pytest.approx(math.fsum(saved) / math.log(2) / sum(size), abs=1e-12)
    assert found.gain_interval[0] < found.gain < found.gain_interval[1]


def test_comparison_is_seeded_and_antisymmetric() -> None:
    arm, base = two_arms()
    forward = compare(arm.nats, base.nats, arm.num_bytes, 300, seed=1)
    again = compare(arm.nats, base.nats, arm.num_bytes, 300, seed=1)
    other = compare(arm.nats, base.nats, arm.num_bytes, 300, seed=2)
    backward = compare(base.nats, arm.nats, arm.num_bytes, 300, seed=1)
    assert forward.gain_interval == again.gain_interval != other.gain_interval
    assert backward.gain == -forward.gain
    # 1e-15: quantile interpolation rounds differently from below and from above.
    swapped = (-backward.gain_interval[1], -backward.gain_interval[0])
    assert swapped == pytest.approx(forward.gain_interval, abs=1e-15)
    np.testing.assert_array_equal(backward.gain_by_class, -forward.gain_by_class)


def test_block_size_does_not_change_the_draws() -> None:
    # 3,000 documents make several blocks of 2^22 counts out of 4,000 resamples.
    counts = list(statistics.resample_counts(3000, 1500, seed=3))
    assert len(counts) > 1
    joined = np.concatenate(counts)
    generator = np.random.default_rng(3)
    for row in joined:
        drawn = generator.integers(3000, size=3000)
        np.testing.assert_array_equal(row, np.bincount(drawn, minlength=3000))


def test_per_document_numbers() -> None:
    nats = np.array([[1.0], [2.0], [3.0], [4.0]] + [[1.0]] * 6)
    base = nats + np.array([[0.5], [-0.25], [9.0], [0.0]] + [[0.125]] * 6)
    size = np.array([[2], [1], [10], [4]] + [[1]] * 6)
    found = compare(nats, base, size, num_resamples=10)
    assert found.documents_improved == 0.8  # not the one that is equal, not the one that is worse
    own = [0.5 / 2, -0.25, 0.9, 0.0] + [0.125] * 6
    assert found.median_document_gain == pytest.approx(np.median(own) / math.log(2))
    # One of ten documents goes: the one that saved 9 nats with its 10 bytes.
    left = (0.5 - 0.25 + 6 * 0.125) / (2 + 1 + 4 + 6)
    assert found.gain_without_top_decile == pytest.approx(left / math.log(2))


def test_one_document_has_no_interval() -> None:
    with pytest.warns(UserWarning, match="One document"):
        interval = bootstrap_interval(np.array([1.0]), np.array([3]))
    assert all(math.isnan(end) for end in interval)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([5], [1], [1], [0], [0], 64), "target_order must lie in 0..4"),
        (([1], [0], [1], [0], [0], 64), "target_distance must be 0 exactly"),
        (([0], [3], [1], [0], [0], 64), "target_distance must be 0 exactly"),
        (([0], [0], [1], [6], [0], 64), "table_order must lie in 0..4"),
        (([0, 0], [0], [1], [0], [0], 64), "one shape"),
        (([2], [1], [1], [0], [0], 8), "at least 16"),
    ],
)
def test_bad_classes_are_refused(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        class_indices(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0], [0], [math.nan], [1], 1), "nats must be finite; target 0"),
        (([0], [0], [1.0], [-1], 1), "num_bytes must not be negative"),
        (([1], [0], [1.0], [1], 1), "document indices must lie in 0..0"),
        (([0], [126], [1.0], [1], 1), "class indices must lie in 0..125"),
        (([0, 0], [0], [1.0], [1], 1), "four columns"),
    ],
)
def test_bad_sums_are_refused(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sum_by_class(*arguments)


def test_bad_comparisons_are_refused() -> None:
    one = np.ones((3, 1))
    with pytest.raises(ValueError, match="one shape"):
        compare(one, one[:2], one)
    with pytest.raises(ValueError, match="Every document must have scored bytes"):
        compare(one, one, one * [[1], [0], [1]])
    with pytest.raises(ValueError, match="num_resamples"):
        compare(one, one, one, num_resamples=0)
    with pytest.raises(ValueError, match="No bytes were scored"):
        bits_per_byte([1.0], [0])
    with pytest.raises(ValueError, match="No bytes were scored"):
        contributions(one, 0 * one)


def test_the_engine_needs_numpy_alone() -> None:
    code = (
        "import importlib.util as u, sys;"
        "s = u.spec_from_file_location('engine', 'evaluation/class_bpb/statistics.py');"
        "m = u.module_from_spec(s); sys.modules['engine'] = m; s.loader.exec_module(m);"
        "others = {'torch', 'datasets', 'evaluate', 'pyarrow', 'pandas', 'numba', 'evaluation'};"
        "print(m.NUM_CLASSES, sorted(others & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "126 []"
