"""What the sections of the GPU check share: the device, the clock, models of the paper's arms."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modeling_doctab import DocTabConfig, DocTabForCausalLM
from training.config import load_recipe
from training.setup import model_config

RECIPES = Path(__file__).parents[1] / "training" / "recipes" / "paper"
MINIATURE = 64  # lengths and windows are divided by this on a CPU


class Skip(Exception):
    """A section, or a part of one, that cannot run here; the message says why."""


@dataclass
class Context:
    """The device, what is at hand, and how much time is left.

    Attributes:
        device: where everything runs.
        miniature: whether sizes are those of a self-test on a CPU.
        chunk_set: for the short runs, if given.
        out: where files for the way home go.
        deadline: `time.perf_counter()` value at which the section should be over.
        results: the section's results so far; parts that finish are kept if a later one fails.
        matmul_flops: the measured bf16 ceiling in FLOP/s.
    """

    device: torch.device
    miniature: bool
    chunk_set: Path | None
    out: Path
    deadline: float = 0.0
    results: dict[str, Any] = field(default_factory=dict)
    matmul_flops: float | None = None

    def time_left(self) -> float:
        """Seconds until the section's deadline."""
        return self.deadline - time.perf_counter()

    def compile_blocks(self, layers: Any) -> None:
        """torch.compile each block; in miniature without inductor's C++ compiler."""
        for layer in layers:
            layer.compile(backend="aot_eager" if self.miniature else "inductor")

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, function: Callable[[], Any], repeats: int = 5, warmup: int = 2) -> float:
        """Median seconds of a call, the device waited for."""
        if self.miniature:
            repeats, warmup = 2, 1
        for _ in range(warmup):
            function()
        times = []
        for _ in range(repeats):
            self.synchronize()
            start = time.perf_counter()
            function()
            self.synchronize()
            times.append(time.perf_counter() - start)
        return float(np.median(times))

    def config(self, arm: str, **changes: Any) -> DocTabConfig:
        """The config of a paper's arm; in miniature with its lengths divided by 64."""
        recipe = load_recipe(RECIPES / f"{arm}.yaml")
        config = model_config(recipe)
        fields: dict[str, Any] = {"table_reach": recipe.data.chunk_length, **recipe.model}
        if self.miniature:
            fields |= {
                "vocab_size": 256,
                "hidden_size": 32,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "head_dim": 16,
                "max_position_embeddings": config.max_position_embeddings // MINIATURE,
                "short_window": config.short_window // MINIATURE,
                "table_reach": config.table_reach // MINIATURE,
                "query_scaling_base": config.query_scaling_base // MINIATURE,
            }
        return DocTabConfig(**{**fields, **changes})

    def model(self, config: DocTabConfig, dtype: torch.dtype | None = None) -> DocTabForCausalLM:
        """A model on the device, every parameter moved a little from its initial value."""
        torch.manual_seed(44)
        model = DocTabForCausalLM(config).to(self.device)
        generator = torch.Generator(self.device).manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, device=self.device, generator=generator)
                parameter.add_((0.02 * noise).to(parameter.dtype))
        return model if dtype is None else model.to(dtype)

    def rows(self, config: DocTabConfig, num_tokens: int, seed: int = 0) -> torch.Tensor:
        """[rows, row length] inputs that repeat themselves as text does, BOS in slot 0."""
        length = config.max_position_embeddings
        rng = np.random.default_rng(seed)
        rows = rng.zipf(1.3, (max(1, num_tokens // length), length)) % (config.vocab_size - 4)
        rows[:, 0] = config.bos_token_id
        return torch.from_numpy(rows).to(self.device)
