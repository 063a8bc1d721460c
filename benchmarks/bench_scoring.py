"""Scoring against lm-evaluation-harness on the same checkpoint and documents.

The harness is no dependency: pip install lm-eval. Without it the benchmark says so and ends.
"""

import importlib.util
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from transformers import AutoTokenizer

from benchmarks.harness import Result, compare
from data_scripts.build import main as build
from data_scripts.chunk_set import ChunkSet
from evaluation.checkpoints import load_model, open_checkpoint
from evaluation.formats import EvaluationFormat, TargetSet, load_targets
from evaluation.plans import make_header, row_plan
from evaluation.scoring import make_accelerator, score_targets
from modeling_doctab import DocTabConfig, DocTabForCausalLM

NUM_CHUNKS = 48
CHUNK_LENGTH = 1024
HARNESS_BATCH_SIZES = (1, 8)  # its default, and what suits a GPU
SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 64}


def make_model(folder: Path, chunk_set: ChunkSet) -> None:
    """A small model with a table, as it is after initialisation, whose row is the chunk."""
    torch.manual_seed(0)
    config = DocTabConfig(
        vocab_size=chunk_set.vocab_size,
        bos_token_id=chunk_set.bos_token_id,
        max_position_embeddings=chunk_set.chunk_length,
        table_reach=chunk_set.chunk_length,
        window_pattern="S",
        short_window=chunk_set.chunk_length // 16,
        **SIZES,
    )
    DocTabForCausalLM(config).save_pretrained(folder)


def round_trip_chunks(chunk_set: ChunkSet, num_chunks: int) -> tuple[list[int], list[str]]:
    """Full chunks of the set whose text is tokenised as it was inside its document."""
    tokenizer = AutoTokenizer.from_pretrained(chunk_set.tokenizer_path)
    _, _, chunks = chunk_set.documents("dev_val").chunks()
    places, texts = [], []
    for place, chunk in enumerate(chunks.astype(np.int64).tolist()):
        text = tokenizer.decode(chunk, clean_up_tokenization_spaces=False)
        if tokenizer.encode(text, add_special_tokens=False) == chunk:
            places.append(place)
            texts.append(text)
        if len(places) == num_chunks:
            break
    return places, texts


def chosen_targets(chunk_set: ChunkSet, places: list[int]) -> TargetSet:
    """The target set of some chunks, each a document of its own, as the harness takes them."""
    whole = load_targets(chunk_set, "dev_val", full_chunks=True)
    index = np.array(places)[:, None] * CHUNK_LENGTH + np.arange(CHUNK_LENGTH)
    flat = index.reshape(-1)
    return TargetSet(
        tokens=whole.tokens[flat],
        document=np.repeat(np.arange(len(places)), CHUNK_LENGTH),
        order=whole.order[flat],
        distance=whole.distance[flat],
        num_bytes=whole.num_bytes[flat],
        reference_bytes=whole.reference_bytes[flat],
        document_ids=tuple(map(str, places)),
        document_starts=np.arange(len(places) + 1) * CHUNK_LENGTH,
    )


def run(num_chunks: int = NUM_CHUNKS) -> Iterator[Result]:
    """One case: per-target losses of ours, per-document sums of the harness."""
    if importlib.util.find_spec("lm_eval") is None:
        print("scoring: skipped, it needs lm-evaluation-harness (pip install lm-eval)")
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield _compare(Path(scratch), num_chunks)


def _compare(folder: Path, num_chunks: int) -> Result:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    sizes = ["--chunk_length", str(CHUNK_LENGTH), "--vocab_size", "4096"]
    build(["stdlib", "--out", str(folder / "set"), *sizes, "--max_chunks", "32"])
    chunk_set = ChunkSet.open(folder / "set")
    make_model(folder / "model", chunk_set)
    places, texts = round_trip_chunks(chunk_set, num_chunks)
    targets = chosen_targets(chunk_set, places)
    checkpoint = open_checkpoint(folder / "model")
    form, plan = EvaluationFormat(), row_plan(checkpoint, chunk_set)
    header = make_header(checkpoint, chunk_set, "dev_val", form, ablated=False)
    accelerator: Accelerator = make_accelerator()
    harnesses = {
        batch_size: HFLM(
            pretrained=str(folder / "model"),
            tokenizer=str(chunk_set.tokenizer_path),
            trust_remote_code=True,
            dtype="float32",
            device=str(accelerator.device),
            max_length=CHUNK_LENGTH,
            batch_size=batch_size,
            add_bos_token=False,
        )
        for batch_size in HARNESS_BATCH_SIZES
    }
    requests = [
        Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=i)
        for i, text in enumerate(texts)
    ]
    calls = iter(range(10**9))
    model = load_model(checkpoint, accelerator.device)

    def ours() -> np.ndarray:
        pieces = folder / f"pieces_{next(calls)}"  # never resumed: every call scores everything
        scores = score_targets(
            accelerator, checkpoint, header, targets, form, plan, pieces, model=model
        )
        assert scores is not None
        return scores.nats.reshape(len(places), CHUNK_LENGTH).sum(axis=1, dtype=np.float64)

    def theirs(batch_size: int) -> np.ndarray:
        harness = harnesses[batch_size]
        return -np.array(harness.loglikelihood_rolling(requests, disable_tqdm=True))

    def check(outputs: dict) -> None:
        mine, *others = outputs.values()
        for other in others:
            np.testing.assert_allclose(mine, other, rtol=1e-5)  # float32 sums, other order

    return compare(
        "scoring",
        question=f"losses of {len(places)} chunks of {CHUNK_LENGTH:,} targets on one checkpoint, "
        "against lm-evaluation-harness's rolling log-likelihood, models loaded before",
        prediction="2x: the harness sorts, pads and takes log-softmax and argmax of all logits",
        cases={
            "evaluation.score": ours,
            **{f"lm-eval, batch {size}": partial(theirs, size) for size in HARNESS_BATCH_SIZES},
        },
        check=check,
        target=2.0,
        rounds=5,
        facts={"num_targets": len(targets.tokens)},
    )
