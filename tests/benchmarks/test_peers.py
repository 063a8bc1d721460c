"""Peers that are run from a checkout: the stand-ins for what needs a GPU, and the names."""

import pytest
import torch

from benchmarks import cpu_floor, peers
from modeling_doctab import DocTabConfig, DocTabForCausalLM

TRAIN = """
import torch
from kernels import get_kernel
from prepare import Tokenizer
assert torch.cuda.get_device_capability() == (9, 0)
attention = get_kernel("any").flash_attn_interface.flash_attn_func

@torch.compile(fullgraph=True)
def twice(x):
    return 2 * x

# ---
# Setup: tokenizer, model, optimizer, dataloader
raise RuntimeError("the run itself")
"""
PREPARE = """
import torch
DATA_DIR = TOKENIZER_DIR = "where it downloads to"

def make_dataloader():
    yield torch.empty(3, pin_memory=True), torch.empty(3, device="cuda")
"""


def test_what_stands_above_the_run_is_defined_and_nothing_else_changes(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    before = torch.compile
    training = peers.autoresearch_training(tmp_path)
    assert training["twice"](3) == 6
    assert torch.compile is before


@pytest.mark.parametrize("window", [0, 3, 7, 8])
def test_attention_sees_as_many_earlier_keys_as_flash_attention(window):
    q, k, v = torch.randn(3, 2, 8, 2, 4, generator=torch.Generator().manual_seed(0))
    found = peers._attention(q, k, v, causal=True, window_size=(window, 0))
    distance = torch.arange(8)[:, None] - torch.arange(8)
    scores = torch.einsum("bthc,bshc->bhts", q, k) / 2
    scores = scores.masked_fill((distance < 0) | (distance > window), float("-inf"))
    expected = torch.einsum("bhts,bshc->bthc", scores.softmax(-1), v)
    torch.testing.assert_close(found, expected)


def test_the_loaders_buffers_stay_on_the_cpu(tmp_path):
    (tmp_path / "prepare.py").write_text(PREPARE)
    before = torch.empty
    with peers.autoresearch_data(tmp_path, tmp_path / "data", tmp_path / "bpe") as prepare:
        assert prepare["DATA_DIR"] == str(tmp_path / "data")
        devices = [t.device.type for t in next(prepare["make_dataloader"]())]
    assert devices == ["cpu", "cpu"]
    assert torch.empty is before


def test_every_parameter_has_a_name_in_ours():
    config = DocTabConfig(
        vocab_size=64, bos_token_id=60, hidden_size=32, head_dim=16, num_attention_heads=2,
        num_hidden_layers=2, max_position_embeddings=8, document_table=False,
    )  # fmt: skip
    layers = [
        f"transformer.h.{i}.{part}.weight"
        for i in range(2)
        for part in ("attn.c_q", "attn.c_k", "attn.c_v", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    theirs = [
        *layers, "transformer.h.1.attn.ve_gate.weight", "value_embeds.1.weight",
        "transformer.wte.weight", "lm_head.weight", "resid_lambdas", "x0_lambdas",
    ]  # fmt: skip
    ours = {name for name, _ in DocTabForCausalLM(config).named_parameters()}
    assert {peers.our_name(name) for name in theirs} == ours


def test_a_floor_is_the_larger_of_arithmetic_and_memory():
    rates = cpu_floor.Rates(flops=1e9, bandwidth=1e9)
    work = torch.ones(200, 200)
    found = cpu_floor.line("products", lambda: work @ work, 2e6, 4e6, rates, divisor=2)
    assert (found.floor, found.bound) == (4e-3, "memory")
    assert 0 < found.seconds < 1
    assert 0 < sum(share for _, share in found.parts) <= 1 + 1e-9
    assert found.parts[0][0] == "mm"
    assert "4.0 ms (memory)" in found.markdown()
