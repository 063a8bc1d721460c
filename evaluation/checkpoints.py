"""What scoring needs to know of a run folder, and its model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM

from data_scripts.rows import TableOptions
from evaluation.class_bpb.statistics import MAX_ORDER
from modeling_doctab import DocTabForCausalLM


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
    """

    folder: Path
    arm: str
    seed: int
    baseline: str | None
    has_table: bool
    table: TableOptions
    table_reach: int | None
    row_length: int

    @property
    def sha256(self) -> str:
        """Hash of the names and contents of the weight files and the model's configuration."""
        files = sorted([*self.folder.glob("*.safetensors"), self.folder / "config.json"])
        digest = hashlib.sha256()
        for file in files:
            with file.open("rb") as stream:
                content = hashlib.file_digest(stream, "sha256").hexdigest()
            digest.update(f"{file.name} {content}\n".encode())
        return digest.hexdigest()


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
    if "max_position_embeddings" not in model:
        raise ValueError(f"{folder / 'config.json'} must say max_position_embeddings.")
    return Checkpoint(
        folder=folder,
        arm=recipe["name"],
        seed=int(recipe["seed"]),
        baseline=recipe.get("baseline"),
        has_table=has_table,
        table=TableOptions(
            orders=orders,
            source=data.get("table_source", "document") if has_table else "document",
        ),
        table_reach=int(model["table_reach"]) if has_table else None,
        row_length=int(model["max_position_embeddings"]),
    )


def load_model(checkpoint: Checkpoint, device: torch.device) -> torch.nn.Module:
    """Load the model in float32 for scoring.

    A doctab model is built by this checkout's code, not by the copy in its folder; any other one by
    transformers' own classes.
    """
    model_type = json.loads((checkpoint.folder / "config.json").read_text()).get("model_type")
    loader: Any = DocTabForCausalLM if model_type == "doctab" else AutoModelForCausalLM
    model: torch.nn.Module = loader.from_pretrained(checkpoint.folder, dtype=torch.float32)
    return model.to(device).eval()
