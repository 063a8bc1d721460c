"""Rotary embeddings with the recipe's sign convention, and transformers' scaling types."""

from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

from .configuration_doctab import DocTabConfig


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding with the recipe's sign. x [B,H,T,C], cos and sin [B,1,T,C/2]."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1).to(x.dtype)


class DocTabRotaryEmbedding(nn.Module):
    """cos and sin of the rotary angles, each [B, 1, T, C/2]."""

    def __init__(self, config: DocTabConfig) -> None:
        super().__init__()
        self.config = config
        self.rounding = getattr(torch, config.rotary_dtype)
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = config.rope_parameters["rope_type"]
        inv_freq, self.attention_scaling = self.compute_frequencies()
        self.inv_freq: torch.Tensor
        self.original_inv_freq: torch.Tensor
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move with the model but stay in float32: bfloat16 has no angles for position 8,000."""
        exact = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def compute_frequencies(self) -> tuple[torch.Tensor, float]:
        """Inverse frequencies [C/2] and the scale of cos and sin, by the config's `rope_type`."""
        if self.rope_type == "default":
            return self.compute_default_rope_parameters(self.config)
        return ROPE_INIT_FUNCTIONS[self.rope_type](self.config)

    @staticmethod
    def compute_default_rope_parameters(
        config: DocTabConfig, device: Any = None, **kwargs: Any
    ) -> tuple[torch.Tensor, float]:
        """Inverse frequencies [C/2] of plain rotary embeddings, and the scale 1."""
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
        base = config.rope_parameters["rope_theta"]
        return 1.0 / base ** (exponent / config.head_dim), 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Angles at `position_ids` [B, T], in the config's `rotary_dtype` whatever that of x.

        A model trained in bfloat16 and scored in float32 sees the same angles.
        """
        with torch.autocast(x.device.type, enabled=False):
            angles = position_ids[:, None, :, None].float() * self.inv_freq.float()
            cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(self.rounding), sin.to(self.rounding)
