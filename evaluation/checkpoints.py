"""What scoring needs to know of a run folder, and its model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from data_scripts.rows import TableOptions
from evaluation.class_bpb.statistics import MAX_ORDER
from evaluation.identity import checkpoint_sha256

if TYPE_CHECKING:  # torch and transformers' models take seconds to import; --help needs neither
    import torch


@dataclass(frozen=True)
class Checkpoint:
    """A model folder and the recipe it was trained by.

    Attributes:
        folder: what `from_pretrained` loads.
        arm, seed, baseline: from the recipe; for a bare model folder its name, 0 and None.
        has_table: whether the model takes table fields.
        table: how its table's fields are made; for an arm without one, the plain table.
        table_reach: the chunk length that the table was trained with, or None.
        row_length: the longest row that the model was trained on.
        vocab_size: number of ids that its head scores.
    """

    folder: Path
    arm: str
    seed: int
    baseline: str | None
    has_table: bool
    table: TableOptions
    table_reach: int | None
    row_length: int
    vocab_size: int

    @property
    def sha256(self) -> str:
        """Hash of the names and contents of the weight files and the model's configuration."""
        return checkpoint_sha256(self.folder)


def open_checkpoint(run: Path) -> Checkpoint:
    """Describe a run folder (`config.yaml` and `final/`), or a bare model folder (`config.json`).

    Raises:
        ValueError: if the folder is neither, its training is not done, or its table cannot be
            scored by class.
    """
    folder = run / "final" if (run / "config.yaml").is_file() else run
    if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
        raise ValueError(
            f"{run} must be a run folder with a finished model in final/, or a model folder with "
            "config.json and *.safetensors; found neither. Is the training done (status.json)?"
        )
    model = json.loads((folder / "config.json").read_text())
    recipe: dict[str, Any] = {"name": run.name, "seed": 0}
    if folder != run:
        recipe = yaml.safe_load((run / "config.yaml").read_text())
    data = recipe.get("data") or {}
    has_table = bool(model.get("document_table", False))
    orders = int(model.get("table_orders", MAX_ORDER)) if has_table else MAX_ORDER
    if orders > MAX_ORDER:
        raise ValueError(
            f"table_orders must be at most {MAX_ORDER} to be scored by class; {run} has {orders}."
        )
    row_length, vocab_size = _sizes(folder, model)
    return Checkpoint(
        folder=folder,
        arm=recipe["name"],
        seed=int(recipe["seed"]),
        baseline=recipe.get("baseline"),
        has_table=has_table,
        table=TableOptions(
            orders=orders,
            source=data.get("table_source", "document") if has_table else "document",
            seed=int(recipe["seed"]),
        ),
        table_reach=int(model["table_reach"]) if has_table else None,
        row_length=row_length,
        vocab_size=vocab_size,
    )


def _sizes(folder: Path, model: dict[str, Any]) -> tuple[int, int]:
    """Row length and vocabulary size; other architectures name them in their own ways."""
    names = ("max_position_embeddings", "vocab_size")
    if all(name in model for name in names):
        return int(model[names[0]]), int(model[names[1]])
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{folder} must hold a model that transformers knows: {error}") from None
    sizes = [getattr(config, name, None) for name in names]
    if not all(isinstance(size, int) for size in sizes):
        raise ValueError(
            f"{folder / 'config.json'} must say {' and '.join(names)}; found {sizes}. Add them: "
            "the row length that the model was trained on, and the number of ids."
        )
    return int(sizes[0] or 0), int(sizes[1] or 0)


def load_model(checkpoint: Checkpoint, device: torch.device) -> torch.nn.Module:
    """Load the model in float32 for scoring.

    A doctab model is built by this checkout's code, not by the copy in its folder; any other one by
    transformers' own classes.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from modeling_doctab import DocTabForCausalLM

    model_type = json.loads((checkpoint.folder / "config.json").read_text()).get("model_type")
    logging.disable_progress_bar()  # ours counts targets, transformers' would count tensors
    loader: Any = DocTabForCausalLM if model_type == "doctab" else AutoModelForCausalLM
    model: torch.nn.Module = loader.from_pretrained(checkpoint.folder, dtype=torch.float32)
    return model.to(device).eval()
