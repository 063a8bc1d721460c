"""A run survives a kill at any moment, a full disk, damaged files, signals, NaN and trackers."""

import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file

from tests.training import driver
from training import checkpoint, metrics
from training.config import build_recipe
from training.train import main, train

LAUNCH = [
    sys.executable,
    *("-m", "accelerate.commands.launch", "--config_file", "accelerate_config.yaml"),
]


def read(run_dir, name):
    return json.loads((Path(run_dir) / name).read_text())


def final_bits(run_dir, update=6):
    """Every tensor of the last checkpoint: weights and optimizer state."""
    folder = checkpoint.checkpoint_path(Path(run_dir) / "checkpoints", update)
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")


def assert_same_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    different = [key for key in ours if not torch.equal(ours[key], theirs[key])]
    assert not different


@pytest.fixture(scope="module")
def forked():
    """Start a training process quickly: a server that has imported everything forks it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.driver"])

    def start(recipe, log, resume=False, kill_at=None):
        arguments = (recipe.as_dict(), resume, kill_at, str(log))
        process = context.Process(target=driver.in_process, args=arguments)
        process.start()
        return process

    return start


@pytest.fixture
def uninterrupted(tiny_recipe, tmp_path):
    recipe = tiny_recipe(output_dir=str(tmp_path / "uninterrupted"))
    assert train(recipe) == 0
    return final_bits(recipe.run_dir)


def resume_until_done(forked, recipe, log):
    process = forked(recipe, log, resume=True)
    process.join(120)
    assert process.exitcode == 0, Path(log).read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sigkill_at_each_write_point(forked, tiny_recipe, uninterrupted, tmp_path):
    killed = 0
    for point in range(200):
        recipe = tiny_recipe(output_dir=str(tmp_path / f"run{point}"))
        process = forked(recipe, tmp_path / "log", kill_at=point)
        process.join(120)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL, (tmp_path / "log").read_text()
        killed += 1
        resume_until_done(forked, recipe, tmp_path / "log")
        assert_same_bits(final_bits(recipe.run_dir), uninterrupted)
        assert not list(recipe.run_dir.rglob(".tmp_*"))
        shutil.rmtree(recipe.run_dir)
    assert 30 < killed < 199


def test_sigkill_at_some_write_points(forked, tiny_recipe, uninterrupted, tmp_path):
    for point in (1, 9, 17, 25):
        recipe = tiny_recipe(output_dir=str(tmp_path / f"run{point}"))
        process = forked(recipe, tmp_path / "log", kill_at=point)
        process.join(120)
        assert process.exitcode == -signal.SIGKILL, (tmp_path / "log").read_text()
        resume_until_done(forked, recipe, tmp_path / "log")
        assert_same_bits(final_bits(recipe.run_dir), uninterrupted)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sigkill_at_random(forked, tiny_recipe, tmp_path):
    changes = {"num_updates": 40, "checkpoint_every": 3}
    whole = tiny_recipe(output_dir=str(tmp_path / "whole"), training=changes)
    assert train(whole) == 0
    expected = final_bits(whole.run_dir, 40)
    recipe = tiny_recipe(output_dir=str(tmp_path / "cut"), training=changes)
    rng = random.Random(0)
    kills = 0
    while kills < 20:
        process = forked(recipe, tmp_path / "log", resume=True)
        time.sleep(rng.uniform(0.05, 1.2))
        if process.exitcode is None:
            process.kill()
            kills += 1
        process.join()
        if process.exitcode == 0:  # done before its kill: begin another run
            assert_same_bits(final_bits(recipe.run_dir, 40), expected)
            shutil.rmtree(recipe.run_dir)
    resume_until_done(forked, recipe, tmp_path / "log")
    assert_same_bits(final_bits(recipe.run_dir, 40), expected)


def write_recipe(recipe, folder):
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.as_dict()))
    return path


def wait_for_updates(run_dir, count, process):
    deadline = time.monotonic() + 120
    path = Path(run_dir) / "metrics.jsonl"
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and path.read_text().count("\n") >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"no {count} updates: {process.poll()}, {process.stderr.read()}")


def workers_of(recipe_path):
    """Processes that train this recipe, launchers left out."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if str(recipe_path) in words and not any("accelerate" in w for w in words):
            found.append(int(entry.parent.name))
    return found


def interrupt(recipe, folder, processes, how):
    """Launch, wait for some updates, interrupt, and return once no worker is left."""
    path = write_recipe(recipe, folder)
    command = [*LAUNCH, "--num_processes", str(processes), "-m", "training.train", str(path)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for_updates(recipe.run_dir, 3, process)
    if how == "STOP":
        (recipe.run_dir / "STOP").touch()
    elif how == "ctrl-c":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(how)
    process.wait(120)
    deadline = time.monotonic() + 60
    while workers_of(path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert workers_of(path) == [], "a worker was orphaned"
    (recipe.run_dir / "STOP").unlink(missing_ok=True)
    return path


def stops_and_resumes(tiny_recipe, tmp_path, processes, hows):
    changes = {"num_updates": 300, "checkpoint_every": 0, "tokens_per_micro_batch": 128}
    for i, how in enumerate(hows):
        recipe = tiny_recipe(output_dir=str(tmp_path / f"run{i}"), training=changes)
        path = interrupt(recipe, tmp_path, processes, how)
        status = read(recipe.run_dir, "status.json")
        assert status["state"] == "stopped", (how, status)
        done = status["update"]
        assert 3 <= done < 300
        _, state = checkpoint.latest_checkpoint(recipe.run_dir / "checkpoints")
        assert state["update"] == done
        # It goes on from there: a few updates are enough to see it.
        short = tiny_recipe(output_dir=str(tmp_path / f"run{i}"), training=changes)
        path = write_recipe(short, tmp_path)
        (recipe.run_dir / "STOP").touch()
        command = [*LAUNCH, "--num_processes", str(processes), "-m", "training.train", str(path)]
        subprocess.run([*command, "--resume", "auto"], capture_output=True, timeout=120)
        status = read(recipe.run_dir, "status.json")
        assert (status["state"], status["update"]) == ("stopped", done + 1)
        lines = (recipe.run_dir / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["update"] for line in lines] == list(range(done + 1))


@pytest.mark.multi_process
@pytest.mark.timeout(600)
def test_signals_one_process(tiny_recipe, tmp_path):
    hows = (signal.SIGTERM, signal.SIGUSR1, "ctrl-c", "STOP")
    stops_and_resumes(tiny_recipe, tmp_path, 1, hows)


@pytest.mark.multi_process
@pytest.mark.timeout(600)
def test_signals_two_processes(tiny_recipe, tmp_path):
    stops_and_resumes(tiny_recipe, tmp_path, 2, (signal.SIGTERM, "ctrl-c", "STOP"))


@pytest.mark.multi_process
@pytest.mark.timeout(600)
def test_one_two_one_processes(tiny_recipe, tmp_path):
    """Another number of processes goes on with the same global batches."""
    training = {"num_updates": 9, "tokens_per_micro_batch": 128, "checkpoint_every": 3}
    whole = tiny_recipe(output_dir=str(tmp_path / "whole"), training=training)
    assert train(whole) == 0
    cut = tiny_recipe(output_dir=str(tmp_path / "cut"), training=training)
    path = write_recipe(cut, tmp_path)
    for processes, until in ((1, 3), (2, 6), (1, 9)):
        command = [*LAUNCH, "--num_processes", str(processes), "-m", "training.train", str(path)]
        if until < 9:
            # Stop after the checkpoint at `until`, whichever update notices the file.
            code = "import training.train as t, sys\n" + (
                "original = t.record\n"
                "def record(run, update, *rest):\n"
                "    original(run, update, *rest)\n"
                f"    run.stop.reason = 'test' if update + 2 >= {until} else None\n"
                "t.record = record\n"
                "sys.exit(t.main())\n"
            )
            script = tmp_path / "until.py"
            script.write_text(code)
            command = [*LAUNCH, "--num_processes", str(processes), str(script), str(path)]
        environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
        result = subprocess.run(
            [*command, "--resume", "auto"],
            capture_output=True,
            text=True,
            timeout=200,
            env=environment,
        )
        assert read(cut.run_dir, "status.json")["update"] == until, result.stderr[-2000:]
    losses = []
    for recipe in (whole, cut):
        lines = (recipe.run_dir / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    # Across world sizes gradients are summed in another order.
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    assert losses[0][:4] == pytest.approx(losses[1][:4], abs=1e-6)
    hashes = {read(r.run_dir, "results.json")["target_sha256"] for r in (whole, cut)}
    assert len(hashes) == 1


@pytest.mark.multi_process
@pytest.mark.timeout(300)
def test_nan_on_one_rank(tiny_recipe, tmp_path):
    training = {"tokens_per_micro_batch": 128, "checkpoint_every": 2}
    recipe = tiny_recipe(training=training)
    path = write_recipe(recipe, tmp_path)
    command = [*LAUNCH, "--num_processes", "2", "tests/training/driver.py", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    result = subprocess.run(
        [*command, "--nan-rank", "1"], capture_output=True, text=True, timeout=200, env=environment
    )
    assert result.returncode != 0
    status = read(recipe.run_dir, "status.json")
    assert status["state"] == "failed"
    # Update 3 reads chunks 12 .. 15; the second process has the last two, in rows of half a chunk.
    assert "update 3" in status["message"]
    assert "process 1, chunk 14, row 1" in status["message"]
    _, state = checkpoint.latest_checkpoint(recipe.run_dir / "checkpoints")
    assert state["update"] == 2
    # The last good state goes on without the poison.
    result = subprocess.run(
        [*command, "--resume"], capture_output=True, text=True, timeout=200, env=environment
    )
    assert read(recipe.run_dir, "status.json")["state"] == "done", result.stderr[-2000:]


def test_nan_leaves_the_weights(tiny_recipe, tmp_path, monkeypatch):
    clean = tiny_recipe(output_dir=str(tmp_path / "clean"), training={"num_updates": 6})
    assert train(clean) == 0
    from modeling_doctab import DocTabForCausalLM

    original = DocTabForCausalLM.forward
    monkeypatch.setattr(DocTabForCausalLM, "forward", original)
    driver.poison(0, 3, 1)
    recipe = tiny_recipe(output_dir=str(tmp_path / "run"))
    assert train(recipe) == 1
    status = read(recipe.run_dir, "status.json")
    assert "process 0, chunk 12, row 1" in status["message"]
    monkeypatch.undo()
    DocTabForCausalLM.forward = original
    assert train(recipe, resume=True) == 0
    assert_same_bits(final_bits(recipe.run_dir), final_bits(clean.run_dir))


@pytest.mark.parametrize("kind", ["safetensors", "os"])
def test_disk_full(tiny_recipe, monkeypatch, kind):
    recipe = tiny_recipe()
    original = checkpoint.save_file
    calls = []

    def full(tensors, path, *args):
        calls.append(path)
        if len(calls) == 4:  # the second file of the second checkpoint
            Path(path).write_bytes(b"half a fi")
            if kind == "os":
                raise OSError(28, "No space left on device")
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        return original(tensors, path, *args)

    monkeypatch.setattr(checkpoint, "save_file", full)
    assert train(recipe) == 1
    status = read(recipe.run_dir, "status.json")
    assert status["state"] == "failed"
    assert "No space left on device" in status["message"]
    assert "make room" in status["message"]
    names = [p.name for p in checkpoint.list_checkpoints(recipe.run_dir / "checkpoints")]
    assert names == ["update_000002"]
    assert not list(recipe.run_dir.rglob(".tmp_*"))
    assert train(recipe, resume=True) == 0


def test_torn_and_corrupt_checkpoints(tiny_recipe, uninterrupted, capsys):
    recipe = tiny_recipe(training={"keep_last": 9})
    assert train(recipe) == 0
    folder = recipe.run_dir / "checkpoints"
    (folder / ".tmp_update_000008").mkdir()
    (folder / "update_000009").mkdir()
    damage = {
        "update_000006": lambda p: (p / "model.safetensors").write_bytes(b"short"),
        "update_000004": lambda p: (p / "state.json").write_text('{"update": 4'),
    }
    for name, harm in damage.items():
        harm(folder / name)
    assert train(recipe, resume=True) == 0
    out = capsys.readouterr().out
    assert "update_000009: state.json is missing" in out
    assert "model.safetensors is damaged" in out
    assert "update_000004: state.json is missing or damaged" in out
    assert_same_bits(final_bits(recipe.run_dir), uninterrupted)


def test_changed_recipe_or_data_on_resume(tiny_recipe, tmp_path, chunk_set):
    recipe = tiny_recipe()
    assert train(recipe) == 0
    with pytest.raises(ValueError, match=r"training.num_updates \(6 then, 9 now\).*--overwrite"):
        train(tiny_recipe(training={"num_updates": 9}), resume=True)
    with pytest.raises(ValueError, match=r"model.hidden_size \(32 then, 64 now\)"):
        train(tiny_recipe(model={"hidden_size": 64}), resume=True)
    other = tmp_path / "other_set"
    shutil.copytree(chunk_set, other)
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps({**manifest, "notes": ["another"]}))
    with pytest.raises(ValueError, match="trained on another chunk set"):
        train(tiny_recipe(data={"chunk_set": str(other)}), resume=True)
    # What only says how a run is carried out may change.
    assert train(tiny_recipe(training={"checkpoint_every": 5}), resume=True) == 0


def test_a_checkpoint_of_another_architecture(tiny_recipe, monkeypatch):
    recipe = tiny_recipe()
    assert train(recipe) == 0
    (recipe.run_dir / "results.json").unlink()
    original = checkpoint.load_tensors

    def foreign(path):
        weights, state = original(path)
        weights["lm_head.weight"] = weights["lm_head.weight"][:100]
        return weights, state

    monkeypatch.setattr(checkpoint, "load_tensors", foreign)
    with pytest.raises(ValueError, match=r"another architecture: lm_head\.weight"):
        train(recipe, resume=True)


def test_world_size_mismatch(tiny_recipe, tmp_path, monkeypatch, capsys):
    """Two processes that each believe to be alone would overwrite each other's run."""
    Accelerator(cpu=True)  # accelerate settles on one process, whatever the launcher says later
    monkeypatch.setenv("WORLD_SIZE", "2")
    recipe = tiny_recipe()
    assert main([str(write_recipe(recipe, tmp_path))]) == 2
    printed = capsys.readouterr().err
    assert "the launcher started 2 processes, but accelerate sees 1" in printed
    assert read(recipe.run_dir, "status.json")["state"] == "failed"
    assert not (recipe.run_dir / "metrics.jsonl").exists()


@pytest.mark.multi_process
def test_exit_code_and_status_under_the_launcher(tiny_recipe, tmp_path):
    recipe = tiny_recipe(model={"vocab_size": 400})
    path = write_recipe(recipe, tmp_path)
    result = subprocess.run(
        [*LAUNCH, "-m", "training.train", str(path)], capture_output=True, text=True, timeout=120
    )
    assert result.returncode != 0
    assert "error: model.vocab_size is 400 in the recipe, but 300" in result.stderr
    status = read(recipe.run_dir, "status.json")
    assert status["state"] == "failed"
    assert "vocab_size is 400" in status["message"]


def test_tracker_failure(tiny_recipe, monkeypatch):
    recipe = tiny_recipe()
    calls = []

    class Broken:
        def init_trackers(self, *args, **kwargs):
            calls.append("init")

        def log(self, values, step):
            calls.append(step)
            raise ConnectionError("the tracker's server is gone")

        def end_training(self):
            calls.append("end")

    original = metrics.Trackers.__init__
    monkeypatch.setattr(
        metrics.Trackers,
        "__init__",
        lambda self, accelerator, names, settings: original(self, Broken(), ["x"], settings),
    )
    with pytest.warns(UserWarning, match="server is gone.*training goes on without it"):
        assert train(recipe) == 0
    assert calls == ["init", 0]
    assert (recipe.run_dir / "metrics.jsonl").read_text().count("\n") == 6


def test_a_tracker_that_is_not_installed_or_unknown(tiny_recipe):
    with pytest.raises(ValueError, match="no tracker 'tensorbord'"):
        train(tiny_recipe(training={"trackers": ["tensorbord"]}))
    with pytest.warns(UserWarning, match="clearml is not installed"):
        assert train(tiny_recipe(training={"trackers": ["clearml"]})) == 0


def test_no_pickle_opened(tiny_recipe, monkeypatch, tmp_path):
    """Neither training nor resuming reads or writes a pickle."""
    # numba keeps its own compiled code pickled, in __pycache__: load that first.
    assert train(tiny_recipe(output_dir=str(tmp_path / "before"))) == 0

    def forbidden(*args, **kwargs):
        raise AssertionError("a pickle was opened")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    monkeypatch.setattr(torch, "save", forbidden)
    recipe = tiny_recipe()
    recipe.run_dir.mkdir()
    (recipe.run_dir / "STOP").touch()
    assert train(recipe) == 75
    (recipe.run_dir / "STOP").unlink()
    assert train(recipe, resume=True) == 0
    assert (recipe.run_dir / ".lock").stat().st_size == 0
    suffixes = {p.suffix for p in recipe.run_dir.rglob("*") if p.is_file() and p.name != ".lock"}
    assert suffixes <= {".json", ".jsonl", ".yaml", ".py", ".safetensors", ".npy", ".tiktoken"}


def test_profiler_window(tiny_recipe):
    recipe = tiny_recipe(training={"profile_updates": [2, 3]})
    assert train(recipe) == 0
    assert (recipe.run_dir / "profile.json.gz").stat().st_size > 1000


def test_recipe_overrides_reach_the_run(tiny_recipe, tmp_path):
    path = write_recipe(tiny_recipe(), tmp_path)
    out = tmp_path / "elsewhere"
    flags = ["--seed", "45", "--num_updates", "2", "--checkpoint-every", "1"]
    assert main([str(path), *flags, "--output_dir", str(out)]) == 0
    saved = build_recipe(yaml.safe_load((out / "config.yaml").read_text()), "config.yaml")
    assert (saved.seed, saved.training.num_updates, saved.training.checkpoint_every) == (45, 2, 1)
    assert len(checkpoint.list_checkpoints(out / "checkpoints")) == 2


def test_keep_every_checkpoint_of_a_multiple(tiny_recipe):
    recipe = tiny_recipe(training={"checkpoint_every": 1, "keep_last": 1, "keep_every": 2})
    assert train(recipe) == 0
    names = [p.name for p in checkpoint.list_checkpoints(recipe.run_dir / "checkpoints")]
    assert names == ["update_000002", "update_000004", "update_000006"]


def test_a_checkpoint_is_a_loadable_model(tiny_recipe):
    from modeling_doctab import DocTabForCausalLM

    recipe = tiny_recipe()
    assert train(recipe) == 0
    model = DocTabForCausalLM.from_pretrained(recipe.run_dir / "checkpoints" / "update_000006")
    final = DocTabForCausalLM.from_pretrained(recipe.run_dir / "final")
    theirs = dict(final.named_parameters())
    assert all(torch.equal(p, theirs[n]) for n, p in model.named_parameters())
