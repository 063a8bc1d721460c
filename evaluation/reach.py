"""The reach check: does the table know at least what the row shows? (Section 4.6)

A feature of a fixed span must be evaluated so that its joint distribution with the visible context
matches training. In the training format the table always searches a span that covers the row, so at
every position its order is at least that of a lookup on the row's own inputs, with the same source
where the two are equal. Both of the paper's mistakes break this: the span and the window were cut
at different points, and "no match" met a source that attention could see.

    python -m evaluation.reach RUN... --chunk_set DIR --sets dev_val --format stride

counts violations without a model, splits the losses where the set was scored, and compares with
training how often the table reaches further than the row.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_scripts import command_line
from data_scripts.chunk_set import ChunkSet
from data_scripts.lookup import lookup_rows
from data_scripts.rows import segments_at_bos
from evaluation.checkpoints import open_checkpoint
from evaluation.formats import (
    EvaluationFormat,
    RowBatch,
    RowPlan,
    TargetSet,
    iter_rows,
    load_targets,
)
from evaluation.plans import check_fit, default_stride, make_header, row_plan
from evaluation.records import read_records

BoolArray = npt.NDArray[np.bool_]


def reach_violations(
    input_ids: npt.NDArray[np.int64],
    table_order: npt.NDArray[np.int64],
    table_distance: npt.NDArray[np.int64],
    bos_token_id: int,
    max_order: int = 4,
) -> BoolArray:
    """Find the positions where the table knows less than a lookup on the row's own inputs.

    Args:
        input_ids: [rows, row_length] what the model sees; BOS after slot 0 opens a new document.
        table_order, table_distance: [rows, row_length] what the table returned.
        bos_token_id: the id in slot 0.
        max_order: the longest suffix that the table tries.

    Returns:
        [rows, row_length], True where the table's order is lower, or equal with another source.
    """
    own = lookup_rows(input_ids, max_order, segments_at_bos(input_ids, bos_token_id))
    lower = table_order < own.order
    elsewhere = (table_order == own.order) & (table_distance != own.distance)
    return lower | elsewhere


def reaches_further(table_distance: npt.ArrayLike, slot: npt.ArrayLike) -> BoolArray:
    """Whether the token after the match stands before the row: both of one shape, [...].

    Slot 0 shows BOS, so the inputs of a row are the tokens at distances up to `slot`.
    """
    return np.asarray(table_distance) > np.asarray(slot)


@dataclass(frozen=True)
class ReachCheck:
    """Counts over the scored positions of one arm's rows in one format."""

    positions: int
    violations: int
    further: int

    @property
    def further_share(self) -> float:
        """Share of positions where the table reaches further than the row."""
        return self.further / max(self.positions, 1)


def batch_violations(batch: RowBatch, plan: RowPlan) -> BoolArray:
    """`reach_violations` of a batch at the positions that score a target, False elsewhere."""
    found = reach_violations(
        batch.input_ids,
        batch.table["table_order"],
        batch.table["table_distance"],
        plan.bos_token_id,
        plan.table.orders,
    )
    return found & (batch.target_index >= 0)


def check_reach(targets: TargetSet, form: EvaluationFormat, plan: RowPlan) -> ReachCheck:
    """Check all rows of a target set; needs no model.

    Raises:
        ValueError: if the table is ablated or has another text's fields: nothing to check.
    """
    if plan.ablated or plan.table.source != "document":
        raise ValueError(
            "The reach check needs the fields of the row's own text; this table is "
            f"{'ablated' if plan.ablated else plan.table.source}."
        )
    positions = violations = further = 0
    for batch in iter_rows(targets, form, plan, 2**17):
        scored = batch.target_index >= 0
        slots = np.broadcast_to(np.arange(plan.row_length), scored.shape)
        positions += int(scored.sum())
        violations += int(batch_violations(batch, plan).sum())
        beyond = reaches_further(batch.table["table_distance"], slots)
        further += int((beyond & scored).sum())
    return ReachCheck(positions, violations, further)


def explain(violations: int, positions: int, label: str, form: str) -> str:
    """Say what violations mean and what to do."""
    return (
        f"{label} in the {form} format: at {violations:,} of {positions:,} positions the table "
        "knows less than the row shows, which never happens in training. The span of the lookup "
        "and the window are cut at different points, so copies look worse than they are (Section "
        "4.6). Score in the training format, or with --reach window."
    )


def _report(run: Path, split: str, form: EvaluationFormat, chunk_set: ChunkSet) -> list[str]:
    """Lines on one run and set."""
    checkpoint = open_checkpoint(run)
    check_fit(checkpoint, chunk_set, form, ablated=False)
    plan = row_plan(checkpoint, chunk_set)
    header = make_header(checkpoint, chunk_set, split, form, ablated=False)
    training = EvaluationFormat().on(chunk_set, split)
    targets = load_targets(chunk_set, split, full_chunks=form.stride is None)
    in_training = load_targets(chunk_set, split, full_chunks=True)
    found, usual = check_reach(targets, form, plan), check_reach(in_training, training, plan)
    lines = [
        f"{header.label} on {split}, {form.name} format: {found.positions:,} positions, "
        f"{found.violations:,} violations",
        f"  the table reaches further than the row at {found.further_share:.2%} of positions; in "
        f"training at {usual.further_share:.2%}",
    ]
    if found.violations:
        lines.append(f"  {explain(found.violations, found.positions, header.label, form.name)}")
    path = run / "records" / f"{header.file_stem}.parquet"
    scored = read_records(path) if path.is_file() else None
    # Records of another checkpoint or chunk set say nothing about these rows.
    reach = scored.reach if scored is not None and scored.header == header else None
    if reach is not None and found.violations:
        mean = reach.violation_nats.sum() / found.violations
        lines.append(f"  mean loss at the violations: {mean:.3f} nats")
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evaluation.reach", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run or model folders")
    parser.add_argument("--chunk_set", type=Path, required=True, help="folder of the prepared data")
    parser.add_argument("--sets", nargs="+", required=True, help="evaluation splits")
    parser.add_argument("--format", choices=("training", "stride"), default="training")
    parser.add_argument("--stride", type=int, help="targets between windows; default half a row")
    parser.add_argument("--reach", choices=("chunk", "window"), default="chunk")
    return parser


def _run(arguments: argparse.Namespace) -> None:
    chunk_set = ChunkSet.open(arguments.chunk_set)
    for split in arguments.sets:
        if chunk_set.is_confirmation(split):
            raise ValueError(f"{split} is a confirmation split: it is opened by `confirm` alone.")
        for run in arguments.runs:
            form = EvaluationFormat()
            if arguments.format == "stride":
                stride = arguments.stride or default_stride(open_checkpoint(run), chunk_set)
                form = EvaluationFormat(stride, arguments.reach)
            print("\n".join(_report(run, split, form.on(chunk_set, split), chunk_set)))


def main(argv: Sequence[str] | None = None) -> int:
    """Check the runs named on the command line; returns the exit status."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(command_line.normalise_flags(given))
    return command_line.run(partial(_run, arguments))


if __name__ == "__main__":
    sys.exit(main())
