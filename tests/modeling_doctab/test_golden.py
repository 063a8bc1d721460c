"""Parity with the public reference recipe (tests/golden/make_golden.py says how it was run)."""

import torch

from modeling_doctab import naive


def test_model_matches_reference_logits_and_loss(golden, golden_model):
    golden_model.eval()
    ids, targets = golden["input_ids"][0], golden["targets"][0]
    output = golden_model(ids, shift_labels=targets)
    # fp32 sums in another order: logits reach 15, their rounding is near 1e-6.
    torch.testing.assert_close(output.logits, golden["logits"], atol=1e-5, rtol=0)
    torch.testing.assert_close(output.loss, golden["losses_float32"][0], atol=1e-5, rtol=0)


def test_naive_matches_reference_logits_and_loss(golden, golden_model):
    ids, targets = golden["input_ids"][0], golden["targets"][0]
    weights = {k: v.float() for k, v in golden_model.state_dict().items()}
    logits = naive.forward(weights, golden_model.config, ids[0].tolist())
    torch.testing.assert_close(logits, golden["logits"][0], atol=1e-5, rtol=0)
    rows = [
        naive.nats(golden["logits"][i], targets[i].tolist()) for i in range(len(golden["logits"]))
    ]
    loss = sum(map(sum, rows)) / targets.numel()
    assert abs(loss - float(golden["losses_float32"][0])) < 1e-5


def test_window_off_by_one_would_be_seen(golden, golden_model):
    golden_model.config.short_window -= 1
    golden_model.config.sliding_window -= 1
    for layer in golden_model.model.layers:
        if layer.self_attn.sliding_window is not None:
            layer.self_attn.sliding_window -= 1
    golden_model.eval()
    logits = golden_model(golden["input_ids"][0]).logits
    assert (logits - golden["logits"]).abs().max() > 0.01
