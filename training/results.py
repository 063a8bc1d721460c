"""What a run leaves behind, `final/` and results.json; and what it would be, the dry run."""

import shutil
from pathlib import Path
from typing import Any

from modeling_doctab.accounting import (
    count_parameters,
    flops_per_token,
    flops_per_token_with_recomputation,
)
from training.checkpoint import MODEL_FILE, file_sha256, write_json
from training.config import Recipe
from training.metrics import peak_memory_bytes
from training.run import Run
from training.setup import batch_plan, expected_memory_bytes, model_config, open_chunk_set


def finish(run: Run) -> None:
    """Write `final/`, a folder that from_pretrained loads anywhere, and results.json."""
    run_dir = run.recipe.run_dir
    final, temporary = run_dir / "final", run_dir / ".tmp_final"
    shutil.rmtree(temporary, ignore_errors=True)
    run.model.save_pretrained(temporary)
    for file in run.chunk_set.tokenizer_path.iterdir():
        shutil.copy(file, temporary)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    results = {
        **run.facts,
        "training_seconds": run.clock.training_seconds,
        "loop_seconds": run.clock.loop_seconds,
        "cpu_seconds": run.clock.cpu_seconds,
        "peak_memory_bytes": peak_memory_bytes(run.device),
        "final_sha256": file_sha256(final / MODEL_FILE),
    }
    write_json(run_dir / "results.json", results)


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
        "expected_memory_bytes": expected_memory_bytes(
            config, t.tokens_per_micro_batch, t.recomputation is not False
        ),
        "epochs": epochs,
        "data_sha256": data_sha256,
    }
