"""The model card: every number from a file, and refusals before anything is written."""

import json

import pytest
import yaml

from data_scripts.chunk_set import ChunkSet
from evaluation.report import build_report
from evaluation.score import score_runs
from hub_cards.cards import main, model_card
from training.train import train


@pytest.fixture(scope="module")
def scored_runs(request, tmp_path_factory, chunk_set):
    """A base arm and its table arm, trained for a moment, scored and reported."""
    from training.config import build_recipe

    folder = tmp_path_factory.mktemp("runs")
    runs = []
    for name, table in (("b", False), ("b_table", True)):
        plain = {
            "name": name,
            "baseline": "b" if table else None,
            "output_dir": str(folder / name),
            "model": {
                "vocab_size": 300,
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "head_dim": 16,
                "max_position_embeddings": 32,
                "document_table": table,
            },
            "data": {"chunk_set": str(chunk_set), "chunk_length": 64},
            "training": {
                "num_updates": 4,
                "tokens_per_update": 256,
                "tokens_per_micro_batch": 256,
                "num_threads": 1,
            },
        }
        recipe = build_recipe(plain, name)
        assert train(recipe) == 0
        runs.append(recipe.run_dir)
    score_runs(runs, ChunkSet.open(chunk_set), ["dev_val"])
    build_report(runs, folder / "report", num_resamples=200)
    return runs


def test_numbers_come_from_the_files(scored_runs):
    base, table = scored_runs
    card = model_card(table, base, repo_id="someone/b-table")
    results = json.loads((table / "results.json").read_text())
    gains = json.loads((table / "gains.json").read_text())["sets"]["dev_val.training"]
    text = str(card)
    for shown in (
        f"{results['parameters']:,}",
        f"{gains['bits_per_byte']:.5f}",
        f"{gains['gain']:+.4f}",
        f"{gains['gain_interval'][0]:+.4f}",
        results["target_sha256"],
        results["final_sha256"],
        'folder = "someone/b-table"',
        "copy up to 4 tokens back",
    ):
        assert shown in text
    assert card.data.license == "apache-2.0"
    values = {r.metric_type: r.metric_value for r in card.data.eval_results}
    assert values["bits_per_byte"] == round(gains["bits_per_byte"], 5)


def test_a_base_arm_has_a_card_without_gains(scored_runs):
    text = str(model_card(scored_runs[0]))
    assert "Gain over" not in text
    assert "| document table | none |" in text


def test_command_writes_card_and_recipe_beside_the_model(scored_runs, capsys):
    base, table = scored_runs
    assert main([str(table), "--baseline", str(base)]) == 0
    assert (table / "final" / "README.md").read_text().startswith("---\n")
    assert yaml.safe_load((table / "final" / "recipe.yaml").read_text())["name"] == "b_table"


def test_refusals(scored_runs, tmp_path, capsys):
    table = scored_runs[1]
    assert main([str(tmp_path)]) == 2
    assert "results.json, which does not exist" in capsys.readouterr().err
    assert main([str(table), "--license", "mine"]) == 2
    assert "license must be one of" in capsys.readouterr().err
    assert main([str(table), "--baseline", str(table)]) == 2
    assert "other records" in capsys.readouterr().err
