"""The scoring loop: a model over the rows of a target set, on any number of devices.

Every process scores its own part of the set and writes it to the run folder, which all of them must
see. Which process scores what, batch sizes and restarts change nothing beyond rounding.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch.nn import functional
from tqdm import tqdm

from evaluation.checkpoints import Checkpoint, load_model
from evaluation.formats import (
    EvaluationFormat,
    IntArray,
    RowBatch,
    RowPlan,
    TargetSet,
    iter_rows,
    score_units,
)
from evaluation.partial_scores import PartialScores
from evaluation.reach import batch_violations
from evaluation.records import RecordsHeader
from evaluation.scores import COLUMNS, Scores, has_reach

# A CPU scores several batches side by side, each small enough for its core's cache.
_BATCH_SIZE_TOKENS = {"cpu": 4096, "cuda": 32768}


def make_accelerator() -> Accelerator:
    """accelerate for this machine, in float32 and without its traps.

    Raises:
        ValueError: if the launcher started more processes than accelerate sees.
    """
    on_gpu = torch.cuda.is_available()
    # Processes finish a set at different times and wait for each other.
    patience = InitProcessGroupKwargs(timeout=timedelta(hours=12))
    accelerator = Accelerator(cpu=not on_gpu, mixed_precision="no", kwargs_handlers=[patience])
    expected = int(os.environ.get("WORLD_SIZE", "1"))
    if expected != accelerator.num_processes:
        raise ValueError(
            f"the launcher started {expected} processes, but accelerate sees "
            f"{accelerator.num_processes}: each would score alone and overwrite the others. "
            "Launch with accelerate_config.yaml (distributed_type: MULTI_GPU)."
        )
    if not on_gpu:
        _keep_freed_memory()
    if not on_gpu and "LOCAL_WORLD_SIZE" in os.environ:
        # accelerate launch sets OMP_NUM_THREADS to 1.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
    return accelerator


def _keep_freed_memory() -> None:
    """Let glibc keep large freed blocks: the next batch's logits ask for the same again at once."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3
        for option in (m_trim_threshold, m_top_pad, m_mmap_threshold):
            library.mallopt(option, 1 << 28)


def score_targets(
    accelerator: Accelerator,
    checkpoint: Checkpoint,
    header: RecordsHeader,
    targets: TargetSet,
    form: EvaluationFormat,
    plan: RowPlan,
    pieces: Path,
    batch_size_tokens: int | None = None,
    model: torch.nn.Module | None = None,
) -> Scores | None:
    """Run a model over all rows of a target set and gather one loss a target.

    Args:
        accelerator: from `make_accelerator`.
        checkpoint: the model.
        header: what is scored.
        targets: the set.
        form: its format.
        plan: the arm's rows.
        pieces: folder for what is scored so far; taken up if it holds pieces of this header.
        batch_size_tokens: inputs in one forward pass; by default what suits the device.
        model: the checkpoint's model if it is loaded already.

    Returns:
        The scores on the main process, None on the others; `pieces` is still there.

    Raises:
        ValueError: if a loss is not finite.
    """
    partial = PartialScores(pieces, header, len(targets.tokens))
    partial.load()
    accelerator.wait_for_everyone()  # all processes share out the same rest
    units = share_units(
        score_units(targets, form, plan),
        partial.done,
        accelerator.process_index,
        accelerator.num_processes,
    )
    if len(units):
        model = model or load_model(checkpoint, accelerator.device)
        size = batch_size_tokens or _BATCH_SIZE_TOKENS.get(accelerator.device.type, 8192)
        if accelerator.device.type == "cpu":
            # A small set too has a batch for every core.
            size = min(size, len(targets.tokens) // torch.get_num_threads())
        batches = iter_rows(targets, form, plan, size, units, partial.done.copy())
        with _progress(accelerator, header, score_units(targets, form, plan)[units]) as progress:
            for batch, nats in score_batches(
                model, batches, checkpoint.has_table, accelerator.device
            ):
                columns = batch_columns(batch, nats, plan, has_reach(header))
                _check_finite(columns, header, targets)
                partial.add(**columns)
                progress.update(len(columns["place"]))
        partial.save()
    accelerator.wait_for_everyone()
    if not accelerator.is_main_process:
        return None
    partial.load()
    assert partial.done.all(), "every target is scored by some process"
    return partial.scores


def share_units(
    units: IntArray, done: npt.NDArray[np.bool_], rank: int, num_ranks: int
) -> IntArray:
    """Indices of the units that one process scores, in order: longest first to the least loaded.

    Args:
        units: [units, 2] ranges of targets.
        done: [targets] what needs no scoring.
        rank: of the process.
        num_ranks: processes; every one computes the same shares.
    """
    finished = np.concatenate([[0], np.cumsum(done)])
    rest = (units[:, 1] - units[:, 0]) - (finished[units[:, 1]] - finished[units[:, 0]])
    load = np.zeros(num_ranks, np.int64)
    mine = []
    for unit in np.argsort(-rest, kind="stable"):
        if rest[unit] == 0:
            break
        owner = int(np.argmin(load))
        load[owner] += rest[unit]
        if owner == rank:
            mine.append(int(unit))
    return np.array(sorted(mine), np.int64)


def score_batches(
    model: torch.nn.Module, batches: Iterator[RowBatch], has_table: bool, device: torch.device
) -> Iterator[tuple[RowBatch, npt.NDArray[np.float32]]]:
    """Batches with their losses (`batch_nats`), in order.

    On a CPU one batch a core runs at once: products of this size gain little from a second thread,
    and everything between them gains nothing.
    """
    if device.type != "cpu":
        for batch in batches:
            yield batch, batch_nats(model, batch, has_table, device)
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    waiting: deque[tuple[RowBatch, Future[npt.NDArray[np.float32]]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for batch in batches:
                waiting.append((batch, pool.submit(batch_nats, model, batch, has_table, device)))
                if len(waiting) > threads:
                    done, nats = waiting.popleft()
                    yield done, nats.result()
            while waiting:
                done, nats = waiting.popleft()
                yield done, nats.result()
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)


def batch_nats(
    model: torch.nn.Module, batch: RowBatch, has_table: bool, device: torch.device
) -> npt.NDArray[np.float32]:
    """Losses of one batch: [rows, row_length] float32, 0 where a position scores no target."""
    inputs = {name: torch.from_numpy(array).to(device) for name, array in batch.table.items()}
    inputs = inputs if has_table else {}
    inputs["input_ids"] = torch.from_numpy(batch.input_ids).to(device)
    labels = torch.from_numpy(batch.shift_labels).to(device)
    with torch.inference_mode():
        target_nats: Callable[..., torch.Tensor] | None = getattr(model, "target_nats", None)
        if target_nats is not None:
            losses = target_nats(targets=labels, **inputs)
        else:
            logits = model(**inputs, use_cache=False).logits.float()
            losses = functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="none"
            )
    nats: npt.NDArray[np.float32] = losses.view(labels.shape).cpu().numpy()
    return nats


def batch_columns(
    batch: RowBatch, nats: npt.NDArray[np.float32], plan: RowPlan, check_reach: bool
) -> dict[str, npt.NDArray[np.generic]]:
    """The scores' columns of a batch, and each value's `place` in the target set, all [n]."""
    scored = batch.target_index >= 0
    order = batch.table["table_order"]
    values = {
        "nats": nats,
        "table_order": order,
        "table_right": (order > 0) & (batch.table["table_candidate"] == batch.shift_labels),
        "table_distance": batch.table["table_distance"],
        "slot": np.broadcast_to(np.arange(plan.row_length), scored.shape),
        "violation": batch_violations(batch, plan) if check_reach else np.zeros_like(scored),
    }
    columns: dict[str, npt.NDArray[np.generic]] = {
        name: values[name][scored].astype(dtype) for name, dtype in COLUMNS.items()
    }
    return columns | {"place": batch.target_index[scored]}


def _check_finite(
    columns: dict[str, npt.NDArray[np.generic]], header: RecordsHeader, targets: TargetSet
) -> None:
    bad = np.flatnonzero(~np.isfinite(columns["nats"].astype(np.float64)))
    if len(bad):
        place = int(columns["place"][bad[0]].item())
        document = targets.document_ids[int(targets.document[place])]
        raise ValueError(
            f"Every loss must be finite; {header.label} gives {columns['nats'][bad[0]]} at target "
            f"{place}, in document {document}. Did its training diverge?"
        )


@contextlib.contextmanager
def _progress(accelerator: Accelerator, header: RecordsHeader, units: IntArray) -> Iterator[Any]:
    """A bar over the main process's own share."""
    title = f"{header.label} {header.set_name}.{header.format}"
    if accelerator.num_processes > 1:
        title += f" (1 of {accelerator.num_processes} processes)"
    total = int((units[:, 1] - units[:, 0]).sum())
    hidden = not accelerator.is_main_process
    with tqdm(total=total, desc=title, unit="tok", unit_scale=True, disable=hidden) as bar:
        yield bar
