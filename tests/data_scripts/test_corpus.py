"""The data's promises on real documents: the Parquet folder that DOCTAB_CORPUS names."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from data_scripts import staging
from data_scripts.build import main as build
from data_scripts.chunk_set import ChunkSet
from data_scripts.rows import TableOptions, chunk_rows, stride_windows
from data_scripts.target_classes import target_orders
from data_scripts.tokenizer import BytePairTokenizer
from data_scripts.verify import find_problems
from modeling_doctab import naive
from tests.data_scripts.conftest import write_shard
from tests.data_scripts.test_build import hashes

CORPUS = os.environ.get("DOCTAB_CORPUS")
pytestmark = pytest.mark.skipif(
    not CORPUS, reason="DOCTAB_CORPUS does not name a folder of Parquet files with a column `text`"
)
CHUNK, ROW = 8192, 2048
_SHARDS, _CHARACTERS = 4, 3_000_000  # of the folder's files, and of each


@pytest.fixture(scope="module")
def texts() -> list[list[str]]:
    """The first documents of the folder's first files; a confirmation set is left alone."""
    files = [p for p in sorted(Path(CORPUS).rglob("*.parquet")) if "confirmation" not in p.name]
    assert files, f"{CORPUS} must hold at least one Parquet file"
    result = []
    for path in (files * _SHARDS)[:_SHARDS] if len(files) < _SHARDS else files[:_SHARDS]:
        documents, num_characters = [], 0
        for batch in pq.ParquetFile(path).iter_batches(batch_size=16, columns=["text"]):
            for text in batch.column(0).to_pylist():
                if num_characters < _CHARACTERS and text:
                    documents.append(text)
                    num_characters += len(text)
        result.append(documents)
    return result


@pytest.fixture(scope="module")
def arguments(texts, tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpus")
    for i, documents in enumerate(texts[:-1]):
        write_shard(folder / f"shard_{i:05d}.parquet", documents)
    write_shard(folder / "dev.parquet", texts[-1])
    return [
        *("parquet", "--tokenizer_characters", "500000", "--vocab_size", "2048", "--split"),
        *(f"train={folder}/shard_*.parquet", f"dev={folder}/dev.parquet", "--keep_overlaps"),
    ]


@pytest.fixture(scope="module")
def corpus_set(arguments, tmp_path_factory) -> ChunkSet:
    out = tmp_path_factory.mktemp("corpus_set") / "set"
    build([*arguments, "--out", str(out)])
    return ChunkSet.open(out, verify=True)


def test_documents_are_cut_at_the_boundaries(corpus_set, texts):
    tokenizer = BytePairTokenizer.load(corpus_set.tokenizer_path)
    lengths = [len(tokenizer.encode(text)) for documents in texts[:-1] for text in documents]
    assert len(corpus_set.train_chunks()) == sum(length // CHUNK for length in lengths)
    assert corpus_set.document_list("train")["num_tokens"] == [n for n in lengths if n >= CHUNK]
    chunks, index = corpus_set.train_chunks(), corpus_set.chunk_index()
    long = [tokenizer.encode(text) for documents in texts[:-1] for text in documents]
    long = [tokens for tokens in long if len(tokens) >= CHUNK]
    for place in range(0, len(chunks), 7):
        document, start, _ = index[place]
        np.testing.assert_array_equal(chunks[place], long[document][start : start + CHUNK])
    assert find_problems(corpus_set.path) == []


def test_two_processes_and_an_interruption_build_the_same(
    corpus_set, arguments, tmp_path, monkeypatch
):
    build([*arguments, "--out", str(tmp_path / "two"), "--num_processes", "2"])
    assert hashes(tmp_path / "two") == hashes(corpus_set.path)
    tokenise = staging.tokenise_documents
    calls = []

    def interrupted(*values):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return tokenise(*values)

    monkeypatch.setattr(staging, "tokenise_documents", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build([*arguments, "--out", str(tmp_path / "set")])
    build([*arguments, "--out", str(tmp_path / "set")])
    assert hashes(tmp_path / "set") == hashes(corpus_set.path)


def test_2k_and_8k_views_are_equal_and_no_field_looks_ahead(corpus_set):
    targets = np.array(corpus_set.train_chunks()[:4])
    bos = corpus_set.bos_token_id
    indices = np.arange(4)
    for source in ("document", "foreign", "shuffled", "empty"):
        table = TableOptions(source=source, seed=1)
        foreign = np.array(corpus_set.train_chunks()[4:8])
        views = [
            chunk_rows(targets, length, bos, table, indices, foreign) for length in (ROW, CHUNK)
        ]
        for name in views[0]:
            if name != "input_ids":
                np.testing.assert_array_equal(
                    views[0][name].reshape(4, CHUNK), views[1][name].reshape(4, CHUNK)
                )
        edited = targets.copy()
        edited[:, 5000:] = (edited[:, 5000:].astype(int) + 1) % bos
        after = chunk_rows(edited, CHUNK, bos, table, indices, foreign)
        for name in ("table_order", "table_candidate", "table_distance"):
            np.testing.assert_array_equal(after[name][:, :5001], views[1][name][:, :5001])


def test_the_lookup_is_the_specification(corpus_set):
    targets = np.array(corpus_set.train_chunks()[:1])
    rows = chunk_rows(targets, CHUNK, corpus_set.bos_token_id, TableOptions())
    length = 1500  # the plain loops are quadratic
    expected = np.array(naive.lookup(rows["input_ids"][0, :length].tolist()))
    found = [rows[f"table_{name}"][0, :length] for name in ("order", "candidate", "distance")]
    np.testing.assert_array_equal(np.stack(found, -1), expected)


def test_a_stride_of_a_row_is_the_training_format(corpus_set):
    tokens = np.array(corpus_set.documents("dev").document(0))
    bos, num_full = corpus_set.bos_token_id, len(tokens) // CHUNK
    windows = stride_windows(tokens, ROW, ROW, bos, TableOptions(), "chunk", CHUNK)
    chunks = tokens[: num_full * CHUNK].reshape(num_full, CHUNK)
    rows = chunk_rows(chunks, ROW, bos, TableOptions())
    for name, array in rows.items():
        np.testing.assert_array_equal(windows[name][: len(array)], array)


def test_tokens_and_bytes(corpus_set, texts):
    auto = AutoTokenizer.from_pretrained(corpus_set.tokenizer_path)
    tokenizer = BytePairTokenizer.load(corpus_set.tokenizer_path)
    for text in texts[-1][:5]:
        part = text[:50_000] + "<|reserved_0|> is text"
        ids = tokenizer.encode(part)
        assert auto(part, add_special_tokens=False)["input_ids"] == ids.tolist()
        assert corpus_set.token_bytes()[ids].sum() == len(part.encode())


def test_shares_of_targets_are_of_a_natural_language(corpus_set):
    """Not a fixed number, as the folder is anyone's; but a wrong order or distance moves it out."""
    documents = corpus_set.documents("dev")
    classes = [
        target_orders(documents.document(i), corpus_set.bos_token_id)[0]
        for i in range(min(20, len(documents)))
    ]
    copies = np.mean(np.concatenate(classes) >= 2)
    assert 0.05 < copies < 0.9
