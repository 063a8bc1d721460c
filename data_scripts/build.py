"""Build a chunk set: `python -m data_scripts.build SOURCE --out DIR`.

    python -m data_scripts.build stdlib --out demo/chunk_set
    python -m data_scripts.build parquet --split train='shards/*.parquet' dev=dev.parquet --out set
    python -m data_scripts.build text --split train='books/*.txt' dev='held_out/*.txt' --out set

A build that was interrupted leaves no set; the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_scripts.assemble import BuildPlan, SplitPlan, build_chunk_set
from data_scripts.chunk_set import ChunkSet
from data_scripts.chunking import DocumentRules
from data_scripts.command_line import normalise_flags, run
from data_scripts.describe import summary
from data_scripts.sources import (
    TextShard,
    installed_packages,
    parquet_shards,
    python_files,
    python_shards,
    standard_library,
    text_shards,
)
from data_scripts.tokenizer import BytePairTokenizer, open_tokenizer, train_tokenizer

TRAINING_SPLIT = "train"
_MIN_BYTES_PER_TOKEN = 2  # a Python file with fewer bytes a token than this is a table of numbers
_BYTES_PER_TOKEN = 5  # more than Python source has, so that what is there is never overestimated
_TOPPED_UP = (
    "the standard library is short of long files (some systems install it without its tests): "
    "training is topped up from installed packages"
)


def main(argv: Sequence[str] | None = None) -> None:
    """Build what the arguments say, and print what was built.

    Raises:
        ValueError: for bad input, before any work where it can be known.
    """
    arguments = _parser().parse_args(normalise_flags(sys.argv[1:] if argv is None else argv))
    chunk_set = arguments.build(arguments)
    print(summary(chunk_set))


def build_stdlib(arguments: argparse.Namespace) -> ChunkSet:
    """Long documents from Python's own installed source; no download."""
    rules = _rules(arguments)
    chunk_length = rules.chunk_length
    root = standard_library()
    files = python_files(root, _MIN_BYTES_PER_TOKEN * rules.min_tokens)
    # Twice as many candidates as documents wanted: some turn out too short.
    num_dev_val, num_dev_heldout = 2 * arguments.num_dev_val, 2 * arguments.num_dev_heldout
    num_evaluation = num_dev_val + num_dev_heldout
    if len(files) < 2 * num_evaluation:
        raise ValueError(
            f"the standard library must hold at least {2 * num_evaluation} long Python files; "
            f"found {len(files)} in {root}. Use `build text` on files of your own."
        )
    dev_val, dev_heldout = files[:num_dev_val], files[num_dev_val:num_evaluation]
    max_training_tokens = 8 * chunk_length
    training_files = files[num_evaluation:]
    train = python_shards(root, training_files, "stdlib")
    notes = [f"Python {sys.version_info.major}.{sys.version_info.minor} standard library"]
    num_targets = sum(
        min((root / file).stat().st_size // _BYTES_PER_TOKEN, max_training_tokens)
        for file in training_files
    )
    if num_targets < arguments.max_chunks * chunk_length:
        packages = installed_packages()
        topping = python_files(packages, _MIN_BYTES_PER_TOKEN * rules.min_tokens)
        train += python_shards(packages, topping, "packages")
        notes.append(_TOPPED_UP)
        print(_TOPPED_UP)
    max_evaluation_tokens = arguments.max_document_tokens or chunk_length * 9 // 2
    splits = [
        SplitPlan(
            TRAINING_SPLIT,
            train,
            "chunks",
            max_chunks=arguments.max_chunks,
            max_document_tokens=max_training_tokens,
        ),
        SplitPlan(
            "dev_val",
            python_shards(root, dev_val, "dev_val"),
            "documents",
            max_documents=arguments.num_dev_val,
            max_document_tokens=max_evaluation_tokens,
        ),
        SplitPlan(
            "dev_heldout",
            python_shards(root, dev_heldout, "dev_heldout"),
            "documents",
            max_documents=arguments.num_dev_heldout,
            max_document_tokens=max_evaluation_tokens,
        ),
    ]
    plan = BuildPlan("stdlib", splits, rules, arguments.seed, notes)
    return _build(arguments, plan)


def build_files(arguments: argparse.Namespace) -> ChunkSet:
    """Anyone's documents: Parquet shards with a text column, or text files."""
    rules = _rules(arguments)
    find_shards = parquet_shards if arguments.source == "parquet" else text_shards
    patterns = _split_patterns(arguments.split)
    unknown = set(arguments.confirmation) - set(patterns)
    if unknown or TRAINING_SPLIT in arguments.confirmation:
        raise ValueError(
            f"--confirmation must name evaluation splits given with --split; found "
            f"{', '.join(arguments.confirmation)} beside {', '.join(patterns)}."
        )
    # Training first, confirmation last: overlaps are looked for in the splits before.
    names = sorted(
        patterns, key=lambda name: (name != TRAINING_SPLIT, name in arguments.confirmation)
    )
    splits = [
        SplitPlan(
            name,
            find_shards(patterns[name]),
            "chunks" if name == TRAINING_SPLIT else "documents",
            confirmation=name in arguments.confirmation,
            max_chunks=arguments.max_chunks if name == TRAINING_SPLIT else None,
            max_documents=None if name == TRAINING_SPLIT else arguments.max_documents,
            max_document_tokens=arguments.max_document_tokens,
            overlaps="list" if arguments.keep_overlaps else "drop",
        )
        for name in names
    ]
    return _build(arguments, BuildPlan(arguments.source, splits, rules, arguments.seed))


def _build(arguments: argparse.Namespace, plan: BuildPlan) -> ChunkSet:
    if arguments.tokenizer is not None:
        tokenizer = open_tokenizer(arguments.tokenizer)
    else:
        print(f"training a tokenizer of {arguments.vocab_size:,} ids on {TRAINING_SPLIT}")
        tokenizer = _train_tokenizer(plan, arguments)
    return build_chunk_set(arguments.out, plan, tokenizer, arguments.num_processes)


def _train_tokenizer(plan: BuildPlan, arguments: argparse.Namespace) -> BytePairTokenizer:
    shards = next(split.shards for split in plan.splits if split.kind == "chunks")
    return train_tokenizer(
        _texts(shards), arguments.vocab_size, max_characters=arguments.tokenizer_characters
    )


def _texts(shards: list[TextShard]) -> Iterator[str]:
    """The training texts, for the tokenizer; what is not UTF-8 is reported when it is tokenised."""
    for shard in shards:
        for _, raw in shard.documents():
            yield (raw or b"").decode("utf-8", errors="replace")


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data_scripts.build",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sources = parser.add_subparsers(dest="source", required=True, metavar="SOURCE")
    stdlib = sources.add_parser(
        "stdlib",
        help="Python's own installed source: the demo's set, without a download",
        description="Build a small set from the long files of Python's standard library.",
    )
    _add_common(stdlib, chunk_length=1024, vocab_size=4096)
    stdlib.add_argument("--num_dev_val", type=_positive, default=40, help="documents in dev_val")
    stdlib.add_argument(
        "--num_dev_heldout", type=_positive, default=24, help="documents in dev_heldout"
    )
    stdlib.set_defaults(build=build_stdlib, max_chunks=480, tokenizer_characters=8_000_000)
    for name, what in (("parquet", "Parquet files with a column `text`"), ("text", "text files")):
        files = sources.add_parser(
            name, help=f"your own documents: {what}", description=f"Build a set from {what}."
        )
        _add_common(files, chunk_length=8192, vocab_size=8192)
        files.add_argument(
            "--split",
            nargs="+",
            action="extend",
            required=True,
            metavar="NAME=GLOB",
            help="files of a split; `train` is for training, every other for evaluation",
        )
        files.add_argument(
            "--confirmation",
            nargs="+",
            default=[],
            metavar="NAME",
            help="evaluation splits that may be scored only once, after a registration",
        )
        files.add_argument(
            "--max_documents", type=_positive, help="documents kept of each evaluation split"
        )
        files.add_argument(
            "--keep_overlaps",
            action="store_true",
            help="list evaluation documents that begin like an earlier split's, but keep them",
        )
        files.set_defaults(build=build_files, tokenizer_characters=1_000_000_000)
    return parser


def _add_common(parser: argparse.ArgumentParser, chunk_length: int, vocab_size: int) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument(
        "--chunk_length", type=int, default=chunk_length, help="targets in a chunk (%(default)s)"
    )
    parser.add_argument(
        "--min_tokens",
        type=int,
        help="shortest document kept, BOS counted (chunk_length + 1: one full chunk)",
    )
    parser.add_argument(
        "--max_document_tokens", type=_positive, help="targets kept of a document, from its start"
    )
    parser.add_argument("--max_chunks", type=_positive, help="training chunks kept")
    parser.add_argument(
        "--vocab_size",
        type=int,
        default=vocab_size,
        help="ids of the tokenizer to train, special tokens included (%(default)s)",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="use this tokenizer: a chunk set, a tokenizer folder, or a tiktoken file of ranks",
    )
    parser.add_argument(
        "--tokenizer_characters",
        type=_positive,
        help="characters of training text for the tokenizer, 10,000 a document (%(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the training chunks' order (%(default)s)"
    )
    parser.add_argument(
        "--num_processes", type=_positive, default=1, help="that tokenise (%(default)s)"
    )


def _positive(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; found {number}")
    return number


if __name__ == "__main__":
    sys.exit(run(main))
