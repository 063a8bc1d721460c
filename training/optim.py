"""Muon for the matrices inside the layers, AdamW for everything else (reference recipe).

No library has the recipe's Muon: five Polar Express iterations, NorMuon's variance reduction and
cautious weight decay. AdamW is torch's own, fused. `modeling_doctab/naive.py` has both in plain
loops. State is kept per parameter and saved by name, in its own dtype.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from modeling_doctab.naive import POLAR_EXPRESS
from training import schedules
from training.config import OptimizerConfig

# The iterations start from g / (NORM_SAFETY ||g|| + NORM_EPS): singular values just below 1.
NORM_SAFETY, NORM_EPS = 1.02, 1e-6


def parameter_groups(model: nn.Module) -> dict[str, list[str]]:
    """Sort every parameter's name into exactly one group.

    Args:
        model: a DocTabForCausalLM, unwrapped.

    Returns:
        Group -> names: matrices, head, embeddings, resid_lambdas, x0_lambdas, query_gains.

    Raises:
        ValueError: naming each parameter that belongs to no group.
    """
    groups: dict[str, list[str]] = {
        g: []
        for g in ("matrices", "head", "embeddings", "resid_lambdas", "x0_lambdas", "query_gains")
    }
    embeddings = {
        f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Embedding)
    }
    strays = []
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if name in embeddings:
            groups["embeddings"].append(name)
        elif name == "lm_head.weight":
            groups["head"].append(name)
        elif leaf in ("resid_lambdas", "x0_lambdas"):
            groups[leaf].append(name)
        elif leaf == "query_gain":
            groups["query_gains"].append(name)
        elif parameter.ndim == 2 and ".layers." in f".{name}":
            groups["matrices"].append(name)
        else:
            strays.append(name)
    if strays:
        raise ValueError(
            f"no optimizer group for {', '.join(strays)}. Add a rule for it to "
            "training.optim.parameter_groups and a rate to OptimizerConfig."
        )
    return {group: names for group, names in groups.items() if names}


def orthogonalize(matrices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Five Polar Express iterations on a stack of matrices [n, rows, columns], in `dtype`."""
    norm = torch.linalg.matrix_norm(matrices, keepdim=True)
    x = (matrices / (norm * NORM_SAFETY + NORM_EPS)).to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    for a, b, c in POLAR_EXPRESS:
        gram = x.mT @ x if tall else x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        left, right = (x, polynomial) if tall else (polynomial, x)
        x = torch.baddbmm(x, left, right, beta=a, alpha=1)
    return x


def normalize_variance(
    update: torch.Tensor, second_moment: torch.Tensor, beta2: float
) -> torch.Tensor:
    """NorMuon (arXiv 2510.05491): even out rows or columns, keep each matrix's Frobenius norm.

    Args:
        update: [n, rows, columns] float32.
        second_moment: [n, rows, 1] if rows >= columns, else [n, 1, columns]; updated in place.
        beta2: its decay.
    """
    axis = -1 if update.shape[-2] >= update.shape[-1] else -2
    square = update.square().mean(axis, keepdim=True)
    second_moment.lerp_(square, 1 - beta2)
    scale = second_moment.clamp_min(1e-10).rsqrt()
    norm = square.sum((-2, -1), keepdim=True).sqrt()
    scaled_norm = (square * scale.square()).sum((-2, -1), keepdim=True).sqrt()
    # Both norms lack the same factor, the length of `axis`: it cancels, but for the clamp.
    count = math.sqrt(update.shape[axis])
    return update * (scale * (norm * count / (scaled_norm * count).clamp_min(1e-10)))


class Muon(torch.optim.Optimizer):
    """Muon over matrices of the layers; equal shapes are stacked and updated together.

    Args:
        params: matrices.
        lr: before the factor sqrt(max(1, rows / columns)).
        momentum: of the buffer and of the Nesterov step.
        weight_decay: applied only where update and weight have the same sign.
        beta2: decay of the second moment.
        iteration_dtype: of the Polar Express iterations.
        variance_reduction: False leaves NorMuon out (to compare with torch.optim.Muon).
        sharded: divide the iterations over the processes of the default group.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        beta2: float = 0.95,
        iteration_dtype: torch.dtype = torch.bfloat16,
        variance_reduction: bool = True,
        sharded: bool = False,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "beta2": beta2}
        super().__init__(params, defaults)
        self.iteration_dtype = iteration_dtype
        self.variance_reduction = variance_reduction
        self.sharded = sharded
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim != 2:
                    raise ValueError(f"Muon takes matrices; got a parameter of shape {p.shape}.")
                rows, columns = p.shape
                side = (rows, 1) if rows >= columns else (1, columns)
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                self.state[p]["second_moment"] = p.new_zeros(side)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            stacks: dict[tuple[int, ...], list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    stacks.setdefault(tuple(p.shape), []).append(p)
            for parameters in stacks.values():
                self._update(parameters, group)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        rows, columns = parameters[0].shape
        gradients = torch.stack([p.grad for p in parameters])
        buffers = [self.state[p]["momentum_buffer"] for p in parameters]
        torch._foreach_lerp_(buffers, list(gradients), 1 - group["momentum"])
        nesterov = gradients.lerp(torch.stack(buffers), group["momentum"])
        update = self._orthogonalize(nesterov).to(nesterov.dtype)
        if self.variance_reduction:
            moments = torch.stack([self.state[p]["second_moment"] for p in parameters])
            update = normalize_variance(update, moments, group["beta2"])
            for p, moment in zip(parameters, moments, strict=True):
                self.state[p]["second_moment"].copy_(moment)
        weights = torch.stack(parameters)
        step_size = group["lr"] * max(1.0, rows / columns) ** 0.5
        decay = weights * ((update * weights) >= 0) * group["weight_decay"]
        weights = weights - step_size * (update + decay)
        torch._foreach_copy_(parameters, list(weights))

    def _orthogonalize(self, stack: torch.Tensor) -> torch.Tensor:
        """The iterations, each process doing its share of the stack when sharded.

        The others' matrices are zero in each process's result, so that the sum over processes puts
        the stack together without rounding.
        """
        if not self.sharded or not dist.is_initialized() or dist.get_world_size() == 1:
            return orthogonalize(stack, self.iteration_dtype)
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        result = torch.zeros_like(stack, dtype=self.iteration_dtype)
        if stack[mine].shape[0]:
            result[mine] = orthogonalize(stack[mine], self.iteration_dtype)
        dist.all_reduce(result)
        return result


class RecipeOptimizer:
    """Both optimizers of a model behind one step, with the recipe's schedules.

    Args:
        model: a DocTabForCausalLM, unwrapped; its parameters are on their device already.
        config: rates and constants.
        num_updates: length of the run, for the schedules.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, num_updates: int) -> None:
        self.config = config
        self.num_updates = num_updates
        self.groups = parameter_groups(model)
        self.parameters = dict(model.named_parameters())
        width = model.get_parameter("lm_head.weight").shape[1]
        scale = (config.reference_width / width) ** 0.5
        rates = {
            "head": config.head_lr * scale,
            "embeddings": config.embedding_lr * scale,
            "resid_lambdas": config.resid_lr,
            "x0_lambdas": config.x0_lr,
            "query_gains": config.gain_lr,
        }
        adam_groups = [
            {
                "params": [self.parameters[name] for name in names],
                "lr": rates[group],
                "initial_lr": rates[group],
                "betas": config.x0_betas if group == "x0_lambdas" else config.adam_betas,
            }
            for group, names in self.groups.items()
            if group != "matrices"
        ]
        self.adamw = torch.optim.AdamW(
            adam_groups, eps=config.adam_eps, weight_decay=0.0, fused=True
        )
        matrices = [self.parameters[name] for name in self.groups["matrices"]]
        self.muon = Muon(
            matrices,
            lr=config.matrix_lr,
            beta2=config.muon_beta2,
            iteration_dtype=self._iteration_dtype(matrices[0].device),
            sharded=config.shard_iterations,
        )

    def _iteration_dtype(self, device: torch.device) -> torch.dtype:
        if self.config.iteration_dtype == "auto":
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        return getattr(torch, self.config.iteration_dtype)

    def step(self, update: int) -> None:
        """Apply the gradients with the rates of `update` (0-based)."""
        c = self.config
        factor = schedules.lr_multiplier(update, self.num_updates, c.cooldown_fraction)
        for group in self.adamw.param_groups:
            group["lr"] = group["initial_lr"] * factor
        for group in self.muon.param_groups:
            group["lr"] = c.matrix_lr * factor
            group["momentum"] = schedules.muon_momentum(
                update, c.momentum_start, c.momentum_end, c.momentum_ramp_updates
            )
            group["weight_decay"] = schedules.muon_weight_decay(
                update, self.num_updates, c.weight_decay
            )
        self.adamw.step()
        self.muon.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.adamw.zero_grad(set_to_none=True)
        self.muon.zero_grad(set_to_none=True)

    def gradient_norms(self) -> dict[str, torch.Tensor]:
        """2-norm of each group's gradient, as scalars on the device."""
        norms = {}
        for group, names in self.groups.items():
            gradients = [g for n in names if (g := self.parameters[n].grad) is not None]
            each = torch.stack([n.float() for n in torch._foreach_norm(gradients)])
            norms[group] = torch.linalg.vector_norm(each)
        return norms

    def state_by_name(self) -> dict[str, torch.Tensor]:
        """`PARAMETER/STATE` -> tensor, each in its own dtype."""
        state = {}
        for name, parameter in self.parameters.items():
            own = self.muon.state if parameter in self.muon.state else self.adamw.state
            for key, value in own.get(parameter, {}).items():
                state[f"{name}/{key}"] = value
        return state

    def load_state_by_name(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what `state_by_name` gave, without changing any dtype.

        Raises:
            ValueError: if a state belongs to no parameter, or one is missing or of another shape.
        """
        expected = {
            f"{name}/{key}"
            for name, parameter in self.parameters.items()
            for key in (
                ("momentum_buffer", "second_moment")
                if parameter in self.muon.state
                else ("step", "exp_avg", "exp_avg_sq")
            )
        }
        if expected != set(state):
            missing, extra = sorted(expected - set(state)), sorted(set(state) - expected)
            raise ValueError(
                "the optimizer state is another model's: "
                f"missing {missing[:3] or 'nothing'}, unknown {extra[:3] or 'nothing'}"
            )
        for full_name, value in state.items():
            name, key = full_name.rsplit("/", 1)
            parameter = self.parameters[name]
            if key not in ("step", "second_moment") and value.shape != parameter.shape:
                raise ValueError(
                    f"{full_name} has shape {list(value.shape)}, not {list(parameter.shape)}"
                )
            own = self.muon.state if parameter in self.muon.state else self.adamw.state
            own[parameter][key] = value.to(parameter.device)
