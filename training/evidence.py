"""The files of a study that its tables and figures are made from, without weights or text."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import yaml

from training.checkpoint import write_json

_FOLDERS = ("records", "mixture", "attention")
_METRICS = ("update", "loss", "bpb", "update_seconds")


def copy_evidence(runs: Sequence[Path], out: Path) -> int:
    """Copy what `python -m evaluation.report` reads from each run to `out/NAME`.

    Paths of this machine stay behind, and metrics.jsonl keeps losses and times alone. A model card
    becomes `card.md`.

    Args:
        runs: run folders.
        out: folder to write; what it held of these runs is replaced.

    Returns:
        Number of files written.
    """
    for run in runs:
        target = out / run.name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        recipe = yaml.safe_load((run / "config.yaml").read_text())
        recipe["output_dir"] = recipe["data"]["chunk_set"] = None
        (target / "config.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
        write_json(target / "results.json", json.loads((run / "results.json").read_text()))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        kept = [{k: v for k, v in line.items() if k in _METRICS} for line in lines]
        (target / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
        if (run / "final" / "README.md").is_file():
            card = (run / "final" / "README.md").read_text()
            (target / "card.md").write_text(card.replace(str(run), f"runs/{run.name}"))
        for name in _FOLDERS:
            if (run / name).is_dir():
                shutil.copytree(run / name, target / name)
    return sum(file.is_file() for file in out.rglob("*"))
