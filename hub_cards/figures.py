"""The card's two figures: the learning curve, and the gain by target cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # after the backend is chosen

LEARNING_CURVE = "figures/learning_curve.png"
GAIN_BY_CELL = "figures/gain_by_target_cell.png"


def learning_curve(curve: list[dict[str, Any]], tokens_per_update: int, out: Path) -> bool:
    """Training loss against target tokens; returns whether there was anything to draw."""
    if len(curve) < 2:
        return False
    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    tokens = [(row["update"] + 1) * tokens_per_update / 1e6 for row in curve]
    axes.plot(tokens, [row["loss"] for row in curve], linewidth=1.2, color="tab:blue")
    axes.set(xlabel="target tokens (millions)", ylabel="training loss (nats per target)")
    axes.grid(alpha=0.3)
    _save(figure, out)
    return True


def gain_by_cell(rows: list[tuple[str, float]], baseline: str, out: Path) -> bool:
    """Bars of what each target cell contributes to the gain; False where there are none."""
    if not rows:
        return False
    figure, axes = plt.subplots(figsize=(6.4, 0.8 + 0.28 * len(rows)), layout="constrained")
    names, gains = zip(*reversed(rows), strict=True)
    colors = ["tab:blue" if gain >= 0 else "tab:red" for gain in gains]
    axes.barh(names, gains, color=colors)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(xlabel=f"contribution to the gain over {baseline} (bits per byte)")
    axes.grid(axis="x", alpha=0.3)
    _save(figure, out)
    return True


def _save(figure: plt.Figure, out: Path) -> None:
    """Without the library's version inside, so that the same numbers make the same file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110, metadata={"Software": None})
    plt.close(figure)
