"""A small chunk set of repetitive text, and run folders with tiny models."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from data_scripts.build import main as build
from data_scripts.chunk_set import ChunkSet

CHUNK_LENGTH = 64
ROW_LENGTH = 16
VOCAB_SIZE = 270


def make_text(seed: int, num_words: int) -> str:
    generator = random.Random(seed)
    words = [f"{generator.choice('abcdefgh')}{i}" for i in range(20)]
    return " ".join(generator.choice(words) for _ in range(num_words))


@pytest.fixture(scope="session")
def chunk_set(tmp_path_factory: pytest.TempPathFactory) -> ChunkSet:
    """Splits train, dev (of several chunks a document, with remainders) and confirmation."""
    folder = tmp_path_factory.mktemp("text")
    for split, seeds, num_words in (("train", 8, 90), ("dev", 5, 110), ("confirm", 2, 80)):
        for seed in range(seeds):
            text = make_text(len(split) * 100 + seed, num_words + 17 * seed)
            (folder / f"{split}_{seed}.txt").write_text(text)
    out = folder / "set"
    splits = [f"{split}={folder}/{split}_*.txt" for split in ("train", "dev", "confirm")]
    build(
        [
            *("text", "--out", str(out), "--split", *splits, "--confirmation", "confirm"),
            *("--chunk_length", str(CHUNK_LENGTH), "--vocab_size", str(VOCAB_SIZE)),
        ]
    )
    return ChunkSet.open(out)


@pytest.fixture
def make_run(tmp_path: Path, tiny_model, chunk_set: ChunkSet) -> Callable[..., Path]:
    """A function from a name, model fields and recipe fields to a finished run folder."""

    def make(
        name: str, seed: int = 44, baseline: str | None = None, data: dict | None = None, **changes
    ) -> Path:
        run = tmp_path / f"{name}_s{seed}"
        fields = {
            "vocab_size": chunk_set.vocab_size,
            "bos_token_id": chunk_set.bos_token_id,
            "max_position_embeddings": ROW_LENGTH,
            "table_reach": CHUNK_LENGTH,
            **changes,
        }
        tiny_model(seed=seed, **fields).save_pretrained(run / "final")
        recipe = {"name": name, "seed": seed, "baseline": baseline, "data": data or {}}
        (run / "config.yaml").write_text(yaml.safe_dump(recipe))
        flops = 1e6 if fields["max_position_embeddings"] == ROW_LENGTH else 2e6
        (run / "results.json").write_text(json.dumps({"flops_per_token": flops}))
        return run

    return make


@pytest.fixture
def own_set(chunk_set: ChunkSet, tmp_path: Path) -> ChunkSet:
    """The same chunk set in a folder of the test's own, where a ledger may be written."""
    shutil.copytree(chunk_set.path, tmp_path / "own_set")
    return ChunkSet.open(tmp_path / "own_set")


@pytest.fixture(scope="session")
def packed_set(tmp_path_factory: pytest.TempPathFactory) -> ChunkSet:
    """Splits train and dev as packed rows of 64 targets: short documents, BOS between them."""
    folder = tmp_path_factory.mktemp("packed")
    for split, num_documents in (("train", 30), ("dev", 40)):
        texts = [make_text(1000 + len(split) * 100 + i, 3 + i % 17) for i in range(num_documents)]
        pq.write_table(pa.table({"text": texts}), folder / f"{split}.parquet")
    out = folder / "set"
    splits = [f"{split}={folder}/{split}.parquet" for split in ("train", "dev")]
    sizes = ["--chunk_length", str(CHUNK_LENGTH), "--vocab_size", str(VOCAB_SIZE)]
    build(["packed", "--out", str(out), "--split", *splits, *sizes])
    return ChunkSet.open(out)
