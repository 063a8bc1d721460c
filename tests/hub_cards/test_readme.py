"""The room's README names commands that exist, and files that are there."""

import re
import shlex
from pathlib import Path

import pytest

from hub_cards import compare, push

ROOM = Path(push.__file__).parent
TEXT = (ROOM / "README.md").read_text()
COMMANDS = re.findall(r"^python -m hub_cards\.(\w+) (.+)$", TEXT, re.M)


def test_every_command_is_parsed(monkeypatch):
    assert {name for name, _ in COMMANDS} == {"push", "compare"}
    parsed = []
    monkeypatch.setattr(push, "_push", lambda arguments, options: parsed.append(arguments))
    monkeypatch.setattr(push, "_dry_run", lambda arguments, options: parsed.append(arguments))
    monkeypatch.setattr(compare, "load", lambda name, revision: parsed.append(name) or [])
    monkeypatch.setattr(compare, "compare", lambda models, num_resamples: "")
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: None)
    for name, arguments in COMMANDS:
        assert {"push": push, "compare": compare}[name].main(shlex.split(arguments)) == 0
    assert len(parsed) >= len(COMMANDS)


@pytest.mark.parametrize("name", re.findall(r"`(\w+\.(?:py|json))`", TEXT))
def test_every_file_is_there(name):
    assert (ROOM / name).is_file()


def test_the_screenshots_are_there_and_small():
    docs = ROOM.parent / "docs"
    for name in ("model_card.png", "dataset_card.png", "metric_app.png"):
        assert 0 < (docs / name).stat().st_size < 500_000
