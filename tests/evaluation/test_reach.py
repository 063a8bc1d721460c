"""The reach check fires on the paper's two mistakes, recreated, and is silent in training."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from data_scripts.rows import stride_windows
from evaluation.checkpoints import open_checkpoint
from evaluation.formats import EvaluationFormat, load_targets
from evaluation.plans import row_plan
from evaluation.reach import check_reach, main, reach_violations
from evaluation.score import score_runs
from evaluation.scores import read_scores
from modeling_doctab import naive
from tests.evaluation.conftest import CHUNK_LENGTH, ROW_LENGTH

ARMS = {"2K": ROW_LENGTH, "8K": CHUNK_LENGTH}


def plain_violations(row: list[int], table: list[tuple[int, int, int]]) -> list[bool]:
    """The invariant position by position, from the specification's lookup."""
    found = []
    for own, given in zip(naive.lookup(row, 4), table, strict=True):
        same_source = own[2] == given[2]
        found.append(given[0] < own[0] or (given[0] == own[0] and not same_source))
    return found


@pytest.mark.parametrize("arm", ARMS)
def test_silent_on_the_training_format(make_run, chunk_set, arm) -> None:
    run = make_run("arm", max_position_embeddings=ARMS[arm])
    targets = load_targets(chunk_set, "dev", full_chunks=True)
    plan = row_plan(open_checkpoint(run), chunk_set)
    found = check_reach(targets, EvaluationFormat(), plan)
    assert (found.violations, found.positions) == (0, len(targets.tokens))
    # The 2K model's table reaches into earlier rows; the 8K model's row is the chunk.
    assert (found.further > 0) == (arm == "2K")


@pytest.mark.parametrize("arm", ARMS)
def test_fires_on_both_mistakes_of_the_paper(make_run, chunk_set, arm) -> None:
    length = ARMS[arm]
    run = make_run("arm", max_position_embeddings=length)
    targets = load_targets(chunk_set, "dev", full_chunks=False)
    plan = row_plan(open_checkpoint(run), chunk_set)
    stride = length // 2 if arm == "8K" else length * 3 // 4  # windows across chunk boundaries
    mistaken = check_reach(targets, EvaluationFormat(stride, "chunk"), plan)
    expected = further = 0
    bos = chunk_set.bos_token_id
    for start, end in pairwise(targets.document_starts):
        tokens = targets.tokens[start:end]
        rows = stride_windows(tokens, length, stride, bos, plan.table, "chunk", CHUNK_LENGTH)
        names = ("table_order", "table_candidate", "table_distance")
        for i, row in enumerate(rows["input_ids"].tolist()):
            table = list(zip(*(rows[name][i].tolist() for name in names), strict=True))
            scored = rows["target_index"][i] >= 0
            for slot in np.flatnonzero(scored):
                further += table[slot][2] > slot
            # Inputs after the document's end are filled up and score nothing.
            last = int(np.flatnonzero(scored)[-1]) + 1
            wrong = plain_violations(row[:last], table[:last])
            expected += sum(bad and ok for bad, ok in zip(wrong, scored[:last], strict=True))
    assert mistaken.violations == expected > 0
    assert mistaken.further == further
    mended = check_reach(targets, EvaluationFormat(stride, "window"), plan)
    assert (mended.violations, mended.further) == (0, 0)


def test_one_position_of_each_kind() -> None:
    row = np.array([[0, 5, 6, 5, 6, 5]])
    order, distance = np.array([[0, 0, 0, 1, 2, 3]]), np.array([[0, 0, 0, 2, 2, 2]])
    assert not reach_violations(row, order, distance, 0).any()
    assert not reach_violations(row, order + np.eye(6, dtype=int)[[1]], distance, 0).any()
    lower = order - np.eye(6, dtype=int)[[4]]
    assert reach_violations(row, lower, distance, 0).tolist()[0] == [False] * 4 + [True, False]
    elsewhere = distance + 2 * np.eye(6, dtype=int)[[5]]
    assert reach_violations(row, order, elsewhere, 0).tolist()[0] == [False] * 5 + [True]


def test_records_carry_the_counts(make_run, chunk_set) -> None:
    run = make_run("arm", max_position_embeddings=CHUNK_LENGTH)
    form = EvaluationFormat(CHUNK_LENGTH // 2, "chunk")
    (result,) = score_runs([run], chunk_set, ["dev"], form)
    scores = read_scores(run / "scores" / f"dev.{form.name}.npz")
    targets = load_targets(chunk_set, "dev", full_chunks=False)
    checked = check_reach(targets, form, row_plan(open_checkpoint(run), chunk_set))
    reach = result.records.reach
    assert reach is not None
    assert reach.violations.sum() == checked.violations == scores.violation.sum()
    assert reach.positions.sum() == len(scores.nats)
    assert reach.further.sum() == checked.further
    losses = scores.nats[scores.violation].astype(np.float64)
    assert reach.violation_nats.sum() == pytest.approx(losses.sum(), rel=1e-12)
    (ablated,) = score_runs([run], chunk_set, ["dev"], ablated=True)
    assert ablated.records.reach is None


def test_the_command(make_run, chunk_set, capsys) -> None:
    run = make_run("arm", max_position_embeddings=CHUNK_LENGTH)
    common = [str(run), "--chunk-set", str(chunk_set.path), "--sets"]
    assert main([*common, "dev"]) == 0
    assert " 0 violations" in capsys.readouterr().out
    score_runs([run], chunk_set, ["dev"], EvaluationFormat(CHUNK_LENGTH // 2, "chunk"))
    capsys.readouterr()
    assert main([*common, "dev", "--format", "stride"]) == 0
    output = capsys.readouterr().out
    assert "knows less than the row shows, which never happens in training" in output
    assert "mean loss at the violations" in output
    assert main([*common, "confirm"]) == 2
    assert "opened by `confirm` alone" in capsys.readouterr().err
    shuffled = make_run("other", data={"table_source": "shuffled"})
    assert main([str(shuffled), "--chunk_set", str(chunk_set.path), "--sets", "dev"]) == 2
    assert "this table is shuffled" in capsys.readouterr().err
