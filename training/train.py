"""Train one arm: `accelerate launch --config_file accelerate_config.yaml -m training.train RECIPE`.

`train` reads as the algorithm. Everything that decides the result is a pure function of the recipe
and the update: which rows (`batches`), which rates (`schedules`), which initial values (the model).
The worker exits 0 when done, 75 when stopped and resumable, 2 on bad input, 1 on any other failure;
`status.json` in the run folder says the same, since the launcher turns every failure into 1.
"""

import argparse
import contextlib
import json
import math
import os
import sys
import traceback
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from torch.distributed import is_initialized

from data_scripts.chunk_set import ChunkSet
from data_scripts.rows import TableOptions
from modeling_doctab import DocTabConfig, DocTabForCausalLM
from modeling_doctab.accounting import flops_per_token
from training import checkpoint
from training.batches import BatchLoader, BatchPlan, RowMaker, target_sha256
from training.config import Recipe, add_override_arguments, load_recipe, overrides_from
from training.metrics import Clock, RunLog, peak_flops, peak_memory_bytes
from training.optim import RecipeOptimizer
from training.results import dry_run, finish, run_facts, write_recipe
from training.setup import (
    batch_plan,
    find_start,
    make_accelerator,
    model_config,
    open_chunk_set,
    prepare_model,
    restore,
    row_maker,
)
from training.stop import StopRequest

# Saving shows its own bar for every file; ours says enough.
transformers.utils.logging.disable_progress_bar()

DONE, STOPPED, BAD_INPUT = 0, 75, 2


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    arguments = _parser().parse_args(argv)
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
    config = model_config(recipe)
    chunk_set = open_chunk_set(recipe, config)
    start = find_start(recipe, chunk_set, resume, overwrite)
    if start == "done":
        print(f"{recipe.run_dir} is done already; nothing to do")
        return DONE

    accelerator = make_accelerator(recipe)
    device, rank = accelerator.device, accelerator.process_index
    plan = batch_plan(recipe, accelerator.num_processes)
    torch.manual_seed(recipe.seed)
    model = DocTabForCausalLM(config).to(device)
    model.train()
    optimizer = RecipeOptimizer(model, recipe.optimizer, recipe.training.num_updates)
    first_update, clock = 0, Clock()
    if start is not None:
        first_update, clock = restore(start, model, optimizer)
    wrapped = prepare_model(model, recipe, accelerator)

    log = RunLog(
        recipe.run_dir, recipe.training.num_updates, accelerator.is_main_process, first_update
    )
    stop = StopRequest(recipe.run_dir)
    stop.install()
    log.status("running", first_update)
    make_rows = row_maker(recipe, config, chunk_set)
    loader = BatchLoader(
        make_rows,
        plan,
        rank,
        first_update,
        recipe.training.num_updates,
        recipe.training.num_loader_threads,
        device,
    )
    token_bytes = torch.from_numpy(chunk_set.token_bytes()).long().to(device)
    facts = run_facts(recipe, config, chunk_set, accelerator)
    if accelerator.is_main_process:
        facts["target_sha256"] = target_sha256(make_rows.chunks, plan, recipe.training.num_updates)
        write_recipe(recipe)

    def save(update: int) -> None:
        if accelerator.is_main_process:
            folder = recipe.run_dir / "checkpoints"
            checkpoint.save_checkpoint(
                folder,
                update,
                model.save_pretrained,
                optimizer.state_by_name(),
                {
                    "recipe": recipe.as_dict(),
                    "recipe_sha256": recipe.sha256(),
                    "data_sha256": chunk_set.fingerprint,
                    "training_seconds": clock.training_seconds,
                    "loop_seconds": clock.loop_seconds,
                },
            )
            checkpoint.prune_checkpoints(
                folder, recipe.training.keep_last, recipe.training.keep_every
            )
        accelerator.wait_for_everyone()

    update = first_update
    try:
        batches = iter(loader)
        for update in range(first_update, recipe.training.num_updates):
            clock.start_update()
            totals = accumulate_gradients(wrapped, batches, plan, token_bytes, accelerator)
            totals["stop"] = float(stop.requested())
            totals = reduce_totals(totals, accelerator)
            refuse_non_finite(totals, update)
            norms = optimizer.gradient_norms()
            optimizer.step(update)
            optimizer.zero_grad()
            loss = totals["nats"] / totals["targets"]
            if update == 0:
                facts["step0_loss"] = loss
            seconds = clock.end_update()
            log.update(
                update,
                update_metrics(
                    recipe,
                    config,
                    totals,
                    norms,
                    optimizer,
                    seconds,
                    device,
                    accelerator.num_processes,
                ),
            )
            done = update + 1
            every = recipe.training.checkpoint_every
            last = done == recipe.training.num_updates
            if totals["stop"] and not last:
                save(done)
                message = f"{stop.reason or 'another process was asked to stop'}; resumable"
                log.status("stopped", done, message)
                log.say(f"stopped after update {done}: {message} with --resume auto")
                return STOPPED
            if last or (every and done % every == 0):
                save(done)
            every = recipe.training.evaluate_every
            if every and done % every == 0:
                bpb = heldout_bpb(model, recipe, config, chunk_set, token_bytes, accelerator)
                log.note(update, {"evaluation_bpb": bpb})
                log.say(f"update {done}: {recipe.training.evaluation_split} {bpb:.4f} bpb")
        if accelerator.is_main_process:
            finish(recipe, model, chunk_set, facts, clock, device)
        log.status("done", recipe.training.num_updates)
        return DONE
    except BaseException as error:
        log.status("failed", update, f"{type(error).__name__}: {error}")
        if not isinstance(error, ValueError):
            traceback.print_exc()
        log.say(f"failed at update {update}: {error}")
        return 1
    finally:
        log.close()
        if is_initialized():
            torch.distributed.destroy_process_group()


def accumulate_gradients(
    model: torch.nn.Module,
    batches: Any,
    plan: BatchPlan,
    token_bytes: torch.Tensor,
    accelerator: Accelerator,
) -> dict[str, Any]:
    """Forward and backward of one update's micro-batches; gradients are their average.

    Returns:
        Sums over this process: `nats`, `targets` and UTF-8 `bytes`, as scalars on the device.
    """
    nats = token_bytes.new_zeros((), dtype=torch.float32)
    num_bytes = token_bytes.new_zeros(())
    targets = 0
    for micro_batch in range(plan.micro_batches):
        batch = next(batches)
        last = micro_batch == plan.micro_batches - 1
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            with accelerator.autocast():
                loss = model(**batch).loss
            accelerator.backward(loss / plan.micro_batches)
        count = batch["shift_labels"].numel()
        nats += loss.detach() * count
        num_bytes += token_bytes[batch["shift_labels"]].sum()
        targets += count
    return {"nats": nats, "bytes": num_bytes, "targets": targets}


def reduce_totals(totals: dict[str, Any], accelerator: Accelerator) -> dict[str, float]:
    """Sums over all processes, in one reduction."""
    device = accelerator.device
    values = [torch.as_tensor(v, dtype=torch.float64, device=device) for v in totals.values()]
    summed = accelerator.reduce(torch.stack(values), reduction="sum")
    return dict(zip(totals, summed.tolist(), strict=True))


def refuse_non_finite(totals: dict[str, float], update: int) -> None:
    """Stop before the weights change if the loss is not a number."""
    if not math.isfinite(totals["nats"]):
        raise FloatingPointError(
            f"the loss at update {update} is {totals['nats']}. The weights were not changed; the "
            "last checkpoint is good. Lower the learning rates, or look at the data."
        )


def update_metrics(
    recipe: Recipe,
    config: DocTabConfig,
    totals: dict[str, float],
    norms: dict[str, torch.Tensor],
    optimizer: RecipeOptimizer,
    seconds: float,
    device: torch.device,
    world_size: int,
) -> dict[str, Any]:
    """One line of metrics.jsonl."""
    tokens_per_second = totals["targets"] / seconds
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = peak_flops(name)
    flops = flops_per_token(config, config.max_position_embeddings)
    return {
        "loss": totals["nats"] / totals["targets"],
        "bpb": totals["nats"] / (math.log(2) * totals["bytes"]),
        "matrix_lr": optimizer.muon.param_groups[0]["lr"],
        "gradient_norms": {k: float(v) for k, v in norms.items()},
        "update_seconds": seconds,
        "tokens_per_second": tokens_per_second,
        "mfu": tokens_per_second * flops / (peak * world_size) if peak else None,
        "peak_memory_bytes": peak_memory_bytes(device),
    }


@torch.no_grad()
def heldout_bpb(
    model: DocTabForCausalLM,
    recipe: Recipe,
    config: DocTabConfig,
    chunk_set: ChunkSet,
    token_bytes: torch.Tensor,
    accelerator: Accelerator,
) -> float:
    """Bits per byte of a fixed slice of an evaluation split, in the training format."""
    split, count = recipe.training.evaluation_split, recipe.training.evaluation_chunks
    if chunk_set.is_confirmation(split):
        raise ValueError(f"evaluation_split {split} is a confirmation set: it is scored once")
    _, _, targets = chunk_set.documents(split).chunks()
    table = TableOptions(config.table_orders) if config.document_table else None
    make = RowMaker(targets[:count], config.max_position_embeddings, config.bos_token_id, table)
    nats, num_bytes = 0.0, 0
    model.eval()
    for i in range(len(make.chunks)):
        batch = {k: v.to(accelerator.device) for k, v in make(range(i, i + 1)).items()}
        with accelerator.autocast():
            loss = model(**batch, logits_to_keep=1, use_cache=False).loss
        nats += float(loss) * batch["shift_labels"].numel()
        num_bytes += int(token_bytes[batch["shift_labels"]].sum())
    model.train()
    return nats / (math.log(2) * num_bytes)


def _print_dry_runs(paths: list[str], recipes: list[Recipe], as_json: bool) -> int:
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
