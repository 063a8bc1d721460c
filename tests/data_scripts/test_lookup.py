from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from data_scripts import lookup as lookup_module
from data_scripts.chunk_set import ChunkSet
from data_scripts.lookup import lookup_rows
from modeling_doctab import naive


def assert_equals_naive(ids, max_order=4, segment_ids=None, reach=None):
    fields = lookup_rows(ids, max_order, segment_ids, reach)
    for row in range(len(ids)):
        segments = None if segment_ids is None else segment_ids[row].tolist()
        expected = naive.lookup(ids[row].tolist(), max_order, segments, reach)
        found = list(zip(*(field[row].tolist() for field in fields), strict=True))
        assert found == expected


@pytest.mark.parametrize("max_order", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("offset", [0, 70_000], ids=["packed", "general"])
@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("reach", [None, 1, 2, 7, 30])
def test_equals_naive_on_random_rows(max_order, offset, segmented, reach):
    generator = np.random.default_rng(max_order)
    ids = offset + generator.integers(0, 3, (3, 90))
    # Few distinct ids, so that one comes back after others: each run is a segment of its own.
    segments = np.repeat(generator.integers(0, 2, (3, 18)), 5, axis=1) if segmented else None
    assert_equals_naive(ids, max_order, segments, reach)


@pytest.mark.parametrize(
    "row",
    [
        np.zeros(200, int),  # one id: every slot holds the position before
        np.arange(200),  # no repetition
        np.tile([1, 2, 3, 4, 5], 40),
        np.array([7]),
        np.array([65_535, 65_535, 0, 65_535, 65_535, 0]),
        np.array([65_536, 65_535, 65_536, 65_535]),
        np.array([2**31 - 1, 5, 2**31 - 1, 5]),
        np.array([3, -100, 3, -100, 3, 4, 3, 4]),  # padding matches nothing
    ],
    ids=["constant", "distinct", "periodic", "single", "top16", "over16", "top31", "padding"],
)
def test_equals_naive_on_special_rows(row):
    for max_order in (1, 4, 8):
        assert_equals_naive(row[None], max_order)


def test_equals_naive_on_real_rows(chunk_set: ChunkSet):
    stream = np.asarray(chunk_set.train_chunks()[:6]).reshape(2, -1)
    assert_equals_naive(stream)
    assert_equals_naive(stream, reach=chunk_set.chunk_length)


@pytest.mark.slow
def test_equals_naive_on_random_shapes():
    generator = np.random.default_rng(0)
    for _ in range(300):
        rows, length = generator.integers(1, 4), generator.integers(1, 160)
        offset = int(generator.choice([0, 2**16 - 3, 2**31 - 20]))
        ids = offset + generator.integers(0, generator.integers(1, 12), (rows, length))
        segments = np.cumsum(generator.random((rows, length)) < 0.05, axis=1)
        reach = None if generator.random() < 0.5 else int(generator.integers(1, length + 2))
        assert_equals_naive(ids, int(generator.integers(1, 9)), segments, reach)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.uint64])
def test_input_dtype_does_not_matter(dtype):
    ids = np.random.default_rng(0).integers(0, 50, (2, 300))
    for found, expected in zip(lookup_rows(ids.astype(dtype)), lookup_rows(ids), strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype


def test_colliding_hashes_cost_probes_not_answers():
    # Eight n-grams in sixteen slots, two hundred times over: most rows have collisions.
    ids = np.random.default_rng(1).integers(0, 8, (200, 8))
    assert_equals_naive(ids)
    assert_equals_naive(ids + 2**20)


def test_empty_rows():
    for shape in ((0, 5), (3, 0)):
        assert [field.shape for field in lookup_rows(np.zeros(shape, int))] == [shape] * 3


def test_threads_do_not_disturb_each_other():
    batches = [np.random.default_rng(i).integers(0, 40, (4, 2000)) for i in range(4)]
    expected = [lookup_rows(batch) for batch in batches]
    found: list = [None] * 4

    def work(i):
        for _ in range(20):
            found[i] = lookup_rows(batches[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(found, expected, strict=True):
        for field, wanted in zip(one, other, strict=True):
            np.testing.assert_array_equal(field, wanted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": np.zeros(4, int)}, r"shape \[rows, length\]; found int64 of shape \[4\]"),
        ({"input_ids": np.zeros((1, 4))}, "must be integers"),
        ({"input_ids": np.array([[2**31]])}, "must fit in int32"),
        ({"max_order": 0}, "max_order must be 1 to 8; found 0"),
        ({"max_order": 9}, "max_order must be 1 to 8; found 9"),
        ({"reach": 0}, "reach must be at least 1; found 0"),
        ({"segment_ids": np.zeros((1, 3), int)}, "segment_ids must have the shape"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        lookup_rows(**{"input_ids": np.zeros((1, 4), int)} | arguments)


def test_without_numba(monkeypatch):
    monkeypatch.setattr(lookup_module, "numba", None)
    monkeypatch.setattr(lookup_module, "_numba_error", ImportError("nothing here"), raising=False)
    with pytest.raises(ImportError, match=r"needs numba.*nothing here.*pip install"):
        lookup_rows(np.zeros((1, 4), int))


def test_the_kernels_compile_where_no_cache_can_be_written(monkeypatch):
    calls = []

    def njit(**options):
        calls.append(options)
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda kernel: kernel

    monkeypatch.setattr(lookup_module.numba, "njit", njit)
    assert lookup_module._compiled(Path) is Path
    assert calls == [{"nogil": True, "cache": True}, {"nogil": True}]
