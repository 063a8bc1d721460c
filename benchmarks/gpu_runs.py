"""Section 5 of the GPU check: short equal-token runs of the core arms on a chunk set.

Each arm trains for the same number of updates and is scored on the development set in the
training format. Curves stay in the JSON; the nats of every target go into an npz, from which
records can be made at home. Checkpoints stay behind.
"""

import math
import time
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_context import Context, Skip
from data_scripts.chunk_set import ChunkSet
from data_scripts.rows import TableOptions
from modeling_doctab import DocTabConfig, DocTabForCausalLM
from training.batches import BatchLoader, BatchPlan, RowMaker
from training.config import OptimizerConfig
from training.optim import RecipeOptimizer
from training.setup import recompute_blocks

ARMS = ("b", "b_table", "lg512", "lg512_table")
POINTS = 8  # of the curve


def run(context: Context) -> dict[str, Any]:
    """Train and score the four arms in the time that is left."""
    chunks, heldout, token_bytes, bos = _data(context)
    changes = {} if context.miniature else {"vocab_size": len(token_bytes), "bos_token_id": bos}
    plan = BatchPlan(2, 2) if context.miniature else BatchPlan(64, 16)
    num_updates = 2 if context.miniature else None
    data = (chunks, heldout, token_bytes)
    for arm in ARMS:
        share = context.time_left() / (len(ARMS) - ARMS.index(arm))
        if share < 5 and not context.miniature and num_updates is None:
            raise Skip("no time left for a run")
        config = context.config(arm, **changes)
        if num_updates is None:
            # The first arm sets the length for all: what fits into its share of the time.
            little = (chunks, heldout[:1], token_bytes)
            each, _ = _train_and_score(context, config, plan, little, 4)
            longest = min(953, len(chunks) // plan.chunks_per_update)
            num_updates = max(20, min(longest, int(0.7 * share / each["seconds_per_update"])))
        result, nats = _train_and_score(context, config, plan, data, num_updates)
        context.results[arm] = result
        np.savez_compressed(context.out / f"nats_{arm}.npz", nats=nats.astype(np.float32))
    bpb = {arm: context.results[arm]["bits_per_byte"] for arm in ARMS}
    return {
        "gain_b": bpb["b"] - bpb["b_table"],
        "gain_lg512": bpb["lg512"] - bpb["lg512_table"],
        "num_updates": num_updates,
    }


def _data(context: Context) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Training chunks, held-out chunks, bytes of each token, BOS."""
    if context.chunk_set is not None:
        chunk_set = ChunkSet.open(context.chunk_set)
        heldout = chunk_set.documents("dev_val").chunks()[2][:256]
        return chunk_set.train_chunks(), heldout, chunk_set.token_bytes(), chunk_set.bos_token_id
    if not context.miniature:
        raise Skip("no --chunk_set was given")
    rng = np.random.default_rng(0)
    made_up = rng.zipf(1.3, (8, context.config("b").table_reach)) % 252
    return made_up, made_up[:2], np.full(256, 4), 252


def _train_and_score(
    context: Context,
    config: DocTabConfig,
    plan: BatchPlan,
    data: tuple[np.ndarray, np.ndarray, np.ndarray],
    num_updates: int,
) -> tuple[dict[str, Any], np.ndarray]:
    """One run: what it measured, and the nats of every held-out target."""
    chunks, heldout, token_bytes = data
    torch._dynamo.reset()  # the arms share their code, and a function has few graphs
    torch.manual_seed(44)
    model = DocTabForCausalLM(config).to(context.device).train()
    recompute_blocks(model)
    if context.device.type == "cuda":
        context.compile_blocks(model.model.layers)
    table = TableOptions(config.table_orders) if config.document_table else None
    make = RowMaker(chunks, config.max_position_embeddings, config.bos_token_id, table)
    num_bytes = torch.from_numpy(token_bytes).to(context.device)
    optimizer = RecipeOptimizer(model, OptimizerConfig(), num_updates)
    curve = []
    loader = iter(BatchLoader(make, plan, 0, 0, num_updates, 4, context.device))
    start = compiled = time.perf_counter()
    for update in range(num_updates):
        loss = _update(context, model, optimizer, loader, plan, update)
        if update % max(1, num_updates // POINTS) == 0 or update == num_updates - 1:
            curve.append({"update": update, "training_loss": float(loss)})
        if update == 0:
            context.synchronize()
            compiled = time.perf_counter()
    context.synchronize()
    trained = time.perf_counter()
    nats = _score(context, model, config, heldout)
    targets = torch.from_numpy(heldout.astype(np.int64)).to(context.device)
    total_bytes = int(num_bytes[targets].sum())
    result = {
        "curve": curve,
        "bits_per_byte": float(nats.sum()) / (math.log(2) * total_bytes),
        "num_targets": int(nats.size),
        "seconds": time.perf_counter() - start,
        "seconds_per_update": (trained - compiled) / max(1, num_updates - 1),
    }
    return result, nats


def _update(context, model, optimizer, loader, plan, update) -> torch.Tensor:  # type: ignore[no-untyped-def]
    total = torch.zeros((), device=context.device)
    for _ in range(plan.micro_batches):
        with torch.autocast(
            context.device.type, torch.bfloat16, enabled=context.device.type == "cuda"
        ):
            loss = model(**next(loader)).loss / plan.micro_batches
        loss.backward()
        total += loss.detach()
    optimizer.step(update)
    optimizer.zero_grad()
    return total


@torch.no_grad()
def _score(
    context: Context, model: DocTabForCausalLM, config: DocTabConfig, heldout: np.ndarray
) -> np.ndarray:
    """Nats of every target, [chunks, chunk_length], in the training format."""
    model.eval()
    table = TableOptions(config.table_orders) if config.document_table else None
    make = RowMaker(heldout, config.max_position_embeddings, config.bos_token_id, table)
    parts = []
    for i in range(len(heldout)):
        batch = {k: v.to(context.device) for k, v in make(range(i, i + 1)).items()}
        targets = batch.pop("shift_labels")
        with torch.autocast(
            context.device.type, torch.bfloat16, enabled=context.device.type == "cuda"
        ):
            parts.append(model.target_nats(targets=targets, **batch).flatten())
    return torch.stack(parts).cpu().numpy()
