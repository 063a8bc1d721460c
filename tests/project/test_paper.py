"""`make paper` in miniature: every arm, from shards on a (test) Hub to a report without gaps."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.data_scripts.conftest import make_text, write_shard
from tests.hub_fixtures import hub  # noqa: F401
from training.study import Study
from training.study_drafts import arms_of
from training.study_plan import read_study

ROOT = Path(__file__).parents[2]
REPO = "karpathy/small"
NAMES = "shard_{:05d}.parquet"
COMMON = {"repo_id": REPO, "file": NAMES}
TOKENIZER = {"shards": [[0, 1]], "vocab_size": 384, "characters": 1_000_000}
DOCUMENTS = {"kind": "documents", "overlaps": "list"}
LONG = COMMON | {
    "chunk_length": 64,
    "min_tokens": 65,
    "tokenizer": TOKENIZER,
    "splits": {
        "train": {"shards": [[2, 5]], "kind": "chunks"},
        "dev_val": {"shards": [[8, 8]], **DOCUMENTS},
        "dev_heldout": {"shards": [[9, 9]], **DOCUMENTS},
        "confirmation": {
            "shards": [[6, 7]],
            "kind": "documents",
            "overlaps": "drop",
            "confirmation": True,
        },
    },
}
PACKED = COMMON | {
    "chunk_length": 16,
    "min_tokens": 2,
    "tokenizer": TOKENIZER,
    "splits": {
        "train": {"shards": [[0, 1]], "kind": "chunks", "content": "packed"},
        "val": {"shards": [[8, 8]], "content": "packed", "max_chunks": 60, **DOCUMENTS},
        "heldout": {"shards": [[9, 9]], "content": "packed", "max_chunks": 60, **DOCUMENTS},
    },
}
# The paper's sizes, and what they are in miniature; names, layouts and arms stay.
LENGTHS = {8192: 64, 2048: 16, 1024: 8, 512: 4}
WIDTHS = {512: 64, 384: 48, 768: 96}
SIZES = {
    "max_position_embeddings": LENGTHS,
    "short_window": LENGTHS,
    "query_scaling_base": LENGTHS,
    "chunk_length": LENGTHS,
    "hidden_size": WIDTHS,
    "head_dim": {128: 16},
    "vocab_size": {8192: 384},
    "bigram_rows": {65536: 512},
    "num_updates": {953: 16},
    "tokens_per_update": {2**19: 256},
    "tokens_per_micro_batch": {2**17: 128},
}


# Tables behind the numbers of the paper's text.
TEXT = (
    *("matched_flops", "visibility", "cells", "reach", "reach.cells", "formats.gain"),
    *("formats.layouts", "formats.ranking", "width.versus", "concentration", "overlaps"),
    *("attention.dev_val", "learned_gains", "temperature.gain", "dropout.gain", "other_fields"),
    *("mixture", "step_times"),
)


def shrink(value, key=None):
    if isinstance(value, dict):
        return {k: shrink(v, k) for k, v in value.items()}
    return SIZES[key][value] if key in SIZES else value


def write_miniature(folder: Path) -> Path:
    """The paper's study with every recipe, list and length small."""
    recipes = folder / "recipes"
    recipes.mkdir()
    for path in (ROOT / "training" / "recipes" / "paper").glob("*.yaml"):
        (recipes / path.name).write_text(yaml.safe_dump(shrink(yaml.safe_load(path.read_text()))))
    plan = yaml.safe_load((ROOT / "training" / "studies" / "paper.yaml").read_text())
    plan["recipes"] = str(recipes)
    for name, shards in (("chunk_set", LONG), ("packed_chunk_set", PACKED)):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(shards))
        plan["data"][name] = [f"{command} --manifest {path}" for command in plan["data"][name]]
    draft = (ROOT / plan["registration"]).read_text()
    path = folder / "registration.yaml"
    path.write_text(draft.replace("stride4096-", f"stride{LENGTHS[8192] // 2}-"))
    plan["registration"] = str(path)
    path = folder / "miniature.yaml"
    path.write_text(yaml.safe_dump(plan))
    return path


def run(study: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "training.study", str(study), "--out", str(out), *more]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=1500, env=os.environ, check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_whole_paper_in_miniature(hub, tmp_path):  # noqa: F811
    shards = {}
    for i in range(10):
        words = [5 + 60 * (j % 4) for j in range(9)]
        texts = [make_text(100 * i + j, count) for j, count in enumerate(words)]
        if i == 8:  # one development document begins like a training document
            texts.append(make_text(203, words[3]) + " and more")
        shards[NAMES.format(i)] = write_shard(tmp_path / "shard.parquet", texts).read_bytes()
    hub.add_repo(REPO, shards)
    study, out = write_miniature(tmp_path), tmp_path / "paper"

    asked = run(study, out)
    assert asked.returncode == 2
    assert re.search(r"32 runs to train: about \d+\.\d hours on .*, then scoring; ", asked.stdout)
    assert "12.0 GB to download" in asked.stdout
    assert "--yes" in asked.stderr
    assert not out.exists()

    first = run(study, out, "--yes", "--jobs", "2")
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    report = (out / "report" / "report.md").read_text()

    # No row and no figure is missing: wherever the paper has a number, ours stands beside it.
    files = [out / "report" / f"table_{number}.csv" for number in range(1, 8)]
    files += sorted((out / "report").glob("text.*.csv"))
    assert {f"text.{name}.csv" for name in TEXT} <= {file.name for file in files}
    for file in files:
        (header, *rows) = csv.reader(file.open())
        assert rows, file.name
        for row in rows:
            for name, cell in zip(header, row, strict=True):
                assert not re.match(r"— / [^—]", cell), (file.name, row[0], name, cell)
    for name in ("figure_1", "figure_2", "learning_curves"):
        assert (out / "report" / f"{name}.png").stat().st_size > 10_000
    assert not re.findall("^Missing.*", report, re.MULTILINE)

    # Equal targets for every long arm, one scoring of the confirmation set for each checkpoint.
    results = [json.loads(p.read_text()) for p in (out / "runs").glob("*/results.json")]
    long = [r for r in results if not r["name"].startswith("packed")]
    assert len(long) == 30
    assert len({r["target_sha256"] for r in long}) == 1
    ledger = (out / "chunk_set" / "confirmation_ledger.jsonl").read_text().splitlines()
    events = [json.loads(line)["event"] for line in ledger]
    assert (events.count("registered"), events.count("scored")) == (1, 30)
    confirmed = json.loads((out / "confirmation.json").read_text())
    assert [c["name"] for c in confirmed["contrasts"]] == ["H1", "H2", "H3", "H4", "H5"]
    assert [rule["name"] for rule in confirmed["rules"] if rule["value"] is None] == []
    assert len(confirmed["rules"]) == 4

    for arm in ("b_table_s44", "lg512_table_s44"):
        card = (out / "evidence" / arm / "card.md").read_text()
        assert "model-index:" in card
        assert "confirmation" in card

    # The report can be made again from the evidence, which holds no weights and no path.
    arms = Study(read_study(study), out).arms  # the order of the rows is that of the runs
    evidence = [out / "evidence" / arm.name for arm in arms]
    assert not list((out / "evidence").rglob("*.safetensors"))
    for file in (out / "evidence").rglob("*"):
        assert not (file.is_file() and str(tmp_path).encode() in file.read_bytes()), file
    made = subprocess.run(
        [
            *(sys.executable, "-m", "evaluation.report", *evidence, "--quiet"),
            *("--show_violations", "--out", tmp_path / "again"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    for number in range(1, 8):
        name = f"table_{number}.csv"
        assert (tmp_path / "again" / name).read_text() == (out / "report" / name).read_text()

    # A second call reuses everything.
    before = {p: p.stat().st_mtime_ns for p in (out / "runs").glob("*/results.json")}
    second = run(study, out, "--yes", "--jobs", "2")
    assert second.returncode == 0, second.stderr[-3000:]
    assert second.stdout.startswith("The document table at the paper's scale\n0 runs to train")
    assert second.stdout.count("reusing") == 2 + 32 + 2  # chunk sets, runs, registration
    assert {p: p.stat().st_mtime_ns for p in (out / "runs").glob("*/results.json")} == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": {"core": {"data": "other", "sets": [], "arms": {}}}}, "names the chunk set"),
        ({"groups": {"core": {"data": "chunk_set", "set": []}}}, "arms must be a mapping"),
        ({"detail": {"seeds": 44}}, "seeds is not a key; known: seed"),
        ({"title": None, "colour": 1}, "colour is not a key"),
        (
            {"groups": {"core": {"data": "chunk_set", "sets": [], "arms": {"bb": [44]}}}},
            "no recipe .*bb.yaml",
        ),
    ],
)
def test_bad_studies_are_refused(tmp_path, change, message):
    plan = yaml.safe_load((ROOT / "training" / "studies" / "stdlib.yaml").read_text())
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(plan | change))
    with pytest.raises(ValueError, match=message):
        read_study(path)


def test_every_shipped_study_can_be_read():
    for path in (ROOT / "training" / "studies").glob("*.yaml"):
        if path.name.endswith(".registration.yaml"):
            continue
        plan = read_study(path)
        arms = {(a, s) for g in plan.groups.values() for a, seeds in g.arms.items() for s in seeds}
        (draft,) = plan.registration
        assert arms_of(draft) <= arms


def test_a_study_of_documents_asks_for_them(tmp_path):
    found = run(ROOT / "training" / "studies" / "documents.yaml", tmp_path / "out", "--yes")
    assert found.returncode == 2
    assert "give their folder with --corpus DIR" in found.stderr
