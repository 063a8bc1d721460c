"""Fill a model card from a run's own files, and check it.

    python -m hub_cards.cards RUN --baseline RUN

No number is typed: each is read from results.json, gains.json, config.yaml, the model's config or
the chunk set's manifest. An undefined variable or an unknown licence is an error.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

LICENSES = ("apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0", "cc-by-sa-4.0", "cc0-1.0", "other")


def model_card(
    run: Path, baseline: Path | None = None, repo_id: str | None = None, license: str = "apache-2.0"
) -> ModelCard:
    """The card of a finished run.

    Args:
        run: the run folder, scored (`evaluation.score`) and reported (`evaluation.report`).
        baseline: the run folder of the arm that it is compared with; checked against gains.json.
        repo_id: where it will be on the Hub; the folder's own path by default.
        license: an SPDX id that the Hub knows.

    Raises:
        ValueError: if a file is missing, the baseline is another one, or the licence is unknown.
    """
    if license not in LICENSES:
        raise ValueError(f"license must be one of {', '.join(LICENSES)}; got {license!r}.")
    results = _read_json(run / "results.json", "finish the training first")
    gains = _read_json(run / "gains.json", "run python -m evaluation.report first")
    config = _read_json(run / "final" / "config.json", "finish the training first")
    recipe = yaml.safe_load((run / "config.yaml").read_text())
    _check_baseline(gains, baseline)
    repo_id = repo_id or str(run / "final")
    chunk_length = recipe["data"]["chunk_length"]
    shown = [_set_result(n, values, chunk_length) for n, values in sorted(gains["sets"].items())]
    variables = {
        "metadata": _metadata(results, gains, license).to_yaml(),
        "name": results["name"],
        "repo_id": repo_id,
        "summary": results["description"] or results["name"],
        "parameters": f"{results['parameters']:,}",
        "flops_per_token": f"{results['flops_per_token']:.3e}",
        "results": shown,
        "num_resamples": f"{gains['bootstrap']['num_resamples']:,}",
        "set_names": " ".join(sorted({name.split(".")[0] for name in gains["sets"]})),
        "license": license,
        "git_commit": results["git_commit"] or "unknown",
        **_layout(config),
        **_training(results, recipe),
        **_limits(config, results),
    }
    folder = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(folder), undefined=StrictUndefined, keep_trailing_newline=True
    )
    card = ModelCard(environment.get_template("model_card.md.jinja").render(variables))
    _check_rendered(card, gains)
    return card


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"a card needs {path}, which does not exist: {remedy}.")
    return json.loads(path.read_text())


def _check_baseline(gains: dict[str, Any], baseline: Path | None) -> None:
    if baseline is None:
        return
    theirs = _read_json(baseline / "gains.json", "run python -m evaluation.report first")
    for name, values in gains["sets"].items():
        expected = values.get("baseline_records_sha256")
        found = theirs["sets"].get(name, {}).get("records_sha256")
        if expected != found:
            raise ValueError(
                f"the gains on {name} were computed against other records than those of "
                f"{baseline}; run python -m evaluation.report on both runs together."
            )


def _metadata(results: dict[str, Any], gains: dict[str, Any], license: str) -> ModelCardData:
    evaluations = [
        EvalResult(
            task_type="text-generation",
            task_name="Language modelling",
            dataset_type="doctab-chunk-set",
            dataset_name=name,
            metric_type=metric,
            metric_name=metric.replace("_", " "),
            metric_value=round(values[metric], 5),
        )
        for name, values in sorted(gains["sets"].items())
        for metric in ("bits_per_byte", "perplexity")
    ]
    return ModelCardData(
        model_name=results["name"],
        license=license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["doctab", "document-table"],
        eval_results=evaluations,
    )


def _set_result(name: str, values: dict[str, Any], chunk_length: int) -> dict[str, Any]:
    shown = {
        "title": name.replace(".", ", ") + " format",
        "bits_per_byte": f"{values['bits_per_byte']:.5f}",
        "nats_per_target": f"{values['nats_per_target']:.4f}",
        "perplexity": f"{values['perplexity']:.2f}",
        "num_documents": f"{values['num_documents']:,}",
        "num_targets": f"{values['num_targets']:,}",
    }
    if "gain" in values and values["gain_interval"] is not None:
        low, high = values["gain_interval"]
        classes = values["gain_by"].get("band", {})
        shown |= {
            "baseline": values["baseline"],
            "baseline_bits_per_byte": f"{values['baseline_bits_per_byte']:.5f}",
            "gain": f"{values['gain']:+.4f}",
            "gain_low": f"{low:+.4f}",
            "gain_high": f"{high:+.4f}",
            "documents_improved": f"{values['documents_improved']:.1%}",
            "classes": [
                {"name": _class_name(name, chunk_length), "gain": f"{gain:+.4f}"}
                for name, gain in classes.items()
            ],
        }
    return shown


def _class_name(name: str, chunk_length: int) -> str:
    """`copy_to_1_16`, a share of the chunk, in tokens; the other classes in words."""
    if name == "copy_beyond":
        return f"copy beyond {chunk_length:,} tokens"
    if name.startswith("copy_to_"):
        share = name.removeprefix("copy_to_").split("_")
        bound = chunk_length * int(share[0]) // int(share[1] if len(share) > 1 else 1)
        return f"copy up to {bound:,} tokens back"
    return name.replace("_", " ")


def _layout(config: dict[str, Any]) -> dict[str, str]:
    """Row, windows and table in words, and a drawing of what each layer sees."""
    row, short = config["max_position_embeddings"], config["short_window"]
    windows = [short if t == "sliding_attention" else row for t in config["layer_types"]]
    width = 48
    lines = []
    for i, window in reversed(list(enumerate(windows))):
        filled = max(1, round(width * min(window, row) / row))
        lines.append(f"layer {i + 1:2d} |{'.' * (width - filled)}{'#' * filled}| {window:,}")
    if config["document_table"]:
        reach = config["table_reach"]
        lines.append(f"table    |{'t' * width}| {reach:,} (the row: {row:,})")
    table = "none"
    if config["document_table"]:
        table = (
            f"suffixes of 1 to {config['table_orders']} tokens, reach {config['table_reach']:,} "
            "tokens (the chunk)"
        )
    return {
        "row_length": f"{row:,}",
        "windows": ", ".join(f"{w:,}" for w in windows),
        "table": table,
        "drawing": "\n".join(lines),
        "format_note": f"rows of {row:,} tokens with BOS in slot 0"
        + (", and a table that searches the chunk." if config["document_table"] else "."),
    }


def _training(results: dict[str, Any], recipe: dict[str, Any]) -> dict[str, str]:
    manifest = Path(recipe["data"]["chunk_set"]) / "manifest.json"
    sources = "named in the chunk set's manifest"
    if manifest.is_file():
        sources = "; ".join(json.loads(manifest.read_text()).get("notes", [])) or sources
    return {
        "tokens": f"{results['tokens']:,}",
        "num_updates": f"{results['num_updates']:,}",
        "tokens_per_update": f"{recipe['training']['tokens_per_update']:,}",
        "seed": str(results["seed"]),
        "device": results["device"],
        "training_seconds": f"{results['training_seconds']:,.0f}",
        "loop_seconds": f"{results['loop_seconds']:,.0f}",
        "peak_memory": f"{results['peak_memory_bytes'] / 2**30:.2f} GiB",
        "data_sources": sources,
        "data_sha256": results["data_sha256"][:16],
        "target_sha256": results["target_sha256"],
        "final_sha256": results["final_sha256"],
    }


def _limits(config: dict[str, Any], results: dict[str, Any]) -> dict[str, str]:
    return {
        "scale_limit": f"Scale: {config['num_hidden_layers']} layers of width "
        f"{config['hidden_size']}, {results['tokens']:,} training tokens, one vocabulary of "
        f"{config['vocab_size']:,}.",
        "regime_limit": "Regime: long documents of one corpus. On packed short documents the "
        "table gave nothing in the paper (Section 4.9).",
    }


def _check_rendered(card: ModelCard, gains: dict[str, Any]) -> None:
    """Read the finished card again: its metadata must hold the numbers of the files."""
    data = ModelCard(str(card)).data
    found = {(r.dataset_name, r.metric_type): r.metric_value for r in data.eval_results or []}
    for name, values in gains["sets"].items():
        for metric in ("bits_per_byte", "perplexity"):
            if found.get((name, metric)) != round(values[metric], 5):
                raise ValueError(f"the card's {metric} on {name} is not that of gains.json")


def main(argv: Sequence[str] | None = None) -> int:
    """Write `RUN/final/README.md` and `recipe.yaml` beside it; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a finished, scored run folder")
    parser.add_argument("--baseline", type=Path, help="the run folder it is compared with")
    parser.add_argument("--repo-id", "--repo_id", help="where it will be on the Hub")
    parser.add_argument("--license", default="apache-2.0", help=", ".join(LICENSES))
    arguments = parser.parse_args(argv)
    try:
        card = model_card(arguments.run, arguments.baseline, arguments.repo_id, arguments.license)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    target = arguments.run / "final" / "README.md"
    card.save(target)
    (target.parent / "recipe.yaml").write_text((arguments.run / "config.yaml").read_text())
    print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
