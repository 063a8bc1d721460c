"""Tables and figures from records and results files; no model code.

    python -m evaluation.report RUN... --out DIR

Records are grouped by data, set and format. In each group every arm is paired with its recipe's
baseline of the same seed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from data_scripts import command_line
from evaluation.contrasts import PARTITIONS, Contrast, contrast, records_bits_per_byte
from evaluation.figures import write_figure
from evaluation.records import Records, read_records
from evaluation.tables import ArmResult, Table, arm_table, robustness_table, split_table


@dataclass(frozen=True)
class Source:
    """One records file, and the run folder it lies in, if any."""

    path: Path
    records: Records
    run: Path | None


@dataclass(frozen=True)
class Group:
    """Arms scored on the same data, set and format."""

    name: str
    title: str
    results: tuple[ArmResult, ...]
    tables: tuple[Table, ...]

    @property
    def text(self) -> str:
        """The group's tables as Markdown."""
        return self._render(len(self.tables))

    @property
    def summary(self) -> str:
        """The first two tables: the arms and, if any has a baseline, gains by target cell."""
        return self._render(2)

    def _render(self, count: int) -> str:
        tables = (table.to_markdown() for table in self.tables[:count])
        return "\n\n".join([f"## {self.title}", *tables])


@dataclass(frozen=True)
class Report:
    """All groups, and the files that were written."""

    groups: tuple[Group, ...]
    files: tuple[Path, ...]

    @property
    def text(self) -> str:
        """The whole report as Markdown."""
        return "\n\n".join(group.text for group in self.groups) + "\n"


def build_report(
    paths: Sequence[Path | str], out: Path | str, num_resamples: int = 2000, seed: int = 0
) -> Report:
    """Read records, pair arms with their baselines, and write tables, figures and gains.

    Args:
        paths: run folders (all their records) or records files.
        out: folder for `report.md`, one CSV a table and one PNG a group.
        num_resamples: of the document bootstrap.
        seed: of the document bootstrap.

    Returns:
        The report; `text` is what the command prints. Each run folder among `paths` also gets
        `gains.json`.

    Raises:
        ValueError: if a path holds no records, two records of one arm and seed differ, or an arm
            and its baseline were not scored on the same documents.
    """
    given = list({Path(path).resolve(): Path(path) for path in paths}.values())
    sources = _read_sources(given)
    grouped: dict[tuple[str, str, str], list[Source]] = {}
    for source in sources:
        header = source.records.header
        key = (header.data_sha256, header.set_name, header.format)
        grouped.setdefault(key, []).append(source)
    names = _group_names(list(grouped))
    groups = tuple(
        _build_group(names[key], members, num_resamples, seed) for key, members in grouped.items()
    )
    files = _write_files(groups, Path(out))
    files += _write_gains(given, sources, groups, {"num_resamples": num_resamples, "seed": seed})
    return Report(groups, tuple(files))


def _read_sources(paths: Sequence[Path]) -> list[Source]:
    found: dict[Path, Source] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} does not exist. Give run folders or records files.")
        files = sorted((path / "records").glob("*.parquet")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"{path} has no records. Score it first: python -m evaluation.score.")
        for file in files:
            parent = file.parent.parent
            in_run = file.parent.name == "records" and (parent / "config.yaml").is_file()
            run = parent if in_run or path.is_dir() else None
            found[file.resolve()] = Source(file, read_records(file), run)
    return list(found.values())


def _group_names(keys: Sequence[tuple[str, str, str]]) -> dict[tuple[str, str, str], str]:
    """`SET.FORMAT`, with the data's hash only where two chunk sets share the name."""
    plain = [f"{set_name}.{form}" for _, set_name, form in keys]
    return {
        key: name if plain.count(name) == 1 else f"{name}.{key[0][:8]}"
        for key, name in zip(keys, plain, strict=True)
    }


def _build_group(name: str, sources: Sequence[Source], num_resamples: int, seed: int) -> Group:
    by_arm: dict[tuple[str, int, bool], Source] = {}
    for source in sources:
        header = source.records.header
        key = (header.arm, header.seed, header.ablated)
        other = by_arm.setdefault(key, source)
        if other.records.sha256 != source.records.sha256:
            raise ValueError(
                f"There must be one result for {header.label}, seed {header.seed}, on {name}; "
                f"{other.path} and {source.path} differ. Leave one out."
            )
    results = []
    for source in by_arm.values():
        header = source.records.header
        # An ablated model is compared with its baseline as it is.
        baseline = by_arm.get((header.baseline or "", header.seed, False))
        paired = None
        if baseline is not None:
            paired = contrast(source.records, baseline.records, num_resamples, seed)
        results.append(ArmResult(source.records, paired, _flops_per_token(source.run)))
    contrasts = [result.contrast for result in results if result.contrast is not None]
    header = results[0].records.header
    title = f"{header.set_name}, {header.format} format (data {header.data_sha256[:8]})"
    return Group(name, title, tuple(results), tuple(_tables(results, contrasts)))


def _tables(results: Sequence[ArmResult], contrasts: Sequence[Contrast]) -> list[Table]:
    tables = [arm_table(results)]
    if contrasts:
        splits = (split_table(contrasts, partition) for partition in PARTITIONS)
        tables += [table for table in splits if table is not None]
        tables.append(robustness_table(contrasts))
    return tables


def _flops_per_token(run: Path | None) -> float | None:
    if run is None or not (run / "results.json").is_file():
        return None
    value = json.loads((run / "results.json").read_text()).get("flops_per_token")
    return None if value is None else float(value)


def _write_files(groups: Sequence[Group], out: Path) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for group in groups:
        for table in group.tables:
            files.append(out / f"{group.name}.{table.name}.csv")
            files[-1].write_text(table.to_csv())
        figure = out / f"{group.name}.png"
        if write_figure(group.results, group.title, figure):
            files.append(figure)
    report = out / "report.md"
    parts = []
    for group in groups:
        parts.append(group.text)
        if (figure := out / f"{group.name}.png") in files:
            parts.append(f"![{group.title}]({figure.name})")
    report.write_text("\n\n".join(parts) + "\n")
    return [*files, report]


def _write_gains(
    paths: Sequence[Path],
    sources: Sequence[Source],
    groups: Sequence[Group],
    bootstrap: dict[str, int],
) -> list[Path]:
    """Write each given run's results against its baseline to its `gains.json`."""
    by_hash = {result.records.sha256: result for group in groups for result in group.results}
    files = []
    for run in dict.fromkeys(path for path in paths if path.is_dir()):
        mine = [by_hash[source.records.sha256] for source in sources if source.run == run]
        content = {result.records.header.file_stem: _summary(result) for result in mine}
        file = run / "gains.json"
        temporary = run / ".tmp_gains.json"
        text = json.dumps({"bootstrap": bootstrap, "sets": content}, indent=2, allow_nan=False)
        temporary.write_text(text + "\n")
        temporary.replace(file)
        files.append(file)
    return files


def _summary(result: ArmResult) -> dict[str, Any]:
    sums, header = result.records.sums, result.records.header
    nats_per_target = float(sums.nats.sum() / sums.num_targets.sum())
    summary: dict[str, Any] = {
        "bits_per_byte": records_bits_per_byte(result.records),
        "nats_per_target": nats_per_target,
        "perplexity": math.exp(nats_per_target),
        "num_documents": len(header.document_ids),
        "num_targets": int(sums.num_targets.sum()),
        "num_bytes": int(sums.num_bytes.sum()),
        "records_sha256": result.records.sha256,
        "checkpoint_sha256": header.checkpoint_sha256,
        "baseline": header.baseline,
    }
    if result.contrast is None:
        return summary
    found = result.contrast.comparison
    low, high = found.gain_interval
    return summary | {
        "baseline_bits_per_byte": records_bits_per_byte(result.contrast.baseline),
        "baseline_records_sha256": result.contrast.baseline.sha256,
        "gain": found.gain,
        # One document has no interval, and JSON has no NaN.
        "gain_interval": None if math.isnan(low) else [low, high],
        "documents_improved": found.documents_improved,
        "median_document_gain": found.median_document_gain,
        "gain_without_top_decile": found.gain_without_top_decile,
        "gain_by": {name: result.contrast.gain_by(name) for name in PARTITIONS},
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.report",
        description="Print and write tables and figures from records: bits per byte, gains over "
        "each arm's baseline with 95% document-bootstrap intervals, gains by target class and by "
        "table state. Writes report.md, CSV and PNG files, and gains.json into each run folder.",
        epilog="Example: python -m evaluation.report demo/runs/b demo/runs/b_table "
        "--out demo/report",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="RUN_OR_RECORDS",
        help="run folders or .parquet files",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for tables and figures")
    parser.add_argument(
        "--num_resamples", type=int, default=2000, help="bootstrap resamples of the documents"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    parser.add_argument(
        "--quiet", action="store_true", help="print only where the files were written"
    )
    return parser


def _run(arguments: argparse.Namespace) -> None:
    report = build_report(arguments.paths, arguments.out, arguments.num_resamples, arguments.seed)
    if not arguments.quiet:
        print(report.text)
    print(f"Written: {len(report.files)} files; start at {Path(arguments.out) / 'report.md'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Report on the paths named on the command line; returns the exit status."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(command_line.normalise_flags(given))
    return command_line.run(partial(_run, arguments))


if __name__ == "__main__":
    sys.exit(main())
