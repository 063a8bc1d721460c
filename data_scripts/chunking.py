"""Documents -> chunks: which documents count, where they are cut, in what order they stand."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

import numpy as np

from data_scripts.keyed_random import keyed_permutation
from data_scripts.tokenizer import BytePairTokenizer

_HASHED_TOKENS = 1 << 20  # at a time, so that a long document is not copied whole
OVERLAP_TOKENS = 256  # documents that share this many first tokens count as the same (Section 3.2)


@dataclass(frozen=True)
class DocumentRules:
    """Which documents are kept, and how much of them.

    Attributes:
        chunk_length: targets in a chunk.
        min_tokens: the shortest document kept, BOS counted (the paper: 8,193, one full chunk).
        max_document_tokens: targets kept of a document, from its start; None keeps all.
    """

    chunk_length: int
    min_tokens: int
    max_document_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.chunk_length < 2:
            raise ValueError(f"chunk_length must be at least 2; found {self.chunk_length}.")
        if self.min_tokens < 2:
            raise ValueError(
                f"min_tokens counts BOS and must be at least 2; found {self.min_tokens}. "
                "Use chunk_length + 1 for documents of one full chunk."
            )
        if self.max_document_tokens is not None and self.max_document_tokens < self.min_tokens - 1:
            raise ValueError(
                f"max_document_tokens must leave min_tokens - 1 = {self.min_tokens - 1} targets; "
                f"found {self.max_document_tokens}."
            )


@dataclass
class ReadCounts:
    """What became of a shard's documents."""

    read: int = 0
    kept: int = 0
    null_or_empty: int = 0
    too_few_bytes: int = 0
    too_few_tokens: int = 0
    bytes_read: int = 0
    bytes_tokenised: int = 0

    def as_dict(self) -> dict[str, int]:
        """The counts by name, for manifests."""
        return asdict(self)


@dataclass
class TokenisedDocuments:
    """A shard's kept documents, as ids."""

    ids: list[str] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    counts: ReadCounts = field(default_factory=ReadCounts)


def tokenise_documents(
    documents: Iterable[tuple[str, bytes | None]],
    tokenizer: BytePairTokenizer,
    rules: DocumentRules,
) -> TokenisedDocuments:
    """Tokenise the documents that are long enough.

    n bytes hold at most n tokens, so a document with too few bytes is left out before it costs
    anything.

    Args:
        documents: (id, UTF-8 bytes); None or no bytes where a shard has no text in a row.
        tokenizer: the BPE.
        rules: lengths.

    Raises:
        ValueError: if a document is not UTF-8; its id is named.
    """
    result = TokenisedDocuments()
    counts = result.counts
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    for document_id, raw in documents:
        counts.read += 1
        if not raw:
            counts.null_or_empty += 1
            continue
        counts.bytes_read += len(raw)
        if len(raw) + 1 < rules.min_tokens:
            counts.too_few_bytes += 1
            continue
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"every document must be UTF-8; {document_id} is not, at byte {error.start}. "
                "Convert it or leave it out."
            ) from None
        counts.bytes_tokenised += len(raw)
        try:
            tokens = tokenizer.encode(text, rules.max_document_tokens)
        except ValueError as error:
            raise ValueError(f"{document_id}: {error}") from None
        if len(tokens) + 1 < rules.min_tokens:
            counts.too_few_tokens += 1
            continue
        counts.kept += 1
        result.ids.append(document_id)
        result.tokens.append(tokens.astype(dtype))
    return result


def chunk_starts(
    num_tokens: Iterable[int], chunk_length: int, max_chunks: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """All full chunks of some documents, in document order.

    Args:
        num_tokens: stored tokens of each document, BOS not counted.
        chunk_length: targets in a chunk; a remainder at the end of a document is left out.
        max_chunks: stop after so many; None takes all.

    Returns:
        document, start: int64 [num_chunks].
    """
    counts = np.fromiter(num_tokens, np.int64) // chunk_length
    document = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    start = (np.arange(len(document), dtype=np.int64) - first) * chunk_length
    return document[:max_chunks], start[:max_chunks]


def training_order(num_chunks: int, seed: int) -> np.ndarray:
    """The frozen permutation of the training chunks, the same for every arm: int64 [num_chunks]."""
    return keyed_permutation(num_chunks, seed)


def prefix_key(tokens: np.ndarray) -> bytes:
    """What two overlapping documents share: a hash of the first 256 tokens."""
    return hashlib.sha256(tokens[:OVERLAP_TOKENS].astype("<u4").tobytes()).digest()[:16]


def document_sha256(tokens: np.ndarray) -> str:
    """Hash of a whole document's ids, the same for every storage dtype: 32 hex digits."""
    digest = hashlib.sha256()
    for start in range(0, len(tokens), _HASHED_TOKENS):
        digest.update(tokens[start : start + _HASHED_TOKENS].astype("<u4").tobytes())
    return digest.hexdigest()[:32]


class OverlapIndex:
    """First occurrences of document beginnings, split by split."""

    def __init__(self) -> None:
        self._seen: dict[bytes, tuple[str, str]] = {}

    def find(self, tokens: np.ndarray) -> tuple[str, str] | None:
        """Split and id of an added document with the same first 256 tokens, or None."""
        return self._seen.get(prefix_key(tokens))

    def add(self, split: str, document_id: str, tokens: np.ndarray) -> None:
        """Add a document of a split; the first with its beginning counts."""
        self._seen.setdefault(prefix_key(tokens), (split, document_id))
