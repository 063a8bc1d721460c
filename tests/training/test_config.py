"""Recipes: bases, overrides, and an error that names the key for whatever is wrong."""

import json
import re

import pytest
import yaml

from data_scripts.rows import SOURCES
from training.config import load_recipe
from training.train import main


def write(folder, file, **keys):
    path = folder / file
    path.write_text(yaml.safe_dump(keys))
    return path


def test_a_variant_states_only_what_differs(tmp_path):
    write(tmp_path, "b.yaml", name="b", model={"hidden_size": 64, "document_table": False})
    path = write(
        tmp_path, "c.yaml", base="b.yaml", name="c", baseline="b", model={"document_table": True}
    )
    recipe = load_recipe(path, {"num_updates": 7, "optimizer.matrix_lr": 1, "model.head_dim": 8})
    assert recipe.name == "c"
    assert recipe.model == {"hidden_size": 64, "document_table": True, "head_dim": 8}
    assert recipe.training.num_updates == 7
    assert recipe.optimizer.matrix_lr == 1.0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"nmae": "b"}, "nmae is not a recipe key; did you mean name"),
        ({"name": "b", "training": {"num_update": 3}}, "training.num_update .*num_updates"),
        ({"name": "b", "training": {"num_updates": "many"}}, "num_updates must be int"),
        ({"name": "b", "training": {"num_updates": True}}, "num_updates must be int"),
        ({"name": "b", "training": 3}, "a section is a mapping"),
        ({"name": "a b"}, "letters, digits"),
        ({}, "name"),
        (
            {"name": "b", "model": {"max_position_embeddings": 3000}},
            "chunk_length must be a multiple of the row length.*8192 and 3000",
        ),
        ({"name": "b", "training": {"tokens_per_micro_batch": 5000}}, "multiple of data.chunk_le"),
        (
            {"name": "b", "training": {"tokens_per_update": 2**17 + 8192}},
            "multiple of training.tokens_per_micro_batch",
        ),
        ({"name": "b", "data": {"table_source": "web"}}, "table_source must be one of"),
        ({"name": "b", "data": {"table_dropout": 1.5}}, "table_dropout"),
        ({"name": "b", "base": "missing.yaml"}, "no such recipe file"),
        ({"name": "b", "base": "r.yaml"}, "its own base"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, keys, message):
    path = write(tmp_path, "r.yaml", **keys)
    with pytest.raises(ValueError, match=message):
        load_recipe(path)


def test_errors_come_before_any_work_and_exit_with_2(tmp_path, capsys):
    path = write(tmp_path, "r.yaml", name="b", training={"num_updatse": 3})
    assert main([str(path)]) == 2
    captured = capsys.readouterr().err
    assert captured.count("\n") == 1
    assert "training.num_updatse is not a recipe key; did you mean num_updates" in captured
    path = write(tmp_path, "r.yaml", name="b", model={"hidden_sise": 3})
    assert main([str(path)]) == 2
    assert "hidden_sise" in capsys.readouterr().err


def test_dry_run_prints_json_alone(capsys):
    assert main(["--dry_run", "--json", "training/recipes/demo/b.yaml"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert run["recipe"] == "training/recipes/demo/b.yaml"
    assert run["tokens_per_update"] == 4096
    assert run["num_updates"] == 75
    assert run["rows_per_update"] == 16


def test_flags_take_dashes_and_sections(capsys):
    recipe = "training/recipes/demo/lg_table.yaml"
    flags = ["--num-updates", "5", "--training.tokens_per_update", "8192", "--dry-run", "--json"]
    assert main([recipe, *flags, "--model", "short_window=32"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert run["num_updates"] == 5
    assert run["rows_per_update"] == 8


def test_hash_ignores_paths_and_execution(tiny_recipe):
    one = tiny_recipe()
    assert one.sha256() == tiny_recipe(output_dir="x", training={"checkpoint_every": 1}).sha256()
    assert one.sha256() != tiny_recipe(seed=45).sha256()
    assert one.sha256() != tiny_recipe(optimizer={"matrix_lr": 0.1}).sha256()


def test_a_heading_with_nothing_below_it_keeps_the_base_s_section(tmp_path):
    write(tmp_path, "b.yaml", name="b", training={"num_updates": 7}, model={"hidden_size": 64})
    (tmp_path / "r.yaml").write_text("base: b.yaml\nname: r\ntraining:\n  # none yet\nmodel:\n")
    found = load_recipe(tmp_path / "r.yaml", {"num_loader_threads": 3})
    assert (found.training.num_updates, found.training.num_loader_threads) == (7, 3)
    assert found.model["hidden_size"] == 64


def test_every_source_of_table_fields_may_be_named(tiny_recipe):
    # The recipe's check has a list of its own, so that reading a recipe does not import numba.
    for source in SOURCES:
        assert tiny_recipe(data={"table_source": source}).data.table_source == source
    with pytest.raises(ValueError, match=re.escape(f"must be one of {SOURCES}")):
        tiny_recipe(data={"table_source": "moon"})
