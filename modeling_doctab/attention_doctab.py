"""Attention implementations behind transformers' interface: eager, and windowed for rows.

"windowed" is the default. On rows without padding it computes a sliding layer in O(T w): the row
is cut into blocks as long as the window, and each block of queries meets its own and the previous
block of keys. Everything else it hands to scaled-dot-product attention, with a mask if one is
needed.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

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
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
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
    whole_rows = attention_mask is None and key.shape[2] == length
    if sliding_window is not None and whole_rows and length > sliding_window:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
        output = banded_attention(query, key, value, sliding_window - 1, scaling)
        return output.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


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

    def with_previous(x: torch.Tensor) -> torch.Tensor:
        blocks = x.view(batch, heads, num_blocks, block, head_dim)
        previous = F.pad(blocks[:, :, :-1], (0, 0, 0, 0, 1, 0))
        return torch.cat((previous, blocks), 3).flatten(1, 2)

    offset = torch.arange(block, device=query.device)[:, None] + block
    index = torch.arange(2 * block, device=query.device)
    band = (index <= offset) & (index >= offset - window)
    # The first block has no predecessor: its keys there are padding.
    mask = band.repeat(num_blocks, 1, 1)
    mask[0, :, :block] = False
    mask = mask.repeat(heads, 1, 1).unsqueeze(0)
    output = F.scaled_dot_product_attention(
        query.view(batch, heads * num_blocks, block, head_dim),
        with_previous(key),
        with_previous(value),
        attn_mask=mask,
        scale=scaling,
    )
    return output.view(batch, heads, num_blocks * block, head_dim)[:, :, :length]


def windowed_mask(
    *args: Any, q_length: int, kv_length: int, local_size: int | None = None, **kwargs: Any
) -> torch.Tensor | None:
    """As sdpa's mask, but none for a sliding layer on whole rows: the band is built in blocks."""
    if q_length == kv_length:
        local_size = None
    return sdpa_mask(*args, q_length=q_length, kv_length=kv_length, local_size=local_size, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(WINDOWED, windowed_attention_forward)
AttentionMaskInterface.register(WINDOWED, windowed_mask)
