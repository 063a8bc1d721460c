"""Text to chunks against the reference's way, on shards with ClimbMix's mix of lengths.

The reference's way tokenises every document and then looks at its length; `build parquet` leaves
out what has too few bytes, n bytes holding at most n tokens. Ours is timed as the whole command's
work: reading, tokenising, hashing, the permutation, the files on disk.

The text is Python's own standard library, cut into documents whose lengths follow a log-normal
distribution: a mean of 700 tokens, and 0.4% of the documents of 8,193 tokens or more, as in a shard
of ClimbMix (322 of about 80,000).

With a checkout of autoresearch, its prepare.py too: training the tokenizer, and packing rows.
"""

from __future__ import annotations

import contextlib
import functools
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import peers
from benchmarks.harness import Result, compare
from data_scripts.assemble import BuildPlan, SplitPlan, build_chunk_set
from data_scripts.chunk_set import ChunkSet
from data_scripts.chunking import DocumentRules, training_order
from data_scripts.packing import BATCH_DOCUMENTS, pack_rows
from data_scripts.sources import parquet_shards, python_files, standard_library
from data_scripts.tokenizer import BytePairTokenizer, train_tokenizer

CHUNK_LENGTH, VOCAB_SIZE = 8192, 8192
NUM_SHARDS, SHARD_BYTES = 8, 12_000_000
MEMORY_SHARDS = 20
NUM_PACKED_ROWS, PACKED_LENGTH = 1024, 2048
_BYTES_PER_TOKEN = 3.8  # ClimbMix's, which turns lengths in tokens into lengths in bytes
_LOG_MEAN, _LOG_DEVIATION = 5.83, 1.2  # of the lengths in tokens
# Not getrusage: its peak starts at that of the process which started this one.
_PEAK_MEMORY = """
import pathlib, re, sys
from data_scripts.build import main
main(sys.argv[1:])
status = pathlib.Path("/proc/self/status").read_text()
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024)
"""


def write_shards(folder: Path, num_shards: int, shard_bytes: int, seed: int = 0) -> list[Path]:
    """Parquet shards in the ClimbMix schema: seeded slices of the standard library."""
    root = standard_library()
    files = python_files(root, 2_000)
    text = "".join((root / name).read_text(encoding="utf-8") for name in files)
    generator = np.random.default_rng(seed)
    paths = []
    for number in range(num_shards):
        documents: list[str] = []
        num_bytes = 0
        while num_bytes < shard_bytes:
            length = int(generator.lognormal(_LOG_MEAN, _LOG_DEVIATION) * _BYTES_PER_TOKEN) + 1
            start = int(generator.integers(max(1, len(text) - length)))
            documents.append(text[start : start + length])
            num_bytes += len(documents[-1])
        paths.append(folder / f"shard_{number:05d}.parquet")
        pq.write_table(pa.table({"text": documents}), paths[-1], row_group_size=1024)
    return paths


def reference_build(
    paths: list[Path], tokenizer: BytePairTokenizer, num_threads: int
) -> np.ndarray:
    """Tokenise every document in batches of 128, keep the long ones, cut and permute.

    Returns:
        uint16 [num_chunks, CHUNK_LENGTH].
    """
    chunks = []
    for path in paths:
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            texts = file.read_row_group(group).column("text").to_pylist()
            for start in range(0, len(texts), 128):
                batch = tokenizer.encoding.encode_ordinary_batch(
                    texts[start : start + 128], num_threads=num_threads
                )
                for ids in batch:
                    for begin in range(0, len(ids) - CHUNK_LENGTH + 1, CHUNK_LENGTH):
                        chunks.append(np.array(ids[begin : begin + CHUNK_LENGTH], np.uint16))
    return np.stack(chunks)[training_order(len(chunks), 0)]


def our_build(paths: list[Path], tokenizer: BytePairTokenizer, num_processes: int) -> np.ndarray:
    """The same chunks by `build parquet`, read back from the finished set."""
    with tempfile.TemporaryDirectory() as folder:
        shards = parquet_shards(str(paths[0].parent / "*.parquet"))
        plan = BuildPlan(
            "parquet",
            [SplitPlan("train", shards, "chunks")],
            DocumentRules(CHUNK_LENGTH, CHUNK_LENGTH + 1),
        )
        out = Path(folder) / "set"
        build_chunk_set(out, plan, tokenizer, num_processes)
        return np.array(ChunkSet.open(out).train_chunks())


def peak_memory_bytes(paths: list[Path], tokenizer_path: Path) -> int:
    """Peak resident memory of `build parquet` on some shards, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        links = Path(folder) / "shards"
        links.mkdir()
        for path in paths:
            (links / path.name).symlink_to(path)
        arguments = ["parquet", "--out", f"{folder}/set", "--tokenizer", str(tokenizer_path)]
        done = subprocess.run(
            [sys.executable, "-c", _PEAK_MEMORY, *arguments, "--split", f"train={links}/*.parquet"],
            capture_output=True,
            text=True,
            check=True,
        )
    return int(done.stdout.split()[-1])


def _same_chunks(outputs: dict[str, Any]) -> None:
    expected, *others = outputs.values()
    for found in others:
        np.testing.assert_array_equal(found, expected)


def run() -> Iterator[Result]:
    """One core, then two; peak memory from 1 shard to 20 is among the facts of the first."""
    with tempfile.TemporaryDirectory() as folder:
        paths = write_shards(Path(folder), MEMORY_SHARDS, SHARD_BYTES)
        texts = pq.read_table(paths[0])["text"].to_pylist()
        tokenizer = train_tokenizer(texts, VOCAB_SIZE)
        tokenizer.save(Path(folder) / "tokenizer")
        memory = {
            f"peak_memory_bytes_{number}_shards": peak_memory_bytes(
                paths[:number], Path(folder) / "tokenizer"
            )
            for number in (1, MEMORY_SHARDS)
        }
        timed = Path(folder) / "timed"
        timed.mkdir()
        paths = [path.rename(timed / path.name) for path in paths[:NUM_SHARDS]]
        num_bytes = sum(
            len(text.encode()) for path in paths for text in pq.read_table(path)["text"].to_pylist()
        )
        yield _compare(paths, tokenizer, 1, {"num_bytes": num_bytes, **memory})
        yield _compare(paths, tokenizer, 2, {"num_bytes": num_bytes})
        checkout = peers.checkout(peers.AUTORESEARCH)
        if checkout is not None:
            with peers.autoresearch_data(checkout, timed, Path(folder) / "theirs") as prepare:
                yield _tokenizer_against_autoresearch(paths, prepare)
                yield _packing_against_autoresearch(paths, tokenizer, prepare)


def _compare(
    paths: list[Path], tokenizer: BytePairTokenizer, num_cores: int, facts: dict[str, Any]
) -> Result:
    ours: Callable[[], np.ndarray] = lambda: our_build(paths, tokenizer, num_cores)  # noqa: E731
    result = compare(
        "data_build" if num_cores == 1 else "data_build_two_cores",
        question=f"text to chunks of {CHUNK_LENGTH:,} on {num_cores} core(s), against tokenising "
        "every document with tiktoken",
        prediction="2x or more: some 40% of the bytes are in documents long enough to try",
        cases={
            "build parquet": ours,
            "every document": lambda: reference_build(paths, tokenizer, num_cores),
        },
        check=_same_chunks,
        target=2.0,
        rounds=3,
        facts=facts | {"num_shards": len(paths), "num_cores": num_cores},
    )
    result.facts["megabytes_per_second"] = {
        name: facts["num_bytes"] / 1e6 / case.median for name, case in result.cases.items()
    }
    return result


def _tokenizer_against_autoresearch(paths: list[Path], prepare: dict[str, Any]) -> Result:
    folder = Path(prepare["TOKENIZER_DIR"])

    def ours() -> dict[bytes, int]:
        texts = (text for batch in _document_batches(paths) for text in batch)
        trained = train_tokenizer(texts, VOCAB_SIZE)
        trained.save(folder.with_name("ours"))
        return trained.ranks

    def theirs() -> dict[bytes, int]:
        shutil.rmtree(folder, ignore_errors=True)  # it keeps what is there
        with contextlib.redirect_stdout(io.StringIO()):
            prepare["train_tokenizer"]()
        encoding = prepare["Tokenizer"].from_directory(folder).enc
        return {encoding.decode_single_token_bytes(i): i for i in range(encoding.max_token_value)}

    def same_ranks(outputs: dict[str, dict[bytes, int]]) -> None:
        ours, theirs = outputs["ours"], outputs["autoresearch"]
        assert ours.items() <= theirs.items()  # theirs has the special tokens as well

    return compare(
        "tokenizer_autoresearch",
        question=f"training and saving a BPE of {VOCAB_SIZE:,} on {len(paths)} shards, against "
        "autoresearch's prepare.py",
        prediction="1x: both call rustbpe, and nothing else takes long",
        cases={"ours": ours, "autoresearch": theirs},
        check=same_ranks,
        target=0.95,
        rounds=3,
        facts={"num_shards": len(paths)},
    )


def _packing_against_autoresearch(
    paths: list[Path], tokenizer: BytePairTokenizer, prepare: dict[str, Any]
) -> Result:
    num_threads = 2

    def ours() -> np.ndarray:
        batches = (
            [
                np.array(ids, np.uint16)
                for ids in tokenizer.encoding.encode_ordinary_batch(batch, num_threads=num_threads)
            ]
            for batch in _document_batches(paths)
        )
        rows = pack_rows(batches, PACKED_LENGTH, tokenizer.bos_token_id, np.dtype(np.uint16))
        return np.stack([row.targets for row, _ in zip(rows, range(NUM_PACKED_ROWS), strict=False)])

    def theirs() -> np.ndarray:
        wrapped = prepare["Tokenizer"](tokenizer.encoding)
        encode = wrapped.encode
        wrapped.encode = functools.partial(encode, num_threads=num_threads)
        loader = prepare["make_dataloader"](wrapped, 8, PACKED_LENGTH, "train")
        rows = [next(loader)[1].numpy().copy() for _ in range(NUM_PACKED_ROWS // 8)]
        return np.concatenate(rows).astype(np.uint16)

    return compare(
        "packing_autoresearch",
        question=f"{NUM_PACKED_ROWS:,} packed rows of {PACKED_LENGTH:,} from text, tokenised on "
        f"{num_threads} threads, against autoresearch's loader",
        prediction="1.5x: tokenising is the same in both; its search for the best fit is a loop",
        cases={"ours": ours, "autoresearch": theirs},
        check=_same_chunks,
        target=1.0,
        rounds=3,
        facts={"num_shards": len(paths)},
    )


def _document_batches(paths: list[Path]) -> Iterator[list[str]]:
    """Documents as autoresearch reads them, BATCH_DOCUMENTS of a row group at a time."""
    for path in paths:
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            texts = file.read_row_group(group).column("text").to_pylist()
            for start in range(0, len(texts), BATCH_DOCUMENTS):
                yield texts[start : start + BATCH_DOCUMENTS]
