"""When to stop: SIGTERM, SIGUSR1, Ctrl-C or a file named STOP in the run folder.

A signal only sets a flag. After each update all processes combine their flags, so that they stop
after the same update, save, and say so in `status.json`.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Collects requests to stop, once installed.

    Args:
        run_dir: a file named STOP there is a request.
    """

    def __init__(self, run_dir: Path) -> None:
        self.stop_file = run_dir / "STOP"
        self.reason: str | None = None
        self._first_signal = 0.0

    def install(self) -> None:
        """Handle the signals from here on, and outlive no launcher."""
        for number in SIGNALS:
            signal.signal(number, self._handle)
        die_with_parent()

    def requested(self) -> bool:
        """Whether this process was asked to stop; `reason` says by what."""
        if self.reason is None and self.stop_file.exists():
            self.reason = f"found {self.stop_file}"
        return self.reason is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.reason is None:
            self.reason, self._first_signal = f"received {signal.Signals(number).name}", now
        # A Ctrl-C reaches the worker twice at once, from the terminal and from the launcher; one
        # that comes later means that the user does not want to wait for the update.
        elif number == signal.SIGINT and now - self._first_signal > 2:
            raise KeyboardInterrupt


def die_with_parent() -> None:
    """Ask Linux for a SIGTERM when the launcher dies.

    `accelerate launch` with one process does not forward signals; without this, a killed launcher
    leaves its worker training.
    """
    if sys.platform != "linux" or os.getppid() == 1:
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)
