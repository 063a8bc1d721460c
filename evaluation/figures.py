"""Figures of results, drawn from records and results files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


# Beyond these numbers bars and labels would cover each other.
MOST_BARS = 6
MOST_LABELS = 8
_MARKERS = "o^sDvPX*<>hp"


@dataclass(frozen=True)
class Point:
    """One arm of a figure: mean bits per byte over its seeds, at its FLOPs per token."""

    flops_per_token: float
    bits_per_byte: float


@dataclass(frozen=True)
class Styles:
    """A colour for a base model and all that builds on it, a marker for each variant of a base.

    Attributes:
        baselines: arm -> the arm that it is compared with.
    """

    baselines: dict[str, str]
    _roots: list[str] = field(default_factory=list)
    _variants: list[str] = field(default_factory=lambda: [""])

    def of(self, arm: str) -> tuple[str, int]:
        """Colour and number of the variant (0 for a base); the same on every call."""
        root, seen = arm, {arm}
        while self.baselines.get(root, root) not in seen:
            root = self.baselines[root]
            seen.add(root)
        return f"C{_place(self._roots, root)}", _place(self._variants, arm.removeprefix(root))


def _place(names: list[str], name: str) -> int:
    """Index of a name in a list that grows by new ones."""
    if name not in names:
        names.append(name)
    return names.index(name)


def draw_gains(axes: Any, contrasts: Sequence[Contrast]) -> None:
    """Each contrast's gain by target cell, summed over visibility (Section 4.3).

    Bars, or for more than a handful of contrasts a heat map with a row for each.
    """
    labels = grouping_labels(BY_BAND, contrasts[0].arm.header.chunk_length)
    splits = {}
    for contrast in contrasts:
        split = contrast.gain_by("band")
        if split is not None:
            header = contrast.arm.header
            name = f"{header.label} s{header.seed} over {contrast.baseline.header.label}"
            splits[name] = list(split.values())
    if len(splits) > MOST_BARS:
        _draw_heat_map(axes, splits)
    else:
        width = 0.8 / max(1, len(splits))
        for number, (name, values) in enumerate(splits.items()):
            places = [i + (number - (len(splits) - 1) / 2) * width for i in range(len(labels))]
            axes.bar(places, values, width, label=name)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_ylabel("gain in bits per byte (higher is better)")
        axes.legend(fontsize="small")
    axes.set_xticks(range(len(labels)), labels, rotation=35, ha="right")


def _draw_heat_map(axes: Any, rows: Mapping[str, Sequence[float]]) -> None:
    """Rows of signed values, with the values written in."""
    most = max(abs(value) for values in rows.values() for value in values)
    axes.imshow(list(rows.values()), cmap="RdBu", vmin=-most, vmax=most, aspect="auto")
    for y, values in enumerate(rows.values()):
        for x, value in enumerate(values):
            colour = "white" if abs(value) > 0.6 * most else "black"
            text = f"{value:+.3f}"
            axes.text(x, y, text, ha="center", va="center", fontsize="x-small", color=colour)
    axes.set_yticks(range(len(rows)), rows, fontsize="small")
    axes.set_title("gain in bits per byte (blue is better)", fontsize="medium")


def draw_cost(axes: Any, points: Mapping[str, Point], styles: Styles) -> None:
    """Bits per byte against FLOPs per token; arrows go from a baseline to its arm (Section 4.1).

    Arms are named beside their points, or where they are many in a legend, best first.
    """
    for arm in sorted(points, key=lambda arm: points[arm].bits_per_byte):
        point = points[arm]
        place = (point.flops_per_token, point.bits_per_byte)
        colour, variant = styles.of(arm)
        marker = _MARKERS[variant % len(_MARKERS)]
        name = f"{point.bits_per_byte:.4f}  {arm}"
        axes.plot(*place, marker, color=colour, label=name)
        if len(points) <= MOST_LABELS:
            offset = {"xytext": (7, -3), "textcoords": "offset points"}
            axes.annotate(arm, place, fontsize="small", **offset)
        baseline = points.get(styles.baselines.get(arm, ""))
        if baseline is not None:
            start = (baseline.flops_per_token, baseline.bits_per_byte)
            arrow = {"arrowstyle": "->", "color": colour, "alpha": 0.6}
            axes.annotate("", xy=place, xytext=start, arrowprops=arrow)
    if len(points) > MOST_LABELS:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)
        axes.margins(x=0.08, y=0.08)
    else:
        axes.margins(x=0.25, y=0.15)
    axes.set_xlabel("estimated FLOPs per token, forward and backward")
    axes.set_ylabel("bits per byte (lower is better)")


def write_figure(results: Sequence[ArmResult], title: str, path: Path) -> bool:
    """Draw what there is for one group: gains by target cell, and bits per byte against FLOPs.

    Returns:
        Whether anything was drawn; without contrasts and costs no file is written.
    """
    contrasts = [result.contrast for result in results if result.contrast is not None]
    found: dict[str, list[tuple[float, float]]] = {}
    baselines: dict[str, str] = {}
    for result in results:
        label = result.records.header.label
        if result.flops_per_token is not None:
            bits = records_bits_per_byte(result.records)
            found.setdefault(label, []).append((result.flops_per_token, bits))
        if result.contrast is not None:
            baselines[label] = result.contrast.baseline.header.label
    points = {arm: _mean_point(values) for arm, values in found.items()}
    if not contrasts and not points:
        return False
    panels = bool(contrasts) + bool(points)
    height = max(4.8, 0.24 * len(contrasts), 0.24 * len(points))
    widths = [_gains_width(len(contrasts))] * bool(contrasts) + [_cost_width(points)] * bool(points)
    figure = Figure(figsize=(sum(widths), height), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False, width_ratios=widths)[0])
    if contrasts:
        draw_gains(axes.pop(0), contrasts)
    if points:
        draw_cost(axes.pop(0), points, Styles(baselines))
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return True


def _mean_point(values: Sequence[tuple[float, float]]) -> Point:
    """FLOPs are the same for every seed; bits per byte are averaged."""
    return Point(values[0][0], sum(bits for _, bits in values) / len(values))


def _gains_width(count: int) -> float:
    return 7.2 if count <= MOST_BARS else 9.6  # names of rows need room


def _cost_width(points: Mapping[str, Point]) -> float:
    return 7.2 if len(points) <= MOST_LABELS else 8.4  # a legend needs room


def _study_styles(study: Study) -> Styles:
    return Styles({arm: baseline for arm, baseline, _ in study.pairs})


def write_figure_1(study: Study, title: str, path: Path) -> list[Path]:
    """Figure 1: mean bits per byte over the seeds against FLOPs; arrows go from base to table arm.

    On the confirmation set where it was scored, else on the main set.

    Returns:
        The PNG and SVG, or nothing where no run has results.json.
    """
    name = "confirmation" if "confirmation" in study.sets() else study.main_set
    points: dict[str, Point] = {}
    for arm in dict.fromkeys(arm for arm, _ in study.arms):
        seeds = [seed for other, seed in study.arms if other == arm]
        flops = study.results(arm, seeds[0]).get("flops_per_token")
        found = [study.bits_per_byte(arm, seed, name) for seed in seeds] if name else []
        scored = [value for value in found if value is not None]
        if scored and flops is not None:
            points[arm] = _mean_point([(float(flops), value) for value in scored])
    if not points:
        return []
    height = max(4.8, 0.24 * len(points))
    figure = Figure(figsize=(_cost_width(points), height), layout="constrained")
    axes = figure.subplots()
    draw_cost(axes, points, _study_styles(study))
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
    height = max(4.8, 0.24 * len(curves))
    figure = Figure(figsize=(14.4, height), layout="constrained")
    losses, times = figure.subplots(1, 2)
    styles, lines = _study_styles(study), ("-", "--", ":", "-.")
    for (arm, seed), entries in curves.items():
        colour, variant = styles.of(arm)
        style = {"color": colour, "linestyle": lines[variant % len(lines)], "lw": 1}
        updates = [entry["update"] for entry in entries]
        losses.plot(updates, [entry["loss"] for entry in entries], **style)
        seconds = [entry.get("update_seconds", float("nan")) for entry in entries]
        times.plot(updates, seconds, label=f"{arm} s{seed}", **style)
    losses.set_xlabel("update")
    losses.set_ylabel("training loss, nats a target")
    times.set_xlabel("update")
    times.set_ylabel("seconds an update")
    times.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)
    figure.suptitle(title)
    return _save(figure, path)


def _save(figure: Figure, path: Path) -> list[Path]:
    """Write PNG and SVG; the SVG holds no date, so that equal results give equal files."""
    files = [path.with_suffix(".png"), path.with_suffix(".svg")]
    figure.savefig(files[0], dpi=150)
    figure.savefig(files[1], metadata={"Date": None})
    return files
