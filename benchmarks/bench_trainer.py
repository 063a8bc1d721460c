"""The trainer around the update: several processes, checkpoints, waiting for data."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import yaml

from benchmarks.harness import Case, Result
from data_scripts.build import main as build
from data_scripts.rows import TableOptions
from modeling_doctab import DocTabConfig, DocTabForCausalLM
from training.batches import BatchLoader, BatchPlan, RowMaker
from training.checkpoint import CheckpointWriter
from training.config import OptimizerConfig, load_recipe
from training.optim import RecipeOptimizer
from training.setup import keep_freed_memory, model_config

ROOT = Path(__file__).parents[1]
MINUTE = 60.0


def run() -> Iterator[Result]:
    """Three questions about what a run costs beyond its updates."""
    with tempfile.TemporaryDirectory() as scratch:
        yield two_processes(Path(scratch))
    keep_freed_memory()
    yield checkpoint_a_minute()
    yield waiting_for_data()


def two_processes(folder: Path) -> Result:
    """Tokens/s of two processes with a thread each against one process with one thread."""
    build(["stdlib", "--out", str(folder / "set"), "--chunk_length", "1024"])
    recipe = load_recipe(ROOT / "training/recipes/demo/b_table.yaml").as_dict()
    recipe["data"]["chunk_set"] = str(folder / "set")
    recipe["training"] |= {
        "num_updates": 24, "checkpoint_every": 0, "tokens_per_micro_batch": 2048, "num_threads": 1,
    }  # fmt: skip
    cases: dict[str, Case] = {"two processes": Case(), "one process": Case()}
    for name, count in (("one process", 1), ("two processes", 2), ("two processes", 2),
                        ("one process", 1)):  # fmt: skip
        recipe["output_dir"] = str(folder / "run")
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        command = [
            *(sys.executable, "-m", "accelerate.commands.launch"),
            *("--config_file", "accelerate_config.yaml", "--num_processes", str(count)),
            *("-m", "training.train", str(path), "--overwrite"),
        ]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        cases[name].values += [json.loads(line)["update_seconds"] for line in lines[8:]]
    return Result(
        "trainer_two_processes",
        question="an update on two processes, a thread each, against one process with one thread",
        prediction="1.7x: the gradients of 5M parameters are summed once an update",
        target=1.6,
        ours="two processes",
        cases=cases,
        facts={"tokens_per_update": recipe["training"]["tokens_per_update"]},
    )


def checkpoint_a_minute() -> Result:
    """What one checkpoint of B + table's full state adds to a minute of training.

    The state is the paper's B + table; the updates that go on meanwhile are of a smaller model, so
    that a window of some seconds holds many of them. A window with a checkpoint ends when its last
    byte is on the disk; it is shorter than a minute, so whatever writing costs is in it. It is
    compared with the mean of the windows before and after.
    """
    torch.manual_seed(0)
    big = DocTabForCausalLM(DocTabConfig())
    optimizer = RecipeOptimizer(big, OptimizerConfig(), 10)
    for parameter in big.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0)
    optimizer.zero_grad()
    update = _small_update()
    num_updates = max(8, round(20.0 / _seconds(update)))

    def window() -> None:
        for _ in range(num_updates):
            update()

    with tempfile.TemporaryDirectory() as folder:
        writer = CheckpointWriter(Path(folder), 1)

        def window_with_checkpoint(number: int) -> None:
            writer.save(number, big, optimizer.state_by_name(), {})
            window()
            writer.wait()

        plain, written = [_seconds(window)], []
        for number in (1, 2, 3):
            written.append(_seconds(partial(window_with_checkpoint, number)))
            plain.append(_seconds(window))
        writer.close()
        num_bytes = sum(p.stat().st_size for p in Path(folder).rglob("*.safetensors"))
    added = [w - (plain[i] + plain[i + 1]) / 2 for i, w in enumerate(written)]
    return Result(
        "trainer_checkpoint",
        question="a minute of training without a checkpoint against one with B + table's state",
        prediction="0.99: a copy in memory, then the disk's time in the background",
        target=0.99,
        ours="with a checkpoint",
        cases={
            "with a checkpoint": Case([MINUTE + a for a in added]),
            "without": Case([MINUTE] * len(added)),
        },
        facts={"state_bytes": num_bytes, "added_seconds": added, "window_seconds": plain},
    )


def waiting_for_data() -> Result:
    """Seconds of an update against those that it waits for its batch, table fields included."""
    config = model_config(load_recipe(ROOT / "training/recipes/demo/b_table.yaml"))
    rng = np.random.default_rng(0)
    chunks = (rng.zipf(1.3, (256, 1024)) % 4092).astype(np.uint16)
    make = RowMaker(chunks, config.max_position_embeddings, config.bos_token_id, TableOptions())
    batches = iter(BatchLoader(make, BatchPlan(4, 4), 0, 0, 40))
    torch.manual_seed(0)
    model = DocTabForCausalLM(config).train()
    optimizer = RecipeOptimizer(model, OptimizerConfig(), 40)
    waits, updates = Case(), Case()
    for number in range(20):
        start = time.perf_counter()
        batch = next(batches)
        waited = time.perf_counter() - start
        model(**batch).loss.backward()
        optimizer.step(number)
        optimizer.zero_grad()
        if number >= 5:
            waits.values.append(waited)
            updates.values.append(time.perf_counter() - start)
    return Result(
        "trainer_waiting",
        question="an update against the time that it waits for its batch",
        prediction="500x: rows are made ahead, in threads",
        target=100.0,
        ours="waiting",
        cases={"waiting": waits, "update": updates},
        facts={"tokens": 4096},
    )


def _small_update():  # type: ignore[no-untyped-def]
    config = model_config(load_recipe(ROOT / "training/recipes/demo/b.yaml"))
    torch.manual_seed(0)
    model = DocTabForCausalLM(config).train()
    optimizer = RecipeOptimizer(model, OptimizerConfig(), 1000)
    ids = torch.randint(0, 4000, (16, config.max_position_embeddings))

    def update() -> None:
        model(ids, labels=ids).loss.backward()
        optimizer.step(0)
        optimizer.zero_grad()

    for _ in range(5):
        update()
    return update


def _seconds(function) -> float:  # type: ignore[no-untyped-def]
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
