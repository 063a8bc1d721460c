"""The GPU check in miniature: every section runs here, and its JSON is what the schema says."""

import json
from pathlib import Path

import jsonschema
import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_context import Context
from benchmarks.gpu_speed import UPDATES
from benchmarks.reference import PlainUpdate
from training.config import OptimizerConfig
from training.optim import RecipeOptimizer

pytestmark = pytest.mark.timeout(900)  # the miniature's twelve minutes and some
SCHEMA = Path(gpu_check.__file__).with_name("gpu_check.schema.json")


@pytest.fixture(scope="module")
def miniature(tmp_path_factory):
    """On a machine with a GPU too: it is hidden, so that the miniature is what runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        # Minutes enough that a busy machine skips nothing; a quiet one takes half of one.
        return gpu_check.check(12.0, tmp_path_factory.mktemp("check"))


def test_every_section_runs_and_the_json_is_valid(miniature):
    report, path = miniature
    assert path.name == "gpu_check_cpu_miniature.json"
    assert json.loads(path.read_text()) == json.loads(json.dumps(report, default=str))
    jsonschema.validate(report, json.loads(SCHEMA.read_text()))
    assert [s["name"] for s in report["sections"]] == [s.name for s in gpu_check.SECTIONS]
    for section in report["sections"]:
        assert section["status"] == "ok", section


def test_everything_that_ran_is_correct(miniature):
    correctness = miniature[0]["sections"][1]["results"]
    assert correctness["num_failed"] == 0, correctness
    assert correctness["num_passed"] >= 8


def test_updates_cover_all_arms(miniature):
    arms = miniature[0]["sections"][2]["results"]["arms"]
    assert set(arms) == {name for name, *_ in UPDATES}
    assert all("tokens_per_second" in arm for arm in arms.values()), arms


def test_a_failing_section_is_noted_and_the_rest_goes_on(tmp_path, monkeypatch):
    def broken(context):
        context.results["first_part"] = 1
        raise RuntimeError("the device is on fire")

    sections = (
        gpu_check.Section("correctness", broken, 0.5),
        gpu_check.Section("environment", gpu_check.environment, 0.5),
    )
    monkeypatch.setattr(gpu_check, "SECTIONS", sections)
    report, path = gpu_check.check(1.0, tmp_path)
    first, second = report["sections"]
    assert first["status"] == "failed"
    assert "on fire" in first["message"]
    assert first["results"] == {"first_part": 1}
    assert second["status"] == "ok"
    jsonschema.validate(json.loads(path.read_text()), json.loads(SCHEMA.read_text()))


def test_sections_are_skipped_with_a_word_when_time_is_short(tmp_path):
    report, _ = gpu_check.check(0.01, tmp_path)
    assert {s["status"] for s in report["sections"]} == {"skipped"}
    assert "s left" in report["sections"][0]["message"]


@pytest.mark.parametrize("arm", ["b_table", "lg512"])
def test_the_plain_reference_computes_the_same_update(arm, tmp_path):
    context = Context(torch.device("cpu"), True, None, tmp_path)
    config = context.config(arm)
    ids = context.rows(config, 4 * config.max_position_embeddings)
    targets = ids.roll(-1, 1)
    ours, theirs = context.model(config).train(), context.model(config).train()
    reference = PlainUpdate(theirs, ids.shape[1], True, torch.float32)
    table = None
    if config.document_table:
        from modeling_doctab import lookup_document_table

        segments = (ids == config.bos_token_id).long().cumsum(1)
        table = lookup_document_table(ids, 4, segments, config.table_reach)
    loss = ours(ids, shift_labels=targets).loss
    plain = reference.loss(ids, targets, table)
    torch.testing.assert_close(loss, plain, atol=1e-5, rtol=1e-5)
    loss.backward()
    plain.backward()
    others = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        # The loss is summed in another order, and embeddings' gradients are bf16.
        bound = 2e-2 if p.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(p.grad, others[name].grad, atol=bound * 1e-2, rtol=bound)
    optimizer = RecipeOptimizer(ours, OptimizerConfig(), 1000)
    optimizer.step(0)
    reference.step()
    assert all(p.grad is None for p in theirs.parameters())
