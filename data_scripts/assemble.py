"""Tokenised shards -> a chunk set: the overlap rules, the frozen order, the files, the manifest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_scripts.chunk_set import (
    DTYPES,
    FORMAT,
    FORMAT_VERSION,
    ChunkSet,
    dtype_name,
    file_sha256,
)
from data_scripts.chunking import DocumentRules
from data_scripts.sources import TextShard
from data_scripts.split_writer import SplitWriter
from data_scripts.staging import (
    StagedShard,
    fresh_folder,
    publish,
    stage_shards,
    staging_folder,
    write_json,
)
from data_scripts.tokenizer import BytePairTokenizer


@dataclass(frozen=True)
class SplitPlan:
    """One split of a set to be built.

    Attributes:
        name: of the split and its folder.
        shards: its text.
        kind: "chunks" (training: chunks in a frozen order) or "documents" (evaluation).
        content: "long", documents of at least min_tokens; "packed", rows of chunk_length in which
            documents of every length are packed (Section 4.9); "mixed", chunks of long documents
            and packed rows of the short ones, for training.
        confirmation: scored once, after a registration (Section 3.6).
        max_documents: keep the first so many documents, in the order of the shards.
        max_chunks: likewise the first so many chunks, before they are permuted.
        max_document_tokens: targets kept of a document, from its start.
        overlaps: "drop" an evaluation document whose first 256 tokens equal those of a document
            of an earlier split, or only "list" it in the manifest.
        short_only: of a packed split: leave out documents of at least min_tokens.
        long_share: of a mixed split: the share of its chunks that come from long documents.
    """

    name: str
    shards: Sequence[TextShard]
    kind: str
    content: str = "long"
    confirmation: bool = False
    max_documents: int | None = None
    max_chunks: int | None = None
    max_document_tokens: int | None = None
    overlaps: str = "drop"
    short_only: bool = False
    long_share: float | None = None

    def __post_init__(self) -> None:
        if self.content == "mixed" and not 0.0 < (self.long_share or 0.0) < 1.0:
            raise ValueError(
                f"long_share must lie between 0 and 1; found {self.long_share}. "
                "Use `build parquet` for long documents alone, `build packed` for packed rows."
            )


@dataclass(frozen=True)
class BuildPlan:
    """Everything a set depends on.

    Attributes:
        source: the source's name, for the manifest.
        splits: in the order in which overlaps are looked for: training first.
        rules: lengths of documents and chunks.
        seed: of the permutation of the training chunks; packed rows keep the packing's order.
        notes: what a reader of the manifest should know about the source.
        hub: the dataset and revision that the shards come from, if they come from the Hub.
        expected: split -> count -> what is reported elsewhere, to be printed beside what is found.
    """

    source: str
    splits: list[SplitPlan]
    rules: DocumentRules
    seed: int = 0
    notes: list[str] = field(default_factory=list)
    hub: dict[str, str] | None = None
    expected: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        names = [split.name for split in self.splits]
        if len(set(names)) != len(names):
            raise ValueError(f"split names must differ; found {', '.join(names)}.")
        for name in names:
            if not name or not name.replace("_", "").replace("-", "").isalnum():
                raise ValueError(
                    f"a split's name must be letters, digits, - and _; found {name!r}."
                )
            if name == "tokenizer":
                raise ValueError("a split cannot be named 'tokenizer', the set's own folder.")
        if not any(split.kind == "chunks" for split in self.splits):
            raise ValueError("a set needs a training split named train; found none.")


def build_chunk_set(
    out: str | Path,
    plan: BuildPlan,
    tokenizer: BytePairTokenizer | Callable[[Path], BytePairTokenizer],
    num_processes: int = 1,
    num_downloads: int = 2,
) -> ChunkSet:
    """Build a chunk set; the result depends on the plan and the tokenizer alone.

    Args:
        out: the folder to make; it must not exist, or be empty.
        plan: splits, rules, seed.
        tokenizer: the BPE, or a function that makes it, given a folder that survives interruption.
        num_processes: that tokenise shards side by side.
        num_downloads: shards of the Hub that are downloaded side by side.

    Raises:
        ValueError: if `out` is taken or being built, a split keeps nothing, or a document is not
            UTF-8.
    """
    if num_processes < 1 or num_downloads < 1:
        raise ValueError(
            "num_processes and num_downloads must be at least 1; found "
            f"{num_processes} and {num_downloads}."
        )
    out = Path(out)
    with staging_folder(out) as staging:
        if callable(tokenizer):
            tokenizer = tokenizer(staging)
        prepared = fresh_folder(staging / "set")
        tokenizer.save(prepared / "tokenizer")
        writer = SplitWriter(plan.rules, plan.seed, tokenizer.bos_token_id)
        splits = {}
        for split in plan.splits:
            staged = _collect(
                split, staging / "shards", tokenizer, plan.rules, num_processes, num_downloads
            )
            folder = prepared / split.name
            folder.mkdir()
            splits[split.name] = writer.write(folder, split, staged)
        manifest = _manifest(plan, tokenizer, splits, prepared)
        write_json(prepared / "manifest.json", manifest, indent=1)
        publish(prepared, out)
    return ChunkSet.open(out)


def _collect(
    split: SplitPlan,
    folder: Path,
    tokenizer: BytePairTokenizer,
    rules: DocumentRules,
    num_processes: int,
    num_downloads: int,
) -> list[StagedShard]:
    """Tokenise a split's shards until its limits are reached."""
    staged = []
    num_documents = num_targets = 0
    rules = replace(rules, max_document_tokens=split.max_document_tokens)
    if split.content != "long":  # every document counts, however short
        rules = replace(rules, min_tokens=2)
    shards = stage_shards(
        split.shards, folder / split.name, tokenizer, rules, num_processes, num_downloads
    )
    progress = tqdm(total=len(split.shards), desc=f"tokenise {split.name}", unit="shard")
    for shard in shards:
        staged.append(shard)
        num_documents += len(shard.ids)
        num_targets += sum(
            length // rules.chunk_length * rules.chunk_length if split.content == "long" else length
            for length in shard.num_tokens
        )
        progress.update()
        if _is_enough(split, num_documents, num_targets // rules.chunk_length):
            break
    shards.close()
    progress.close()
    return staged


def _is_enough(split: SplitPlan, num_documents: int, num_chunks: int) -> bool:
    """Whether the shards so far surely fill a split's limits."""
    # Documents that overlap with an earlier split will be dropped later: read on a little.
    if split.max_documents is not None and num_documents >= 2 * split.max_documents:
        return True
    if split.max_chunks is None or split.content == "mixed":
        return False
    # Packing loses what it crops, and its buffer must stay full to the last row: read on.
    return num_chunks >= split.max_chunks * (1 if split.content == "long" else 3)


def _manifest(
    plan: BuildPlan,
    tokenizer: BytePairTokenizer,
    splits: dict[str, Any],
    prepared: Path,
) -> dict[str, Any]:
    """Everything about the set, and nothing about when, where or how fast it was built."""
    dtype = dtype_name(tokenizer.vocab_size)
    files = sorted(path for path in prepared.rglob("*") if path.is_file())
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "source": plan.source,
        "notes": plan.notes,
        **({} if plan.hub is None else {"hub": plan.hub}),
        **({} if plan.expected is None else {"expected": plan.expected}),
        "chunk_length": plan.rules.chunk_length,
        "min_tokens": plan.rules.min_tokens,
        "seed": plan.seed,
        "vocab_size": tokenizer.vocab_size,
        "bos_token_id": tokenizer.bos_token_id,
        "dtype": dtype,
        "num_bytes_per_token": DTYPES[dtype].itemsize,
        "splits": splits,
        "files": {
            path.relative_to(prepared).as_posix(): {
                "num_bytes": path.stat().st_size,
                "sha256": file_sha256(path),
            }
            for path in files
        },
    }
