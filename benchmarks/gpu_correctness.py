"""Section 2 of the GPU check: does every fast path on this device equal the slow one?"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_context import Context, Skip
from modeling_doctab import DocTabConfig, DocTabForCausalLM, lookup_document_table, naive
from modeling_doctab.document_table import lookup_last
from training import checkpoint
from training.config import OptimizerConfig
from training.optim import RecipeOptimizer

# Not "flash_attention_2" alone: the Hub's kernels are tried where they are installed.
IMPLEMENTATIONS = (
    "doctab_windowed",
    "sdpa",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
)


def run(context: Context) -> dict[str, Any]:
    """Each part gives `passed`, a measured `value` and the `bound` that it is held against."""
    parts: dict[str, Callable[[Context], dict[str, Any]]] = {
        "bf16_against_fp32": bf16_against_fp32,
        "lookup_equals_naive": lookup_equals_naive,
        "generation_equals_recomputation": generation_equals_recomputation,
        "resume_is_bit_equal": resume_is_bit_equal,
        "compiled_equals_eager": compiled_equals_eager,
        "packed_equals_separate": packed_equals_separate,
    }
    for name in IMPLEMENTATIONS:
        parts[f"attention_{name}"] = lambda c, name=name: attention_agrees(c, name)
    for name, part in parts.items():
        if context.time_left() < 0:
            context.results[name] = {"skipped": "out of time"}
            continue
        try:
            context.results[name] = part(context)
        except Skip as reason:
            context.results[name] = {"skipped": str(reason)}
        except Exception as error:
            context.results[name] = {"passed": False, "error": f"{type(error).__name__}: {error}"}
    outcomes = [r["passed"] for r in context.results.values() if "passed" in r]
    return {"num_passed": sum(outcomes), "num_failed": len(outcomes) - sum(outcomes)}


def _result(value: float, bound: float, **more: Any) -> dict[str, Any]:
    return {"passed": bool(value <= bound), "value": float(value), "bound": bound, **more}


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def _small(context: Context, **changes: Any) -> DocTabConfig:
    """LG512 + table: a sliding and a full layer type, the table, little time."""
    return context.config("lg512_table", **changes)


def bf16_against_fp32(context: Context) -> dict[str, Any]:
    """The loss of B + table under autocast against float32."""
    config = context.config("b_table")
    model = context.model(config).eval()
    ids = context.rows(config, 4 * config.max_position_embeddings)
    with torch.no_grad():
        exact = model(ids, labels=ids, logits_to_keep=1, use_cache=False).loss
        with torch.autocast(context.device.type, torch.bfloat16):
            rounded = model(ids, labels=ids, logits_to_keep=1, use_cache=False).loss
    return _result(abs(float(exact - rounded)), 0.02)


def attention_agrees(context: Context, implementation: str) -> dict[str, Any]:
    """Logits and gradients of sliding and full layers against eager attention in float32."""
    if context.miniature and implementation == "flex_attention":
        raise Skip("flex attention takes most of a minute to compile on a CPU")
    config = _small(context, num_hidden_layers=3)
    model = context.model(config)
    half = implementation.startswith("flash") or (
        implementation == "doctab_windowed" and context.device.type == "cuda"
    )
    ids = context.rows(config, config.max_position_embeddings)
    outputs = {}
    for name in ("eager", implementation):
        try:
            model.set_attn_implementation(name)
        except (ImportError, ValueError) as error:
            raise Skip(str(error).splitlines()[0][:160]) from error
        model.zero_grad()
        model.eval()
        with torch.autocast(context.device.type, torch.bfloat16, enabled=half and name != "eager"):
            logits = model(ids, use_cache=False).logits
        logits.float().square().mean().backward()
        gradient = model.model.layers[0].self_attn.k_proj.weight.grad
        outputs[name] = (logits.detach(), gradient.clone())
    logits_error = _relative(outputs[implementation][0], outputs["eager"][0])
    gradient_error = _relative(outputs[implementation][1], outputs["eager"][1])
    bound = 3e-2 if half else 1e-4
    return _result(max(logits_error, gradient_error), bound, half_precision=half)


def compiled_equals_eager(context: Context) -> dict[str, Any]:
    """Loss and a gradient of blocks under torch.compile."""
    config = _small(context, num_hidden_layers=2)
    ids = context.rows(config, config.max_position_embeddings)
    found = []
    for compiled in (False, True):
        model = context.model(config).train()
        if compiled:
            context.compile_blocks(model.model.layers)
        loss = model(ids, labels=ids).loss
        loss.backward()
        gradient = model.model.layers[0].mlp.up_proj.weight.grad
        found.append((loss.detach(), gradient))
    torch._dynamo.reset()
    error = max(_relative(found[1][0], found[0][0]), _relative(found[1][1], found[0][1]))
    return _result(error, 1e-3)


def lookup_equals_naive(context: Context) -> dict[str, Any]:
    """The tensor lookup and the online one on this device against plain loops."""
    bos = context.config("b").bos_token_id
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 7, (2, 400), generator=generator).to(context.device)
    ids[:, 0] = ids[1, 200] = bos
    segments = (ids == bos).long().cumsum(1)
    table = lookup_document_table(ids, 4, segments, 150)
    wrong = 0
    for i, row in enumerate(ids.tolist()):
        expected = naive.lookup(row, 4, segments[i].tolist(), 150)
        found = zip(*(f[i].tolist() for f in table), strict=True)
        wrong += sum(a != b for a, b in zip(found, expected, strict=True))
        for t in (1, 2, 57, 230, len(row)):
            last = lookup_last(ids[i : i + 1, :t], 4, bos, 150)
            wrong += tuple(int(f) for f in last) != expected[t - 1]
    return _result(wrong, 0)


def generation_equals_recomputation(context: Context) -> dict[str, Any]:
    """Greedy tokens with the cache against a whole forward pass a token, and batches of two."""
    config = _small(context)
    model = context.model(config).eval()
    prompt = context.rows(config, 2 * config.max_position_embeddings)[:2, :24]
    out = model.generate(prompt, max_new_tokens=16, do_sample=False)
    wrong = 0
    with torch.no_grad():
        logits = model(out[:, :-1], use_cache=False).logits.float()
    for t in range(prompt.shape[1], out.shape[1]):
        best = logits[:, t - 1].max(-1).values
        chosen = logits[:, t - 1].gather(1, out[:, t : t + 1])[:, 0]
        # A choice within rounding of the best is no error.
        wrong += int((best - chosen > 1e-3).sum())
    return _result(wrong, 0)


def packed_equals_separate(context: Context) -> dict[str, Any]:
    """Documents packed into one row with reset positions against each one alone."""
    config = _small(context)
    model = context.model(config).eval()
    rows = context.rows(config, 2 * config.max_position_embeddings)
    pieces = [rows[0, :20], rows[1, :13]]
    packed = torch.cat(pieces)[None]
    positions = torch.cat([torch.arange(len(p), device=context.device) for p in pieces])[None]
    with torch.no_grad():
        together = model(packed, position_ids=positions, use_cache=False).logits[0]
        alone = torch.cat([model(p[None], use_cache=False).logits[0] for p in pieces])
    return _result(_relative(together, alone), 2e-2 if context.device.type == "cuda" else 1e-4)


def resume_is_bit_equal(context: Context) -> dict[str, Any]:
    """Two updates, a checkpoint on disk, two more: the same bits as four in one go."""
    config = _small(context, num_hidden_layers=2)
    batches = [context.rows(config, config.max_position_embeddings, seed=i) for i in range(4)]

    def fresh() -> tuple[DocTabForCausalLM, RecipeOptimizer]:
        model = context.model(config).train()
        # The backward pass of flash attention adds up in any order.
        model.set_attn_implementation("eager")
        return model, RecipeOptimizer(model, OptimizerConfig(), 4)

    def train(model: DocTabForCausalLM, optimizer: RecipeOptimizer, updates: range) -> None:
        for update in updates:
            with torch.autocast(
                context.device.type, torch.bfloat16, enabled=context.device.type == "cuda"
            ):
                loss = model(batches[update], labels=batches[update]).loss
            loss.backward()
            optimizer.step(update)
            optimizer.zero_grad()

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        whole, optimizer = fresh()
        train(whole, optimizer, range(4))
        cut, optimizer = fresh()
        train(cut, optimizer, range(2))
        with tempfile.TemporaryDirectory() as folder:
            writer = checkpoint.CheckpointWriter(Path(folder), 1)
            writer.save(2, cut, optimizer.state_by_name(), {})
            writer.close()
            weights, state = checkpoint.load_tensors(checkpoint.checkpoint_path(Path(folder), 2))
        again, optimizer = fresh()
        again.load_state_dict(weights)
        optimizer.load_state_by_name(state)
        train(again, optimizer, range(2, 4))
    finally:
        torch.use_deterministic_algorithms(False)
    theirs = dict(whole.named_parameters())
    different = sum(not torch.equal(p, theirs[n]) for n, p in again.named_parameters())
    return _result(different, 0)
