"""Run the CPU benchmarks: `python -m benchmarks [NAME...]`; results go to benchmarks/results/."""

import argparse
import importlib
import pkgutil
import sys
import time
from pathlib import Path


def names() -> list[str]:
    """Benchmarks in this folder: every module `bench_NAME` has a function `run()`."""
    modules = (m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return sorted(name.removeprefix("bench_") for name in modules if name.startswith("bench_"))


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(names())}")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(names()))
    if unknown:
        print(f"error: no benchmark {unknown[0]!r}; there are {', '.join(names())}")
        return 2
    began = time.perf_counter()
    for name in arguments.names or names():
        for result in importlib.import_module(f"benchmarks.bench_{name}").run():
            result.save()
    print(f"all in {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
