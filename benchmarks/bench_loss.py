"""Peak memory of the loss, forward and backward, against whole logits; and its time."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Case, Result

TOKENS, VOCAB, WIDTH, SOFTCAP = 65_536, 8192, 256, 15.0

# Each case runs in a process of its own, so that its peak is its own.
SCRIPT = f"""
import pathlib, re, sys, time, torch
from modeling_doctab.loss_doctab import linear_cross_entropy_sum
torch.manual_seed(0)
hidden = torch.randn({TOKENS}, {WIDTH}, requires_grad=True)
weight = torch.randn({VOCAB}, {WIDTH}, requires_grad=True)
targets = torch.randint(0, {VOCAB}, ({TOKENS},))
def ours():
    return linear_cross_entropy_sum(hidden, weight, targets, {SOFTCAP})
def whole():
    logits = {SOFTCAP} * torch.tanh(torch.nn.functional.linear(hidden, weight) / {SOFTCAP})
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
small = hidden[:64].detach().requires_grad_()
linear_cross_entropy_sum(small, weight, targets[:64], {SOFTCAP}).backward()
def memory(field):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(field + r":\\s+(\\d+) kB", status)[1]) * 1024
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew at what is held now
before = memory("VmRSS")
start = time.perf_counter()
loss = ours() if sys.argv[1] == "ours" else whole()
loss.backward()
seconds = time.perf_counter() - start
peak = memory("VmHWM") - before
print(float(loss), float(hidden.grad.norm()), peak, seconds)
"""


def run() -> Iterator[Result]:
    """The ratio here is of bytes, not of seconds."""
    cases, facts = {}, {"tokens": TOKENS, "vocab_size": VOCAB, "hidden_size": WIDTH}
    losses = []
    for name in ("ours", "whole logits"):
        command = [sys.executable, "-c", SCRIPT, name]
        root = Path(__file__).parents[1]
        output = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        loss, gradient, peak, seconds = map(float, output.stdout.split())
        losses.append((loss, gradient))
        cases[name] = Case([peak])
        facts[f"{name}: seconds"] = seconds
        facts[f"{name}: peak_mib"] = peak / 2**20
    for ours, theirs in zip(*losses, strict=True):
        assert abs(ours - theirs) < 1e-4 * abs(theirs), losses
    yield Result(
        "loss_memory",
        question=f"peak bytes of the loss of {TOKENS:,} tokens x {VOCAB:,}, forward and backward, "
        "against whole logits",
        prediction="an eighth or less: chunks of 128 MiB against three copies of 2 GiB",
        target=8.0,
        ours="ours",
        cases=cases,
        facts=facts,
        unit="bytes",
    )
