"""The paper in plain loops: the specification that every fast path is compared with.

Nothing here is fast and nothing here is clever. Each function follows the text of a section; the
lookup, the rows, the model, the loss and the optimizer elsewhere in the project must equal it.
"""

import math
from collections.abc import Mapping, Sequence

import torch

from .configuration_doctab import DocTabConfig

# Coefficients of the five Polar Express iterations (arXiv 2505.16932; safety 2e-2, cushion 2).
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def lookup(
    tokens: Sequence[int],
    max_order: int = 4,
    segment_ids: Sequence[int] | None = None,
    reach: int | None = None,
) -> list[tuple[int, int, int]]:
    """The document table of one row (Section 3.3).

    For each position t: the largest n for which the last n inputs, `tokens[t-n+1 : t+1]`, occurred
    earlier, ending at some s < t; among those the latest s.

    Args:
        tokens: the row's inputs; a negative id is padding and matches nothing.
        max_order: the largest n.
        segment_ids: one id a position; neither a suffix nor a match nor its candidate crosses a
            change of id (packed rows). None for one segment.
        reach: a match counts only if t - s < reach. None for no limit.

    Returns:
        (order, candidate, distance) a position: n, `tokens[s+1]` and t - s, or (0, -1, 0).
    """
    if segment_ids is None:
        segment_ids = [0] * len(tokens)
    segment_start = [0] * len(tokens)
    for t in range(1, len(tokens)):
        same = segment_ids[t] == segment_ids[t - 1]
        segment_start[t] = segment_start[t - 1] if same else t

    def find(t: int) -> tuple[int, int, int]:
        for n in range(max_order, 0, -1):
            first = t - n + 1
            if first < segment_start[t] or min(tokens[first : t + 1]) < 0:
                continue
            for s in range(t - 1, segment_start[t] + n - 2, -1):
                if reach is not None and t - s >= reach:
                    break
                if list(tokens[s - n + 1 : s + 1]) == list(tokens[first : t + 1]):
                    return n, tokens[s + 1], t - s
        return 0, -1, 0

    return [find(t) for t in range(len(tokens))]


def table_state(order: int, distance: int, num_buckets: int = 14, max_order: int = 4) -> int:
    """The row of G that a lookup result selects: n and floor(log2 d) (Section 3.3)."""
    if order == 0:
        return max_order * num_buckets
    return (order - 1) * num_buckets + min(distance.bit_length() - 1, num_buckets - 1)


def bigram_row(previous: int, current: int, num_rows: int) -> int:
    """The row of the hashed bigram table: a 32-bit multiply-xor hash of the two ids."""
    mask = 0xFFFFFFFF
    h = (previous * 0x9E3779B1 + current * 0x85EBCA77) & mask
    h ^= h >> 15
    h = (h * 0xC2B2AE3D) & mask
    h ^= h >> 13
    return h % num_rows


def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm without a weight, over the last dimension."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotate(x: torch.Tensor, t: int, base: float, dtype: torch.dtype) -> torch.Tensor:
    """Rotary embedding of one head's vector [head_dim] at position t; cos and sin in `dtype`."""
    half = x.numel() // 2
    frequency = 1.0 / base ** (torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half))
    angle = torch.tensor(float(t), dtype=torch.float32) * frequency
    cos, sin = (f(angle).to(dtype).to(x.dtype) for f in (torch.cos, torch.sin))
    x1, x2 = x[:half], x[half:]
    return torch.cat([x1 * cos + x2 * sin, -x1 * sin + x2 * cos])


def input_vectors(
    weights: Mapping[str, torch.Tensor],
    config: DocTabConfig,
    tokens: Sequence[int],
    fields: Sequence[tuple[int, int, int]] | None = None,
) -> list[torch.Tensor]:
    """The embedding path of one row: token, document table and bigram table, then RMSNorm."""
    c = config
    segments = _segments(tokens, c.bos_token_id)
    if fields is None:
        fields = lookup(tokens, c.table_orders, segments, c.table_reach)
    vectors = []
    for t, token in enumerate(tokens):
        e = weights["model.embed_tokens.weight"][token].clone()
        if c.document_table:
            order, candidate, distance = fields[t]
            if order > 0:
                e += weights["model.document_table.candidate_embedding.weight"][
                    (order - 1) * c.vocab_size + candidate
                ]
            state = table_state(order, distance, c.table_distance_buckets, c.table_orders)
            e += weights["model.document_table.state_embedding.weight"][state]
        if c.bigram_rows and t > 0 and segments[t] == segments[t - 1]:
            row = bigram_row(tokens[t - 1], token, c.bigram_rows)
            e += weights["model.bigram_table.weight"][row]
        vectors.append(rms_norm(e, c.rms_norm_eps))
    return vectors


def _segments(tokens: Sequence[int], bos_token_id: int) -> list[int]:
    """Each BOS opens a document: its number, a position."""
    segments, current = [], 0
    for token in tokens:
        current += token == bos_token_id
        segments.append(current)
    return segments


def forward(
    weights: Mapping[str, torch.Tensor],
    config: DocTabConfig,
    tokens: Sequence[int],
    fields: Sequence[tuple[int, int, int]] | None = None,
) -> torch.Tensor:
    """Logits [length, vocab_size] of one row, position by position and head by head (Section 3.1).

    Args:
        weights: a DocTabForCausalLM's state dict, in the precision to compute in.
        config: its DocTabConfig.
        tokens: the row's inputs.
        fields: the row's table fields where they are not the lookup on the row itself (a 2K row
            of an 8K chunk).
    """
    c = config
    group = c.num_attention_heads // c.num_key_value_heads
    base = c.rope_parameters["rope_theta"]
    rotary_dtype = getattr(torch, c.rotary_dtype)
    x0 = input_vectors(weights, c, tokens, fields)
    x = [v.clone() for v in x0]
    for i in range(c.num_hidden_layers):
        layer = {
            name.removeprefix(f"model.layers.{i}."): w
            for name, w in weights.items()
            if name.startswith(f"model.layers.{i}.")
        }
        scale, scale0 = weights["model.resid_lambdas"][i], weights["model.x0_lambdas"][i]
        x = [scale * v + scale0 * v0 for v, v0 in zip(x, x0, strict=True)]

        queries, keys, values = [], [], []
        for t, token in enumerate(tokens):
            h = rms_norm(x[t], c.rms_norm_eps)
            q = (layer["self_attn.q_proj.weight"] @ h).view(c.num_attention_heads, c.head_dim)
            k = (layer["self_attn.k_proj.weight"] @ h).view(c.num_key_value_heads, c.head_dim)
            v = (layer["self_attn.v_proj.weight"] @ h).view(c.num_key_value_heads, c.head_dim)
            if c.has_value_embedding(i):
                gate = layer["self_attn.value_gate.weight"] @ h[: c.value_gate_channels]
                embedded = layer["self_attn.value_embedding.weight"][token].view_as(v)
                v = v + 2 * torch.sigmoid(gate)[:, None] * embedded
            q = torch.stack([rotate(head, t, base, rotary_dtype) for head in q])
            k = torch.stack([rotate(head, t, base, rotary_dtype) for head in k])
            q, k = rms_norm(q, c.rms_norm_eps), rms_norm(k, c.rms_norm_eps)
            if c.query_scaling is not None:
                q = q * layer["self_attn.query_gain"][:, None]
            if c.query_scaling == "log_length":
                length = min(t, c.window(i)) + 1
                q = q * (math.log(length) / math.log(c.query_scaling_base))
            queries.append(q)
            keys.append(k)
            values.append(v)

        for t in range(len(tokens)):
            visible = range(max(0, t - c.window(i)), t + 1)
            heads = []
            for head in range(c.num_attention_heads):
                scores = torch.stack(
                    [queries[t][head] @ keys[s][head // group] / c.head_dim**0.5 for s in visible]
                )
                weight = torch.softmax(scores, 0)
                heads.append(
                    sum(w * values[s][head // group] for w, s in zip(weight, visible, strict=True))
                )
            x[t] = x[t] + layer["self_attn.o_proj.weight"] @ torch.cat(heads)
            h = layer["mlp.up_proj.weight"] @ rms_norm(x[t], c.rms_norm_eps)
            x[t] = x[t] + layer["mlp.down_proj.weight"] @ torch.relu(h) ** 2

    logits = torch.stack([weights["lm_head.weight"] @ rms_norm(v, c.rms_norm_eps) for v in x])
    cap = c.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)


def nats(logits: torch.Tensor, targets: Sequence[int]) -> list[float]:
    """Negative log-likelihood of each target, in nats."""
    return [
        float(torch.logsumexp(row, 0) - row[target])
        for row, target in zip(logits, targets, strict=True)
    ]


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Five Polar Express iterations on one matrix, in the matrix's own precision."""
    x = matrix / (matrix.norm() * 1.02 + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        if matrix.shape[0] > matrix.shape[1]:
            gram = x.T @ x
            x = a * x + x @ (b * gram + c * gram @ gram)
        else:
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def muon_update(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    momentum_buffer: torch.Tensor,
    second_moment: torch.Tensor,
    lr: float,
    momentum: float,
    weight_decay: float,
    beta2: float = 0.95,
    iteration_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One Muon update of one matrix [rows, columns]: Nesterov momentum, orthogonalisation, NorMuon
    variance reduction (arXiv 2510.05491), cautious weight decay.

    Args:
        weight: the matrix.
        gradient: its gradient.
        momentum_buffer: [rows, columns], zero at first.
        second_moment: [rows] if rows >= columns, else [columns]; zero at first.
        lr: before the factor sqrt(max(1, rows / columns)).
        momentum: mu of both the buffer and the Nesterov step.
        weight_decay: applied only where update and weight have the same sign.
        beta2: of the second moment.
        iteration_dtype: of the Polar Express iterations; the weight's own by default.

    Returns:
        The new weight, momentum buffer and second moment.
    """
    rows, columns = weight.shape
    buffer = momentum_buffer + (1 - momentum) * (gradient - momentum_buffer)
    update = gradient + momentum * (buffer - gradient)
    update = orthogonalize(update.to(iteration_dtype or update.dtype)).to(update.dtype)

    tall = rows >= columns
    square = (update * update).mean(1 if tall else 0)
    moment = second_moment + (1 - beta2) * (square - second_moment)
    scale = moment.clamp_min(1e-10).rsqrt()
    count = columns if tall else rows
    norm = (square.sum() * count).sqrt()
    scaled_norm = (square * count * scale * scale).sum().sqrt()
    scale = scale * (norm / scaled_norm.clamp_min(1e-10))
    update = update * (scale[:, None] if tall else scale[None, :])

    step = lr * max(1.0, rows / columns) ** 0.5
    same_sign = (update * weight) >= 0
    return weight - step * (update + weight_decay * weight * same_sign), buffer, moment


def adamw_update(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    first_moment: torch.Tensor,
    second_moment: torch.Tensor,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float = 1e-10,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One AdamW update without weight decay; `step` counts from 1."""
    first = first_moment + (1 - betas[0]) * (gradient - first_moment)
    second = second_moment + (1 - betas[1]) * (gradient * gradient - second_moment)
    denominator = (second / (1 - betas[1] ** step)).sqrt() + eps
    return weight - lr / (1 - betas[0] ** step) * first / denominator, first, second
