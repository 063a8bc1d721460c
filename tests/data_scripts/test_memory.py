"""Peak memory of a build does not grow with the number of shards."""

from __future__ import annotations

import base64
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_scripts.chunk_set import ChunkSet
from tests.data_scripts.conftest import make_text, write_shard

# Not getrusage: its peak starts at that of the process which started this one.
MEASURE = """
import pathlib, re, sys
from data_scripts.build import main
main(sys.argv[1:])
status = pathlib.Path("/proc/self/status").read_text()
print(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1])
"""


def peak_kib(shards: list[Path], tokenizer: Path, out: Path) -> int:
    """The peak resident memory of a build in a process of its own."""
    pattern = shards[0] if len(shards) == 1 else shards[0].parent / "shard_*.parquet"
    arguments = [
        "parquet",
        "--out",
        str(out),
        "--tokenizer",
        str(tokenizer),
        "--chunk_length",
        "512",
    ]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments, "--split", f"train={pattern}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout.split()[-1])


@pytest.mark.slow
def test_peak_memory_is_flat_from_1_to_20_shards(tmp_path):
    tokenizer = tmp_path / "bytes.tiktoken"
    lines = [f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256)]
    tokenizer.write_text("".join(lines))
    base = make_text(0, 40_000)
    generator = np.random.default_rng(0)
    shards = []
    for i in range(20):
        lengths = [*generator.integers(20_000, 60_000, 45), *generator.integers(50, 400, 800)]
        starts = generator.integers(0, len(base) - 60_000, len(lengths))
        texts = [f"{i} {s} {base[s : s + n]}" for s, n in zip(starts, lengths, strict=True)]
        shards.append(write_shard(tmp_path / f"shard_{i:05d}.parquet", texts))
    one = peak_kib(shards[:1], tokenizer, tmp_path / "one")
    twenty = peak_kib(shards, tokenizer, tmp_path / "twenty")
    stored = sum(path.stat().st_size for path in (tmp_path / "twenty").rglob("*.bin")) // 1024
    assert stored > 35_000
    assert len(ChunkSet.open(tmp_path / "twenty").train_chunks()) > 15 * len(
        ChunkSet.open(tmp_path / "one").train_chunks()
    )
    print(f"peak memory {one:,} KiB on one shard, {twenty:,} on twenty; {stored:,} stored")
    # Lists of documents may grow, text and tokens may not: a fifth of what is stored.
    assert twenty - one < stored / 5
