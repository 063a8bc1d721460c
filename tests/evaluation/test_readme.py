"""Every command of the room's README is one that its parser takes, and every module is named."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path

import pytest

from data_scripts.command_line import normalise_flags

FOLDER = Path(__file__).resolve().parents[2] / "evaluation"
TEXT = (FOLDER / "README.md").read_text(encoding="utf-8")
LINES = [line for line in TEXT.splitlines() if line.startswith(("python -m", "accelerate"))]


@pytest.mark.parametrize("line", LINES)
def test_commands_parse(line) -> None:
    words = shlex.split(line)
    module, arguments = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
    name = "evaluation.records_command" if module == "evaluation.records" else module
    parser = importlib.import_module(name)._parser()
    assert vars(parser.parse_args(normalise_flags(arguments)))


def test_every_command_is_named() -> None:
    commands = [
        file.stem
        for file in FOLDER.glob("*.py")
        if 'if __name__ == "__main__":' in file.read_text(encoding="utf-8")
    ]
    assert len(commands) >= 7
    for name in commands:
        assert f"| `{name}` |" in TEXT
        assert any(f"-m evaluation.{name} " in line for line in LINES)


def test_help_is_one_a_newcomer_can_act_on(capsys) -> None:
    for name in ("score", "protocol", "reach", "mixture", "attention_diagnostic"):
        with pytest.raises(SystemExit) as stop:
            importlib.import_module(f"evaluation.{name}").main(["--help"])
        assert stop.value.code == 0
        assert f"python -m evaluation.{name}" in capsys.readouterr().out
