"""Scoring against lm-evaluation-harness on the same checkpoints and documents.

The harness is no dependency: pip install lm-eval. Without it the benchmark says so and ends.
"""

import importlib.metadata
import importlib.util
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
from training.config import load_recipe
from training.setup import model_config

RECIPES = Path(__file__).parents[1] / "training" / "recipes"
HARNESS_BATCH_SIZES = (1, 8)  # its default, and what suits a GPU
VOCAB_SIZE = 8192


@dataclass(frozen=True)
class Subject:
    """A recipe's model as it is after initialisation, and documents of one row each."""

    name: str
    recipe: str
    num_documents: int
    rounds: int
    prediction: str

    def config(self, row_length: int | None = None) -> DocTabConfig:
        """The recipe's model; a miniature has shorter rows."""
        config = model_config(load_recipe(RECIPES / self.recipe))
        if row_length is not None:
            config.max_position_embeddings = row_length
        return config


SUBJECTS = (
    Subject(
        name="scoring",
        recipe="small/b.yaml",
        num_documents=48,
        rounds=5,
        prediction="1.6x: half of our time is the forward pass, which is the same in both; the "
        "harness copies whole logits, takes log-softmax and argmax of them, and builds a cache",
    ),
    Subject(
        name="scoring_wide",
        recipe="paper/b.yaml",
        num_documents=2,
        rounds=3,
        prediction="1.15x: at width 512 the layers take nine tenths of the time in both",
    ),
)


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
    length = chunk_set.chunk_length
    flat = (np.array(places)[:, None] * length + np.arange(length)).reshape(-1)
    return TargetSet(
        tokens=whole.tokens[flat],
        document=np.repeat(np.arange(len(places)), length),
        order=whole.order[flat],
        distance=whole.distance[flat],
        num_bytes=whole.num_bytes[flat],
        reference_bytes=whole.reference_bytes[flat],
        document_ids=tuple(map(str, places)),
        document_starts=np.arange(len(places) + 1) * length,
    )


def run(num_documents: int | None = None, row_length: int | None = None) -> Iterator[Result]:
    """Per-target losses of ours against the harness's sums, for a small and a wide model."""
    if importlib.util.find_spec("lm_eval") is None:
        print("scoring: skipped, it needs lm-evaluation-harness (pip install lm-eval)")
        return
    for subject in SUBJECTS:
        with tempfile.TemporaryDirectory() as scratch:
            yield _compare(subject, Path(scratch), num_documents, row_length)


def make_cases(
    subject: Subject, folder: Path, num_documents: int, row_length: int | None = None
) -> tuple[dict[str, Any], int]:
    """The functions to time, each returning the documents' losses, and the number of targets."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    config = subject.config(row_length)
    length = config.max_position_embeddings
    sizes = ["--chunk_length", str(length), "--vocab_size", str(VOCAB_SIZE), "--max_chunks", "32"]
    build(["stdlib", "--out", str(folder / "set"), *sizes])
    chunk_set = ChunkSet.open(folder / "set")
    torch.manual_seed(0)
    DocTabForCausalLM(config).save_pretrained(folder / "model")
    places, texts = round_trip_chunks(chunk_set, num_documents)
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
            max_length=length,
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
        return scores.nats.reshape(len(places), length).sum(axis=1, dtype=np.float64)

    def theirs(batch_size: int) -> np.ndarray:
        harness = harnesses[batch_size]
        return -np.array(harness.loglikelihood_rolling(requests, disable_tqdm=True))

    harness_cases = {f"lm-eval, batch {size}": partial(theirs, size) for size in harnesses}
    return {"evaluation.score": ours, **harness_cases}, len(targets.tokens)


def _compare(
    subject: Subject, folder: Path, num_documents: int | None, row_length: int | None
) -> Result:
    count = num_documents or subject.num_documents
    cases, num_targets = make_cases(subject, folder, count, row_length)

    def check(outputs: dict[str, np.ndarray]) -> None:
        mine, *others = outputs.values()
        for other in others:
            np.testing.assert_allclose(mine, other, rtol=1e-5)  # float32 sums, other order

    config = subject.config(row_length)
    return compare(
        subject.name,
        question=f"losses of {num_targets:,} targets in documents of one row of "
        f"{config.max_position_embeddings:,}, width {config.hidden_size}, "
        f"{config.num_hidden_layers} layers, V {VOCAB_SIZE:,}, against lm-evaluation-harness's "
        "rolling log-likelihood, models loaded before",
        prediction=subject.prediction,
        cases=cases,
        check=check,
        target=2.0,
        rounds=subject.rounds,
        facts={
            "num_targets": num_targets,
            "recipe": subject.recipe,
            "lm_eval": importlib.metadata.version("lm_eval"),
        },
    )
