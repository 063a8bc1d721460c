"""The data benchmarks compare like with like: both ways give the same chunks, the same fields."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import bench_data_build, bench_lookup
from data_scripts.lookup import lookup_rows
from data_scripts.rows import segments_at_bos
from modeling_doctab import naive


@pytest.mark.parametrize("num_cores", [1, pytest.param(2, marks=pytest.mark.multi_process)])
def test_both_ways_to_chunks_agree(tokenizer, tmp_path, monkeypatch, num_cores):
    monkeypatch.setattr(bench_data_build, "CHUNK_LENGTH", 256)
    paths = bench_data_build.write_shards(tmp_path, 2, 120_000)
    ours = bench_data_build.our_build(paths, tokenizer, num_cores)
    theirs = bench_data_build.reference_build(paths, tokenizer, num_cores)
    np.testing.assert_array_equal(ours, theirs)
    assert len(ours) > 20


def test_lengths_are_like_climbmixs():
    generator = np.random.default_rng(0)
    mean, deviation = bench_data_build._LOG_MEAN, bench_data_build._LOG_DEVIATION
    lengths = generator.lognormal(mean, deviation, 400_000)
    assert lengths.mean() == pytest.approx(700, rel=0.02)
    assert (lengths >= 8193).mean() == pytest.approx(322 / 80_000, rel=0.05)


def test_the_dictionaries_are_the_specification():
    rows = np.random.default_rng(0).integers(0, 5, (2, 60))
    found = bench_lookup.dictionaries(rows.tolist())
    assert found == [naive.lookup(row) for row in rows.tolist()]
    spread, bos = bench_lookup.general_rows(rows)
    spread[0, 20] = spread[1, 33] = bos
    segments = segments_at_bos(spread, bos)
    found = bench_lookup.dictionaries(spread.tolist(), 8, bos)
    fields = np.stack(lookup_rows(spread, 8, segments), -1)
    assert fields.tolist() == [[list(x) for x in row] for row in found]
    assert spread.max() >= 2**16
