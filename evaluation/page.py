"""A page of prose whose every number is taken from records: a Jinja template, filled.

    python -m evaluation.report RUN... --out DIR --page results/small-english/README.md.jinja

writes the page beside its template. In the template `pair("b_table", "b", 44, "confirmation").gain`
is a number with its sign, and so on for the functions of `Page` and what a `Pair` has; a number
whose records are missing is an error that names them, so that a page never shows one that nobody
can check. `{{ read("confirmation.json").contrasts[0].name }}` is what a file beside the template
holds, and `{{ number | signed }}` writes a number as the tables do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import jinja2

from evaluation.contrasts import PARTITIONS, Contrast, matching_groups, records_bits_per_byte
from evaluation.paper import paper_arm
from evaluation.records import Records
from evaluation.section import pair_hashes
from evaluation.study import Study, make_studies, read_sources
from evaluation.tables import signed, signed_interval


@dataclass(frozen=True)
class Pair:
    """An arm against its baseline, as a template writes it."""

    found: Contrast

    @property
    def gain(self) -> str:
        """Baseline minus arm in bits per byte."""
        return signed(self.found.gain)

    @property
    def interval(self) -> str:
        """`[low, high]`, 95% over documents."""
        return signed_interval(self.found.comparison.gain_interval)

    @property
    def improved(self) -> str:
        """Share of the documents that the arm improves."""
        return f"{self.found.comparison.documents_improved:.0%}"

    @property
    def violations(self) -> str:
        """Positions where the arm's table knew less than its row shows (Section 4.6).

        Raises:
            ValueError: if the arm has no table.
        """
        if self.found.arm.reach is None or not self.found.arm.header.has_table:
            raise ValueError(f"{self.found.arm.header.label} has no table whose reach counts")
        return f"{int(self.found.arm.reach.violations.sum()):,}"

    @property
    def records(self) -> str:
        """First digits of both records' hashes."""
        return pair_hashes(self.found)

    def part(self, partition: str, *patterns: str) -> str:
        """What the groups of a partition that match contribute to the gain, in bits per byte."""
        return signed(self.found.part(partition, patterns))

    def share(self, partition: str, *patterns: str) -> str:
        """The same as a share of the gain."""
        return f"{self.found.part(partition, patterns) / self.found.gain:.0%}"

    def targets(self, partition: str, *patterns: str) -> str:
        """Share of the arm's targets that are in these groups."""
        grouping, _ = PARTITIONS[partition]
        names = matching_groups(partition, patterns)
        counts = grouping.collapse(self.found.arm.sums.num_targets.sum(axis=0))
        by_name = dict(zip(grouping.names, counts, strict=True))
        return f"{sum(by_name[name] for name in names) / counts.sum():.1%}"


@dataclass(frozen=True)
class Page:
    """The functions that a template may call; arms go by their recipe's name.

    Attributes:
        study: the records.
        folder: where the template lies.
    """

    study: Study
    folder: Path

    def bpb(
        self, arm: str, seed: int, set_name: str, form: str = "training", ablated: bool = False
    ) -> str:
        """Bits per byte."""
        return f"{records_bits_per_byte(self._records(arm, seed, set_name, form, ablated)):.4f}"

    def nats(
        self,
        arm: str,
        seed: int,
        set_name: str,
        partition: str,
        *patterns: str,
        form: str = "training",
    ) -> str:
        """Mean nats of the targets in the groups that match.

        Raises:
            ValueError: if the records or the groups are missing, or no target is in them.
        """
        records = self._records(arm, seed, set_name, form)
        grouping, _ = PARTITIONS[partition]
        found = records.mean_nats(grouping, matching_groups(partition, patterns))
        if isnan(found):
            raise ValueError(f"{arm}, seed {seed}, has no targets in {', '.join(patterns)}")
        return f"{found:.2f}"

    def pair(
        self,
        arm: str,
        baseline: str,
        seed: int,
        set_name: str,
        form: str = "training",
        ablated: bool = False,
    ) -> Pair:
        """An arm, its table ablated or not, against a baseline."""
        mine = self._records(arm, seed, set_name, form, ablated)
        return Pair(self.study.pair(mine, self._records(baseline, seed, set_name, form)))

    def result(self, arm: str, seed: int, key: str, form: str = "") -> str:
        """A value of the run's results.json, formatted, e.g. `result("b", 44, "parameters", ",")`.

        Raises:
            ValueError: if the run or the key is missing.
        """
        results = self.study.results(paper_arm(arm), seed)
        if key not in results:
            raise ValueError(f"the page needs {key} in the results.json of {arm}, seed {seed}")
        return format(results[key], form)

    def training_bpb(self, arm: str, seed: int, first: int, last: int) -> float:
        """Mean bits per byte of the training batches of updates `first` to `last`, both included.

        Raises:
            ValueError: if the run's metrics.jsonl lacks one of them.
        """
        metrics = self.study.metrics(paper_arm(arm), seed)
        found = [entry["bpb"] for entry in metrics if first <= entry["update"] <= last]
        if len(found) != last - first + 1:
            raise ValueError(
                f"the page needs updates {first} to {last} in the metrics.jsonl of {arm}, seed "
                f"{seed}; it has {len(found)} of them"
            )
        return float(sum(found) / len(found))

    def read(self, name: str) -> Any:
        """A JSON file beside the template.

        Raises:
            ValueError: if there is none of that name.
        """
        path = self.folder / name
        if not path.is_file():
            raise ValueError(f"the page needs the file {name} beside its template")
        return json.loads(path.read_text())

    def beside(self, name: str) -> Page:
        """The same functions over another study: `beside("../small-english").bpb("b", 44, "dev")`.

        Args:
            name: that study's folder, from this template's; its records are in `evidence`.

        Raises:
            ValueError: if there are no records, or those of more than one chunk set.
        """
        folder = self.folder / name
        runs = sorted(path for path in (folder / "evidence").glob("*") if path.is_dir())
        if not runs:
            raise ValueError(f"the page needs run folders in {name}/evidence")
        studies = make_studies(read_sources(runs), self.study.bootstrap)
        if len(studies) > 1:
            raise ValueError(f"{name}/evidence must be of one chunk set; it is of {len(studies)}")
        return Page(studies[0], folder)

    def _records(
        self, arm: str, seed: int, set_name: str, form: str, ablated: bool = False
    ) -> Records:
        found = self.study.records(paper_arm(arm), seed, set_name, form, ablated)
        if found is None:
            how = f"{form} format{', ablated' if ablated else ''}"
            raise ValueError(f"the page needs records of {arm}, seed {seed}, on {set_name}, {how}")
        return found


def render_page(study: Study, template: Path) -> str:
    """Fill a template.

    Raises:
        ValueError: if the template is not one, or asks for a number without records.
    """
    if template.suffix != ".jinja" or not template.is_file():
        raise ValueError(f"--page must name a template that ends in .jinja; got {template}")
    page = Page(study, template.parent)
    names = ("bpb", "nats", "pair", "result", "training_bpb", "read", "beside")
    functions = {name: getattr(page, name) for name in names}
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    environment.filters["signed"] = signed
    try:
        return environment.from_string(template.read_text()).render(functions)
    except (jinja2.TemplateError, TypeError) as error:
        raise ValueError(f"{template}: {error}") from None


def write_page(study: Study, template: Path) -> Path:
    """Fill a template and write it beside itself, without the suffix `.jinja`.

    Raises:
        ValueError: as `render_page`.
    """
    out = template.with_suffix("")
    out.write_text(render_page(study, template))
    return out
