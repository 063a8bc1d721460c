"""In-loop evaluation: bits per byte of a fixed slice, which never changes the training result."""

import math

import torch

from training.batches import RowMaker
from training.run import Run
from training.setup import table_options


@torch.no_grad()
def heldout_bits_per_byte(run: Run) -> float:
    """The first full chunks of the recipe's evaluation split, in the training format.

    Table fields come from where the recipe takes them; no row loses its hits to dropout.
    """
    recipe, config = run.recipe, run.model.config
    documents, _, targets = run.chunk_set.documents(recipe.training.evaluation_split).chunks()
    table = table_options(recipe, config)
    make = RowMaker(targets, config.max_position_embeddings, config.bos_token_id, table, documents)
    nats, num_bytes = 0.0, 0
    run.model.eval()
    for i in range(min(recipe.training.evaluation_chunks, len(targets))):
        batch = {k: v.to(run.device) for k, v in make(range(i, i + 1)).items()}
        with run.accelerator.autocast():
            loss = run.model(**batch, logits_to_keep=1, use_cache=False).loss
        nats += float(loss) * batch["shift_labels"].numel()
        num_bytes += int(run.token_bytes[batch["shift_labels"]].sum())
    run.model.train()
    return nats / (math.log(2) * num_bytes)
