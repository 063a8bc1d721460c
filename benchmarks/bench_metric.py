"""The records engine against a loop over documents; the metric by chunk rows and by target rows."""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import evaluate
import numpy as np

from benchmarks.harness import Result, compare
from evaluation.class_bpb.statistics import NUM_CLASSES, class_indices, sum_by_class
from evaluation.contrasts import class_intervals

NUM_TARGETS = 10_000_000
NUM_DOCUMENTS = 673
NUM_RESAMPLES = 2000
CHUNK_LENGTH = 8192
METRIC_CHUNKS = 64


def columns(num_targets: int, num_documents: int) -> dict[str, np.ndarray]:
    """Random columns of the metric with the paper's shares; two arms' losses."""
    rng = np.random.default_rng(0)
    order = rng.choice(5, num_targets, p=[0.478, 0.203, 0.12, 0.1, 0.099])
    distance = np.minimum(2 ** rng.uniform(0, 15, num_targets), 30_000).astype(np.int64)
    nats = rng.exponential(2.8, num_targets)
    return {
        "nats": nats,
        "baseline": nats * rng.uniform(0.97, 1.05, num_targets),
        "num_bytes": rng.integers(1, 8, num_targets),
        "target_order": order,
        "target_distance": np.where(order > 0, distance, 0),
        "visible": rng.random(num_targets) < 0.5,
        "table_order": rng.integers(0, 5, num_targets),
        "table_right": rng.random(num_targets) < 0.3,
        "document": np.sort(rng.integers(0, num_documents, num_targets)),
    }


def engine(c: dict[str, np.ndarray], num_documents: int, num_resamples: int) -> np.ndarray:
    """Ours: document x class sums of both arms, then all resamples as matrix products."""
    classes = _classes(c)
    arms = [
        sum_by_class(c["document"], classes, c[name], c["num_bytes"], num_documents)
        for name in ("nats", "baseline")
    ]
    saved = arms[1].nats - arms[0].nats
    return class_intervals(saved, arms[0].num_bytes, num_resamples, seed=0)


def document_sums(
    c: dict[str, np.ndarray], num_documents: int
) -> tuple[list[list[float]], list[int]]:
    """Saved nats by class and bytes of each document, one document after the other."""
    classes = _classes(c)
    edges = np.searchsorted(c["document"], np.arange(num_documents + 1))
    saved, sizes = [], []
    for start, end in pairwise(edges):
        part = slice(start, end)
        difference = c["baseline"][part] - c["nats"][part]
        saved.append([float(difference[classes[part] == k].sum()) for k in range(NUM_CLASSES)])
        sizes.append(int(c["num_bytes"][part].sum()))
    return saved, sizes


def array_loop(c: dict[str, np.ndarray], num_documents: int, num_resamples: int) -> np.ndarray:
    """A loop over documents that adds a document's classes as one array."""
    saved, sizes = document_sums(c, num_documents)
    rows = [np.array(row) for row in saved]
    rng = np.random.default_rng(0)
    gains = np.empty((num_resamples, NUM_CLASSES))
    for i in range(num_resamples):
        total, num_bytes = np.zeros(NUM_CLASSES), 0
        for document in rng.integers(num_documents, size=num_documents):
            total += rows[document]
            num_bytes += sizes[document]
        gains[i] = total / (np.log(2) * num_bytes)
    return np.quantile(gains, (0.025, 0.975), axis=0).T


def plain_loop(c: dict[str, np.ndarray], num_documents: int, num_resamples: int) -> np.ndarray:
    """A loop over documents and classes in plain Python, one class's bootstrap after the other."""
    saved, sizes = document_sums(c, num_documents)
    rng = np.random.default_rng(0)
    draws = [rng.integers(num_documents, size=num_documents).tolist() for _ in range(num_resamples)]
    num_bytes = [math.log(2) * sum(sizes[document] for document in drawn) for drawn in draws]
    intervals = []
    for k in range(NUM_CLASSES):
        column = [row[k] for row in saved]
        gains = [
            sum(column[document] for document in drawn) / size
            for drawn, size in zip(draws, num_bytes, strict=True)
        ]
        intervals.append(np.quantile(gains, (0.025, 0.975)))
    return np.array(intervals)


def _classes(c: dict[str, np.ndarray]) -> np.ndarray:
    names = ("target_order", "target_distance", "visible", "table_order", "table_right")
    return class_indices(*(c[name] for name in names), CHUNK_LENGTH)


def metric(c: dict[str, Any], by_chunk: bool) -> dict[str, Any]:
    """The metric end to end: add columns as lists, compute with a baseline."""
    folder = Path(__file__).resolve().parents[1] / "evaluation" / "class_bpb"
    computer = evaluate.load(str(folder))
    given = {name: values for name, values in c.items() if name != "baseline"}
    baseline = c["baseline"]
    if by_chunk:
        given = {name: values.reshape(-1, CHUNK_LENGTH) for name, values in given.items()}
        baseline = baseline.reshape(-1, CHUNK_LENGTH)
    lists = {name: values.tolist() for name, values in given.items()}
    return computer.compute(**lists, baseline_nats=baseline.tolist(), num_resamples=100)


def run(
    num_targets: int = NUM_TARGETS,
    num_documents: int = NUM_DOCUMENTS,
    num_resamples: int = NUM_RESAMPLES,
    metric_chunks: int = METRIC_CHUNKS,
) -> Iterator[Result]:
    """Both cases."""
    c = columns(num_targets, num_documents)
    sizes = (num_documents, num_resamples)

    def same_intervals(outputs: dict) -> None:
        # Equal draws of the documents; sums in another order.
        ours, *others = outputs.values()
        for other in others:
            np.testing.assert_allclose(ours, other, rtol=1e-6, atol=1e-12)

    yield compare(
        "records_engine",
        question=f"{num_targets:,} targets x 2 arms x {NUM_CLASSES} classes x {num_resamples:,} "
        "resamples, against a loop over documents",
        prediction="20x a plain loop; 2x one that adds whole arrays, since the sums over targets "
        "take most of both",
        cases={
            "engine": lambda: engine(c, *sizes),
            "loop over documents and classes": lambda: plain_loop(c, *sizes),
            "loop over documents, arrays": lambda: array_loop(c, *sizes),
        },
        check=same_intervals,
        target={"loop over documents and classes": 20.0},
        rounds=5,
        min_seconds=2.0,  # some calls of the engine a round: one alone is as short as a hiccup
        facts={"num_targets": num_targets, "num_documents": num_documents},
    )
    few = {name: values[: metric_chunks * CHUNK_LENGTH] for name, values in c.items()}

    def same_values(outputs: dict) -> None:
        one, other = outputs.values()
        assert one["bits_per_byte"] == other["bits_per_byte"]
        assert one["gain_interval"] == other["gain_interval"]
        assert one["gain_by_class"] == other["gain_by_class"]

    yield compare(
        "metric_rows",
        question=f"class_bpb of {metric_chunks * CHUNK_LENGTH:,} targets from Python lists: one "
        "row a chunk, against one row a target",
        prediction="3x or more",
        cases={
            "one row a chunk": lambda: metric(few, by_chunk=True),
            "one row a target": lambda: metric(few, by_chunk=False),
        },
        check=same_values,
        target=3.0,
        rounds=3,
    )
