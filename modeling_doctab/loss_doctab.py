"""Cross entropy of a soft-capped linear head, without ever holding all logits at once.

At the paper's micro-batch, 131,072 tokens x 8,192 fp32 logits are 4 GiB a copy, and automatic
differentiation keeps two to three copies. Here rows of tokens are processed one chunk after the
other. When gradients are wanted they are formed in the forward pass, chunk by chunk, while the
logits are at hand: no logits are kept and none are computed twice.
"""

import torch
from torch.nn import functional as F

IGNORE_INDEX = -100
# Logits held at once, in elements: 4,096 tokens of a vocabulary of 8,192, 128 MiB in float32.
MAX_LOGITS = 1 << 25


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
            if softcap is not None:
                logits = logits.div_(softcap).tanh_().mul_(softcap)
            target = targets[i : i + size]
            counted = target != IGNORE_INDEX
            index = torch.where(counted, target, 0).unsqueeze(1)
            own = logits.gather(1, index).squeeze(1)
            nats[i : i + size] = torch.where(counted, torch.logsumexp(logits, 1) - own, 0.0)
    return nats


def softcapped_logits(
    hidden: torch.Tensor, weight: torch.Tensor, softcap: float | None
) -> torch.Tensor:
    """Float32 logits c * tanh(hidden @ weight.T / c), [..., vocab_size]."""
    logits = F.linear(hidden, weight).float()
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _chunk_size(weight: torch.Tensor) -> int:
    return max(1, MAX_LOGITS // weight.shape[0])


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
            # One buffer becomes tanh, logits and gradient in turn; the slope needs another.
            logits = F.linear(part, w).float()
            slope = None
            if softcap is not None:
                logits = logits.div_(softcap).tanh_()
                slope = torch.addcmul(logits.new_ones(()), logits, logits, value=-1.0)
                logits = logits.mul_(softcap)
            counted = target != IGNORE_INDEX
            index = torch.where(counted, target, 0).unsqueeze(1)
            log_z = torch.logsumexp(logits, 1, keepdim=True)
            nats = (log_z - logits.gather(1, index)).squeeze(1)
            total = total + torch.where(counted, nats, 0.0).sum()
            grad = logits.sub_(log_z).exp_()
            grad.scatter_add_(1, index, grad.new_full((1, 1), -1.0).expand_as(index))
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
