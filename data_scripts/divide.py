"""Deal the documents of Parquet files out to splits, where one's own files have none.

    python -m data_scripts.divide 'shards/*.parquet' --out DIR --parts train=8 val=1 heldout=1

writes DIR/train.parquet, DIR/val.parquet and so on, for `build --split`. Which documents go where
depends on their place in the files alone, so that a second call gives the same splits. Equal
documents go to one split. With --piece_characters, documents are cut into short ones.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_scripts import command_line
from data_scripts.sources import parquet_shards


def divide(
    patterns: Sequence[str],
    out: Path,
    parts: dict[str, int],
    piece_characters: int | None = None,
    max_pieces: int | None = None,
) -> dict[str, int]:
    """Write one Parquet file a split.

    Args:
        patterns: of Parquet files with a column `text`.
        out: folder to write.
        parts: split -> its share of the documents, as a whole number.
        piece_characters: cut each document into pieces of at most so many characters, at spaces
            where there are any; every piece becomes a document, in its document's split.
        max_pieces: pieces kept of a document, from its start.

    Returns:
        Split -> number of documents.

    Raises:
        ValueError: if a pattern names no file, a file cannot be read or has no column `text`.
    """
    shards = [shard for pattern in patterns for shard in parquet_shards(pattern)]
    dealt = [name for name, share in parts.items() for _ in range(share)]
    columns: dict[str, list[str]] = {name: [] for name in parts}
    homes: dict[bytes, str] = {}
    for shard in shards:
        for _, raw in shard.documents():
            if raw is None:
                continue
            home = homes.setdefault(hashlib.sha256(raw).digest(), dealt[len(homes) % len(dealt)])
            text = raw.decode()
            pieces = [text] if piece_characters is None else cut(text, piece_characters)
            columns[home] += pieces[:max_pieces]
    out.mkdir(parents=True, exist_ok=True)
    for name, column in columns.items():
        table = pa.table({"text": pa.array(column, pa.large_string())})
        pq.write_table(table, out / f"{name}.parquet", compression="zstd")
    return {name: len(column) for name, column in columns.items()}


def cut(text: str, length: int) -> list[str]:
    """Pieces of at most `length` characters that make up the text, cut after a space if any."""
    pieces, start = [], 0
    while start < len(text):
        end = start + length
        if end < len(text):
            end = max(text.rfind(" ", start, end), text.rfind("\n", start, end)) + 1 or end
        pieces.append(text[start:end])
        start = end
    return pieces


def _parts(given: Sequence[str]) -> dict[str, int]:
    parts = {}
    for item in given:
        name, _, share = item.partition("=")
        if not (name.isidentifier() and share.isdigit() and int(share) > 0):
            raise ValueError(f"--parts must be NAME=SHARE with a share of 1 or more; got {item!r}.")
        parts[name] = int(share)
    return parts


def _run(arguments: argparse.Namespace) -> None:
    found = divide(
        arguments.files,
        arguments.out,
        _parts(arguments.parts),
        arguments.piece_characters,
        arguments.max_pieces,
    )
    for name, count in found.items():
        print(f"{arguments.out / name}.parquet: {count:,} documents")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m data_scripts.divide", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="+", metavar="GLOB", help="Parquet files")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--parts", nargs="+", required=True, metavar="NAME=SHARE", help="splits")
    parser.add_argument(
        "--piece_characters", type=command_line.positive, help="cut documents into pieces"
    )
    parser.add_argument(
        "--max_pieces", type=command_line.positive, help="pieces kept of a document"
    )
    given = sys.argv[1:] if argv is None else argv
    arguments = parser.parse_args(command_line.normalise_flags(given))
    return command_line.run(partial(_run, arguments))


if __name__ == "__main__":
    sys.exit(main())
