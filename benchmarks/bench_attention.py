"""Sliding layers on a CPU: blocks as long as the window against sdpa with a dense mask."""

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

from benchmarks.harness import Result, compare
from modeling_doctab.attention_doctab import banded_attention

LENGTH, WINDOW, HEADS, HEAD_DIM = 8192, 512, 4, 128


def run() -> Iterator[Result]:
    """Forward alone, and forward with backward."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, HEADS, LENGTH, HEAD_DIM)
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(3))
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    mask = (distance >= 0) & (distance <= WINDOW)

    def dense() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def banded() -> torch.Tensor:
        return banded_attention(q, k, v, WINDOW)

    def backward(function: Callable[[], torch.Tensor]) -> torch.Tensor:
        return torch.autograd.grad(function().sum(), q)[0]

    def check(outputs: dict[str, torch.Tensor]) -> None:
        torch.testing.assert_close(outputs["blocks"], outputs["sdpa, mask"], atol=1e-4, rtol=1e-4)

    for name, cases in {
        "attention_forward": {"blocks": banded, "sdpa, mask": dense},
        "attention_backward": {
            "blocks": lambda: backward(banded),
            "sdpa, mask": lambda: backward(dense),
        },
    }.items():
        yield compare(
            name,
            question=f"a sliding layer at T = {LENGTH:,}, w = {WINDOW}",
            prediction="4x: an eighth of the scores, twice the keys a block",
            cases=cases,
            check=check,
            target=2.5,
            rounds=5,
            facts={"length": LENGTH, "window": WINDOW, "heads": HEADS, "head_dim": HEAD_DIM},
        )
