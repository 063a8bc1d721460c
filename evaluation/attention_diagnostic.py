"""How much attention a copy gets from its source: the largest weight on the induction key (4.4).

    python -m evaluation.attention_diagnostic RUN... --chunk_set DIR --set dev_val

For every copy whose source the row shows, the largest weight that any head of any layer puts, from
the position that predicts the target, on the induction key: the position after the source's
context, which holds the target's earlier occurrence. On the first chunk of the first 40 documents,
averaged by distance band, beside the mean loss of the same targets; for an arm with a table also
with the table ablated. Writes RUN/attention/SET.json, with the learned query gains, for the report.
A measurement of attention weights, not a circuit analysis.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from data_scripts import command_line
from data_scripts.chunk_set import ChunkSet
from evaluation.attention import BandMeans, Diagnosis, diagnosis_table
from evaluation.checkpoints import load_model, open_checkpoint
from evaluation.class_bpb.statistics import BAND_NAMES, band_ends
from evaluation.formats import EvaluationFormat, RowBatch, TargetSet, iter_rows, load_targets
from evaluation.plans import check_fit, row_plan
from evaluation.scoring import batch_nats

NUM_DOCUMENTS = 40
_NAME = "doctab_induction_weights"
_QUERY_BLOCK = 512  # queries whose weights exist at once: [heads, 512, row_length]


class _Recorder:
    """The queries and keys to watch in the batch at hand, and the largest weight of each pair."""

    def __init__(self) -> None:
        self.row = self.query = self.key = torch.zeros(0, dtype=torch.long)
        self.largest = torch.zeros(0)

    def watch(self, row: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
        """Watch pairs, each [pairs]; the weights of all layers of the next pass are maximised."""
        self.row, self.query, self.key = row, query, key
        self.largest = torch.zeros(len(row), device=row.device)

    def record(self, weights: torch.Tensor, first: int) -> None:
        """Take in the weights [rows, heads, queries, keys] of queries first, first + 1, .."""
        chosen = (self.query >= first) & (self.query < first + weights.shape[2])
        found = weights[self.row[chosen], :, self.query[chosen] - first, self.key[chosen]].amax(
            dim=1
        )
        self.largest[chosen] = torch.maximum(self.largest[chosen], found.float())


_RECORDER = _Recorder()


def induction_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Plain attention, some queries at a time, that shows its weights to the recorder.

    Args:
        module: the attention module; unused.
        query: [rows, heads, length, head_dim].
        key: [rows, key heads, length, head_dim].
        value: as `key`.
        attention_mask: [rows or 1, 1, length, length] additive, with the layer's window.
        scaling: of the scores; 1 / sqrt(head_dim) by default.
        dropout: not used: this is for evaluation.
        **kwargs: of other implementations.

    Returns:
        [rows, length, heads, head_dim], and no weights.
    """
    if attention_mask is None:
        raise ValueError("The diagnostic needs the model's attention mask; it got none.")
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    outputs = []
    for first in range(0, query.shape[2], _QUERY_BLOCK):
        part = slice(first, first + _QUERY_BLOCK)
        scores = query[:, :, part] @ key.transpose(2, 3) * scale + attention_mask[:, :, part]
        weights = torch.softmax(scores, -1, dtype=torch.float32)
        _RECORDER.record(weights, first)
        outputs.append(weights.to(value.dtype) @ value)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


@contextmanager
def _registered() -> Iterator[None]:
    """The implementation under its name in transformers' tables."""
    ALL_ATTENTION_FUNCTIONS.register(_NAME, induction_attention_forward)
    AttentionMaskInterface.register(_NAME, eager_mask)
    yield


def diagnose(
    run: Path, chunk_set: ChunkSet, split: str, num_documents: int = NUM_DOCUMENTS
) -> Diagnosis:
    """Measure one arm, and the same model with its table ablated if it has one.

    Args:
        run: run or model folder.
        chunk_set: the prepared data.
        split: an evaluation split, not a confirmation one.
        num_documents: first documents to look into, the first chunk of each.

    Raises:
        ValueError: if the arm does not fit the set, or the split is a confirmation one.
    """
    if chunk_set.is_confirmation(split):
        raise ValueError(f"{split} is a confirmation split: it is opened by `confirm` alone.")
    checkpoint = open_checkpoint(run)
    form = EvaluationFormat().on(chunk_set, split)
    check_fit(checkpoint, chunk_set, form, ablated=False)
    targets = load_targets(chunk_set, split, full_chunks=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = load_model(checkpoint, device)
    chunks = _first_chunks(targets, chunk_set.chunk_length, num_documents)

    def measure(ablated: bool) -> BandMeans:
        plan = row_plan(checkpoint, chunk_set, ablated)
        batches = iter_rows(targets, form, plan, chunk_set.chunk_length, chunks)
        found = [_watch(model, batch, targets, checkpoint.has_table, device) for batch in batches]
        weight, nats, distance = map(np.concatenate, zip(*found, strict=True))
        return _by_band(weight, nats, distance, chunk_set.chunk_length)

    with _registered():
        model.set_attn_implementation(_NAME)
        whole = measure(ablated=False)
        ablated = measure(ablated=True) if checkpoint.has_table else None
    parameters = model.named_parameters()
    return Diagnosis(
        arm=checkpoint.arm,
        seed=checkpoint.seed,
        set_name=split,
        num_documents=len(chunks),
        chunk_length=chunk_set.chunk_length,
        checkpoint_sha256=checkpoint.sha256,
        data_sha256=chunk_set.fingerprint,
        whole=whole,
        ablated=ablated,
        query_gains=[gain.tolist() for name, gain in parameters if name.endswith("query_gain")],
    )


def _watch(
    model: torch.nn.Module,
    batch: RowBatch,
    targets: TargetSet,
    has_table: bool,
    device: torch.device,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Largest weight, loss and distance of a batch's watched copies, each [pairs]."""
    row, slot, distance = watched_copies(batch, targets)
    pairs = (row, slot, slot - distance + 1)
    _RECORDER.watch(*(torch.from_numpy(pair).to(device) for pair in pairs))
    losses = batch_nats(model, batch, has_table, device)
    return _RECORDER.largest.cpu().numpy(), losses[row, slot], distance


def watched_copies(
    batch: RowBatch, targets: TargetSet
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row, slot and distance of the copies (order >= 2) whose source the row shows, each [pairs].

    The source of a target at slot t stands at slot t - distance + 1, which must be 1 or later.
    """
    row, slot = np.nonzero(batch.target_index >= 0)
    place = batch.target_index[row, slot]
    distance = targets.distance[place].astype(np.int64)
    chosen = (targets.order[place] >= 2) & (distance <= slot)
    return row[chosen], slot[chosen], distance[chosen]


def _first_chunks(
    targets: TargetSet, chunk_length: int, num_documents: int
) -> npt.NDArray[np.int64]:
    chunks: npt.NDArray[np.int64] = targets.document_starts[:-1][:num_documents] // chunk_length
    return chunks


def _by_band(
    weight: npt.NDArray[np.float32],
    nats: npt.NDArray[np.float32],
    distance: npt.NDArray[np.int64],
    chunk_length: int,
) -> BandMeans:
    band = np.searchsorted(band_ends(chunk_length), distance)
    counts = np.bincount(band, minlength=len(BAND_NAMES))

    def means(values: npt.NDArray[np.float32]) -> dict[str, float]:
        sums = np.bincount(band, values.astype(np.float64), len(BAND_NAMES))
        mean = np.full(len(BAND_NAMES), np.nan)
        np.divide(sums, counts, out=mean, where=counts > 0)
        return dict(zip(BAND_NAMES, mean.tolist(), strict=True))

    numbers = dict(zip(BAND_NAMES, counts.tolist(), strict=True))
    return BandMeans(means(weight), means(nats), numbers)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.attention_diagnostic", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run or model folders")
    parser.add_argument("--chunk_set", type=Path, required=True, help="folder of the prepared data")
    parser.add_argument("--set", dest="split", default="dev_val", help="evaluation split")
    parser.add_argument("--num_documents", type=int, default=NUM_DOCUMENTS, help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="also all runs in one JSON file")
    return parser


def _run(arguments: argparse.Namespace) -> None:
    if arguments.num_documents < 1:
        raise ValueError("--num_documents must be at least 1.")
    chunk_set = ChunkSet.open(arguments.chunk_set)
    found = []
    for run in arguments.runs:
        found.append(diagnose(run, chunk_set, arguments.split, arguments.num_documents))
        found[-1].write(run)
    print(diagnosis_table(found).to_markdown())
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        content = [one.to_json() for one in found]
        arguments.out.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Diagnose the runs named on the command line; returns the exit status."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(command_line.normalise_flags(given))
    return command_line.run(partial(_run, arguments))


if __name__ == "__main__":
    sys.exit(main())
