"""What every card goes through: licence, strict rendering, and a second look at the result."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, UndefinedError

_FOLDER = Path(__file__).parent
_LICENSES: dict[str, str] = json.loads((_FOLDER / "licenses.json").read_text("utf-8"))["licenses"]
LICENSES = tuple(_LICENSES)


def check_license(license: str, license_name: str | None = None) -> None:
    """Refuse what the Hub would not know.

    Raises:
        ValueError: if the licence is none of the Hub's, or `other` without a name.
    """
    if license not in LICENSES:
        near = [name for name in LICENSES if name.split("-")[0] == license.lower().split("-")[0]]
        raise ValueError(
            f"license must be one of the Hub's identifiers; got {license!r}. "
            f"Use {', '.join(near or ['apache-2.0', 'mit', 'cc-by-4.0', 'other'])}."
        )
    if license == "other" and not license_name:
        raise ValueError("license other must come with a name; got none. Add --license_name.")


def license_title(license: str, license_name: str | None = None) -> str:
    """The licence as a reader knows it."""
    return license_name or _LICENSES[license]


def render(template: str, variables: dict[str, Any]) -> str:
    """Fill a template; what it names must be there.

    Raises:
        ValueError: if a variable is undefined, or a section of the result is empty.
    """
    environment = Environment(
        loader=FileSystemLoader(_FOLDER), undefined=StrictUndefined, keep_trailing_newline=True
    )
    try:
        text = environment.get_template(template).render(variables)
    except UndefinedError as error:
        raise ValueError(
            f"every variable of {template} must be defined; found: {error}. "
            "Write the run's files again with this version."
        ) from None
    check_sections(text)
    return text


def check_sections(text: str) -> None:
    """Refuse a card with an empty section.

    A figure alone is no content: whoever reads the card without images must learn something.

    Raises:
        ValueError: naming the section.
    """
    for title, body in sections(text):
        plain = re.sub(r"<!--.*?-->|!\[[^\]]*\]\([^)]*\)|```\w*|\|[\s:|-]+\|", "", body, flags=re.S)
        if not plain.strip():
            raise ValueError(f"section {title!r} must have content; it is empty. Fill its files.")


def sections(text: str) -> Iterator[tuple[str, str]]:
    """(title, text up to the next heading of the same or a higher level), code blocks excluded."""
    lines = text.splitlines()
    found: list[tuple[int, int, str]] = []
    fenced = False
    for number, line in enumerate(lines):
        fenced ^= line.startswith("```")
        match = None if fenced else re.match(r"(#{1,6}) +(.+)", line)
        if match:
            found.append((number, len(match[1]), match[2]))
    for index, (number, level, title) in enumerate(found):
        after = [start for start, other, _ in found[index + 1 :] if other <= level]
        body = lines[number + 1 : after[0] if after else len(lines)]
        yield title, "\n".join(line for line in body if not re.match(r"#{1,6} ", line))


def tables(text: str) -> Iterator[list[dict[str, str]]]:
    """The Markdown tables of a card, each as rows by column name."""
    block: list[list[str]] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            block.append([cell.strip() for cell in line.strip("|").split("|")])
            continue
        if len(block) > 2:
            yield [dict(zip(block[0], row, strict=True)) for row in block[2:]]
        block = []


def check_number(shown: str, value: float, what: str) -> None:
    """Refuse a printed number that is not the file's, rounded to the digits printed.

    Raises:
        ValueError: saying what was printed and what the file holds.
    """
    plain = shown.replace(",", "").replace("−", "-")
    scale = 100.0 if plain.endswith("%") else 1.0
    plain = plain.rstrip("%")
    decimals = len(plain.partition(".")[2])
    try:
        difference = abs(float(plain) - value * scale)
    except ValueError:
        difference = float("inf")
    if not difference <= 0.5000001 * 10.0**-decimals:
        raise ValueError(
            f"{what} must be {value} on the card; found {shown!r}. The template is at fault."
        )
