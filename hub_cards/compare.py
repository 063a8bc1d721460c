"""Models side by side, from their records alone: on the Hub, or on this machine.

    python -m hub_cards.compare demo/runs/b demo/runs/b_table
    python -m hub_cards.compare me/b me/b-table --out results.md
    python -m hub_cards.compare STUDY_FOLDER --out results.md

The first model is what the others are compared with. A difference needs the same documents: sets
whose targets differ are shown, without one. A study folder stands for every run in it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.utils import validate_repo_id

from hub_cards.command_line import normalise_flags, run_command
from hub_cards.model_facts import cell_name
from hub_cards.run_files import Sums, bootstrap, read_all_sums, read_json
from hub_cards.upload import patiently

_FILES = ("results.json", "records/*.parquet")


@dataclass(frozen=True)
class Model:
    """One model's results.

    Attributes:
        label: as tables name it.
        results: of results.json.
        records: `SET.FORMAT` -> sums.
    """

    label: str
    results: dict[str, Any]
    records: dict[str, Sums]


def load(name: str, revision: str | None = None) -> list[Model]:
    """A run folder, a study folder, or a repository.

    Raises:
        ValueError: if it is none of them, or has no records.
    """
    path = Path(name)
    if path.is_dir():
        runs = [path]
        if not (path / "results.json").is_file():
            found = (*path.glob("*/results.json"), *path.glob("*/*/results.json"))
            runs = [file.parent for file in sorted(found) if (file.parent / "records").is_dir()]
            # A study keeps its runs' records a second time, without weights.
            twice = {run.name for run in runs if run.parent.name == "runs"}
            runs = [r for r in runs if r.parent.name != "evidence" or r.name not in twice]
        if not runs:
            raise ValueError(f"{name} must be a run or hold scored runs; it does not. Score them.")
        return [_read(run, run.name if len(runs) > 1 else name) for run in runs]
    try:
        validate_repo_id(name)
    except ValueError:
        raise ValueError(
            f"{name} must be a folder or OWNER/NAME on the Hub; it is neither."
        ) from None
    if name.count("/") != 1:
        raise ValueError(f"{name} must be a folder, or OWNER/NAME on the Hub; it is neither.")
    folder = patiently(
        lambda: snapshot_download(name, revision=revision, allow_patterns=list(_FILES)),
        name,
        advice="Check the network, or compare folders.",
    )
    return [_read(Path(folder), name)]


def _read(folder: Path, label: str) -> Model:
    results = read_json(folder / "results.json", "finish the training, or push the run again")
    records = read_all_sums(folder)
    if not records:
        raise ValueError(f"{label} must have records; it has none. Run python -m evaluation.score.")
    return Model(label, results, records)


def compare(models: Sequence[Model], num_resamples: int = 2000, seed: int = 0) -> str:
    """The Markdown page: costs, bits per byte with intervals, gains over the first, by cell.

    Args:
        models: at least one; the first is the baseline.
        num_resamples: bootstrap resamples of the documents.
        seed: of the bootstrap.
    """
    blocks = ["# Results", _costs(models)]
    keys = dict.fromkeys(key for model in models for key in sorted(model.records))
    for key in keys:
        rows = [(model, model.records[key]) for model in models if key in model.records]
        set_name, _, format = key.partition(".")
        blocks.append(f"## {set_name}, {format} format")
        blocks.append(_scores(rows, num_resamples, seed))
        blocks.append(_cells(rows))
    blocks.append(
        f"Intervals are 95% and resample documents ({num_resamples:,} times); a gain's is paired. "
        f"Gains are over {models[0].label}, positive where the model is better."
    )
    return "\n\n".join(blocks) + "\n"


def _costs(models: Sequence[Model]) -> str:
    lines = [
        "| model | arm | seed | parameters | FLOPs per token | tokens | training s | peak GiB |"
    ]
    lines.append("| :-- | :-- | --: | --: | --: | --: | --: | --: |")
    for model in models:
        r = model.results
        lines.append(
            f"| {model.label} | {r['name']} | {r['seed']} | {r['parameters']:,} "
            f"| {r['flops_per_token']:.3e} | {r['tokens']:,} | {r['training_seconds']:,.0f} "
            f"| {r['peak_memory_bytes'] / 2**30:.2f} |"
        )
    return "\n".join(lines)


def _interval(ends: tuple[float, float] | None, sign: str = "") -> str:
    return "none" if ends is None else f"[{ends[0]:{sign}.4f}, {ends[1]:{sign}.4f}]"


def _scores(rows: list[tuple[Model, Sums]], num_resamples: int, seed: int) -> str:
    lines = ["| model | bits per byte | 95% interval | gain | 95% interval | documents improved |"]
    lines.append("| :-- | --: | :-: | --: | :-: | --: |")
    first = rows[0][1]
    for model, sums in rows:
        spread = _interval(bootstrap(sums.nats, sums.num_bytes, num_resamples, seed))
        gain = ["", "", ""]
        if sums is not first and not comparable(first, sums):
            gain = ["other targets", "", ""]
        elif sums is not first:
            saved = first.nats - sums.nats
            ends = bootstrap(saved, sums.num_bytes, num_resamples, seed)
            difference = first.bits_per_byte - sums.bits_per_byte
            gain = [f"{difference:+.4f}", _interval(ends, "+"), f"{(saved > 0).mean():.1%}"]
        shown = [model.label, f"{sums.bits_per_byte:.5f}", spread, *gain]
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines)


def comparable(one: Sums, other: Sums) -> bool:
    """Whether two records are of the same targets in the same documents."""
    names = ("targets_sha256", "document_ids", "set_name")
    return all(one.header[name] == other.header[name] for name in names) and (
        one.num_targets == other.num_targets
    )


def _cells(rows: list[tuple[Model, Sums]]) -> str:
    """Bits per byte by target cell: the contributions of a column sum to its bits per byte.

    Models with other rows see other tokens, so between them a cell is a distance band alone.
    """
    first = rows[0][1]
    same = [(model, sums) for model, sums in rows if comparable(first, sums)]
    by_band = len({sums.header["row_length"] for _, sums in same}) > 1
    cells: dict[str, list[str]] = {}
    for cell in first.cell_targets:
        name = cell_name(cell, first.header["chunk_length"])
        cells.setdefault(name.rpartition(", ")[0] or name if by_band else name, []).append(cell)
    lines = ["| target cell | share of targets | " + " | ".join(m.label for m, _ in same) + " |"]
    lines.append("| :-- | --: |" + " --: |" * len(same))
    for name, parts in cells.items():
        if count := sum(first.cell_targets[cell] for cell in parts):
            values = [sum(s.cell_bits_per_byte(cell) for cell in parts) for _, s in same]
            shown = " | ".join(f"{value:.4f}" for value in values)
            lines.append(f"| {name} | {count / first.num_targets:.1%} | {shown} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print or write the page; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hub_cards.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "models", nargs="+", metavar="REPO_OR_RUN", help="OWNER/NAME, run folders, a study folder"
    )
    parser.add_argument("--out", type=Path, help="Markdown file to write instead of printing")
    parser.add_argument(
        "--num_resamples", type=int, default=2000, help="of the bootstrap (%(default)s)"
    )
    parser.add_argument("--revision", help="branch, tag or commit of the repositories")
    arguments = parser.parse_args(normalise_flags(sys.argv[1:] if argv is None else argv))

    def write() -> None:
        if arguments.num_resamples < 1:
            raise ValueError(
                f"num_resamples must be at least 1; got {arguments.num_resamples}. Use 2000."
            )
        models = [m for name in arguments.models for m in load(name, arguments.revision)]
        page = compare(models, arguments.num_resamples)
        if arguments.out is None:
            print(page, end="")
            return
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(page, encoding="utf-8")
        print(f"wrote {arguments.out}")

    return run_command(write)


if __name__ == "__main__":
    sys.exit(main())
