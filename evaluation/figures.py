"""Figures of results, drawn from records and results files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from evaluation.class_bpb.statistics import BY_BAND, grouping_labels
from evaluation.contrasts import Contrast, records_bits_per_byte
from evaluation.study import Study
from evaluation.tables import ArmResult

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "doctab"  # equal results give equal files


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


def write_figure_1(study: Study, title: str, path: Path) -> list[Path]:
    """Figure 1: mean bits per byte over the seeds against FLOPs; arrows go from base to table arm.

    On the confirmation set where it was scored, else on the main set.

    Returns:
        The PNG and SVG, or nothing where no run has results.json.
    """
    name = "confirmation" if "confirmation" in study.sets() else study.main_set
    points: dict[str, tuple[float, float]] = {}
    for arm in dict.fromkeys(arm for arm, _ in study.arms):
        seeds = [seed for other, seed in study.arms if other == arm]
        flops = [study.results(arm, seed).get("flops_per_token") for seed in seeds]
        found = [study.bits_per_byte(arm, seed, name) for seed in seeds] if name else []
        scored = [value for value in found if value is not None]
        if scored and flops[0] is not None:
            points[arm] = (float(flops[0]), sum(scored) / len(scored))
    if not points:
        return []
    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    axes = figure.subplots()
    for arm, place in points.items():
        axes.plot(*place, "o")
        axes.annotate(arm, place, xytext=(7, -3), textcoords="offset points", fontsize="small")
    for arm, baseline in dict.fromkeys((arm, base) for arm, base, _ in study.pairs):
        if arm in points and baseline in points:
            arrow = {"arrowstyle": "->"}
            axes.annotate("", xy=points[arm], xytext=points[baseline], arrowprops=arrow)
    axes.margins(x=0.25, y=0.15)
    axes.set_xlabel("estimated FLOPs per token, forward and backward")
    axes.set_ylabel("bits per byte (lower is better)")
    axes.set_title(f"{title} ({name})", fontsize="medium")
    return _save(figure, path)


def write_figure_2(study: Study, title: str, path: Path) -> list[Path]:
    """Figure 2: gains over B of the same seed by target class on the main set.

    Returns:
        The PNG and SVG, or nothing where B or all of its table arms are missing.
    """
    name = study.main_set
    contrasts = [
        found
        for arm in ("b_table", "b_bigram", "b_bigram_table")
        for seed in dict.fromkeys(seed for _, seed in study.arms)
        if name and (found := study.contrast(arm, "b", seed, name)) is not None
    ]
    if not contrasts:
        return []
    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    axes = figure.subplots()
    draw_gains(axes, contrasts)
    axes.set_title(f"{title} ({name})", fontsize="medium")
    return _save(figure, path)


def write_curves(study: Study, title: str, path: Path) -> list[Path]:
    """Training loss and update time against updates, one line a run.

    Returns:
        The PNG and SVG, or nothing where no run has metrics.jsonl.
    """
    curves = {key: study.metrics(*key) for key in study.trained_arms}
    if not any(curves.values()):
        return []
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    losses, times = figure.subplots(1, 2)
    for (arm, seed), entries in curves.items():
        updates = [entry["update"] for entry in entries]
        losses.plot(updates, [entry["loss"] for entry in entries], label=f"{arm} s{seed}", lw=1)
        seconds = [entry.get("update_seconds", float("nan")) for entry in entries]
        times.plot(updates, seconds, lw=1)
    losses.set_xlabel("update")
    losses.set_ylabel("training loss, nats a target")
    losses.legend(fontsize="small")
    times.set_xlabel("update")
    times.set_ylabel("seconds an update")
    figure.suptitle(title)
    return _save(figure, path)


def _save(figure: Figure, path: Path) -> list[Path]:
    """Write PNG and SVG; the SVG holds no date, so that equal results give equal files."""
    files = [path.with_suffix(".png"), path.with_suffix(".svg")]
    figure.savefig(files[0], dpi=150)
    figure.savefig(files[1], metadata={"Date": None})
    return files
