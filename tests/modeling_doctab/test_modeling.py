"""The model against plain loops, its initial values, causality, loss, saving and loading."""

import inspect
import itertools
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from modeling_doctab import (
    DocTabForCausalLM,
    attention_doctab,
    lookup_document_table,
    naive,
)
from modeling_doctab.attention_doctab import banded_attention
from modeling_doctab.loss_doctab import linear_cross_entropy_sum, token_nats

FIELDS = ("table_order", "table_candidate", "table_distance")
ARMS = {
    "base": {"document_table": False},
    "table": {},
    "bigram": {"document_table": False, "bigram_rows": 50},
    "both": {"bigram_rows": 50},
    "log length": {"query_scaling": "log_length"},
    "head gain": {"query_scaling": "head_gain"},
    "grouped heads": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    "local-global": {"window_pattern": "S", "short_window": 3},
    "bf16 cos and sin": {"rotary_dtype": "bfloat16"},
    "no soft cap": {"final_logit_softcapping": None},
}


def some_rows(config, rows=2, length=32, seed=0):
    """Repetitive rows that open with BOS; the second holds another document too."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 12, (rows, length), generator=generator)
    ids[:, 0] = config.bos_token_id
    ids[1:, length // 2] = config.bos_token_id
    return ids


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("attention", ["doctab_windowed", "sdpa", "eager"])
def test_logits_equal_naive(tiny_model, arm, attention):
    model = tiny_model(**ARMS[arm])
    model.set_attn_implementation(attention)
    ids = some_rows(model.config)
    weights = model.state_dict()
    expected = torch.stack([naive.forward(weights, model.config, row) for row in ids.tolist()])
    with torch.no_grad():
        # fp32 sums in another order; logits are of order 1.
        torch.testing.assert_close(model(ids).logits, expected, atol=2e-5, rtol=1e-5)


def test_passed_fields_equal_internal_fields(tiny_model):
    model = tiny_model()
    ids = some_rows(model.config)
    segments = (ids == model.config.bos_token_id).long().cumsum(1)
    table = lookup_document_table(ids, 4, segments, model.config.table_reach)
    with torch.no_grad():
        passed = model(ids, **dict(zip(FIELDS, table, strict=True))).logits
        assert torch.equal(passed, model(ids).logits)


def test_a_short_row_with_the_fields_of_its_chunk(tiny_model):
    """A 2K-like row: the table sees the chunk, the model sees the row."""
    model = tiny_model(max_position_embeddings=8, short_window=4)
    chunk = some_rows(model.config, 1, 32)
    table = lookup_document_table(chunk)
    row = chunk[:, 24:].clone()
    row[:, 0] = model.config.bos_token_id
    fields = {name: field[:, 24:] for name, field in zip(FIELDS, table, strict=True)}
    triples = list(zip(*(f[0].tolist() for f in fields.values()), strict=True))
    expected = naive.forward(model.state_dict(), model.config, row[0].tolist(), triples)
    with torch.no_grad():
        logits = model(row, **fields).logits
        torch.testing.assert_close(logits[0], expected, atol=2e-5, rtol=1e-5)
        assert not torch.allclose(logits, model(row).logits, atol=1e-3)


def test_ablated_table_is_no_match_everywhere(tiny_model):
    model = tiny_model()
    ids = some_rows(model.config)
    none = torch.zeros_like(ids)
    fields = dict(zip(FIELDS, (none, none - 1, none), strict=True))
    with torch.no_grad():
        assert torch.equal(model(ids, ablate_table=True).logits, model(ids, **fields).logits)


def test_initial_values_of_every_parameter(tiny_config):
    torch.manual_seed(44)
    config = tiny_config(vocab_size=512, bigram_rows=50, query_scaling="head_gain")
    bound = (3 / config.hidden_size) ** 0.5
    seen = set()
    for name, p in DocTabForCausalLM(config).named_parameters():
        values = p.detach().float()
        kind = name.split(".")[-2] if name.endswith("weight") else name.split(".")[-1]
        seen.add(kind)
        if kind == "embed_tokens":
            assert abs(values.std() - 1) < 0.05
            assert abs(values.mean()) < 0.05
        elif kind == "lm_head":
            assert abs(values.std() - 0.001) < 5e-5
        elif kind in ("q_proj", "k_proj", "v_proj", "up_proj", "value_embedding"):
            assert values.abs().max() <= bound + 1e-2 * (p.dtype == torch.bfloat16)
            assert abs(values.std() - bound / 3**0.5) < 0.1 * bound
        elif kind in (
            "o_proj",
            "down_proj",
            "value_gate",
            "candidate_embedding",
            "state_embedding",
            "bigram_table",
        ):
            assert not values.any()
        elif kind == "x0_lambdas":
            assert (values == torch.tensor(0.1)).all()
        else:
            assert kind in ("resid_lambdas", "query_gain")
            assert (values == 1).all()
    assert len(seen) == 16


def test_base_and_table_arm_start_equal_bit_for_bit(tiny_config):
    models = []
    for table in (False, True):
        torch.manual_seed(44)
        models.append(DocTabForCausalLM(tiny_config(document_table=table, bigram_rows=0)).eval())
    base, table = models
    common = dict(base.named_parameters())
    for name, parameter in table.named_parameters():
        if name in common:
            assert torch.equal(parameter, common[name]), name
        else:
            assert "document_table" in name
    ids = some_rows(base.config)
    with torch.no_grad():
        assert torch.equal(base(ids).logits, table(ids).logits)


def test_seeds_differ_and_repeat(tiny_config):
    def first(seed):
        torch.manual_seed(seed)
        return DocTabForCausalLM(tiny_config()).model.embed_tokens.weight

    assert torch.equal(first(44), first(44))
    assert not torch.equal(first(44), first(45))


def test_embeddings_are_stored_in_bf16(tiny_config):
    model = DocTabForCausalLM(tiny_config(bigram_rows=50))
    for name, parameter in model.named_parameters():
        is_table = any(s in name for s in ("embed", "bigram"))
        assert parameter.dtype == (torch.bfloat16 if is_table else torch.float32), name
    assert model.dtype == torch.float32


@pytest.mark.parametrize("arm", ["both", "local-global", "log length"])
def test_causality_by_gradient_and_by_editing(tiny_model, arm):
    model = tiny_model(**ARMS[arm])
    ids = some_rows(model.config)
    with torch.no_grad():
        before = model(ids).logits
        for t in (0, 5, 17, 30):
            changed = ids.clone()
            changed[:, t + 1 :] = (changed[:, t + 1 :] + 1) % 12
            assert torch.equal(model(changed).logits[:, : t + 1], before[:, : t + 1])
    x = model.model.embed_tokens(ids).detach().requires_grad_()
    handle = model.model.embed_tokens.register_forward_hook(lambda *_: x)
    model(ids).logits[:, 10].sum().backward()
    handle.remove()
    assert x.grad[:, :11].abs().sum() > 0
    assert x.grad[:, 11:].abs().sum() == 0


@pytest.mark.parametrize(("window", "length"), [(1, 9), (4, 64), (5, 33), (16, 16), (40, 130)])
def test_banded_attention_equals_a_dense_mask(window, length):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, length, 8, requires_grad=True) for _ in range(3))
    t = torch.arange(length)
    mask = (t[None] <= t[:, None]) & (t[None] >= t[:, None] - window)
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    banded = banded_attention(q, k, v, window)
    torch.testing.assert_close(banded, dense, atol=1e-6, rtol=1e-5)
    weight = torch.randn_like(dense)
    for ours, theirs in zip(
        torch.autograd.grad((banded * weight).sum(), (q, k, v)),
        torch.autograd.grad((dense * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_no_flash_attention_is_said_once(monkeypatch):
    """Where torch's kernel does not run, the fallback comes with a warning."""
    device = torch.device("cpu")
    monkeypatch.setattr(attention_doctab, "_FLASH_WORKS", {})
    with pytest.warns(UserWarning, match="flash attention does not run on cpu.*blocks of scaled"):
        assert not attention_doctab._flash_works(device, torch.bfloat16, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not attention_doctab._flash_works(device, torch.bfloat16, 64)
        assert not attention_doctab._flash_works(device, torch.float32, 64)
        compiled = torch.compile(
            lambda x: x if attention_doctab._flash_works(x.device, x.dtype, 64) else 2 * x,
            fullgraph=True,
            backend="eager",
        )
        assert compiled(torch.ones(2)).tolist() == [2, 2]


def test_the_probe_of_flash_attention_leaves_a_recomputed_block_alone(monkeypatch):
    """The first forward pass may be inside a checkpoint, which counts the tensors it saves."""

    def kernel(query, key, value, *args, scale=None, window_size=(-1, -1)):
        rows = (x.transpose(0, 1)[None] for x in (query, key, value))
        output = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True)
        return output[0].transpose(0, 1)

    monkeypatch.setattr(attention_doctab, "_FLASH_WORKS", {})
    monkeypatch.setattr(attention_doctab, "varlen_attn", kernel)

    def block(x):
        assert attention_doctab._flash_works(x.device, torch.bfloat16, 64)
        return (x * x).exp()

    x = torch.ones(3, requires_grad=True)
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 2 * torch.e))


def test_rotary_frequencies_stay_exact_in_half_precision(tiny_config):
    model = DocTabForCausalLM(tiny_config())
    exact = model.model.rotary_emb.inv_freq.clone()
    model = model.to(torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16
    for name in ("inv_freq", "original_inv_freq"):
        torch.testing.assert_close(getattr(model.model.rotary_emb, name), exact, rtol=0, atol=0)


@pytest.mark.parametrize("rounding", ["float32", "bfloat16"])
def test_angles_do_not_depend_on_the_precision_of_training(tiny_config, rounding):
    rotary = DocTabForCausalLM(tiny_config(rotary_dtype=rounding)).model.rotary_emb
    positions = torch.arange(8000, 8010)[None]
    in_training = rotary(torch.zeros(1, dtype=torch.bfloat16), positions)
    scored = rotary(torch.zeros(1), positions)
    for mine, theirs in zip(in_training, scored, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        assert mine.dtype == getattr(torch, rounding)


@pytest.mark.parametrize(("shared", "small"), [(101_376, True), (232_448, False)])
def test_flex_tiles_follow_the_devices_shared_memory(monkeypatch, shared, small):
    properties = types.SimpleNamespace(shared_memory_per_block_optin=shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    fields = {"shape": (1, 4, 64, 128), "device": "cuda:0", "dtype": torch.bfloat16}
    query = types.SimpleNamespace(is_cuda=True, **fields)
    options = attention_doctab.flex_kernel_options(query)
    assert (options is not None) == small
    query.dtype = torch.float32
    assert attention_doctab.flex_kernel_options(query) is None
    query.dtype, query.shape = torch.bfloat16, (1, 4, 64, 64)
    assert attention_doctab.flex_kernel_options(query) is None
    assert attention_doctab.flex_kernel_options(torch.zeros(1, 4, 64, 128)) is None


def test_flash_attention_is_asked_for_the_papers_windows(monkeypatch):
    """A stand-in with the kernel's signature and meaning: (left, right) earlier and later keys."""

    def dense(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        assert cu_q.tolist() == [0, 40, 80]
        left, right = window_size
        rows = [x.unflatten(0, (2, 40)).transpose(1, 2) for x in (q, k, v)]
        t = torch.arange(40)
        mask = t[None] <= t[:, None] + right
        if left >= 0:
            mask &= t[None] >= t[:, None] - left
        out = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=mask, scale=scale)
        return out.transpose(1, 2).flatten(0, 1)

    monkeypatch.setattr(attention_doctab, "varlen_attn", dense)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 40, 8) for _ in range(3))
    ours = attention_doctab.flash_attention(q, k, v, 8, 0.3)
    expected = banded_attention(q, k, v, 7, 0.3).transpose(1, 2)
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)
    whole = attention_doctab.flash_attention(q, k, v, None, 0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    torch.testing.assert_close(whole, expected.transpose(1, 2), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("softcap", [15.0, 0.5, 100.0, None])
def test_loss_and_its_gradients_equal_the_plain_loss(softcap, monkeypatch):
    monkeypatch.setattr("modeling_doctab.loss_doctab.MAX_LOGITS_CPU", 50 * 7)  # chunks of 7 tokens
    torch.manual_seed(0)
    hidden = torch.randn(40, 12, requires_grad=True)
    weight = torch.randn(50, 12, requires_grad=True)
    targets = torch.randint(0, 50, (40,))
    targets[::9] = -100
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    plain = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    ours = linear_cross_entropy_sum(hidden, weight, targets, softcap)
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-6)
    each = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    nats = token_nats(hidden, weight, targets, softcap)
    torch.testing.assert_close(nats, each, atol=1e-5, rtol=1e-5)
    assert not nats.requires_grad
    for mine, theirs in zip(
        torch.autograd.grad(3 * ours, (hidden, weight)),
        torch.autograd.grad(3 * plain, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [15.0, 39.0, 41.0, 300.0, None])
@pytest.mark.parametrize("scale", [1e-3, 30.0, 3000.0])
def test_the_loss_of_extreme_logits_is_finite_and_right(softcap, scale):
    torch.manual_seed(0)
    hidden = torch.randn(20, 12)
    weight = scale * torch.randn(50, 12)
    weight[0] = -abs(weight[0])
    hidden[:5] = abs(hidden[:5])
    targets = torch.randint(0, 50, (20,))
    targets[:5] = 0
    logits = hidden.double() @ weight.double().T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    exact = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    nats = token_nats(hidden, weight, targets, softcap)
    torch.testing.assert_close(nats.double(), exact, atol=2e-5, rtol=1e-5)
    hidden.requires_grad_()
    linear_cross_entropy_sum(hidden, weight, targets, softcap).backward()
    assert torch.isfinite(hidden.grad).all()


def test_labels_are_shifted_and_shift_labels_are_not(tiny_model):
    model = tiny_model()
    ids = some_rows(model.config)
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    with torch.no_grad():
        assert torch.equal(model(ids, labels=ids).loss, model(ids, shift_labels=shifted).loss)
        halved = model(ids, labels=ids, num_items_in_batch=2 * (ids.numel() - 2)).loss
        torch.testing.assert_close(halved * 2, model(ids, labels=ids).loss)
    model.train()
    output = model(ids, labels=ids)
    assert output.logits is None
    with pytest.raises(ValueError, match="not both"):
        model(ids, labels=ids, shift_labels=ids)


def test_gradient_checkpointing_is_exact(tiny_model):
    model = tiny_model().train()
    ids = some_rows(model.config)
    model(ids, labels=ids).loss.backward()
    plain = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, plain[name]), name


@pytest.mark.parametrize("arm", ["base", "both", "local-global"])
def test_greedy_generation_equals_recomputation(tiny_model, arm):
    model = tiny_model(table_reach=20, **ARMS[arm])
    ids = some_rows(model.config)[:, :9]
    out = model.generate(ids, max_new_tokens=40, do_sample=False)
    for t in range(9, out.shape[1]):
        with torch.no_grad():
            logits = model(out[:, :t], use_cache=False).logits[:, -1]
        assert torch.equal(logits.argmax(-1), out[:, t])


def test_save_and_load_give_equal_logits(tiny_model, tmp_path):
    model = tiny_model(bigram_rows=50)
    model.save_pretrained(tmp_path)
    again = DocTabForCausalLM.from_pretrained(tmp_path).eval()
    ids = some_rows(model.config)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


FRESH = """
import sys, torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, pipeline
folder, again = sys.argv[1:]
assert AutoConfig.from_pretrained(folder, trust_remote_code=True).model_type == "doctab"
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
assert "modeling_doctab" not in sys.modules
AutoModel.from_pretrained(folder, trust_remote_code=True)
torch.save({"logits": model(torch.arange(24).view(2, 12)).logits.detach()}, sys.argv[2] + "/l.pt")
model.save_pretrained(again)
second = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True).eval()
ids = torch.arange(24).view(2, 12)
assert torch.equal(second(ids).logits, model(ids).logits)
generate = pipeline("text-generation", model=folder, trust_remote_code=True)
assert generate("abc", max_new_tokens=3, do_sample=False)[0]["generated_text"].startswith("abc")
assert "modeling_doctab" not in sys.modules
"""


def test_loads_in_a_process_that_cannot_import_the_project(tiny_model, chunk_set, tmp_path):
    model = tiny_model(bigram_rows=50, vocab_size=300)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(chunk_set / "tokenizer").save_pretrained(tmp_path / "model")
    (tmp_path / "again").mkdir()
    command = [sys.executable, "-I", "-c", FRESH, str(tmp_path / "model"), str(tmp_path / "again")]
    environment = {"HF_HOME": str(tmp_path / "hf"), "PATH": ""}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    expected = model(torch.arange(24).view(2, 12)).logits.detach()
    found = torch.load(tmp_path / "again" / "l.pt", weights_only=True)["logits"]
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs_embeds": torch.zeros(1, 4, 32)}, "need input_ids"),
        ({"table_order": torch.zeros(1, 4, dtype=torch.long)}, "Pass all of"),
        (
            dict.fromkeys(FIELDS, torch.zeros(1, 3, dtype=torch.long)),
            r"table_order must be integers of the shape",
        ),
        (dict.fromkeys(FIELDS, torch.zeros(1, 4)), "must be integers"),
    ],
)
def test_bad_input_is_refused(tiny_model, arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny_model()(torch.zeros(1, 4, dtype=torch.long), **arguments)


PACKED = [[5, 3, 5, 3, 7, 2], [3, 5, 3, 5], [7, 7, 2, 5, 3, 7, 2, 9]]


@pytest.mark.parametrize("arm", ["base", "both", "local-global"])
@pytest.mark.parametrize("attention", ["doctab_windowed", "sdpa", "eager"])
@pytest.mark.parametrize("mask", [None, "ones"])
@pytest.mark.parametrize("use_cache", [None, True, False])
def test_packed_documents_equal_each_alone(tiny_model, arm, attention, mask, use_cache):
    """Restarted positions separate documents, whatever the cache's default and the mask."""
    model = tiny_model(**ARMS[arm])
    model.set_attn_implementation(attention)
    row = torch.tensor([list(itertools.chain(*PACKED))])
    positions = torch.cat([torch.arange(len(p)) for p in PACKED])[None]
    attention_mask = torch.ones_like(row) if mask else None
    with torch.no_grad():
        packed = model(
            row, position_ids=positions, attention_mask=attention_mask, use_cache=use_cache
        ).logits[0]
        alone = torch.cat([model(torch.tensor([p])).logits[0] for p in PACKED])
    torch.testing.assert_close(packed, alone, atol=2e-6, rtol=1e-5)


def test_unmasked_packed_rows_split_the_table_alone(tiny_model):
    """The paper's packed rows: attention runs over the whole row, the lookup ends at BOS."""
    model = tiny_model()
    bos = model.config.bos_token_id
    row = torch.tensor([[bos, 5, 3, 7, bos, 5, 3, 7]])
    table = lookup_document_table(row, 4, (row == bos).long().cumsum(1))
    assert table.order[0].tolist() == [0] * 8
    with torch.no_grad():
        first = model(row).logits
        changed = row.clone()
        changed[0, 1] = 6
        assert (model(changed).logits[0, 5:] - first[0, 5:]).abs().max() > 1e-4


def test_compiled_as_one_graph_equals_eager(tiny_model):
    model = tiny_model(bigram_rows=50)
    ids = some_rows(model.config)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        torch.testing.assert_close(
            compiled(ids, use_cache=False).logits, expected, atol=1e-6, rtol=1e-5
        )
    model.train()
    loss = model(ids, labels=ids).loss
    loss.backward()
    plain = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    again = compiled(ids, labels=ids).loss
    again.backward()
    torch.testing.assert_close(again, loss, atol=1e-6, rtol=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name], atol=1e-5, rtol=1e-4)


def test_works_under_the_trainer_of_transformers(tiny_config, tmp_path):
    from transformers import Trainer, TrainingArguments

    config = tiny_config()
    torch.manual_seed(0)
    model = DocTabForCausalLM(config)
    ids = some_rows(config, 8)
    table = lookup_document_table(ids, 4, (ids == config.bos_token_id).long().cumsum(1))
    rows = [
        {"input_ids": ids[i], "labels": ids[i]}
        | {n: f[i] for n, f in zip(FIELDS, table, strict=True)}
        for i in range(8)
    ]
    seen = []
    original = model.forward
    model.forward = lambda **kw: (seen.append(set(kw)), original(**kw))[1]
    model.forward.__signature__ = inspect.signature(original)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=0.02,
        report_to=[],
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    result = trainer.train()
    losses = [e["loss"] for e in trainer.state.log_history if "loss" in e]
    assert losses[-1] < losses[0]
    assert result.global_step == 6
    assert set(FIELDS) <= seen[0]  # the Trainer drops columns that forward does not name
    assert "num_items_in_batch" in seen[0]
    metrics = trainer.evaluate(rows)
    assert metrics["eval_loss"] < losses[0]


def test_a_base_checkpoint_in_a_table_config(tiny_model, tmp_path, caplog):
    base = tiny_model(document_table=False)
    base.save_pretrained(tmp_path)
    table = DocTabForCausalLM.from_pretrained(tmp_path, document_table=True).eval()
    assert not table.model.document_table.candidate_embedding.weight.any()
    assert not table.model.document_table.state_embedding.weight.any()
    ids = some_rows(base.config)
    with torch.no_grad():
        assert torch.equal(table(ids).logits, base(ids).logits)


def test_causality_of_value_embeddings(tiny_model):
    model = tiny_model(document_table=False)
    ids = some_rows(model.config)
    layer = model.model.layers[0].self_attn
    x = layer.value_embedding(ids).detach().requires_grad_()
    handle = layer.value_embedding.register_forward_hook(lambda *_: x)
    model(ids).logits[:, 10].sum().backward()
    handle.remove()
    assert x.grad[:, :11].abs().sum() > 0
    assert x.grad[:, 11:].abs().sum() == 0


def test_ids_and_fields_out_of_range_are_refused(tiny_model):
    model = tiny_model()
    ids = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"input_ids must lie in 0 .. 63.*tokenizer"):
        model(ids + 64)
    fields = dict(zip(FIELDS, (ids, ids - 1, ids), strict=True))
    for name, wrong in (("table_order", 5), ("table_candidate", 64), ("table_distance", -1)):
        with pytest.raises(ValueError, match=f"{name} must lie in"):
            model(ids, **{**fields, name: torch.full_like(ids, wrong)})


def test_resizing_is_refused(tiny_model):
    model = tiny_model()
    for target in (model, model.model):
        with pytest.raises(ValueError, match="cannot be resized"):
            target.resize_token_embeddings(80)


def test_remote_code_imports_torch_and_transformers_alone():
    from modeling_doctab.modeling_doctab import REMOTE_CODE

    folder = Path(sys.modules["modeling_doctab"].__file__).parent
    allowed = {"torch", "transformers", *sys.stdlib_module_names}
    for name in REMOTE_CODE:
        for line in (folder / name).read_text().splitlines():
            words = line.split()
            if words[:1] in (["import"], ["from"]) and not line.startswith(" "):
                root = words[1].split(".")[0]
                assert root in allowed or words[1].startswith("."), (name, line)
