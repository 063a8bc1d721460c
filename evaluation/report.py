"""Tables and figures from records and results files; no model code.

    python -m evaluation.report RUN... --out DIR

Records are grouped by data, set and format. In each group every arm is paired with its recipe's
baseline of the same seed. Tables 1 to 7, the figures and the numbers of the text follow in the
paper's layout, ours beside the paper's.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from data_scripts import command_line
from evaluation.contrasts import PARTITIONS, Contrast, contrast, records_bits_per_byte
from evaluation.figures import write_figure
from evaluation.page import write_page
from evaluation.reach import explain
from evaluation.records import Records, read_document_list
from evaluation.study import Source, Study, make_studies, read_results, read_sources
from evaluation.study_report import write_study
from evaluation.tables import ArmResult, Table, arm_table, robustness_table, split_table


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
    paths: Sequence[Path | str],
    out: Path | str,
    num_resamples: int = 2000,
    seed: int = 0,
    exclude: Collection[str] = (),
    show_violations: bool = False,
    page: Path | None = None,
) -> Report:
    """Read records, pair arms with their baselines, and write tables, figures and gains.

    Args:
        paths: run folders (all their records) or records files.
        out: folder for `report.md`, one CSV a table and one PNG a group.
        num_resamples: of the document bootstrap.
        seed: of the document bootstrap.
        exclude: documents that overlap with training documents; gains are also given without them.
        show_violations: go on where a table knew less than its rows show.
        page: template of a page of prose, see `evaluation.page`.

    Returns:
        The report; `text` is what the command prints. Each run folder among `paths` also gets
        `gains.json`.

    Raises:
        ValueError: if a path holds no records, records are older than their checkpoint or violate
            the reach of training, two records of one arm and seed differ, an arm and its
            baseline were not scored on the same documents, or a page asks for what is not there.
    """
    given = list({Path(path).resolve(): Path(path) for path in paths}.values())
    sources = read_sources(given)
    _refuse_violations(sources, show_violations)
    grouped: dict[tuple[str, str, str], list[Source]] = {}
    for source in sources:
        header = source.records.header
        key = (header.data_sha256, header.set_name, header.format)
        grouped.setdefault(key, []).append(source)
    names = _group_names(list(grouped))
    headline_first = sorted(grouped, key=lambda key: key[2] != "training")
    groups = tuple(
        _build_group(names[key], grouped[key], num_resamples, seed) for key in headline_first
    )
    bootstrap = {"num_resamples": num_resamples, "seed": seed}
    studies = make_studies(sources, bootstrap)
    if page is not None and len(studies) > 1:
        raise ValueError("A page is of one chunk set; give the runs of one.")
    files = _write_files(groups, studies, Path(out), exclude)
    if page is not None:
        files.append(write_page(studies[0], page))
    files += _write_gains(given, sources, groups, bootstrap)
    return Report(groups, tuple(files))


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
    if any(_has_violations(source.records) for source in sources):
        title += ": reach violations, not results (Section 4.6)"
    return Group(name, title, tuple(results), tuple(_tables(results, contrasts)))


def _tables(results: Sequence[ArmResult], contrasts: Sequence[Contrast]) -> list[Table]:
    tables = [arm_table(results)]
    if contrasts:
        splits = (split_table(contrasts, partition) for partition in PARTITIONS)
        tables += [table for table in splits if table is not None]
        tables.append(robustness_table(contrasts))
    return tables


def _flops_per_token(run: Path | None) -> float | None:
    value = read_results(run).get("flops_per_token")
    return None if value is None else float(value)


def _has_violations(records: Records) -> bool:
    """Only a table that the model received can mislead it."""
    reach = records.reach
    return records.header.has_table and reach is not None and bool(reach.violations.any())


def _refuse_violations(sources: Sequence[Source], shown: bool) -> None:
    """Refuse results whose table knew less than the row shows (Section 4.6)."""
    found = []
    for source in sources:
        header, reach = source.records.header, source.records.reach
        if reach is None or not _has_violations(source.records):
            continue
        counts = int(reach.violations.sum()), int(reach.positions.sum())
        found.append(explain(*counts, f"{header.label} s{header.seed}", header.format))
    if found and not shown:
        raise ValueError(f"{' '.join(found)} To see what the mistake does, give --show_violations.")


def _write_files(
    groups: Sequence[Group], studies: Sequence[Study], out: Path, exclude: Collection[str]
) -> list[Path]:
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
    for study in studies:
        folder = out if len(studies) == 1 else out / study.data_sha256[:8]
        text, written = write_study(study, folder, exclude)
        parts.append(text if folder == out else text.replace("](", f"]({folder.name}/"))
        files += written
    text = "\n\n".join(parts) + "\n"
    report.write_text(f"{_contents(text)}\n\n{text}")
    return [*files, report]


def _contents(text: str) -> str:
    """A list of links to a report's headings of two and three levels, as GitHub names them."""
    lines = []
    seen: Counter[str] = Counter()
    for level, title in re.findall(r"^##(#?) (.+)$", text, re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        number = f"-{seen[anchor]}" if seen[anchor] else ""
        seen[anchor] += 1
        lines.append(f"{'  ' if level else ''}- [{title}](#{anchor}{number})")
    return "\n".join(lines)


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
        content = {_gains_key(result): _summary(result, bootstrap) for result in mine}
        file = run / "gains.json"
        temporary = run / ".tmp_gains.json"
        text = json.dumps({"bootstrap": bootstrap, "sets": content}, indent=2, allow_nan=False)
        temporary.write_text(text + "\n")
        temporary.replace(file)
        files.append(file)
    return files


def _gains_key(result: ArmResult) -> str:
    """`SET.FORMAT`, and `SET.FORMAT.mixture` for the output mixture of the same run."""
    header = result.records.header
    return header.file_stem + (".mixture" if header.arm.endswith("_mixture") else "")


def _summary(result: ArmResult, bootstrap: dict[str, int]) -> dict[str, Any]:
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
        "has_reach_violations": _has_violations(result.records),
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
        "gain_interval_by": {
            name: result.contrast.intervals_by(name, **bootstrap) for name in ("band", "match")
        },
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
        "--exclude", type=Path, help="text file of document ids, one a line, for the exclusions"
    )
    parser.add_argument(
        "--chunk_set", type=Path, help="take the exclusions from this set's manifest.json"
    )
    parser.add_argument(
        "--show_violations",
        action="store_true",
        help="report scores whose table knew less than the row shows (Section 4.6)",
    )
    parser.add_argument(
        "--page", type=Path, help="template of a page of prose to fill too (evaluation/page.py)"
    )
    printed = parser.add_mutually_exclusive_group()
    printed.add_argument(
        "--quiet", action="store_true", help="print only where the files were written"
    )
    printed.add_argument(
        "--summary", action="store_true", help="print only the arms and their gain by target cell"
    )
    return parser


def _excluded(arguments: argparse.Namespace) -> set[str]:
    found: set[str] = set()
    if arguments.exclude is not None:
        found |= set(read_document_list(arguments.exclude))
    if arguments.chunk_set is not None:
        manifest = arguments.chunk_set / "manifest.json"  # the arrays may be elsewhere
        if not manifest.is_file():
            raise ValueError(
                f"--chunk_set must hold manifest.json; {arguments.chunk_set} does not."
            )
        for entry in json.loads(manifest.read_text())["splits"].values():
            found |= {overlap["document"] for overlap in entry.get("overlaps", ())}
    return found


def _run(arguments: argparse.Namespace) -> None:
    report = build_report(
        arguments.paths,
        arguments.out,
        arguments.num_resamples,
        arguments.seed,
        _excluded(arguments),
        arguments.show_violations,
        arguments.page,
    )
    if arguments.summary:
        print("\n\n".join(group.summary for group in report.groups))
    elif not arguments.quiet:
        print(report.text)
    print(f"Written: {len(report.files)} files; start at {Path(arguments.out) / 'report.md'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Report on the paths named on the command line; returns the exit status."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(command_line.normalise_flags(given))
    return command_line.run(partial(_run, arguments))


if __name__ == "__main__":
    sys.exit(main())
