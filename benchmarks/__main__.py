"""Run the CPU benchmarks: `python -m benchmarks [NAME...]`.

Results go to benchmarks/results/, and the table in benchmarks/README.md is made from them anew.
"""

import argparse
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.harness import Result, others_cpu_seconds


def names() -> list[str]:
    """Benchmarks in this folder: every module `bench_NAME` has a function `run()`."""
    modules = (m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return sorted(name.removeprefix("bench_") for name in modules if name.startswith("bench_"))


README = Path(__file__).with_name("README.md")
RESULTS = Path(__file__).with_name("results")
BEGIN, END = "<!-- made by python -m benchmarks -->", "<!-- end -->"


def table() -> str:
    """Markdown of all committed results: question, peer, prediction, ratio, date, machine."""
    lines = [
        "| benchmark | question | peer | predicted | ratio | target | date, machine |",
        "| :-- | :-- | :-- | :-- | --: | --: | :-- |",
    ]
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        if "ratios" not in result:
            continue  # a GPU check
        machine = f"{result['date'][:10]}, {result['machine']['processor']}"
        for peer, ratio in result["ratios"].items():
            target = result["target"]
            target = target.get(peer) if isinstance(target, dict) else target
            target = "" if target is None else f"{target:g}x"
            cells = (
                f"[{result['name']}](results/{path.name})", result["question"], peer,
                result["prediction"], f"{ratio:.2f}x", target, machine,
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def update_readme() -> None:
    """Put today's table between the markers of the README."""
    text = README.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    README.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


def noting_others(results: Iterable[Result]) -> Iterator[Result]:
    """Add to each result's facts the share of the machine's processor time that others took."""
    started, others = time.perf_counter(), others_cpu_seconds()
    for result in results:
        elapsed, now = time.perf_counter() - started, others_cpu_seconds()
        if others is not None and now is not None:
            share = (now - others) / (elapsed * (os.cpu_count() or 1))
            result.facts["others_cpu_share"] = round(max(0.0, share), 3)
        yield result
        started, others = time.perf_counter(), others_cpu_seconds()


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(names())}")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(names()))
    if unknown:
        print(f"error: no benchmark {unknown[0]!r}; there are {', '.join(names())}")
        return 2
    chosen = arguments.names or names()
    if len(chosen) == 1:
        module = importlib.import_module(f"benchmarks.bench_{chosen[0]}")
        for result in noting_others(module.run()):
            result.save()
            update_readme()
        return 0
    began = time.perf_counter()
    for name in chosen:
        # A process each: threads, allocator settings and caches of one would be the next one's.
        code = subprocess.run([sys.executable, "-m", "benchmarks", name], check=False).returncode
        if code:
            return code
    print(f"all in {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
