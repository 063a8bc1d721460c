"""What a run leaves behind: the resolved recipe, `final/` and results.json; and the dry run."""

import contextlib
import datetime
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
import yaml
from accelerate import Accelerator

from data_scripts.chunk_set import ChunkSet
from modeling_doctab import DocTabConfig, DocTabForCausalLM
from modeling_doctab.accounting import (
    count_parameters,
    flops_per_token,
    flops_per_token_with_recomputation,
)
from training import checkpoint
from training.config import Recipe
from training.metrics import Clock, peak_memory_bytes
from training.setup import batch_plan, model_config, open_chunk_set


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


def finish(
    recipe: Recipe,
    model: DocTabForCausalLM,
    chunk_set: ChunkSet,
    facts: dict[str, Any],
    clock: Clock,
    device: torch.device,
) -> None:
    """Write `final/`, a folder that from_pretrained loads anywhere, and results.json."""
    final = recipe.run_dir / "final"
    temporary = recipe.run_dir / ".tmp_final"
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    for file in chunk_set.tokenizer_path.iterdir():
        shutil.copy(file, temporary)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    results = {
        **facts,
        "training_seconds": clock.training_seconds,
        "loop_seconds": clock.loop_seconds,
        "peak_memory_bytes": peak_memory_bytes(device),
        "final_sha256": checkpoint.file_sha256(final / checkpoint.MODEL_FILE),
    }
    checkpoint.write_json(recipe.run_dir / "results.json", results)


def dry_run(path: str, recipe: Recipe) -> dict[str, Any]:
    """What a run would be, without data or device: sizes, costs, batches."""
    config = model_config(recipe)
    plan = batch_plan(recipe, 1)
    t, row = recipe.training, config.max_position_embeddings
    data_sha256 = epochs = None
    if recipe.data.chunk_set is not None and Path(recipe.data.chunk_set).exists():
        chunk_set = open_chunk_set(recipe, config)
        data_sha256 = chunk_set.fingerprint
        chunks = len(chunk_set.train_chunks(recipe.data.split))
        epochs = t.num_updates * plan.chunks_per_update / chunks
    return {
        "recipe": path,
        "name": recipe.name,
        "parameters": count_parameters(config),
        "flops_per_token": flops_per_token(config, row),
        "flops_per_token_with_recomputation": flops_per_token_with_recomputation(config, row),
        "row_length": row,
        "rows_per_update": t.tokens_per_update // row,
        "rows_per_micro_batch": t.tokens_per_micro_batch // row,
        "micro_batches_per_update": plan.micro_batches,
        "tokens_per_update": t.tokens_per_update,
        "num_updates": t.num_updates,
        "tokens": t.num_updates * t.tokens_per_update,
        "epochs": epochs,
        "data_sha256": data_sha256,
    }
