"""Every way to generate equals recomputing the whole row, token for token."""

import inspect

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import create_causal_mask

from modeling_doctab.modeling_doctab import CACHE_NAME

ARMS = {
    "base": {"document_table": False},
    "table": {},
    "both": {"bigram_rows": 50},
    "local-global": {"window_pattern": "S", "short_window": 4},
}
NEW = 40  # past the short window, past the reach of 20 and past the row of 32


@pytest.fixture(params=ARMS)
def model(request, tiny_model):
    return tiny_model(table_reach=20, **ARMS[request.param])


def prompt(config, batch=2, length=9):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 12, (batch, length), generator=generator)
    ids[:, 0] = config.bos_token_id
    return ids


@torch.no_grad()
def recomputed(model, ids, num_tokens=NEW):
    """Greedy continuation with a whole forward pass for every token."""
    for _ in range(num_tokens):
        logits = model(ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids


def test_cache_argument_is_that_of_the_installed_transformers():
    assert CACHE_NAME in inspect.signature(create_causal_mask).parameters


def test_greedy(model):
    ids = prompt(model.config)
    out = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out, recomputed(model, ids))


def test_sampling_follows_the_same_distribution(model):
    ids = prompt(model.config)
    torch.manual_seed(7)
    out = model.generate(
        ids, max_new_tokens=NEW, do_sample=True, output_logits=True, return_dict_in_generate=True
    )
    with torch.no_grad():
        whole = model(out.sequences[:, :-1], use_cache=False).logits[:, ids.shape[1] - 1 :]
    torch.testing.assert_close(torch.stack(out.logits, 1), whole, atol=1e-5, rtol=1e-5)


def test_beams(model):
    ids = prompt(model.config)
    with_cache = model.generate(ids, max_new_tokens=NEW, num_beams=4, do_sample=False)
    without = model.generate(ids, max_new_tokens=NEW, num_beams=4, do_sample=False, use_cache=False)
    assert torch.equal(with_cache, without)


def test_left_padded_batch_equals_each_alone(model):
    long, short = prompt(model.config, 1, 12), prompt(model.config, 1, 7)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), short], 1)
    ids = torch.cat([long, padded])
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out[:1], recomputed(model, long))
    assert torch.equal(out[1:, 5:], recomputed(model, short))


@pytest.mark.parametrize("chunk", [2, 5])
def test_chunked_prefill(model, chunk):
    ids = prompt(model.config, length=24)
    out = model.generate(ids, max_new_tokens=NEW, do_sample=False, prefill_chunk_size=chunk)
    assert torch.equal(out, recomputed(model, ids))


@torch.no_grad()
def test_a_users_own_loop_that_passes_only_new_ids(model):
    ids = prompt(model.config)
    expected = recomputed(model, ids)
    cache = DynamicCache(config=model.config)
    new, out = ids, ids
    for _ in range(NEW):
        result = model(new, use_cache=True, **{CACHE_NAME: cache})
        new = result.logits[:, -1].argmax(-1, keepdim=True)
        out = torch.cat([out, new], 1)
    assert torch.equal(out, expected)


def test_static_cache(model):
    ids = prompt(model.config)
    out = model.generate(
        ids,
        max_new_tokens=NEW,
        do_sample=False,
        cache_implementation="static",
        disable_compile=True,
    )
    assert torch.equal(out, recomputed(model, ids))


def test_static_cache_left_padded(model):
    long, short = prompt(model.config, 1, 12), prompt(model.config, 1, 7)
    ids = torch.cat([long, torch.cat([torch.zeros(1, 5, dtype=torch.long), short], 1)])
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        do_sample=False,
        cache_implementation="static",
        disable_compile=True,
    )
    assert torch.equal(out[1:, 5:], recomputed(model, short))


@torch.no_grad()
def test_static_cache_in_a_users_own_loop(model):
    ids = prompt(model.config)
    cache = StaticCache(config=model.config, max_cache_len=64)
    new, out = ids, ids
    for _ in range(NEW):
        result = model(new, use_cache=True, **{CACHE_NAME: cache})
        new = result.logits[:, -1].argmax(-1, keepdim=True)
        out = torch.cat([out, new], 1)
    assert torch.equal(out, recomputed(model, ids))


def within(model):
    """Tokens that fit into the short window: past it, assisted decoding needs transformers 5.24."""
    return NEW if Version(transformers.__version__) >= Version("5.24") else 3


def test_prompt_lookup(model):
    ids = prompt(model.config, 1)
    new = within(model)
    out = model.generate(ids, max_new_tokens=new, do_sample=False, prompt_lookup_num_tokens=4)
    assert torch.equal(out, recomputed(model, ids, new))


def test_assisted_by_another_model(model, tiny_model):
    ids = prompt(model.config, 1)
    new = within(model)
    assistant = tiny_model(seed=1)
    out = model.generate(ids, max_new_tokens=new, do_sample=False, assistant_model=assistant)
    assert torch.equal(out, recomputed(model, ids, new))


def test_continuing_from_a_cache(model):
    ids = prompt(model.config)
    first = model.generate(ids, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    cache = getattr(first, CACHE_NAME)
    second = model.generate(
        first.sequences, max_new_tokens=NEW - 5, do_sample=False, **{CACHE_NAME: cache}
    )
    assert torch.equal(second, recomputed(model, ids))


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"),
    reason="before transformers 5.24 a reset DynamicCache keeps its zeroed keys, for any model",
)
def test_reset_and_reuse_of_a_cache(model):
    ids = prompt(model.config)
    cache = DynamicCache(config=model.config)
    for _ in range(2):
        with torch.no_grad():
            logits = model(ids, use_cache=True, **{CACHE_NAME: cache}).logits
        assert torch.equal(logits.argmax(-1), model(ids, use_cache=False).logits.argmax(-1))
        cache.reset()


def repetitive_prompt(config, length=40):
    return torch.cat([prompt(config, 1, 9), prompt(config, 1, 9)[:, 1:].repeat(1, 4)], 1)[
        :, :length
    ]


@pytest.mark.parametrize("draft", [1, 3, 10])
def test_drafting_from_the_table_is_plain_greedy(model, draft):
    for ids in (prompt(model.config, 1), repetitive_prompt(model.config)):
        new = within(model)
        out = model.generate(ids, max_new_tokens=new, do_sample=False, table_draft_tokens=draft)
        assert torch.equal(out, recomputed(model, ids, new))


def test_drafting_saves_forward_passes(tiny_model, monkeypatch):
    """On a model that says what the table says, all drafts are right."""
    model = tiny_model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lm_head" not in name and "lambdas" not in name:
                parameter.zero_()
        model.lm_head.weight.copy_(torch.nn.functional.normalize(model.lm_head.weight))
        model.model.document_table.candidate_embedding.weight.copy_(
            model.lm_head.weight.repeat(model.config.table_orders, 1)
        )
    ids = repetitive_prompt(model.config)
    calls = []
    original = type(model).forward
    monkeypatch.setattr(
        type(model), "forward", lambda self, **kw: (calls.append(1), original(self, **kw))[1]
    )
    plain = model.generate(ids, max_new_tokens=16, do_sample=False)
    assert len(calls) == 16
    calls.clear()
    drafted = model.generate(ids, max_new_tokens=16, do_sample=False, table_draft_tokens=5)
    assert torch.equal(plain, drafted)
    assert len(calls) <= 4  # 5 drafted and one of its own at each


def test_drafts_follow_the_latest_match_and_stay_in_the_document():
    from modeling_doctab.generation_doctab import TableCandidateGenerator

    bos = 9
    make = TableCandidateGenerator(4, 100, 4, bos)
    ids = torch.tensor([[bos, 1, 2, 3, 4, 5, 1, 2, 7, 8, 1, 2]])
    assert make.get_candidates(ids)[0][0, 12:].tolist() == [7, 8, 1, 2]
    ids = torch.tensor([[bos, 1, 2, 3, 4, bos, 1, 2]])
    assert make.get_candidates(ids)[0].shape[1] == 8  # the match lies in another document
    ids = torch.tensor([[bos, 1, 5, 6, 1]])
    assert make.get_candidates(ids)[0].shape[1] == 5  # one matching token is too little
    ids = torch.tensor([[bos, 1, 2, 1, 2]])
    assert make.get_candidates(ids)[0][0, 5:].tolist() == [1, 2, 1, 2]
    make = TableCandidateGenerator(4, 7, 4, bos)
    assert make.get_candidates(ids)[0].shape[1] == 6  # one place is left for the model's own


def test_bad_drafting_is_refused(model):
    for wrong in (0, -1, True, 2.5):
        with pytest.raises(ValueError, match="table_draft_tokens"):
            model.generate(prompt(model.config, 1), max_new_tokens=4, table_draft_tokens=wrong)


def test_other_caches_are_refused(tiny_model):
    model = tiny_model()
    ids = prompt(model.config)

    class Paged:
        def get_seq_length(self):
            return 0

    with pytest.raises(ValueError, match="continuous batching is not supported"):
        model.model._embed(ids, None, None, Paged(), (None, None, None), False)
    base = tiny_model(document_table=False)
    with torch.no_grad():
        cache = getattr(base(ids, use_cache=True), CACHE_NAME)
        with pytest.raises(ValueError, match="no token history"):
            model(ids, use_cache=True, **{CACHE_NAME: cache})
