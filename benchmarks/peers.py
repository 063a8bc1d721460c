"""Peers that are not packages: public code, run from the user's own checkout and never copied.

    git clone https://github.com/karpathy/autoresearch
    AUTORESEARCH=autoresearch python -m benchmarks update data_build

Where the variable is not set, the peer is left out and a line says so.
"""

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

AUTORESEARCH = "AUTORESEARCH"
MODEL_ENDS = "# Setup: tokenizer, model, optimizer, dataloader"  # a heading in its train.py


def checkout(variable: str) -> Path | None:
    """The folder that an environment variable names, or None and a line that says so.

    Raises:
        ValueError: if it names no folder.
    """
    value = os.environ.get(variable)
    if not value:
        print(f"left out: {variable.lower()} (set {variable} to a checkout of it)", flush=True)
        return None
    folder = Path(value)
    if not folder.is_dir():
        raise ValueError(f"{variable} must name a checkout; {value} is no folder.")
    return folder


def autoresearch_training(folder: Path) -> dict[str, Any]:
    """What its train.py defines above the run itself: GPT, GPTConfig, MuonAdamW.

    Its attention goes through scaled_dot_product_attention, since flash-attention needs a GPU, and
    torch.compile is left out, as it is on our side; all else is its own.
    """
    interface = types.SimpleNamespace(flash_attn_func=_attention)
    stand_ins = {
        "kernels": types.SimpleNamespace(
            get_kernel=lambda repo: types.SimpleNamespace(flash_attn_interface=interface)
        ),
        "prepare": mock.MagicMock(),
    }
    path = folder / "train.py"
    source = path.read_text().split(MODEL_ENDS)[0]
    module = types.ModuleType("autoresearch_train")
    with (
        mock.patch.dict(sys.modules, {**stand_ins, module.__name__: module}),
        mock.patch.dict(os.environ),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(torch, "compile", lambda function=None, **_: function or (lambda f: f)),
    ):
        exec(compile(source, str(path), "exec"), module.__dict__)
    return module.__dict__


_masks: dict[tuple[int, int], torch.Tensor | None] = {}


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window_size: tuple[int, int]
) -> torch.Tensor:
    """flash_attn_func on [batch, length, heads, channels] by sdpa, a mask where windows are short.

    `window_size[0]` earlier keys and the query's own.
    """
    assert causal
    length, window = q.shape[1], window_size[0]
    if (length, window) not in _masks:
        distance = torch.arange(length)[:, None] - torch.arange(length)
        mask = None if window >= length else (distance >= 0) & (distance <= window)
        _masks[length, window] = mask
    mask = _masks[length, window]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v.to(q.dtype)))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return y.transpose(1, 2)


def our_name(name: str) -> str:
    """Its parameter's name in a DocTabForCausalLM."""
    parts = name.split(".")
    if parts[0] == "value_embeds":
        return f"model.layers.{parts[1]}.self_attn.value_embedding.weight"
    for theirs, ours in (
        ("transformer.wte.", "model.embed_tokens."),
        ("transformer.h.", "model.layers."),
        (".attn.c_proj.", ".self_attn.o_proj."),
        (".attn.ve_gate.", ".self_attn.value_gate."),
        (".attn.c_", ".self_attn."),
        (".mlp.c_fc.", ".mlp.up_proj."),
        (".mlp.c_proj.", ".mlp.down_proj."),
        ("self_attn.q.", "self_attn.q_proj."),
        ("self_attn.k.", "self_attn.k_proj."),
        ("self_attn.v.", "self_attn.v_proj."),
    ):
        name = name.replace(theirs, ours)
    return f"model.{name}" if name.endswith("lambdas") else name


@contextlib.contextmanager
def autoresearch_data(folder: Path, data: Path, tokenizer: Path) -> Iterator[dict[str, Any]]:
    """Its prepare.py, looking for shards and for its tokenizer in the given folders.

    Its loader's buffers stay on the CPU, unpinned, while the context lasts.
    """
    path = folder / "prepare.py"
    module = types.ModuleType("autoresearch_prepare")
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    module.__dict__.update(DATA_DIR=str(data), TOKENIZER_DIR=str(tokenizer))
    empty = torch.empty

    def on_the_cpu(*size: Any, **options: Any) -> torch.Tensor:
        options.pop("pin_memory", None)
        return empty(*size, **options | {"device": "cpu"})

    with mock.patch.object(torch, "empty", on_the_cpu):
        yield module.__dict__
