"""Links lead somewhere, commands exist, and every recipe is listed."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    p
    for folder in (".", "training", "data_scripts", "evaluation", "benchmarks", "docs")
    for p in (ROOT / folder).rglob("*.md")
    if not {".venv", "demo", "runs", "study", "paper", "evidence"} & set(p.relative_to(ROOT).parts)
)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_commands(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), target
    for module in re.findall(r"python -m ([a-z_][\w.]*)", text):
        assert importlib.util.find_spec(module), module
    for recipe in re.findall(r"training/recipes/[\w/]+\.yaml", text):
        assert (ROOT / recipe).exists(), recipe
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z-]+)`?", text):
        assert f"\n{target}:" in makefile or f"{target} " in makefile, target


def test_every_recipe_is_listed():
    page = (ROOT / "training" / "recipes" / "README.md").read_text()
    for path in (ROOT / "training" / "recipes" / "paper").glob("*.yaml"):
        assert f"paper/{path.name}" in page, path.name


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 200
