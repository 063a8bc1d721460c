"""A training update on this CPU against the plain update of benchmarks/reference.py.

Same model, weights, rows, threads and dtype (float32); V 8,192. B-like: width 256, 4 layers, rows
of 512. LG-like: rows of 2,048 with short windows of 128 below a full layer. The plain update
recomputes its blocks, as the paper's does; ours does so only where memory would be short, which on
these shapes it is not. A third case is the plain update without recomputation.

With a checkout of autoresearch, the public recipe itself: its model and its optimizer on the same
weights and rows. Its Muon always iterates in bfloat16, so there ours does too.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import peers
from benchmarks.harness import Result, compare
from benchmarks.reference import PlainUpdate
from modeling_doctab import DocTabConfig, DocTabForCausalLM
from training.config import OptimizerConfig
from training.optim import RecipeOptimizer
from training.setup import keep_freed_memory

COMMON = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 64,
    "document_table": False,
}
SHAPES = {
    "update_b": ({"max_position_embeddings": 512}, 8, 1.15),
    "update_lg": (
        {"max_position_embeddings": 2048, "window_pattern": "S", "short_window": 128},
        2,
        1.5,
    ),
}


def run() -> Iterator[Result]:
    """One result a shape."""
    keep_freed_memory()
    for name, (changes, rows, target) in SHAPES.items():
        config = DocTabConfig(**COMMON, **changes)
        length = config.max_position_embeddings
        ids = torch.randint(0, 8188, (rows, length), generator=torch.Generator().manual_seed(0))
        ids[:, 0] = config.bos_token_id
        targets = ids.roll(-1, 1)
        yield compare(
            name,
            question=f"an update of {rows} rows of {length:,}, width 256, 4 layers, V 8,192, "
            "against the plain update",
            prediction=f"{target}x: no recomputation, logits in chunks, fused AdamW, stacked Muon"
            + (", windows in blocks" if "window_pattern" in changes else ""),
            cases={
                "ours": _ours(config, ids, targets),
                "plain": _plain(config, ids, targets, True),
                "plain, not recomputed": _plain(config, ids, targets, False),
            },
            check=_same_loss,
            target={"plain": target},
            rounds=5,
            facts={"rows": rows, "row_length": length, "threads": torch.get_num_threads()},
        )
    folder = peers.checkout(peers.AUTORESEARCH)
    if folder is not None:
        yield against_autoresearch(folder)


def against_autoresearch(folder: Path) -> Result:
    """The public recipe's update on the small arms' shape, and ours on its weights."""
    rows, length = 8, 512
    config = DocTabConfig(
        **COMMON,  # type: ignore[arg-type]
        max_position_embeddings=length,
        rotary_dtype="bfloat16",
        embedding_dtype="float32",
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 8188, (rows, length), generator=generator)
    ids[:, 0] = config.bos_token_id
    targets = ids.roll(-1, 1)
    theirs = _autoresearch_model(peers.autoresearch_training(folder), config)
    ours = DocTabForCausalLM(config).train()
    ours.load_state_dict({peers.our_name(n): p for n, p in theirs.named_parameters()})
    optimizer = theirs.setup_optimizer()

    def their_update() -> float:
        loss = theirs(ids, targets)
        loss.backward()
        optimizer.step()
        theirs.zero_grad(set_to_none=True)
        return float(loss.detach())

    result = compare(
        "update_autoresearch",
        question=f"an update of {rows} rows of {length:,}, width 256, 4 layers, V 8,192, against "
        "autoresearch's model and optimizer, attention by sdpa, uncompiled, both Muons in bfloat16",
        prediction="1.15x: logits in chunks and fused AdamW; matrix products are most of both",
        cases={
            "ours": _update(ours, ids, targets, OptimizerConfig(iteration_dtype="bfloat16")),
            "autoresearch": their_update,
        },
        check=_same_loss,
        target=1.0,
        rounds=5,
        facts={"rows": rows, "row_length": length, "threads": torch.get_num_threads()},
    )
    result.facts["tokens_per_second"] = {
        name: rows * length / case.median for name, case in result.cases.items()
    }
    return result


def _autoresearch_model(training: dict[str, Any], config: DocTabConfig) -> torch.nn.Module:
    """Its GPT in float32, every matrix of it non-zero, so that the losses compare all of it."""
    c = config
    model = training["GPT"](
        training["GPTConfig"](
            sequence_len=c.max_position_embeddings,
            vocab_size=c.vocab_size,
            n_layer=c.num_hidden_layers,
            n_head=c.num_attention_heads,
            n_kv_head=c.num_attention_heads,
            n_embd=c.hidden_size,
        )
    )
    torch.manual_seed(44)
    model.init_weights()
    model.float()
    model.cos, model.sin = model.cos.bfloat16(), model.sin.bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2 and not parameter.any():
                parameter.normal_(0, 0.02)
        model.lm_head.weight.normal_(0, 0.02)
    return model


def _same_loss(outputs: dict[str, float]) -> None:
    """All start from the same weights: their first losses must agree."""
    assert max(outputs.values()) - min(outputs.values()) < 1e-4, outputs


def _model(config: DocTabConfig) -> DocTabForCausalLM:
    torch.manual_seed(44)
    return DocTabForCausalLM(config).train()


def _ours(config: DocTabConfig, ids: torch.Tensor, targets: torch.Tensor) -> Callable[[], float]:
    return _update(_model(config), ids, targets, OptimizerConfig())


def _update(
    model: DocTabForCausalLM, ids: torch.Tensor, targets: torch.Tensor, config: OptimizerConfig
) -> Callable[[], float]:
    optimizer = RecipeOptimizer(model, config, 1000)

    def update() -> float:
        loss = model(ids, shift_labels=targets).loss
        loss.backward()
        optimizer.step(0)
        optimizer.zero_grad()
        return float(loss.detach())

    return update


def _plain(
    config: DocTabConfig, ids: torch.Tensor, targets: torch.Tensor, recompute: bool
) -> Callable[[], float]:
    reference = PlainUpdate(_model(config), ids.shape[1], recompute, torch.float32)

    def update() -> float:
        loss = reference.loss(ids, targets)
        loss.backward()
        reference.step()
        return float(loss.detach())

    return update
