"""Figures of results, drawn from records and results files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from evaluation.class_bpb.statistics import BY_BAND, grouping_labels
from evaluation.contrasts import Contrast, records_bits_per_byte
from evaluation.tables import ArmResult

matplotlib.use("Agg")


def draw_gains(axes: Any, contrasts: Sequence[Contrast]) -> None:
    """Bars of each contrast's gain by target cell, summed over visibility (Section 4.3)."""
    labels = grouping_labels(BY_BAND, contrasts[0].arm.header.chunk_length)
    width = 0.8 / len(contrasts)
    for number, contrast in enumerate(contrasts):
        split = contrast.gain_by("band")
        if split is None:
            continue
        places = [i + (number - (len(contrasts) - 1) / 2) * width for i in range(len(labels))]
        header = contrast.arm.header
        name = f"{header.label} s{header.seed} over {contrast.baseline.header.label}"
        axes.bar(places, list(split.values()), width, label=name)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(labels)), labels, rotation=35, ha="right")
    axes.set_ylabel("gain in bits per byte (higher is better)")
    axes.legend(fontsize="small")


def draw_cost(axes: Any, results: Sequence[ArmResult]) -> None:
    """Bits per byte against FLOPs per token; arrows go from a baseline to its arm (Section 4.1)."""
    cost = {
        (result.records.header.arm, result.records.header.seed): result.flops_per_token
        for result in results
    }
    for result in results:
        if result.flops_per_token is None:
            continue
        place = (result.flops_per_token, records_bits_per_byte(result.records))
        points = axes.plot(*place, "o")
        axes.annotate(
            result.label, place, xytext=(7, -3), textcoords="offset points", fontsize="small"
        )
        if result.contrast is None:
            continue
        base = result.contrast.baseline
        base_cost = cost.get((base.header.arm, base.header.seed))
        if base_cost is not None:
            axes.annotate(
                "",
                xy=place,
                xytext=(base_cost, records_bits_per_byte(base)),
                arrowprops={"arrowstyle": "->", "color": points[0].get_color()},
            )
    axes.margins(x=0.25, y=0.15)
    axes.set_xlabel("estimated FLOPs per token, forward and backward")
    axes.set_ylabel("bits per byte (lower is better)")


def write_figure(results: Sequence[ArmResult], title: str, path: Path) -> bool:
    """Draw what there is for one group: gains by target cell, and bits per byte against FLOPs.

    Returns:
        Whether anything was drawn; without contrasts and costs no file is written.
    """
    contrasts = [result.contrast for result in results if result.contrast is not None]
    costed = any(result.flops_per_token is not None for result in results)
    if not contrasts and not costed:
        return False
    panels = bool(contrasts) + costed
    figure = Figure(figsize=(7.2 * panels, 4.8), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    if contrasts:
        draw_gains(axes.pop(0), contrasts)
    if costed:
        draw_cost(axes.pop(0), results)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return True
