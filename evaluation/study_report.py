"""One study's part of the report: Tables 1 to 7, Figures 1 and 2, and the text's numbers."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from evaluation.figures import write_curves, write_figure_1, write_figure_2
from evaluation.paper import paper_results
from evaluation.paper_tables import paper_tables
from evaluation.sections import text_sections
from evaluation.study import Study


def write_study(study: Study, out: Path, exclude: Collection[str] = ()) -> tuple[str, list[Path]]:
    """Write a study's tables (CSV, LaTeX) and figures (PNG, SVG).

    Args:
        study: records and results.
        out: folder of the files.
        exclude: documents for the overlap exclusions.

    Returns:
        Markdown that shows everything, and the files written.
    """
    out.mkdir(parents=True, exist_ok=True)
    deviation = paper_results()["contrast_deviation"]
    parts = [
        f"## The paper's tables (data {study.data_sha256[:8]})",
        "Every cell is ours / the paper's / the difference; a dash is missing. The paper's numbers "
        "are for its data and size: a difference means something for the recipes in "
        f"training/recipes/paper/ alone, and contrasts vary by about {deviation:.3f} from seed to "
        "seed.",
    ]
    files = []
    for table in paper_tables(study):
        parts.append(table.to_markdown())
        for suffix, text in ((".csv", table.to_csv()), (".tex", table.to_latex())):
            files.append(out / f"{table.name}{suffix}")
            files[-1].write_text(text)
    for name, title, write in (
        ("figure_1", "Figure 1. Bits per byte against estimated FLOPs per token", write_figure_1),
        ("figure_2", "Figure 2. Gain over B by target class", write_figure_2),
        ("learning_curves", "Learning curves", write_curves),
    ):
        written = write(study, title, out / name)
        files += written
        shown = f"![{title}]({name}.png)" if written else f"{title}: missing."
        parts.append(shown)
    parts.append("## The paper's text, in numbers")
    for section in text_sections(study, exclude):
        parts.append(section.to_markdown())
        for table in section.tables:
            files.append(out / f"text.{table.name}.csv")
            files[-1].write_text(table.to_csv())
    return "\n\n".join(parts), files
