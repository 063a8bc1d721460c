from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from data_scripts.chunk_set import ChunkSet
from data_scripts.tokenizer import BytePairTokenizer
from tests.data_scripts.conftest import CHUNK_LENGTH, VOCAB_SIZE


@pytest.fixture
def copy(chunk_set: ChunkSet, tmp_path: Path) -> Path:
    return Path(shutil.copytree(chunk_set.path, tmp_path / "copy"))


def edit_manifest(folder: Path, **changes) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_attributes(chunk_set):
    assert chunk_set.vocab_size == VOCAB_SIZE
    assert chunk_set.bos_token_id == VOCAB_SIZE - 4
    assert chunk_set.chunk_length == CHUNK_LENGTH
    assert chunk_set.training_splits() == ["train"]
    assert chunk_set.evaluation_splits() == ["dev", "confirmation"]
    assert [chunk_set.is_confirmation(s) for s in ("train", "dev", "confirmation")] == [
        False,
        False,
        True,
    ]
    manifest = (chunk_set.path / "manifest.json").read_bytes()
    assert chunk_set.fingerprint == hashlib.sha256(manifest).hexdigest()
    assert len(chunk_set.token_bytes()) == len(chunk_set.reference_token_bytes()) == VOCAB_SIZE


def texts_by_id(shards: Path) -> dict[str, str]:
    return {
        f"{path.name}:{row}": text
        for path in shards.glob("*.parquet")
        for row, text in enumerate(pq.read_table(path)["text"].to_pylist())
        if text
    }


def test_training_chunks_are_the_documents_cut_up(chunk_set, shards):
    tokenizer = BytePairTokenizer.load(chunk_set.tokenizer_path)
    texts = texts_by_id(shards)
    chunks, index = chunk_set.train_chunks(), chunk_set.chunk_index()
    listed = chunk_set.document_list("train")
    assert chunks.shape == (len(index), CHUNK_LENGTH)
    for chunk, (document, start, _) in zip(chunks, index, strict=True):
        tokens = tokenizer.encode(texts[listed["ids"][document]])
        np.testing.assert_array_equal(chunk, tokens[start : start + CHUNK_LENGTH])
    # Every document of at least one chunk, every one of its chunks, once, and not in their order.
    expected = {
        (name, start)
        for name, text in texts.items()
        if name.startswith("shard_")
        for start in range(0, len(tokenizer.encode(text)) - CHUNK_LENGTH + 1, CHUNK_LENGTH)
    }
    places = [(listed["ids"][document], int(start)) for document, start, _ in index]
    assert set(places) == expected
    assert len(places) == len(expected)
    assert places != sorted(places)
    np.testing.assert_array_equal(chunk_set.chunk_documents("train"), index[:, 0])


def test_evaluation_documents_are_whole(chunk_set, shards):
    tokenizer = BytePairTokenizer.load(chunk_set.tokenizer_path)
    texts = texts_by_id(shards)
    documents = chunk_set.documents("dev")
    assert len(documents) == len(documents.ids) == 5  # the sixth begins like a training document
    for i, name in enumerate(documents.ids):
        np.testing.assert_array_equal(documents.document(i), tokenizer.encode(texts[name]))
    document, start, targets = documents.chunks()
    assert len(document) == sum(len(documents.document(i)) // CHUNK_LENGTH for i in range(5))
    for d, s, chunk in zip(document, start, targets, strict=True):
        np.testing.assert_array_equal(chunk, documents.document(d)[s : s + CHUNK_LENGTH])
    np.testing.assert_array_equal(chunk_set.chunk_documents("dev"), document)


def test_target_hashes(chunk_set):
    chunks, documents = chunk_set.train_chunks(), chunk_set.documents("dev")
    assert chunk_set.target_sha256("train") == hashlib.sha256(chunks.tobytes()).hexdigest()
    assert chunk_set.target_sha256("dev") == hashlib.sha256(documents.tokens.tobytes()).hexdigest()


def test_overlaps_are_dropped_and_counted(chunk_set):
    splits = chunk_set.manifest["splits"]
    assert splits["dev"]["overlaps"] == [
        {"document": "dev.parquet:5", "split": "train", "equals": "shard_00000.parquet:3"}
    ]
    assert splits["dev"]["num_documents_before_overlaps"] == 6
    # A confirmation document is compared with the development documents too.
    assert splits["confirmation"]["overlaps"] == [
        {"document": "confirmation.parquet:0", "split": "dev", "equals": "dev.parquet:2"}
    ]
    assert splits["confirmation"]["num_documents"] == 4


def test_arrays_are_memory_maps(chunk_set):
    assert isinstance(chunk_set.train_chunks(), np.memmap)
    assert isinstance(chunk_set.documents("dev").tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        chunk_set.train_chunks()[0, 0] = 1


def test_unknown_splits(chunk_set):
    with pytest.raises(ValueError, match=r"no split 'test'\. Use one of: train, dev, confirmation"):
        chunk_set.is_confirmation("test")
    with pytest.raises(ValueError, match=r"no split 'train' stored as documents\. Use one of: dev"):
        chunk_set.documents("train")
    with pytest.raises(ValueError, match=r"no split 'dev' stored as chunks\. Use one of: train"):
        chunk_set.train_chunks("dev")


def test_a_confirmation_split_stays_closed_until_something_opens_it(chunk_set):
    for nothing in (None, ""):
        with pytest.raises(ValueError, match="confirmation is a confirmation split.*registration"):
            chunk_set.documents("confirmation", opened_by=nothing)
    documents = chunk_set.documents("confirmation", opened_by="a registration's hash")
    # What says nothing of the text stays open: names, lengths, how many chunks.
    assert chunk_set.document_list("confirmation")["ids"] == documents.ids
    np.testing.assert_array_equal(chunk_set.chunk_documents("confirmation"), documents.chunks()[0])


def test_what_is_no_chunk_set(copy, tmp_path):
    with pytest.raises(ValueError, match=r"must hold manifest.json.*data_scripts.build stdlib"):
        ChunkSet.open(tmp_path / "nothing")
    (copy / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="must be JSON"):
        ChunkSet.open(copy)
    (copy / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="must be a manifest of format 'doctab-chunk-set'"):
        ChunkSet.open(copy)


def test_another_format_version(copy):
    edit_manifest(copy, format_version=99)
    with pytest.raises(ValueError, match="must have format_version 1; found 99"):
        ChunkSet.open(copy)


def test_a_vocabulary_over_the_dtype(copy):
    edit_manifest(copy, vocab_size=70_000)
    with pytest.raises(ValueError, match=r"hold every id; found uint16 for a vocabulary of 70000"):
        ChunkSet.open(copy)


def test_a_missing_key(copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["bos_token_id"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="lacks bos_token_id"):
        ChunkSet.open(copy)


def test_missing_short_and_flipped_files(copy):
    chunks = copy / "train" / "chunks.bin"
    content = bytearray(chunks.read_bytes())
    content[100] ^= 1
    chunks.write_bytes(content)
    ChunkSet.open(copy)  # the sizes still hold
    with pytest.raises(ValueError, match=r"train/chunks.bin has sha256"):
        ChunkSet.open(copy, verify=True)
    chunks.write_bytes(content[:-2])
    with pytest.raises(ValueError, match=r"train/chunks.bin has \d+ bytes, the manifest says"):
        ChunkSet.open(copy)
    chunks.unlink()
    with pytest.raises(ValueError, match=r"train/chunks.bin is missing"):
        ChunkSet.open(copy)
