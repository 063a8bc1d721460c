from __future__ import annotations

import itertools

import numpy as np
import pytest

from data_scripts.chunking import (
    DocumentRules,
    OverlapIndex,
    chunk_starts,
    document_sha256,
    tokenise_documents,
    training_order,
)
from data_scripts.tokenizer import BytePairTokenizer
from tests.data_scripts.conftest import make_text

BYTES_ONLY = BytePairTokenizer({bytes([i]): i for i in range(256)})  # one token a byte


@pytest.mark.parametrize(
    ("num_tokens", "kept", "num_chunks"),  # BOS counted, as the paper counts
    [(8_191, 0, 0), (8_192, 0, 0), (8_193, 1, 1), (16_384, 1, 1), (16_385, 1, 2)],
)
def test_chunk_boundaries(num_tokens, kept, num_chunks):
    documents = [("d", b"x" * (num_tokens - 1))]
    result = tokenise_documents(documents, BYTES_ONLY, DocumentRules(8192, 8193))
    assert len(result.ids) == kept
    document, start = chunk_starts([len(tokens) for tokens in result.tokens], 8192)
    assert document.tolist() == [0] * num_chunks
    assert start.tolist() == [8192 * i for i in range(num_chunks)]


def test_what_becomes_of_each_document(tokenizer):
    long = make_text(1, 100).encode()
    compressible = b"table " * 30  # enough bytes, too few tokens
    documents = [
        ("null", None),
        ("empty", b""),
        ("short", b"abc"),
        ("few", compressible),
        ("a", long),
    ]
    result = tokenise_documents(documents, tokenizer, DocumentRules(64, 100, 120))
    assert result.ids == ["a"]
    np.testing.assert_array_equal(result.tokens[0], tokenizer.encode(long.decode())[:120])
    assert result.counts.as_dict() == {
        "read": 5,
        "kept": 1,
        "null_or_empty": 2,
        "too_few_bytes": 1,
        "too_few_tokens": 1,
        "bytes_read": 3 + len(compressible) + len(long),
        "bytes_tokenised": len(compressible) + len(long),
    }


def test_a_large_vocabulary_keeps_its_ids():
    ranks = {bytes([i]): i for i in range(256)}
    words = ["".join(letters) for letters in itertools.product("abcdefghijklmnopq", repeat=4)]
    ranks |= {word.encode(): 256 + i for i, word in enumerate(words)}
    tokenizer = BytePairTokenizer(ranks)
    assert tokenizer.vocab_size > 2**16
    result = tokenise_documents([("d", b"aaaa\nqqqq")], tokenizer, DocumentRules(2, 2))
    assert result.tokens[0].tolist() == [256, ord("\n"), len(ranks) - 1]
    assert result.tokens[0].dtype == np.uint32


def test_chunks_of_several_documents():
    document, start = chunk_starts([25, 9, 10, 31], 10)
    assert document.tolist() == [0, 0, 2, 3, 3, 3]
    assert start.tolist() == [0, 10, 0, 0, 10, 20]
    assert chunk_starts([25, 9, 10, 31], 10, max_chunks=3)[0].tolist() == [0, 0, 2]


def test_the_training_order_is_frozen():
    # Written down: another order would silently train every arm on other batches.
    assert training_order(10, 0).tolist() == [1, 4, 5, 7, 6, 9, 0, 3, 2, 8]
    assert sorted(training_order(1000, 1).tolist()) == list(range(1000))


def test_overlaps_are_found_by_the_first_256_tokens():
    base = np.arange(400, dtype=np.uint16)
    index = OverlapIndex()
    index.add("train", "a", base)
    index.add("train", "short", base[:100])
    same_beginning = np.concatenate([base[:256], base[:50]])
    assert index.find(same_beginning) == ("train", "a")
    assert index.find(base[:255]) is None
    assert index.find(base[:100]) == ("train", "short")
    assert index.find(np.concatenate([base[:255], base[:50]])) is None
    assert index.find(base.astype(np.uint32)) == ("train", "a")


def test_document_hashes_do_not_depend_on_the_dtype():
    tokens = np.array([1, 2, 3])
    assert document_sha256(tokens.astype(np.uint16)) == document_sha256(tokens.astype(np.uint32))
    assert document_sha256(tokens) != document_sha256(tokens[::-1])


def test_bad_rules_and_documents(tokenizer):
    with pytest.raises(ValueError, match="chunk_length must be at least 2; found 1"):
        DocumentRules(1, 10)
    with pytest.raises(ValueError, match="min_tokens counts BOS and must be at least 2; found 0"):
        DocumentRules(8, 0)
    with pytest.raises(ValueError, match="must leave min_tokens - 1 = 8 targets; found 5"):
        DocumentRules(8, 9, 5)
    with pytest.raises(ValueError, match=r"bad\.txt is not, at byte 3"):
        tokenise_documents([("bad.txt", b"abc\xff" * 9)], tokenizer, DocumentRules(2, 2))
