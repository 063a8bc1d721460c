"""The output mixture: normalised, fitted to its maximum on one set alone, and reported."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from data_scripts.rows import TableOptions, chunk_rows
from evaluation.checkpoints import load_model, open_checkpoint
from evaluation.formats import load_targets
from evaluation.mixture import (
    NUM_BUCKETS,
    fit_weights,
    main,
    mixture_cells,
    mixture_distribution,
    mixture_nats,
)
from evaluation.records import read_records
from evaluation.report import build_report
from evaluation.score import score_runs
from evaluation.scores import Scores, read_scores
from tests.evaluation.conftest import ROW_LENGTH
from tests.evaluation.test_records import HEADER


def random_scores(seed: int, count: int = 4000) -> Scores:
    rng = np.random.default_rng(seed)
    order = rng.integers(0, 5, count).astype(np.int8)
    distance = np.where(order > 0, rng.integers(1, 30000, count), 0).astype(np.int32)
    scores = Scores.empty(HEADER, count)
    right = (rng.random(count) < 0.2 * order) & (order > 0)
    nats = rng.exponential(2.0, count).astype(np.float32)
    return replace(scores, nats=nats, table_order=order, table_distance=distance, table_right=right)


def test_cells_are_orders_and_powers_of_two() -> None:
    order = np.array([0, 1, 1, 1, 4, 4], np.int8)
    distance = np.array([0, 1, 2, 3, 8191, 10**6], np.int32)
    last = 3 * NUM_BUCKETS
    assert mixture_cells(order, distance).tolist() == [0, 1, 2, 2, 1 + last + 12, 1 + last + 13]


def test_the_fit_is_the_maximum_of_the_likelihood() -> None:
    scores = random_scores(0)
    counted = np.ones(4000, np.bool_)
    weights = fit_weights(scores, counted)
    cell = mixture_cells(scores.table_order, scores.table_distance)
    best = mixture_nats(scores, weights).astype(np.float64)
    for i in np.unique(cell):
        members = cell == i
        for w in np.linspace(0, 0.99, 34):
            other = mixture_nats(scores, np.full_like(weights, w)).astype(np.float64)
            added = [-math.log1p(-weight) for weight in (weights[i], w)]  # one wrong target
            # 1e-3: losses are float32
            assert best[members].sum() + added[0] <= other[members].sum() + added[1] + 1e-3
    assert weights[0] == 0
    assert weights.max() < 1
    ignored = counted.copy()
    ignored[scores.table_right] = False  # nothing right is left to gain from
    assert not fit_weights(scores, ignored).any()


def test_the_distribution_sums_to_one_and_gives_the_losses(make_run, chunk_set) -> None:
    run = make_run("b", document_table=False)
    score_runs([run], chunk_set, ["dev"])
    scores = read_scores(run / "scores" / "dev.training.npz")
    targets = load_targets(chunk_set, "dev", full_chunks=True)
    weights = fit_weights(scores, targets.num_bytes > 0)
    _, _, chunks = chunk_set.documents("dev").chunks()
    rows = chunk_rows(chunks, ROW_LENGTH, chunk_set.bos_token_id, TableOptions())
    model = load_model(open_checkpoint(run), torch.device("cpu"))
    with torch.inference_mode():
        logits = model(input_ids=torch.from_numpy(rows["input_ids"])).logits
    probabilities = logits.double().softmax(-1).flatten(0, 1).numpy()
    weight = weights[mixture_cells(scores.table_order, scores.table_distance)]
    candidate = rows["table_candidate"].reshape(-1)
    mixed = mixture_distribution(probabilities, candidate, weight)
    np.testing.assert_allclose(mixed.sum(axis=1), 1.0, atol=1e-12)
    assert mixed.min() >= 0
    losses = -np.log(mixed[np.arange(len(mixed)), rows["shift_labels"].reshape(-1)])
    np.testing.assert_allclose(mixture_nats(scores, weights), losses, atol=2e-5)  # float32 scores
    with pytest.raises(ValueError, match="must sum to 1 over the vocabulary"):
        mixture_distribution(logits.flatten(0, 1).double().numpy(), candidate, weight)


def test_the_command_and_the_report(make_run, chunk_set, tmp_path, capsys) -> None:
    base = make_run("b", document_table=False)
    table = make_run("b_table", baseline="b")
    command = [str(base), "--chunk-set", str(chunk_set.path), "--fit-set", "dev", "--sets", "dev"]
    assert main(command) == 2
    assert "must be scored on dev in the training format" in capsys.readouterr().err
    score_runs([base, table], chunk_set, ["dev"])
    assert main(command) == 0
    assert "b_mixture s44 on dev: " in capsys.readouterr().out
    records = read_records(base / "mixture" / "dev.training.parquet")
    assert (records.header.arm, records.header.baseline) == ("b_mixture", "b")
    plain = read_records(base / "records" / "dev.training.parquet")
    np.testing.assert_array_equal(records.sums.num_targets, plain.sums.num_targets)
    assert records.sums.nats.sum() < plain.sums.nats.sum()  # fitted on this very set
    weights = json.loads((base / "mixture" / "weights.json").read_text())
    assert np.shape(weights["weights"]) == (4, NUM_BUCKETS)
    build_report([base, table], tmp_path / "out", num_resamples=10)
    row = (tmp_path / "out" / "text.mixture.csv").read_text().splitlines()[1]
    gain = (plain.sums.nats.sum() - records.sums.nats.sum()) / (
        math.log(2) * plain.sums.num_bytes.sum()
    )
    assert row.startswith(f'b_mixture over b s44,dev,"{gain:+.4f} [')
    gains = json.loads((base / "gains.json").read_text())["sets"]
    assert gains["dev.training"]["baseline"] is None
    assert gains["dev.training.mixture"]["baseline"] == "b"
    assert gains["dev.training.mixture"]["gain"] == pytest.approx(gain, abs=1e-12)
    assert main([str(table), *command[1:]]) == 2
    assert "b_table has one already" in capsys.readouterr().err
    assert main([str(base), *command[1:4], "confirm", "--sets", "dev"]) == 2
    assert "must be a development set" in capsys.readouterr().err
