"""A split's staged documents -> its files in the set; memory does not grow with the split.

Documents are read in order, one shard at a time; a training chunk is written to its place in the
frozen order. Beside chunk_set.py's files a split with packed rows has

    sources.json     ids, num_tokens and sha256 of the documents that were packed
    segments.bin     int64 [num_segments, 3]: row, first input position, index in sources.json
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from data_scripts.chunk_set import INDEX_COLUMNS
from data_scripts.chunking import (
    DocumentRules,
    OverlapIndex,
    chunk_starts,
    document_sha256,
    training_order,
)
from data_scripts.packing import BATCH_DOCUMENTS, pack_rows
from data_scripts.staging import StagedShard, write_json

if TYPE_CHECKING:
    from data_scripts.assemble import SplitPlan


@dataclass
class _DocumentList:
    """What documents.json and sources.json hold."""

    ids: list[str] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    sha256: list[str] = field(default_factory=list)

    def add(self, document_id: str, tokens: np.ndarray) -> None:
        self.ids.append(document_id)
        self.num_tokens.append(len(tokens))
        self.sha256.append(document_sha256(tokens))

    def write(self, path: Path) -> None:
        write_json(path, vars(self))


class _Overlaps:
    """Finds the documents of one split that begin like one of an earlier split."""

    def __init__(self, index: OverlapIndex, split: SplitPlan) -> None:
        self._index, self._split = index, split
        self.found: list[dict[str, str]] = []
        self.num_before = 0

    def keeps(self, document_id: str, tokens: np.ndarray) -> bool:
        """Note an overlap; whether the document stays."""
        self.num_before += 1
        match = None if self._split.kind == "chunks" else self._index.find(tokens)
        if match is not None and match[0] != self._split.name:
            self.found.append({"document": document_id, "split": match[0], "equals": match[1]})
            if self._split.overlaps == "drop":
                return False
        self._index.add(self._split.name, document_id, tokens)
        return True

    def entry(self) -> dict[str, Any]:
        if self._split.kind == "chunks":
            return {}
        return {
            "num_documents_before_overlaps": self.num_before,
            "overlaps": self.found,
            "overlaps_dropped": self._split.overlaps == "drop",
        }


class SplitWriter:
    """Writes the splits of one set, one after the other; overlaps are looked for in those before.

    Args:
        rules: lengths of documents and chunks.
        seed: of the permutation of training chunks.
        bos_token_id: what opens each document of a packed row.
    """

    def __init__(self, rules: DocumentRules, seed: int, bos_token_id: int) -> None:
        self._rules, self._seed, self._bos = rules, seed, bos_token_id
        self._index = OverlapIndex()

    def write(self, folder: Path, split: SplitPlan, staged: list[StagedShard]) -> dict[str, Any]:
        """Write a split's files; returns its entry in the manifest.

        Raises:
            ValueError: if the split keeps nothing.
        """
        if split.content == "packed":
            counts = self._write_packed(folder, split, staged)
        elif split.content == "mixed":
            counts = self._write_mixed(folder, split, staged)
        elif split.kind == "chunks":
            counts = self._write_chunks(folder, split, staged)
        else:
            counts = self._write_documents(folder, split, staged)
        return {
            "kind": split.kind,
            "content": split.content,
            "confirmation": split.confirmation,
            "max_document_tokens": split.max_document_tokens,
            "shards": [
                {"name": shard.name, "sha256": shard.sha256, **shard.counts} for shard in staged
            ],
            **counts,
        }

    def _write_chunks(
        self, folder: Path, split: SplitPlan, staged: list[StagedShard]
    ) -> dict[str, Any]:
        """Long documents for training: full chunks, each at its place in the frozen order."""
        listed = _DocumentList()
        lengths = [length for shard in staged for length in shard.num_tokens]
        lengths = lengths[: split.max_documents]
        num_chunks = len(chunk_starts(lengths, self._rules.chunk_length, split.max_chunks)[0])
        self._require_chunks(split, num_chunks)
        chunks = self._long_chunks(staged, split, listed)
        order = training_order(num_chunks, self._seed)
        _write_in_order(folder, chunks, order, self._rules.chunk_length, staged[0].dtype)
        listed.write(folder / "documents.json")
        return self._chunk_counts(listed, num_chunks)

    def _long_chunks(
        self, staged: list[StagedShard], split: SplitPlan, listed: _DocumentList
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """(document, first target, targets) of every full chunk, document by document.

        `listed` grows by each document as its first chunk is asked for.
        """
        overlaps = _Overlaps(self._index, split)
        length = self._rules.chunk_length
        for document_id, tokens in _documents(staged):
            if len(tokens) + 1 < self._rules.min_tokens:
                continue
            overlaps.keeps(document_id, tokens)
            listed.add(document_id, tokens)
            for start in range(0, len(tokens) - length + 1, length):
                yield len(listed.ids) - 1, start, tokens[start : start + length]

    def _write_documents(
        self, folder: Path, split: SplitPlan, staged: list[StagedShard]
    ) -> dict[str, Any]:
        """Whole long documents for evaluation."""
        listed, overlaps = _DocumentList(), _Overlaps(self._index, split)
        with (folder / "tokens.bin").open("wb") as file:
            for document_id, tokens in _documents(staged):
                if split.max_documents is not None and len(listed.ids) >= split.max_documents:
                    break
                if overlaps.keeps(document_id, tokens):
                    listed.add(document_id, tokens)
                    file.write(tokens.tobytes())
        if not listed.ids:
            raise ValueError(
                f"split {split.name} must keep at least one document of {self._rules.min_tokens} "
                f"tokens (BOS counted); it keeps none of {overlaps.num_before}. Use longer "
                "documents or a smaller --min_tokens."
            )
        listed.write(folder / "documents.json")
        return self._document_counts(listed) | overlaps.entry()

    def _write_packed(
        self, folder: Path, split: SplitPlan, staged: list[StagedShard]
    ) -> dict[str, Any]:
        """Packed rows in the order of packing, for training or evaluation."""
        overlaps = _Overlaps(self._index, split)
        rows = self._packed_rows(folder, split, staged, overlaps)
        listed = _DocumentList()
        if split.kind == "documents":
            with (folder / "tokens.bin").open("wb") as file:
                for _, _, targets in rows:
                    file.write(targets.tobytes())
                    listed.add(f"row:{len(listed.ids)}", targets)
        else:
            index = []
            with (folder / "chunks.bin").open("wb") as file:
                for row, _, targets in rows:
                    raw = targets.tobytes()
                    file.write(raw)
                    index.append((row, 0, zlib.crc32(raw)))
                    listed.add(f"row:{row}", targets)
            (folder / "chunk_index.bin").write_bytes(np.array(index, "<i8").tobytes())
        self._require_chunks(split, len(listed.ids))
        listed.write(folder / "documents.json")
        if split.kind == "chunks":
            return self._chunk_counts(listed, len(listed.ids))
        return self._document_counts(listed) | overlaps.entry()

    def _write_mixed(
        self, folder: Path, split: SplitPlan, staged: list[StagedShard]
    ) -> dict[str, Any]:
        """Packed rows of short documents and chunks of long ones, permuted together.

        The rows are packed into a file of their own first, since only then are they counted.
        """
        chunk_length, dtype = self._rules.chunk_length, staged[0].dtype
        packed_path = folder / "packed.tmp"
        with packed_path.open("wb") as file:
            num_rows = 0
            overlaps = _Overlaps(self._index, split)
            for _, _, targets in self._packed_rows(folder, split, staged, overlaps):
                file.write(targets.tobytes())
                num_rows += 1
        lengths = [
            n for shard in staged for n in shard.num_tokens if n + 1 >= self._rules.min_tokens
        ]
        num_long, num_packed = mixture(
            len(chunk_starts(lengths, chunk_length)[0]),
            num_rows,
            split.long_share,
            split.max_chunks,
        )
        self._require_chunks(split, min(num_long, num_packed))
        listed = _DocumentList()

        def chunks() -> Iterator[tuple[int, int, np.ndarray]]:
            num_bytes = chunk_length * dtype.itemsize
            for row in range(num_packed):
                targets = np.fromfile(packed_path, dtype, chunk_length, offset=row * num_bytes)
                listed.add(f"row:{row}", targets)
                yield row, 0, targets
            yield from self._long_chunks(staged, split, listed)

        order = training_order(num_packed + num_long, self._seed)
        _write_in_order(folder, chunks(), order, chunk_length, dtype)
        packed_path.unlink()
        segments = np.fromfile(folder / "segments.bin", "<i8").reshape(-1, 3)
        (folder / "segments.bin").write_bytes(segments[segments[:, 0] < num_packed].tobytes())
        listed.write(folder / "documents.json")
        counts = self._chunk_counts(listed, num_packed + num_long)
        return counts | {"num_long_chunks": num_long, "num_packed_rows": num_packed}

    def _packed_rows(
        self, folder: Path, split: SplitPlan, staged: list[StagedShard], overlaps: _Overlaps
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """(row, 0, targets) of every packed row; writes sources.json and segments.bin."""
        sources = _DocumentList()
        short_only = split.short_only or split.content == "mixed"

        def documents(shard: StagedShard) -> Iterator[np.ndarray]:
            for document_id, tokens in shard.documents():
                if short_only and len(tokens) + 1 >= self._rules.min_tokens:
                    continue
                if overlaps.keeps(document_id, tokens):
                    sources.add(document_id, tokens)
                    yield tokens

        # As in the reference's loader, no batch goes from one shard into the next.
        batches = (
            batch for shard in staged for batch in _batched(documents(shard), BATCH_DOCUMENTS)
        )
        rows = pack_rows(batches, self._rules.chunk_length, self._bos, staged[0].dtype)
        # A mixed split is cut to its shares later.
        limit = None if split.content == "mixed" else split.max_chunks
        with (folder / "segments.bin").open("wb") as file, closing(rows):
            for number, row in enumerate(tqdm(rows, desc=f"pack {split.name}", unit="row")):
                entries = [(number, position, source) for position, source in row.segments]
                file.write(np.array(entries, "<i8").tobytes())
                yield number, 0, row.targets
                if limit is not None and number + 1 >= limit:
                    break
        sources.write(folder / "sources.json")

    def _require_chunks(self, split: SplitPlan, num_chunks: int) -> None:
        if num_chunks == 0:
            raise ValueError(
                f"split {split.name} must give at least one chunk of {self._rules.chunk_length} "
                f"targets{' of each kind' if split.content == 'mixed' else ''}; it gives none. "
                "Use longer documents, more of them, or a smaller --chunk_length."
            )

    def _chunk_counts(self, listed: _DocumentList, num_chunks: int) -> dict[str, int]:
        return {
            "num_documents": len(listed.ids),
            "num_chunks": num_chunks,
            "num_targets": num_chunks * self._rules.chunk_length,
        }

    def _document_counts(self, listed: _DocumentList) -> dict[str, int]:
        length = self._rules.chunk_length
        num_chunks = sum(num_tokens // length for num_tokens in listed.num_tokens)
        return {
            "num_documents": len(listed.ids),
            "num_targets": sum(listed.num_tokens),
            "num_chunks": num_chunks,
            "num_targets_in_chunks": num_chunks * length,
        }


def mixture(
    num_long: int, num_packed: int, long_share: float, max_chunks: int | None = None
) -> tuple[int, int]:
    """The largest mixture of the stated share that some chunks of two kinds allow.

    Args:
        num_long, num_packed: chunks of long documents, and packed rows, that there are.
        long_share: of the former in the mixture, between 0 and 1.
        max_chunks: of the mixture; None takes all that the shares allow.

    Returns:
        How many of each; their share is `long_share` to the nearest chunk.
    """
    total = min(int(num_long / long_share), int(num_packed / (1.0 - long_share)))
    if max_chunks is not None:
        total = min(total, max_chunks)
    long = min(round(total * long_share), num_long)
    return long, min(total - long, num_packed)


def _batched(documents: Iterator[np.ndarray], size: int) -> Iterator[list[np.ndarray]]:
    while batch := list(itertools.islice(documents, size)):
        yield batch


def _documents(staged: list[StagedShard]) -> Iterator[tuple[str, np.ndarray]]:
    for shard in staged:
        yield from shard.documents()


def _write_in_order(
    folder: Path,
    chunks: Iterable[tuple[int, int, np.ndarray]],
    order: np.ndarray,
    chunk_length: int,
    dtype: np.dtype,
) -> None:
    """Write chunks.bin and chunk_index.bin: at place p the chunk number order[p]."""
    place_of = np.empty_like(order)
    place_of[order] = np.arange(len(order))
    index = np.empty((len(order), INDEX_COLUMNS), "<i8")
    num_bytes = chunk_length * dtype.itemsize
    progress = tqdm(place_of, desc=f"write {folder.name}", unit="chunk")
    with (folder / "chunks.bin").open("wb") as file:
        for place, (document, start, targets) in zip(progress, chunks, strict=False):
            raw = targets.tobytes()
            file.seek(int(place) * num_bytes)
            file.write(raw)
            index[place] = document, start, zlib.crc32(raw)
    (folder / "chunk_index.bin").write_bytes(index.tobytes())
