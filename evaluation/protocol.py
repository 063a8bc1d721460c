"""Register contrasts before a confirmation set is opened, then confirm them (Section 3.6).

    python -m evaluation.protocol register DRAFT.yaml RUN... --chunk_set DIR --out registration.json
    python -m evaluation.protocol confirm registration.json RUN... --chunk_set DIR

`register` fixes contrasts with their signs, predictions, rules, checkpoints, set, format, bootstrap
and code, and refuses a contrast whose value could be known. `confirm` scores each checkpoint once
and says of each contrast whether it is confirmed, and whether its prediction held. A later arm gets
a registration of its own; its baseline may have been scored under an earlier one.
`example_registration.yaml` beside this file is the paper's own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from data_scripts import command_line
from data_scripts.chunk_set import ChunkSet
from evaluation.contrasts import Contrast, contrast
from evaluation.formats import EvaluationFormat
from evaluation.identity import code_sha256, git_commit
from evaluation.protocol_checks import (
    Arm,
    closed_sets,
    iso_time,
    notes_on,
    problems_of_draft,
    refuse_other_records,
    rule_arms,
    runs_by_arm,
    unaccounted,
    without_records,
)
from evaluation.records import Records, read_records
from evaluation.registration import (
    Ledger,
    Registration,
    content_sha256,
    now,
    read_registration,
    refusal,
)
from evaluation.rules import (
    FindContrast,
    RuleOutcome,
    Verdict,
    apply_rule,
    check_contrasts,
    check_parts,
    check_rules,
    judge,
)
from evaluation.score import score_runs

_DRAFT_FIELDS = {"title", "set_name", "format", "bootstrap", "contrasts", "rules", "also_scored"}
_OPTIONAL_FIELDS = {"rules", "also_scored"}


def register(draft: dict[str, Any], runs: Sequence[Path], chunk_set: ChunkSet) -> Registration:
    """Fix a draft: resolve checkpoints and predictions, hash, date, enter in the ledger.

    Args:
        draft: `example_registration.yaml`'s fields.
        runs: the finished run folders of every arm and seed in its contrasts.
        chunk_set: with the split `set_name`.

    Raises:
        ValueError: if the draft is incomplete, a run is missing, the split was scored outside of
            the ledger, or a contrast or rule compares two checkpoints that were scored already.
    """
    _check_draft(draft, chunk_set)
    checkpoints = runs_by_arm(runs)
    scored = {
        (entry[side], int(seed))
        for entry in draft["contrasts"]
        for side in ("arm", "baseline")
        for seed in entry["seeds"]
    }
    # Arms that no contrast names are described, not judged; they too are scored once.
    for arm, seeds in (draft.get("also_scored") or {}).items():
        scored |= {(arm, int(seed)) for seed in seeds}
    missing = sorted(f"{arm} (seed {seed})" for arm, seed in scored - set(checkpoints))
    if missing:
        raise ValueError(
            f"Every arm and seed of the draft must be given as a run; missing: "
            f"{', '.join(missing)}."
        )
    rules = draft.get("rules") or []
    read = {key for rule in rules for key in rule_arms(rule)} & set(checkpoints)
    refuse_other_records(runs, chunk_set)
    commit = git_commit()
    find = contrast_finder(
        {key: run.folder for key, run in checkpoints.items()}, draft["bootstrap"]
    )
    check_parts(rules, draft["format"], chunk_set.evaluation_splits(), find)
    content: dict[str, Any] = {
        **{name: draft[name] for name in ("title", "set_name", "format", "bootstrap")},
        "contrasts": [_with_bounds(entry, draft["format"], find) for entry in draft["contrasts"]],
        "rules": rules,
        "checkpoints": [
            {
                "arm": arm,
                "seed": seed,
                "sha256": checkpoints[arm, seed].checkpoint.sha256,
                "trained": checkpoints[arm, seed].trained,
                "scored": (arm, seed) in scored,
            }
            for arm, seed in sorted(scored | read)
        ],
        "data_sha256": chunk_set.fingerprint,
        "targets_sha256": chunk_set.target_sha256(draft["set_name"]),
        "code_sha256": code_sha256(),
        "git_commit": commit[0] if commit else None,
        "git_commit_date": iso_time(commit[1]) if commit else None,
    }
    ledger = Ledger(chunk_set.path)
    with ledger.locked():  # what it holds must not change between the checks and the entry
        problems = problems_of_draft(draft, scored, checkpoints, chunk_set, ledger)
        if problems:
            raise ValueError(f"This draft cannot be registered: {'; '.join(problems)}.")
        content |= {"date": now(), "previous": ledger.head}
        content["sha256"] = content_sha256(content)
        registration = Registration(content)
        ledger.append(
            "registered", registration.sha256, set_name=draft["set_name"], date=content["date"]
        )
    return registration


@dataclass(frozen=True)
class Confirmation:
    """What `confirm` found. `notes` say what an earlier registration had scored already."""

    registration: Registration
    verdicts: tuple[Verdict, ...]
    outcomes: tuple[RuleOutcome, ...]
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """For people."""
        content = self.registration.content
        lines = [
            f"{content['title']}",
            f"registered {content['date']}, {self.registration.sha256[:12]}; set "
            f"{content['set_name']}, {content['format']} format; intact",
        ]
        return "\n".join([*lines, *self.notes, *map(str, self.verdicts), *map(str, self.outcomes)])

    def to_json(self) -> str:
        """For the files of a study."""
        content = {
            "registration": self.registration.sha256,
            "contrasts": [
                {
                    "name": verdict.name,
                    "confirmed": verdict.confirmed,
                    "prediction_missed": verdict.prediction_missed,
                    "seeds": {
                        str(one.seed): {
                            "gain": one.gain,
                            "gain_interval": list(one.interval),
                            "bounds": one.bounds and list(one.bounds),
                        }
                        for one in verdict.seeds
                    },
                }
                for verdict in self.verdicts
            ],
            "rules": [vars(outcome) for outcome in self.outcomes],
            "notes": self.notes,
        }
        return json.dumps(content, indent=2) + "\n"


def confirm(registration: Registration, runs: Sequence[Path], chunk_set: ChunkSet) -> Confirmation:
    """Score the registered checkpoints, each once, and judge every contrast and rule.

    Args:
        registration: from `read_registration`.
        runs: folders that hold the registered checkpoints, one an arm and seed.
        chunk_set: the one registered.

    Raises:
        ValueError: if the registration or the ledger was tampered with, the split was scored
            outside of the ledger, or a checkpoint or its records are missing.
    """
    content = registration.content
    set_name = content["set_name"]
    ledger = Ledger(chunk_set.path)
    problems = registration.problems(ledger)
    checkpoints = runs_by_arm(runs)
    chosen: dict[str, Path] = {}
    for digest, key in registration.checkpoints.items():
        if key in checkpoints and checkpoints[key].checkpoint.sha256 == digest:
            chosen[digest] = checkpoints[key].folder
        else:
            problems.append(f"no run holds the registered checkpoint of {key[0]}, seed {key[1]}")
    to_score = registration.to_score(ledger)
    gate = registration if chunk_set.is_confirmation(set_name) else None
    if gate is not None:
        closed = closed_sets(content, chunk_set)
        problems += unaccounted(runs, closed, ledger, registration.sha256)
        scored = registration.scored_checkpoints.values()
        problems += without_records(scored, checkpoints, content, ledger, registration.sha256)
    if problems:
        raise ValueError(refusal(set_name, problems))
    refuse_other_records(runs, chunk_set)
    score_runs(
        [chosen[digest] for digest in to_score],
        chunk_set,
        [set_name],
        _format(content["format"]),
        registration=gate,
    )
    ledger = Ledger(chunk_set.path)
    if gate is not None:
        problems = unaccounted(list(chosen.values()), [set_name], ledger)
        if problems:
            raise ValueError(refusal(set_name, problems))
    # Registered checkpoints alone: a rule does not see what was trained later.
    find = contrast_finder(
        {registration.checkpoints[digest]: folder for digest, folder in chosen.items()},
        content["bootstrap"],
    )
    return Confirmation(
        registration,
        tuple(judge(entry, set_name, content["format"], find) for entry in content["contrasts"]),
        tuple(apply_rule(rule, content["format"], find) for rule in content["rules"]),
        tuple(notes_on(registration, ledger)),
    )


def contrast_finder(runs: Mapping[Arm, Path], bootstrap: dict[str, int]) -> FindContrast:
    """A function that pairs the records of two arms found in the runs' folders."""

    @cache
    def records(arm: str, seed: int, set_name: str, form: str) -> Records | None:
        run = runs.get((arm, seed))
        path = run and run / "records" / f"{set_name}.{form}.parquet"
        return read_records(path) if path and path.is_file() else None

    def find(arm: str, baseline: str, seed: int, set_name: str, form: str) -> Contrast | None:
        mine, theirs = (records(name, seed, set_name, form) for name in (arm, baseline))
        if mine is None or theirs is None:
            return None
        return contrast(mine, theirs, bootstrap["num_resamples"], bootstrap["seed"])

    return find


def _with_bounds(entry: dict[str, Any], form: str, find: FindContrast) -> dict[str, Any]:
    """A contrast with its prediction as numbers: seed -> lowest and highest value."""
    prediction = entry.get("prediction")
    if prediction is None:
        return entry
    bounds = {}
    for seed in entry["seeds"]:
        if "of" not in prediction:
            bounds[str(seed)] = [prediction["at_least"], prediction["at_most"]]
            continue
        found = find(entry["arm"], entry["baseline"], int(seed), prediction["of"], form)
        if found is None:
            raise ValueError(
                f"{entry['name']} predicts a value near that on {prediction['of']}; score "
                f"{entry['arm']} and {entry['baseline']}, seed {seed}, there first."
            )
        width = float(prediction["within"])
        bounds[str(seed)] = [found.gain - width, found.gain + width]
    return {**entry, "bounds": bounds}


def _check_draft(draft: dict[str, Any], chunk_set: ChunkSet) -> None:
    missing = sorted(_DRAFT_FIELDS - _OPTIONAL_FIELDS - set(draft))
    unknown = sorted(set(draft) - _DRAFT_FIELDS)
    if missing or unknown:
        raise ValueError(
            f"A draft must have the fields {', '.join(sorted(_DRAFT_FIELDS - _OPTIONAL_FIELDS))}, "
            f"and may have {', '.join(sorted(_OPTIONAL_FIELDS))}; missing {missing}, "
            f"unknown {unknown}."
        )
    also = draft.get("also_scored") or {}
    if not (isinstance(also, dict) and all(isinstance(seeds, list) for seeds in also.values())):
        raise ValueError(f"also_scored must be ARM: [SEEDS], as b_bigram: [44]; got {also!r}.")
    bootstrap = draft["bootstrap"]
    if (
        not isinstance(bootstrap, dict)
        or set(bootstrap) != {"num_resamples", "seed"}
        or not all(type(value) is int for value in bootstrap.values())
        or bootstrap["num_resamples"] < 1
        or bootstrap["seed"] < 0
    ):
        raise ValueError(
            "bootstrap must have num_resamples, 1 or more, and seed, 0 or more, both whole; got "
            f"{bootstrap!r}."
        )
    if draft["set_name"] not in chunk_set.evaluation_splits():
        raise ValueError(
            f"set_name must be an evaluation split of {chunk_set.path}; {draft['set_name']!r} is "
            f"not one of {', '.join(chunk_set.evaluation_splits())}."
        )
    _format(draft["format"])
    check_contrasts(draft["contrasts"])
    check_rules(draft.get("rules") or [])


def _format(name: str) -> EvaluationFormat:
    if name in ("training", "packed"):
        return EvaluationFormat()
    stride, _, reach = name.removeprefix("stride").partition("-")
    if not name.startswith("stride") or not stride.isdigit():
        raise ValueError(f"format must be training, packed or strideN-REACH; got {name!r}.")
    return EvaluationFormat(int(stride), reach)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evaluation.protocol", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    for name, first, what in (
        ("register", "draft", "YAML draft; example_registration.yaml is the paper's"),
        ("confirm", "registration", "JSON file that `register` wrote"),
    ):
        command = commands.add_parser(name, help=f"{name}: see above")
        command.add_argument(first, type=Path, help=what)
        command.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
        command.add_argument("--chunk_set", type=Path, required=True, help="the prepared data")
        command.add_argument(
            "--out", type=Path, required=name == "register", help="JSON file to write"
        )
    return parser


def _run_register(arguments: argparse.Namespace) -> None:
    if arguments.out.exists():
        raise ValueError(f"{arguments.out} exists. A registration is never overwritten.")
    try:
        draft = yaml.safe_load(arguments.draft.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{arguments.draft} must be a YAML file: {error}") from None
    if not isinstance(draft, dict):
        raise ValueError(f"{arguments.draft} must be a YAML mapping.")
    registration = register(draft, arguments.runs, ChunkSet.open(arguments.chunk_set))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(registration.content, indent=2) + "\n")
    print(
        f"registered {registration.sha256}\n{arguments.out}: commit it, or publish the hash, "
        "before you confirm"
    )


def _run_confirm(arguments: argparse.Namespace) -> None:
    registration = read_registration(arguments.registration)
    found = confirm(registration, arguments.runs, ChunkSet.open(arguments.chunk_set))
    if int(os.environ.get("RANK", "0")):
        return
    print(found.text)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(found.to_json())


def main(argv: Sequence[str] | None = None) -> int:
    """Register or confirm; returns the exit status."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(command_line.normalise_flags(given))
    runs: dict[str, Callable[[argparse.Namespace], None]] = {
        "register": _run_register,
        "confirm": _run_confirm,
    }
    return command_line.run(partial(runs[arguments.command], arguments))


if __name__ == "__main__":
    sys.exit(main())
