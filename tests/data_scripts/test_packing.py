"""Packed rows and mixtures: the packing against plain loops, the built sets, and their damage."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from data_scripts import split_writer
from data_scripts.build import main as build
from data_scripts.chunk_set import ChunkSet
from data_scripts.packing import pack_rows
from data_scripts.rows import TableOptions, packed_rows
from data_scripts.split_writer import mixture
from data_scripts.tokenizer import BytePairTokenizer
from data_scripts.verify import find_problems
from modeling_doctab import naive
from tests.data_scripts.conftest import VOCAB_SIZE, make_text, write_shard
from tests.data_scripts.test_build import hashes
from tests.data_scripts.test_verify import accept_hashes, change

BOS = 1000


def plain_packing(shards, capacity, buffer_size, batch):
    """Best fit as Section 4.9's loader does it, with lists and loops."""
    waiting, rows, coming = [], [], []
    for shard in shards:
        documents = [[BOS, *document] for document in shard]
        coming += [documents[i : i + batch] for i in range(0, len(documents), batch)]
    while True:
        row = []
        while len(row) < capacity:
            while len(waiting) < buffer_size and coming:
                waiting = waiting + coming.pop(0)
            if not waiting:
                return rows
            room = capacity - len(row)
            fitting = [document for document in waiting if len(document) <= room]
            if fitting:
                longest = max(len(document) for document in fitting)
                chosen = next(i for i, d in enumerate(waiting) if len(d) == longest)
            else:
                shortest = min(len(document) for document in waiting)
                chosen = next(i for i, d in enumerate(waiting) if len(d) == shortest)
            row += waiting.pop(chosen)[:room]
        rows.append(row)


@pytest.mark.parametrize(
    ("capacity", "buffer_size", "batch"), [(33, 20, 8), (33, 1, 1), (9, 50, 3), (2, 5, 5)]
)
def test_equals_plain_loops(capacity, buffer_size, batch):
    generator = np.random.default_rng(capacity)
    documents = [
        generator.integers(0, 900, generator.integers(1, 60)).astype(np.uint16) for _ in range(300)
    ]
    batches = [documents[i : i + batch] for i in range(0, len(documents), batch)]
    rows = list(pack_rows(batches, capacity - 1, BOS, np.dtype("<u2"), buffer_size))
    expected = plain_packing([[d.tolist() for d in documents]], capacity, buffer_size, batch)
    assert [[BOS, *row.targets.tolist()] for row in rows] == expected
    assert len(rows) > 5
    placed = [source for row in rows for _, source in row.segments]
    assert len(set(placed)) == len(placed)
    for row in rows:
        stream = [BOS, *row.targets.tolist()]
        assert [position for position, _ in row.segments] == [
            i for i, token in enumerate(stream) if token == BOS
        ]
        for (start, source), (end, _) in zip(
            row.segments, [*row.segments[1:], (None, 0)], strict=True
        ):
            tokens = stream[start + 1 : end]
            assert tokens == documents[source][: len(tokens)].tolist()


def test_bad_sizes():
    with pytest.raises(ValueError, match="must be at least 1; found 0 and 1000"):
        next(pack_rows([], 0, BOS, np.dtype("<u2")))


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Many short documents and some long ones."""
    folder = tmp_path_factory.mktemp("short")
    files = [*(f"shard_{i:05d}.parquet" for i in range(3)), "dev.parquet", "confirmation.parquet"]
    for i, name in enumerate(files):
        lengths = np.random.default_rng(i).geometric(1 / 30, 50).clip(4, 150)
        texts = [make_text(1000 * i + j, int(length)) for j, length in enumerate(lengths)]
        write_shard(folder / name, [*texts, None, ""])
    return folder


def packed_arguments(shards: Path, out: Path, *more: str) -> list[str]:
    return [
        *("packed", "--out", str(out), "--chunk_length", "48", "--vocab_size", str(VOCAB_SIZE)),
        *("--split", f"train={shards}/shard_*.parquet", f"dev={shards}/dev.parquet", *more),
    ]


@pytest.fixture(scope="module")
def packed_set(shards, tmp_path_factory) -> ChunkSet:
    out = tmp_path_factory.mktemp("packed") / "set"
    build(packed_arguments(shards, out, "--max_evaluation_rows", "12"))
    return ChunkSet.open(out, verify=True)


def test_a_packed_set_is_the_packing_of_its_text(packed_set, shards):
    tokenizer = BytePairTokenizer.load(packed_set.tokenizer_path)
    by_shard = [
        [tokenizer.encode(t).tolist() for t in pq.read_table(path)["text"].to_pylist() if t]
        for path in sorted(shards.glob("shard_*.parquet"))
    ]
    bos = packed_set.bos_token_id
    expected = [
        [bos if token == BOS else token for token in row[1:]]
        for row in plain_packing(by_shard, 49, 1000, 128)
    ]
    assert packed_set.train_chunks().tolist() == expected
    sources = packed_set.source_documents("train")
    assert sources["num_tokens"] == [len(d) for documents in by_shard for d in documents]
    assert len(packed_set.documents("dev")) == 12
    assert packed_set.manifest["splits"]["train"]["content"] == "packed"


def test_the_buffer_is_refilled_in_batches_that_end_with_the_shard(
    packed_set, shards, tmp_path, monkeypatch
):
    monkeypatch.setattr(split_writer, "BATCH_DOCUMENTS", 7)
    monkeypatch.setattr(split_writer, "pack_rows", partial(pack_rows, buffer_documents=20))
    build(packed_arguments(shards, tmp_path / "set", "--tokenizer", str(packed_set.path)))
    chunk_set = ChunkSet.open(tmp_path / "set")
    sources, bos = packed_set.source_documents("train"), packed_set.bos_token_id
    tokenizer = BytePairTokenizer.load(packed_set.tokenizer_path)
    by_shard = [
        [tokenizer.encode(t).tolist() for t in pq.read_table(path)["text"].to_pylist() if t]
        for path in sorted(shards.glob("shard_*.parquet"))
    ]
    assert sum(map(len, by_shard)) == len(sources["ids"])
    packed = plain_packing(by_shard, 49, 20, 7)
    joined = [document for documents in by_shard for document in documents]
    assert packed != plain_packing([joined], 49, 20, 7)
    expected = [[bos if token == BOS else token for token in row[1:]] for row in packed]
    assert chunk_set.train_chunks().tolist() == expected


def test_a_packed_set_verifies_and_is_built_the_same_again(packed_set, shards, tmp_path):
    assert find_problems(packed_set.path) == []
    again = packed_arguments(shards, tmp_path / "set", "--max_evaluation_rows", "12")
    build(again)
    assert hashes(tmp_path / "set") == hashes(packed_set.path)


def test_no_match_crosses_a_document_of_a_packed_row(packed_set):
    targets = packed_set.documents("dev").chunks()[2]
    rows = packed_rows(targets, packed_set.bos_token_id, TableOptions())
    assert rows["segment_ids"].max() > 0
    for i, inputs in enumerate(rows["input_ids"].tolist()):
        expected = naive.lookup(inputs, segment_ids=rows["segment_ids"][i].tolist())
        assert rows["table_order"][i].tolist() == [fields[0] for fields in expected]
        assert rows["table_candidate"][i].tolist() == [fields[1] for fields in expected]


def mixed_arguments(shards: Path, out: Path, *more: str) -> list[str]:
    return [
        *("mixed", "--out", str(out), "--chunk_length", "64", "--vocab_size", str(VOCAB_SIZE)),
        *("--split", f"train={shards}/shard_*.parquet", f"dev={shards}/dev.parquet"),
        *(f"confirmation={shards}/confirmation.parquet", "--confirmation", "confirmation"),
        *more,
    ]


@pytest.mark.parametrize("share", [0.25, 0.6])
def test_a_mixture_has_the_stated_share(shards, tmp_path, share):
    build(mixed_arguments(shards, tmp_path / "set", "--long_share", str(share)))
    chunk_set = ChunkSet.open(tmp_path / "set", verify=True)
    entry = chunk_set.manifest["splits"]["train"]
    num_long, num_packed = entry["num_long_chunks"], entry["num_packed_rows"]
    assert num_long + num_packed == entry["num_chunks"] == len(chunk_set.train_chunks())
    assert num_long == round(share * entry["num_chunks"])
    assert min(num_long, num_packed) >= 1
    assert find_problems(chunk_set.path) == []
    is_packed = (chunk_set.train_chunks() == chunk_set.bos_token_id).any(axis=1)
    assert is_packed.sum() <= num_packed
    assert is_packed.any()
    names = ["dev_long", "dev_short", "confirmation_long", "confirmation_short"]
    assert chunk_set.evaluation_splits() == names
    assert [chunk_set.is_confirmation(name) for name in names] == [False, False, True, True]
    assert min(np.diff(chunk_set.documents("dev_long").offsets)) >= 64
    assert max(chunk_set.source_documents("dev_short")["num_tokens"]) < 64


def test_mixture_sizes():
    assert mixture(100, 100, 0.5) == (100, 100)
    assert mixture(100, 10, 0.5) == (10, 10)
    assert mixture(90, 1000, 0.9) == (90, 10)
    assert mixture(1000, 1000, 0.25, max_chunks=10) == (2, 8)


def test_bad_shares(shards, tmp_path):
    for share in ("0", "1", "-1", "nan"):
        with pytest.raises(ValueError, match="long_share must lie between 0 and 1"):
            build(mixed_arguments(shards, tmp_path / "set", f"--long_share={share}"))


@pytest.fixture
def copy(packed_set, tmp_path) -> Path:
    return Path(shutil.copytree(packed_set.path, tmp_path / "copy"))


def test_a_boundary_that_has_moved_is_named(copy, packed_set):
    bos = packed_set.bos_token_id
    place = int(np.flatnonzero(packed_set.train_chunks().reshape(-1) == bos)[0])

    def move(array):
        array[place], array[place + 1] = array[place + 1], array[place]

    change(copy / "train" / "chunks.bin", "<u2", move)
    accept_hashes(copy)
    problems = find_problems(copy)
    row = place // packed_set.chunk_length
    assert f"chunk {row} of train is damaged" in problems
    assert any(p.startswith(f"row {row} of train has BOS at inputs") for p in problems)


def test_a_document_placed_twice_or_swapped_is_named(copy):
    def twice(array):
        array.reshape(-1, 3)[1, 2] = array.reshape(-1, 3)[0, 2]

    change(copy / "dev" / "segments.bin", "<i8", twice)
    accept_hashes(copy)
    assert any("places a document twice" in problem for problem in find_problems(copy))


def test_another_source_is_named(copy):
    path = copy / "train" / "sources.json"
    sources = json.loads(path.read_text())
    segments = np.fromfile(copy / "train" / "segments.bin", "<i8").reshape(-1, 3)
    sources["sha256"][int(segments[0, 2])] = "0" * 32
    path.write_text(json.dumps(sources))
    accept_hashes(copy)
    [problem] = find_problems(copy)
    assert problem.startswith("row 0 of train does not hold shard_0000")


def test_packed_text_in_two_splits_is_found(shards, tmp_path):
    arguments = packed_arguments(shards, tmp_path / "set")
    arguments[-1] = f"dev={shards}/shard_00001.parquet"
    with pytest.raises(ValueError, match="split dev must give at least one chunk"):
        build(arguments)  # every document overlaps
    build([*arguments, "--keep_overlaps"])
    chunk_set = ChunkSet.open(tmp_path / "set")
    assert len(chunk_set.manifest["splits"]["dev"]["overlaps"]) == 50
    assert find_problems(tmp_path / "set") == []
    manifest = json.loads((tmp_path / "set" / "manifest.json").read_text())
    manifest["splits"]["dev"]["overlaps"] = []
    (tmp_path / "set" / "manifest.json").write_text(json.dumps(manifest))
    assert find_problems(tmp_path / "set") == ["50 documents of dev also stand in train"]
