"""Fill a model card from a run's own files, and check it.

    python -m hub_cards.cards RUN --baseline RUN

No number is typed: each is read from results.json, gains.json, the records, config.yaml, the
model's config or the chunk set's manifest. An undefined variable, an unknown licence, an empty
section, or gains that the records do not give is an error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hub_cards import model_facts
from hub_cards.command_line import normalise_flags, run_command
from hub_cards.figures import GAIN_BY_CELL, LEARNING_CURVE, gain_by_cell, learning_curve
from hub_cards.rendering import check_license, check_number, license_title, render, tables
from hub_cards.run_files import Sums, bootstrap, read_all_sums, read_curve, read_json

_RELATIVE = 1e-9  # sums of float64 in another order


def model_card(
    run: Path,
    baseline: Path | None = None,
    repo_id: str | None = None,
    license: str = "apache-2.0",
    license_name: str | None = None,
    figures: Path | None = None,
) -> ModelCard:
    """The card of a finished run.

    Args:
        run: the run folder, scored (`evaluation.score`) and reported (`evaluation.report`).
        baseline: the run folder of the arm that it is compared with; checked against gains.json.
        repo_id: where it will be on the Hub; the folder's own path by default.
        license: an identifier that the Hub knows.
        license_name: the licence's name, for `other`.
        figures: folder to draw the figures into; without it the card shows none.

    Raises:
        ValueError: if a file is missing or contradicts another, the baseline is another one, or
            the licence is unknown.
    """
    check_license(license, license_name)
    results = read_json(run / "results.json", "finish the training first")
    gains = read_json(run / "gains.json", "run python -m evaluation.report first")
    config = read_json(run / "final" / "config.json", "finish the training first")
    recipe = read_recipe(run)
    check_baseline(gains, results, baseline)
    records = read_all_sums(run)
    check_gains(gains, records)
    # The output mixture is another model made of the same scores.
    sets = {n: v for n, v in sorted(gains["sets"].items()) if not n.endswith(".mixture")}
    if not sets:
        raise ValueError(f"{run / 'gains.json'} must have a set; it has none. Score the run.")
    shown = [_set_result(n, v, records[n], gains, config, recipe) for n, v in sets.items()]
    variables = {
        "metadata": _metadata(results, sets, license, license_name).to_yaml(),
        "name": results["name"],
        "repo_id": repo_id or str(run / "final"),
        "summary": results["description"] or results["name"],
        "results": shown,
        "baseline": next((r["baseline"] for r in shown if "gain" in r), None),
        "num_resamples": f"{gains['bootstrap']['num_resamples']:,}",
        "score_commands": model_facts.score_commands([records[name].header for name in sets]),
        "license": license_title(license, license_name),
        "same_targets": baseline is not None,
        "limits": model_facts.limits(
            config, results, any(records[name].header.get("registration") for name in sets)
        ),
        **_figures(run, recipe, shown, figures),
        **model_facts.layout(config),
        **model_facts.training(results, recipe),
    }
    card = ModelCard(render("model_card.md.jinja", variables))
    check_rendered(card, gains, records)
    return card


def read_recipe(run: Path) -> dict[str, Any]:
    """The resolved recipe of a run.

    Raises:
        ValueError: if config.yaml is missing.
    """
    path = run / "config.yaml"
    if not path.is_file():
        raise ValueError(f"a card needs {path}, which does not exist: finish the training first.")
    return yaml.safe_load(path.read_text("utf-8"))


def shared_recipe(recipe: dict[str, Any]) -> str:
    """The recipe as others need it: without the folders of the machine it ran on."""
    shared = {key: value for key, value in recipe.items() if key != "output_dir"}
    shared["data"] = {k: v for k, v in recipe["data"].items() if k != "chunk_set"}
    return yaml.safe_dump(shared, sort_keys=False, allow_unicode=True)


def check_baseline(gains: dict[str, Any], results: dict[str, Any], baseline: Path | None) -> None:
    """Refuse another baseline than the one that gains.json was computed against.

    Raises:
        ValueError: naming the set, or if the baseline was trained on other targets.
    """
    if baseline is None:
        return
    trained = read_json(baseline / "results.json", "finish the training first")["target_sha256"]
    if trained != results["target_sha256"]:
        raise ValueError(
            f"the baseline must have seen this run's targets {results['target_sha256'][:12]}; "
            f"{baseline} saw {trained[:12]}. Give the arm of the same data and length."
        )
    theirs = read_json(baseline / "gains.json", "run python -m evaluation.report first")["sets"]
    known = {values["records_sha256"] for values in theirs.values()}
    for name, values in gains["sets"].items():
        if values.get("baseline_records_sha256") not in known:
            raise ValueError(
                f"the gains on {name} were computed against other records than those of "
                f"{baseline}; run python -m evaluation.report on both runs together."
            )


def check_gains(gains: dict[str, Any], records: dict[str, Sums]) -> None:
    """Refuse gains that the run's records do not give.

    Raises:
        ValueError: if records are missing, or their bits per byte are others.
    """
    for name, values in gains["sets"].items():
        if name.endswith(".mixture"):
            continue
        if name not in records:
            raise ValueError(
                f"gains.json needs records/{name}.parquet, which does not exist: score the run."
            )
        expected, found = records[name].bits_per_byte, values["bits_per_byte"]
        if abs(expected - found) > _RELATIVE * abs(expected):
            raise ValueError(
                f"bits_per_byte on {name} must be the records' {expected}; gains.json says "
                f"{found}. Run python -m evaluation.report again."
            )


def _metadata(
    results: dict[str, Any], sets: dict[str, Any], license: str, license_name: str | None
) -> ModelCardData:
    evaluations = [
        EvalResult(
            task_type="text-generation",
            task_name="Language modelling",
            dataset_type="doctab-chunk-set",
            dataset_name=name,
            # Entries of equal type, configuration and split are merged under the first one's name.
            dataset_config=name.partition(".")[2],
            dataset_split=name.partition(".")[0],
            metric_type=metric,
            metric_name=metric.replace("_", " "),
            metric_value=round(values[metric], 5),
        )
        for name, values in sets.items()
        for metric in ("bits_per_byte", "perplexity")
    ]
    return ModelCardData(
        model_name=results["name"],
        license=license,
        license_name=license_name,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["doctab", "document-table"],
        eval_results=evaluations,
    )


def _set_result(
    name: str,
    values: dict[str, Any],
    sums: Sums,
    gains: dict[str, Any],
    config: dict[str, Any],
    recipe: dict[str, Any],
) -> dict[str, Any]:
    chunk_length, row_length = sums.header["chunk_length"], config["max_position_embeddings"]
    set_name, _, format = name.partition(".")
    interval = bootstrap(sums.nats, sums.num_bytes, **gains["bootstrap"])
    shown: dict[str, Any] = {
        "set": set_name,
        "format": format,
        "format_words": model_facts.format_words(
            format, row_length, chunk_length, config["document_table"]
        ),
        "bits_per_byte": f"{values['bits_per_byte']:.5f}",
        "interval": "none" if interval is None else f"[{interval[0]:.4f}, {interval[1]:.4f}]",
        "nats_per_target": f"{values['nats_per_target']:.4f}",
        "perplexity": f"{values['perplexity']:.2f}",
        "num_documents": f"{values['num_documents']:,}",
        "num_targets": f"{values['num_targets']:,}",
        "has_reach_violations": values.get("has_reach_violations", False),
    }
    if "gain" not in values:
        return shown
    low, high = values["gain_interval"] or (None, None)
    total = sums.num_targets
    cells = values["gain_by"]["target_cell"]
    return shown | {
        "baseline": values["baseline"],
        "baseline_bits_per_byte": f"{values['baseline_bits_per_byte']:.5f}",
        "gain": f"{values['gain']:+.4f}",
        "gain_interval": "none" if low is None else f"[{low:+.4f}, {high:+.4f}]",
        "documents_improved": f"{values['documents_improved']:.1%}",
        "cells": [
            {
                "name": model_facts.cell_name(cell, chunk_length),
                "share": f"{sums.cell_targets[cell] / total:.1%}",
                "gain": f"{gain:+.4f}",
                "value": gain,
            }
            for cell, gain in cells.items()
            if sums.cell_targets[cell]
        ],
    }


def _figures(
    run: Path, recipe: dict[str, Any], shown: list[dict[str, Any]], folder: Path | None
) -> dict[str, str | None]:
    """Draw into `folder`; the paths that the card shows, None for what cannot be drawn."""
    found: dict[str, str | None] = {"learning_curve": None, "gain_figure": None}
    if folder is None:
        return found
    tokens_per_update = recipe["training"]["tokens_per_update"]
    if learning_curve(read_curve(run), tokens_per_update, folder / LEARNING_CURVE):
        found["learning_curve"] = LEARNING_CURVE
    headline = next((result for result in shown if "gain" in result), None)
    if headline is not None:
        rows = [(row["name"], row["value"]) for row in headline["cells"]]
        if gain_by_cell(rows, headline["baseline"], folder / GAIN_BY_CELL):
            found["gain_figure"] = GAIN_BY_CELL
    return found


def check_rendered(card: ModelCard, gains: dict[str, Any], records: dict[str, Sums]) -> None:
    """Read the finished card again: metadata and tables must hold the numbers of the files.

    Raises:
        ValueError: naming the number.
    """
    text = str(card)
    data = ModelCard(text).data
    found = {(r.dataset_name, r.metric_type): r.metric_value for r in data.eval_results or []}
    checked = set()
    for rows in tables(text):
        for row in rows:
            key = f"{row.get('set')}.{row.get('format')}"
            if key not in gains["sets"]:
                continue
            values = gains["sets"][key]
            numbers = {
                "bits per byte": values["bits_per_byte"],
                "nats per target": values["nats_per_target"],
                "perplexity": values["perplexity"],
                "documents": len(records[key].nats),
                "targets": records[key].num_targets,
                "its bits per byte": values.get("baseline_bits_per_byte"),
                "gain": values.get("gain"),
                "documents improved": values.get("documents_improved"),
            }
            for column in row.keys() & numbers.keys():
                check_number(row[column], numbers[column], f"{column} on {key}")
                checked.add((key, column))
            if "gain" in row and values["gain_interval"] is not None:
                ends = row["95% interval"].strip("[]").split(",")
                for end, value in zip(ends, values["gain_interval"], strict=True):
                    check_number(end.strip(), value, f"the gain's interval on {key}")
    for name, values in gains["sets"].items():
        if name.endswith(".mixture"):
            continue
        for metric in ("bits_per_byte", "perplexity"):
            if found.get((name, metric)) != round(values[metric], 5):
                raise ValueError(f"the card's {metric} on {name} must be that of gains.json.")
        for column in ("bits per byte", *(["gain"] if "gain" in values else [])):
            if (name, column) not in checked:
                raise ValueError(f"the card must show {column} on {name}; it does not.")


def main(argv: Sequence[str] | None = None) -> int:
    """Write `RUN/final/README.md` and `recipe.yaml` beside it; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hub_cards.cards",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a finished, scored run folder")
    parser.add_argument("--baseline", type=Path, help="the run folder it is compared with")
    parser.add_argument("--repo_id", help="where it will be on the Hub")
    parser.add_argument("--license", default="apache-2.0", help="of the Hub's list (%(default)s)")
    parser.add_argument("--license_name", help="for --license other")
    arguments = parser.parse_args(normalise_flags(sys.argv[1:] if argv is None else argv))

    def write() -> None:
        target = arguments.run / "final" / "README.md"
        card = model_card(
            arguments.run,
            arguments.baseline,
            arguments.repo_id,
            arguments.license,
            arguments.license_name,
            figures=target.parent,
        )
        card.save(target)
        recipe = shared_recipe(read_recipe(arguments.run))
        (target.parent / "recipe.yaml").write_text(recipe, encoding="utf-8")
        print(f"wrote {target}")

    return run_command(write)


if __name__ == "__main__":
    sys.exit(main())
