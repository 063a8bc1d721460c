"""Which rows a process sees, as a pure function of (update, micro-batch, rank, world size).

The chunks of the set are consumed in their stored order, `tokens_per_update / chunk_length` of
them per update, whatever the number of processes, the micro-batch and the seed. When the run is
longer than the set, the set repeats in order.
"""

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from data_scripts.rows import TableOptions, chunk_rows, donor_chunks


@dataclass(frozen=True)
class BatchPlan:
    """Arithmetic of the run's batches, in chunks."""

    chunks_per_update: int
    chunks_per_micro_batch: int
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.chunks_per_update % (self.chunks_per_micro_batch * self.world_size):
            raise ValueError(
                f"an update of {self.chunks_per_update} chunks does not divide into micro-batches "
                f"of {self.chunks_per_micro_batch} chunks on {self.world_size} processes. Lower "
                "training.tokens_per_micro_batch, or use another number of processes."
            )

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one process in one update."""
        return self.chunks_per_update // (self.chunks_per_micro_batch * self.world_size)

    def chunk_positions(self, update: int, micro_batch: int, rank: int) -> range:
        """Positions of a micro-batch's chunks in the endless stream of chunks."""
        index = micro_batch * self.world_size + rank
        start = update * self.chunks_per_update + index * self.chunks_per_micro_batch
        return range(start, start + self.chunks_per_micro_batch)


@dataclass(frozen=True)
class RowMaker:
    """Chunks to the tensors of one batch, table fields included."""

    chunks: np.ndarray
    """[num_chunks, chunk_length], memory-mapped, in training order."""
    row_length: int
    bos_token_id: int
    table: TableOptions | None = None
    chunk_documents: np.ndarray | None = None
    """[num_chunks], the document of each chunk; needed by the control table_source "foreign"."""

    def __call__(self, positions: range) -> dict[str, torch.Tensor]:
        """The batch at these positions of the endless stream; int64 [rows, row_length] each."""
        indices = np.asarray(positions) % len(self.chunks)
        foreign = None
        if self.table is not None and self.table.source == "foreign":
            foreign = self.chunks[donor_chunks(self.chunk_documents, indices, self.table.seed)]
        arrays = chunk_rows(
            self.chunks[indices],
            self.row_length,
            self.bos_token_id,
            self.table,
            chunk_indices=indices,
            foreign=foreign,
        )
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


class BatchLoader:
    """Prepares micro-batches ahead in threads and yields them in order.

    Args:
        make: positions -> batch.
        plan: the arithmetic.
        rank: of this process.
        first_update: where to start; a resumed run starts in the middle.
        num_updates: where to stop.
        num_threads: threads that prepare.
        device: batches are sent there as soon as they are ready.
    """

    def __init__(
        self,
        make: RowMaker,
        plan: BatchPlan,
        rank: int,
        first_update: int,
        num_updates: int,
        num_threads: int = 2,
        device: torch.device | None = None,
    ) -> None:
        self.make = make
        self.plan = plan
        self.rank = rank
        self.updates = range(first_update, num_updates)
        self.num_threads = num_threads
        self.device = device or torch.device("cpu")

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Micro-batches of all remaining updates, one after the other."""
        positions = (
            self.plan.chunk_positions(update, micro_batch, self.rank)
            for update in self.updates
            for micro_batch in range(self.plan.micro_batches)
        )
        pending: deque[Future[dict[str, torch.Tensor]]] = deque()
        with ThreadPoolExecutor(self.num_threads, thread_name_prefix="rows") as pool:
            try:
                for where in positions:
                    pending.append(pool.submit(self._prepare, where))
                    if len(pending) > 2 * self.num_threads:
                        yield self._send(pending.popleft().result())
                while pending:
                    yield self._send(pending.popleft().result())
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, positions: range) -> dict[str, torch.Tensor]:
        batch = self.make(positions)
        if self.device.type == "cuda":
            return {name: tensor.pin_memory() for name, tensor in batch.items()}
        return batch

    def _send(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: t.to(self.device, non_blocking=True) for name, t in batch.items()}


def target_sha256(chunks: np.ndarray, plan: BatchPlan, num_updates: int) -> str:
    """Hash of the run's targets in the order it sees them, as little-endian uint32.

    Equal for every arm, seed, number of processes and micro-batch that trains on the same targets.
    """
    digest = hashlib.sha256()
    for update in range(num_updates):
        start = update * plan.chunks_per_update
        indices = np.arange(start, start + plan.chunks_per_update) % len(chunks)
        digest.update(np.ascontiguousarray(chunks[indices], dtype="<u4").tobytes())
    return digest.hexdigest()
