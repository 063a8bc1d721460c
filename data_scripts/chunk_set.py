"""The prepared folder that training and scoring read: memory-mapped arrays and a manifest.

    manifest.json            what the set is, its sources, counts, and every file's size and sha256
    tokenizer/               what `AutoTokenizer` loads, and the tables of byte lengths
    train/chunks.bin         [num_chunks, chunk_length] targets in training order
    train/chunk_index.bin    int64 [num_chunks, 3]: document, its first target there, crc32
    train/documents.json     ids, num_tokens and sha256 of the split's documents
    dev_val/tokens.bin       an evaluation split: whole documents, one after the other, without BOS
    dev_val/documents.json

A split of packed rows (Section 4.9) is stored the same ways, each row a document of one chunk in
which BOS opens every further text; `sources.json` and `segments.bin` say which texts stand where.

Arrays are little-endian uint16, or uint32 where the vocabulary needs it. A document of N stored
tokens has N targets (BOS is the input of the first) and N // chunk_length full chunks
(Section 3.2).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_scripts.tokenizer import REFERENCE_TOKEN_BYTES_FILE, TOKEN_BYTES_FILE

FORMAT = "doctab-chunk-set"
FORMAT_VERSION = 1
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
INDEX_COLUMNS = 3  # of chunk_index.bin: document, start, crc32


def dtype_name(vocab_size: int) -> str:
    """The smallest dtype that holds every id: "uint16" to 65,536 ids, then "uint32"."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class DocumentSplit:
    """An evaluation split: whole documents, BOS not stored.

    Attributes:
        tokens: memory map of all documents' targets, one after the other.
        offsets: int64 [num_documents + 1]; document i is tokens[offsets[i] : offsets[i + 1]].
        ids: the documents' names.
        chunk_length: of the chunk set.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    ids: list[str]
    chunk_length: int

    def __len__(self) -> int:
        return len(self.ids)

    def document(self, index: int) -> np.ndarray:
        """The targets of one document: [num_targets]."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def chunks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All full chunks, document by document; remainders are left out (Section 3.2).

        Returns:
            document: int64 [num_chunks], index of the document.
            start: int64 [num_chunks], the chunk's first target within its document.
            targets: [num_chunks, chunk_length].
        """
        counts = np.diff(self.offsets) // self.chunk_length
        document = np.repeat(np.arange(len(self), dtype=np.int64), counts)
        first_chunk = np.repeat(np.cumsum(counts) - counts, counts)
        start = (np.arange(len(document), dtype=np.int64) - first_chunk) * self.chunk_length
        targets = np.empty((len(document), self.chunk_length), self.tokens.dtype)
        for i, begin in enumerate(self.offsets[document] + start):
            targets[i] = self.tokens[begin : begin + self.chunk_length]
        return document, start, targets


class ChunkSet:
    """A chunk set on disk. Open it with `ChunkSet.open`."""

    def __init__(self, path: Path, manifest: dict[str, Any], fingerprint: str) -> None:
        self.path = path
        self.manifest = manifest
        self.fingerprint = fingerprint  # sha256 of the manifest, which holds the files' hashes
        self.vocab_size: int = manifest["vocab_size"]
        self.bos_token_id: int = manifest["bos_token_id"]
        self.chunk_length: int = manifest["chunk_length"]
        self.dtype = DTYPES[manifest["dtype"]]

    @classmethod
    def open(cls, path: str | Path, verify: bool = False) -> ChunkSet:
        """Read the manifest and check that every file is there in its size.

        Args:
            path: the folder that `python -m data_scripts.build` wrote.
            verify: also compare every file's sha256 (about a second a gigabyte).

        Raises:
            ValueError: if the folder is no chunk set, or a file is missing or differs.
        """
        path = Path(path)
        manifest_path = path / "manifest.json"
        if not manifest_path.is_file():
            raise ValueError(
                f"a chunk set must hold manifest.json; {path} does not. "
                "Make one with `python -m data_scripts.build stdlib --out DIR`."
            )
        content = manifest_path.read_bytes()
        try:
            manifest = json.loads(content)
        except ValueError as error:
            raise ValueError(f"{manifest_path} must be JSON: {error}. Rebuild the set.") from None
        _check_manifest(manifest_path, manifest)
        chunk_set = cls(path, manifest, hashlib.sha256(content).hexdigest())
        for problem in chunk_set.file_problems(hashes=verify):
            raise ValueError(f"{path} is damaged: {problem}. Rebuild the set or copy it again.")
        return chunk_set

    def file_problems(self, hashes: bool = True) -> list[str]:
        """What is wrong with the set's files: missing, of another size, of another sha256."""
        problems = []
        for name, expected in self.manifest["files"].items():
            file = self.path / name
            if not file.is_file():
                problems.append(f"{name} is missing")
            elif file.stat().st_size != expected["num_bytes"]:
                problems.append(
                    f"{name} has {file.stat().st_size} bytes, the manifest says "
                    f"{expected['num_bytes']}"
                )
            elif hashes and (found := file_sha256(file)) != expected["sha256"]:
                problems.append(
                    f"{name} has sha256 {found[:12]}.., the manifest says "
                    f"{expected['sha256'][:12]}.."
                )
        return problems

    @property
    def tokenizer_path(self) -> Path:
        """The folder that `AutoTokenizer.from_pretrained` loads."""
        return self.path / "tokenizer"

    def token_bytes(self) -> np.ndarray:
        """Exact UTF-8 bytes of each token: int32 [vocab_size], 0 for special tokens."""
        return np.load(self.tokenizer_path / TOKEN_BYTES_FILE, allow_pickle=False)

    def reference_token_bytes(self) -> np.ndarray:
        """The reference's byte table: int32 [vocab_size], only to reproduce its numbers."""
        return np.load(self.tokenizer_path / REFERENCE_TOKEN_BYTES_FILE, allow_pickle=False)

    def training_splits(self) -> list[str]:
        """Names of the splits that are stored as chunks in training order."""
        return self._splits_of_kind("chunks")

    def evaluation_splits(self) -> list[str]:
        """Names of the splits that are stored as whole documents, confirmation splits included."""
        return self._splits_of_kind("documents")

    def is_confirmation(self, split: str) -> bool:
        """Whether a split may be scored only once, after a registration (Section 3.6)."""
        return bool(self._split(split)["confirmation"])

    def content(self, split: str) -> str:
        """ "long", "packed" or "mixed": what the split's chunks or documents are."""
        return self._split(split).get("content", "long")

    def target_sha256(self, split: str) -> str:
        """sha256 of the split's targets as stored, in their order."""
        file = "chunks.bin" if self._split(split)["kind"] == "chunks" else "tokens.bin"
        return self.manifest["files"][f"{split}/{file}"]["sha256"]

    def train_chunks(self, split: str = "train") -> np.ndarray:
        """The targets in training order: memory map [num_chunks, chunk_length]."""
        entry = self._split(split, "chunks")
        shape = (entry["num_chunks"], self.chunk_length)
        return np.memmap(self.path / split / "chunks.bin", self.dtype, "r", shape=shape)

    def chunk_index(self, split: str = "train") -> np.ndarray:
        """Where each training chunk comes from: int64 [num_chunks, 3], document, start, crc32."""
        shape = (self._split(split, "chunks")["num_chunks"], INDEX_COLUMNS)
        path = self.path / split / "chunk_index.bin"
        return np.memmap(path, np.dtype("<i8"), "r", shape=shape)

    def chunk_documents(self, split: str) -> np.ndarray:
        """The document of each full chunk of any split: int64 [num_chunks]."""
        if self._split(split)["kind"] == "chunks":
            return np.array(self.chunk_index(split)[:, 0])
        counts = np.array(self.document_list(split)["num_tokens"]) // self.chunk_length
        return np.repeat(np.arange(len(counts), dtype=np.int64), counts)

    def document_list(self, split: str) -> dict[str, list[Any]]:
        """`ids`, `num_tokens` and `sha256` of a split's documents, of equal length."""
        self._split(split)
        return json.loads((self.path / split / "documents.json").read_text(encoding="utf-8"))

    def source_documents(self, split: str) -> dict[str, list[Any]]:
        """As `document_list`, of the documents in the text: those packed into rows included.

        A packed split lists its rows as documents; what stands in them is in sources.json.
        """
        entry = self._split(split)
        listed = self.document_list(split)
        if self.content(split) == "long":
            return listed
        path = self.path / split / "sources.json"
        sources = json.loads(path.read_text(encoding="utf-8"))
        num_rows = entry.get("num_packed_rows", len(listed["ids"]))
        return {name: sources[name] + listed[name][num_rows:] for name in sources}

    def documents(self, split: str, opened_by: str | None = None) -> DocumentSplit:
        """An evaluation split's documents, memory-mapped.

        Args:
            split: its name.
            opened_by: what opens a confirmation split (Section 3.6): the hash of the registration
                that it is scored under, or the command that reads it without a model.

        Raises:
            ValueError: if there is no such split, or nothing opens a confirmation split.
        """
        entry = self._split(split, "documents")
        if self.is_confirmation(split) and not opened_by:
            raise ValueError(
                f"{split} is a confirmation split: its targets stay closed until a registration "
                "opens them (python -m evaluation.protocol). Use another split, or pass opened_by."
            )
        listed = self.document_list(split)
        offsets = np.zeros(len(listed["ids"]) + 1, np.int64)
        np.cumsum(listed["num_tokens"], out=offsets[1:])
        shape = (entry["num_targets"],)
        tokens = np.memmap(self.path / split / "tokens.bin", self.dtype, "r", shape=shape)
        return DocumentSplit(tokens, offsets, listed["ids"], self.chunk_length)

    def _splits_of_kind(self, kind: str) -> list[str]:
        return [name for name, entry in self.manifest["splits"].items() if entry["kind"] == kind]

    def _split(self, split: str, kind: str | None = None) -> dict[str, Any]:
        splits = self.manifest["splits"]
        known = list(splits) if kind is None else self._splits_of_kind(kind)
        if split not in known:
            stored = "" if kind is None else f" stored as {kind}"
            raise ValueError(
                f"{self.path} has no split {split!r}{stored}. "
                f"Use one of: {', '.join(known) or 'none'}."
            )
        return splits[split]


def _check_manifest(path: Path, manifest: Any) -> None:
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path} must be a manifest of format {FORMAT!r}; it is not.")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path} must have format_version {FORMAT_VERSION}; found "
            f"{manifest.get('format_version')}. Rebuild the set with this version."
        )
    needed = ("vocab_size", "bos_token_id", "chunk_length", "dtype", "splits", "files")
    missing = [key for key in needed if key not in manifest]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}. Rebuild the set.")
    dtype, vocab_size = manifest["dtype"], manifest["vocab_size"]
    if dtype not in DTYPES or vocab_size > 2 ** (8 * DTYPES[dtype].itemsize):
        raise ValueError(
            f"{path}: dtype must be one of {', '.join(DTYPES)} and hold every id; found {dtype} "
            f"for a vocabulary of {vocab_size}. Rebuild the set with {dtype_name(vocab_size)}."
        )
