"""What `python -m evaluation.records` does: show, merge, diff, filter.

    python -m evaluation.records show FILE...
    python -m evaluation.records merge FILE... --out FILE
    python -m evaluation.records diff ARM BASELINE [--drop LIST]
    python -m evaluation.records filter FILE --drop LIST --out FILE

A LIST is a text file of document ids, one a line: the overlap exclusions of Section 3.2, say.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from data_scripts import command_line
from evaluation.class_bpb.statistics import bits_per_byte
from evaluation.contrasts import PARTITIONS, contrast
from evaluation.records import (
    Records,
    filter_records,
    merge_records,
    read_document_list,
    read_records,
    write_records,
)
from evaluation.tables import signed_interval, split_table


def describe(records: Records) -> str:
    """A few lines: what was scored, and bits per byte by exact and by reference bytes."""
    header, sums = records.header, records.sums
    exact = bits_per_byte(sums.nats, sums.num_bytes)
    reference = bits_per_byte(sums.nats, records.reference_bytes)
    lines = [
        f"{header.label} s{header.seed} on {header.set_name}, {header.format} format, row length "
        f"{header.row_length}, chunk length {header.chunk_length}",
        f"  {len(header.document_ids):,} documents, {int(sums.num_targets.sum()):,} targets, "
        f"{int(sums.num_bytes.sum()):,} bytes",
        f"  {exact:.5f} bpb; by the reference's byte table {reference:.5f}",
        f"  records {records.sha256[:12]}, checkpoint {header.checkpoint_sha256[:12]}, data "
        f"{header.data_sha256[:12]}",
    ]
    if records.reach is not None:
        lines.append(f"  {int(records.reach.violations.sum()):,} reach violations")
    return "\n".join(lines)


def difference(arm: Records, baseline: Records, num_resamples: int, seed: int) -> str:
    """The contrast of two records with its interval and classes.

    Raises:
        ValueError: if they were not scored alike.
    """
    found = contrast(arm, baseline, num_resamples, seed)
    interval = signed_interval(found.comparison.gain_interval)
    lines = [
        f"{arm.header.label} over {baseline.header.label}: gain {found.gain:+.5f} bpb "
        f"{interval}, {found.comparison.documents_improved:.1%} of "
        f"{len(arm.header.document_ids)} documents improve"
    ]
    for partition in PARTITIONS:
        table = split_table([found], partition)
        lines += [] if table is None else ["", table.to_markdown()]
    return "\n".join(lines)


def _chosen(records: Records, arguments: argparse.Namespace) -> Records:
    """Filter by the lists given; ids of other sets in a list of exclusions do no harm."""
    ids = set(records.header.document_ids)
    keep = drop = None
    if arguments.keep is not None:
        keep = read_document_list(arguments.keep)
    if arguments.drop is not None:
        drop = ids & set(read_document_list(arguments.drop))
    return filter_records(records, keep, drop or ())


def _write(records: Records, out: Path) -> None:
    if out.exists():
        raise ValueError(f"{out} exists. Choose another --out, or remove it.")
    write_records(records, out)
    print(describe(records))


def _show(arguments: argparse.Namespace) -> None:
    for file in arguments.files:
        print(describe(_chosen(read_records(file), arguments)))


def _merge(arguments: argparse.Namespace) -> None:
    _write(merge_records([read_records(file) for file in arguments.files]), arguments.out)


def _diff(arguments: argparse.Namespace) -> None:
    arm, baseline = (_chosen(read_records(file), arguments) for file in arguments.files)
    print(difference(arm, baseline, arguments.num_resamples, arguments.seed))


def _filter(arguments: argparse.Namespace) -> None:
    if arguments.keep is None and arguments.drop is None:
        raise ValueError("filter needs --keep or --drop, a text file of document ids.")
    _write(_chosen(read_records(arguments.files[0]), arguments), arguments.out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evaluation.records", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    for name, count, what in (
        ("show", "+", "what records hold"),
        ("merge", "+", "join records of disjoint documents, scored alike"),
        ("diff", 2, "an arm against its baseline"),
        ("filter", 1, "keep or drop documents by a list"),
    ):
        command = commands.add_parser(name, help=what)
        command.add_argument("files", nargs=count, type=Path, metavar="FILE", help="records")
        if name in ("merge", "filter"):
            command.add_argument("--out", type=Path, required=True, help="records file to write")
        if name != "merge":
            command.add_argument("--keep", type=Path, help="list of the documents to keep")
            command.add_argument("--drop", type=Path, help="list of documents to leave out")
        if name == "diff":
            command.add_argument("--num_resamples", type=int, default=2000, help="(%(default)s)")
            command.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Show, merge, diff or filter; returns the exit status."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(command_line.normalise_flags(given))
    commands: dict[str, Callable[[argparse.Namespace], None]] = {
        "show": _show,
        "merge": _merge,
        "diff": _diff,
        "filter": _filter,
    }
    return command_line.run(partial(commands[arguments.command], arguments))
