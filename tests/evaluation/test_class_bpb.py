"""The metric through `evaluate.load`: both input forms, its result, and every refusal."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import evaluate
import numpy as np
import pytest

from evaluation.class_bpb import app
from evaluation.class_bpb.statistics import (
    CLASS_NAMES,
    class_indices,
    compare,
    contributions,
    sum_by_class,
)

FOLDER = Path("evaluation/class_bpb")
CHUNK_LENGTH = 64


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evaluate.config.HF_METRICS_CACHE", str(tmp_path / "metrics"))


@pytest.fixture
def metric():
    return evaluate.load(str(FOLDER))


def make_chunks(num_chunks: int = 6, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (num_chunks, CHUNK_LENGTH)
    order = rng.integers(0, 5, shape)
    return {
        "nats": rng.exponential(2.0, shape),
        "num_bytes": rng.integers(0, 6, shape),
        "target_order": order,
        "target_distance": np.where(order > 0, rng.integers(1, 100, shape), 0),
        "visible": rng.random(shape) < 0.5,
        "table_order": rng.integers(0, 5, shape),
        "table_right": rng.random(shape) < 0.5,
        "document": np.arange(num_chunks) // 2 + 10,
    }


def by_target(chunks: dict[str, np.ndarray]) -> dict[str, list]:
    document = np.repeat(chunks["document"], CHUNK_LENGTH)
    return {
        name: column.ravel().tolist() for name, column in (chunks | {"document": document}).items()
    }


def expected_sums(chunks: dict[str, np.ndarray], nats: np.ndarray):
    flat = by_target(chunks)
    names = ("target_order", "target_distance", "visible", "table_order", "table_right")
    classes = class_indices(*(flat[name] for name in names), CHUNK_LENGTH)
    document = np.array(flat["document"]) - 10
    return sum_by_class(document, classes, nats.ravel(), flat["num_bytes"], document.max() + 1)


def test_result_is_the_engine_s(metric) -> None:
    chunks = make_chunks()
    base = chunks["nats"] + np.random.default_rng(1).normal(0.1, 0.5, chunks["nats"].shape)
    metric.add_batch(**chunks)
    result = metric.compute(baseline_nats=base, chunk_length=CHUNK_LENGTH, num_resamples=50, seed=3)
    sums, base_sums = expected_sums(chunks, chunks["nats"]), expected_sums(chunks, base)
    found = compare(sums.nats, base_sums.nats, sums.num_bytes, 50, seed=3)
    counted = chunks["num_bytes"] > 0
    nats = chunks["nats"][counted].sum()
    # 1e-12 throughout: float64 sums in another order.
    assert result["bits_per_byte"] == pytest.approx(
        nats / math.log(2) / chunks["num_bytes"].sum(), abs=1e-12
    )
    assert result["nats_per_target"] == pytest.approx(nats / counted.sum(), abs=1e-12)
    assert result["perplexity"] == pytest.approx(math.exp(nats / counted.sum()), rel=1e-12)
    assert result["gain"] == found.gain
    assert result["gain_interval"] == list(found.gain_interval)
    assert result["documents_improved"] == found.documents_improved
    assert result["median_document_gain"] == found.median_document_gain
    assert result["gain_without_top_decile"] == found.gain_without_top_decile
    assert list(result["gain_by_class"].values()) == found.gain_by_class.tolist()
    assert math.fsum(result["gain_by_class"].values()) == pytest.approx(found.gain, abs=1e-12)


def test_classes_are_a_partition(metric) -> None:
    chunks = make_chunks()
    classes = metric.compute(**chunks, chunk_length=CHUNK_LENGTH)["classes"]
    sums = expected_sums(chunks, chunks["nats"])
    assert tuple(classes) == CLASS_NAMES
    assert math.fsum(row["share"] for row in classes.values()) == pytest.approx(1, abs=1e-12)
    parts = [row["contribution"] for row in classes.values()]
    assert parts == contributions(sums.nats, sums.num_bytes).tolist()
    empty = [row for row in classes.values() if row["share"] == 0]
    assert empty
    assert all(row["contribution"] == 0.0 and math.isnan(row["nats"]) for row in empty)


def test_every_form_gives_the_same_result(metric) -> None:
    chunks = make_chunks()
    base = chunks["nats"] + 0.25
    listed = {name: column.tolist() for name, column in chunks.items()}
    documents = np.repeat(chunks["document"], CHUNK_LENGTH).reshape(chunks["nats"].shape)
    options = {"chunk_length": CHUNK_LENGTH, "num_resamples": 20}
    forms = [
        (chunks, base),
        (listed, base.tolist()),
        (chunks | {"document": documents}, base),
        (by_target(chunks), base.ravel().tolist()),
        ({name: np.array(column) for name, column in by_target(chunks).items()}, base.ravel()),
    ]
    results = []
    for columns, baseline in forms:
        metric.add_batch(**columns)
        # NaN (an empty class's mean) is not equal to itself, its text is.
        results.append(json.dumps(metric.compute(baseline_nats=baseline, **options)))
    assert len(set(results)) == 1


def test_batches_and_single_rows_add_up(metric) -> None:
    chunks = make_chunks()
    whole = metric.compute(**chunks, chunk_length=CHUNK_LENGTH)
    for i in range(3):
        metric.add_batch(**{name: column[i : i + 1] for name, column in chunks.items()})
    for i in range(3, 6):
        metric.add(**{name: column[i] for name, column in chunks.items()})
    assert json.dumps(metric.compute(chunk_length=CHUNK_LENGTH)) == json.dumps(whole)


def test_chunks_of_different_lengths(metric) -> None:
    chunks = make_chunks()
    lengths = [64, 3, 10, 64, 1, 7]
    ragged = {
        name: [row[:n] if np.ndim(row) else row for row, n in zip(column, lengths, strict=True)]
        for name, column in chunks.items()
    }
    base = [row + 0.5 for row in ragged["nats"]]
    metric.add_batch(**ragged)
    result = metric.compute(baseline_nats=base, chunk_length=CHUNK_LENGTH, num_resamples=10)
    counted = [(row > 0).sum() for row in ragged["num_bytes"]]
    total = sum(row.sum() for row in ragged["num_bytes"])
    assert result["gain"] == pytest.approx(0.5 * sum(counted) / math.log(2) / total, abs=1e-12)
    assert result["documents_improved"] == 1.0


def change(name: str, value):
    def apply(columns: dict[str, list]) -> None:
        if value is None:
            del columns[name]
        elif callable(value):
            columns[name] = [value(item) for item in columns[name]]
        else:
            columns[name][1] = value

    return apply


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change("visible", None), "missing ['visible']"),
        (change("nats", math.nan), "`nats` must hold finite numbers"),
        (change("nats", math.inf), "`nats` must hold finite numbers"),
        (change("nats", "a lot"), "`nats` must hold finite numbers"),
        (change("num_bytes", 2.5), "`num_bytes` must hold integers; found float64"),
        (change("target_order", float), "`target_order` must hold integers; found float64"),
        (change("document", float), "`document` must hold integers; found float64"),
        (change("table_order", 5), "`table_order` must lie in 0..4; found 5"),
        (change("num_bytes", -1), "`num_bytes` must not be negative"),
        (change("visible", 2), "`visible` must hold booleans"),
        (change("nats", [1.0, 2.0]), "`nats` must hold one number a row, or one flat list a row"),
        (change("nats", lambda value: [value]), "the columns that hold lists are ['nats']"),
        (lambda columns: columns["nats"].pop(), "one common length"),
        (lambda columns: columns.update(predictions=[1]), "no `predictions` or `references`"),
        (lambda columns: columns.update(loss=[1]), "unknown ['loss']"),
    ],
)
def test_bad_batches_are_refused_as_they_are_added(metric, edit, message: str) -> None:
    columns = by_target(make_chunks(1))
    edit(columns)
    with pytest.raises(ValueError, match=re.escape(message)):
        metric.add_batch(**columns)
    assert len(metric) == 0


def test_lists_of_other_lengths_are_refused(metric) -> None:
    chunks = {name: column.tolist() for name, column in make_chunks(2).items()}
    chunks["num_bytes"][1].pop()
    with pytest.raises(ValueError, match="lists of `num_bytes` must be as long as those of `nats`"):
        metric.add_batch(**chunks)


def test_another_form_in_a_later_batch_is_refused(metric) -> None:
    chunks = make_chunks(2)
    metric.add_batch(**chunks)
    with pytest.raises(ValueError, match="Every batch must have the form of the first one"):
        metric.add_batch(**by_target(chunks))


@pytest.mark.parametrize(
    ("baseline", "message"),
    [
        (lambda nats: nats.ravel(), "shape and order of the nats"),
        (lambda nats: nats[:1], "shape and order of the nats"),
        (
            lambda nats: np.where(nats > 1, math.nan, nats),
            "`baseline_nats` must hold finite numbers",
        ),
    ],
)
def test_bad_baselines_are_refused(metric, baseline, message: str) -> None:
    chunks = make_chunks(2)
    metric.add_batch(**chunks)
    with pytest.raises(ValueError, match=message):
        metric.compute(baseline_nats=baseline(chunks["nats"]), chunk_length=CHUNK_LENGTH)


def test_a_shorter_row_baseline_is_refused(metric) -> None:
    metric.add_batch(**by_target(make_chunks(1)))
    with pytest.raises(ValueError, match="one value a target; got 3 for 64"):
        metric.compute(baseline_nats=[1.0, 2.0, 3.0], chunk_length=CHUNK_LENGTH)


def test_a_set_without_bytes_is_refused(metric) -> None:
    chunks = make_chunks(1)
    chunks["num_bytes"][:] = 0
    with pytest.raises(ValueError, match="No target has bytes"):
        metric.compute(**chunks, chunk_length=CHUNK_LENGTH)


def test_a_copy_of_the_folder_works_without_the_project(tmp_path: Path) -> None:
    copy = shutil.copytree(FOLDER, tmp_path / "elsewhere" / "class_bpb")
    code = (
        "import json, sys; sys.path.insert(0, '.'); import app;"
        "print(json.dumps(app.score_json(json.dumps(app.EXAMPLE))));"
        "assert 'evaluation' not in sys.modules;"
        "import statistics; assert hasattr(statistics, 'NormalDist'), statistics.__file__"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=copy, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    example = {name: column for name, column in app.EXAMPLE.items() if name != "baseline_nats"}
    saved = sum(app.EXAMPLE["baseline_nats"]) - sum(example["nats"])
    expected = saved / math.log(2) / sum(example["num_bytes"])
    assert result["gain"] == pytest.approx(expected, abs=1e-12)
    assert math.fsum(result["gain_by_class"].values()) == pytest.approx(expected, abs=1e-12)


def test_the_page_reports_bad_input() -> None:
    assert "missing" in app.score_json('{"nats": [1.0]}')["error"]
    assert "error" in app.score_json("not JSON")
    assert "error" in app.score_json("[1]")


def test_the_card_s_example_runs() -> None:
    card = (FOLDER / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    found: dict = {}
    exec(example, found)
    assert found["result"]["documents_improved"] == 0.5
    documented = set(re.findall(r"`(\w+)`", card.split("### Output")[1].split("## Limits")[0]))
    assert set(found["result"]) <= documented
