"""One command that tells everything about a GPU in the minutes that it is at hand.

    python -m benchmarks.gpu_check --minutes 8 --out DIR [--chunk_set DIR]

Sections run in order of worth, each within a share of the time; one that fails or no longer fits is
noted with the reason, and the rest go on. The JSON is written anew after every section. On a
machine without a GPU everything runs in miniature, as a test of itself. docs/gpu_check.md says how
to run it on a machine without a network.
"""

import argparse
import datetime
import importlib.util
import json
import math
import re
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_correctness, gpu_runs, gpu_speed
from benchmarks.gpu_context import Context, Skip
from benchmarks.harness import machine, versions

FORMAT = 1
OPTIONAL_PACKAGES = ("numba", "yaml", "accelerate", "tiktoken", "pyarrow", "datasets", "evaluate")


@dataclass(frozen=True)
class Section:
    """A named part of the check and its share of the whole time."""

    name: str
    run: Callable[[Context], dict[str, Any]]
    share: float


def environment(context: Context) -> dict[str, Any]:
    """Section 1: the machine, and the two ceilings that everything is held against."""
    found: dict[str, Any] = {
        "missing_packages": [p for p in OPTIONAL_PACKAGES if importlib.util.find_spec(p) is None]
    }
    if context.device.type == "cuda":
        properties = torch.cuda.get_device_properties(context.device)
        found |= {
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": properties.total_memory / 2**30,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "shared_memory_per_block_bytes": getattr(
                properties, "shared_memory_per_block_optin", None
            ),
        }
    size = 128 if context.miniature else 8192
    a, b = (torch.randn(size, size, device=context.device, dtype=torch.bfloat16) for _ in range(2))
    seconds = context.seconds(lambda: a @ b, 20)
    context.matmul_flops = 2 * size**3 / seconds
    source = torch.randn((1 << 20) if context.miniature else (1 << 30), device=context.device)
    target = torch.empty_like(source)
    copy_seconds = context.seconds(lambda: target.copy_(source), 10)
    found |= {
        "matmul_size": size,
        "matmul_bf16_tflops": context.matmul_flops / 1e12,
        "copy_gb_per_s": 2 * source.numel() * source.element_size() / copy_seconds / 1e9,
    }
    return found


SECTIONS = (
    Section("environment", environment, 0.04),
    Section("correctness", gpu_correctness.run, 0.22),
    Section("updates", gpu_speed.updates, 0.40),
    Section("lookup", gpu_speed.lookup, 0.04),
    Section("generation", gpu_speed.generation, 0.10),
    Section("runs", gpu_runs.run, 0.20),
)


def check(
    minutes: float, out: Path, chunk_set: Path | None = None, only: list[str] | None = None
) -> tuple[dict[str, Any], Path]:
    """Run all sections; returns what was written, and where.

    Args:
        minutes: for everything; a section starts only if time is left.
        out: folder for `gpu_check_<device>.json` and the records of section 5.
        chunk_set: for the short runs; without one they are skipped (in miniature they make one up).
        only: names of sections to run; all by default.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    name = torch.cuda.get_device_name() if on_gpu else "cpu miniature"
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"gpu_check_{re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_')}.json"
    report: dict[str, Any] = {
        "format": FORMAT,
        "device": name,
        "miniature": not on_gpu,
        "minutes": minutes,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "sections": [],
    }
    began = time.perf_counter()
    context = Context(device, miniature=not on_gpu, chunk_set=chunk_set, out=out)
    left_share = sum(section.share for section in SECTIONS)
    for section in SECTIONS:
        left = minutes * 60 - (time.perf_counter() - began)
        budget = left * section.share / left_share
        left_share -= section.share
        if only is not None and section.name not in only:
            continue
        report["sections"].append(_run_section(section, context, budget, left))
        _write(report, path)
        print(_line(report["sections"][-1]), flush=True)
    report["seconds"] = time.perf_counter() - began
    _write(report, path)
    return report, path


def _write(report: dict[str, Any], path: Path) -> None:
    """As JSON; a figure that is not a number, which a broken kernel gives, is written as null."""
    text = json.dumps(_finite(report), indent=1, allow_nan=False, default=str)
    path.write_text(text + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _run_section(section: Section, context: Context, budget: float, left: float) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": section.name, "status": "ok", "seconds": 0.0, "results": {}}
    if left < 5:
        return entry | {"status": "skipped", "message": f"only {left:.0f} s left"}
    start = time.perf_counter()
    context.deadline = start + budget
    context.results = entry["results"]
    try:
        entry["results"] |= section.run(context)
    except Skip as reason:
        entry |= {"status": "skipped", "message": str(reason)}
    except Exception as error:
        lines = traceback.format_exc().splitlines()[-12:]
        entry |= {"status": "failed", "message": f"{type(error).__name__}: {error}", "trace": lines}
    entry["seconds"] = time.perf_counter() - start
    if context.device.type == "cuda":
        torch.cuda.empty_cache()
    return entry


def _line(entry: dict[str, Any]) -> str:
    message = f": {entry['message']}" if "message" in entry else ""
    return f"{entry['name']:14} {entry['status']:8} {entry['seconds']:7.1f} s{message}"


def main(argv: list[str] | None = None) -> int:
    """Command line; exits 0 if no section failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="time for everything (8)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON")
    parser.add_argument("--chunk-set", "--chunk_set", type=Path, help="for the short runs")
    parser.add_argument(
        "--only", nargs="+", choices=[s.name for s in SECTIONS], help="run these sections alone"
    )
    arguments = parser.parse_args(argv)
    report, path = check(arguments.minutes, arguments.out, arguments.chunk_set, arguments.only)
    failed = [s["name"] for s in report["sections"] if s["status"] == "failed"]
    print(f"wrote {path}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
