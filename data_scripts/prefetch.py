"""Shards of the Hub fetched ahead of their readers, and what downloads leave behind removed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from data_scripts.downloads import HubShard


def remove_downloads(shards: Sequence[Any]) -> None:
    """Delete what the downloads of some shards have left, and their folders if those are empty."""
    downloads = [shard for shard in shards if isinstance(shard, HubShard)]
    for shard in downloads:
        shard.remove()
    for folder in {shard.folder for shard in downloads}:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


class Prefetch:
    """Downloads shards in the background, in order, at most `ahead` that are not done with."""

    def __init__(self, shards: Sequence[HubShard], num_workers: int, ahead: int) -> None:
        self._pending = iter(shards)
        self._done: set[HubShard] = set()
        self._lock = threading.Lock()
        self._room = threading.Semaphore(ahead)
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, daemon=True) for _ in range(num_workers)
        ]

    def __enter__(self) -> Prefetch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        for _ in self._threads:
            self._room.release()
        for thread in self._threads:
            thread.join()
        for shard in self._done:  # one may have been fetched again after it was read
            shard.release()

    def done(self, shard: HubShard) -> None:
        """A shard has been read: there is room for the next."""
        with self._lock:
            self._done.add(shard)
        self._room.release()

    def _next(self) -> HubShard | None:
        with self._lock:
            return next((shard for shard in self._pending if shard not in self._done), None)

    def _work(self) -> None:
        while True:
            self._room.acquire()
            shard = self._next()
            if shard is None or self._stop.is_set():
                return
            try:
                shard.fetch(self._stop)
            except Exception:  # whoever reads the shard meets the same error, and reports it
                return
