"""The commands in the room's README are ones that the programs accept."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from data_scripts.command_line import normalise_flags

README = Path(__file__).parents[2] / "data_scripts" / "README.md"
COMMANDS = re.findall(r"^python -m data_scripts\.(\w+) (.*)$", README.read_text(), re.MULTILINE)


def test_there_are_commands():
    assert {module for module, _ in COMMANDS} == {"build", "divide", "verify", "describe", "export"}


@pytest.mark.parametrize(("module", "line"), COMMANDS)
def test_a_command_is_accepted(module, line, monkeypatch, tmp_path, capsys):
    """Parsed, then stopped at the first thing that needs the files or the network."""
    monkeypatch.chdir(tmp_path)
    program = importlib.import_module(f"data_scripts.{module}")
    arguments = normalise_flags(shlex.split(line))
    if module == "build":
        parsed = program._parser().parse_args(arguments)
        assert callable(parsed.plan)
        return
    if module == "divide":
        assert program.main(arguments) == 2
        assert "names none" in capsys.readouterr().err
        return
    with pytest.raises(ValueError, match=r"must hold manifest\.json"):
        program.main(arguments)


@pytest.mark.parametrize("source", ["stdlib", "climbmix", "parquet", "text", "packed", "mixed"])
def test_every_source_has_help(source, capsys):
    from data_scripts.build import main

    with pytest.raises(SystemExit, match="0"):
        main([source, "--help"])
    text = capsys.readouterr().out
    assert "--out DIR" in text
    assert "(None)" not in text
