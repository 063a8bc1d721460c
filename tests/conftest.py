"""Fixtures that several rooms share: a tiny model, a tiny chunk set, the golden values."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data_scripts.build import main as build
from modeling_doctab import DocTabConfig, DocTabForCausalLM

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "short_window": 6,
    "table_reach": 64,
    "query_scaling_base": 16,
}


@pytest.fixture(autouse=True)
def _single_threaded():
    """Tiny models lose more to threads than they gain; and two cores run several tests at once."""
    torch.set_num_threads(1)


@pytest.fixture
def tiny_config():
    """A function from changed fields to a DocTabConfig small enough for plain loops."""
    return lambda **changes: DocTabConfig(**{**TINY, **changes})


@pytest.fixture
def tiny_model(tiny_config):
    """A function from changed fields to a model whose every parameter is away from zero."""

    def make(seed: int = 0, **changes) -> DocTabForCausalLM:
        torch.manual_seed(seed)
        model = DocTabForCausalLM(tiny_config(embedding_dtype="float32", **changes)).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                scale = 0.3 if "table" in name else 0.1
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
        return model

    return make


@pytest.fixture(scope="session")
def golden() -> dict[str, torch.Tensor]:
    """What tests/golden/make_golden.py recorded of the public reference."""
    return load_file(Path(__file__).parent / "golden" / "reference.safetensors")


@pytest.fixture
def golden_model(golden) -> DocTabForCausalLM:
    """The reference's tiny model, with the reference's weights, as one of ours."""
    config = DocTabConfig(
        vocab_size=64,
        hidden_size=40,
        num_hidden_layers=3,
        num_attention_heads=2,
        head_dim=20,
        max_position_embeddings=48,
        document_table=False,
        rotary_dtype="bfloat16",
        embedding_dtype="float32",
    )
    model = DocTabForCausalLM(config)
    weights = {k.removeprefix("initial/"): v for k, v in golden.items() if "initial/" in k}
    model.load_state_dict(weights)
    return model


@pytest.fixture(scope="session")
def chunk_set(tmp_path_factory):
    """A chunk set of made-up documents that repeat themselves; chunks of 64, vocabulary 300."""
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(150)]
    for split, count in (("train", 24), ("dev", 6)):
        (folder / split).mkdir()
        for i in range(count):
            own = rng.choices(words, k=12)
            text = " ".join(rng.choice(own if rng.random() < 0.6 else words) for _ in range(400))
            (folder / split / f"{i}.txt").write_text(text)
    target = folder / "chunk_set"
    build(
        [
            "text",
            *("--split", f"train={folder}/train/*.txt", f"dev_val={folder}/dev/*.txt"),
            *("--chunk_length", "64", "--vocab_size", "300", "--out", str(target)),
        ]
    )
    return target
