"""Score checkpoints on evaluation sets: per-target losses, and records made from them.

    python -m evaluation.score RUN... --chunk_set DIR --sets dev_val

Writes RUN/scores/SET.FORMAT.npz and RUN/records/SET.FORMAT.parquet. The default format is the
training format (Section 3.2): each full chunk is scored exactly as training sees it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from tqdm import tqdm

from data_scripts import command_line
from data_scripts.chunk_set import ChunkSet
from evaluation.checkpoints import Checkpoint, load_model, open_checkpoint
from evaluation.formats import (
    EvaluationFormat,
    RowBatch,
    RowPlan,
    TargetSet,
    iter_rows,
    load_targets,
)
from evaluation.records import Records, RecordsHeader, read_header, read_records, write_records
from evaluation.scores import Scores, make_records, read_scores_header, write_scores


@dataclass(frozen=True)
class ScoredRun:
    """The outcome for one run and set: its records, and whether finished ones were reused."""

    records: Records
    path: Path
    reused: bool


def score_runs(
    runs: Sequence[Path],
    chunk_set: ChunkSet,
    sets: Sequence[str],
    form: EvaluationFormat | None = None,
    ablated: bool = False,
    batch_size_tokens: int = 8192,
) -> list[ScoredRun]:
    """Score every run on every set, reusing finished results with the same hashes.

    Args:
        runs: run folders, or bare model folders.
        chunk_set: the prepared data.
        sets: names of evaluation splits.
        form: the evaluation format; the training format if None.
        ablated: give the model "no match" everywhere (Section 3.4).
        batch_size_tokens: inputs in one forward pass; at least one row is always scored.

    Raises:
        ValueError: for whatever does not fit together, before any model is loaded.
    """
    form = form or EvaluationFormat()
    checkpoints = [open_checkpoint(run) for run in runs]
    for checkpoint in checkpoints:
        _check_fit(checkpoint, chunk_set, form, ablated)
    for name in sets:
        _check_set(name, chunk_set)
    results = []
    for name in sets:
        targets = None
        for run, checkpoint in zip(runs, checkpoints, strict=True):
            header = _header(checkpoint, chunk_set, name, form, ablated)
            path = run / "records" / f"{header.file_stem}.parquet"
            if _is_finished(run, header):
                print(f"{checkpoint.arm} {header.file_stem}: reused {path}")
                results.append(ScoredRun(read_records(path), path, reused=True))
                continue
            if targets is None:
                targets = load_targets(chunk_set, name, full_chunks=form.stride is None)
            plan = _row_plan(checkpoint, chunk_set, ablated)
            scores = score_targets(checkpoint, header, targets, form, plan, batch_size_tokens)
            records = make_records(scores, targets)
            # Records last: a records file says that its scores are complete.
            write_scores(scores, run / "scores" / f"{header.file_stem}.npz")
            write_records(records, path)
            results.append(ScoredRun(records, path, reused=False))
    return results


def score_targets(
    checkpoint: Checkpoint,
    header: RecordsHeader,
    targets: TargetSet,
    form: EvaluationFormat,
    plan: RowPlan,
    batch_size_tokens: int,
) -> Scores:
    """Run a model over all rows of a target set and gather one loss a target."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(checkpoint, device)
    scores = Scores.empty(header, len(targets.tokens))
    title = f"{header.label} {header.set_name}.{header.format}"
    with tqdm(total=len(targets.tokens), desc=title, unit="tok", unit_scale=True) as progress:
        for batch in iter_rows(targets, form, plan, batch_size_tokens):
            nats = batch_nats(model, batch, checkpoint.has_table, device)
            progress.update(_fill(scores, batch, nats))
    return scores


def batch_nats(
    model: torch.nn.Module, batch: RowBatch, has_table: bool, device: torch.device
) -> np.ndarray:
    """Losses of one batch: [rows, row_length] float32, 0 where a position scores no target."""
    fields = {name: torch.from_numpy(array).to(device) for name, array in batch.table.items()}
    with torch.inference_mode():
        output = model(
            input_ids=torch.from_numpy(batch.input_ids).to(device),
            use_cache=False,
            **(fields if has_table else {}),
        )
        labels = torch.from_numpy(batch.shift_labels).to(device)
        losses = functional.cross_entropy(
            output.logits.float().flatten(0, 1), labels.flatten(), reduction="none"
        )
    return losses.view(labels.shape).cpu().numpy()


def _fill(scores: Scores, batch: RowBatch, nats: np.ndarray) -> int:
    """Put a batch's results in their targets' places; return how many targets it scored."""
    scored = batch.target_index >= 0
    place = batch.target_index[scored]
    order = batch.table["table_order"]
    right = (order > 0) & (batch.table["table_candidate"] == batch.shift_labels)
    scores.nats[place] = nats[scored]
    scores.table_order[place] = order[scored]
    scores.table_right[place] = right[scored]
    scores.table_distance[place] = batch.table["table_distance"][scored]
    scores.slot[place] = np.nonzero(scored)[1]
    return len(place)


def _header(
    checkpoint: Checkpoint,
    chunk_set: ChunkSet,
    set_name: str,
    form: EvaluationFormat,
    ablated: bool,
) -> RecordsHeader:
    return RecordsHeader(
        arm=checkpoint.arm,
        seed=checkpoint.seed,
        baseline=checkpoint.baseline,
        set_name=set_name,
        format=form.name,
        ablated=ablated,
        reach=form.reach,
        has_table=checkpoint.has_table,
        table_source=checkpoint.table.source,
        table_orders=checkpoint.table.orders,
        chunk_length=chunk_set.chunk_length,
        row_length=_row_plan(checkpoint, chunk_set, ablated).row_length,
        checkpoint_sha256=checkpoint.sha256,
        data_sha256=chunk_set.fingerprint,
        targets_sha256=chunk_set.target_sha256(set_name),
        document_ids=tuple(chunk_set.documents(set_name).ids),
    )


def _row_plan(checkpoint: Checkpoint, chunk_set: ChunkSet, ablated: bool) -> RowPlan:
    return RowPlan(
        row_length=min(checkpoint.row_length, chunk_set.chunk_length),
        chunk_length=chunk_set.chunk_length,
        bos_token_id=chunk_set.bos_token_id,
        table=checkpoint.table,
        ablated=ablated,
    )


def _is_finished(run: Path, header: RecordsHeader) -> bool:
    """Whether scores and records of exactly this header are there."""
    files = {
        run / "records" / f"{header.file_stem}.parquet": read_header,
        run / "scores" / f"{header.file_stem}.npz": read_scores_header,
    }
    if not all(file.is_file() for file in files):
        return False
    try:
        return all(read(file) == header for file, read in files.items())
    except ValueError:  # written by another version, or damaged: score again
        return False


def _check_fit(
    checkpoint: Checkpoint, chunk_set: ChunkSet, form: EvaluationFormat, ablated: bool
) -> None:
    length = chunk_set.chunk_length
    if checkpoint.has_table and checkpoint.table_reach != length:
        raise ValueError(
            f"{checkpoint.arm}'s table reaches {checkpoint.table_reach} tokens, but the chunks of "
            f"{chunk_set.path} have {length}. Score it on chunks of the length it was trained on."
        )
    row_length = _row_plan(checkpoint, chunk_set, ablated).row_length
    if length % row_length:
        raise ValueError(
            f"The row length must divide the chunk length; got {row_length} "
            f"({checkpoint.arm}) and {length}."
        )
    if ablated and not checkpoint.has_table:
        raise ValueError(f"{checkpoint.arm} has no table to ablate. Leave it out.")
    if form.stride is None:
        return
    if form.stride > row_length:
        raise ValueError(
            f"--stride must be at most the row length; got {form.stride} and {row_length} "
            f"({checkpoint.arm}). Larger strides would leave targets out."
        )
    if checkpoint.table.source != "document":
        raise ValueError(
            f"{checkpoint.arm} has {checkpoint.table.source} table fields, which are made for "
            "chunks: it can be scored in the training format alone."
        )


def _check_set(name: str, chunk_set: ChunkSet) -> None:
    if name not in chunk_set.evaluation_splits():
        raise ValueError(
            f"--sets must name evaluation splits of {chunk_set.path}; {name!r} is not one of "
            f"{', '.join(chunk_set.evaluation_splits())}."
        )
    if chunk_set.is_confirmation(name):
        raise ValueError(
            f"{name} is a confirmation split: it is scored once, after its contrasts were "
            "registered (Section 3.6), and never by this command."
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.score",
        description="Score checkpoints on held-out documents. Writes RUN/scores/SET.FORMAT.npz "
        "(one loss a target) and RUN/records/SET.FORMAT.parquet (sums by document and class); "
        "python -m evaluation.report turns records into tables. Finished results are reused.",
        epilog="Example: python -m evaluation.score demo/runs/b demo/runs/b_table "
        "--chunk_set demo/chunk_set --sets held_out",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run or model folders")
    parser.add_argument("--chunk_set", type=Path, required=True, help="folder of the prepared data")
    parser.add_argument("--sets", nargs="+", required=True, help="evaluation splits to score")
    parser.add_argument(
        "--format",
        choices=("training", "stride"),
        default="training",
        help="training: full chunks as training sees them (default); stride: overlapping windows",
    )
    parser.add_argument("--stride", type=int, help="targets between windows; default half a row")
    parser.add_argument(
        "--reach",
        choices=("chunk", "window"),
        help="stride only: what the table searches, the training chunk (default) or the window",
    )
    parser.add_argument(
        "--ablate_table", action="store_true", help='give the model "no match" at every position'
    )
    parser.add_argument(
        "--batch_size_tokens", type=int, default=8192, help="inputs in one forward pass"
    )
    return parser


def _formats(arguments: argparse.Namespace, run: Path) -> EvaluationFormat:
    if arguments.format == "training":
        if arguments.stride is not None or arguments.reach is not None:
            raise ValueError("--stride and --reach belong to --format stride.")
        return EvaluationFormat()
    stride = arguments.stride
    if stride is None:
        stride = max(1, open_checkpoint(run).row_length // 2)
    return EvaluationFormat(stride, arguments.reach or "chunk")


def _run(arguments: argparse.Namespace) -> None:
    if arguments.batch_size_tokens < 1:
        raise ValueError("--batch_size_tokens must be at least 1.")
    chunk_set = ChunkSet.open(arguments.chunk_set)
    forms: dict[EvaluationFormat, list[Path]] = {}
    for run in arguments.runs:
        forms.setdefault(_formats(arguments, run), []).append(run)
    for form, runs in forms.items():
        score_runs(
            runs,
            chunk_set,
            arguments.sets,
            form,
            ablated=arguments.ablate_table,
            batch_size_tokens=arguments.batch_size_tokens,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Score the runs named on the command line; returns the exit status."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(command_line.normalise_flags(given))
    return command_line.run(partial(_run, arguments))


if __name__ == "__main__":
    sys.exit(main())
