"""Check a chunk set completely: `python -m data_scripts.verify DIR`.

Every file against the manifest's sha256, every chunk and document against its own checksum (so
that what is damaged or out of order is named), counts, boundaries, the frozen order, the byte
tables, and that no document stands in two splits. For a set from the Hub also that the Hub still
lists the recorded shards with the recorded hashes at the recorded revision; no shard is downloaded.
`--no_download` leaves that out, `--shards DIR` checks shards on this machine instead.
Exits 0 if all holds, 2 if not.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data_scripts.chunk_set import ChunkSet, file_sha256
from data_scripts.chunking import chunk_starts, document_sha256, training_order
from data_scripts.command_line import normalise_flags, run
from data_scripts.downloads import find_shards
from data_scripts.tokenizer import BytePairTokenizer
from data_scripts.verify_packed import packed_problems

_SHOWN = 5  # damaged chunks or documents that are named one by one


def main(argv: Sequence[str] | None = None) -> None:
    """Verify one set.

    Raises:
        ValueError: with all that was found, if anything does not hold.
    """
    parser = argparse.ArgumentParser(
        prog="python -m data_scripts.verify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("chunk_set", type=Path, metavar="DIR", help="the chunk set")
    parser.add_argument(
        "--no_download", action="store_true", help="look at this machine's files only"
    )
    parser.add_argument(
        "--shards", type=Path, metavar="DIR", help="where the Parquet shards lie that it came from"
    )
    arguments = parser.parse_args(normalise_flags(sys.argv[1:] if argv is None else argv))
    problems = find_problems(arguments.chunk_set)
    chunk_set = ChunkSet.open(arguments.chunk_set)
    if arguments.shards is not None:
        problems += local_shard_problems(chunk_set, arguments.shards)
    elif not arguments.no_download:
        problems += hub_shard_problems(chunk_set)
    if problems:
        raise ValueError(f"{arguments.chunk_set} does not verify: {'; '.join(problems)}")
    print(f"{arguments.chunk_set}: verified, {chunk_set.fingerprint}")


def find_problems(path: str | Path) -> list[str]:
    """Everything about a set that does not hold, in words; empty if all does.

    Raises:
        ValueError: if there is no manifest that can be read, or a file lacks bytes.
    """
    chunk_set = ChunkSet.open(path)
    problems = chunk_set.file_problems()
    problems += _tokenizer_problems(chunk_set)
    for split in chunk_set.training_splits():
        problems += _training_problems(chunk_set, split)
    for split in chunk_set.evaluation_splits():
        problems += _evaluation_problems(chunk_set, split)
    for split in chunk_set.manifest["splits"]:
        problems += packed_problems(chunk_set, split)
    return problems + _repeated_documents(chunk_set)


def local_shard_problems(chunk_set: ChunkSet, folder: Path) -> list[str]:
    """Recorded shards that `folder` lacks, or holds with another content.

    Raises:
        ValueError: if the set was not built from Parquet shards.
    """
    problems = []
    if chunk_set.manifest["source"] in ("stdlib", "text"):
        raise ValueError(
            f"--shards is for sets from Parquet shards; {chunk_set.path} was built from "
            f"{chunk_set.manifest['source']}. Leave it out."
        )
    for name, sha256 in _recorded_shards(chunk_set).items():
        path = folder / name
        if not path.is_file():
            problems.append(f"shard {name} is missing in {folder}")
        elif file_sha256(path) != sha256:
            problems.append(f"shard {name} in {folder} is not the one that the set was built from")
    return problems


def hub_shard_problems(chunk_set: ChunkSet) -> list[str]:
    """Recorded shards that the Hub lacks, or lists with another hash; none for a local set.

    Raises:
        ConnectionError: if the Hub cannot be reached.
    """
    hub = chunk_set.manifest.get("hub")
    if hub is None:
        return []
    recorded = _recorded_shards(chunk_set)
    try:
        _, shards = find_shards(hub["repo_id"], list(recorded), chunk_set.path, hub["revision"])
    except ValueError as error:
        return [f"the Hub does not hold the set's shards any more: {error}"]
    return [
        f"shard {shard.name} of {hub['repo_id']} is not the one that the set was built from"
        for shard in shards
        if shard.sha256() != recorded[shard.file]
    ]


def _recorded_shards(chunk_set: ChunkSet) -> dict[str, str]:
    """Name -> sha256 of every shard in the manifest."""
    splits = chunk_set.manifest["splits"].values()
    return {shard["name"]: shard["sha256"] for split in splits for shard in split["shards"]}


def _tokenizer_problems(chunk_set: ChunkSet) -> list[str]:
    try:
        tokenizer = BytePairTokenizer.load(chunk_set.tokenizer_path)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return [f"tokenizer/ cannot be read: {error}"]
    problems = []
    if (tokenizer.vocab_size, tokenizer.bos_token_id) != (
        chunk_set.vocab_size,
        chunk_set.bos_token_id,
    ):
        problems.append(
            f"tokenizer/ has {tokenizer.vocab_size} ids and BOS {tokenizer.bos_token_id}, the "
            f"manifest says {chunk_set.vocab_size} and {chunk_set.bos_token_id}"
        )
    elif not np.array_equal(tokenizer.token_bytes, chunk_set.token_bytes()):
        problems.append("tokenizer/token_bytes.npy is not the byte lengths of tokenizer/'s tokens")
    return problems


def _training_problems(chunk_set: ChunkSet, split: str) -> list[str]:
    chunks, index = chunk_set.train_chunks(split), chunk_set.chunk_index(split)
    entry = chunk_set.manifest["splits"][split]
    found = np.empty(len(chunks), np.int64)
    bad_ids, has_bos = (
        0,
        chunk_set.content(split) != "long",
    )  # packed_problems says where BOS may stand
    for i, chunk in enumerate(tqdm(chunks, desc=f"verify {split}", unit="chunk", leave=False)):
        found[i] = zlib.crc32(chunk.tobytes())
        bad_ids += int(chunk.max() >= chunk_set.bos_token_id + has_bos)
    problems = _chunk_problems(split, found, np.asarray(index[:, 2]))
    if bad_ids:
        problems.append(f"{bad_ids} chunks of {split} hold ids from BOS or beyond the vocabulary")
    listed = chunk_set.document_list(split)
    if len(listed["ids"]) != entry["num_documents"]:
        problems.append(
            f"{split} lists {len(listed['ids'])} documents, the manifest says "
            f"{entry['num_documents']}"
        )
    document, start = chunk_starts(listed["num_tokens"], chunk_set.chunk_length, len(chunks))
    order = np.arange(len(chunks))
    if chunk_set.content(split) != "packed":
        order = training_order(len(chunks), chunk_set.manifest["seed"])
    expected = np.stack([document, start], axis=1)
    if len(expected) != len(chunks) or not np.array_equal(expected[order], index[:, :2]):
        problems.append(
            f"{split}/chunk_index.bin is not the documents' full chunks in the order of seed "
            f"{chunk_set.manifest['seed']}"
        )
    return problems


def _chunk_problems(split: str, found: np.ndarray, expected: np.ndarray) -> list[str]:
    """Name the chunks whose checksum differs, and where one was moved to."""
    wrong = np.flatnonzero(found != expected)
    home = {int(checksum): place for place, checksum in enumerate(expected)}
    problems = []
    for place in wrong[:_SHOWN]:
        other = home.get(int(found[place]))
        what = "is damaged" if other is None else f"holds chunk {other}"
        problems.append(f"chunk {place} of {split} {what}")
    if len(wrong) > _SHOWN:
        problems.append(f"and {len(wrong) - _SHOWN} more chunks of {split}")
    return problems


def _evaluation_problems(chunk_set: ChunkSet, split: str) -> list[str]:
    listed = chunk_set.document_list(split)
    entry = chunk_set.manifest["splits"][split]
    lengths = listed["num_tokens"]
    counts = {
        "num_documents": len(listed["ids"]),
        "num_targets": sum(lengths),
        "num_chunks": sum(length // chunk_set.chunk_length for length in lengths),
    }
    problems = [
        f"{split} has {name} {value}, the manifest says {entry[name]}"
        for name, value in counts.items()
        if entry[name] != value
    ]
    if problems:
        return problems
    first_bad_id = chunk_set.bos_token_id + (chunk_set.content(split) != "long")
    documents = chunk_set.documents(split, opened_by="verify")
    progress = tqdm(range(len(documents)), desc=f"verify {split}", unit="document", leave=False)
    damaged = []
    for i in progress:
        tokens = documents.document(i)
        if document_sha256(tokens) != listed["sha256"][i]:
            damaged.append(f"document {listed['ids'][i]} of {split} is damaged")
        if len(tokens) + 1 < chunk_set.manifest["min_tokens"]:
            problems.append(f"document {listed['ids'][i]} of {split} is too short")
        if len(tokens) and tokens.max() >= first_bad_id:
            problems.append(
                f"document {listed['ids'][i]} of {split} holds ids from BOS or beyond the "
                "vocabulary"
            )
    if len(damaged) > _SHOWN:
        damaged[_SHOWN:] = [f"and {len(damaged) - _SHOWN} more documents of {split}"]
    return damaged + problems


def _repeated_documents(chunk_set: ChunkSet) -> list[str]:
    """Documents of an evaluation split that also stand, whole, in a split before it."""
    problems = []
    owner: dict[str, str] = {}
    for split, entry in chunk_set.manifest["splits"].items():
        listed = chunk_set.source_documents(split)
        known = {overlap["document"] for overlap in entry.get("overlaps", [])}
        repeated = Counter(
            owner[sha256]
            for document_id, sha256 in zip(listed["ids"], listed["sha256"], strict=True)
            if sha256 in owner and document_id not in known
        )
        problems += [
            f"{count} documents of {split} also stand in {other}"
            for other, count in repeated.items()
        ]
        owner |= dict.fromkeys(listed["sha256"], split)
    return problems


if __name__ == "__main__":
    sys.exit(run(main))
