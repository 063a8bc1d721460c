"""Sections 3, 4 and 6 of the GPU check: updates, the lookup, generation."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu_context import Context, Skip
from benchmarks.reference import PlainUpdate
from modeling_doctab import DocTabForCausalLM, lookup_document_table, loss_doctab
from modeling_doctab.accounting import flops_per_token
from modeling_doctab.attention_doctab import windowed_attention_forward
from modeling_doctab.document_table import DocumentTable
from modeling_doctab.loss_doctab import linear_cross_entropy_sum
from training.config import OptimizerConfig
from training.optim import RecipeOptimizer
from training.setup import recompute_blocks

FIELDS = ("table_order", "table_candidate", "table_distance")
# (name, arm, recomputation, plain reference instead of ours), most wanted first.
UPDATES = (
    ("b", "b", True, False),
    ("b_plain", "b", True, True),
    ("lg512", "lg512", True, False),
    ("lg512_plain", "lg512", True, True),
    ("b_table", "b_table", True, False),
    ("lg512_table", "lg512_table", True, False),
    ("b_without_recomputation", "b", False, False),
    ("a", "a", True, False),
    ("d", "d", True, False),
)
MICRO_BATCHES = 4
LOSS_CHUNKS = (21, 22, 23, 24, 25)  # logits held at once; 2^23 is the default


def updates(context: Context) -> dict[str, Any]:
    """Tokens/s, MFU and memory of an update at the paper's micro-batch, ours and the plain one."""
    measured = context.results.setdefault("arms", {})
    last = 0.0
    for name, arm, recompute, plain in UPDATES:
        if context.time_left() < 1.3 * last and measured:
            measured[name] = {"skipped": f"{context.time_left():.0f} s left"}
            continue
        start = time.perf_counter()
        try:
            measured[name] = _measure_update(context, arm, recompute, plain)
        except torch.OutOfMemoryError as error:
            measured[name] = {"error": f"out of memory: {str(error)[:160]}"}
        except Exception as error:
            measured[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        finally:
            torch._dynamo.reset()
            if context.device.type == "cuda":
                torch.cuda.empty_cache()
        last = time.perf_counter() - start
    return {"ratios": _ratios(measured)}


def _ratios(measured: dict[str, Any]) -> dict[str, float]:
    seconds = {k: v["update_seconds"] for k, v in measured.items() if "update_seconds" in v}
    pairs = {
        "plain_over_ours_b": ("b_plain", "b"),
        "plain_over_ours_lg512": ("lg512_plain", "lg512"),
        "lg512_over_b": ("lg512", "b"),
        "b_table_over_b": ("b_table", "b"),
        "lg512_table_over_lg512": ("lg512_table", "lg512"),
    }
    return {
        name: seconds[a] / seconds[b]
        for name, (a, b) in pairs.items()
        if a in seconds and b in seconds
    }


def _measure_update(context: Context, arm: str, recompute: bool, plain: bool) -> dict[str, Any]:
    config = context.config(arm)
    tokens = 2**17 if not context.miniature else 4 * config.table_reach
    model = context.model(config).train()
    ids = context.rows(config, tokens)
    targets = ids.roll(-1, 1)
    table = None
    if config.document_table:
        table = lookup_document_table(ids, config.table_orders, None, config.table_reach)
    step = _plain_step if plain else _our_step
    update, optimizer_step = step(context, model, ids, targets, table, recompute)
    begun = time.perf_counter()
    update()
    context.synchronize()
    compile_seconds = time.perf_counter() - begun
    if context.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = context.seconds(update, repeats=3, warmup=1)
    result = {
        "row_length": config.max_position_embeddings,
        "tokens_per_update": MICRO_BATCHES * ids.numel(),
        "recomputation": recompute,
        "first_update_seconds": compile_seconds,
        "update_seconds": seconds,
        "tokens_per_second": MICRO_BATCHES * ids.numel() / seconds,
    }
    flops = flops_per_token(config, config.max_position_embeddings)
    if context.matmul_flops:
        result["mfu_of_measured_ceiling"] = (
            flops * result["tokens_per_second"] / context.matmul_flops
        )
    if context.device.type == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if not plain:
        parts = (ids, targets, table, optimizer_step, arm == "b" and recompute)
        result["split_seconds"] = _split(context, model, *parts)
    return result


Step = tuple[Callable[[], None], Callable[[], None]]


def _autocast(context: Context) -> contextlib.AbstractContextManager[None]:
    return torch.autocast(context.device.type, torch.bfloat16, enabled=not context.miniature)


def _our_step(
    context: Context,
    model: DocTabForCausalLM,
    ids: torch.Tensor,
    targets: torch.Tensor,
    table: DocumentTable | None,
    recompute: bool,
) -> Step:
    optimizer = RecipeOptimizer(model, OptimizerConfig(), 1000)
    if recompute:
        recompute_blocks(model)
    context.compile_blocks(model.model.layers)
    fields = {} if table is None else dict(zip(FIELDS, table, strict=True))

    def micro_batches() -> None:
        for _ in range(MICRO_BATCHES):
            with _autocast(context):
                loss = model(ids, shift_labels=targets, **fields).loss
            (loss / MICRO_BATCHES).backward()

    def update() -> None:
        micro_batches()
        optimizer.step(0)
        optimizer.zero_grad()

    def optimizer_step() -> None:
        optimizer.step(0)

    return update, optimizer_step


def _plain_step(
    context: Context,
    model: DocTabForCausalLM,
    ids: torch.Tensor,
    targets: torch.Tensor,
    table: DocumentTable | None,
    recompute: bool,
) -> Step:
    dtype = torch.float32 if context.miniature else torch.bfloat16
    reference = PlainUpdate(model, ids.shape[1], recompute, dtype)
    context.compile_blocks(reference.blocks)

    def update() -> None:
        for _ in range(MICRO_BATCHES):
            with _autocast(context):
                loss = reference.loss(ids, targets, table)
            (loss / MICRO_BATCHES).backward()
        reference.step()

    return update, reference.step


def _split(
    context: Context,
    model: DocTabForCausalLM,
    ids: torch.Tensor,
    targets: torch.Tensor,
    table: DocumentTable | None,
    optimizer_step: Callable[[], None],
    loss_chunks: bool,
) -> dict[str, float]:
    """Seconds of an update's parts, each run alone at the update's shapes, forward and backward.

    With recomputation a block's forward runs twice in the update and once here. `loss_chunks` asks
    for the loss in chunks of several sizes too, which are the same for every arm.
    """
    config = model.config
    dtype = torch.float32 if context.miniature else torch.bfloat16
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    hidden = torch.randn(
        *ids.shape, config.hidden_size, device=context.device, dtype=dtype, requires_grad=True
    )

    def loss() -> None:
        with _autocast(context):
            flat = hidden.view(-1, config.hidden_size)
            linear_cross_entropy_sum(
                flat, model.lm_head.weight, targets.view(-1), config.final_logit_softcapping
            ).backward()

    shape = (ids.shape[0], config.num_attention_heads, ids.shape[1], config.head_dim)
    qkv = [
        torch.randn(shape, device=context.device, dtype=dtype, requires_grad=True) for _ in range(3)
    ]

    def attention() -> None:
        for layer in model.model.layers:
            output, _ = windowed_attention_forward(
                layer.self_attn, *qkv, None, sliding_window=layer.self_attn.sliding_window
            )
            output.sum().backward()

    def mlp() -> None:
        for layer in model.model.layers:
            with _autocast(context):
                layer.mlp(hidden).sum().backward()

    parts = {
        "optimizer": context.seconds(optimizer_step, 3),
        "loss": MICRO_BATCHES * context.seconds(loss, 3),
        "attention": MICRO_BATCHES * context.seconds(attention, 3),
        "mlp": MICRO_BATCHES * context.seconds(mlp, 3),
    }
    if loss_chunks:
        chosen = loss_doctab.MAX_LOGITS
        try:
            for power in LOSS_CHUNKS:
                loss_doctab.MAX_LOGITS = 1 << power
                parts[f"loss, chunks of 2^{power}"] = MICRO_BATCHES * context.seconds(loss, 3)
        finally:
            loss_doctab.MAX_LOGITS = chosen
    if table is not None:
        embedding = model.model.document_table

        def table_vectors() -> None:
            embedding(table, dtype).sum().backward()

        parts["table"] = MICRO_BATCHES * context.seconds(table_vectors, 3)
    model.zero_grad(set_to_none=True)
    return parts


def lookup(context: Context) -> dict[str, Any]:
    """Section 4: the lookup of 16 rows of 8,192, on the device and from the loader's threads."""
    config = context.config("a")
    ids = context.rows(config, 16 * config.max_position_embeddings)
    results: dict[str, Any] = {"shape": list(ids.shape)}
    results["device_seconds"] = context.seconds(lambda: lookup_document_table(ids))
    if not context.miniature:
        compiled = torch.compile(lookup_document_table)
        with contextlib.suppress(Exception):
            results["device_compiled_seconds"] = context.seconds(lambda: compiled(ids))
    try:
        from data_scripts.lookup import lookup_rows
    except ImportError as error:
        results["loader"] = f"skipped: {error}"
        return results
    rows = ids.cpu().numpy()
    results["loader_seconds"] = context.seconds(lambda: lookup_rows(rows))
    results["loader_micro_batches_per_second_2_threads"] = _threaded_rate(rows, 2)
    return results


def _threaded_rate(rows: Any, num_threads: int) -> float:
    from concurrent.futures import ThreadPoolExecutor

    from data_scripts.lookup import lookup_rows

    count = 4 * num_threads
    with ThreadPoolExecutor(num_threads) as pool:
        start = time.perf_counter()
        list(pool.map(lambda _: lookup_rows(rows), range(count)))
        return count / (time.perf_counter() - start)


def generation(context: Context) -> dict[str, Any]:
    """Section 6: greedy tokens/s after a 1K prompt, with and without the table, batch 1 and 64."""
    prompt_length, new = (16, 4) if context.miniature else (1024, 64)
    dtype = torch.float32 if context.miniature else torch.bfloat16
    for batch, (name, arm) in _cases(context):
        config = context.config(arm)
        model = context.model(config, dtype).eval()
        prompt = context.rows(config, batch * config.max_position_embeddings)
        prompt = prompt[:batch, :prompt_length]

        def generate(model=model, prompt=prompt) -> None:
            model.generate(prompt, max_new_tokens=new, min_new_tokens=new, do_sample=False)

        seconds = context.seconds(generate, repeats=2, warmup=1)
        context.results[f"{name}_batch_{batch}"] = {
            "seconds": seconds,
            "tokens_per_second": batch * new / seconds,
        }
    if not context.results:
        raise Skip("out of time")
    return {}


def _cases(context: Context) -> Iterator[tuple[int, tuple[str, str]]]:
    for batch in (1, 4 if context.miniature else 64):
        for case in (("b", "b"), ("b_table", "b_table")):
            if context.time_left() > 0:
                yield batch, case
