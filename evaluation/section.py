"""What all sections of the report share: their form, and how contrasts are named in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from evaluation.contrasts import Contrast
from evaluation.paper import paper_results
from evaluation.paper_tables import short_hash
from evaluation.study import Study
from evaluation.tables import Table


@dataclass(frozen=True)
class Section:
    """A heading, a line or two, and tables."""

    title: str
    text: str
    tables: tuple[Table, ...] = ()

    def to_markdown(self) -> str:
        """Heading, text, tables; a section without tables says what is missing."""
        parts = [f"### {self.title}", self.text, *(table.to_markdown() for table in self.tables)]
        return "\n\n".join(part for part in parts if part)


def paper_text(name: str) -> Any:
    """Numbers of the paper's text, by the name of their part in paper_results.json."""
    return paper_results()["text"][name]


def pair_name(found: Contrast) -> str:
    """`arm over baseline sSEED`."""
    header = found.arm.header
    return f"{header.label} over {found.baseline.header.label} s{header.seed}"


def pair_hashes(found: Contrast) -> str:
    """First digits of both records' hashes."""
    return short_hash(found.arm, found.baseline)


def all_pairs(study: Study, form: str = "training") -> list[Contrast]:
    """Every arm against its recipe's baseline, on every set of a format."""
    found = [
        study.contrast(arm, baseline, seed, name, form)
        for name in study.sets(form)
        for arm, baseline, seed in study.pairs
    ]
    return [one for one in found if one is not None]
