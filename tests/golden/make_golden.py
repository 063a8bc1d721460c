"""Make `reference.safetensors` by running the public reference recipe itself.

    git clone https://github.com/karpathy/autoresearch && git -C autoresearch checkout 228791f
    python -m tests.golden.make_golden autoresearch/train.py

The model and optimizer classes are taken from the reference's own `train.py` (everything above
its "# Setup" section). Four things are replaced so that it runs in float32 on a CPU: the
flash-attention package by a dense softmax with the same `window_size`, `torch.compile` by the
identity, the bf16 storage of the embeddings by float32 (their values stay rounded to bf16), and
its data module by nothing. For the "float32" updates, Muon's cast of X to bf16 is replaced too;
the "bfloat16" ones keep it.

Zero-initialised matrices are filled with small random numbers first, or half of the model would
not be seen. The two updates run at updates 0 and 3 of a run of 4, so that every schedule moves.
"""

import argparse
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.peers import our_name

CONFIG = {
    "sequence_len": 48,
    "vocab_size": 64,
    "n_layer": 3,
    "n_head": 2,
    "n_kv_head": 2,
    "n_embd": 40,
    "window_pattern": "SSSL",
}
UPDATES = ((0, 4), (3, 4))  # (update, num_updates)


def dense_attention(q, k, v, causal, window_size):
    """flash_attn_func on [B, T, H, C]: `window_size[0]` earlier keys and the query's own."""
    assert causal
    length = q.shape[1]
    t, s = torch.arange(length)[:, None], torch.arange(length)[None, :]
    visible = (s <= t) & (s >= t - window_size[0])
    scores = torch.einsum("bthc,bshc->bhts", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("bhts,bshc->bthc", weights, v)


def load_reference(path: Path, iterations: str) -> dict:
    """Run the part of train.py that defines the model, the optimizer and the schedules."""
    kernels = types.ModuleType("kernels")
    interface = types.SimpleNamespace(flash_attn_func=dense_attention)
    kernels.get_kernel = lambda repo: types.SimpleNamespace(flash_attn_interface=interface)
    prepare = types.ModuleType("prepare")
    for name in ("MAX_SEQ_LEN", "TIME_BUDGET", "Tokenizer", "make_dataloader", "evaluate_bpb"):
        setattr(prepare, name, None)
    sys.modules.update(kernels=kernels, prepare=prepare)
    torch.cuda.get_device_capability = lambda: (9, 0)
    torch.compile = lambda f=None, **kwargs: f if f is not None else (lambda g: g)

    source = path.read_text()
    start = source.index("# Setup: tokenizer, model, optimizer, dataloader")
    schedules = source[source.index("def get_lr_multiplier") : source.index("# Training loop")]
    source = source[:start] + "\n" + schedules
    if iterations == "float32":
        assert source.count("X = g.bfloat16()") == 1
        source = source.replace("X = g.bfloat16()", "X = g.float()")
    namespace: dict = {"__name__": "reference"}
    module = types.ModuleType("reference")
    sys.modules["reference"] = module
    exec(compile(source, str(path), "exec"), namespace)
    return namespace


def run(path: Path, iterations: str) -> dict[str, torch.Tensor]:
    """Forward pass and two updates of the reference, as one flat dict of tensors."""
    reference = load_reference(path, iterations)
    torch.manual_seed(0)
    model = reference["GPT"](reference["GPTConfig"](**CONFIG))
    model.init_weights()
    model.float()
    model.cos, model.sin = model.cos.bfloat16(), model.sin.bfloat16()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2 and not parameter.any():
                parameter.normal_(0, 0.1, generator=generator)
        model.resid_lambdas.normal_(1, 0.1, generator=generator)
        model.x0_lambdas.normal_(0.1, 0.1, generator=generator)
        model.lm_head.weight.normal_(0, 0.2, generator=generator)

    shape = (2, 3, CONFIG["sequence_len"])
    ids = torch.randint(0, CONFIG["vocab_size"], shape, generator=generator)
    targets = torch.randint(0, CONFIG["vocab_size"], shape, generator=generator)
    out = {"input_ids": ids, "targets": targets}
    out |= {f"initial/{our_name(n)}": p.detach().clone() for n, p in model.named_parameters()}
    out["logits"] = model(ids[0]).detach()

    optimizer = model.setup_optimizer(
        unembedding_lr=reference["UNEMBEDDING_LR"],
        embedding_lr=reference["EMBEDDING_LR"],
        scalar_lr=reference["SCALAR_LR"],
        adam_betas=reference["ADAM_BETAS"],
        matrix_lr=reference["MATRIX_LR"],
        weight_decay=reference["WEIGHT_DECAY"],
    )
    losses = []
    for i, (update, num_updates) in enumerate(UPDATES):
        loss = model(ids[i], targets[i])
        loss.backward()
        progress = update / num_updates
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * reference["get_lr_multiplier"](progress)
            if group["kind"] == "muon":
                group["momentum"] = reference["get_muon_momentum"](update)
                group["weight_decay"] = reference["get_weight_decay"](progress)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    out[f"losses_{iterations}"] = torch.stack(losses)
    name = f"updated_{iterations}"
    out |= {f"{name}/{our_name(n)}": p.detach().clone() for n, p in model.named_parameters()}
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train_py", type=Path, help="the reference's train.py")
    arguments = parser.parse_args()
    tensors = run(arguments.train_py, "bfloat16") | run(arguments.train_py, "float32")
    target = Path(__file__).with_name("reference.safetensors")
    save_file({k: v.contiguous() for k, v in tensors.items()}, target)
    print(f"wrote {target.name}: {target.stat().st_size} bytes, {list(tensors)[:3]}")
