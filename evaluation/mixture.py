"""A rival without parameters in the model: mix the latest match into the output distribution.

    python -m evaluation.mixture RUN... --chunk_set DIR --fit_set dev_val --sets dev_val dev_heldout

p(y) = (1 - w) p_model(y) + w [y = candidate], where the weight w depends on the match's order and
log2 distance and is fitted on one development set alone; w = 0 where nothing matches. The result is
normalised by construction. It needs the scores of an arm without a table, no model: the loss of a
target and whether the candidate is right decide the mixture's loss. Records go to RUN/mixture/ and
appear in the report as the arm `NAME_mixture`, beside the learned table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_scripts import command_line
from data_scripts.chunk_set import ChunkSet
from evaluation.class_bpb.statistics import MAX_ORDER, IntArray
from evaluation.formats import load_targets
from evaluation.records import Records, write_records
from evaluation.scores import Scores, make_records, read_scores

FloatArray = npt.NDArray[np.float64]
NUM_BUCKETS = 14  # distances share a weight per power of two, as in the model's table (Section 3.3)
_BISECTIONS = 60  # halve [0, 1] to below float64's resolution


def mixture_cells(order: npt.NDArray[np.int8], distance: npt.NDArray[np.int32]) -> IntArray:
    """Weight of each target, [targets]: 0 for no match, else by order and distance bucket."""
    bucket = np.frexp(np.maximum(distance, 1).astype(np.float64))[1].astype(np.int64) - 1
    cell = 1 + (order.astype(np.int64) - 1) * NUM_BUCKETS + np.minimum(bucket, NUM_BUCKETS - 1)
    return np.where(order > 0, cell, 0)


def fit_weights(scores: Scores, counted: npt.NDArray[np.bool_]) -> FloatArray:
    """Maximise the mixture's likelihood in every cell apart: [1 + 4 * 14] weights in [0, 1).

    The log-likelihood of a cell is concave in its weight, so the root of its derivative is found by
    halving; where the derivative is negative at 0 the weight is 0. One wrong target is added to
    every cell, so that a cell that was seen right a few times does not bet everything.

    Args:
        scores: of an arm on the set to fit on.
        counted: [targets] which targets count (those with bytes).
    """
    num_cells = 1 + MAX_ORDER * NUM_BUCKETS
    cell = mixture_cells(scores.table_order, scores.table_distance)
    right = scores.table_right & counted
    p = np.exp(-scores.nats[right].astype(np.float64))
    wrong = 1 + np.bincount(cell[~scores.table_right & counted], minlength=num_cells)
    low, high = np.zeros(num_cells), np.ones(num_cells)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        w = middle[cell[right]]
        # d/dw of log((1-w) p + w) over right targets, and of log(1-w) over wrong ones.
        slope = np.bincount(cell[right], (1 - p) / (p + w * (1 - p)), num_cells)
        rises = slope > wrong / (1 - middle)
        low, high = np.where(rises, middle, low), np.where(rises, high, middle)
    low[0] = 0.0
    return low


def mixture_nats(scores: Scores, weights: FloatArray) -> npt.NDArray[np.float32]:
    """Losses of the mixture, [targets]: -log((1 - w) p + w [candidate is the target])."""
    cell = mixture_cells(scores.table_order, scores.table_distance)
    w = weights[cell]
    p = np.exp(-scores.nats.astype(np.float64))
    mixed = np.where(scores.table_right, p + w * (1 - p), (1 - w) * p)
    # Where p underflows float64, log(1 - w) - nats still holds.
    with np.errstate(divide="ignore"):
        direct = -np.log(mixed)
    nats = np.where(scores.table_right, direct, scores.nats - np.log1p(-w))
    return nats.astype(np.float32)


def mixture_distribution(
    probabilities: FloatArray, candidate: npt.NDArray[np.int64], weight: FloatArray
) -> FloatArray:
    """The whole mixed distribution at some positions, to hold the losses against.

    Args:
        probabilities: [positions, vocabulary] of the model, each row summing to 1.
        candidate: [positions] token ids, -1 where nothing matches.
        weight: [positions], read where there is a candidate.

    Returns:
        [positions, vocabulary].

    Raises:
        ValueError: if a row does not sum to 1 over the vocabulary.
    """
    w = np.where(candidate >= 0, weight, 0.0)
    mixed: FloatArray = (1 - w)[:, None] * probabilities
    matched = np.flatnonzero(candidate >= 0)
    mixed[matched, candidate[matched]] += w[matched]
    total = mixed.sum(axis=1)
    if not np.allclose(total, 1.0, rtol=0, atol=1e-6):
        raise ValueError(
            f"Probabilities must sum to 1 over the vocabulary; the mixture's sum to {total.min()} "
            f"to {total.max()}. Pass the model's probabilities, not its logits."
        )
    return mixed


def mix_run(
    run: Path, chunk_set: ChunkSet, fit_set: str, sets: Sequence[str]
) -> dict[str, Records]:
    """Fit the weights on one set, apply them to others, and write records to RUN/mixture/.

    Args:
        run: folder of an arm without a table, scored in the training format.
        chunk_set: the data it was scored on.
        fit_set: a development set; the weights see no other.
        sets: evaluation splits to apply them to.

    Returns:
        Set name -> records of the arm `NAME_mixture`.

    Raises:
        ValueError: if the arm has a table, a set was not scored, or `fit_set` is a confirmation
            split.
    """
    if chunk_set.is_confirmation(fit_set):
        raise ValueError(f"--fit_set must be a development set; {fit_set} is a confirmation split.")
    scores = {name: _scores(run, name, chunk_set) for name in dict.fromkeys([fit_set, *sets])}
    targets = {
        name: load_targets(chunk_set, name, True, found.header.registration)
        for name, found in scores.items()
    }
    weights = fit_weights(scores[fit_set], targets[fit_set].num_bytes > 0)
    found = {}
    for name in sets:
        header = scores[name].header
        mixed = replace(
            scores[name],
            header=replace(header, arm=f"{header.arm}_mixture", baseline=header.arm),
            nats=mixture_nats(scores[name], weights),
        )
        found[name] = make_records(mixed, targets[name])
        write_records(found[name], run / "mixture" / f"{header.file_stem}.parquet")
    listed = {"fit_set": fit_set, "weights": weights[1:].reshape(MAX_ORDER, NUM_BUCKETS).tolist()}
    (run / "mixture" / "weights.json").write_text(json.dumps(listed, indent=1) + "\n")
    return found


def _scores(run: Path, set_name: str, chunk_set: ChunkSet) -> Scores:
    for form in ("training", "packed"):
        path = run / "scores" / f"{set_name}.{form}.npz"
        if path.is_file():
            break
    else:
        raise ValueError(
            f"{run} must be scored on {set_name} in the training format; it is not. Run "
            "python -m evaluation.score first."
        )
    scores = read_scores(path)
    if scores.header.data_sha256 != chunk_set.fingerprint:
        raise ValueError(f"{path} was scored on another chunk set than {chunk_set.path}.")
    if scores.header.has_table:
        raise ValueError(
            f"The mixture is a rival of the learned table; {scores.header.arm} has one already. "
            "Give its baseline."
        )
    return scores


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evaluation.mixture", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="arms without a table")
    parser.add_argument("--chunk_set", type=Path, required=True, help="folder of the prepared data")
    parser.add_argument("--fit_set", default="dev_val", help="development set to fit on")
    parser.add_argument("--sets", nargs="+", required=True, help="splits to apply it to")
    return parser


def _run(arguments: argparse.Namespace) -> None:
    chunk_set = ChunkSet.open(arguments.chunk_set)
    for run in arguments.runs:
        for name, records in mix_run(run, chunk_set, arguments.fit_set, arguments.sets).items():
            bpb = records.sums.nats.sum() / (np.log(2) * records.sums.num_bytes.sum())
            print(f"{records.header.arm} s{records.header.seed} on {name}: {bpb:.5f} bpb")


def main(argv: Sequence[str] | None = None) -> int:
    """Mix the runs named on the command line; returns the exit status."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(command_line.normalise_flags(given))
    return command_line.run(partial(_run, arguments))


if __name__ == "__main__":
    sys.exit(main())
