"""Alternating runs of rivals on one machine: medians, spread and a ratio, as JSON.

A time alone says little: machines differ and are shared. Each benchmark therefore runs ours and
its peers in turn, round after round, and reports the ratio of medians. Before anything is timed,
the results are checked to be equal, where the peers follow the same rule.

    result = compare(
        "lookup",
        question="How much faster than four dictionaries is the lookup?",
        prediction="50x or more",
        cases={"ours": run_ours, "dictionaries": run_dictionaries},
        check=lambda outputs: assert_equal(outputs["ours"], outputs["dictionaries"]),
    )
    result.save()
"""

import datetime
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "accelerate", "numpy", "numba", "datasets", "evaluate")


@dataclass
class Case:
    """What one rival took, a value a round: seconds, unless the result says otherwise."""

    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Interquartile range over the median: 0.05 means that half the rounds lie within 5%."""
        if len(self.values) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.values, n=4)
        return (high - low) / self.median


@dataclass
class Result:
    """One benchmark's outcome.

    Attributes:
        name: of the benchmark, and of its file.
        question: what it asks.
        prediction: what was expected before it was measured.
        target: the ratio to reach, if there is one; or one for each peer that has one.
        ours: the case that the others are divided by.
        cases: name -> seconds.
        facts: sizes and whatever else belongs to the numbers.
        unit: of the cases' values.
    """

    name: str
    question: str
    prediction: str
    target: float | dict[str, float] | None
    ours: str
    cases: dict[str, Case]
    facts: dict[str, Any] = field(default_factory=dict)
    unit: str = "seconds"

    def ratios(self) -> dict[str, float]:
        """How many times as long as ours each peer took (ratio of medians)."""
        base = self.cases[self.ours].median
        return {name: c.median / base for name, c in self.cases.items() if name != self.ours}

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "name": self.name,
            "question": self.question,
            "prediction": self.prediction,
            "target": self.target,
            "ours": self.ours,
            "ratios": self.ratios(),
            "cases": {
                name: {"median": c.median, "spread": c.spread, "values": c.values}
                for name, c in self.cases.items()
            },
            "unit": self.unit,
            "facts": self.facts,
            "machine": machine(),
            "versions": versions(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }

    def text(self) -> str:
        """A few lines for people."""
        lines = [f"{self.name}: {self.question}", f"  predicted: {self.prediction}"]
        for name, case in self.cases.items():
            times = "" if name == self.ours else f"   {self.ratios()[name]:.2f}x {self.ours}"
            lines.append(
                f"  {name:28} {case.median:14,.6g} {self.unit}  +-{case.spread:.0%}{times}"
            )
        return "\n".join(lines)

    def save(self, folder: Path = RESULTS) -> Path:
        """Write `NAME.json` and print the text."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        print(self.text(), flush=True)
        return path


def compare(
    name: str,
    question: str,
    prediction: str,
    cases: Mapping[str, Callable[[], Any]],
    check: Callable[[dict[str, Any]], None] | None = None,
    ours: str | None = None,
    target: float | dict[str, float] | None = None,
    rounds: int = 7,
    min_seconds: float = 0.05,
    facts: dict[str, Any] | None = None,
) -> Result:
    """Time the cases in turn, `rounds` times, after checking that they agree.

    Args:
        name: of the benchmark.
        question: what is asked.
        prediction: written down before the first run.
        cases: name -> function to time; it returns what `check` compares.
        check: raises if the outputs (name -> value) are not equal; None where peers follow other
            rules.
        ours: the case that the ratios are relative to; the first by default.
        target: ratio to reach, or one for each peer that has one.
        rounds: how often each case is timed.
        min_seconds: a case is repeated inside a round until it takes at least this long.
        facts: sizes, for the record.

    Returns:
        The result; each value is the seconds of one call.
    """
    outputs = {case: function() for case, function in cases.items()}  # also the warm-up
    if check is not None:
        check(outputs)
    del outputs
    calls = {case: _calls_for(function, min_seconds) for case, function in cases.items()}
    measured = {case: Case() for case in cases}
    gc.collect()
    gc.disable()
    try:
        for round_number in range(rounds):
            order = list(cases) if round_number % 2 == 0 else list(reversed(cases))
            for case in order:
                start = time.perf_counter()
                for _ in range(calls[case]):
                    cases[case]()
                measured[case].values.append((time.perf_counter() - start) / calls[case])
    finally:
        gc.enable()
    return Result(
        name, question, prediction, target, ours or next(iter(cases)), measured, facts or {}
    )


def _calls_for(function: Callable[[], Any], min_seconds: float) -> int:
    start = time.perf_counter()
    function()
    once = time.perf_counter() - start
    return max(1, round(min_seconds / max(once, 1e-9)))


def others_cpu_seconds() -> float | None:
    """Processor seconds that other processes have used since the machine started; None if unknown.

    What they use while a benchmark runs says how far its times can be trusted.
    """
    try:
        line = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    user, nice, system = (int(ticks) for ticks in line[1:4])
    own = sum(os.times()[:4])  # this process and the children that it has waited for
    return (user + nice + system) / os.sysconf("SC_CLK_TCK") - own


def machine() -> dict[str, Any]:
    """What this ran on."""
    facts: dict[str, Any] = {
        "processor": _processor_name(),
        "num_cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "system": platform.platform(terse=True),
    }
    try:
        import torch

        facts["num_threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            facts["device"] = torch.cuda.get_device_name()
            facts["device_memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
    except ImportError:
        pass
    return facts


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, where installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


__all__ = ["Case", "Result", "compare", "machine", "others_cpu_seconds", "versions"]
