"""Every arm by configuration alone, its accounting to the paper's digits, and clear refusals."""

import json

import pytest
import torch

from modeling_doctab import DocTabConfig, DocTabForCausalLM
from modeling_doctab.accounting import count_parameters, flops_per_token, mean_keys

LG = {"max_position_embeddings": 8192, "window_pattern": "S"}
# arm: (changes to the default, millions of parameters without and with table, FLOPs/token in 1e8)
ARMS = {
    "B": ({}, 50.332, 67.139, 2.1709),
    "LG512": ({**LG, "short_window": 512}, 50.332, 67.139, 2.2271),
    "LG1024": ({**LG, "short_window": 1024}, 50.332, 67.139, 2.4266),
    "8K, 5 layers": (
        {"max_position_embeddings": 8192, "num_hidden_layers": 5},
        36.701,
        53.507,
        2.2651,
    ),
    "A": ({"max_position_embeddings": 8192}, 50.332, 67.139, 3.3978),
    "D": ({"max_position_embeddings": 8192, "num_hidden_layers": 12}, 71.304, 88.110, 4.9708),
    "LG512 w384": (
        {**LG, "short_window": 512, "hidden_size": 384, "num_attention_heads": 3},
        33.031,
        45.635,
        1.3872,
    ),
    "LG512 w768": (
        {**LG, "short_window": 512, "hidden_size": 768, "num_attention_heads": 6},
        94.373,
        119.582,
        4.4731,
    ),
}


@pytest.mark.parametrize("arm", ARMS)
def test_accounting_of_the_paper(arm):
    changes, base, with_table, flops = ARMS[arm]
    config = DocTabConfig(document_table=False, **changes)
    assert round(count_parameters(config) / 1e6, 3) == base
    assert round(count_parameters(DocTabConfig(**changes)) / 1e6, 3) == with_table
    ours = flops_per_token(config, config.max_position_embeddings) / 1e8
    assert abs(ours - flops) < 0.5001e-4


def test_bigram_parameters_of_the_paper():
    bigram = count_parameters(DocTabConfig(document_table=False, bigram_rows=65_536))
    both = count_parameters(DocTabConfig(bigram_rows=65_536))
    assert round(bigram / 1e6, 1) == 83.9
    assert round(both / 1e6, 1) == 100.7


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"document_table": False},
        {"bigram_rows": 77},
        {"query_scaling": "head_gain"},
        {"num_key_value_heads": 1},
        {"num_hidden_layers": 4, "table_orders": 3},
    ],
)
def test_counted_parameters_are_those_of_the_model(tiny_config, changes):
    config = tiny_config(**changes)
    model = DocTabForCausalLM(config)
    assert count_parameters(config) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("window", "length"), [(3, 10), (10, 10), (1024, 2048), (8192, 2048)])
def test_mean_keys_is_the_mean(window, length):
    expected = sum(min(t, window) + 1 for t in range(length)) / length
    assert mean_keys(window, length) == pytest.approx(expected)


def test_windows_of_the_paper():
    b = DocTabConfig()
    assert [b.window(i) for i in range(8)] == [1024, 1024, 1024, 2048] * 2
    assert b.sliding_window == 1025
    lg = DocTabConfig(**LG, short_window=512)
    assert [lg.window(i) for i in range(8)] == [512] * 7 + [8192]
    five = DocTabConfig(max_position_embeddings=8192, num_hidden_layers=5)
    assert [five.window(i) for i in range(5)] == [4096, 4096, 4096, 8192, 8192]


def test_json_round_trip(tmp_path):
    config = DocTabConfig(bigram_rows=10, query_scaling="log_length", short_window=100)
    config.save_pretrained(tmp_path)
    again = DocTabConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "doctab"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, "no field 'num_layers'"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "must divide"),
        ({"window_pattern": "SXL"}, "letters S"),
        ({"window_pattern": ""}, "letters S"),
        ({"hidden_size": 0}, "positive integer"),
        ({"head_dim": 15}, "even"),
        ({"table_orders": 9}, "1 to 8"),
        ({"query_scaling": "loglength"}, "query_scaling must be one of"),
        ({"value_gate_channels": 600}, "value_gate_channels"),
        ({"final_logit_softcapping": 0.0}, "positive"),
        ({"bos_token_id": 9000}, "bos_token_id"),
        ({"layer_types": ["full_attention"] * 8}, "follows from window_pattern"),
        ({"sliding_window": 5}, r"short_window \+ 1"),
        ({"config_format": 99}, "Update modeling_doctab"),
        ({"bigram_rows": -1}, "bigram_rows"),
        ({"query_scaling_base": 1}, "query_scaling_base"),
    ],
)
def test_bad_fields_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DocTabConfig(**changes)


def test_step_zero_loss_of_the_paper():
    torch.manual_seed(44)
    model = DocTabForCausalLM(DocTabConfig())
    ids = torch.randint(0, 8192, (1, 2048), generator=torch.Generator().manual_seed(0))
    targets = torch.randint(0, 8192, (1, 2048), generator=torch.Generator().manual_seed(1))
    model.train()
    with torch.no_grad():
        loss = model(ids, shift_labels=targets).loss
    assert abs(float(loss) - 9.0115) < 0.002


def test_step_zero_loss_of_the_demo_is_the_logarithm_of_its_vocabulary():
    from training.config import load_recipe
    from training.setup import model_config

    for arm in ("b", "b_table", "lg", "lg_table"):
        config = model_config(load_recipe(f"training/recipes/demo/{arm}.yaml"))
        torch.manual_seed(44)
        model = DocTabForCausalLM(config).train()
        ids = torch.randint(
            0, config.vocab_size, (1, 256), generator=torch.Generator().manual_seed(0)
        )
        with torch.no_grad():
            loss = model(ids, shift_labels=ids.roll(-1, 1)).loss
        assert abs(float(loss) - torch.tensor(float(config.vocab_size)).log().item()) < 0.002
