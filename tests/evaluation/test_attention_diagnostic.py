"""The diagnostic's weights against eager attention, pair by pair."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from evaluation import attention_diagnostic
from evaluation.attention import diagnosis_table, read_diagnosis
from evaluation.attention_diagnostic import diagnose, main
from evaluation.checkpoints import load_model, open_checkpoint
from evaluation.class_bpb.statistics import BAND_NAMES, band_ends
from evaluation.formats import EvaluationFormat, iter_rows, load_targets
from evaluation.plans import row_plan
from tests.evaluation.conftest import CHUNK_LENGTH, ROW_LENGTH

ARMS = [
    pytest.param({"document_table": False}, False, id="base"),
    pytest.param({"max_position_embeddings": CHUNK_LENGTH}, False, id="8K-table"),
    pytest.param({"max_position_embeddings": CHUNK_LENGTH}, True, id="8K-ablated"),
    pytest.param(
        {"max_position_embeddings": CHUNK_LENGTH, "query_scaling": "log_length"}, False, id="scaled"
    ),
]


@pytest.mark.parametrize(("changes", "ablated"), ARMS)
def test_equals_eager_attention(make_run, chunk_set, monkeypatch, changes, ablated) -> None:
    monkeypatch.setattr(attention_diagnostic, "_QUERY_BLOCK", 5)  # blocks that do not divide rows
    run = make_run("arm", **changes)
    diagnosis = diagnose(run, chunk_set, "dev", num_documents=5)
    found = diagnosis.ablated if ablated else diagnosis.whole
    assert found is not None
    checkpoint = open_checkpoint(run)
    model = load_model(checkpoint, torch.device("cpu"))
    model.set_attn_implementation("eager")
    targets = load_targets(chunk_set, "dev", full_chunks=True)
    first = targets.document_starts[:5] // CHUNK_LENGTH
    plan = row_plan(checkpoint, chunk_set, ablated)
    weights, nats = [[[] for _ in BAND_NAMES] for _ in range(2)]
    for batch in iter_rows(targets, EvaluationFormat(), plan, CHUNK_LENGTH, first):
        fields = {name: torch.from_numpy(array) for name, array in batch.table.items()}
        with torch.inference_mode():
            output = model(
                input_ids=torch.from_numpy(batch.input_ids),
                output_attentions=True,
                **(fields if checkpoint.has_table else {}),
            )
        losses = -output.logits.log_softmax(-1)
        for row in range(len(batch.input_ids)):
            for slot in range(plan.row_length):
                place = batch.target_index[row, slot]
                order, distance = targets.order[place], targets.distance[place]
                if order < 2 or distance > slot:
                    continue
                key = slot - distance + 1
                # The induction key holds the target's earlier occurrence.
                assert batch.input_ids[row, key] == targets.tokens[place]
                largest = max(float(layer[row, :, slot, key].max()) for layer in output.attentions)
                band = sum(distance > end for end in band_ends(CHUNK_LENGTH))
                weights[band].append(largest)
                nats[band].append(float(losses[row, slot, targets.tokens[place]]))
    assert sum(map(len, weights)) >= 7
    for i, name in enumerate(BAND_NAMES):
        assert found.num_targets[name] == len(weights[i])
        if weights[i]:
            # float32 softmax and products in another order
            assert found.weight[name] == pytest.approx(np.mean(weights[i]), abs=1e-5)
            assert found.nats[name] == pytest.approx(np.mean(nats[i]), abs=1e-4)
        else:
            assert np.isnan(found.weight[name])
    gains = {name: p.tolist() for name, p in model.named_parameters() if "query_gain" in name}
    assert diagnosis.query_gains == list(gains.values())
    assert bool(gains) == ("query_scaling" in changes)


def test_the_command(make_run, chunk_set, tmp_path, capsys) -> None:
    runs = [make_run("b", document_table=False), make_run("b_table", query_scaling="head_gain")]
    command = [*map(str, runs), "--chunk-set", str(chunk_set.path), "--set"]
    out = tmp_path / "d" / "attention.json"
    assert main([*command, "dev", "--num-documents", "2", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "b_table (ablated) s44" in printed
    written = json.loads(out.read_text())
    assert written == [json.loads((run / "attention" / "dev.json").read_text()) for run in runs]
    assert written[0]["whole"]["weight"]["beyond"] is None  # no row shows so far back
    assert [one["ablated"] is None for one in written] == [True, False]
    assert main([*command, "confirm"]) == 2
    assert "opened by `confirm` alone" in capsys.readouterr().err
    assert main([*command, "dev", "--num_documents", "0"]) == 2
    found = [read_diagnosis(run / "attention" / "dev.json") for run in runs]
    assert [one.checkpoint_sha256 for one in found] == [open_checkpoint(run).sha256 for run in runs]
    table = diagnosis_table(found)
    assert [row[0] for row in table.rows] == ["b s44", "b_table s44", "b_table (ablated) s44"]
    assert table.rows[0][-1] == "—"
    count = found[0].whole.num_targets["to_1_16"]
    assert table.rows[0][1].endswith(f"; {count})")
    assert ROW_LENGTH < CHUNK_LENGTH


def test_other_files_are_refused(tmp_path) -> None:
    path = tmp_path / "dev.json"
    for text in ("{", "[]", "{}", '{"arm": "b"}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="must be written by python -m evaluation.attention"):
            read_diagnosis(path)
