"""What results.json says of a run before it has run, and the resolved recipe beside it."""

import contextlib
import datetime
import platform
import subprocess
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
import yaml
from accelerate import Accelerator

from data_scripts.chunk_set import ChunkSet
from modeling_doctab import DocTabConfig
from modeling_doctab.accounting import (
    count_parameters,
    flops_per_token,
    flops_per_token_with_recomputation,
)
from training.config import Recipe


def run_facts(
    recipe: Recipe, config: DocTabConfig, chunk_set: ChunkSet, accelerator: Accelerator
) -> dict[str, Any]:
    """What results.json says of a run before it has run."""
    row = config.max_position_embeddings
    return {
        "name": recipe.name,
        "description": recipe.description,
        "baseline": recipe.baseline,
        "seed": recipe.seed,
        "recipe_sha256": recipe.sha256(),
        "data_sha256": chunk_set.fingerprint,
        "parameters": count_parameters(config),
        "flops_per_token": flops_per_token(config, row),
        "flops_per_token_with_recomputation": flops_per_token_with_recomputation(config, row),
        "num_updates": recipe.training.num_updates,
        "tokens": recipe.training.num_updates * recipe.training.tokens_per_update,
        "num_processes": accelerator.num_processes,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if accelerator.device.type == "cuda" else "cpu",
        "versions": _versions(),
        "git_commit": _git_commit(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
    }


def _git_commit() -> str | None:
    here = Path(__file__).parent
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(here), "rev-parse", "HEAD"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        return result.stdout.strip()
    return None


def write_recipe(recipe: Recipe) -> None:
    """The resolved recipe, beside what it produced."""
    recipe.run_dir.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(recipe.as_dict(), sort_keys=False)
    (recipe.run_dir / "config.yaml").write_text(text)
