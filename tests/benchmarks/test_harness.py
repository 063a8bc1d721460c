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


def test_what_others_use_is_noted():
    from benchmarks.__main__ import noting_others
    from benchmarks.harness import Case, Result, others_cpu_seconds

    def results():
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        yield Result("n", "q", "p", None, "a", {"a": Case([1.0])})

    before = others_cpu_seconds()
    if before is None:  # only Linux says
        assert "others_cpu_share" not in next(noting_others(results())).facts
        return
    share = next(noting_others(results())).facts["others_cpu_share"]
    # This process's own work is not among it, to a clock tick or two.
    assert 0 <= share <= 1 + 0.02 / 0.3
    assert others_cpu_seconds() >= before - 0.05


@pytest.mark.parametrize("value", ["", "no/such/folder"])
def test_a_peer_by_path(value, monkeypatch, capsys):
    from benchmarks import peers

    monkeypatch.setenv(peers.AUTORESEARCH, value)
    if value:
        with pytest.raises(ValueError, match="AUTORESEARCH must name a checkout; no/such/folder"):
            peers.checkout(peers.AUTORESEARCH)
    else:
        assert peers.checkout(peers.AUTORESEARCH) is None
        assert "set AUTORESEARCH to a checkout" in capsys.readouterr().out
