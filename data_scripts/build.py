"""Build a chunk set: `python -m data_scripts.build SOURCE --out DIR`.

    python -m data_scripts.build stdlib --out demo/chunk_set
    python -m data_scripts.build climbmix --out climbmix --delete_shards --num_processes 8
    python -m data_scripts.build packed --out climbmix_packed --tokenizer climbmix
    python -m data_scripts.build parquet --split train='shards/*.parquet' dev=dev.parquet --out set
    python -m data_scripts.build text --split train='books/*.txt' dev='held_out/*.txt' --out set
    python -m data_scripts.build mixed --split train='shards/*.parquet' --long_share 0.5 --out set

A build that was interrupted leaves no set; the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from data_scripts.assemble import build_chunk_set
from data_scripts.command_line import normalise_flags, not_negative, positive, run
from data_scripts.describe import summary
from data_scripts.downloads import HubShard
from data_scripts.plans import plan_climbmix, plan_files, plan_mixed, plan_packed, plan_stdlib
from data_scripts.prefetch import Prefetch, remove_downloads
from data_scripts.sources import TextShard
from data_scripts.staging import fresh_folder
from data_scripts.tokenizer import BytePairTokenizer, open_tokenizer, train_tokenizer


def main(argv: Sequence[str] | None = None) -> None:
    """Build what the arguments say, and print what was built.

    Raises:
        ValueError: for bad input, before any work where it can be known.
    """
    arguments = _parser().parse_args(normalise_flags(sys.argv[1:] if argv is None else argv))
    plan, tokenizer_shards = arguments.plan(arguments)

    def make_tokenizer(staging: Path) -> BytePairTokenizer:
        if arguments.tokenizer is not None:
            return open_tokenizer(arguments.tokenizer)
        # A shard that is also one of a split's is kept until that has read it.
        needed = {shard for split in plan.splits for shard in split.shards}
        shards = [
            replace(shard, delete=False)
            if isinstance(shard, HubShard) and shard in needed
            else shard
            for shard in tokenizer_shards
        ]
        return _trained_tokenizer(shards, arguments, staging)

    chunk_set = build_chunk_set(
        arguments.out, plan, make_tokenizer, arguments.num_processes, arguments.num_downloads
    )
    if arguments.delete_shards:  # also those that were fetched ahead and not needed
        split_shards = [shard for split in plan.splits for shard in split.shards]
        remove_downloads([*tokenizer_shards, *split_shards])
    print(summary(chunk_set))


def _trained_tokenizer(
    shards: Sequence[TextShard], arguments: argparse.Namespace, staging: Path
) -> BytePairTokenizer:
    """Train on the shards, in order; one that an interrupted build has finished is taken."""
    settings = f"{arguments.vocab_size}\0{arguments.tokenizer_characters}"
    contents = "".join(f"\0{shard.name}\0{shard.sha256()}" for shard in shards)
    key = hashlib.sha256((settings + contents).encode()).hexdigest()[:16]
    folder = staging / f"tokenizer-{key}"
    if not folder.is_dir():
        print(f"training a tokenizer of {arguments.vocab_size:,} ids")
        texts = _texts(shards, arguments.num_downloads)
        tokenizer = train_tokenizer(
            texts, arguments.vocab_size, max_characters=arguments.tokenizer_characters
        )
        texts.close()
        unfinished = fresh_folder(staging / "tokenizer.tmp")
        tokenizer.save(unfinished)
        unfinished.rename(folder)
    return BytePairTokenizer.load(folder)


def _texts(shards: Sequence[TextShard], num_downloads: int) -> Iterator[str]:
    """The texts for the tokenizer; what is not UTF-8 is reported when it is tokenised."""
    downloads = [shard for shard in shards if isinstance(shard, HubShard)]
    with Prefetch(downloads, min(num_downloads, 2), ahead=2) as prefetch:
        for shard in shards:
            for _, raw in shard.documents():
                yield (raw or b"").decode("utf-8", errors="replace")
            if isinstance(shard, HubShard):
                shard.release()
                prefetch.done(shard)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data_scripts.build",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sources = parser.add_subparsers(dest="source", required=True, metavar="SOURCE")

    def source(name: str, what: str, plan: object, **defaults: object) -> argparse.ArgumentParser:
        added = sources.add_parser(name, help=what, description=f"Build a set from {what}.")
        _add_common(added, "%(default)s" if defaults else "the shard list's")
        added.set_defaults(plan=plan, num_downloads=2, delete_shards=False, **defaults)
        return added

    long = {"chunk_length": 8192, "vocab_size": 8192, "tokenizer_characters": 1_000_000_000}
    demo = {"chunk_length": 1024, "vocab_size": 4096, "tokenizer_characters": 8_000_000}
    stdlib = source(
        "stdlib",
        "Python's own installed source: the demo's set, without a download",
        plan_stdlib,
        **demo,
        max_chunks=480,
    )
    stdlib.add_argument("--num_dev_val", type=positive, default=40, help="documents in dev_val")
    stdlib.add_argument(
        "--num_dev_heldout", type=positive, default=24, help="documents in dev_heldout"
    )
    stdlib.add_argument(
        "--num_confirmation",
        type=not_negative,
        default=0,
        help="documents in confirmation, a split that only a registration opens (%(default)s)",
    )
    climbmix = source(
        "climbmix", "the paper's shards of a Hub dataset (62,538 chunks of 8,192)", plan_climbmix
    )
    _add_hub(climbmix, "climbmix.json")
    for name, what in (("parquet", "Parquet files with a column `text`"), ("text", "text files")):
        files = source(name, f"your own documents: {what}", plan_files, **long)
        _add_files(files, required=True)
    packed = source(
        "packed",
        "documents of every length, packed into rows: the reference recipe's from the Hub, or your "
        "own Parquet files with --split",
        plan_packed,
    )
    _add_hub(packed, "climbmix_packed.json")
    _add_files(packed, required=False)
    mixed = source("mixed", "long and short documents in a stated share", plan_mixed, **long)
    _add_files(mixed, required=True)
    mixed.add_argument(
        "--long_share",
        type=float,
        default=0.5,
        help="of the training chunks that are of long documents; the others are packed rows of "
        "documents shorter than --min_tokens (%(default)s)",
    )
    for added in (packed, mixed):
        added.add_argument(
            "--max_evaluation_rows", type=positive, help="packed rows of each evaluation split"
        )
    return parser


def _add_common(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument("--chunk_length", type=int, help=f"targets in a chunk ({default})")
    parser.add_argument(
        "--min_tokens",
        type=int,
        help="shortest document kept, BOS counted (chunk_length + 1: one full chunk)",
    )
    parser.add_argument(
        "--max_document_tokens", type=positive, help="targets kept of a document, from its start"
    )
    parser.add_argument("--max_chunks", type=positive, help="training chunks kept")
    parser.add_argument(
        "--vocab_size",
        type=int,
        help=f"ids of the tokenizer to train, special tokens included ({default})",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="use this tokenizer: a chunk set, a tokenizer folder, or a tiktoken file of ranks",
    )
    parser.add_argument(
        "--tokenizer_characters",
        type=positive,
        help=f"characters of training text for the tokenizer, 10,000 a document ({default})",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the training chunks' order (%(default)s)"
    )
    parser.add_argument(
        "--num_processes", type=positive, default=1, help="that tokenise (%(default)s)"
    )


def _add_files(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument(
        "--split",
        nargs="+",
        action="extend",
        required=required,
        metavar="NAME=GLOB",
        help="files of a split; `train` is for training, every other for evaluation",
    )
    parser.add_argument(
        "--confirmation",
        nargs="+",
        default=[],
        metavar="NAME",
        help="evaluation splits that may be scored only once, after a registration",
    )
    parser.add_argument(
        "--max_documents", type=positive, help="documents kept of each evaluation split"
    )
    parser.add_argument(
        "--keep_overlaps",
        action="store_true",
        help="list evaluation documents that begin like an earlier split's, but keep them",
    )


def _add_hub(parser: argparse.ArgumentParser, manifest: str) -> None:
    parser.add_argument(
        "--manifest",
        type=Path,
        metavar="JSON",
        help=f"another list of shards than data_scripts/manifests/{manifest}",
    )
    parser.add_argument(
        "--revision", help="of the Hub dataset: a branch, tag or commit (its main branch now)"
    )
    parser.add_argument(
        "--download_dir", type=Path, metavar="DIR", help="where shards are kept (OUT.shards)"
    )
    parser.add_argument(
        "--delete_shards",
        action="store_true",
        help="delete each shard once it is tokenised: a few lie on the disk at a time",
    )
    parser.add_argument(
        "--num_downloads", type=positive, default=2, help="shards downloaded side by side"
    )


if __name__ == "__main__":
    sys.exit(run(main))
