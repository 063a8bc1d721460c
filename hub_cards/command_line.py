"""What the room's commands share: flags with - or _, and errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from hub_cards.redaction import scrub


def normalise_flags(argv: Sequence[str]) -> list[str]:
    """`--repo-id` and `--repo_id` are the same flag; values are left alone."""
    found = []
    for word in argv:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            word = "--" + flag[2:].replace("-", "_") + equals + value
        found.append(word)
    return found


def run_command(action: Callable[[], None]) -> int:
    """Run a command; returns the exit code: 0, or 2 after one line about what went wrong."""
    try:
        action()
    except ValueError as error:
        print("error: " + scrub(" ".join(str(error).split())), file=sys.stderr)
        return 2
    return 0
