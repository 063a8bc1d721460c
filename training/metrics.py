"""What a run tells its user: metrics.jsonl, status.json, a progress bar, throughput, MFU."""

import json
import resource
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from training.checkpoint import write_json

# Dense bf16 FLOP/s of known devices, from their datasheets; any other device has a blank MFU.
PEAK_BF16_FLOPS = {
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 3090": 71.0e12,
    "NVIDIA A100": 312.0e12,
    "NVIDIA H100 PCIe": 756.0e12,
    "NVIDIA H100": 989.5e12,
    "NVIDIA H200": 989.5e12,
    "NVIDIA L40S": 362.0e12,
    "NVIDIA RTX 6000 Ada": 364.2e12,
}
# Updates after each start that training_seconds leaves out: compilation and warm-up (Section 3.1).
WARMUP_UPDATES = 11


def peak_flops(device_name: str) -> float | None:
    """Peak bf16 FLOP/s of a device by the longest matching name; None if unknown."""
    matches = [name for name in PEAK_BF16_FLOPS if device_name.startswith(name)]
    return PEAK_BF16_FLOPS[max(matches, key=len)] if matches else None


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this process has held: on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


class Clock:
    """Seconds of updates as the paper counts them, added up over resumes.

    `cpu_seconds` are the process's own, over all its threads: what else the machine does, or a
    pause, changes them little.
    """

    def __init__(
        self,
        training_seconds: float = 0.0,
        loop_seconds: float = 0.0,
        cpu_seconds: float = 0.0,
    ) -> None:
        self.training_seconds = training_seconds
        self.loop_seconds = loop_seconds
        self._earlier_cpu_seconds = cpu_seconds - time.process_time()
        self.updates_here = 0
        self._last = time.perf_counter()

    @property
    def cpu_seconds(self) -> float:
        """CPU time from the first update's preparation on."""
        return self._earlier_cpu_seconds + time.process_time()

    def start_update(self) -> None:
        """Call before the first micro-batch; what came before counts as loop time only."""
        now = time.perf_counter()
        self.loop_seconds += now - self._last
        self._last = now

    def end_update(self) -> float:
        """Call after the optimizer's step; returns the update's seconds."""
        now = time.perf_counter()
        seconds = now - self._last
        self.loop_seconds += seconds
        if self.updates_here >= WARMUP_UPDATES:
            self.training_seconds += seconds
        self.updates_here += 1
        self._last = now
        return seconds


class Trackers:
    """accelerate's trackers beside metrics.jsonl; a failing one is named once and left out.

    Args:
        accelerator: made with `log_with` for these trackers.
        names: e.g. ["tensorboard"].
        settings: the recipe, for their pages.
    """

    def __init__(self, accelerator: Any, names: Sequence[str], settings: dict[str, Any]) -> None:
        self.accelerator = accelerator
        self.active = bool(names)
        self._try("start", lambda: accelerator.init_trackers("doctab", config=_flat(settings)))

    def log(self, update: int, values: dict[str, Any]) -> None:
        """Report one update's numbers."""
        numbers = {k: v for k, v in _flat(values).items() if isinstance(v, int | float)}
        self._try("log", lambda: self.accelerator.log(numbers, step=update))

    def close(self) -> None:
        """Finish their files and connections."""
        self._try("finish", self.accelerator.end_training)

    def _try(self, what: str, action: Callable[[], None]) -> None:
        if not self.active:
            return
        try:
            action()
        except Exception as error:
            self.active = False
            warnings.warn(
                f"a tracker could not {what} ({type(error).__name__}: {error}); training goes on "
                "without it, metrics.jsonl is complete",
                stacklevel=2,
            )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys and plain values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, int | float | str) else str(value)
    return flat


class RunLog:
    """Writes metrics.jsonl and status.json, and shows progress; silent on all ranks but the main.

    Args:
        run_dir: the run folder.
        num_updates: length of the run.
        is_main: whether this process writes.
        first_update: where this start begins; later lines of an earlier start are cut off.
    """

    def __init__(self, run_dir: Path, num_updates: int, is_main: bool, first_update: int) -> None:
        self.path = run_dir / "metrics.jsonl"
        self.status_path = run_dir / "status.json"
        self.is_main = is_main
        self.num_updates = num_updates
        if is_main:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._truncate(first_update)
            self.file = self.path.open("a")
        self.bar = tqdm(
            total=num_updates,
            initial=first_update,
            unit="update",
            disable=not is_main,
            dynamic_ncols=True,
            file=sys.stderr,
        )

    def _truncate(self, first_update: int) -> None:
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text().splitlines():
            try:
                if json.loads(line)["update"] < first_update:
                    kept.append(line)
            except (ValueError, KeyError):
                continue  # a line that a kill cut short
        self.path.write_text("".join(f"{line}\n" for line in kept))

    def update(self, update: int, values: dict[str, Any]) -> None:
        """Record the metrics of one update (0-based)."""
        if self.is_main:
            self.file.write(json.dumps({"update": update, **values}) + "\n")
            self.file.flush()
            self.bar.set_postfix(
                loss=f"{values['loss']:.4f}", tokens_per_s=f"{values['tokens_per_second']:.3g}"
            )
            self.bar.update(1)

    def note(self, update: int, values: dict[str, Any]) -> None:
        """Record values that do not belong to every update, such as an evaluation."""
        if self.is_main:
            self.file.write(json.dumps({"update": update, **values}) + "\n")
            self.file.flush()

    def status(self, state: str, update: int, message: str = "") -> None:
        """Write status.json: state is running, done, stopped or failed."""
        if self.is_main:
            write_json(self.status_path, {"state": state, "update": update, "message": message})

    def say(self, message: str) -> None:
        """Print a line above the progress bar."""
        if self.is_main:
            tqdm.write(message, file=sys.stderr)

    def close(self) -> None:
        """Close the file and the bar."""
        self.bar.close()
        if self.is_main:
            self.file.close()
