"""From a recipe to what training needs: data, device, batches, model, and where to begin."""

import contextlib
import ctypes
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from data_scripts.chunk_set import ChunkSet
from data_scripts.rows import TableOptions, donor_chunks
from modeling_doctab import DocTabConfig, DocTabForCausalLM
from modeling_doctab.accounting import count_parameters
from modeling_doctab.loss_doctab import MAX_LOGITS
from training import checkpoint
from training.batches import BatchPlan, RowMaker
from training.config import Recipe
from training.metrics import Clock
from training.optim import RecipeOptimizer


def model_config(recipe: Recipe) -> DocTabConfig:
    """The recipe's DocTabConfig; the table reaches over one chunk unless it says otherwise."""
    return DocTabConfig(**{"table_reach": recipe.data.chunk_length, **recipe.model})


def open_chunk_set(recipe: Recipe, config: DocTabConfig) -> ChunkSet:
    """The recipe's chunk set, checked against the recipe.

    Raises:
        ValueError: if it is missing, or made for another vocabulary, BOS or chunk length.
    """
    if recipe.data.chunk_set is None:
        raise ValueError(
            "data.chunk_set must name a folder that `python -m data_scripts.build` wrote; give it "
            "in the recipe or with --chunk_set DIR"
        )
    chunk_set = ChunkSet.open(recipe.data.chunk_set)
    for name, ours, theirs in (
        ("data.chunk_length", recipe.data.chunk_length, chunk_set.chunk_length),
        ("model.vocab_size", config.vocab_size, chunk_set.vocab_size),
        ("model.bos_token_id", config.bos_token_id, chunk_set.bos_token_id),
    ):
        if ours != theirs:
            raise ValueError(
                f"{name} is {ours} in the recipe, but {theirs} in the chunk set {chunk_set.path}"
            )
    return chunk_set


def check_evaluation(recipe: Recipe, chunk_set: ChunkSet) -> None:
    """Check what the in-loop evaluation will read.

    Raises:
        ValueError: if its split is none, or a confirmation set, which is scored once and not here.
    """
    split = recipe.training.evaluation_split
    if recipe.training.evaluate_every <= 0:
        return
    if split not in chunk_set.evaluation_splits():
        raise ValueError(
            f"training.evaluation_split must be an evaluation split of {chunk_set.path} "
            f"({', '.join(chunk_set.evaluation_splits())}); got {split!r}"
        )
    if chunk_set.is_confirmation(split):
        raise ValueError(
            f"training.evaluation_split {split} is a confirmation set: it is scored once, after a "
            "registration"
        )
    if recipe.data.table_source == "foreign":
        documents, _, _ = chunk_set.documents(split).chunks()
        try:
            donor_chunks(documents, np.zeros(1, np.int64))
        except ValueError as error:
            raise ValueError(f"training.evaluation_split {split}: {error}") from None


def make_accelerator(recipe: Recipe) -> Accelerator:
    """accelerate for this machine, with its traps closed: world size, threads, precision."""
    on_gpu = torch.cuda.is_available()
    precision = recipe.training.precision
    if precision == "auto":
        precision = "bf16" if on_gpu else "fp32"
    elif precision == "bf16" and not on_gpu:
        warnings.warn(
            "training.precision is bf16, which most CPUs run slower than fp32; auto takes fp32",
            stacklevel=2,
        )
    accelerator = Accelerator(
        cpu=not on_gpu,
        mixed_precision="bf16" if precision == "bf16" else "no",
        log_with=_known_trackers(recipe.training.trackers) or None,
        project_dir=str(recipe.run_dir),
    )
    expected = int(os.environ.get("WORLD_SIZE", "1"))
    if expected != accelerator.num_processes:
        raise ValueError(
            f"the launcher started {expected} processes, but accelerate sees "
            f"{accelerator.num_processes}: each would train alone and overwrite the others. "
            "Launch with accelerate_config.yaml (distributed_type: MULTI_GPU)."
        )
    if not on_gpu:
        # accelerate launch sets OMP_NUM_THREADS to 1.
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        threads = recipe.training.num_threads
        if threads == "auto":
            threads = (
                max(1, len(os.sched_getaffinity(0)) // local)
                if hasattr(os, "sched_getaffinity")
                else max(1, (os.cpu_count() or 1) // local)
            )
        torch.set_num_threads(int(threads))
        keep_freed_memory()
    else:
        torch.set_float32_matmul_precision("high")
    if not on_gpu and Path("/dev/nvidia0").exists():
        warnings.warn(
            f"this machine has an NVIDIA device, but torch {torch.__version__} cannot use it and "
            "trains on the CPU: install a build of torch with CUDA that the driver supports",
            stacklevel=2,
        )
    return accelerator


def _known_trackers(names: tuple[str, ...]) -> list[str]:
    """The trackers that are installed; names the others."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    known = {str(name) for name in LOGGER_TYPE_TO_CLASS}
    installed = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in known:
            raise ValueError(f"training.trackers: no tracker {name!r}; known: {sorted(known)}")
        if name not in installed:
            warnings.warn(
                f"tracker {name} is not installed; training goes on without it", stacklevel=2
            )
    return [name for name in names if name in installed]


def keep_freed_memory() -> None:
    """Let glibc keep large freed blocks, which training on a CPU asks for again at once."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3
        for option in (m_trim_threshold, m_top_pad, m_mmap_threshold):
            libc.mallopt(option, 1 << 28)


def batch_plan(recipe: Recipe, world_size: int) -> BatchPlan:
    """The recipe's batches, in chunks; smaller micro-batches where each process has less to do.

    Raises:
        ValueError: if the processes cannot share an update's chunks evenly.
    """
    t, chunk_length = recipe.training, recipe.data.chunk_length
    per_update = t.tokens_per_update // chunk_length
    if per_update % world_size:
        raise ValueError(
            f"the number of processes must divide the {per_update} chunks of an update; got "
            f"{world_size}. Launch as many as a divisor of {per_update}."
        )
    share, most = per_update // world_size, t.tokens_per_micro_batch // chunk_length
    per_micro_batch = next(size for size in range(min(share, most), 0, -1) if share % size == 0)
    return BatchPlan(per_update, per_micro_batch, world_size)


def table_options(
    recipe: Recipe, config: DocTabConfig, dropout: float = 0.0
) -> TableOptions | None:
    """How the fields of the recipe's table are made; None for a model without one."""
    if not config.document_table:
        return None
    return TableOptions(config.table_orders, recipe.data.table_source, dropout, recipe.seed)


def row_maker(recipe: Recipe, config: DocTabConfig, chunk_set: ChunkSet) -> RowMaker:
    """Chunks to rows, with table fields for a model that has a table."""
    return RowMaker(
        chunk_set.train_chunks(recipe.data.split),
        config.max_position_embeddings,
        config.bos_token_id,
        table_options(recipe, config, recipe.data.table_dropout),
        chunk_set.chunk_documents(recipe.data.split),
    )


def restore(
    start: tuple[Path, dict[str, Any]], model: DocTabForCausalLM, optimizer: RecipeOptimizer
) -> tuple[int, Clock, float | None]:
    """Load weights and optimizer state; returns the next update, the seconds and the first loss.

    Raises:
        ValueError: if the checkpoint holds another architecture.
    """
    path, state = start
    weights, optimizer_state = checkpoint.load_tensors(path)
    ours = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    theirs = {name: tuple(w.shape) for name, w in weights.items()}
    if ours != theirs:
        differing = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
        raise ValueError(
            f"{path} holds another architecture: {', '.join(differing[:3])} differ. Start anew "
            "with --overwrite or another --output_dir."
        )
    model.load_state_dict(weights)
    optimizer.load_state_by_name(optimizer_state)
    clock = Clock(state["training_seconds"], state["loop_seconds"], state.get("cpu_seconds", 0.0))
    return state["update"], clock, state["step0_loss"]


# Elements that autograd keeps per token and block, in units of the width: an estimate for compiled
# blocks, which keep what their fused kernels read again.
SAVED_ELEMENTS = 20


def expected_memory_bytes(config: DocTabConfig, num_tokens: int, recompute: bool) -> int:
    """Estimate of a process's peak memory in training, for planning.

    Args:
        config: the model.
        num_tokens: tokens of a micro-batch.
        recompute: whether blocks are recomputed; then one block's activations are held at a time.
    """
    c = config
    embeddings = sum(map(c.has_value_embedding, range(c.num_hidden_layers))) + 1
    in_tables = c.vocab_size * c.hidden_size * embeddings + c.bigram_rows * c.hidden_size
    if c.document_table:
        in_tables += (c.table_orders * c.vocab_size + c.num_table_states) * c.hidden_size
    others = count_parameters(c) - in_tables
    # weight, gradient and two moments, each in its own type; Muon has one moment less
    width = 2 if c.embedding_dtype == "bfloat16" else 4
    parameters = in_tables * 4 * width + others * 4 * 4
    kept = c.num_hidden_layers * (1 if recompute else SAVED_ELEMENTS)
    activations = num_tokens * c.hidden_size * 2 * (kept + (SAVED_ELEMENTS if recompute else 0))
    loss = 3 * 4 * min(num_tokens * c.vocab_size, MAX_LOGITS)
    return parameters + activations + loss


def recomputes(recipe: Recipe, config: DocTabConfig, device: torch.device) -> bool:
    """Whether blocks are recomputed: as the recipe says, or where memory would be short."""
    choice = recipe.training.recomputation
    if isinstance(choice, bool):
        return choice
    if device.type != "cuda":
        return False
    need = expected_memory_bytes(config, recipe.training.tokens_per_micro_batch, False)
    return need > 0.8 * torch.cuda.get_device_properties(device).total_memory


def recompute_blocks(model: DocTabForCausalLM) -> None:
    """Recompute each block in the backward pass (transformers 5.24 renamed the method)."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def prepare_model(
    model: DocTabForCausalLM, recipe: Recipe, accelerator: Accelerator
) -> torch.nn.Module:
    """Attention, recomputation, compilation, and DDP where there are several processes."""
    on_gpu = accelerator.device.type == "cuda"
    t = recipe.training
    if t.attn_implementation is not None:
        model.set_attn_implementation(t.attn_implementation)
    if recomputes(recipe, model.config, accelerator.device):
        recompute_blocks(model)
    if t.compile is True or (t.compile == "auto" and on_gpu):
        for layer in model.model.layers:
            layer.compile()
    if accelerator.num_processes == 1:
        return accelerator.prepare_model(model)
    return accelerator.prepare(model)
