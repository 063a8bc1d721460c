"""Tables of results: rows of text made from records, as Markdown or CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evaluation.class_bpb.statistics import grouping_labels
from evaluation.contrasts import PARTITIONS, Contrast, records_bits_per_byte
from evaluation.records import Records

MISSING = "—"


@dataclass(frozen=True)
class Table:
    """A titled table; `name` is its part of a file name."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_markdown(self) -> str:
        """A pipe table padded to equal widths, readable in a terminal too; first column left."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        rule = [f":{'-' * (widths[0] - 1)}", *(f"{'-' * (width - 1)}:" for width in widths[1:])]

        def pad(line: Sequence[str]) -> str:
            first, *rest = line
            cells = [first.ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
            return f"| {' | '.join(cells)} |"

        body = [pad(self.columns), f"| {' | '.join(rule)} |", *(pad(row) for row in self.rows)]
        return "\n".join([f"**{self.title}**", "", *body])

    def to_csv(self) -> str:
        """Comma-separated values with a header line."""
        stream = io.StringIO()
        csv.writer(stream, lineterminator="\n").writerows([self.columns, *self.rows])
        return stream.getvalue()

    def to_latex(self) -> str:
        """A `tabular` with booktabs rules, and the title as its comment."""
        lines = [" & ".join(map(_latex, line)) + r" \\" for line in (self.columns, *self.rows)]
        spec = "l" + "r" * (len(self.columns) - 1)
        body = [lines[0], r"\midrule", *lines[1:]]
        return "\n".join(
            [
                f"% {self.title}",
                rf"\begin{{tabular}}{{{spec}}}",
                r"\toprule",
                *body,
                r"\bottomrule",
                r"\end{tabular}",
                "",
            ]
        )


_LATEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "—": "---", "≥": r"$\geq$"}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


@dataclass(frozen=True)
class ArmResult:
    """One arm of a group: its records, its contrast with its baseline, and its cost if known.

    `contrast` is None for an arm without a baseline, and where the baseline's records are missing.
    """

    records: Records
    contrast: Contrast | None
    flops_per_token: float | None

    @property
    def label(self) -> str:
        """Arm and seed, such as `b_table s44`."""
        return f"{self.records.header.label} s{self.records.header.seed}"


def arm_table(results: Sequence[ArmResult]) -> Table:
    """Tables 1 and 2 in one: bits per byte, the gain with its interval, documents improved."""
    rows = []
    for result in results:
        header = result.records.header
        gain = interval = improved = MISSING
        baseline = header.baseline or MISSING
        if result.contrast is not None:
            found = result.contrast.comparison
            gain = signed(found.gain)
            interval = signed_interval(found.gain_interval)
            improved = f"{100 * found.documents_improved:.1f}%"
        elif header.baseline is not None:
            baseline = f"{header.baseline} (missing)"
        rows.append(
            (
                result.label,
                f"{records_bits_per_byte(result.records):.5f}",
                baseline,
                gain,
                interval,
                improved,
                MISSING if result.flops_per_token is None else f"{result.flops_per_token:.3e}",
                result.records.sha256[:12],
            )
        )
    return Table(
        name="arms",
        title="Bits per byte, and the gain over the baseline of the same seed",
        columns=(
            "arm",
            "bpb",
            "baseline",
            "gain",
            "95% interval",
            "docs improved",
            "FLOPs/token",
            "records",
        ),
        rows=tuple(rows),
    )


_SPLIT_TITLES = {
    "band": "Gain by target class (Table 4), bpb (share of targets)",
    "target_cell": "Gain by target cell, bpb (share of targets)",
    "table_state": "Gain by the target's order and table state (Table 5), bpb (share of targets)",
    "match": "Gain by the table's match (Table 6), bpb (share of targets)",
}


def split_table(contrasts: Sequence[Contrast], partition: str) -> Table | None:
    """Gains of all contrasts split by one partition: a column a contrast, and the last row sums.

    Of more than six contrasts each is a row instead, so that a study of forty arms stays a table
    that can be read. Contrasts whose arms cannot be compared by the partition are left out; None
    if no one remains.
    """
    columns, gains, shares = [], [], []
    grouping, _ = PARTITIONS[partition]
    for contrast in contrasts:
        split = contrast.gain_by(partition)
        if split is None:
            continue
        counts = grouping.collapse(contrast.arm.sums.num_targets.sum(axis=0))
        header = contrast.arm.header
        columns.append(f"{header.label} s{header.seed} over {contrast.baseline.header.label}")
        gains.append(list(split.values()))
        shares.append(counts / counts.sum())
    if not columns:
        return None
    labels = grouping_labels(grouping, contrasts[0].arm.header.chunk_length)
    rows = [
        (
            label,
            *(f"{signed(g[i])} ({100 * s[i]:.1f}%)" for g, s in zip(gains, shares, strict=True)),
        )
        for i, label in enumerate(labels)
    ]
    rows.append(("all", *(signed(math.fsum(gain)) for gain in gains)))
    lines = [("class", *columns), *rows]
    if len(columns) > 6:
        lines = [("contrast", *lines[0][1:]), *lines[1:]]
        lines = list(zip(*lines, strict=True))
    return Table(partition, _SPLIT_TITLES[partition], lines[0], tuple(lines[1:]))


def robustness_table(contrasts: Sequence[Contrast]) -> Table:
    """Section 4.10: whether a few documents drive the gain."""
    rows = []
    for contrast in contrasts:
        header, found = contrast.arm.header, contrast.comparison
        rows.append(
            (
                f"{header.label} s{header.seed} over {contrast.baseline.header.label}",
                str(len(header.document_ids)),
                f"{int(np.sum(contrast.arm.sums.num_targets)):,}",
                signed(found.median_document_gain),
                signed(found.gain_without_top_decile),
            )
        )
    return Table(
        name="robustness",
        title="Concentration across documents (Section 4.10), bpb",
        columns=("contrast", "docs", "targets", "median doc gain", "gain without top 10%"),
        rows=tuple(rows),
    )


def signed(value: float) -> str:
    """A gain in bits per byte with its sign and four decimals."""
    return f"{value:+.4f}"


def signed_interval(ends: Sequence[float]) -> str:
    """`[low, high]` of a gain."""
    return f"[{signed(ends[0])}, {signed(ends[1])}]"
