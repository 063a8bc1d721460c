"""A tensor file's bytes are what safetensors reads, whatever disk they go to."""

import errno
import hashlib
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from training.tensor_file import DTYPES, PIECE_BYTES, TensorFile


def state():
    """Every dtype, a scalar, an odd number of odd elements, nothing at all, and no contiguity."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"of/{name}": torch.randint(0, 2, (3, 5), generator=generator).to(dtype)
        for dtype, name in DTYPES.items()
    }
    return tensors | {
        "step": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(7, 3, generator=generator).T,
    }


def write(file, path):
    file.write(path)
    assert path.stat().st_size == file.num_bytes
    assert hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256()
    return load_file(path)


def test_safetensors_reads_what_was_filled_in(tmp_path):
    tensors = state()
    file = TensorFile(tensors)
    file.fill(tensors)
    read = write(file, tmp_path / "a.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name
    with safe_open(tmp_path / "a.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_a_file_is_filled_anew(tmp_path):
    first, second = {"w": torch.ones(4)}, {"w": torch.full((4,), 2.0)}
    file = TensorFile(first)
    file.fill(first)
    assert file.holds(second)
    file.fill(second)
    assert torch.equal(write(file, tmp_path / "a.safetensors")["w"], second["w"])
    assert not file.holds({"w": torch.ones(5)})
    assert not file.holds({"w": torch.ones(4, dtype=torch.bfloat16)})
    assert not file.holds({"v": torch.ones(4)})


def test_many_pieces(tmp_path):
    tensors = {"w": torch.arange(PIECE_BYTES // 4 * 2 + 1, dtype=torch.int32)}
    file = TensorFile(tensors)
    file.fill(tensors)
    assert torch.equal(write(file, tmp_path / "a.safetensors")["w"], tensors["w"])


def test_a_file_system_without_direct_writes(tmp_path, monkeypatch):
    original, refused = os.open, []

    def without_direct(path, flags, *args, **kwargs):
        if flags & getattr(os, "O_DIRECT", 0):
            refused.append(path)
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", without_direct)
    tensors = state()
    file = TensorFile(tensors)
    file.fill(tensors)
    assert torch.equal(write(file, tmp_path / "a.safetensors")["step"], tensors["step"])
    assert bool(refused) == hasattr(os, "O_DIRECT")


def test_an_unwritable_place_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        TensorFile(state()).write(tmp_path / "missing" / "a.safetensors")
