"""A training update on this CPU against the plain update of benchmarks/reference.py.

Same model, weights, rows, threads and dtype (float32); V 8,192. B-like: width 256, 4 layers, rows
of 512. LG-like: rows of 2,048 with short windows of 128 below a full layer. The plain update
recomputes its blocks, as the paper's does; ours does so only where memory would be short, which on
these shapes it is not. A third case is the plain update without recomputation.
"""

from collections.abc import Callable, Iterator

import torch

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
            target=target,
            rounds=5,
            facts={"rows": rows, "row_length": length, "threads": torch.get_num_threads()},
        )


def _same_loss(outputs: dict[str, float]) -> None:
    """All start from the same weights: their first losses must agree."""
    assert max(outputs.values()) - min(outputs.values()) < 1e-4, outputs


def _model(config: DocTabConfig) -> DocTabForCausalLM:
    torch.manual_seed(44)
    return DocTabForCausalLM(config).train()


def _ours(config: DocTabConfig, ids: torch.Tensor, targets: torch.Tensor) -> Callable[[], float]:
    model = _model(config)
    optimizer = RecipeOptimizer(model, OptimizerConfig(), 1000)

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
