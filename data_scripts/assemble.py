"""Tokenised shards -> a chunk set: the overlap rules, the frozen order, the files, the manifest."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data_scripts.chunk_set import (
    DTYPES,
    FORMAT,
    FORMAT_VERSION,
    INDEX_COLUMNS,
    ChunkSet,
    dtype_name,
    file_sha256,
)
from data_scripts.chunking import (
    DocumentRules,
    OverlapIndex,
    chunk_starts,
    document_sha256,
    training_order,
)
from data_scripts.sources import TextShard
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
        confirmation: scored once, after a registration (Section 3.6).
        max_documents: keep the first so many documents, in the order of the shards.
        max_chunks: likewise the first so many chunks, before they are permuted.
        max_document_tokens: targets kept of a document, from its start.
        overlaps: "drop" an evaluation document whose first 256 tokens equal those of a document
            of an earlier split, or only "list" it in the manifest.
    """

    name: str
    shards: list[TextShard]
    kind: str
    confirmation: bool = False
    max_documents: int | None = None
    max_chunks: int | None = None
    max_document_tokens: int | None = None
    overlaps: str = "drop"


@dataclass(frozen=True)
class BuildPlan:
    """Everything a set depends on.

    Attributes:
        source: the source's name, for the manifest.
        splits: in the order in which overlaps are looked for: training first.
        rules: lengths of documents and chunks.
        seed: of the permutation of the training chunks.
        notes: what a reader of the manifest should know about the source.
    """

    source: str
    splits: list[SplitPlan]
    rules: DocumentRules
    seed: int = 0
    notes: list[str] = field(default_factory=list)

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
    out: str | Path, plan: BuildPlan, tokenizer: BytePairTokenizer, num_processes: int = 1
) -> ChunkSet:
    """Build a chunk set; the result depends on the plan and the tokenizer alone.

    Args:
        out: the folder to make; it must not exist, or be empty.
        plan: splits, rules, seed.
        tokenizer: the BPE.
        num_processes: that tokenise shards side by side.

    Raises:
        ValueError: if `out` is taken or being built, a split keeps nothing, or a document is not
            UTF-8.
    """
    if num_processes < 1:
        raise ValueError(f"num_processes must be at least 1; found {num_processes}.")
    out = Path(out)
    with staging_folder(out) as staging:
        prepared = fresh_folder(staging / "set")
        tokenizer.save(prepared / "tokenizer")
        overlap_index = OverlapIndex()
        splits = {}
        for split in plan.splits:
            rules = replace(plan.rules, max_document_tokens=split.max_document_tokens)
            staged = _collect(split, staging / "shards", tokenizer, rules, num_processes)
            write = _write_training if split.kind == "chunks" else _write_evaluation
            (prepared / split.name).mkdir()
            splits[split.name] = write(prepared / split.name, split, staged, plan, overlap_index)
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
) -> list[StagedShard]:
    """Tokenise a split's shards until its limits are reached."""
    staged = []
    num_documents = num_chunks = 0
    shards = stage_shards(split.shards, folder / split.name, tokenizer, rules, num_processes)
    progress = tqdm(total=len(split.shards), desc=f"tokenise {split.name}", unit="shard")
    for shard in shards:
        staged.append(shard)
        num_documents += len(shard.ids)
        num_chunks += sum(length // rules.chunk_length for length in shard.num_tokens)
        progress.update()
        # Documents that overlap with an earlier split will be dropped later: read on a little.
        if split.max_documents is not None and num_documents >= 2 * split.max_documents:
            break
        if split.max_chunks is not None and num_chunks >= split.max_chunks:
            break
    shards.close()
    progress.close()
    return staged


def _documents(staged: list[StagedShard]) -> Iterator[tuple[str, np.ndarray]]:
    for shard in staged:
        yield from shard.documents()


def _write_training(
    folder: Path,
    split: SplitPlan,
    staged: list[StagedShard],
    plan: BuildPlan,
    overlap_index: OverlapIndex,
) -> dict[str, Any]:
    """Cut documents into chunks and write them in the frozen order."""
    documents = list(_documents(staged))[: split.max_documents]
    chunk_length = plan.rules.chunk_length
    document, start = chunk_starts(
        (len(tokens) for _, tokens in documents), chunk_length, split.max_chunks
    )
    if len(document) == 0:
        raise ValueError(
            f"split {split.name} must give at least one chunk of {chunk_length} targets; it gives "
            "none. Use longer documents or a smaller --chunk_length."
        )
    documents = documents[: int(document[-1]) + 1]
    overlap_index.add(split.name, iter(documents))
    order = training_order(len(document), plan.seed)
    index = np.empty((len(document), INDEX_COLUMNS), "<i8")
    with (folder / "chunks.bin").open("wb") as file:
        for place, chunk in enumerate(tqdm(order, desc=f"write {split.name}", unit="chunk")):
            begin = int(start[chunk])
            raw = documents[document[chunk]][1][begin : begin + chunk_length].tobytes()
            file.write(raw)
            index[place] = document[chunk], begin, zlib.crc32(raw)
    (folder / "chunk_index.bin").write_bytes(index.tobytes())
    _write_document_list(folder, documents)
    return _split_entry(split, staged, len(documents)) | {
        "num_chunks": len(document),
        "num_targets": len(document) * chunk_length,
    }


def _write_evaluation(
    folder: Path,
    split: SplitPlan,
    staged: list[StagedShard],
    plan: BuildPlan,
    overlap_index: OverlapIndex,
) -> dict[str, Any]:
    """Write whole documents, without those that begin like a document of an earlier split."""
    kept: list[tuple[str, np.ndarray]] = []
    overlaps = []
    num_before = 0
    for document_id, tokens in _documents(staged):
        if split.max_documents is not None and len(kept) >= split.max_documents:
            break
        num_before += 1
        match = overlap_index.find(tokens)
        if match is not None:
            overlaps.append({"document": document_id, "split": match[0], "equals": match[1]})
            if split.overlaps == "drop":
                continue
        kept.append((document_id, tokens))
    if not kept:
        raise ValueError(
            f"split {split.name} must keep at least one document of {plan.rules.min_tokens} tokens "
            f"(BOS counted); it keeps none of {num_before}. Use longer documents or a smaller "
            "--min_tokens."
        )
    overlap_index.add(split.name, iter(kept))
    with (folder / "tokens.bin").open("wb") as file:
        for _, tokens in kept:
            file.write(tokens.tobytes())
    _write_document_list(folder, kept)
    num_chunks = sum(len(tokens) // plan.rules.chunk_length for _, tokens in kept)
    return _split_entry(split, staged, len(kept)) | {
        "num_documents_before_overlaps": num_before,
        "num_targets": sum(len(tokens) for _, tokens in kept),
        "num_chunks": num_chunks,
        "num_targets_in_chunks": num_chunks * plan.rules.chunk_length,
        "overlaps": overlaps,
        "overlaps_dropped": split.overlaps == "drop",
    }


def _write_document_list(folder: Path, documents: list[tuple[str, np.ndarray]]) -> None:
    listed = {
        "ids": [document_id for document_id, _ in documents],
        "num_tokens": [len(tokens) for _, tokens in documents],
        "sha256": [document_sha256(tokens) for _, tokens in documents],
    }
    write_json(folder / "documents.json", listed)


def _split_entry(split: SplitPlan, staged: list[StagedShard], num_documents: int) -> dict[str, Any]:
    return {
        "kind": split.kind,
        "confirmation": split.confirmation,
        "max_document_tokens": split.max_document_tokens,
        "shards": [
            {"name": shard.name, "sha256": shard.sha256, **shard.counts} for shard in staged
        ],
        "num_documents": num_documents,
    }


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
