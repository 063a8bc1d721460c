"""Recipes that train on the tiny chunk set in a second."""

import pytest

from training.config import build_recipe

CHUNK_LENGTH = 64
TINY_MODEL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "query_scaling_base": 32,
}


@pytest.fixture
def tiny_recipe(chunk_set, tmp_path):
    """A function from changed keys, by section, to a Recipe on the tiny chunk set."""

    def make(**changes):
        plain = {
            "name": "tiny",
            "output_dir": str(tmp_path / "run"),
            "model": TINY_MODEL,
            "data": {"chunk_set": str(chunk_set), "chunk_length": CHUNK_LENGTH},
            "training": {
                "num_updates": 6,
                "tokens_per_update": 4 * CHUNK_LENGTH,
                "tokens_per_micro_batch": 4 * CHUNK_LENGTH,
                "checkpoint_every": 2,
                "num_threads": 1,
            },
        }
        for key, value in changes.items():
            plain[key] = {**plain.get(key, {}), **value} if isinstance(value, dict) else value
        return build_recipe(plain, "tiny.yaml")

    return make
