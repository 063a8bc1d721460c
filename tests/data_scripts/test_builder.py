"""The `datasets` builder and the Parquet folder against the memory map."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import datasets
import numpy as np
import pytest
from datasets import load_dataset
from huggingface_hub import HfApi

from data_scripts import builder as builder_module
from data_scripts.builder import ChunkSetBuilder
from data_scripts.chunk_set import file_sha256
from data_scripts.export import export_parquet
from data_scripts.export import main as export
from data_scripts.rows import TableOptions, chunk_rows


@pytest.fixture(autouse=True)
def _small_tables(monkeypatch):
    monkeypatch.setattr(builder_module, "_ROWS_PER_TABLE", 10)
    datasets.disable_progress_bars()


def column(dataset, name) -> np.ndarray:
    return np.array([row[name] for row in dataset.with_format("numpy")])


def assert_equal_chunks(dataset, chunk_set) -> None:
    assert dataset.features["targets"].feature.dtype == "uint16"
    np.testing.assert_array_equal(column(dataset, "targets"), chunk_set.train_chunks())
    index = chunk_set.chunk_index()
    np.testing.assert_array_equal(column(dataset, "document"), index[:, 0])
    np.testing.assert_array_equal(column(dataset, "start"), index[:, 1])


def assert_equal_documents(dataset, chunk_set, split) -> None:
    documents = chunk_set.documents(split, opened_by="this test")
    assert [row["id"] for row in dataset] == documents.ids
    for i, row in enumerate(dataset.with_format("numpy")):
        np.testing.assert_array_equal(row["tokens"], documents.document(i))


def test_built(chunk_set, tmp_path):
    builder = ChunkSetBuilder(chunk_set.path, cache_dir=tmp_path)
    builder.download_and_prepare()
    dataset = builder.as_dataset(split="train")
    assert_equal_chunks(dataset, chunk_set)
    assert dataset.features["targets"].length == chunk_set.chunk_length


@pytest.mark.multi_process
def test_built_in_two_processes(chunk_set, tmp_path):
    assert len(chunk_set.train_chunks()) > 20
    builder = ChunkSetBuilder(chunk_set.path, cache_dir=tmp_path)
    builder.download_and_prepare(num_proc=2)
    assert_equal_chunks(builder.as_dataset(split="train"), chunk_set)


def test_streamed(chunk_set, tmp_path):
    stream = ChunkSetBuilder(chunk_set.path, cache_dir=tmp_path).as_streaming_dataset(split="train")
    assert stream.num_shards == -(-len(chunk_set.train_chunks()) // 10)
    assert_equal_chunks(stream, chunk_set)


def test_documents_without_and_with_the_confirmation_split(chunk_set, tmp_path):
    builder = ChunkSetBuilder(chunk_set.path, "documents", cache_dir=tmp_path)
    builder.download_and_prepare()
    found = builder.as_dataset()
    assert list(found) == ["dev"]
    assert_equal_documents(found["dev"], chunk_set, "dev")
    both = ChunkSetBuilder(chunk_set.path, "documents", confirmation=True, cache_dir=tmp_path)
    both.download_and_prepare()
    assert_equal_documents(both.as_dataset()["confirmation"], chunk_set, "confirmation")


def test_rows_are_what_training_sees(chunk_set, tmp_path):
    builder = ChunkSetBuilder(chunk_set.path, "rows", row_length=16, cache_dir=tmp_path)
    builder.download_and_prepare()
    dataset = builder.as_dataset(split="train")
    expected = chunk_rows(chunk_set.train_chunks(), 16, chunk_set.bos_token_id, TableOptions())
    assert set(dataset.column_names) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(column(dataset, name), array)
    assert (expected["table_candidate"] == -1).any()


def test_another_set_at_the_same_path_is_another_cache(chunk_set, tmp_path, monkeypatch):
    first = ChunkSetBuilder(chunk_set.path, cache_dir=tmp_path).cache_dir
    assert ChunkSetBuilder(chunk_set.path, cache_dir=tmp_path).cache_dir == first
    opened = builder_module.ChunkSet.open(chunk_set.path)
    opened.fingerprint = "0" * 64
    monkeypatch.setattr(builder_module.ChunkSet, "open", lambda _: opened)
    assert ChunkSetBuilder(chunk_set.path, cache_dir=tmp_path).cache_dir != first


def test_bad_options(chunk_set, tmp_path):
    with pytest.raises(ValueError, match=r"kind must be one of .*; found 'words'"):
        ChunkSetBuilder(chunk_set.path, "words")
    with pytest.raises(ValueError, match="row_length is for kind 'rows', which needs it"):
        ChunkSetBuilder(chunk_set.path, "rows")
    with pytest.raises(ValueError, match="row_length must divide chunk_length; found 7 and 64"):
        ChunkSetBuilder(chunk_set.path, "rows", row_length=7)
    with pytest.raises(ValueError, match=r"must hold manifest\.json"):
        ChunkSetBuilder(tmp_path)


@pytest.fixture(scope="module")
def exported(chunk_set, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "parquet"
    export([str(chunk_set.path), "--out", str(out), "--rows-per-file", "12"])
    return out


def test_the_parquet_folder_loads_to_the_same_arrays(chunk_set, exported, tmp_path):
    train = load_dataset(str(exported), "chunks", split="train", cache_dir=str(tmp_path))
    assert_equal_chunks(train, chunk_set)
    assert train.features["targets"].length == chunk_set.chunk_length
    documents = load_dataset(str(exported), "documents", cache_dir=str(tmp_path))
    assert list(documents) == ["dev"]
    assert_equal_documents(documents["dev"], chunk_set, "dev")
    streamed = load_dataset(str(exported), split="train", streaming=True)  # chunks by default
    assert_equal_chunks(streamed, chunk_set)


def test_counts(chunk_set, exported):
    counts = json.loads((exported / "counts.json").read_text())
    assert counts["fingerprint"] == chunk_set.fingerprint
    train = counts["splits"]["train"]
    assert train["num_rows"] == train["num_chunks"] == len(chunk_set.train_chunks())
    assert train["target_sha256"] == chunk_set.target_sha256("train")
    assert len(train["files"]) == -(-train["num_rows"] // 12)
    for split in counts["splits"].values():
        assert sum(entry["num_rows"] for entry in split["files"].values()) == split["num_rows"]
        for name, entry in split["files"].items():
            assert file_sha256(exported / name) == entry["sha256"]
    assert list(counts["splits"]) == ["train", "dev"]  # confirmation stays out


def test_the_confirmation_split_is_a_configuration_of_its_own(chunk_set, tmp_path):
    export_parquet(chunk_set, tmp_path / "all", include_confirmation=True)
    cache = str(tmp_path / "cache")
    loaded = load_dataset(str(tmp_path / "all"), "confirmation", cache_dir=cache)
    assert_equal_documents(loaded["confirmation"], chunk_set, "confirmation")


_READ = """
import hashlib, sys
import numpy as np
from datasets import load_dataset
train = load_dataset("me/set", "chunks", split="train", cache_dir=sys.argv[1])
stored = train.features["targets"].feature.dtype  # the numpy format hands out int64
rows = np.stack([np.array(row).astype(stored) for row in train.with_format("numpy")["targets"]])
print(stored, hashlib.sha256(rows.tobytes()).hexdigest())
stream = load_dataset("me/set", "documents", split="dev", streaming=True)
print([row["id"] for row in stream])
"""


@pytest.mark.multi_process
def test_the_folder_is_ready_to_be_pushed(hub, chunk_set, exported, tmp_path):
    """Pushed as it is, the Hub's dataset loads to the same arrays, also streamed."""
    api = HfApi(endpoint=hub.endpoint, token=hub.token)
    api.create_repo("me/set", repo_type="dataset")
    api.upload_folder(repo_id="me/set", folder_path=exported, repo_type="dataset")
    done = subprocess.run(
        [sys.executable, "-c", _READ, str(tmp_path / "cache")],
        env={**os.environ, **hub.environment(), "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    train, documents = done.stdout.splitlines()
    assert train == f"uint16 {chunk_set.target_sha256('train')}"
    assert documents == str(chunk_set.documents("dev").ids)


def test_an_export_is_refused_where_something_is(chunk_set, exported):
    with pytest.raises(ValueError, match="--out must be a new or an empty folder"):
        export_parquet(chunk_set, exported)
    with pytest.raises(ValueError, match="rows_per_file must be at least 1; found 0"):
        export_parquet(chunk_set, exported, 0)
