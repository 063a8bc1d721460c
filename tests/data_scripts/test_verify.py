from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from data_scripts.chunk_set import file_sha256
from data_scripts.verify import find_problems
from data_scripts.verify import main as verify


@pytest.fixture
def copy(chunk_set, tmp_path) -> Path:
    return Path(shutil.copytree(chunk_set.path, tmp_path / "copy"))


def change(path: Path, dtype, edit) -> None:
    array = np.fromfile(path, dtype)
    edit(array)
    array.tofile(path)


def accept_hashes(folder: Path) -> None:
    """Write the files' present hashes into the manifest, as someone who edits a set would."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for name, entry in manifest["files"].items():
        entry["sha256"] = file_sha256(folder / name)
        entry["num_bytes"] = (folder / name).stat().st_size
    path.write_text(json.dumps(manifest))


def test_a_good_set(chunk_set, capsys):
    assert find_problems(chunk_set.path) == []
    verify([str(chunk_set.path)])
    assert chunk_set.fingerprint in capsys.readouterr().out


def test_a_flipped_bit_is_named(copy, chunk_set):
    place = 5 * chunk_set.chunk_length + 3
    change(copy / "train" / "chunks.bin", "<u2", lambda a: a.__setitem__(place, a[place] ^ 1))
    problems = find_problems(copy)
    assert any("train/chunks.bin has sha256" in problem for problem in problems)
    assert "chunk 5 of train is damaged" in problems
    with pytest.raises(ValueError, match=r"does not verify: .*chunk 5 of train is damaged"):
        verify([str(copy)])


def test_a_reordered_chunk_is_named(copy, chunk_set):
    def reorder(array):
        chunks = array.reshape(-1, chunk_set.chunk_length)
        chunks[[2, 9]] = chunks[[9, 2]]

    change(copy / "train" / "chunks.bin", "<u2", reorder)
    accept_hashes(copy)
    assert find_problems(copy) == [
        "chunk 2 of train holds chunk 9",
        "chunk 9 of train holds chunk 2",
    ]


def test_another_order_with_its_index_is_found(copy, chunk_set):
    def reorder(array):
        rows = array.reshape(len(chunk_set.train_chunks()), -1)
        rows[[2, 9]] = rows[[9, 2]]

    change(copy / "train" / "chunks.bin", "<u2", reorder)
    change(copy / "train" / "chunk_index.bin", "<i8", reorder)
    accept_hashes(copy)
    assert find_problems(copy) == [
        "train/chunk_index.bin is not the documents' full chunks in the order of seed 0"
    ]


def test_a_damaged_document_is_named(copy):
    change(copy / "dev" / "tokens.bin", "<u2", lambda a: a.__setitem__(0, a[0] ^ 1))
    accept_hashes(copy)
    assert find_problems(copy) == ["document dev.parquet:0 of dev is damaged"]


def test_ids_beyond_the_vocabulary_are_found(copy, chunk_set):
    bos = chunk_set.bos_token_id
    change(copy / "dev" / "tokens.bin", "<u2", lambda a: a.__setitem__(0, bos))
    change(copy / "train" / "chunks.bin", "<u2", lambda a: a.__setitem__(0, 60_000))
    problems = find_problems(copy)
    assert "1 chunks of train hold ids from BOS or beyond the vocabulary" in problems
    assert "document dev.parquet:0 of dev holds ids from BOS or beyond the vocabulary" in problems


def test_another_tokenizer_is_found(copy, chunk_set):
    path = copy / "tokenizer" / "token_bytes.npy"
    lengths = np.load(path)
    lengths[7] += 1
    np.save(path, lengths)
    accept_hashes(copy)
    assert find_problems(copy) == [
        "tokenizer/token_bytes.npy is not the byte lengths of tokenizer/'s tokens"
    ]


def test_a_document_in_two_splits_is_found(copy):
    for name in ("tokens.bin", "documents.json"):
        shutil.copy(copy / "dev" / name, copy / "confirmation" / name)
    manifest = json.loads((copy / "manifest.json").read_text())
    dev = manifest["splits"]["dev"]
    manifest["splits"]["confirmation"] |= {
        name: dev[name] for name in ("num_documents", "num_targets", "num_chunks")
    }
    (copy / "manifest.json").write_text(json.dumps(manifest))
    accept_hashes(copy)
    assert find_problems(copy) == ["5 documents of confirmation also stand in dev"]


def test_wrong_counts_are_found(copy):
    path = copy / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["splits"]["dev"]["num_chunks"] += 1
    manifest["splits"]["train"]["num_documents"] += 1
    path.write_text(json.dumps(manifest))
    problems = find_problems(copy)
    assert len(problems) == 2
    assert problems[0].startswith("train lists ")
    assert problems[1].startswith("dev has num_chunks ")


def test_shards_of_a_set_from_text_cannot_be_asked_for(copy):
    path = copy / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"source": "text"}))
    with pytest.raises(ValueError, match="--shards is for sets from Parquet shards"):
        verify([str(copy), "--shards", str(copy)])
