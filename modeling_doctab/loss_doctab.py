"""Cross entropy of a soft-capped linear head, without ever holding all logits at once.

At the paper's micro-batch, 131,072 tokens x 8,192 fp32 logits are 4 GiB a copy, and automatic
differentiation keeps two to three copies. Here rows of tokens are processed one chunk after the
other. When gradients are wanted they are formed in the forward pass, chunk by chunk, while the
logits are at hand: no logits are kept and none are computed twice.
"""

import torch
from torch.nn import functional as F

IGNORE_INDEX = -100
# Logits held at once, in elements: 1,024 tokens of a vocabulary of 8,192, 32 MiB in float32, and on
# a CPU 256 tokens, 8 MiB: so much stays in the cache between one operation and the next (72 MB on
# an RTX 4090, 50 on an H200). The GPU check measures other sizes.
MAX_LOGITS = 1 << 23
MAX_LOGITS_CPU = 1 << 21
# Up to this soft cap exp(logit - cap) is far from underflow: no row needs its own maximum.
_LARGEST_CAP_AS_SHIFT = 40.0


def linear_cross_entropy_sum(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, softcap: float | None
) -> torch.Tensor:
    """Sum of the targets' negative log-likelihoods in nats, differentiable once.

    Args:
        hidden: [tokens, hidden_size] output of the final norm.
        weight: [vocab_size, hidden_size] of the head.
        targets: [tokens] ids; IGNORE_INDEX (-100) counts nothing.
        softcap: c of c * tanh(logits / c), or None.

    Returns:
        A float32 scalar.
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, targets, softcap)
    return token_nats(hidden, weight, targets, softcap).sum()


def token_nats(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, softcap: float | None
) -> torch.Tensor:
    """Each target's negative log-likelihood in nats, [tokens] float32 (0 where ignored).

    The arguments are those of `linear_cross_entropy_sum`. No gradients are recorded: logits are
    formed and spent chunk by chunk, in one buffer.
    """
    size = _chunk_size(weight)
    nats = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    with torch.no_grad():
        for i in range(0, hidden.shape[0], size):
            logits = F.linear(hidden[i : i + size], weight).float()
            logits, _ = _shifted_logits(logits, softcap)
            target = targets[i : i + size]
            counted = target != IGNORE_INDEX
            index = torch.where(counted, target, 0).unsqueeze(1)
            own = logits.gather(1, index).squeeze(1)
            log_z = logits.exp_().sum(1).log_()
            nats[i : i + size] = torch.where(counted, log_z - own, 0.0)
    return nats


def softcapped_logits(
    hidden: torch.Tensor, weight: torch.Tensor, softcap: float | None
) -> torch.Tensor:
    """Float32 logits c * tanh(hidden @ weight.T / c), [..., vocab_size]."""
    logits = F.linear(hidden, weight).float()
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _chunk_size(weight: torch.Tensor) -> int:
    most = MAX_LOGITS_CPU if weight.device.type == "cpu" else MAX_LOGITS
    return max(1, most // weight.shape[0])


def _shifted_logits(
    logits: torch.Tensor, softcap: float | None, with_slope: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Soft-capped logits less a constant a row, in the memory of `logits` (raw, float32).

    With r = 1 / (exp(2x / c) + 1), c tanh(x / c) - c is -2c r, and a quarter of the slope
    1 - tanh^2 is r - r^2: one exponential instead of a tanh, and no maximum to look for.

    Returns:
        The shifted logits, whose exponentials neither overflow nor all vanish, and a quarter of the
        slope where asked for.
    """
    slope = None
    if softcap is not None:
        r = logits.mul_(2 / softcap).exp_().add_(1).reciprocal_()
        if with_slope:
            slope = torch.addcmul(r, r, r, value=-1.0)
        logits = r.mul_(-2 * softcap)
    if softcap is None or softcap > _LARGEST_CAP_AS_SHIFT:
        logits = logits.sub_(logits.amax(1, keepdim=True))
    return logits, slope


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, softcap):  # type: ignore[no-untyped-def]
        # Inside a custom function autocast does not reach F.linear's operands: cast once, here.
        dtype = torch.get_autocast_dtype(hidden.device.type)
        autocast = torch.is_autocast_enabled(hidden.device.type)
        h, w = (hidden.to(dtype), weight.to(dtype)) if autocast else (hidden, weight)
        size = _chunk_size(weight)
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(h)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for i in range(0, h.shape[0], size):
            part, target = h[i : i + size], targets[i : i + size]
            # One buffer becomes logits, probabilities and gradient in turn; the slope has its own.
            logits, slope = _shifted_logits(F.linear(part, w).float(), softcap, with_slope=True)
            counted = target != IGNORE_INDEX
            index = torch.where(counted, target, 0).unsqueeze(1)
            own = logits.gather(1, index)
            z = logits.exp_().sum(1, keepdim=True)
            nats = (z.log() - own).squeeze(1)
            total = total + torch.where(counted, nats, 0.0).sum()
            four = 1.0 if slope is None else 4.0  # `slope` is a quarter of it
            grad = logits.div_(z / four)
            grad.scatter_add_(1, index, grad.new_full((1, 1), -four).expand_as(index))
            if slope is not None:
                grad = grad.mul_(slope)
            grad = grad.mul_(counted.unsqueeze(1)).to(h.dtype)
            grad_hidden[i : i + size] = grad @ w
            grad_weight += grad.T @ part
        ctx.save_for_backward(grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[no-untyped-def]
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_output, grad_weight * grad_output, None, None
