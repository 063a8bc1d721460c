"""The paper's published numbers (`paper_results.json`), to stand beside ours."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from evaluation.tables import MISSING

SET_NAMES = {
    "dev_val": "Dev-val",
    "dev_heldout": "Dev-held-out",
    "confirmation": "Confirmation",
    "climbmix_val": "ClimbMix val",
}


@cache
def paper_results() -> dict[str, Any]:
    """Tables 1 to 7 and some numbers of the text; lists are by seed, 44 then 45."""
    content: dict[str, Any] = json.loads(
        Path(__file__).with_name("paper_results.json").read_text(encoding="utf-8")
    )
    return content


def paper_rows(number: int) -> list[dict[str, Any]]:
    """The rows of one of the paper's tables."""
    rows: list[dict[str, Any]] = paper_results()[f"table_{number}"]["rows"]
    return rows


def paper_arm(arm: str) -> str:
    """The arm of the paper that one of `training/recipes/small` stands for: lg_table, lg512_table.

    Any other name is returned as it is.
    """
    analogues: dict[str, str] = paper_results()["analogues"]
    if any(arm == name or arm.startswith(f"{name}_") for name in analogues.values()):
        return arm  # l5_8k is no version of l5
    for small in sorted(analogues, key=len, reverse=True):
        if arm == small or arm.startswith(f"{small}_"):
            return analogues[small] + arm.removeprefix(small)
    return arm


@cache
def _bits_per_byte() -> dict[tuple[str, int, str], float]:
    """Tables 1 and 7: (arm, seed, set) -> bits per byte in the training format."""
    found = {
        (row["arm"], seed, name): values[i]
        for row in paper_rows(1)
        for name, values in row["bits_per_byte"].items()
        for i, seed in enumerate(row["seeds"])
    }
    for row in paper_rows(7):
        for arm, key in (
            (row["baseline"], "baseline_bits_per_byte"),
            (row["arm"], "bits_per_byte"),
        ):
            found |= {(arm, 44, name): value for name, value in row[key].items()}
    return found


def paper_gain(arm: str, baseline: str, seed: int, set_name: str) -> float | None:
    """The paper's `baseline` minus its `arm` in the training format, from Tables 1 and 7.

    Also of pairs that its text compares and no table lists; None where it has not both.
    """
    values = [_bits_per_byte().get((name, seed, set_name)) for name in (baseline, arm)]
    if values[0] is None or values[1] is None:
        return None
    return round(values[0] - values[1], 5)


def by_seed(values: list[float] | None, seed: int) -> float | None:
    """The value of a seed in one of the file's lists: 44 is first, 45 second."""
    place = seed - 44
    return values[place] if values is not None and 0 <= place < len(values) else None


def beside(ours: float | None, paper: float | None, decimals: int = 4, signed: bool = True) -> str:
    """`ours / paper / difference`, with a dash for what is not there."""
    sign = "+" if signed else ""
    mine, theirs = (
        MISSING if value is None else f"{value:{sign}.{decimals}f}" for value in (ours, paper)
    )
    difference = MISSING
    if ours is not None and paper is not None:
        difference = f"{ours - paper:+.{decimals}f}"
    return f"{mine} / {theirs} / {difference}"
