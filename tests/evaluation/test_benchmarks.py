"""The evaluation's benchmarks in miniature: equal results, whatever the ratios."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from benchmarks import bench_metric, bench_scoring, bench_target_classes
from evaluation.class_bpb.statistics import bootstrap_interval, resample_counts
from evaluation.contrasts import class_intervals


def test_records_engine_and_metric_rows() -> None:
    sizes = {"num_targets": 40_000, "num_documents": 12, "num_resamples": 40, "metric_chunks": 2}
    results = list(bench_metric.run(**sizes))
    assert [result.name for result in results] == ["records_engine", "metric_rows"]
    assert all(min(result.ratios().values()) > 0 for result in results)


def test_target_classes(monkeypatch) -> None:
    text = np.random.default_rng(0).integers(0, 50, 30_000)
    monkeypatch.setattr(bench_target_classes, "standard_library_tokens", lambda: text)
    monkeypatch.setattr(bench_target_classes, "LENGTHS", (7000, 900))
    found = bench_target_classes.documents(20_000)
    assert [len(one) for one in found] == [7000, 900, 7000, 900, 4200]
    (result,) = bench_target_classes.run(20_000)
    assert result.facts["num_documents"] == 5


@pytest.mark.slow
def test_scoring() -> None:
    results = list(bench_scoring.run(num_documents=2, row_length=64))
    has_harness = importlib.util.find_spec("lm_eval") is not None
    assert [result.name for result in results] == ["scoring", "scoring_wide"] * has_harness


def test_class_intervals_are_the_gain_s_own_draws() -> None:
    rng = np.random.default_rng(1)
    saved, num_bytes = rng.normal(size=(9, 5)), rng.integers(1, 50, (9, 5))
    intervals = class_intervals(saved, num_bytes, 200, seed=4)
    whole = class_intervals(saved.sum(axis=1, keepdims=True), num_bytes, 200, seed=4)
    total = bootstrap_interval(saved.sum(axis=1), num_bytes.sum(axis=1), 200, seed=4)
    assert tuple(whole[0]) == pytest.approx(total, abs=1e-12)
    draws = []
    for counts in resample_counts(9, 200, 4):
        for row in counts:
            drawn = np.repeat(np.arange(9), row.astype(int))
            draws.append(saved[drawn, 2].sum() / (np.log(2) * num_bytes[drawn].sum()))
    assert intervals[2] == pytest.approx(np.quantile(draws, (0.025, 0.975)), abs=1e-12)
    swapped = class_intervals(-saved, num_bytes, 200, 4)
    np.testing.assert_allclose(swapped[:, ::-1], -intervals, atol=1e-14)  # interpolation's rounding
    assert np.isnan(class_intervals(saved[:1], num_bytes[:1], 5)).all()
