"""The sources of `build`: what each makes of its arguments, as a plan and a tokenizer's text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from data_scripts.assemble import BuildPlan, SplitPlan
from data_scripts.chunking import DocumentRules
from data_scripts.climbmix import MANIFESTS, ShardList, hub_plan
from data_scripts.sources import (
    TextShard,
    installed_packages,
    parquet_shards,
    python_files,
    python_shards,
    standard_library,
    text_shards,
)

TRAINING_SPLIT = "train"
# The reference recipe's.
_VOCAB_SIZE, _TOKENIZER_CHARACTERS, _PACKED_ROW = 8192, 1_000_000_000, 2048
_MIN_BYTES_PER_TOKEN = 2  # a Python file with fewer bytes a token than this is a table of numbers
_BYTES_PER_TOKEN = 5  # more than Python source has, so that what is there is never overestimated
_TOPPED_UP = (
    "the standard library is short of long files (some systems install it without its tests): "
    "training is topped up from installed packages"
)

Plan = tuple[BuildPlan, Sequence[TextShard]]  # and the shards to train the tokenizer on


def plan_stdlib(arguments: argparse.Namespace) -> Plan:
    """Long documents from Python's own installed source; no download.

    Raises:
        ValueError: if there are too few long files.
    """
    rules = _rules(arguments)
    root = standard_library()
    files = python_files(root, _MIN_BYTES_PER_TOKEN * rules.min_tokens)
    # Twice as many candidates as documents wanted: some turn out too short.
    counts = {
        "dev_val": arguments.num_dev_val,
        "dev_heldout": arguments.num_dev_heldout,
        "confirmation": arguments.num_confirmation,
    }
    num_evaluation = 2 * sum(counts.values())
    if len(files) < 2 * num_evaluation:
        raise ValueError(
            f"the standard library must hold at least {2 * num_evaluation} long Python files; "
            f"found {len(files)} in {root}. Use `build text` on files of your own."
        )
    notes = [f"Python {sys.version_info.major}.{sys.version_info.minor} standard library"]
    max_training_tokens = 8 * rules.chunk_length
    train, topped_up = _stdlib_training(
        root, files[num_evaluation:], rules, max_training_tokens, arguments.max_chunks
    )
    if topped_up:
        notes.append(_TOPPED_UP)
        print(_TOPPED_UP)
    max_evaluation_tokens = arguments.max_document_tokens or rules.chunk_length * 9 // 2
    splits = [
        SplitPlan(
            TRAINING_SPLIT,
            train,
            "chunks",
            max_chunks=arguments.max_chunks,
            max_document_tokens=max_training_tokens,
        ),
    ]
    first = 0
    for name, count in counts.items():
        candidates = files[first : first + 2 * count]
        first += 2 * count
        if count:
            split = SplitPlan(
                name,
                python_shards(root, candidates, name),
                "documents",
                confirmation=name == "confirmation",
                max_documents=count,
                max_document_tokens=max_evaluation_tokens,
            )
            splits.append(split)
    return BuildPlan("stdlib", splits, rules, arguments.seed, notes), train


def _stdlib_training(
    root: Path, files: list[str], rules: DocumentRules, max_tokens: int, max_chunks: int
) -> tuple[list[TextShard], bool]:
    """The training shards, and whether installed packages had to be added."""
    shards = python_shards(root, files, "stdlib")
    num_targets = sum(
        min((root / file).stat().st_size // _BYTES_PER_TOKEN, max_tokens) for file in files
    )
    if num_targets >= max_chunks * rules.chunk_length:
        return shards, False
    packages = installed_packages()
    topping = python_files(packages, _MIN_BYTES_PER_TOKEN * rules.min_tokens)
    return shards + python_shards(packages, topping, "packages"), True


def plan_files(arguments: argparse.Namespace) -> Plan:
    """Anyone's documents: Parquet shards with a text column, or text files.

    Raises:
        ValueError: if a split is named wrongly, or a pattern names no file that can be read.
    """
    rules = _rules(arguments)
    splits = [
        SplitPlan(
            name,
            shards,
            "chunks" if name == TRAINING_SPLIT else "documents",
            confirmation=name in arguments.confirmation,
            max_chunks=arguments.max_chunks if name == TRAINING_SPLIT else None,
            max_documents=None if name == TRAINING_SPLIT else arguments.max_documents,
            max_document_tokens=arguments.max_document_tokens,
            overlaps="list" if arguments.keep_overlaps else "drop",
        )
        for name, shards in _local_splits(arguments)
    ]
    plan = BuildPlan(arguments.source, splits, rules, arguments.seed)
    return plan, _training_shards(plan)


def plan_packed(arguments: argparse.Namespace) -> Plan:
    """Packed rows of documents of every length: of one's own, or the reference recipe's.

    Raises:
        ValueError: as `plan_files` and `plan_climbmix`.
    """
    if not arguments.split:
        if arguments.manifest is None:
            arguments.manifest = MANIFESTS / "climbmix_packed.json"
        return plan_climbmix(arguments)
    arguments.vocab_size = arguments.vocab_size or _VOCAB_SIZE
    arguments.tokenizer_characters = arguments.tokenizer_characters or _TOKENIZER_CHARACTERS
    splits = [
        SplitPlan(
            name,
            shards,
            "chunks" if name == TRAINING_SPLIT else "documents",
            content="packed",
            confirmation=name in arguments.confirmation,
            max_chunks=arguments.max_chunks
            if name == TRAINING_SPLIT
            else arguments.max_evaluation_rows,
            max_document_tokens=arguments.max_document_tokens,
            overlaps="list" if arguments.keep_overlaps else "drop",
        )
        for name, shards in _local_splits(arguments)
    ]
    rules = DocumentRules(arguments.chunk_length or _PACKED_ROW, arguments.min_tokens or 2)
    plan = BuildPlan("packed", splits, rules, arguments.seed)
    return plan, _training_shards(plan)


def plan_mixed(arguments: argparse.Namespace) -> Plan:
    """Chunks of long documents and packed rows of short ones, in a stated share.

    Every evaluation split becomes two, `NAME_long` and `NAME_short`.

    Raises:
        ValueError: as `plan_files`, or if the share is not between 0 and 1.
    """
    splits = []
    for name, shards in _local_splits(arguments):
        common = {
            "confirmation": name in arguments.confirmation,
            "max_document_tokens": arguments.max_document_tokens,
            "overlaps": "list" if arguments.keep_overlaps else "drop",
        }
        if name == TRAINING_SPLIT:
            train = SplitPlan(
                name,
                shards,
                "chunks",
                content="mixed",
                max_chunks=arguments.max_chunks,
                long_share=arguments.long_share,
            )
            splits.append(train)
            continue
        documents = arguments.max_documents
        splits.append(
            SplitPlan(f"{name}_long", shards, "documents", max_documents=documents, **common)
        )
        rows = arguments.max_evaluation_rows
        packed = {"content": "packed", "short_only": True, "max_chunks": rows}
        splits.append(SplitPlan(f"{name}_short", shards, "documents", **packed, **common))
    notes = [f"{arguments.long_share:.0%} of the training chunks are of long documents"]
    plan = BuildPlan("mixed", splits, _rules(arguments), arguments.seed, notes)
    return plan, _training_shards(plan)


def plan_climbmix(arguments: argparse.Namespace) -> Plan:
    """The paper's data, or another shard list of a Hub dataset.

    Raises:
        ValueError: if the list is no shard list, or the Hub refuses one of its shards.
        ConnectionError: if the Hub cannot be reached.
    """
    shard_list = ShardList.read(arguments.manifest or MANIFESTS / "climbmix.json")
    plan, tokenizer_shards = hub_plan(
        shard_list,
        arguments.download_dir or arguments.out.with_name(arguments.out.name + ".shards"),
        source=arguments.source,
        revision=arguments.revision,
        seed=arguments.seed,
        chunk_length=arguments.chunk_length,
        min_tokens=arguments.min_tokens,
        delete=arguments.delete_shards,
        with_tokenizer=arguments.tokenizer is None,
    )
    described = shard_list.content["tokenizer"]
    arguments.vocab_size = arguments.vocab_size or described["vocab_size"]
    arguments.tokenizer_characters = arguments.tokenizer_characters or described["characters"]
    if arguments.max_chunks is not None:
        splits = [
            replace(split, max_chunks=arguments.max_chunks) if split.kind == "chunks" else split
            for split in plan.splits
        ]
        plan = replace(plan, splits=splits)
    return plan, tokenizer_shards


def _local_splits(arguments: argparse.Namespace) -> list[tuple[str, list[TextShard]]]:
    """Names and shards, training first and confirmation last, as overlaps are looked for."""
    patterns = _split_patterns(arguments.split)
    unknown = set(arguments.confirmation) - set(patterns)
    if unknown or TRAINING_SPLIT in arguments.confirmation:
        raise ValueError(
            f"--confirmation must name evaluation splits given with --split; found "
            f"{', '.join(arguments.confirmation)} beside {', '.join(patterns)}."
        )
    names = sorted(
        patterns, key=lambda name: (name != TRAINING_SPLIT, name in arguments.confirmation)
    )
    find_shards = text_shards if arguments.source == "text" else parquet_shards
    return [(name, find_shards(patterns[name])) for name in names]


def _training_shards(plan: BuildPlan) -> Sequence[TextShard]:
    return next(split.shards for split in plan.splits if split.kind == "chunks")


def _rules(arguments: argparse.Namespace) -> DocumentRules:
    min_tokens = arguments.min_tokens
    if min_tokens is None:
        min_tokens = arguments.chunk_length + 1
    return DocumentRules(arguments.chunk_length, min_tokens, arguments.max_document_tokens)


def _split_patterns(values: list[str]) -> dict[str, str]:
    patterns: dict[str, str] = {}
    for value in values:
        name, equals, pattern = value.partition("=")
        if not equals or not name or not pattern:
            raise ValueError(
                f"--split must be NAME=GLOB; found {value!r}. "
                "For example --split train='shards/*.parquet' dev=dev.parquet"
            )
        if name in patterns:
            raise ValueError(f"--split {name} is given twice; use one pattern for it.")
        patterns[name] = pattern
    if TRAINING_SPLIT not in patterns:
        raise ValueError(
            f"--split must name the training split {TRAINING_SPLIT}; found "
            f"{', '.join(patterns)}. Every other split is for evaluation."
        )
    return patterns
