"""The harness: equal results first, then alternating runs, medians and a ratio."""

import json
import time

import pytest

from benchmarks.harness import compare


def test_ratio_of_medians_and_json(tmp_path, capsys):
    order = []

    def slow():
        order.append("slow")
        time.sleep(0.004)
        return 1

    def fast():
        order.append("fast")
        time.sleep(0.001)
        return 1

    result = compare(
        "sleep", "how long?", "4x", {"fast": fast, "slow": slow}, rounds=4, min_seconds=0
    )
    assert 2 < result.ratios()["slow"] < 8
    saved = json.loads(result.save(tmp_path).read_text())
    assert saved["ours"] == "fast"
    assert saved["prediction"] == "4x"
    assert len(saved["cases"]["slow"]["values"]) == 4
    assert "python" in saved["versions"]
    assert "x fast" in capsys.readouterr().out
    # warm-up and sizing first, then the rounds turn about
    assert order[-8:] == ["fast", "slow", "slow", "fast"] * 2


def test_nothing_is_timed_if_the_results_differ():
    calls = []

    def check(outputs):
        raise AssertionError(f"differ: {outputs}")

    cases = {"a": lambda: calls.append(1), "b": lambda: calls.append(2)}
    with pytest.raises(AssertionError, match="differ"):
        compare("n", "q", "p", cases, check=check)
    assert calls == [1, 2]


def test_the_readme_holds_the_committed_results():
    from benchmarks.__main__ import BEGIN, END, README, table

    text = README.read_text()
    assert text.split(BEGIN)[1].split(END)[0].strip() == table()
