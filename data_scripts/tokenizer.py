"""The byte-level BPE: trained as the reference trains it, or converted from a tiktoken file.

A tokenizer folder holds what `AutoTokenizer` loads (`tokenizer.json`, `tokenizer_config.json`),
the merge ranks as tiktoken's text file (`ranks.tiktoken`: base64 of the bytes, a space, the rank),
and two tables of byte lengths. tiktoken encodes in bulk, several times as fast; tokenizers serves
the Hub; the ids are the same.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tiktoken
import tokenizers

# GPT-4's pattern with numbers cut into at most two digits, as the reference splits text.
SPLIT_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"""
    r"""| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
)
SPECIAL_TOKENS = tuple(f"<|reserved_{i}|>" for i in range(4))  # the first is BOS

RANKS_FILE = "ranks.tiktoken"
TOKEN_BYTES_FILE = "token_bytes.npy"
REFERENCE_TOKEN_BYTES_FILE = "reference_token_bytes.npy"
_NUM_BYTES = 256
_BLOCK_CHARACTERS = 1 << 20  # a long document is encoded in blocks of about so much text
# tiktoken's regular expression engine overflows its stack at 1,000,000 characters of white space.
_MAX_WHITE_SPACE = 500_000
# Where SPLIT_PATTERN always ends a piece, whatever stands around: after a newline that something
# visible follows (no piece goes on past one), and between a word and a space with another word.
_BOUNDARY = re.compile(r"(?<=\n)(?=[!-~])|(?<=[A-Za-z])(?= [A-Za-z])")


@dataclass(frozen=True)
class BytePairTokenizer:
    """A byte-level BPE and its special tokens, which text can never produce.

    Attributes:
        ranks: token bytes -> id, in the order of merging; ids 0 .. len(ranks) - 1.
        pattern: the regular expression that cuts text into pieces before merging.
        special_tokens: names of the ids that follow, the first of them BOS.
    """

    ranks: dict[bytes, int]
    pattern: str = SPLIT_PATTERN
    special_tokens: tuple[str, ...] = SPECIAL_TOKENS

    def __post_init__(self) -> None:
        if sorted(self.ranks.values()) != list(range(len(self.ranks))):
            raise ValueError(
                f"ranks must be 0 .. {len(self.ranks) - 1}, each once; a gap or a repetition was "
                "found. Re-export the merge ranks."
            )
        missing = [byte for byte in range(_NUM_BYTES) if bytes([byte]) not in self.ranks]
        if missing:
            raise ValueError(
                f"every single byte must be a token; {len(missing)} are missing, the first "
                f"0x{missing[0]:02x}. Only byte-level vocabularies can be used."
            )
        if not self.special_tokens:
            raise ValueError("special_tokens must name at least BOS; found none.")

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        return len(self.ranks) + len(self.special_tokens)

    @property
    def bos_token_id(self) -> int:
        """The id of the first special token."""
        return len(self.ranks)

    @cached_property
    def encoding(self) -> tiktoken.Encoding:
        """The same vocabulary for tiktoken."""
        return tiktoken.Encoding(
            name="doctab",
            pat_str=self.pattern,
            mergeable_ranks=self.ranks,
            special_tokens={
                name: len(self.ranks) + i for i, name in enumerate(self.special_tokens)
            },
        )

    def encode(self, text: str, max_tokens: int | None = None) -> np.ndarray:
        """Token ids of a text, without BOS: uint32 [num_tokens]. Special names are plain text.

        A long text is encoded in blocks that end where a piece ends, so the ids do not depend on
        the blocks, and memory stays near the size of the text.

        Args:
            text: the document.
            max_tokens: stop after so many; None encodes all.

        Raises:
            ValueError: if the text holds 500,000 or more characters of white space in a row.
        """
        if len(text) >= _MAX_WHITE_SPACE and re.search(rf"\s{{{_MAX_WHITE_SPACE}}}", text):
            raise ValueError(
                f"a text must hold fewer than {_MAX_WHITE_SPACE:,} characters of white space in a "
                "row; found a longer run. Shorten the run or leave the document out."
            )
        parts, num_tokens = [], 0
        for block in self._blocks(text):
            parts.append(np.array(self.encoding.encode_ordinary(block), np.uint32))
            num_tokens += len(parts[-1])
            if max_tokens is not None and num_tokens >= max_tokens:
                break
        ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return ids[:max_tokens]

    def _blocks(self, text: str) -> Iterator[str]:
        """The text in blocks that end at a boundary of pieces; whole under another pattern."""
        start = 0
        while self.pattern == SPLIT_PATTERN and len(text) - start > _BLOCK_CHARACTERS:
            boundary = _BOUNDARY.search(text, start + _BLOCK_CHARACTERS)
            if boundary is None:
                break
            yield text[start : boundary.start()]
            start = boundary.start()
        yield text[start:]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of some ids; a character that is cut in two becomes U+FFFD."""
        return self.encoding.decode([int(token_id) for token_id in token_ids])

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """Exact UTF-8 bytes of each token: int32 [vocab_size], 0 for special tokens.

        They sum to the byte length of the text, which the reference's table does not.
        """
        lengths = np.zeros(self.vocab_size, np.int32)
        for token, rank in self.ranks.items():
            lengths[rank] = len(token)
        return lengths

    @cached_property
    def reference_token_bytes(self) -> np.ndarray:
        """The reference's byte table: int32 [vocab_size], only to reproduce its numbers.

        It decodes each token alone, so part of a character counts as U+FFFD, three bytes.
        """
        lengths = np.zeros(self.vocab_size, np.int32)
        for token, rank in self.ranks.items():
            lengths[rank] = len(token.decode("utf-8", errors="replace").encode("utf-8"))
        return lengths

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # Not by tokenizers' own `save`: on a full disk that raises a bare Exception.
        content = _to_tokenizers(self).to_str(pretty=True)
        (folder / "tokenizer.json").write_text(content, encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(
            json.dumps(_tokenizer_config(self), indent=2) + "\n", encoding="utf-8"
        )
        by_rank = sorted(self.ranks, key=self.ranks.__getitem__)
        lines = [f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(by_rank)]
        (folder / RANKS_FILE).write_text("".join(lines), encoding="ascii")
        np.save(folder / TOKEN_BYTES_FILE, self.token_bytes, allow_pickle=False)
        np.save(folder / REFERENCE_TOKEN_BYTES_FILE, self.reference_token_bytes, allow_pickle=False)

    @classmethod
    def load(cls, folder: str | Path) -> BytePairTokenizer:
        """Read a folder written by `save`.

        Raises:
            ValueError: if a file is missing, or is not of this format.
        """
        folder = Path(folder)
        config_path = folder / "tokenizer.json"
        if not config_path.is_file() or not (folder / RANKS_FILE).is_file():
            raise ValueError(
                f"a tokenizer folder must hold tokenizer.json and {RANKS_FILE}; {folder} does not. "
                "Pass a folder that `python -m data_scripts.build` wrote, or a .tiktoken file."
            )
        config = json.loads(config_path.read_text(encoding="utf-8"))
        pattern = config["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
        special = sorted(config["added_tokens"], key=lambda token: token["id"])
        names = tuple(token["content"] for token in special)
        return cls(read_tiktoken_ranks(folder / RANKS_FILE), pattern, names)


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    max_document_characters: int = 10_000,
    max_characters: int = 1_000_000_000,
) -> BytePairTokenizer:
    """Train with rustbpe, as the reference does: the first characters of each document, in order.

    Another trainer breaks ties differently and gives other ids.

    Args:
        texts: documents, in an order that must be fixed for the result to be.
        vocab_size: ids in all, the four special tokens included.
        max_document_characters: how much of a document is used.
        max_characters: where to stop in all; the document that crosses it is still used.

    Raises:
        ValueError: if `vocab_size` has no room for the bytes, or the texts give too few merges.
    """
    import rustbpe  # only training needs it

    num_merges = vocab_size - len(SPECIAL_TOKENS)
    if num_merges < _NUM_BYTES:
        raise ValueError(
            f"vocab_size must be at least {_NUM_BYTES + len(SPECIAL_TOKENS)} (every byte and the "
            f"special tokens); found {vocab_size}."
        )
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(
        _training_texts(texts, max_document_characters, max_characters),
        num_merges,
        pattern=SPLIT_PATTERN,
    )
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    if len(ranks) != num_merges:
        raise ValueError(
            f"the texts must give {num_merges} tokens for vocab_size {vocab_size}; they gave "
            f"{len(ranks)}. Use more text or a smaller vocab_size."
        )
    return BytePairTokenizer(ranks)


def _training_texts(
    texts: Iterable[str], max_document_characters: int, max_characters: int
) -> Iterator[str]:
    num_characters = 0
    for text in texts:
        beginning = text[:max_document_characters]
        num_characters += len(beginning)
        yield beginning
        if num_characters >= max_characters:
            return


def read_tiktoken_ranks(path: str | Path) -> dict[bytes, int]:
    """Read tiktoken's text file of merge ranks.

    Raises:
        ValueError: if it is not such a file; a pickled encoding is refused, never opened as one.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"a tiktoken file of merge ranks must exist at {path}; found none.")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(
                f"{path} must be tiktoken's text format, `base64 rank` on each line; line {number} "
                "is not. A pickled encoding can run code when it is loaded: write its "
                "mergeable ranks as text, on a machine where you trust it."
            ) from None
    return ranks


def open_tokenizer(path: str | Path) -> BytePairTokenizer:
    """Open a tokenizer folder, or a tiktoken file of merge ranks with the reference's pattern.

    Raises:
        ValueError: if the path is neither.
    """
    path = Path(path)
    if path.is_dir():
        nested = path / "tokenizer"
        return BytePairTokenizer.load(nested if nested.is_dir() else path)
    return BytePairTokenizer(read_tiktoken_ranks(path))


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level tokenizer.json."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(_NUM_BYTES) if byte not in set(printable)]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(_NUM_BYTES + i) for i, byte in enumerate(others)}
    return [characters[byte] for byte in range(_NUM_BYTES)]


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens whose merge makes `token`; None if earlier merges cannot make them.

    Runs the merges of lower rank on the token's bytes; what is left is the pair.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    limit = ranks[token]
    while len(parts) > 2:
        pair_ranks = [ranks.get(left + right, limit) for left, right in itertools.pairwise(parts)]
        best = min(pair_ranks)
        if best >= limit:
            return None
        i = pair_ranks.index(best)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None


def _to_tokenizers(tokenizer: BytePairTokenizer) -> tokenizers.Tokenizer:
    """The same BPE for tokenizers and `AutoTokenizer`."""
    characters = _byte_characters()

    def text(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    by_rank = sorted(tokenizer.ranks, key=tokenizer.ranks.__getitem__)
    pairs = [_last_merge(token, tokenizer.ranks) for token in by_rank if len(token) > 1]
    model = tokenizers.models.BPE(
        vocab={text(token): rank for token, rank in tokenizer.ranks.items()},
        merges=[(text(pair[0]), text(pair[1])) for pair in pairs if pair is not None],
        ignore_merges=True,  # as tiktoken: a piece that is a token is that token
    )
    fast = tokenizers.Tokenizer(model)
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(
                tokenizers.Regex(tokenizer.pattern), behavior="isolated"
            ),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    fast.decoder = tokenizers.decoders.ByteLevel()
    fast.add_special_tokens(
        [
            tokenizers.AddedToken(name, special=True, normalized=False)
            for name in tokenizer.special_tokens
        ]
    )
    return fast


def _tokenizer_config(tokenizer: BytePairTokenizer) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.special_tokens[0],
        "additional_special_tokens": list(tokenizer.special_tokens[1:]),
        # Text that spells out a special token stays text.
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
