"""Attention implementations behind transformers' interface: eager, and "doctab_windowed".

"doctab_windowed" is the default. On whole rows without padding it takes the fastest kernel there
is: on a GPU in half precision torch's own flash attention, which knows sliding windows; elsewhere,
for a sliding layer, blocks as long as the window, each meeting its own and the previous block of
keys, so that a layer costs O(T w). Everything else goes to scaled-dot-product attention, with a
mask if one is needed. `attn_implementation="flex_attention"`, "flash_attention_2" and the kernels
of the Hub work as for any model.
"""

import inspect
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

try:
    from torch.nn.attention import varlen

    varlen_attn: Any = varlen.varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None

WINDOWED = "doctab_windowed"


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention that shows its weights. Query [B,H,T,C], key and value [B,K,S,C].

    Returns:
        [B, T, H, C], and the weights [B, H, T, S].
    """
    key, value = _repeat_heads(query, key, value)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def windowed_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over rows, linear in the row length for sliding layers.

    Args:
        module: the attention module, for the number of groups.
        query: [B, H, T, C].
        key: [B, K, S, C].
        value: [B, K, S, C].
        attention_mask: None for whole rows; else as for sdpa.
        dropout: must be 0; there is none in the recipe.
        scaling: of the scores.
        sliding_window: keys a query sees, itself included; None for all earlier ones.
        **kwargs: passed on.

    Returns:
        [B, T, H, C], and no weights.
    """
    length = query.shape[2]
    if attention_mask is None and key.shape[2] == length and length > 1:
        if query.is_cuda and _flash_works(query.device, query.dtype, query.shape[3]):
            keys, values = _repeat_heads(query, key, value)
            return flash_attention(query, keys, values, sliding_window, scaling), None
        if sliding_window is not None and length > sliding_window:
            keys, values = _repeat_heads(query, key, value)
            output = banded_attention(query, keys, values, sliding_window - 1, scaling)
            return output.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sliding_window: int | None,
    scaling: float | None = None,
) -> torch.Tensor:
    """torch's own flash attention on whole rows: [B, H, T, C] each, to [B, T, H, C]."""
    batch, heads, length, head_dim = query.shape
    bounds = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    flat = (x.transpose(1, 2).reshape(batch * length, heads, head_dim) for x in (query, key, value))
    output = varlen_attn(*flat, bounds, bounds, length, length, scale=scaling, window_size=window)
    return output.view(batch, length, heads, head_dim)


_FLASH_WORKS: dict[tuple[str, torch.dtype, int], bool] = {}


@torch.compiler.assume_constant_result
def _flash_works(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's flash attention runs here, forward and backward; says so once if not."""
    key = (str(device), dtype, head_dim)
    if key not in _FLASH_WORKS:
        _FLASH_WORKS[key] = _try_flash(device, dtype, head_dim)
    return _FLASH_WORKS[key]


def _try_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    if dtype not in (torch.float16, torch.bfloat16):
        return False
    if varlen_attn is None or "window_size" not in inspect.signature(varlen_attn).parameters:
        reason = f"torch {torch.__version__} has none with windows"
    else:
        try:
            # The first call may be inside a recomputed block, whose hooks must not see the probe.
            plain = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
            with torch.enable_grad(), torch.autocast(device.type, enabled=False), plain:
                shape = (1, 1, 64, head_dim)
                x = torch.ones(shape, dtype=dtype, device=device, requires_grad=True)
                flash_attention(x, x, x, 8).sum().backward()
            return True
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            reason = str(error).splitlines()[0]
    warnings.warn(
        f"torch's flash attention does not run on {device} for {dtype} heads of {head_dim}: "
        f"{reason}. Using blocks of scaled-dot-product attention, which is slower; "
        "attn_implementation='flex_attention' is the other choice.",
        stacklevel=2,
    )
    return False


def banded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int,
    scaling: float | None = None,
) -> torch.Tensor:
    """Causal attention to `window` earlier keys and itself, in O(T window) time and memory.

    Args:
        query: [B, H, T, C]; key and value have the same shape.
        key: see `query`.
        value: see `query`.
        window: the paper's w, in tokens.
        scaling: of the scores; 1 / sqrt(C) by default.

    Returns:
        [B, H, T, C].
    """
    batch, heads, length, head_dim = query.shape
    block = max(window, 16)
    num_blocks = -(-length // block)
    pad = num_blocks * block - length
    if pad:
        query, key, value = (F.pad(x, (0, 0, 0, pad)) for x in (query, key, value))
    offset = torch.arange(block, device=query.device)[:, None] + block
    index = torch.arange(2 * block, device=query.device)
    band = (index <= offset) & (index >= offset - window)
    # The first block sees itself alone: where it is no longer than the window, all of its past.
    first = F.scaled_dot_product_attention(
        query[:, :, :block],
        key[:, :, :block],
        value[:, :, :block],
        attn_mask=None if window >= block else band[:, block:],
        is_causal=window >= block,
        scale=scaling,
    )
    if num_blocks == 1:
        return first[:, :, :length]

    def blocks(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(batch, heads, num_blocks, block, head_dim)

    def with_previous(x: torch.Tensor) -> torch.Tensor:
        both = torch.cat((blocks(x)[:, :, :-1], blocks(x)[:, :, 1:]), 3)
        return both.flatten(1, 2)

    rest = F.scaled_dot_product_attention(
        blocks(query)[:, :, 1:].flatten(1, 2),
        with_previous(key),
        with_previous(value),
        attn_mask=band,
        scale=scaling,
    )
    rest = rest.view(batch, heads, (num_blocks - 1) * block, head_dim)
    return torch.cat((first, rest), 2)[:, :, :length]


def flex_kernel_options(query: torch.Tensor) -> dict[str, int] | None:
    """Tiles with which flex attention's backward pass fits the device, or None for its own choice.

    Its default tiles for heads of 128 need 131 KB of shared memory in the backward pass; an
    RTX 4090 has 101 KB a block. In float32 these tiles would not fit either.
    """
    if not query.is_cuda or query.shape[-1] < 128 or query.dtype == torch.float32:
        return None
    properties = torch.cuda.get_device_properties(query.device)
    if getattr(properties, "shared_memory_per_block_optin", 1 << 20) >= 131_072:
        return None
    tiles = {"BLOCK_M": 64, "BLOCK_N": 64}
    return {**tiles, "BLOCK_M1": 32, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 32}


def windowed_mask(
    *args: Any, q_length: int, kv_length: int, local_size: int | None = None, **kwargs: Any
) -> torch.Tensor | None:
    """As sdpa's mask, but none for a sliding layer on whole rows: the kernels know the window."""
    if q_length == kv_length:
        local_size = None
    return sdpa_mask(*args, q_length=q_length, kv_length=kv_length, local_size=local_size, **kwargs)


def _repeat_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value heads repeated to the number of query heads."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


ALL_ATTENTION_FUNCTIONS.register(WINDOWED, windowed_attention_forward)
AttentionMaskInterface.register(WINDOWED, windowed_mask)
