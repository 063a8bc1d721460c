"""One tiny vocabulary, one tiny set of Parquet shards in the ClimbMix schema, one built set."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_scripts.build import main as build
from data_scripts.chunk_set import ChunkSet
from data_scripts.tokenizer import BytePairTokenizer, train_tokenizer
from tests.hub_fixtures import hub  # noqa: F401  a fixture of this folder's tests

CHUNK_LENGTH = 64
VOCAB_SIZE = 384
_WORDS = [
    *("table", "document", "lookup", "token", "order", "candidate", "distance", "the", "a", "of"),
    *(
        "to",
        "in",
        "chunk",
        "row",
        "model",
        "sees",
        "naïve",
        "Straße",
        "你好",
        "λ",
        "=",
        "12",
        "3456",
    ),
    *("(x):", "return", "self.value\n\n", "if", "not", "None,", "{}", "[]\t;", "ü"),
]


def make_text(seed: int, num_words: int) -> str:
    """Repetitive text that no other seed shares a beginning with."""
    generator = random.Random(seed)
    names = [f"w{generator.randrange(10**6)}" for _ in range(12)]
    return " ".join(generator.choice(_WORDS + names) for _ in range(num_words))


def write_shard(path: Path, texts: list[str | None], column: str = "text") -> Path:
    pq.write_table(pa.table({column: pa.array(texts, pa.string())}), path, row_group_size=3)
    return path


@pytest.fixture(scope="session")
def tokenizer() -> BytePairTokenizer:
    return train_tokenizer((make_text(seed, 400) for seed in range(40)), VOCAB_SIZE)


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three training shards and one of each evaluation split, short and long documents mixed."""
    folder = tmp_path_factory.mktemp("shards")
    for i in range(3):
        texts: list[str | None] = [make_text(100 * i + j, 5 + 60 * (j % 4)) for j in range(9)]
        write_shard(folder / f"shard_{i:05d}.parquet", [*texts, None, ""])
    copied = make_text(3, 185)  # a training document, at the start of another
    write_shard(
        folder / "dev.parquet", [make_text(900 + j, 150) for j in range(5)] + [copied + " more"]
    )
    write_shard(
        folder / "confirmation.parquet",
        [make_text(902, 150) + " again", *(make_text(950 + j, 120) for j in range(4))],
    )
    return folder


def build_arguments(shards: Path, out: Path) -> list[str]:
    return [
        *("parquet", "--out", str(out), "--chunk-length", str(CHUNK_LENGTH)),
        *("--vocab_size", str(VOCAB_SIZE), "--split", f"train={shards}/shard_*.parquet"),
        *(f"dev={shards}/dev.parquet", f"confirmation={shards}/confirmation.parquet"),
        *("--confirmation", "confirmation"),
    ]


@pytest.fixture(scope="session")
def chunk_set(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> ChunkSet:
    out = tmp_path_factory.mktemp("built") / "set"
    build(build_arguments(shards, out))
    return ChunkSet.open(out, verify=True)
