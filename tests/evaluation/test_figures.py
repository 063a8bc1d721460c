"""Figures stay readable with many arms."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from evaluation.contrasts import contrast
from evaluation.figures import (
    MOST_BARS,
    MOST_LABELS,
    Point,
    Styles,
    draw_cost,
    draw_gains,
    write_figure,
)
from evaluation.tables import ArmResult
from tests.evaluation.test_records import make_records
from tests.evaluation.test_report import BASE, improved


def results(count: int) -> list[ArmResult]:
    arms = [improved(BASE, 0.01 * i, arm=f"b_{i}", baseline="b") for i in range(1, count + 1)]
    found = [ArmResult(arm, contrast(arm, BASE, 100, seed=0), 1e6) for arm in arms]
    return [ArmResult(BASE, None, 1e6), *found]


def test_bars_become_rows_of_a_heat_map() -> None:
    for count, is_map in ((MOST_BARS, False), (MOST_BARS + 1, True)):
        axes = Figure().subplots()
        draw_gains(axes, [one.contrast for one in results(count) if one.contrast])
        assert bool(axes.images) == is_map
        if is_map:
            names = [label.get_text() for label in axes.get_yticklabels()]
            assert names == [f"b_{i} s44 over b" for i in range(1, count + 1)]
            gains = axes.images[0].get_array().sum(axis=1)
            expected = [one.contrast.gain for one in results(count) if one.contrast]
            assert gains.tolist() == pytest.approx(expected, abs=1e-12)


def test_labels_become_a_legend_best_first() -> None:
    for count, has_legend in ((MOST_LABELS, False), (MOST_LABELS + 1, True)):
        axes = Figure().subplots()
        points = {f"arm{i}": Point(1e6, 2.0 - i / 100) for i in range(count)}
        draw_cost(axes, points, Styles({}))
        legend = axes.get_legend()
        assert (legend is not None) == has_legend
        if legend is not None:
            names = [text.get_text().split()[-1] for text in legend.get_texts()]
            assert names == [f"arm{i}" for i in reversed(range(count))]


def test_many_arms_fit_the_page(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns where a layout collapses
        assert write_figure(results(30), "thirty arms", tmp_path / "figure.png")


def test_a_base_and_its_variants_share_a_colour() -> None:
    styles = Styles({"b_table": "b", "b_bigram_table": "b_bigram", "b_bigram": "b", "a_table": "a"})
    colours = {arm: styles.of(arm)[0] for arm in ("b", "b_table", "b_bigram_table", "a", "a_table")}
    assert colours["b"] == colours["b_table"] == colours["b_bigram_table"] != colours["a"]
    assert styles.of("b_table")[1] == styles.of("a_table")[1] != styles.of("a")[1] == 0


def test_an_arm_that_is_its_own_baseline_is_drawn() -> None:
    assert make_records(arm="b", baseline="b").header.baseline == "b"
    assert Styles({"b": "b"}).of("b") == ("C0", 0)
    assert Styles({"a": "b", "b": "a"}).of("a")[0] == "C0"
