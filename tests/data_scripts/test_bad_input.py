"""What a build does with bad documents, a full disk and another vocabulary."""

from __future__ import annotations

import base64
import json
import os
import pathlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_scripts import tokenizer as tokenizer_module
from data_scripts.build import main as build
from data_scripts.chunk_set import ChunkSet
from data_scripts.command_line import run
from data_scripts.tokenizer import SPLIT_PATTERN, BytePairTokenizer, train_tokenizer
from data_scripts.verify import find_problems
from data_scripts.verify import main as verify
from tests.data_scripts.conftest import build_arguments, make_text, write_shard
from tests.data_scripts.test_build import hashes
from tests.data_scripts.test_memory import MEASURE
from tests.data_scripts.test_verify import accept_hashes


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory) -> Path:
    """A vocabulary of single bytes: a document of n bytes has n tokens."""
    path = tmp_path_factory.mktemp("bytes") / "bytes.tiktoken"
    lines = [f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256)]
    path.write_text("".join(lines))
    return path


def with_bytes(byte_tokenizer: Path, folder: Path, texts, *more: str) -> list[str]:
    write_shard(folder / "train.parquet", texts)
    return [
        *("parquet", "--out", str(folder / "set"), "--tokenizer", str(byte_tokenizer)),
        *("--split", f"train={folder}/train.parquet", *more),
    ]


def test_chunk_boundaries_of_documents_around_one_and_two_chunks(byte_tokenizer, tmp_path):
    # BOS counts: a document of 8,193 tokens has 8,192 bytes here.
    sizes = [8_192, 8_193, 16_384, 16_385]
    ascii_text = make_text(0, 20_000).encode("ascii", "replace").decode()
    texts = [f"{size} {ascii_text}"[: size - 1] for size in sizes]
    build(with_bytes(byte_tokenizer, tmp_path, texts))
    chunk_set = ChunkSet.open(tmp_path / "set", verify=True)
    assert chunk_set.document_list("train")["num_tokens"] == [8_192, 16_383, 16_384]
    index = chunk_set.chunk_index()
    assert sorted((int(d), int(s)) for d, s, _ in index) == [(0, 0), (1, 0), (2, 0), (2, 8_192)]
    for (document, start, _), targets in zip(index, chunk_set.train_chunks(), strict=True):
        text = texts[document + 1].encode()
        assert bytes(targets.astype(np.uint8)) == text[start : start + 8_192]
    assert find_problems(tmp_path / "set") == []


def test_null_and_empty_documents_are_counted(byte_tokenizer, tmp_path):
    texts = [None, "", "x" * 70, None, "short"]
    build([*with_bytes(byte_tokenizer, tmp_path, texts), "--chunk_length", "64"])
    [shard] = ChunkSet.open(tmp_path / "set").manifest["splits"]["train"]["shards"]
    counts = {name: shard[name] for name in ("read", "kept", "null_or_empty", "too_few_bytes")}
    assert counts == {"read": 5, "kept": 1, "null_or_empty": 3, "too_few_bytes": 1}


def test_invalid_utf8_is_named(byte_tokenizer, tmp_path):
    arguments = [*with_bytes(byte_tokenizer, tmp_path, ["good " * 50]), "--chunk_length", "64"]
    raw = pa.array([b"good " * 50, b"bad \xff\xfe" + b"x" * 100], pa.binary())
    text = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())  # arrow does not look
    pq.write_table(pa.table({"text": text}), tmp_path / "train.parquet")
    with pytest.raises(
        ValueError, match=r"must be UTF-8; train\.parquet:1 is not, at byte 4\. Convert it"
    ):
        build(arguments)
    assert not (tmp_path / "set").exists()


def test_a_damaged_shard_is_named(byte_tokenizer, tmp_path):
    texts = [make_text(i, 200) for i in range(40)]
    arguments = [*with_bytes(byte_tokenizer, tmp_path, texts), "--chunk_length", "64"]
    path = tmp_path / "train.parquet"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2 : len(raw) // 2 + 500] = b"\xff" * 500
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"must be a whole Parquet file; it cannot be read after"):
        build(arguments)
    assert not (tmp_path / "set").exists()


def test_white_space_that_the_tokenizer_cannot_take_is_named(byte_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "_MAX_WHITE_SPACE", 1000)
    texts = ["fine " * 50, "a" + " " * 999 + "b", "a" + " \n" * 500 + "b"]
    arguments = [*with_bytes(byte_tokenizer, tmp_path, texts), "--chunk_length", "64"]
    with pytest.raises(ValueError, match=r"train\.parquet:2: a text must hold fewer than 1,000"):
        build(arguments)


def test_a_long_document_is_encoded_in_blocks_with_the_same_ids(tokenizer, monkeypatch):
    generator = np.random.default_rng(0)
    pieces = ["\n", "\r\n", "\n\n", " ", "  ", "\t", "word", "Straße", "12345", "!", "'s", "你好"]
    pieces += ["\u2028", "\x1c", "\u00a0", "_", "ﬁ", "\n'll", "a b", "\n  x"]
    text = "".join(pieces[i] for i in generator.integers(0, len(pieces), 20_000))
    whole = tokenizer.encoding.encode_ordinary(text)
    for block in (1, 7, 100, 5000):
        monkeypatch.setattr(tokenizer_module, "_BLOCK_CHARACTERS", block)
        assert len(list(tokenizer._blocks(text))) > 3
        assert tokenizer.encode(text).tolist() == whole
        assert tokenizer.encode(text, 33).tolist() == whole[:33]
    other = BytePairTokenizer(tokenizer.ranks, pattern=r"[^x]+|x")
    assert len(list(other._blocks(text))) == 1  # where a piece ends is known for one pattern only


@pytest.mark.slow
def test_a_document_of_100_megabytes(tmp_path):
    """Its tokens are those of its parts, and memory stays within a few times its size."""
    tokenizer = train_tokenizer((make_text(seed, 400) for seed in range(20)), 384)
    tokenizer.save(tmp_path / "tokenizer")
    part = make_text(0, 100_000) + "\n"
    text = part * (100_000_000 // len(part.encode()) + 1)
    write_shard(tmp_path / "train.parquet", [text])
    del text
    arguments = ["parquet", "--out", str(tmp_path / "set"), "--tokenizer", f"{tmp_path}/tokenizer"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments, "--split", f"train={tmp_path}/train.parquet"],
        capture_output=True,
        text=True,
        check=True,
    )
    # KiB. 1.7 GB were seen, 17 bytes a byte of text; Python's own integers would add 1.6 GB.
    assert int(done.stdout.split()[-1]) < 2_000_000
    chunk_set = ChunkSet.open(tmp_path / "set")
    [num_tokens] = chunk_set.document_list("train")["num_tokens"]
    expected = tokenizer.encode(part)
    assert num_tokens % len(expected) == 0
    order = np.argsort(chunk_set.chunk_index()[:, 1])
    first = np.concatenate([chunk_set.train_chunks()[place] for place in order[:40]])
    assert np.array_equal(first, np.tile(expected, 3)[: len(first)])


def test_a_tokenizer_of_another_vocabulary_is_found(chunk_set, tmp_path):
    copy = Path(shutil.copytree(chunk_set.path, tmp_path / "copy"))
    other = train_tokenizer((make_text(seed, 100) for seed in range(9)), 300)
    shutil.rmtree(copy / "tokenizer")
    other.save(copy / "tokenizer")
    accept_hashes(copy)
    with pytest.raises(ValueError, match=r"tokenizer/ has 300 ids and BOS 296, the manifest says"):
        verify([str(copy)])


def test_a_tokenizer_that_is_not_ours(shards, tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordPiece"}}))
    with pytest.raises(ValueError, match=r"must hold tokenizer\.json and ranks\.tiktoken"):
        build([*build_arguments(shards, tmp_path / "set"), "--tokenizer", str(folder)])


@pytest.fixture
def full_disk(monkeypatch):
    """A function: from now on, what is written under such a name meets a full disk."""
    real_open = pathlib.Path.open

    def fill(name: str) -> None:
        def opened(path, mode="r", *arguments, **options):
            is_full = path.name.startswith(name) and ("w" in mode or "a" in mode)
            return real_open(Path("/dev/full") if is_full else path, mode, *arguments, **options)

        monkeypatch.setattr(pathlib.Path, "open", opened)

    yield fill
    monkeypatch.undo()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")  # noqa: PTH110
@pytest.mark.parametrize(
    "name",
    [
        *("00000.tokens", "00000.json", "tokenizer.json", "tokenizer_config", "ranks.tiktoken"),
        *("chunks.bin", "chunk_index.bin", "documents.json", "tokens.bin", "manifest.json"),
    ],
)
def test_a_disk_that_fills_at_any_file(
    shards, chunk_set, tmp_path, full_disk, monkeypatch, capsys, name
):
    out = tmp_path / "set"
    full_disk(name)
    assert run(lambda: build(build_arguments(shards, out))) == 1
    [line] = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "No space left on device" in line
    assert "free some space and run the same command again" in line
    assert not out.exists()
    for folder in (tmp_path / "set.building", tmp_path / "set.building" / "set"):
        with pytest.raises(ValueError, match=r"must hold manifest\.json"):
            verify([str(folder)])
    monkeypatch.undo()  # some space was freed
    build(build_arguments(shards, out))
    assert hashes(out) == hashes(chunk_set.path)


def _mounts_a_small_disk() -> bool:
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.multi_process
@pytest.mark.skipif(not _mounts_a_small_disk(), reason="needs `unshare -rm` to mount a small disk")
@pytest.mark.parametrize("size", [8, 24, 40, 60, 80, 100, 120])
def test_a_disk_that_is_full(shards, tmp_path, size):
    """A real small disk, in kilobytes: whatever cannot be written, a clear end and no set."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = (
        f"mount -t tmpfs -o size={size}k tmpfs {disk} && "
        f"{sys.executable} -m data_scripts.build "
        f"{' '.join(build_arguments(shards, disk / 'set'))} 2>&1; echo status $?; ls {disk}"
    )
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, check=True
    )
    assert "status 1" in done.stdout
    assert "No space left on device" in done.stdout
    assert "run the same command again" in done.stdout
    assert "Traceback" not in done.stdout
    assert done.stdout.split()[-1] in ("1", "set.building")  # the status, or the only folder


def test_the_reference_pattern_is_the_one_that_is_cut(tokenizer):
    assert tokenizer.pattern == SPLIT_PATTERN
