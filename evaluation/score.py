"""Score checkpoints on evaluation sets: per-target losses, and records made from them.

    python -m evaluation.score RUN... --chunk_set DIR --sets dev_val

Writes RUN/scores/SET.FORMAT.npz and RUN/records/SET.FORMAT.parquet. The default format is the
training format (Section 3.2): each full chunk is scored exactly as training sees it. With several
GPUs: accelerate launch --config_file accelerate_config.yaml -m evaluation.score RUN...
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from data_scripts import command_line
from data_scripts.chunk_set import ChunkSet
from evaluation.checkpoints import Checkpoint, open_checkpoint
from evaluation.formats import EvaluationFormat, TargetSet, load_targets
from evaluation.plans import check_fit, default_stride, make_header, row_plan
from evaluation.records import Records, RecordsHeader, read_header, read_records, write_records
from evaluation.registration import Ledger, Registration, read_registration
from evaluation.scores import make_records, read_scores_header, write_scores

if TYPE_CHECKING:
    from accelerate import Accelerator


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
    batch_size_tokens: int | None = None,
    registration: Registration | None = None,
) -> list[ScoredRun]:
    """Score every run on every set, reusing finished results with the same hashes.

    Under accelerate's launcher all processes call this together; each gets all results.

    Args:
        runs: run folders, or bare model folders.
        chunk_set: the prepared data.
        sets: names of evaluation splits.
        form: the evaluation format; the training format if None.
        ablated: give the model "no match" everywhere (Section 3.4).
        batch_size_tokens: inputs in one forward pass; by default what suits the device. At least
            one row is always scored.
        registration: what opens a confirmation split (Section 3.6).

    Raises:
        ValueError: for whatever does not fit together, before any model is loaded.
    """
    plain = form or EvaluationFormat()
    checkpoints = [open_checkpoint(run) for run in runs]
    jobs = []
    for name in sets:
        _check_set(name, chunk_set, registration)
        on_set = plain.on(chunk_set, name)
        for run, checkpoint in zip(runs, checkpoints, strict=True):
            check_fit(checkpoint, chunk_set, on_set, ablated)
            header = make_header(checkpoint, chunk_set, name, on_set, ablated)
            if registration is not None and chunk_set.is_confirmation(name):
                header = registration.authorise(header, chunk_set.path)
            jobs.append(_Job(run, checkpoint, header, on_set))
    from evaluation.scoring import make_accelerator  # torch takes seconds to import

    accelerator = make_accelerator()
    results: list[ScoredRun] = []
    loaded: tuple[tuple[str, bool], TargetSet] | None = None
    for job in jobs:
        if _is_finished(job.run, job.header) and _is_noted(job, chunk_set, registration):
            if accelerator.is_main_process:
                print(f"{job.checkpoint.arm} {job.header.file_stem}: reused {job.path}")
            results.append(ScoredRun(read_records(job.path), job.path, reused=True))
            accelerator.wait_for_everyone()
            continue
        key = (job.header.set_name, job.form.stride is None)
        if loaded is None or loaded[0] != key:
            opened = job.header.registration
            loaded = (key, load_targets(chunk_set, key[0], key[1], opened))
        _score_job(accelerator, job, loaded[1], chunk_set, batch_size_tokens, registration)
        results.append(ScoredRun(read_records(job.path), job.path, reused=False))
    return results


@dataclass(frozen=True)
class _Job:
    """One run on one set."""

    run: Path
    checkpoint: Checkpoint
    header: RecordsHeader
    form: EvaluationFormat

    @property
    def path(self) -> Path:
        """Of the records."""
        return self.run / "records" / f"{self.header.file_stem}.parquet"

    @property
    def scores_path(self) -> Path:
        """Of the scores."""
        return self.run / "scores" / f"{self.header.file_stem}.npz"

    @property
    def pieces(self) -> Path:
        """Folder of what has been scored so far."""
        return self.run / "scores" / f".partial_{self.header.file_stem}"


def _score_job(
    accelerator: Accelerator,
    job: _Job,
    targets: TargetSet,
    chunk_set: ChunkSet,
    batch_size_tokens: int | None,
    registration: Registration | None,
) -> None:
    """Score one run on one set and write both files."""
    registered = job.header.registration is not None and registration is not None
    if registered and accelerator.is_main_process:
        assert registration is not None
        registration.note_opened(job.header, chunk_set.path)
    accelerator.wait_for_everyone()
    plan = row_plan(job.checkpoint, chunk_set, job.header.ablated)
    from evaluation.scoring import score_targets

    scores = score_targets(
        accelerator,
        job.checkpoint,
        job.header,
        targets,
        job.form,
        plan,
        job.pieces,
        batch_size_tokens,
    )
    if scores is not None:
        records = make_records(scores, targets)
        # Records last: a records file says that its scores are complete.
        write_scores(scores, job.scores_path)
        write_records(records, job.path)
        shutil.rmtree(job.pieces, ignore_errors=True)
        if registered:
            assert registration is not None
            registration.note_scored(records, chunk_set.path)
    accelerator.wait_for_everyone()


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


def _is_noted(job: _Job, chunk_set: ChunkSet, registration: Registration | None) -> bool:
    """Whether the ledger knows the scoring of a registered job; a kill may have come between."""
    if job.header.registration is None or registration is None:
        return True
    return bool(Ledger(chunk_set.path).scored(registration.sha256, job.header.checkpoint_sha256))


def _check_set(name: str, chunk_set: ChunkSet, registration: Registration | None) -> None:
    if name not in chunk_set.evaluation_splits():
        raise ValueError(
            f"--sets must name evaluation splits of {chunk_set.path}; {name!r} is not one of "
            f"{', '.join(chunk_set.evaluation_splits())}."
        )
    if chunk_set.is_confirmation(name) and registration is None:
        raise ValueError(
            f"{name} is a confirmation split: it is scored once, after its contrasts were "
            "registered (Section 3.6). Register them with `python -m evaluation.protocol "
            "register`, then `confirm`."
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.score",
        description="Score checkpoints on held-out documents. Writes RUN/scores/SET.FORMAT.npz "
        "(one loss a target) and RUN/records/SET.FORMAT.parquet (sums by document and class); "
        "python -m evaluation.report turns records into tables. Finished results are reused.",
        epilog="Example: python -m evaluation.score demo/runs/b demo/runs/b_table "
        "--chunk_set demo/chunk_set --sets dev_val",
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
        "--batch_size_tokens",
        type=int,
        help="inputs in one forward pass; default: what suits the device",
    )
    parser.add_argument(
        "--registration",
        type=Path,
        help="what opens a confirmation split: a file from python -m evaluation.protocol register",
    )
    return parser


def _formats(arguments: argparse.Namespace, run: Path, chunk_set: ChunkSet) -> EvaluationFormat:
    if arguments.format == "training":
        if arguments.stride is not None or arguments.reach is not None:
            raise ValueError("--stride and --reach belong to --format stride.")
        return EvaluationFormat()
    stride = arguments.stride
    if stride is None:
        stride = default_stride(open_checkpoint(run), chunk_set)
    return EvaluationFormat(stride, arguments.reach or "chunk")


def _run(arguments: argparse.Namespace) -> None:
    if arguments.batch_size_tokens is not None and arguments.batch_size_tokens < 1:
        raise ValueError("--batch_size_tokens must be at least 1.")
    chunk_set = ChunkSet.open(arguments.chunk_set)
    registration = None
    if arguments.registration is not None:
        registration = read_registration(arguments.registration)
    forms: dict[EvaluationFormat, list[Path]] = {}
    for run in arguments.runs:
        forms.setdefault(_formats(arguments, run, chunk_set), []).append(run)
    for form, runs in forms.items():
        score_runs(
            runs,
            chunk_set,
            arguments.sets,
            form,
            ablated=arguments.ablate_table,
            batch_size_tokens=arguments.batch_size_tokens,
            registration=registration,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Score the runs named on the command line; returns the exit status."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(command_line.normalise_flags(given))
    return command_line.run(partial(_run, arguments))


if __name__ == "__main__":
    sys.exit(main())
