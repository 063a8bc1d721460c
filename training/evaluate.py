"""In-loop evaluation: bits per byte of a fixed slice, which never changes the training result."""

import math

import torch

from data_scripts.rows import TableOptions
from training.batches import RowMaker
from training.run import Run


@torch.no_grad()
def heldout_bits_per_byte(run: Run) -> float:
    """The first full chunks of the recipe's evaluation split, in the training format.

    Raises:
        ValueError: if the split is a confirmation set, which is scored once and not here.
    """
    training, config = run.recipe.training, run.model.config
    if run.chunk_set.is_confirmation(training.evaluation_split):
        raise ValueError(
            f"evaluation_split {training.evaluation_split} is a confirmation set: it is scored "
            "once, after a registration"
        )
    _, _, targets = run.chunk_set.documents(training.evaluation_split).chunks()
    table = TableOptions(config.table_orders) if config.document_table else None
    make = RowMaker(
        targets[: training.evaluation_chunks],
        config.max_position_embeddings,
        config.bos_token_id,
        table,
    )
    nats, num_bytes = 0.0, 0
    run.model.eval()
    for i in range(len(make.chunks)):
        batch = {k: v.to(run.device) for k, v in make(range(i, i + 1)).items()}
        with run.accelerator.autocast():
            loss = run.model(**batch, logits_to_keep=1, use_cache=False).loss
        nats += float(loss) * batch["shift_labels"].numel()
        num_bytes += int(run.token_bytes[batch["shift_labels"]].sum())
    run.model.train()
    return nats / (math.log(2) * num_bytes)
