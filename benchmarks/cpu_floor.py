"""Floors on this CPU, and what the time above them goes into: `python -m benchmarks.cpu_floor`.

Four things that people wait for: an update, scoring, a generated token, a data build. Each floor
is the larger of arithmetic over the rate of a large matrix product and of bytes over the bandwidth
of a copy, both measured first; a build's floor is tiktoken alone on the text that must be
tokenised. benchmarks/ROOFLINE.md holds an output and says what it means.
"""

import cProfile
import pstats
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import bench_data_build as data
from benchmarks.bench_generation import NEW, PROMPT, _decode, _prompt
from benchmarks.harness import Case, machine
from data_scripts.tokenizer import train_tokenizer
from modeling_doctab import DocTabConfig, DocTabForCausalLM
from modeling_doctab.accounting import flops_per_token
from training.config import OptimizerConfig, load_recipe
from training.optim import RecipeOptimizer
from training.setup import keep_freed_memory, model_config

RECIPES = Path(__file__).parents[1] / "training" / "recipes"
ROWS = 16
# Times that each logit must cross memory, where chunks of logits do not fit into a cache: written,
# read for the sum; when training, read and written as a gradient and read by two products.
HEAD_PASSES_SCORING, HEAD_PASSES_TRAINING = 2, 6


@dataclass
class Rates:
    """What this machine does: float32 FLOP/s and bytes/s."""

    flops: float
    bandwidth: float


@dataclass
class Line:
    """One activity: seconds measured, seconds at least, and the shares of its largest parts."""

    name: str
    seconds: float
    floor: float
    bound: str
    parts: list[tuple[str, float]]

    def markdown(self) -> str:
        """A row of the table."""
        parts = ", ".join(f"{name} {share:.0%}" for name, share in self.parts)
        return (
            f"| {self.name} | {_show(self.seconds)} | {_show(self.floor)} ({self.bound}) | "
            f"{self.seconds / self.floor:.2f} | {parts} |"
        )


def _show(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def measure_rates() -> Rates:
    """A 2,048^3 product and a copy of 256 MiB."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    x, y = torch.ones(1 << 26), torch.ones(1 << 26)
    return Rates(
        2 * 2048**3 / median_seconds(lambda: a @ b, 15),
        2 * x.nbytes / median_seconds(lambda: y.copy_(x), 15),
    )


def median_seconds(function: Callable[[], object], rounds: int = 5) -> float:
    """Median seconds of a call, after one that is not counted."""
    function()
    case = Case()
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        case.values.append(time.perf_counter() - start)
    return case.median


def largest_parts(function: Callable[[], object], count: int = 6) -> list[tuple[str, float]]:
    """The operators that take most of the processor time themselves, with their shares."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    averages = profiler.key_averages()
    total = sum(event.self_cpu_time_total for event in averages)
    averages = sorted(averages, key=lambda event: -event.self_cpu_time_total)[:count]
    return [(e.key.removeprefix("aten::"), e.self_cpu_time_total / total) for e in averages]


def line(
    name: str, function: Callable[[], object], flops: float, num_bytes: float, rates: Rates,
    divisor: int = 1,
) -> Line:  # fmt: skip
    """Measure and profile one activity; `divisor` is the number of units in a call."""
    arithmetic, memory = flops / rates.flops, num_bytes / rates.bandwidth
    bound = "arithmetic" if arithmetic > memory else "memory"
    seconds = median_seconds(function) / divisor
    return Line(name, seconds, max(arithmetic, memory), bound, largest_parts(function))


def training_and_scoring(rates: Rates) -> list[Line]:
    """An update of the small B, and the scoring of the same rows."""
    config = model_config(load_recipe(RECIPES / "small" / "b.yaml"))
    length = config.max_position_embeddings
    torch.manual_seed(0)
    model = DocTabForCausalLM(config).train()
    optimizer = RecipeOptimizer(model, OptimizerConfig(), 100)
    ids = torch.randint(0, 8000, (ROWS, length))

    def update() -> None:
        model(ids, shift_labels=ids).loss.backward()
        optimizer.step(0)
        optimizer.zero_grad()

    tokens = ids.numel()
    forward = flops_per_token(config, length) / 3 * tokens
    logits = 4 * config.vocab_size * tokens
    state = 7 * 4 * sum(p.numel() for p in model.parameters())  # weights, gradients, moments
    matrices = [p for p in model.parameters() if p.ndim == 2 and p.shape[0] != config.vocab_size]
    muon = sum(5 * (4 * min(m.shape) * m.numel() + 2 * min(m.shape) ** 3) for m in matrices)
    where = f"{ROWS} rows of {length}, [small/b](../training/recipes/small/b.yaml)"
    return [
        line(f"update, {where}", update, 3 * forward + muon,
             HEAD_PASSES_TRAINING * logits + state, rates),
        line("scoring the same rows", lambda: model.target_nats(ids, ids), forward,
             HEAD_PASSES_SCORING * logits, rates),
    ]  # fmt: skip


def generation(rates: Rates) -> Line:
    """A greedy token of the paper's B with its table: every weight and the cached keys are read."""
    config = DocTabConfig()
    torch.manual_seed(0)
    model = DocTabForCausalLM(config).float().eval()
    decode = _decode(model, _prompt(1, PROMPT, config))
    blocks = sum(p.numel() for n, p in model.named_parameters() if n.endswith("_proj.weight"))
    keys = sum(min(config.window(i) + 1, PROMPT) for i in range(config.num_hidden_layers))
    numbers = blocks + config.vocab_size * config.hidden_size + 2 * keys * config.hidden_size
    name = f"a token of the paper's B after {PROMPT:,}, batch 1"
    return line(name, decode, 2 * numbers, 4 * numbers, rates, NEW)


def data_build() -> Line:
    """Two shards to chunks on one core, against tiktoken on the documents that are long enough."""
    with tempfile.TemporaryDirectory() as folder:
        paths = data.write_shards(Path(folder), 2, data.SHARD_BYTES)
        texts = [text for batch in data._document_batches(paths) for text in batch]
        tokenizer = train_tokenizer(texts[:2000], data.VOCAB_SIZE)
        long = [text for text in texts if len(text.encode()) + 1 >= data.CHUNK_LENGTH + 1]
        floor = median_seconds(lambda: [tokenizer.encoding.encode_ordinary(t) for t in long], 3)

        def build() -> None:
            data.our_build(paths, tokenizer, 1)

        seconds = median_seconds(build, 3)
        profiler = cProfile.Profile()
        profiler.runcall(build)
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    own = sorted(((where[2], times[2]) for where, times in stats.items()), key=lambda x: -x[1])
    total = sum(seconds for _, seconds in own)
    parts = [(name.split()[-1].strip("<>'"), spent / total) for name, spent in own[:5]]
    return Line("two shards to chunks, one core", seconds, floor, "tiktoken", parts)


def main() -> None:
    """Print the rates and the table."""
    keep_freed_memory()
    rates = measure_rates()
    facts = machine()
    print(
        f"{facts['processor']}, {facts['num_threads']} threads, float32: "
        f"{rates.flops / 1e9:.0f} GFLOP/s, {rates.bandwidth / 1e9:.1f} GB/s\n"
    )
    print("| what | measured | floor | measured / floor | largest parts of the processor time |")
    print("| :-- | --: | --: | --: | :-- |")
    for each in (*training_and_scoring(rates), generation(rates), data_build()):
        print(each.markdown(), flush=True)


if __name__ == "__main__":
    main()
