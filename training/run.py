"""Everything that one run holds while it trains, and how it is put together."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

import torch
import transformers
from accelerate import Accelerator

from data_scripts.chunk_set import ChunkSet
from modeling_doctab import DocTabForCausalLM
from modeling_doctab.accounting import flops_per_token
from training.batches import BatchLoader, BatchPlan, RowMaker, target_sha256
from training.checkpoint import CheckpointWriter
from training.config import Recipe
from training.facts import run_facts, write_recipe
from training.metrics import Clock, RunLog, Trackers, peak_flops, peak_memory_bytes
from training.optim import RecipeOptimizer
from training.run_folder import claim_run_folder, find_start, note_done
from training.setup import (
    batch_plan,
    check_evaluation,
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


@dataclass
class Run:
    """One run on one process.

    Attributes:
        recipe: what is trained.
        chunk_set: the data.
        accelerator: devices, processes, precision.
        plan: which chunks are in which batch.
        model: the model itself, for saving and scoring.
        wrapped: the same, compiled and under DDP where there are several processes.
        optimizer: Muon and AdamW with their schedules.
        make_rows: chunks to rows.
        batches: this process's micro-batches, in order.
        token_bytes: [vocab_size] UTF-8 bytes of each token.
        first_update: where this start begins.
        clock: seconds of updates and of the loop.
        log: metrics.jsonl, status.json, the progress bar.
        trackers: accelerate's trackers.
        stop: requests to stop.
        writer: writes checkpoints in the background.
        profiler: steps once an update.
        facts: what results.json will say.
    """

    recipe: Recipe
    chunk_set: ChunkSet
    accelerator: Accelerator
    plan: BatchPlan
    model: DocTabForCausalLM
    wrapped: torch.nn.Module
    optimizer: RecipeOptimizer
    make_rows: RowMaker
    batches: Iterator[dict[str, torch.Tensor]]
    token_bytes: torch.Tensor
    first_update: int
    clock: Clock
    log: RunLog
    trackers: Trackers
    stop: StopRequest
    writer: CheckpointWriter
    profiler: Any
    lock: IO[str] | None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def num_updates(self) -> int:
        """Length of the run."""
        return self.recipe.training.num_updates

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self.accelerator.device

    @property
    def rank(self) -> int:
        """This process's number."""
        return self.accelerator.process_index

    @property
    def is_main(self) -> bool:
        """Whether this process writes files."""
        return self.accelerator.is_main_process

    def save(self, done: int) -> None:
        """Start to write the checkpoint after `done` updates, on the main process.

        Raises:
            OSError: if the one before could not be written.
        """
        if not self.is_main:
            return
        facts = {
            "recipe": self.recipe.as_dict(),
            "recipe_sha256": self.recipe.sha256(),
            "data_sha256": self.chunk_set.fingerprint,
            "training_seconds": self.clock.training_seconds,
            "loop_seconds": self.clock.loop_seconds,
            "cpu_seconds": self.clock.cpu_seconds,
            "step0_loss": self.facts.get("step0_loss"),
        }
        self.writer.save(done, self.model, self.optimizer.state_by_name(), facts)

    def throughput(self, tokens_per_second: float) -> dict[str, Any]:
        """Tokens/s, MFU (None on an unknown device) and peak memory."""
        config = self.model.config
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        peak = peak_flops(name)
        flops = flops_per_token(config, config.max_position_embeddings)
        achieved = tokens_per_second * flops / self.accelerator.num_processes
        return {
            "tokens_per_second": tokens_per_second,
            "mfu": achieved / peak if peak else None,
            "peak_memory_bytes": peak_memory_bytes(self.device),
        }

    def close(self) -> None:
        """Finish what runs in the background; errors there were reported before."""
        with contextlib.suppress(OSError):
            self.writer.close()
        self.profiler.close()
        self.trackers.close()
        self.log.close()
        if self.lock is not None:
            self.lock.close()


def prepare_run(recipe: Recipe, resume: bool, overwrite: bool) -> Run | None:
    """Check everything, then build the run; None if it is done already.

    Nothing in the run folder is touched before all that the recipe says has been checked.

    Raises:
        ValueError: for bad input.
    """
    config = model_config(recipe)
    chunk_set = open_chunk_set(recipe, config)
    start = find_start(recipe, chunk_set, resume, overwrite)
    if start == "done":
        note_done(recipe)
        return None
    accelerator = make_accelerator(recipe)
    plan = batch_plan(recipe, accelerator.num_processes)
    make_rows = row_maker(recipe, config, chunk_set)
    check_evaluation(recipe, chunk_set)
    torch.manual_seed(recipe.seed)
    model = DocTabForCausalLM(config).to(accelerator.device).train()
    optimizer = RecipeOptimizer(model, recipe.optimizer, recipe.training.num_updates)
    first_update, clock, step0_loss = 0, Clock(), None
    if start is not None:
        first_update, clock, step0_loss = restore(start, model, optimizer)

    wrapped = prepare_model(model, recipe, accelerator)

    is_main, t = accelerator.is_main_process, recipe.training
    facts = {**run_facts(recipe, config, chunk_set, accelerator), "step0_loss": step0_loss}
    lock = None
    if is_main:
        facts["target_sha256"] = target_sha256(make_rows.chunks, plan, t.num_updates)
        lock = claim_run_folder(recipe.run_dir, overwrite)
        write_recipe(recipe)
    trackers = Trackers(accelerator, t.trackers if is_main else (), recipe.as_dict())
    log = RunLog(recipe.run_dir, t.num_updates, is_main, first_update)
    log.status("running", first_update)
    stop = StopRequest(recipe.run_dir)
    stop.install()
    loader = BatchLoader(
        make_rows,
        plan,
        accelerator.process_index,
        first_update,
        t.num_updates,
        t.num_loader_threads,
        accelerator.device,
    )
    return Run(
        recipe=recipe,
        chunk_set=chunk_set,
        accelerator=accelerator,
        plan=plan,
        model=model,
        wrapped=wrapped,
        optimizer=optimizer,
        make_rows=make_rows,
        batches=iter(loader),
        token_bytes=torch.from_numpy(chunk_set.token_bytes()).long().to(accelerator.device),
        first_update=first_update,
        clock=clock,
        log=log,
        trackers=trackers,
        stop=stop,
        writer=CheckpointWriter(recipe.run_dir / "checkpoints", t.keep_last, t.keep_every),
        profiler=ProfileWindow(recipe, first_update, is_main),
        lock=lock,
        facts=facts,
    )


class ProfileWindow:
    """torch's profiler over the recipe's `profile_updates`; a Chrome trace in the run folder."""

    def __init__(self, recipe: Recipe, first_update: int, is_main: bool) -> None:
        self.window = recipe.training.profile_updates if is_main else None
        self.path = recipe.run_dir / "profile.json.gz"
        self.update = first_update
        self.profiler: Any = None

    def step(self) -> None:
        """Call once an update."""
        if self.window is None:
            return
        first, last = self.window
        if self.update == first and self.profiler is None:
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        elif self.update > last:
            self.close()
        self.update += 1

    def close(self) -> None:
        """Write the trace, if one is being taken."""
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.path))
            self.profiler = self.window = None
