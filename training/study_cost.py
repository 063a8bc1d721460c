"""What a study will take on this machine, said before it begins."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml

from modeling_doctab.accounting import count_parameters, flops_per_token
from training.config import Recipe
from training.metrics import peak_flops
from training.phases import LAUNCHER
from training.setup import model_config

# Share of the rate below that a training run reaches: the paper's 0.47 (B) to 0.53 (A) on a 4090,
# and as measured on CPUs (benchmarks/ROOFLINE.md).
_REACHED = {"cuda": 0.5, "cpu": 0.4}
_STATE_BYTES = 12  # a parameter with Adam's moments, in float32
_GIGA = 1e9


def training_seconds(recipe: Recipe, flops_per_second: float) -> float:
    """Estimated seconds of a run."""
    config = model_config(recipe)
    tokens = recipe.training.num_updates * recipe.training.tokens_per_update
    return tokens * flops_per_token(config, config.max_position_embeddings) / flops_per_second


def estimate(
    recipes: Sequence[Recipe], download_gigabytes: float, data_gigabytes: float, jobs: int
) -> str:
    """Hours, disk and downloads of the runs that are left, for people.

    Args:
        recipes: of the runs.
        download_gigabytes, data_gigabytes: the plan's.
        jobs: runs side by side.
    """
    rate, device = _rate()
    hours = sum(training_seconds(recipe, rate) for recipe in recipes) / 3600
    weights = [4 * count_parameters(model_config(recipe)) for recipe in recipes]
    state = jobs * 2 * _STATE_BYTES / 4 * max(weights, default=0)
    disk = data_gigabytes + download_gigabytes + (sum(weights) + state) / _GIGA
    return (
        f"{len(recipes)} runs to train: about {hours:.1f} hours on {device}, then scoring; "
        f"{disk:.1f} GB of disk, {download_gigabytes:.1f} GB to download"
    )


def _rate() -> tuple[float, str]:
    """FLOP/s that training reaches here, about, and the device's name."""
    if torch.cuda.is_available():
        name, count = torch.cuda.get_device_name(), _processes()
        peak = peak_flops(name) or _matmul_rate("cuda", torch.bfloat16)
        return _REACHED["cuda"] * peak * count, f"{count} x {name}"
    rate = _REACHED["cpu"] * _matmul_rate("cpu", torch.float32)
    return rate, f"{torch.get_num_threads()} CPU threads"


def _processes() -> int:
    """How many processes the launcher starts."""
    settings = yaml.safe_load(Path(LAUNCHER[-1]).read_text())
    return int(settings.get("num_processes", 1))


def _matmul_rate(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of a matrix product, measured for a moment."""
    size = 4096 if device == "cuda" else 768
    a = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(6):
        began = time.perf_counter()
        float((a @ a)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best
