"""Where a build works until it is done: a locked sibling folder, renamed at the end.

`OUT.building/` holds a lock, the shards tokenised so far, and the set being written. A build that
was interrupted leaves that folder and no set; the next one takes over its finished shards. Only a
complete set is renamed to `OUT`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from data_scripts.chunk_set import DTYPES, dtype_name
from data_scripts.chunking import DocumentRules, tokenise_documents
from data_scripts.downloads import HubShard
from data_scripts.prefetch import Prefetch
from data_scripts.sources import TextShard
from data_scripts.tokenizer import BytePairTokenizer


@contextmanager
def staging_folder(out: Path) -> Iterator[Path]:
    """Lock `OUT.building/` for one build, and remove it when the build has succeeded.

    Raises:
        ValueError: if `out` holds something already, or another build has the lock.
    """
    _check_free(out)
    staging = out.parent / f"{out.name}.building"
    staging.mkdir(parents=True, exist_ok=True)
    with (staging / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"another build into {out} is running; only one may at a time. Wait for it, "
                "or choose another --out."
            ) from None
        _check_free(out)  # another build may have finished while this one opened the lock
        yield staging
        shutil.rmtree(staging)


def _check_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(
            f"--out must be a new or an empty folder; {out} holds something. "
            "Delete it or choose another."
        )


def fresh_folder(path: Path) -> Path:
    """An empty folder at `path`, whatever an interrupted build has left there."""
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path


def publish(prepared: Path, out: Path) -> None:
    """Make a complete folder visible under its name in one step, durable before and after."""
    for path in sorted(prepared.rglob("*")):
        _fsync(path)
    _fsync(prepared)
    if out.exists():
        out.rmdir()  # empty: `staging_folder` has checked
    prepared.rename(out)
    _fsync(out.parent)


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    """Write JSON so that a reader sees the old file or the whole new one."""
    temporary = _temporary(path)
    temporary.write_text(json.dumps(value, indent=indent) + "\n", encoding="utf-8")
    temporary.replace(path)


def _temporary(path: Path) -> Path:
    """A name of this process's own: a killed build's worker may still be writing its file."""
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class StagedShard:
    """A shard's kept documents on disk: `NAME.tokens` and `NAME.json`, written in this order."""

    path: Path  # of the tokens
    name: str
    sha256: str
    ids: list[str]
    num_tokens: list[int]
    counts: dict[str, int]
    dtype: np.dtype

    def documents(self) -> Iterator[tuple[str, np.ndarray]]:
        """(id, tokens) of every kept document, memory-mapped."""
        if not self.ids:
            return
        tokens = np.memmap(self.path, self.dtype, "r")
        start = 0
        for document_id, length in zip(self.ids, self.num_tokens, strict=True):
            yield document_id, tokens[start : start + length]
            start += length


def stage_shards(
    shards: Sequence[TextShard],
    folder: Path,
    tokenizer: BytePairTokenizer,
    rules: DocumentRules,
    num_processes: int = 1,
    num_downloads: int = 2,
) -> Iterator[StagedShard]:
    """Tokenise shards into `folder`, in order; a shard that is there already is taken as it is.

    Yields each shard as it is done, so that a caller with enough can stop early. The result does
    not depend on `num_processes`. Shards of the Hub are downloaded ahead in `num_downloads`
    threads; no more than `num_downloads` + 2 `num_processes` lie on the disk and wait.

    Raises:
        ValueError: if a document is not UTF-8, or the Hub refuses a shard.
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [
        _Job(shard, folder / f"{index:05d}.tokens", tokenizer, rules)
        for index, shard in enumerate(shards)
    ]
    missing = [
        job.shard for job in jobs if isinstance(job.shard, HubShard) and job.staged() is None
    ]
    with Prefetch(missing, num_downloads, num_downloads + num_processes) as prefetch:
        for job, staged in _run_jobs(jobs, num_processes):
            job.shard.release()
            if isinstance(job.shard, HubShard):
                prefetch.done(job.shard)
            yield staged


def _run_jobs(jobs: list[_Job], num_processes: int) -> Iterator[tuple[_Job, StagedShard]]:
    if num_processes == 1 or len(jobs) == 1:
        for job in jobs:
            yield job, job.run()
        return
    # Spawned, not forked: the parent may hold threads of arrow or tokenizers.
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(job.run) for job in jobs]
        try:
            for job, future in zip(jobs, futures, strict=True):
                yield job, future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class _Job:
    """One shard to be tokenised into `path`, and its record beside it."""

    shard: TextShard
    path: Path
    tokenizer: BytePairTokenizer
    rules: DocumentRules

    @property
    def _dtype(self) -> np.dtype:
        return DTYPES[dtype_name(self.tokenizer.vocab_size)]

    def staged(self) -> StagedShard | None:
        """The result, if an earlier build left it for the same content, tokenizer and rules."""
        record_path = self.path.with_suffix(".json")
        if not record_path.is_file():
            return None
        record = json.loads(record_path.read_text(encoding="utf-8"))
        key = _staging_key(self.shard.name, self.shard.sha256(), self.tokenizer, self.rules)
        if record.pop("key") != key:
            return None
        staged = StagedShard(path=self.path, dtype=self._dtype, **record)
        num_bytes = sum(staged.num_tokens) * self._dtype.itemsize
        is_whole = self.path.is_file() and self.path.stat().st_size == num_bytes
        return staged if is_whole else None

    def run(self) -> StagedShard:
        """Tokenise the shard, unless that is done."""
        staged = self.staged()
        if staged is not None:
            return staged
        result = tokenise_documents(self.shard.documents(), self.tokenizer, self.rules)
        record_path = self.path.with_suffix(".json")
        record_path.unlink(missing_ok=True)
        temporary = _temporary(self.path)
        with temporary.open("wb") as file:
            for tokens in result.tokens:
                file.write(tokens.astype(self._dtype, copy=False).tobytes())
        temporary.replace(self.path)
        sha256 = self.shard.sha256()
        record = {
            "name": self.shard.name,
            "sha256": sha256,
            "ids": result.ids,
            "num_tokens": [len(tokens) for tokens in result.tokens],
            "counts": result.counts.as_dict(),
        }
        key = _staging_key(self.shard.name, sha256, self.tokenizer, self.rules)
        write_json(record_path, {"key": key, **record})
        return StagedShard(path=self.path, dtype=self._dtype, **record)


def _staging_key(name: str, sha256: str, tokenizer: BytePairTokenizer, rules: DocumentRules) -> str:
    """What a staged shard depends on; one of another text, tokenizer or rule is not reused."""
    digest = hashlib.sha256(f"{name}\0{sha256}\0{json.dumps(asdict(rules))}\0".encode())
    digest.update(tokenizer.pattern.encode() + "\0".join(tokenizer.special_tokens).encode())
    for token, rank in sorted(tokenizer.ranks.items(), key=lambda item: item[1]):
        digest.update(rank.to_bytes(4, "little") + len(token).to_bytes(4, "little") + token)
    return digest.hexdigest()
