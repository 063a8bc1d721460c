"""The boundary rules of packed rows, checked against segments.bin and sources.json.

Every row opens with a document; BOS stands in a row exactly where the next one begins; no document
is placed twice; all but a row's last are whole.
"""

from __future__ import annotations

import json

import numpy as np

from data_scripts.chunk_set import ChunkSet
from data_scripts.chunking import document_sha256

SEGMENT_COLUMNS = 3  # of segments.bin: row, first input position, index in sources.json


def packed_problems(chunk_set: ChunkSet, split: str) -> list[str]:
    """What does not hold of a split's packed rows, in words; empty if it has none or all holds."""
    if chunk_set.content(split) == "long":
        return []
    folder = chunk_set.path / split
    segments = np.fromfile(folder / "segments.bin", "<i8").reshape(-1, SEGMENT_COLUMNS)
    sources = json.loads((folder / "sources.json").read_text(encoding="utf-8"))
    rows, targets = _rows(chunk_set, split)
    problems = []
    if len(np.unique(segments[:, 2])) != len(segments):
        problems.append(f"{split}/segments.bin places a document twice")
    if not np.array_equal(np.unique(segments[:, 0]), np.arange(len(rows))):
        return [*problems, f"{split}/segments.bin does not cover rows 0 to {len(rows) - 1}"]
    starts = np.searchsorted(segments[:, 0], np.arange(len(rows) + 1))
    for row, place in enumerate(rows):
        placed = segments[starts[row] : starts[row + 1]]
        problem = _row_problem(targets[place], placed, sources, chunk_set.bos_token_id)
        if problem is not None:
            problems.append(f"row {row} of {split} {problem}")
            break  # one wrong row is often the first of many
    return problems


def _rows(chunk_set: ChunkSet, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Where each packed row stands in an array [num_chunks, chunk_length], and that array."""
    entry = chunk_set.manifest["splits"][split]
    if entry["kind"] == "documents":
        tokens = chunk_set.documents(split, opened_by="verify").tokens
        return np.arange(entry["num_chunks"]), tokens.reshape(-1, chunk_set.chunk_length)
    chunks = chunk_set.train_chunks(split)
    if chunk_set.content(split) == "packed":
        return np.arange(len(chunks)), chunks
    document = np.asarray(chunk_set.chunk_index(split)[:, 0])
    places = np.argsort(document, kind="stable")  # rows are the first documents, a chunk each
    return places[: entry["num_packed_rows"]], chunks


def _row_problem(
    targets: np.ndarray, placed: np.ndarray, sources: dict[str, list], bos_token_id: int
) -> str | None:
    """What is wrong with one row, given its segments."""
    stream = np.concatenate([[bos_token_id], targets])
    found = np.flatnonzero(stream == bos_token_id)
    if not np.array_equal(found, placed[:, 1]):
        return f"has BOS at inputs {found.tolist()}, segments.bin at {placed[:, 1].tolist()}"
    ends = np.append(placed[1:, 1], len(stream))
    for i, ((_, start, source), end) in enumerate(zip(placed, ends, strict=True)):
        if not 0 <= source < len(sources["ids"]):
            return f"names document {source} of {len(sources['ids'])}"
        tokens, whole = stream[start + 1 : end], sources["num_tokens"][source]
        is_last = i == len(placed) - 1
        if len(tokens) > whole or (len(tokens) < whole and not is_last):
            return f"holds {len(tokens)} tokens of {sources['ids'][source]}, which has {whole}"
        if len(tokens) == whole and document_sha256(tokens) != sources["sha256"][source]:
            return f"does not hold {sources['ids'][source]}, which segments.bin names"
    return None
