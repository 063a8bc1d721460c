"""What a model card says about architecture, training and limits, from the run's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_WIDTH = 48  # characters of the drawing


def layout(config: dict[str, Any]) -> dict[str, str]:
    """Row, windows and table in words, and a drawing of what each layer sees."""
    row, short = config["max_position_embeddings"], config["short_window"]
    windows = [short if t == "sliding_attention" else row for t in config["layer_types"]]
    lines = [f"tokens   |{f'{row:,} back'.ljust(_WIDTH - 3, ' ')}now|"]
    for i, window in reversed(list(enumerate(windows))):
        filled = max(1, round(_WIDTH * min(window, row) / row))
        lines.append(f"layer {i + 1:2d} |{'.' * (_WIDTH - filled)}{'#' * filled}| {window:,}")
    table = "none"
    if config["document_table"]:
        reach = config["table_reach"]
        lines.append(f"table    |{'t' * _WIDTH}| {reach:,}{' (beyond the row)' * (reach > row)}")
        table = f"suffixes of 1 to {config['table_orders']} tokens, reach {reach:,} tokens"
    return {
        "row_length": f"{row:,}",
        "windows": ", ".join(f"{window:,}" for window in windows),
        "table": table,
        "has_table": config["document_table"],
        "drawing": "\n".join(lines),
    }


def training(results: dict[str, Any], recipe: dict[str, Any]) -> dict[str, str]:
    """Data, tokens, updates, hardware, time, FLOPs and memory."""
    total = results["flops_per_token"] * results["tokens"]
    versions = results["versions"]
    return {
        "parameters": f"{results['parameters']:,}",
        "flops_per_token": f"{results['flops_per_token']:.3e}",
        "flops": f"{total:.3e}",
        "flops_with_recomputation": f"{results['flops_per_token_with_recomputation']:.3e}",
        "tokens": f"{results['tokens']:,}",
        "num_updates": f"{results['num_updates']:,}",
        "tokens_per_update": f"{recipe['training']['tokens_per_update']:,}",
        "seed": str(results["seed"]),
        "device": results["device"],
        "num_processes": f"{results['num_processes']:,}",
        "threads": f"{results['threads']:,}",
        "training_seconds": f"{results['training_seconds']:,.0f}",
        "loop_seconds": f"{results['loop_seconds']:,.0f}",
        "peak_memory": f"{results['peak_memory_bytes'] / 2**30:.2f} GiB",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "data_sources": _data_sources(recipe),
        "table_training": _table_training(recipe),
        "data_sha256": results["data_sha256"],
        "target_sha256": results["target_sha256"],
        "final_sha256": results["final_sha256"],
        "recipe_sha256": results["recipe_sha256"],
        "git_commit": results["git_commit"] or "unknown",
    }


def _data_sources(recipe: dict[str, Any]) -> str:
    """The manifest's own words, where the chunk set is at hand."""
    manifest = Path(recipe["data"]["chunk_set"]) / "manifest.json"
    notes: list[str] = []
    if manifest.is_file():
        notes = json.loads(manifest.read_text("utf-8")).get("notes", [])
    return "; ".join(notes) or "named in the chunk set's manifest"


def _table_training(recipe: dict[str, Any]) -> str:
    data = recipe["data"]
    if not recipe["model"].get("document_table", True):
        return "It was trained without a document table."
    source, dropout = data.get("table_source", "document"), data.get("table_dropout", 0.0)
    from_where = {
        "document": "from the document itself",
        "foreign": "from another document (a control)",
        "shuffled": "from the document with its table shuffled (a control)",
        "empty": "from nowhere, no match everywhere (a control)",
    }[source]
    return f"In training the table's fields came {from_where}, with dropout {dropout:g}."


def limits(config: dict[str, Any], results: dict[str, Any], confirmed: bool) -> list[str]:
    """The limits of the paper's Section 5 that apply to this model, in its order.

    Args:
        config: the model's.
        results: the run's results.json.
        confirmed: whether a confirmation set is among the scored ones.
    """
    found = [
        f"**Scale.** {config['num_hidden_layers']} layers of width {config['hidden_size']}, "
        f"{results['tokens']:,} training tokens, one vocabulary of {config['vocab_size']:,}.",
        f"**Seeds.** This is one seed ({results['seed']}). The intervals cover the sampling of "
        "documents, not of training seeds.",
    ]
    if not confirmed:
        found.append(
            "**Confirmation.** No confirmation set was scored: every set here may have been looked "
            "at while the model was made."
        )
    else:
        found.append(
            "**Confirmation.** The confirmation set comes from the same corpus and length filter "
            "as training. It tests new documents, not new domains."
        )
    found.append(
        "**Evaluation format.** A gain depends on how much context the evaluation gives the "
        "baseline; another format gives other numbers."
    )
    found.append(
        "**Comparators.** The layouts compared are full and sliding windows; other efficient "
        "attention was not tested."
    )
    if config["document_table"]:
        found += [
            "**Regime.** The paper's gains hold for long documents of one corpus. On packed short "
            "documents the table gave nothing (Section 4.9); mixed corpora were not tested.",
            f"**Reach.** The lookup is limited to {config['table_reach']:,} tokens; copies from "
            "further back gain nothing from it.",
            "**Mechanism.** The gain on tokens that the table cannot predict is not explained.",
            "**Inference.** The table must be updated online while the model generates; the code "
            "here does so from the token history in its cache.",
        ]
    return found


def cell_name(name: str, chunk_length: int) -> str:
    """`copy_to_1_16_visible`, a share of the chunk, in tokens; the other cells in words."""
    if not name.startswith("copy_"):
        return name.replace("_", " ")
    band, _, sight = name.removeprefix("copy_").rpartition("_")
    if band == "beyond":
        return f"copy beyond {chunk_length:,} tokens, {sight}"
    share = band.removeprefix("to_").split("_")
    bound = chunk_length * int(share[0]) // int(share[1] if len(share) > 1 else 1)
    return f"copy up to {bound:,} tokens back, {sight}"


def format_words(format: str, row_length: int, chunk_length: int, has_table: bool) -> str:
    """An evaluation format in one sentence."""
    ablated = format.endswith("-ablated")
    plain = format.removesuffix("-ablated")
    if plain == "training":
        words = (
            f"each full chunk of {chunk_length:,} targets is scored exactly as in training: rows "
            f"of {row_length:,} tokens with BOS in slot 0"
            + (", and a table that searches the chunk" if has_table else "")
        )
    elif plain == "packed":
        words = "packed rows of short documents, as the reference recipe scores them"
    else:
        stride, _, reach = plain.removeprefix("stride").partition("-")
        words = (
            f"windows of {row_length:,} tokens that advance by {int(stride):,}; each target is "
            "scored once, with the most context"
            + (f", and a table that searches the {reach}" if has_table else "")
        )
    return words + (", with the table ablated" if ablated else "") + "."


def score_commands(headers: list[dict[str, Any]]) -> list[str]:
    """The `evaluation.score` commands that made these records, one a chunk set and format."""
    sets: dict[tuple[str, str], list[str]] = {}
    for header in headers:
        flags = "--format training"
        if header["format"].startswith("stride"):
            stride, _, reach = header["format"].removeprefix("stride").partition("-")
            flags = f"--format stride --stride {stride} --reach {reach}"
        flags += " --ablate_table" if header["ablated"] else ""
        flags += " --registration registration.json" if header.get("registration") else ""
        sets.setdefault((header["data_sha256"], flags), []).append(header["set_name"])
    data = list(dict.fromkeys(digest for digest, _ in sets))
    folders = {digest: "DIR" if len(data) == 1 else f"DIR_{digest[:8]}" for digest in data}
    return [
        f"python -m evaluation.score RUN --chunk_set {folders[digest]} --sets {' '.join(names)} "
        f"{flags}"
        for (digest, flags), names in sets.items()
    ]
