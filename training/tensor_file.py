"""A safetensors file held in memory: filled from tensors, hashed, and written past the page cache.

Where a model trains on a CPU, whatever a checkpoint costs in processor time is taken from training.
Most of it would go into copies: into fresh memory for the snapshot, and from there into the page
cache. Here the snapshot has the layout of the file and is kept from one checkpoint to the next, and
the disk reads it from there.
"""

import errno
import hashlib
import json
import mmap
import os
from pathlib import Path

import torch

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
HEADER_ALIGNMENT = 8
PIECE_BYTES = 1 << 24  # one write; a multiple of every disk's block


class TensorFile:
    """The bytes of one safetensors file, in memory of its own.

    Args:
        tensors: name -> tensor; their names, shapes and dtypes fix the layout. Nothing is copied
            until `fill`.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.layout = _layout(tensors)
        # The widest first, so that every tensor is aligned.
        names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            start, end = end, end + tensors[name].nbytes
            dtype, shape = self.layout[name]
            header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % HEADER_ALIGNMENT)
        self.num_bytes = HEADER_ALIGNMENT + len(text) + end
        padding = -self.num_bytes % mmap.PAGESIZE
        self._memory = mmap.mmap(-1, self.num_bytes + padding)  # whole pages, as the disk wants it
        self._memory[: HEADER_ALIGNMENT + len(text)] = len(text).to_bytes(8, "little") + text
        data = torch.frombuffer(self._memory, dtype=torch.uint8)[HEADER_ALIGNMENT + len(text) :]
        sizes = [tensors[name].nbytes for name in names]
        self._views = {
            name: part.view(tensors[name].dtype).view(tensors[name].shape)
            for name, part in zip(names, data[:end].split(sizes), strict=True)
        }

    def holds(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether these tensors have the names, shapes and dtypes of the file."""
        return self.layout == _layout(tensors)

    @torch.no_grad()
    def fill(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy the tensors' values, from any device."""
        for name, view in self._views.items():
            view.copy_(tensors[name])

    def sha256(self) -> str:
        """sha256 of the file's bytes, in hex."""
        return hashlib.sha256(memoryview(self._memory)[: self.num_bytes]).hexdigest()

    def write(self, path: Path) -> None:
        """Write the file and wait until it is on the disk.

        Raises:
            OSError: if it cannot be written.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        direct = getattr(os, "O_DIRECT", 0)  # Linux
        try:
            descriptor = os.open(path, flags | direct, 0o666)
        except OSError as error:  # a file system without it, such as tmpfs
            if error.errno != errno.EINVAL:
                raise
            descriptor = os.open(path, flags, 0o666)
        try:
            memory, position = memoryview(self._memory), 0
            while position < len(memory):
                position += os.write(descriptor, memory[position : position + PIECE_BYTES])
            os.ftruncate(descriptor, self.num_bytes)  # off with the last page's padding
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _layout(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, list[int]]]:
    return {name: (tensor.dtype, list(tensor.shape)) for name, tensor in tensors.items()}
