"""Every recipe of the paper, held against the paper's own numbers (Table 1, Section 3.1)."""

import json
from pathlib import Path

import pytest

from training.config import load_recipe
from training.setup import model_config
from training.train import main

PAPER = Path("training/recipes/paper")
# recipe: (millions of parameters, FLOPs per token in 1e8, row length)
EXPECTED = {
    "b": (50.332, 2.1709, 2048),
    "b_table": (67.139, 2.1709, 2048),
    "b_bigram": (83.887, 2.1709, 2048),
    "b_bigram_table": (100.693, 2.1709, 2048),
    "l5_8k": (36.701, 2.2651, 8192),
    "lg512": (50.332, 2.2271, 8192),
    "lg512_table": (67.139, 2.2271, 8192),
    "lg1024": (50.332, 2.4266, 8192),
    "a": (50.332, 3.3978, 8192),
    "a_table": (67.139, 3.3978, 8192),
    "a_table_dropout": (67.139, 3.3978, 8192),
    "a_table_foreign": (67.139, 3.3978, 8192),
    "a_table_shuffled": (67.139, 3.3978, 8192),
    "a_table_empty": (67.139, 3.3978, 8192),
    "b_table_empty": (67.139, 2.1709, 2048),
    "a_log_length": (50.332, 3.3978, 8192),
    "a_head_gain": (50.332, 3.3978, 8192),
    "d": (71.304, 4.9708, 8192),
    "lg512_w384": (33.031, 1.3872, 8192),
    "lg512_w384_table": (45.635, 1.3872, 8192),
    "lg512_w768": (94.373, 4.4731, 8192),
    "lg512_w768_table": (119.582, 4.4731, 8192),
    "packed": (50.332, 2.1709, 2048),
    "packed_table": (67.139, 2.1709, 2048),
}


def test_dry_run_of_every_arm_is_the_paper(capsys):
    paths = sorted(PAPER.glob("*.yaml"))
    assert {p.stem for p in paths} == set(EXPECTED)
    assert main(["--dry_run", "--json", *map(str, paths)]) == 0
    for run in json.loads(capsys.readouterr().out):
        parameters, flops, row_length = EXPECTED[run["name"]]
        assert run["recipe"].endswith(f"{run['name']}.yaml")
        assert round(run["parameters"] / 1e6, 3) == parameters
        assert abs(run["flops_per_token"] / 1e8 - flops) < 0.5001e-4
        assert run["flops_per_token_with_recomputation"] == pytest.approx(
            run["flops_per_token"] * 4 / 3
        )
        assert run["row_length"] == row_length
        assert (run["num_updates"], run["tokens_per_update"]) == (953, 2**19)
        assert run["rows_per_micro_batch"] == 2**17 // row_length
        assert run["micro_batches_per_update"] == 4
        assert run["tokens"] == 499_646_464
        assert run["data_sha256"] is None


def test_windows_of_every_arm():
    windows = {}
    for name in EXPECTED:
        config = model_config(load_recipe(PAPER / f"{name}.yaml"))
        windows[name] = [config.window(i) for i in range(config.num_hidden_layers)]
    assert windows["b"] == windows["b_bigram_table"] == [1024, 1024, 1024, 2048] * 2
    assert windows["l5_8k"] == [4096, 4096, 4096, 8192, 8192]
    assert windows["a_table"] == [4096, 4096, 4096, 8192] * 2
    assert windows["d"] == [4096, 4096, 4096, 8192] * 3
    assert windows["lg512_w768_table"] == windows["lg512"] == [512] * 7 + [8192]
    assert windows["lg1024"] == [1024] * 7 + [8192]


def test_arms_differ_from_their_baseline_in_what_they_say():
    def flat(plain, prefix=""):
        for key, value in plain.items():
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield prefix + key, value

    for name in EXPECTED:
        recipe = load_recipe(PAPER / f"{name}.yaml")
        if recipe.baseline is None:
            continue
        base = load_recipe(PAPER / f"{recipe.baseline}.yaml")
        ours, theirs = dict(flat(recipe.as_dict())), dict(flat(base.as_dict()))
        keys = ours.keys() | theirs.keys()
        changed = {key for key in keys if ours.get(key) != theirs.get(key)}
        changed -= {"name", "description", "baseline", "output_dir"}
        assert changed <= {
            "model.document_table",
            "model.bigram_rows",
            "model.query_scaling",
            "data.table_dropout",
            "data.table_source",
        }
        assert changed


def test_every_recipe_says_what_it_is():
    for path in Path("training/recipes").rglob("*.yaml"):
        assert path.read_text().startswith("# "), path
        assert load_recipe(path).description, path
        assert load_recipe(path).name == path.stem, path
