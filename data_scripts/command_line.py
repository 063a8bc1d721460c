"""What the data commands share: flags with - or _, and one line instead of a traceback."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Callable, Sequence


def normalise_flags(arguments: Sequence[str]) -> list[str]:
    """Write `--chunk-length=8` as `--chunk_length=8`; values and what follows `--` stay."""
    result = []
    for i, argument in enumerate(arguments):
        if argument == "--":
            return result + list(arguments[i:])
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            argument = "--" + flag[2:].replace("-", "_") + equals + value
        result.append(argument)
    return result


def positive(value: str) -> int:
    """A flag's whole number, at least 1."""
    return _at_least(1, value)


def not_negative(value: str) -> int:
    """A flag's whole number, at least 0."""
    return _at_least(0, value)


def _at_least(least: int, value: str) -> int:
    number = int(value)
    if number < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}; found {number}")
    return number


def run(main: Callable[[], None]) -> int:
    """Run a command; returns its exit status.

    0 done; 2 bad input (a ValueError, shown as one line); 1 a full disk or a file that cannot be
    read or written; 130 interrupted.
    """
    try:
        main()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = (
            " The disk is full: free some space and run the same command again." if full else ""
        )
        print(f"error: {error}.{advice}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    return 0
