"""Train one arm: `accelerate launch --config_file accelerate_config.yaml -m training.train RECIPE`.

`train` reads as the algorithm. Everything that decides the result is a pure function of the recipe
and the update: which rows (`batches`), which rates (`schedules`), which initial values (the model).
The worker exits 0 when done, 75 when stopped and resumable, 2 on bad input, 1 on any other failure;
`status.json` in the run folder says the same, since the launcher turns every failure into 1.

What builds a run is imported where it is called: transformers takes two seconds, which --help and a
mistyped recipe can do without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import is_initialized

from training.checkpoint import write_json
from training.config import Recipe, add_override_arguments, load_recipe, overrides_from
from training.guard import NonFiniteError, refuse_non_finite

if TYPE_CHECKING:
    from training.run import Run

DONE, FAILED, STOPPED, BAD_INPUT = 0, 1, 75, 2


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    arguments = _parser().parse_args(argv)
    recipes: list[Recipe] = []
    try:
        overrides = overrides_from(arguments)
        recipes = [load_recipe(path, overrides) for path in arguments.recipe]
        if arguments.dry_run:
            return _print_dry_runs(arguments.recipe, recipes, arguments.json)
        if len(recipes) > 1:
            raise ValueError("several recipes go with --dry_run only; train them one by one")
        return train(recipes[0], arguments.resume == "auto", arguments.overwrite)
    except ValueError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"error: {error}", file=sys.stderr)
            # A launcher turns every exit code into 1: whoever started it reads status.json.
            if len(recipes) == 1 and not arguments.dry_run and "WORLD_SIZE" in os.environ:
                _note_bad_input(recipes[0].run_dir, error)
        return BAD_INPUT


def train(recipe: Recipe, resume: bool = False, overwrite: bool = False) -> int:
    """Train one recipe to its end, or until asked to stop; returns the exit code.

    Args:
        recipe: what to train.
        resume: continue from the newest checkpoint in the run folder, if there is one.
        overwrite: delete what the run folder holds.

    Raises:
        ValueError: for bad input, before any device is touched.
    """
    from training.evaluate import heldout_bits_per_byte
    from training.results import finish
    from training.run import prepare_run

    run = prepare_run(recipe, resume, overwrite)
    if run is None:
        print(f"{recipe.run_dir} is done already; nothing to do")
        return DONE
    update = run.first_update
    try:
        for update in range(run.first_update, run.num_updates):
            run.clock.start_update()
            totals = accumulate_gradients(run)
            norms = {k: float(v) for k, v in run.optimizer.gradient_norms().items()}
            totals = reduce_totals(run, totals)
            refuse_non_finite(run, update, totals, norms)
            run.optimizer.step(update)
            run.optimizer.zero_grad()
            record(run, update, totals, norms)

            done = update + 1
            stopping = totals["stop"] > 0 and done < run.num_updates
            if (
                stopping
                or done == run.num_updates
                or _is_due(done, recipe.training.checkpoint_every)
            ):
                run.save(done)
            if stopping:
                return stopped(run, done)
            if _is_due(done, recipe.training.evaluate_every):
                bpb = heldout_bits_per_byte(run)
                run.log.note(update, {"evaluation_bpb": bpb})
                run.log.say(f"update {done}: {recipe.training.evaluation_split} {bpb:.4f} bpb")
        run.writer.wait()
        if run.is_main:
            finish(run)
        run.log.status("done", run.num_updates)
        return DONE
    except (Exception, KeyboardInterrupt) as error:
        return failed(run, update, error)
    finally:
        run.close()
        if is_initialized():
            torch.distributed.destroy_process_group()


def accumulate_gradients(run: Run) -> dict[str, Any]:
    """Forward and backward of one update's micro-batches; gradients are their average.

    Returns:
        Sums over this process: `nats`, `targets`, UTF-8 `bytes`; `stop`, if it was asked to.
    """
    nats = torch.zeros((), device=run.device)
    num_bytes = torch.zeros((), dtype=torch.long, device=run.device)
    targets = 0
    for micro_batch in range(run.plan.micro_batches):
        batch = next(run.batches)
        last = micro_batch == run.plan.micro_batches - 1
        with contextlib.nullcontext() if last else run.accelerator.no_sync(run.wrapped):
            with run.accelerator.autocast():
                loss = run.wrapped(**batch).loss
            run.accelerator.backward(loss / run.plan.micro_batches)
        count = batch["shift_labels"].numel()
        nats += loss.detach() * count
        num_bytes += run.token_bytes[batch["shift_labels"]].sum()
        targets += count
    run.profiler.step()
    return {"nats": nats, "bytes": num_bytes, "targets": targets, "stop": run.stop.requested()}


def reduce_totals(run: Run, totals: dict[str, Any]) -> dict[str, float]:
    """Sums over all processes, in one reduction."""
    values = [torch.as_tensor(v, dtype=torch.float64, device=run.device) for v in totals.values()]
    summed = run.accelerator.reduce(torch.stack(values), reduction="sum")
    return dict(zip(totals, summed.tolist(), strict=True))


def record(run: Run, update: int, totals: dict[str, float], norms: dict[str, float]) -> None:
    """One line of metrics.jsonl, the trackers and the progress bar."""
    seconds = run.clock.end_update()
    loss = totals["nats"] / totals["targets"]
    if update == 0:
        run.facts["step0_loss"] = loss
    values = {
        "loss": loss,
        "bpb": totals["nats"] / (math.log(2) * totals["bytes"]),
        "matrix_lr": run.optimizer.muon.param_groups[0]["lr"],
        "gradient_norms": norms,
        "update_seconds": seconds,
        **run.throughput(totals["targets"] / seconds),
        "seconds_left": seconds * (run.num_updates - update - 1),
    }
    run.log.update(update, values)
    run.trackers.log(update, values)


def stopped(run: Run, done: int) -> int:
    """Say that the run stopped and how it goes on; returns the exit code."""
    run.writer.wait()
    reason = run.stop.reason or "another process was asked to stop"
    run.log.status("stopped", done, f"{reason}; continue with --resume auto")
    run.log.say(f"stopped after update {done}: {reason}; continue with --resume auto")
    return STOPPED


def failed(run: Run, update: int, error: BaseException) -> int:
    """Say what failed, where; returns the exit code."""
    message = f"update {update}: {error}" if str(error) else f"update {update}: {error!r}"
    run.log.status("failed", update, message)
    if not isinstance(error, NonFiniteError | OSError | ValueError):
        traceback.print_exc()
    run.log.say(f"failed at {message}")
    return FAILED


def _is_due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def _note_bad_input(run_dir: Path, error: ValueError) -> None:
    """Write status.json, unless it speaks of an earlier run."""
    status = run_dir / "status.json"
    if not status.exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        write_json(status, {"state": "failed", "update": 0, "message": str(error)})


def _print_dry_runs(paths: list[str], recipes: list[Recipe], as_json: bool) -> int:
    from training.results import dry_run

    runs = [dry_run(path, recipe) for path, recipe in zip(paths, recipes, strict=True)]
    if as_json:
        print(json.dumps(runs, indent=2))
        return DONE
    for run in runs:
        print(f"{run['name']} ({run['recipe']})")
        for key, value in run.items():
            if key not in ("name", "recipe"):
                shown = f"{value:,}" if isinstance(value, int) else value
                print(f"  {key:36} {shown}")
        if run["epochs"] is not None and run["epochs"] > 1:
            print(f"  warning: the chunk set is read {run['epochs']:.2f} times")
    return DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="training.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", nargs="+", help="YAML file, e.g. training/recipes/paper/b.yaml")
    parser.add_argument(
        "--dry-run",
        "--dry_run",
        action="store_true",
        help="print sizes, costs and batches, and train nothing",
    )
    parser.add_argument("--json", action="store_true", help="with --dry_run: JSON alone")
    parser.add_argument(
        "--resume",
        choices=("no", "auto"),
        default="no",
        help="auto: continue from the newest checkpoint in the run folder",
    )
    parser.add_argument("--overwrite", action="store_true", help="delete the run folder first")
    add_override_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
