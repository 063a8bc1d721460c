"""A tiny run from start to end: files, resume, refusals; the launcher's cases are marked."""

import fcntl
import json
import shutil
import subprocess
import sys
import time

import pytest
import torch
import yaml
from safetensors.torch import load_file

from training import checkpoint
from training.batches import RowMaker
from training.metrics import Clock
from training.train import train

LAUNCH = [
    sys.executable,
    "-m",
    "accelerate.commands.launch",
    "--config_file",
    "accelerate_config.yaml",
]


def read(run, name):
    return json.loads((run / name).read_text())


def test_a_run_writes_what_the_other_rooms_read(tiny_recipe):
    recipe = tiny_recipe(training={"evaluate_every": 3, "evaluation_chunks": 2})
    assert train(recipe) == 0
    run = recipe.run_dir
    assert read(run, "status.json") == {"state": "done", "update": 6, "message": ""}
    results = read(run, "results.json")
    expected = (
        "target_sha256",
        "parameters",
        "flops_per_token",
        "training_seconds",
        "loop_seconds",
        "cpu_seconds",
        "peak_memory_bytes",
        "data_sha256",
        "step0_loss",
    )
    assert all(results[key] is not None for key in expected)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines if "loss" in line] == list(range(6))
    assert sum("evaluation_bpb" in line for line in lines) == 2
    assert lines[0]["loss"] == results["step0_loss"]
    assert yaml.safe_load((run / "config.yaml").read_text())["name"] == "tiny"
    names = {path.name for path in (run / "final").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "modeling_doctab.py"} <= names
    assert not list(run.rglob("*.bin"))
    assert not list(run.rglob("*.pt"))
    names = [path.name for path in checkpoint.list_checkpoints(run / "checkpoints")]
    assert names == ["update_000004", "update_000006"]


def test_all_arms_and_seeds_see_identical_targets(tiny_recipe, tmp_path):
    hashes = set()
    for i, changes in enumerate(
        (
            {"model": {"document_table": False}},
            {"model": {}},
            {"model": {"max_position_embeddings": 64, "window_pattern": "S", "short_window": 8}},
            {"seed": 45},
            {"training": {"tokens_per_micro_batch": 64}},
        )
    ):
        recipe = tiny_recipe(output_dir=str(tmp_path / str(i)), **changes)
        assert train(recipe) == 0
        hashes.add(read(recipe.run_dir, "results.json")["target_sha256"])
    assert len(hashes) == 1


def test_the_loss_falls(tiny_recipe):
    recipe = tiny_recipe(training={"num_updates": 30, "checkpoint_every": 0})
    assert train(recipe) == 0
    lines = (recipe.run_dir / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < losses[0] - 1


def test_evaluation_leaves_weights(tiny_recipe, tmp_path):
    def final(name, every):
        recipe = tiny_recipe(output_dir=str(tmp_path / name), training={"evaluate_every": every})
        assert train(recipe) == 0
        return read(recipe.run_dir, "results.json")["final_sha256"]

    assert final("with", 1) == final("without", 0)


def test_resume_is_bit_equal(tiny_recipe, tmp_path):
    whole = tiny_recipe(output_dir=str(tmp_path / "whole"))
    assert train(whole) == 0
    cut = tiny_recipe(output_dir=str(tmp_path / "cut"))
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "STOP").touch()
    assert train(cut) == 75
    status = read(cut.run_dir, "status.json")
    assert status["state"] == "stopped"
    assert status["update"] == 1
    (tmp_path / "cut" / "STOP").unlink()
    assert train(cut, resume=True) == 0
    assert train(cut, resume=True) == 0  # done already
    for name in ("final/model.safetensors", "checkpoints/update_000006/optimizer.safetensors"):
        ours, theirs = load_file(cut.run_dir / name), load_file(whole.run_dir / name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), name
    lines = (cut.run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines] == list(range(6))


def test_microbatch_invariance(tiny_recipe, tmp_path):
    losses = []
    for micro in (64, 256):
        recipe = tiny_recipe(
            output_dir=str(tmp_path / str(micro)),
            model={"embedding_dtype": "float32"},
            training={"tokens_per_micro_batch": micro},
            # Adam's first steps turn the rounding of near-zero gradients into whole steps.
            optimizer=dict.fromkeys(("matrix_lr", "embedding_lr", "head_lr", "x0_lr"), 0.001),
        )
        assert train(recipe) == 0
        lines = (recipe.run_dir / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    # The same gradients, summed in another order; in bf16 storage they would round differently.
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_refusals(tiny_recipe, chunk_set, tmp_path):
    with pytest.raises(ValueError, match="data.chunk_set must name"):
        train(tiny_recipe(data={"chunk_set": None}))
    with pytest.raises(ValueError, match=r"manifest\.json"):
        train(tiny_recipe(data={"chunk_set": str(tmp_path)}))
    with pytest.raises(ValueError, match="vocab_size is 400 in the recipe, but 300"):
        train(tiny_recipe(model={"vocab_size": 400}))
    assert train(tiny_recipe()) == 0
    with pytest.raises(ValueError, match="already holds a run.*--overwrite"):
        train(tiny_recipe())
    with pytest.raises(ValueError, match="optimizer.matrix_lr .0.04 then, 0.1 now"):
        train(tiny_recipe(optimizer={"matrix_lr": 0.1}), resume=True)
    assert train(tiny_recipe(), overwrite=True) == 0


def files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"split": "trian"}}, "trian"),
        ({"training": {"trackers": ["crystal"]}}, "no tracker 'crystal'"),
        ({"training": {"attn_implementation": "guess"}}, "guess"),
        ({"training": {"evaluate_every": 1, "evaluation_split": "devv"}}, "evaluation_split must"),
    ],
)
def test_bad_input_leaves_a_finished_run_as_it_is(tiny_recipe, changes, message):
    assert train(tiny_recipe()) == 0
    run = tiny_recipe().run_dir
    before = files(run)
    with pytest.raises(ValueError, match=message):
        train(tiny_recipe(**changes), overwrite=True)
    assert files(run) == before


def test_only_a_run_folder_is_overwritten(tiny_recipe, tmp_path):
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter_1.txt").write_text("It was a dark and stormy night.")
    with pytest.raises(ValueError, match=r"--overwrite deletes a run folder; .* but chapter_1.txt"):
        train(tiny_recipe(output_dir=str(folder)), overwrite=True)
    assert [path.name for path in folder.iterdir()] == ["chapter_1.txt"]


def test_a_finished_run_without_checkpoints_is_done(tiny_recipe):
    assert train(tiny_recipe()) == 0
    run = tiny_recipe().run_dir
    shutil.rmtree(run / "checkpoints")  # as a study does
    before = files(run)
    assert train(tiny_recipe(), resume=True) == 0
    with pytest.raises(ValueError, match="already holds a run"):
        train(tiny_recipe())
    with pytest.raises(ValueError, match=r"training.num_updates \(6 then, 9 now\)"):
        train(tiny_recipe(training={"num_updates": 9}), resume=True)
    assert files(run) == before


def test_two_trainers_do_not_share_a_folder(tiny_recipe):
    run = tiny_recipe().run_dir
    run.mkdir()
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process trains in .* choose another"):
            train(tiny_recipe())
    assert train(tiny_recipe()) == 0


def test_the_in_loop_evaluation_takes_the_recipe_s_fields(tiny_recipe, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "training.evaluate.RowMaker",
        lambda *given: seen.append(given[3]) or RowMaker(*given),
    )
    recipe = tiny_recipe(
        data={"table_source": "foreign", "table_dropout": 0.5},
        training={"num_updates": 2, "evaluate_every": 2},
    )
    assert train(recipe) == 0
    assert [(table.source, table.dropout, table.seed) for table in seen] == [
        ("foreign", 0.0, recipe.seed)
    ]


def test_damaged_checkpoints_are_passed_over(tiny_recipe, capsys):
    recipe = tiny_recipe()
    assert train(recipe) == 0
    newest = recipe.run_dir / "checkpoints" / "update_000006" / "model.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    path, state = checkpoint.latest_checkpoint(recipe.run_dir / "checkpoints")
    assert path.name == "update_000004"
    assert state["update"] == 4
    assert "model.safetensors is damaged" in capsys.readouterr().out


def launch(recipe, tmp_path, *arguments, processes=1):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.as_dict()))
    command = [*LAUNCH, "--num_processes", str(processes), "-m", "training.train", str(path)]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=240)


@pytest.mark.multi_process
def test_two_processes_equal_one(tiny_recipe, tmp_path):
    losses = []
    for processes in (1, 2):
        recipe = tiny_recipe(
            output_dir=str(tmp_path / str(processes)), training={"tokens_per_micro_batch": 128}
        )
        result = launch(recipe, tmp_path, processes=processes)
        assert result.returncode == 0, result.stderr
        lines = (recipe.run_dir / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
        assert read(recipe.run_dir, "results.json")["num_processes"] == processes
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_cpu_seconds_add_up_and_leave_pauses_out():
    clock = Clock(cpu_seconds=100.0)
    time.sleep(0.3)
    assert 100.0 <= clock.cpu_seconds < 100.2
    began = time.process_time()
    while time.process_time() < began + 0.05:
        pass
    assert clock.cpu_seconds >= 100.05
