from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from tiktoken.load import load_tiktoken_bpe
from transformers import AutoTokenizer

from data_scripts.tokenizer import (
    RANKS_FILE,
    SPECIAL_TOKENS,
    BytePairTokenizer,
    open_tokenizer,
    read_tiktoken_ranks,
    train_tokenizer,
)
from tests.data_scripts.conftest import VOCAB_SIZE, make_text

TEXTS = [
    "Hello world! Numbers: 123 4567. Unicode: 你好, naïve, e\u0301, \U0001f600 \u200d.",
    "<|reserved_0|> and <|reserved_3|><|endoftext|> are plain text",
    "  def f(x):\n\n\t return  x\r\n   \n\n\n",
    "don't WE'LL I'M 'tis",
    "\x00\x7f\u00a0\u2028\ufffd",
    "",
]


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def auto(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_vocabulary(tokenizer):
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.bos_token_id == VOCAB_SIZE - 4
    assert tokenizer.encoding.n_vocab == VOCAB_SIZE


def test_training_is_deterministic_and_reads_what_the_reference_reads(tokenizer):
    texts = [make_text(seed, 400) for seed in range(40)]
    assert train_tokenizer(texts, VOCAB_SIZE) == tokenizer
    # Beyond the first characters of a document, and after the total, nothing is read.
    shortest = min(map(len, texts))
    beginnings = train_tokenizer([text[:shortest] for text in texts], VOCAB_SIZE)
    assert train_tokenizer(texts, VOCAB_SIZE, max_document_characters=shortest) == beginnings
    assert beginnings != tokenizer

    def until_enough():
        yield from texts[:10]
        raise AssertionError("read on after max_characters")

    enough = sum(map(len, texts[:10]))
    assert train_tokenizer(until_enough(), VOCAB_SIZE, max_characters=enough) == train_tokenizer(
        texts[:10], VOCAB_SIZE
    )


@pytest.mark.parametrize("text", TEXTS)
def test_the_same_ids_from_tiktoken_and_from_auto_tokenizer(tokenizer, auto, text):
    ids = tokenizer.encode(text).tolist()
    assert auto(text).input_ids == ids
    assert all(i < tokenizer.bos_token_id for i in ids)
    assert tokenizer.decode(ids) == text
    assert auto.decode(ids) == text


def test_the_same_ids_on_source_files(tokenizer, auto):
    for name in ("argparse.py", "tokenize.py", "html/entities.py"):
        text = (Path(sysconfig.get_paths()["stdlib"]) / name).read_text(encoding="utf-8")
        assert auto(text).input_ids == tokenizer.encode(text).tolist()


POINTS = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]  # all but surrogates


@pytest.mark.parametrize(
    "separator", ["\n", *(pytest.param(x, marks=pytest.mark.slow) for x in ("a", " "))]
)
def test_the_same_ids_on_every_code_point(tokenizer, auto, separator):
    for start in range(0, len(POINTS), 5_000):
        text = separator.join(POINTS[start : start + 5_000])
        assert auto(text).input_ids == tokenizer.encode(text).tolist()


@pytest.mark.slow
def test_the_same_ids_on_every_code_point_alone(tokenizer, auto):
    for start in range(0, len(POINTS), 10_000):
        part = POINTS[start : start + 10_000]
        assert auto(part).input_ids == tokenizer.encoding.encode_ordinary_batch(part, num_threads=1)


def test_auto_tokenizer_knows_bos(auto):
    assert (auto.bos_token, auto.bos_token_id, len(auto)) == (
        SPECIAL_TOKENS[0],
        VOCAB_SIZE - 4,
        VOCAB_SIZE,
    )
    assert auto.split_special_tokens
    assert auto.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(
        range(VOCAB_SIZE - 4, VOCAB_SIZE)
    )


def test_byte_lengths_sum_to_the_texts(tokenizer):
    for text in [*TEXTS, make_text(5, 500)]:
        assert tokenizer.token_bytes[tokenizer.encode(text)].sum() == len(text.encode("utf-8"))
    assert tokenizer.token_bytes[-4:].tolist() == [0, 0, 0, 0]
    assert tokenizer.token_bytes.dtype == np.int32


def test_the_references_table_counts_broken_characters_as_three_bytes(tokenizer):
    # As the reference computes it: decode each id alone, encode again, special tokens 0.
    expected = [
        0 if (text := tokenizer.encoding.decode([i])) in SPECIAL_TOKENS else len(text.encode())
        for i in range(tokenizer.vocab_size)
    ]
    assert tokenizer.reference_token_bytes.tolist() == expected
    single = tokenizer.ranks[b"\xc3"]
    assert tokenizer.reference_token_bytes[single] == 3
    assert tokenizer.token_bytes[single] == 1


def test_save_and_load(tokenizer, folder):
    assert BytePairTokenizer.load(folder) == tokenizer
    assert open_tokenizer(folder) == tokenizer
    np.testing.assert_array_equal(
        np.load(folder / "token_bytes.npy", allow_pickle=False), tokenizer.token_bytes
    )


def test_tiktoken_reads_our_ranks_and_we_read_its_files(tokenizer, folder, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # no cache in the temporary folder
    assert load_tiktoken_bpe(str(folder / RANKS_FILE)) == tokenizer.ranks
    assert open_tokenizer(folder / RANKS_FILE) == tokenizer  # a file alone: the reference's pattern


def test_a_vocabulary_that_merging_alone_cannot_reach(tmp_path):
    # "abc" is a token though neither "ab" nor "bc" is: tiktoken takes it as a whole piece.
    ranks = {bytes([i]): i for i in range(256)} | {b"abc": 256}
    tokenizer = BytePairTokenizer(ranks)
    tokenizer.save(tmp_path)
    auto = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("abc", "abcd", " abc", "abc abc"):
        assert auto(text).input_ids == tokenizer.encode(text).tolist()
    assert tokenizer.encode("abc").tolist() == [256]


def test_bad_vocabularies(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"ranks must be 0 .. 256, each once"):
        BytePairTokenizer({bytes([i]): i for i in range(256)} | {b"ab": 300})
    with pytest.raises(ValueError, match="every single byte must be a token; 1 are missing"):
        BytePairTokenizer({bytes([i]): i for i in range(255)} | {b"ab": 255})
    with pytest.raises(ValueError, match="special_tokens must name at least BOS"):
        BytePairTokenizer(tokenizer.ranks, special_tokens=())
    with pytest.raises(ValueError, match="vocab_size must be at least 260"):
        train_tokenizer(["text"], 259)
    with pytest.raises(ValueError, match=r"the texts must give 1020 tokens.*Use more text"):
        train_tokenizer(["abc abc"], 1024)


def test_bad_files(tmp_path):
    with pytest.raises(ValueError, match="must exist at"):
        open_tokenizer(tmp_path / "nothing")
    with pytest.raises(ValueError, match=f"must hold tokenizer.json and {RANKS_FILE}"):
        open_tokenizer(tmp_path)
    pickled = tmp_path / "tokenizer.pkl"
    pickled.write_bytes(b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00]\x94.")
    with pytest.raises(ValueError, match=r"line 1 is not\. A pickled encoding can run code"):
        read_tiktoken_ranks(pickled)


def test_the_config_is_plain_json(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["split_special_tokens"] is True
    assert config["bos_token"] == "<|reserved_0|>"
