"""A page of prose whose every number is taken from records: a Jinja template, filled.

    python -m evaluation.report RUN... --out DIR --page results/small-english/README.md.jinja

writes the page beside its template. In the template `gain("b_table", "b", 44, "confirmation")` is a
number with its sign, and so on for the functions of `Page`; a number whose records are missing is
an error that names them, so that a page never shows one that nobody can check.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2

from evaluation.contrasts import Contrast, records_bits_per_byte
from evaluation.paper import paper_arm
from evaluation.records import Records
from evaluation.section import pair_hashes
from evaluation.study import Study
from evaluation.tables import signed


class Page:
    """The functions that a template may call; arms go by their recipe's name."""

    def __init__(self, study: Study) -> None:
        self._study = study

    def bpb(
        self,
        arm: str,
        seed: int = 44,
        set_name: str = "confirmation",
        form: str = "training",
        ablated: bool = False,
    ) -> str:
        """Bits per byte."""
        return f"{records_bits_per_byte(self._records(arm, seed, set_name, form, ablated)):.4f}"

    def gain(self, arm: str, baseline: str, seed: int = 44, *where: Any, **more: Any) -> str:
        """Baseline minus arm in bits per byte."""
        return signed(self._contrast(arm, baseline, seed, *where, **more).gain)

    def interval(self, arm: str, baseline: str, seed: int = 44, *where: Any, **more: Any) -> str:
        """`[low, high]`, 95% over documents."""
        low, high = self._contrast(arm, baseline, seed, *where, **more).comparison.gain_interval
        return f"[{signed(low)}, {signed(high)}]"

    def improved(self, arm: str, baseline: str, seed: int = 44, *where: Any, **more: Any) -> str:
        """Share of the documents that the arm improves."""
        found = self._contrast(arm, baseline, seed, *where, **more).comparison.documents_improved
        return f"{found:.0%}"

    def part(
        self,
        arm: str,
        baseline: str,
        partition: str,
        groups: str | list[str],
        seed: int = 44,
        *where: Any,
        **more: Any,
    ) -> str:
        """What some groups of a partition contribute to a gain, in bits per byte.

        Args:
            arm, baseline, seed, where, more: as `gain`.
            partition: band, target_cell, table_state or match.
            groups: a group's name, or several whose sum is meant; `*hidden` is a pattern.
        """
        return signed(self._part(arm, baseline, partition, groups, seed, *where, **more))

    def share(
        self,
        arm: str,
        baseline: str,
        partition: str,
        groups: str | list[str],
        seed: int = 44,
        *where: Any,
        **more: Any,
    ) -> str:
        """The same as a share of the gain."""
        part = self._part(arm, baseline, partition, groups, seed, *where, **more)
        return f"{part / self._contrast(arm, baseline, seed, *where, **more).gain:.0%}"

    def result(self, arm: str, seed: int, key: str, form: str = "") -> str:
        """A value of the run's results.json, formatted, e.g. `result("b", 44, "parameters", ",")`.

        Raises:
            ValueError: if the run or the key is missing.
        """
        results = self._study.results(paper_arm(arm), seed)
        if key not in results:
            raise ValueError(f"the page needs {key} in the results.json of {arm}, seed {seed}")
        return format(results[key], form)

    def records(self, arm: str, baseline: str, seed: int = 44, *where: Any, **more: Any) -> str:
        """First digits of both records' hashes."""
        return pair_hashes(self._contrast(arm, baseline, seed, *where, **more))

    def _part(
        self,
        arm: str,
        baseline: str,
        partition: str,
        groups: str | list[str],
        seed: int = 44,
        *where: Any,
        **more: Any,
    ) -> float:
        split = self._contrast(arm, baseline, seed, *where, **more).gain_by(partition)
        if split is None:
            raise ValueError(f"{arm} over {baseline} cannot be split by {partition}")
        chosen: dict[str, float] = {}
        for pattern in [groups] if isinstance(groups, str) else groups:
            found = {k: v for k, v in split.items() if Path(k).match(pattern)}
            if not found:
                raise ValueError(f"{partition} has no group {pattern}; it has {', '.join(split)}")
            chosen |= found
        return sum(chosen.values())

    def _records(
        self, arm: str, seed: int, set_name: str, form: str, ablated: bool = False
    ) -> Records:
        found = self._study.records(paper_arm(arm), seed, set_name, form, ablated)
        if found is None:
            how = f"{form} format{', ablated' if ablated else ''}"
            raise ValueError(f"the page needs records of {arm}, seed {seed}, on {set_name}, {how}")
        return found

    def _contrast(
        self,
        arm: str,
        baseline: str,
        seed: int = 44,
        set_name: str = "confirmation",
        form: str = "training",
        ablated: bool = False,
    ) -> Contrast:
        mine = self._records(arm, seed, set_name, form, ablated)
        return self._study.pair(mine, self._records(baseline, seed, set_name, form))


def write_page(study: Study, template: Path) -> Path:
    """Fill a template and write it beside itself, without the suffix `.jinja`.

    Raises:
        ValueError: if the template is not one, or asks for a number without records.
    """
    if template.suffix != ".jinja" or not template.is_file():
        raise ValueError(f"--page must name a template that ends in .jinja; got {template}")
    page = Page(study)
    functions: dict[str, Callable[..., str]] = {
        name: getattr(page, name) for name in dir(Page) if not name.startswith("_")
    }
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    try:
        text = environment.from_string(template.read_text()).render(functions)
    except (jinja2.TemplateError, TypeError) as error:
        raise ValueError(f"{template}: {error}") from None
    out = template.with_suffix("")
    out.write_text(text)
    return out
