"""The plain update that ours is measured against: what one writes first, and no less.

The same model, the same recipe, the same weights, with torch's own pieces in the plain way:
autocast, each block recomputed (and compiled by the caller), scaled-dot-product attention with a
dense mask for every window, whole logits through `cross_entropy`, AdamW unfused, and Muon one
matrix at a time.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from modeling_doctab import DocTabForCausalLM
from modeling_doctab.document_table import DocumentTable
from modeling_doctab.naive import muon_update
from training.optim import parameter_groups


class PlainBlock(nn.Module):
    """One block on the weights of a DocTabDecoderLayer."""

    def __init__(self, layer: nn.Module, mask: torch.Tensor | None) -> None:
        super().__init__()
        self.layer = layer
        self.mask = mask

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """[B, T, D] to [B, T, D]."""
        a, eps = self.layer.self_attn, self.layer.eps
        batch, length, _ = x.shape
        h = rms_norm(x, eps)
        q, k, v = (p(h).view(batch, length, -1, a.head_dim) for p in (a.q_proj, a.k_proj, a.v_proj))
        if a.has_value_embedding:
            gate = 2 * torch.sigmoid(a.value_gate(h[..., : a.config.value_gate_channels]))
            v = v + gate[..., None] * a.value_embedding(ids).view_as(v)
        q, k = (rms_norm(_rotate(y.transpose(1, 2), cos, sin), eps) for y in (q, k))
        y = F.scaled_dot_product_attention(
            q, k, v.transpose(1, 2).to(q.dtype), attn_mask=self.mask, is_causal=self.mask is None
        )
        x = x + a.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        m = self.layer.mlp
        return x + m.down_proj(F.relu(m.up_proj(rms_norm(x, eps))).square())


def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension, in the dtype of x: autocast on a GPU would make it float32."""
    return F.rms_norm(x, x.shape[-1:], eps=eps).to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), -1).to(x.dtype)


class PlainUpdate:
    """Forward, backward and optimizer step on the parameters of a DocTabForCausalLM.

    Args:
        model: whose parameters to train; they are shared.
        length: row length in tokens.
        recompute: recompute each block in the backward pass.
        iteration_dtype: of Muon's iterations.
    """

    def __init__(
        self,
        model: DocTabForCausalLM,
        length: int,
        recompute: bool = True,
        iteration_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.model, self.recompute, self.iteration_dtype = model, recompute, iteration_dtype
        device = model.lm_head.weight.device
        self.positions = torch.arange(length, device=device)[None]
        distance = self.positions[0][:, None] - self.positions
        self.blocks: list[PlainBlock] = []
        for i, layer in enumerate(model.model.layers):
            window = model.config.window(i)
            # The diagonal and `window` earlier keys; no mask where that is everything.
            mask = None if window >= length else (distance >= 0) & (distance <= window)
            self.blocks.append(PlainBlock(layer, mask))
        groups = parameter_groups(model)
        named = dict(model.named_parameters())
        self.matrices = [named[name] for name in groups.pop("matrices")]
        others = [named[name] for names in groups.values() for name in names]
        self.adamw = torch.optim.AdamW(others, lr=0.01, weight_decay=0.0, foreach=False)
        self.state = [
            (
                torch.zeros_like(w),
                w.new_zeros(w.shape[0] if w.shape[0] >= w.shape[1] else w.shape[1]),
            )
            for w in self.matrices
        ]

    def loss(
        self, ids: torch.Tensor, targets: torch.Tensor, table: DocumentTable | None = None
    ) -> torch.Tensor:
        """Mean nats of the targets, from whole logits."""
        m = self.model.model
        x = m.embed_tokens(ids).to(m._compute_dtype(ids.device))
        if table is not None:
            x = x + m.document_table(table, x.dtype)
        x = rms_norm(x, m.config.rms_norm_eps)
        cos, sin = m.rotary_emb(x, self.positions)
        x0 = x
        for i, block in enumerate(self.blocks):
            x = (m.resid_lambdas[i] * x + m.x0_lambdas[i] * x0).to(x0.dtype)
            if self.recompute:
                x = checkpoint(block, x, ids, cos, sin, use_reentrant=False)
            else:
                x = block(x, ids, cos, sin)
        x = rms_norm(x, m.config.rms_norm_eps)
        cap = m.config.final_logit_softcapping
        logits = cap * torch.tanh(self.model.lm_head(x).float() / cap)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def step(self) -> None:
        """AdamW for the rest, then Muon matrix by matrix; gradients are dropped."""
        self.adamw.step()
        with torch.no_grad():
            for i, w in enumerate(self.matrices):
                buffer, moment = self.state[i]
                new, buffer, moment = muon_update(
                    w, w.grad, buffer, moment, 0.04, 0.95, 0.1, iteration_dtype=self.iteration_dtype
                )
                w.copy_(new)
                self.state[i] = (buffer, moment)
        self.model.zero_grad(set_to_none=True)
