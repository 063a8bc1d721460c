"""`make demo`, whole: what it prints and writes, that it reuses, and the README's snippet on it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARMS = ("b", "b_table", "lg", "lg_table")
DEMO = [sys.executable, "-m", "training.line", "demo"]


def run_demo() -> str:
    result = subprocess.run(DEMO, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


@pytest.fixture(scope="module")
def printed():
    return run_demo()


def read(arm, name):
    return json.loads((ROOT / "demo" / "runs" / arm / name).read_text())


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_all_arms_see_identical_targets(printed):
    hashes = {read(arm, "results.json")["target_sha256"] for arm in ARMS}
    assert len(hashes) == 1
    for arm in ARMS:
        results = read(arm, "results.json")
        assert results["tokens"] >= 300_000
        assert results["peak_memory_bytes"] < 3e9
        assert abs(results["step0_loss"] - 8.3178) < 0.002  # ln 4096


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_the_table_gains_on_both_layouts(printed):
    for arm in ("b_table", "lg_table"):
        found = read(arm, "gains.json")["sets"]["dev_val.training"]
        assert found["gain_interval"][0] > 0, found
        assert found["documents_improved"] > 0.9


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_it_ends_with_one_table_a_figure_a_card_and_a_continuation(printed):
    end = printed[printed.index("Result") :]
    for arm in ARMS:
        assert re.search(rf"\| {arm} s44 +\| +\d\.\d+", end), arm
    assert "Gain by target cell" in end
    assert "Table 6" not in end
    figures = list((ROOT / "demo" / "report").glob("*.png"))
    assert figures
    assert all(f.stat().st_size > 10_000 for f in figures)
    card = (ROOT / "demo" / "runs" / "lg_table" / "final" / "README.md").read_text()
    gain = read("lg_table", "gains.json")["sets"]["dev_val.training"]["gain"]
    assert f"{gain:+.4f}" in card
    assert "self.assertEqual(\033[1m" in printed


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_a_second_demo_reuses_what_is_there(printed):
    before = {arm: read(arm, "results.json") for arm in ARMS}
    again = run_demo()
    assert again.count("reusing") == 1 + len(ARMS)
    assert again.count(": reused demo/runs") == len(ARMS)
    assert {arm: read(arm, "results.json") for arm in ARMS} == before
    # An interrupted phase starts anew.
    (ROOT / "demo" / "runs" / "b" / "status.json").write_text('{"state": "running", "update": 3}')
    third = run_demo()
    assert third.count("reusing") == len(ARMS)
    assert read("b", "status.json")["state"] == "done"
    assert read("b", "results.json")["final_sha256"] == before["b"]["final_sha256"]


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_the_readme_snippet_runs(printed):
    readme = (ROOT / "README.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    result = subprocess.run(
        [sys.executable, "-c", snippet], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "def test_" in result.stdout
