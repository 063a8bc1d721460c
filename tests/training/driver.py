"""A training process that tests can kill, starve or poison at a chosen point.

Run by itself (`accelerate launch ... tests/training/driver.py RECIPE [--nan-rank R] ...`) or in a
forked process (`in_process`).
"""

import argparse
import os
import signal
import sys
from pathlib import Path

import torch

import training.results
import training.run  # noqa: F401 (what a run imports late: the server that forks has it then)
from training import checkpoint, train
from training.config import build_recipe, load_recipe


def kill_at_write_point(number: int) -> None:
    """SIGKILL this process at the `number`-th step of writing checkpoints (0-based)."""
    count = -1

    def wrap(original):
        def step(*args, **kwargs):
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return step

    checkpoint._fsync = wrap(checkpoint._fsync)
    checkpoint.save_file = wrap(checkpoint.save_file)
    checkpoint.write_json = wrap(checkpoint.write_json)
    checkpoint.prune_checkpoints = wrap(checkpoint.prune_checkpoints)
    Path.rename = wrap(Path.rename)
    Path.mkdir = wrap(Path.mkdir)


def poison(rank: int, update: int, micro_batches: int) -> None:
    """Make the second row of `rank`'s batch give NaN at one update, on every forward pass."""
    if int(os.environ.get("RANK", "0")) != rank:
        return
    from modeling_doctab import DocTabForCausalLM

    original = DocTabForCausalLM.forward
    calls = 0

    def forward(self, *args, **kwargs):
        nonlocal calls
        output = original(self, *args, **kwargs)
        rows = kwargs["input_ids"]
        if len(rows) > 1:
            calls += 1
            if calls == update * micro_batches + 1:
                forward.bad_row = rows[1].clone()
        if getattr(forward, "bad_row", None) is not None:
            hit = (rows == forward.bad_row).all(1).any()
            output.loss = torch.where(hit, torch.nan, 1.0) * output.loss
        return output

    forward.bad_row = None
    DocTabForCausalLM.forward = forward


def in_process(plain: dict, resume: bool, kill_at: int | None, log: str) -> None:
    """Train in a forked process and exit with the trainer's code."""
    sys.stdout = sys.stderr = Path(log).open("w")  # noqa: SIM115 (open until the process ends)
    torch.set_num_threads(1)
    if kill_at is not None:
        kill_at_write_point(kill_at)
    code = train.train(build_recipe(plain, "driver"), resume)
    sys.stderr.flush()
    os._exit(code)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("--nan-rank", type=int)
    parser.add_argument("--nan-update", type=int, default=3)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe)
    if arguments.nan_rank is not None:
        poison(arguments.nan_rank, arguments.nan_update, 1)
    return train.train(recipe, arguments.resume)


if __name__ == "__main__":
    sys.exit(main())
