"""Say what a chunk set holds, for people: `python -m data_scripts.describe DIR`."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data_scripts.chunk_set import ChunkSet
from data_scripts.command_line import normalise_flags, run
from data_scripts.rows import TableOptions, chunk_rows
from data_scripts.target_classes import target_orders
from data_scripts.tokenizer import BytePairTokenizer

_PAPER_COPIES = 0.319  # share of dev-val targets of order >= 2 (ClimbMix)
_SAMPLE_TOKENS = 24  # on each side of the chunk boundary that is shown


def main(argv: Sequence[str] | None = None) -> None:
    """Print the description of a set.

    Raises:
        ValueError: if the folder is no chunk set.
    """
    parser = argparse.ArgumentParser(prog="python -m data_scripts.describe", description=__doc__)
    parser.add_argument("chunk_set", type=Path, metavar="DIR", help="the chunk set")
    parser.add_argument(
        "--max_chunks", type=int, default=256, help="chunks and documents looked into (%(default)s)"
    )
    arguments = parser.parse_args(normalise_flags(sys.argv[1:] if argv is None else argv))
    if arguments.max_chunks < 1:
        raise ValueError(f"--max_chunks must be at least 1; found {arguments.max_chunks}.")
    chunk_set = ChunkSet.open(arguments.chunk_set)
    print(summary(chunk_set))
    for split in chunk_set.training_splits():
        print("\n" + _describe_chunks(chunk_set, split, arguments.max_chunks))
    for split in chunk_set.evaluation_splits():
        if chunk_set.is_confirmation(split):
            print(f"\n{split}: marked as confirmation, not opened")
        else:
            print("\n" + _describe_documents(chunk_set, split, arguments.max_chunks))


def summary(chunk_set: ChunkSet) -> str:
    """The manifest's counts as a few lines."""
    manifest = chunk_set.manifest
    lines = [
        f"{chunk_set.path}: chunks of {chunk_set.chunk_length:,} targets, vocabulary "
        f"{chunk_set.vocab_size:,}, BOS {chunk_set.bos_token_id}, from {manifest['source']}",
        *(f"  {note}" for note in manifest["notes"]),
    ]
    for name, entry in manifest["splits"].items():
        line = (
            f"  {name:<12} {entry['num_documents']:>7,} documents {entry['num_chunks']:>8,} chunks "
            f"{entry['num_targets']:>13,} targets"
        )
        if entry["kind"] == "documents":
            action = "dropped" if entry["overlaps_dropped"] else "listed"
            before = entry["num_documents_before_overlaps"]
            line += f"  {len(entry['overlaps'])} overlaps {action} of {before:,} documents"
        lines.append(line)
    lines += _expectations(manifest)
    lines.append(f"  fingerprint {chunk_set.fingerprint}")
    return "\n".join(lines)


def _expectations(manifest: dict[str, Any]) -> list[str]:
    """The paper's counts beside what was found: near, never a failure."""
    expected_splits = manifest.get("expected", {})
    lines = ["  the paper's counts, near what is expected here"] if expected_splits else []
    for split, counts in expected_splits.items():
        entry = manifest["splits"][split]
        found_counts = entry | {"num_overlaps": len(entry.get("overlaps", []))}
        for name, expected in counts.items():
            found = found_counts[name]
            lines.append(
                f"    {split:<12} {name.removeprefix('num_'):<18} near {expected:>11,}   "
                f"found {found:>11,}  ({(found - expected) / expected:+.2%})"
            )
    return lines


def _describe_chunks(chunk_set: ChunkSet, split: str, max_chunks: int) -> str:
    """Table states over the first training chunks, and the text around one boundary."""
    chunks = chunk_set.train_chunks(split)[:max_chunks]
    rows = chunk_rows(chunks, chunk_set.chunk_length, chunk_set.bos_token_id, TableOptions())
    order = rows["table_order"].reshape(-1)
    right = (rows["table_candidate"] == rows["shift_labels"]).reshape(-1)
    lines = [f"{split}: table states over {len(chunks)} chunks"]
    lines.append(f"  no match       {np.mean(order == 0):6.1%}")
    for n in range(1, 5):
        hits, wrong = np.mean((order == n) & right), np.mean((order == n) & ~right)
        lines.append(f"  order {n}        {hits + wrong:6.1%}  candidate right {hits:6.1%}")
    return "\n".join(lines)


def _describe_documents(chunk_set: ChunkSet, split: str, max_documents: int) -> str:
    """Lengths, and the targets by order and distance (Section 3.5)."""
    documents = chunk_set.documents(split)
    lengths = np.diff(documents.offsets)
    looked_at = range(min(len(documents), max_documents))
    classes = [
        target_orders(documents.document(i), chunk_set.bos_token_id)
        for i in tqdm(looked_at, desc=f"classify {split}", unit="document", leave=False)
    ]
    order = np.concatenate([item[0] for item in classes])
    distance = np.concatenate([item[1] for item in classes])
    copies = order >= 2
    chunk_length = chunk_set.chunk_length
    lines = [
        f"{split}: {len(documents)} documents of {lengths.min():,} to {lengths.max():,} targets, "
        f"median {int(np.median(lengths)):,}",
        f"  order 0 {np.mean(order == 0):6.1%}   order 1 {np.mean(order == 1):6.1%}   "
        f"copies {np.mean(copies):6.1%} (the paper's dev-val: {_PAPER_COPIES:.1%})",
    ]
    edges = [0, *(chunk_length // part for part in (16, 8, 4, 2, 1)), np.iinfo(np.int32).max]
    for low, high in itertools.pairwise(edges):
        share = np.mean(copies & (distance > low) & (distance <= high))
        name = f"{low:,} - {high:,}" if high <= chunk_length else f"beyond {low:,}"
        lines.append(f"    {name:<16} {share:6.1%}")
    lines.append(_boundary_sample(chunk_set, documents.document(int(np.argmax(lengths)))))
    return "\n".join(lines)


def _boundary_sample(chunk_set: ChunkSet, tokens: np.ndarray) -> str:
    """Text before and after the end of a document's first chunk."""
    tokenizer = BytePairTokenizer.load(chunk_set.tokenizer_path)
    boundary = chunk_set.chunk_length
    before = tokenizer.decode(tokens[max(0, boundary - _SAMPLE_TOKENS) : boundary])
    after = tokenizer.decode(tokens[boundary : boundary + _SAMPLE_TOKENS])
    return f"  around a chunk boundary: {before!r} | {after!r}"


if __name__ == "__main__":
    sys.exit(run(main))
