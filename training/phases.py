"""What `training.line` and `training.study` share: commands in processes of their own, shown."""

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_scripts.chunk_set import ChunkSet
from training.config import Recipe

LAUNCHER = ("-m", "accelerate.commands.launch", "--config_file", "accelerate_config.yaml")


@dataclass
class Phase:
    """Prints what a phase does and how long it took."""

    title: str

    def __enter__(self) -> "Phase":
        print(f"\n\033[1m{self.title}\033[0m", flush=True)
        self.start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            print(f"  {time.perf_counter() - self.start:.0f} s", flush=True)


def run(*command: str | Path, cwd: Path | None = None, shown: str | None = None) -> None:
    """Run one command of the line and show it, or `shown` in its place.

    Raises:
        SystemExit: with the command's exit code, if it fails.
    """
    words = [str(word) for word in command]
    print("  $ " + (shown or shlex.join(["python", *words])), flush=True)
    code = wait_for(start([sys.executable, *words], cwd=cwd))
    if code:
        sys.exit(code)


_started: list[subprocess.Popen[bytes]] = []


def start(words: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a command that a SIGTERM to this process reaches too."""
    process = subprocess.Popen(words, **options)
    _started[:] = [one for one in _started if one.poll() is None] + [process]
    return process


def forward_sigterm() -> None:
    """Pass a SIGTERM on to the commands that run, which save and stop, and end with their code.

    Without it they would train on, and the same command started again would meet them.
    """

    def forward(number: int, frame: object) -> None:
        running = [one for one in _started if one.poll() is None]
        for one in running:
            one.send_signal(signal.SIGTERM)
        if not running:
            sys.exit(128 + number)

    signal.signal(signal.SIGTERM, forward)


def wait_for(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a command; Ctrl-C reaches it too, and a run takes its time to save."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def prepare_chunk_set(folder: Path, *build: str | Path) -> str:
    """Verify the chunk set in `folder`, or build it there; returns its fingerprint.

    Args:
        folder: the chunk set.
        build: source and options of `python -m data_scripts.build`.
    """
    try:
        ChunkSet.open(folder, verify=True)
        print(f"  reusing {folder}")
    except ValueError:
        run("-m", "data_scripts.build", *build, "--out", folder)
    return ChunkSet.open(folder).fingerprint


def is_finished(recipe: Recipe, fingerprint: str) -> bool:
    """Whether the recipe's run is done, with this recipe and this chunk set."""
    try:
        status = json.loads((recipe.run_dir / "status.json").read_text())
        results = json.loads((recipe.run_dir / "results.json").read_text())
    except (OSError, ValueError):
        return False
    found = (status["state"], results["recipe_sha256"], results["data_sha256"])
    return found == ("done", recipe.sha256(), fingerprint)
