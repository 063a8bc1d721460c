"""Equality with lm-evaluation-harness's rolling bits per byte on full chunks, and its BOS trap."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from evaluation.checkpoints import load_model, open_checkpoint
from evaluation.contrasts import records_bits_per_byte
from evaluation.records import filter_records
from evaluation.score import score_runs
from evaluation.scores import read_scores
from tests.evaluation.conftest import CHUNK_LENGTH
from tests.evaluation.rolling_windows import rolling_nats, rolling_windows

ARMS = [pytest.param({"document_table": False}, id="base"), pytest.param({}, id="table")]
# float32 losses of about 5 nats, summed over 64 targets in another order
TOLERANCE = {"rel": 1e-5}


def scored_chunks(make_run, chunk_set, changes):
    """The model, its losses [chunks, chunk_length], and the chunks; a row is a whole chunk."""
    run = make_run("arm", max_position_embeddings=CHUNK_LENGTH, **changes)
    (result,) = score_runs([run], chunk_set, ["dev"])
    nats = read_scores(run / "scores" / "dev.training.npz").nats.reshape(-1, CHUNK_LENGTH)
    _, _, chunks = chunk_set.documents("dev").chunks()
    model = load_model(open_checkpoint(run), torch.device("cpu"))
    return model, nats.astype(np.float64), chunks.astype(np.int64), result.records


@pytest.mark.parametrize("changes", ARMS)
def test_equals_the_rolling_rule_on_full_chunks(make_run, chunk_set, changes) -> None:
    model, nats, chunks, _ = scored_chunks(make_run, chunk_set, changes)
    assert len(chunks) > 5
    for losses, chunk in zip(nats, chunks, strict=True):
        found = rolling_nats(model, chunk.tolist(), chunk_set.bos_token_id, CHUNK_LENGTH)
        assert losses.sum() == pytest.approx(found, **TOLERANCE)


def test_later_windows_differ_in_slot_0_alone() -> None:
    tokens = list(range(1, 12))
    windows = list(rolling_windows(tokens, 0, 4))
    assert windows == [
        ([0, 1, 2, 3], [1, 2, 3, 4]),
        ([4, 5, 6, 7], [5, 6, 7, 8]),
        ([7, 8, 9, 10], [9, 10, 11]),
    ]
    # The targets are our chunks; where we show BOS, the rule shows the token before the chunk.
    assert [inputs[1:] for inputs, _ in windows[:2]] == [[1, 2, 3], [5, 6, 7]]


def test_the_bos_trap(make_run, chunk_set) -> None:
    """A tokenizer that adds BOS makes the rule score a second BOS and cut one token early."""
    model, nats, chunks, _ = scored_chunks(make_run, chunk_set, {"document_table": False})
    bos = chunk_set.bos_token_id
    with_bos = rolling_nats(model, [bos, *chunks[0].tolist()], bos, CHUNK_LENGTH)
    windows = list(rolling_windows([bos, *chunks[0].tolist()], bos, CHUNK_LENGTH))
    assert [len(targets) for _, targets in windows] == [CHUNK_LENGTH, 1]
    assert windows[0][1][0] == bos
    with torch.no_grad():
        first = model(input_ids=torch.tensor([[bos]])).logits[0, 0].log_softmax(-1)
    assert abs(with_bos - nats[0].sum()) > 0.5 * -float(first[bos])


@pytest.mark.parametrize("changes", ARMS)
def test_equals_the_harness_itself(make_run, chunk_set, changes) -> None:
    reason = "needs lm-evaluation-harness (pip install lm-eval), which is no dependency"
    pytest.importorskip("lm_eval", reason=reason)
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import get_rolling_token_windows

    tokens = list(range(1, 30))
    rule = list(get_rolling_token_windows(tokens, 0, 4, 1))
    assert rule == list(rolling_windows(tokens, 0, 4))
    model, nats, chunks, records = scored_chunks(make_run, chunk_set, changes)
    tokenizer = AutoTokenizer.from_pretrained(chunk_set.tokenizer_path)
    # A chunk's text is a document of its own where it is tokenised as it was inside its document.
    texts = tokenizer.batch_decode(chunks, clean_up_tokenization_spaces=False)
    same = [
        i
        for i, text in enumerate(texts)
        if tokenizer.encode(text, add_special_tokens=False) == chunks[i].tolist()
    ]
    assert len(same) > len(chunks) / 2
    harness = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        max_length=CHUNK_LENGTH,
        batch_size=2,
        device="cpu",
        add_bos_token=False,
    )
    requests = [
        Instance(request_type="loglikelihood_rolling", doc={}, arguments=(texts[i],), idx=i)
        for i in same
    ]
    found = harness.loglikelihood_rolling(requests, disable_tqdm=True)
    np.testing.assert_allclose(nats[same].sum(axis=1), -np.array(found), rtol=1e-5)
    num_bytes = sum(len(texts[i].encode()) for i in same)
    bits_per_byte = -math.fsum(found) / (math.log(2) * num_bytes)
    counted = chunk_set.token_bytes()[chunks[same]].sum()
    assert counted == num_bytes
    ours = nats[same].sum() / (math.log(2) * counted)
    assert ours == pytest.approx(bits_per_byte, rel=1e-6)
    if len(same) == len(chunks):
        assert records_bits_per_byte(filter_records(records)) == pytest.approx(ours, rel=1e-12)
