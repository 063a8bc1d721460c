"""Stops a run before a loss or gradient that is not a number reaches the weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from training.run import Run


class NonFiniteError(FloatingPointError):
    """A loss or gradient is not a number; the weights were not changed."""


def refuse_non_finite(
    run: Run, update: int, totals: dict[str, float], norms: dict[str, float]
) -> None:
    """Raise on every process if the loss or a gradient of any is not finite.

    Raises:
        NonFiniteError: naming the update, the process, and the chunk and row where it can be found.
    """
    bad_groups = sorted(group for group, norm in norms.items() if not math.isfinite(norm))
    if math.isfinite(totals["nats"]) and not bad_groups:
        return
    places = [place for place in _gather(run, _find_row(run, update)) if place]
    what = "the loss" if not math.isfinite(totals["nats"]) else "the gradient"
    where = "; ".join(places) or f"no single row explains it (gradients: {', '.join(bad_groups)})"
    raise NonFiniteError(
        f"{what} is not a number: {where}. The weights were not changed; the last checkpoint is "
        "good. Look at that row, or lower the learning rates."
    )


@torch.no_grad()
def _find_row(run: Run, update: int) -> str | None:
    """The first row of this process's share of the update whose loss is not finite."""
    for micro_batch in range(run.plan.micro_batches):
        positions = run.plan.chunk_positions(update, micro_batch, run.rank)
        batch = run.make_rows(positions)
        rows_per_chunk = len(batch["input_ids"]) // len(positions)
        for row in range(len(batch["input_ids"])):
            one = {k: v[row : row + 1].to(run.device) for k, v in batch.items()}
            with run.accelerator.autocast():
                loss = run.model(**one).loss
            if not torch.isfinite(loss):
                chunk = positions[row // rows_per_chunk] % len(run.make_rows.chunks)
                return f"process {run.rank}, chunk {chunk}, row {row % rows_per_chunk}"
    return None


def _gather(run: Run, value: str | None) -> list[str | None]:
    if run.accelerator.num_processes == 1:
        return [value]
    gathered: list[str | None] = [None] * run.accelerator.num_processes
    torch.distributed.all_gather_object(gathered, value)
    return gathered
