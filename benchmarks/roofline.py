"""FLOPs, bytes and the floor in time of an update: `python -m benchmarks.roofline` prints them.

benchmarks/ROOFLINE.md holds the output and says what it means.
"""

from dataclasses import dataclass
from pathlib import Path

from modeling_doctab.accounting import count_parameters, flops_per_token_with_recomputation
from training.config import load_recipe
from training.setup import model_config

RECIPES = Path(__file__).parents[1] / "training" / "recipes" / "paper"
TOKENS_PER_UPDATE, NUM_UPDATES, MICRO_BATCHES = 2**19, 953, 4

# Elements that one block must read or write in its forward pass, per token, in units of the width:
# two norms (2 + 2), q, k, v with rotary and norm (1 + 3, 3 + 3), attention (3 + 1), its
# projection and sum (1 + 2), the MLP (1 + 4, 4 + 4, 4 + 1), its sum (1 + 1).
BLOCK_ELEMENTS = 45
# Bytes per token and vocabulary entry of the head: bf16 logits out and in, their soft cap and
# softmax in float32 twice, the gradient out and in twice.
HEAD_BYTES = 2 + 2 + 4 * 4 + 2 * 3
# Bytes per parameter of an update: bf16 reads forward, backward and in recomputation and a
# gradient read and write in every micro-batch; weights, gradients and two moments in the step.
PARAMETER_BYTES = MICRO_BATCHES * (3 * 2 + 2 * 4) + 7 * 4


@dataclass(frozen=True)
class Device:
    """Peak bf16 FLOP/s and bytes/s."""

    name: str
    flops: float
    bandwidth: float


DEVICES = (
    # Measured by an 8,192^3 bf16 product and a device copy.
    Device("H200", 790e12, 4.3e12),
    # The datasheet's dense bf16 rate with fp32 accumulation, and its memory bandwidth.
    Device("RTX 4090", 165.2e12, 1.008e12),
)
# Table 3: training seconds of 953 updates on one RTX 4090.
PAPER_SECONDS = {
    "b": 1390, "b_table": 1389, "lg512": 1453, "lg512_table": 1447,
    "a": 1949, "a_table": 1971, "d": 2865,
    "lg512_w384": 972, "lg512_w384_table": 984, "lg512_w768": 2610, "lg512_w768_table": 2616,
}  # fmt: skip


@dataclass(frozen=True)
class Floor:
    """What one update of an arm must do."""

    arm: str
    flops: float
    num_bytes: float

    def seconds(self, device: Device) -> float:
        """The larger of arithmetic and memory time: no version runs faster."""
        return max(self.flops / device.flops, self.num_bytes / device.bandwidth)


def floor(arm: str) -> Floor:
    """FLOPs (with recomputation) and bytes of one update of a paper's arm."""
    config = model_config(load_recipe(RECIPES / f"{arm}.yaml"))
    flops = flops_per_token_with_recomputation(config, config.max_position_embeddings)
    passes = 4  # forward, recomputed forward, and a backward that moves twice as much
    per_token = (
        config.num_hidden_layers * passes * BLOCK_ELEMENTS * config.hidden_size * 2
        + config.vocab_size * HEAD_BYTES
    )
    num_bytes = per_token * TOKENS_PER_UPDATE + count_parameters(config) * PARAMETER_BYTES
    return Floor(arm, flops * TOKENS_PER_UPDATE, num_bytes)


def update_table() -> str:
    """Markdown: FLOPs, bytes and floors of B, LG512, A and D, with the paper's Table 3 beside."""
    lines = [
        "| arm | TFLOP | GB | H200 floor | 4090 floor | 4090, 953 updates | paper, Table 3 | "
        "paper / floor |",
        "| :-- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for arm in ("b", "lg512", "a", "d"):
        f = floor(arm)
        h200, rtx = (f.seconds(device) for device in DEVICES)
        run = NUM_UPDATES * rtx
        lines.append(
            f"| {arm} | {f.flops / 1e12:.1f} | {f.num_bytes / 1e9:.0f} | {h200:.3f} s | "
            f"{rtx:.3f} s | {run:,.0f} s | {PAPER_SECONDS[arm]:,} s | "
            f"{PAPER_SECONDS[arm] / run:.2f} |"
        )
    return "\n".join(lines)


def hours_table() -> str:
    """Markdown: predicted hours of every recipe on one RTX 4090.

    The paper's own time where Table 3 or Section 4.7 has it; else the floor times the mean ratio of
    paper to floor.
    """
    rtx = DEVICES[1]
    ratios = [PAPER_SECONDS[a] / (NUM_UPDATES * floor(a).seconds(rtx)) for a in PAPER_SECONDS]
    ratio = sum(ratios) / len(ratios)
    lines = ["| recipe | hours | from |", "| :-- | --: | :-- |"]
    total = 0.0
    for path in sorted(RECIPES.glob("*.yaml")):
        arm = path.stem
        source = "the paper" if arm in PAPER_SECONDS else f"{ratio:.2f} x floor"
        seconds = PAPER_SECONDS.get(arm, ratio * NUM_UPDATES * floor(arm).seconds(rtx))
        total += seconds
        lines.append(f"| {arm} | {seconds / 3600:.2f} | {source} |")
    lines.append(f"| all, one seed | {total / 3600:.1f} | |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(update_table(), hours_table(), sep="\n\n")
