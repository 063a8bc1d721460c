"""Say what a chunk set holds, for people: `python -m data_scripts.describe DIR`.

Counts and lengths; how often the table finds something, and whether its candidate is right; how the
targets divide by order, distance and visibility; and the text around a chunk boundary. A split
marked as confirmation is opened only with `--registration FILE`, a JSON file of
`python -m evaluation.protocol register` that names this set's fingerprint and the split.
"""

from __future__ import annotations

import argparse
import itertools
import json
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

# The paper's dev-val (ClimbMix, chunks of 8,192): shares of targets from Tables 4 and 5.
_PAPER_COPIES = 0.319
_PAPER_ORDERS = {"order 0": 0.478, "order 1": 0.203, "copies": _PAPER_COPIES}
_PAPER_BANDS = (0.149, 0.034, 0.034, 0.034, 0.028, 0.041)
_PAPER_STATES = {
    ("order 0", "no match"): 0.159,
    ("order 0", "wrong"): 0.319,
    ("order 1", "right"): 0.052,
    ("order 1", "wrong"): 0.142,
    ("copies", "right"): 0.221,
    ("copies", "wrong"): 0.087,
}
_SAMPLE_TOKENS = 24  # on each side of the chunk boundary that is shown


def main(argv: Sequence[str] | None = None) -> None:
    """Print the description of a set.

    Raises:
        ValueError: if the folder is no chunk set, or the registration is not for it.
    """
    parser = argparse.ArgumentParser(
        prog="python -m data_scripts.describe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("chunk_set", type=Path, metavar="DIR", help="the chunk set")
    parser.add_argument(
        "--max_chunks", type=int, default=256, help="chunks and documents looked into (%(default)s)"
    )
    parser.add_argument(
        "--row_length",
        type=int,
        help="inputs in a row, which decides what is visible (a quarter of a chunk)",
    )
    parser.add_argument(
        "--registration", type=Path, metavar="FILE", help="opens the confirmation split it names"
    )
    arguments = parser.parse_args(normalise_flags(sys.argv[1:] if argv is None else argv))
    if arguments.max_chunks < 1:
        raise ValueError(f"--max_chunks must be at least 1; found {arguments.max_chunks}.")
    chunk_set = ChunkSet.open(arguments.chunk_set)
    row_length = arguments.row_length or max(1, chunk_set.chunk_length // 4)
    opened = None
    if arguments.registration is not None:
        opened = registered_split(arguments.registration, chunk_set)
    print(summary(chunk_set))
    for split in chunk_set.training_splits():
        print("\n" + describe_chunks(chunk_set, split, arguments.max_chunks))
    for split in chunk_set.evaluation_splits():
        if chunk_set.is_confirmation(split) and split != opened:
            print(f"\n{split}: marked as confirmation, not opened without its --registration")
        else:
            limits = (arguments.max_chunks, row_length)
            print("\n" + describe_documents(chunk_set, split, *limits, arguments.registration))


def registered_split(path: Path, chunk_set: ChunkSet) -> str:
    """The confirmation split that a registration names.

    Raises:
        ValueError: if the file is no registration, or names another set or no such split.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found, split = content["data_sha256"], content["set_name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--registration must be a JSON file with data_sha256 and set_name; {path}: "
            f"{error!r}. Make one with `python -m evaluation.protocol register`."
        ) from None
    if found != chunk_set.fingerprint:
        raise ValueError(
            f"{path} must name this set's data_sha256, {chunk_set.fingerprint}; it names {found}."
        )
    if split not in chunk_set.evaluation_splits():
        raise ValueError(
            f"{path} must name an evaluation split of {chunk_set.path}; it names {split!r}. "
            f"There are {', '.join(chunk_set.evaluation_splits())}."
        )
    return split


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


def describe_chunks(chunk_set: ChunkSet, split: str, max_chunks: int) -> str:
    """The nine table cells over the first training chunks (Section 4.4)."""
    chunks = chunk_set.train_chunks(split)[:max_chunks]
    bos = chunk_set.bos_token_id
    rows = chunk_rows(chunks, chunk_set.chunk_length, bos, TableOptions())
    order = rows["table_order"].reshape(-1)
    right = (rows["table_candidate"] == rows["shift_labels"]).reshape(-1)
    lines = [
        f"{split}: what the table says over {len(chunks)} chunks",
        f"  {'no match':<10} {np.mean(order == 0):6.1%}",
    ]
    for n in range(1, 5):
        hits, misses = np.mean((order == n) & right), np.mean((order == n) & ~right)
        share = f"right {hits / (hits + misses):.0%} of the time" if hits + misses else "never"
        lines.append(f"  {f'order {n}':<10} right {hits:6.1%}   wrong {misses:6.1%}   {share}")
    return "\n".join(lines)


def describe_documents(
    chunk_set: ChunkSet,
    split: str,
    max_documents: int,
    row_length: int,
    registration: Path | None = None,
) -> str:
    """Lengths; the targets of full chunks by order, distance, visibility and table state.

    Args:
        chunk_set: the set.
        split: an evaluation split.
        max_documents: look into the first so many.
        row_length: inputs in a row; a copy is visible if its source is an input of the row.
        registration: the file that opens a confirmation split.

    Raises:
        ValueError: if `row_length` does not divide the chunk length, or a confirmation split has no
            registration.
    """
    documents = chunk_set.documents(split, opened_by=registration and str(registration))
    lengths = np.diff(documents.offsets)
    looked_at = range(min(len(documents), max_documents))
    cells = [
        _cells(documents.document(i), chunk_set, row_length)
        for i in tqdm(looked_at, desc=f"classify {split}", unit="document", leave=False)
    ]
    order, distance, visible, table_order, right = (
        np.concatenate(part) for part in zip(*cells, strict=True)
    )
    lines = [
        f"{split}: {len(documents)} documents of {lengths.min():,} to {lengths.max():,} targets, "
        f"median {int(np.median(lengths)):,}; {len(looked_at)} looked into, rows of {row_length:,}",
        f"  {'targets of full chunks':<22} {'share':>7}   {'the paper':>9}   visible of them",
    ]
    if not len(order):
        return "\n".join([*lines[:1], "  none has a full chunk"])
    kinds = {"order 0": order == 0, "order 1": order == 1, "copies": order >= 2}
    for name, chosen in kinds.items():
        shown = f"{np.mean(visible[chosen]):10.1%}" if name == "copies" and chosen.any() else ""
        lines.append(f"  {name:<22} {np.mean(chosen):7.1%}   {_PAPER_ORDERS[name]:9.1%}{shown}")
    for name, chosen, paper in _bands(distance, chunk_set.chunk_length):
        copies = chosen & kinds["copies"]
        shown = f"{np.mean(visible[copies]):10.1%}" if copies.any() else ""
        lines.append(f"    {name:<20} {np.mean(copies):7.1%}   {paper:9.1%}{shown}")
    states = {
        "no match": table_order == 0,
        "right": (table_order > 0) & right,
        "wrong": (table_order > 0) & ~right,
    }
    for (kind, in_kind), (state, in_state) in itertools.product(kinds.items(), states.items()):
        paper = _PAPER_STATES.get((kind, state))
        beside = "" if paper is None else f"   {paper:9.1%}"
        share = np.mean(in_kind & in_state)
        lines.append(f"  {f'{kind}, table {state}':<22} {share:7.1%}{beside}")
    lines.append(_boundary_sample(chunk_set, documents.document(int(np.argmax(lengths)))))
    return "\n".join(lines)


def _cells(tokens: np.ndarray, chunk_set: ChunkSet, row_length: int) -> tuple[np.ndarray, ...]:
    """Order, distance, visibility, table order, candidate right of a document's full chunks."""
    chunk_length, bos = chunk_set.chunk_length, chunk_set.bos_token_id
    order, distance = target_orders(tokens, bos)
    num_full = len(tokens) // chunk_length * chunk_length
    order, distance = order[:num_full], distance[:num_full]
    chunks = tokens[:num_full].reshape(num_full // chunk_length, chunk_length)
    rows = chunk_rows(chunks, row_length, bos, TableOptions())
    visible = (order > 0) & (distance <= np.arange(num_full) % row_length)
    right = (rows["table_candidate"] == rows["shift_labels"]).reshape(-1)
    return order, distance, visible, rows["table_order"].reshape(-1), right


def _bands(distance: np.ndarray, chunk_length: int) -> list[tuple[str, np.ndarray, float]]:
    """Name, membership and the paper's share of each distance band (Section 3.5)."""
    edges = [0, *(chunk_length // part for part in (16, 8, 4, 2, 1)), np.iinfo(np.int32).max]
    return [
        (
            f"{low:,} - {high:,}" if high <= chunk_length else f"beyond {low:,}",
            (distance > low) & (distance <= high),
            paper,
        )
        for (low, high), paper in zip(itertools.pairwise(edges), _PAPER_BANDS, strict=True)
    ]


def _boundary_sample(chunk_set: ChunkSet, tokens: np.ndarray) -> str:
    """Text before and after the end of a document's first chunk."""
    tokenizer = BytePairTokenizer.load(chunk_set.tokenizer_path)
    boundary = chunk_set.chunk_length
    before = tokenizer.decode(tokens[max(0, boundary - _SAMPLE_TOKENS) : boundary])
    after = tokenizer.decode(tokens[boundary : boundary + _SAMPLE_TOKENS])
    return f"  around a chunk boundary: {before!r} | {after!r}"


if __name__ == "__main__":
    sys.exit(run(main))
