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
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from data_scripts import command_line
from data_scripts.chunk_set import ChunkSet
from evaluation.checkpoints import Checkpoint, open_checkpoint
from evaluation.contrasts import Contrast, contrast
from evaluation.formats import EvaluationFormat
from evaluation.identity import code_sha256, git_commit, refuse_stale
from evaluation.records import Records, read_header, read_records
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
    checkpoints = _by_arm(runs)
    needed = {
        (entry[side], int(seed))
        for entry in draft["contrasts"]
        for side in ("arm", "baseline")
        for seed in entry["seeds"]
    }
    # Arms that no contrast names are described, not judged; they too are scored once.
    for arm, seeds in (draft.get("also_scored") or {}).items():
        needed |= {(arm, int(seed)) for seed in seeds}
    missing = sorted(f"{arm} (seed {seed})" for arm, seed in needed - set(checkpoints))
    if missing:
        raise ValueError(
            f"Every arm and seed of the draft must be given as a run; missing: "
            f"{', '.join(missing)}."
        )
    ledger = Ledger(chunk_set.path)
    scored_under: dict[tuple[str, int], str] = {}
    if chunk_set.is_confirmation(draft["set_name"]):
        scored_under = _scored_before(checkpoints, draft["set_name"], ledger)
        problems = [*ledger.problems(), *_scored_outside(runs, draft["set_name"], ledger)]
        problems += _known_already(draft, scored_under)
        problems += _missing_records(draft, needed, checkpoints, scored_under)
        if problems:
            raise ValueError(refusal(draft["set_name"], problems))
    _refuse_other_records(runs, chunk_set)
    commit = git_commit()
    find = contrast_finder(runs, draft["bootstrap"])
    check_parts(draft.get("rules") or [], chunk_set.evaluation_splits(), find)
    content: dict[str, Any] = {
        **{name: draft[name] for name in ("title", "set_name", "format", "bootstrap")},
        "contrasts": [_with_bounds(entry, draft["format"], find) for entry in draft["contrasts"]],
        "rules": draft.get("rules") or [],
        "checkpoints": [
            {
                "arm": arm,
                "seed": seed,
                "sha256": checkpoints[arm, seed].checkpoint.sha256,
                "trained": checkpoints[arm, seed].trained,
                "scored_under": scored_under.get((arm, seed)),
            }
            for arm, seed in sorted(needed)
        ],
        "data_sha256": chunk_set.fingerprint,
        "targets_sha256": chunk_set.target_sha256(draft["set_name"]),
        "code_sha256": code_sha256(),
        "git_commit": commit[0] if commit else None,
        "git_commit_date": _iso(commit[1]) if commit else None,
        "date": now(),
        "previous": ledger.head,
    }
    content["sha256"] = content_sha256(content)
    registration = Registration(content)
    ledger.append(
        "registered", registration.sha256, set_name=draft["set_name"], date=content["date"]
    )
    return registration


@dataclass(frozen=True)
class Confirmation:
    """What `confirm` found."""

    registration: Registration
    verdicts: tuple[Verdict, ...]
    outcomes: tuple[RuleOutcome, ...]

    @property
    def text(self) -> str:
        """For people."""
        content = self.registration.content
        lines = [
            f"{content['title']}",
            f"registered {content['date']}, {self.registration.sha256[:12]}; set "
            f"{content['set_name']}, {content['format']} format; intact",
        ]
        earlier: dict[str, list[str]] = {}
        for entry in content["checkpoints"]:
            if entry.get("scored_under"):
                name = f"{entry['arm']} (seed {entry['seed']})"
                earlier.setdefault(entry["scored_under"], []).append(name)
        for digest, names in earlier.items():
            lines.append(f"scored before, under the registration {digest[:12]}: {', '.join(names)}")
        return "\n".join([*lines, *map(str, self.verdicts), *map(str, self.outcomes)])

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
        }
        return json.dumps(content, indent=2) + "\n"


def confirm(registration: Registration, runs: Sequence[Path], chunk_set: ChunkSet) -> Confirmation:
    """Score the registered checkpoints, each once, and judge every contrast and rule.

    Args:
        registration: from `read_registration`.
        runs: folders that hold the registered checkpoints; more are read by the rules.
        chunk_set: the one registered.

    Raises:
        ValueError: if the registration or the ledger was tampered with, the split was scored
            outside of it, or a checkpoint is missing.
    """
    content = registration.content
    set_name = content["set_name"]
    ledger = Ledger(chunk_set.path)
    problems = registration.problems(ledger)
    gate = registration if chunk_set.is_confirmation(set_name) else None
    if gate is not None:
        problems += _scored_outside(runs, set_name, ledger, registration)
    opened = {run: open_checkpoint(run) for run in runs}
    by_hash = {checkpoint.sha256: run for run, checkpoint in opened.items()}
    for digest, (arm, seed) in registration.checkpoints.items():
        if digest not in by_hash:
            problems.append(f"no run holds the registered checkpoint of {arm}, seed {seed}")
    if problems:
        raise ValueError(refusal(set_name, problems))
    _refuse_other_records(runs, chunk_set)
    chosen = [by_hash[digest] for digest in registration.to_score]
    scored = score_runs(
        chosen, chunk_set, [set_name], _format(content["format"]), registration=gate
    )
    problems = _check_scored(registration, Ledger(chunk_set.path), [one.records for one in scored])
    if problems and gate is not None:
        raise ValueError(refusal(set_name, problems))
    find = contrast_finder(runs, content["bootstrap"])
    return Confirmation(
        registration,
        tuple(judge(entry, set_name, content["format"], find) for entry in content["contrasts"]),
        tuple(apply_rule(rule, content["format"], find) for rule in content["rules"]),
    )


def _refuse_other_records(runs: Sequence[Path], chunk_set: ChunkSet) -> None:
    """Refuse records that are not of the run's checkpoint, or not of this chunk set.

    Predictions and rules read the records of the development sets.

    Raises:
        ValueError: naming the file.
    """
    for run in runs:
        checkpoint = open_checkpoint(run).sha256
        for file in sorted((run / "records").glob("*.parquet")):
            header = read_header(file)
            refuse_stale(file, header.checkpoint_sha256, run, checkpoint)
            on_other_data = header.data_sha256 != chunk_set.fingerprint
            if header.set_name in chunk_set.evaluation_splits() and on_other_data:
                raise ValueError(
                    f"{file} is of another chunk set than {chunk_set.path} "
                    f"({header.data_sha256[:12]}, not {chunk_set.fingerprint[:12]}). Score it "
                    "again."
                )


def contrast_finder(runs: Sequence[Path], bootstrap: dict[str, int]) -> FindContrast:
    """A function that pairs the records of two arms found in the runs' folders."""

    @cache
    def records(arm: str, seed: int, set_name: str, form: str) -> Records | None:
        for run in runs:
            path = run / "records" / f"{set_name}.{form}.parquet"
            if path.is_file() and _arm_of(run) == (arm, seed):
                return read_records(path)
        return None

    def find(arm: str, baseline: str, seed: int, set_name: str, form: str) -> Contrast | None:
        mine, theirs = (records(name, seed, set_name, form) for name in (arm, baseline))
        if mine is None or theirs is None:
            return None
        return contrast(mine, theirs, bootstrap["num_resamples"], bootstrap["seed"])

    return find


@dataclass(frozen=True)
class _RegisteredRun:
    run: Path
    checkpoint: Checkpoint
    trained: str | None


def _by_arm(runs: Sequence[Path]) -> dict[tuple[str, int], _RegisteredRun]:
    found: dict[tuple[str, int], _RegisteredRun] = {}
    for run in runs:
        checkpoint = open_checkpoint(run)
        key = (checkpoint.arm, checkpoint.seed)
        if key in found:
            raise ValueError(f"There must be one run of {key[0]}, seed {key[1]}; found two.")
        found[key] = _RegisteredRun(run, checkpoint, _trained(run))
    return found


def _trained(run: Path) -> str | None:
    """When a run's training began, a time that its registration cannot precede."""
    file = run / "results.json"
    started = json.loads(file.read_text()).get("started") if file.is_file() else None
    return None if started is None else _iso(datetime.fromisoformat(started).timestamp())


@cache
def _arm_of(run: Path) -> tuple[str, int]:
    checkpoint = open_checkpoint(run)
    return checkpoint.arm, checkpoint.seed


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


def _scored_outside(
    runs: Sequence[Path], set_name: str, ledger: Ledger, registration: Registration | None = None
) -> list[str]:
    """Scores and records of the set that the ledger does not account for.

    Records of `registration` itself are left to `_check_scored`.
    """
    found = []
    for run in runs:
        files = sorted((run / "records").glob(f"{set_name}.*.parquet"))
        for file in files:
            records = read_records(file)
            header = records.header
            name = f"{header.label}, seed {header.seed}"
            if header.set_name != set_name:
                continue
            if header.registration is None:
                found.append(f"{name}, was scored on it without one")
            elif registration is None or header.registration != registration.sha256:
                noted = ledger.scored(header.registration, header.checkpoint_sha256)
                if not noted:
                    found.append(
                        f"{name}, was scored on it under the registration "
                        f"{header.registration[:12]}, but the ledger does not know of it"
                    )
                elif noted != [records.sha256]:
                    found.append(f"the records of {name} were changed after they were scored")
        # A cut scoring leaves scores without records; before a registration there is none to go on.
        if registration is None and not files and list((run / "scores").glob(f"{set_name}.*.npz")):
            found.append(f"{run.name} holds scores of it without records")
    return found


def _scored_before(
    checkpoints: Mapping[tuple[str, int], _RegisteredRun], set_name: str, ledger: Ledger
) -> dict[tuple[str, int], str]:
    """Arm and seed -> the registration that opened the set for that checkpoint."""
    opened = {
        event["checkpoint_sha256"]: event["registration"]
        for event in ledger.of("opened")
        if event["set_name"] == set_name
    }
    return {
        key: opened[run.checkpoint.sha256]
        for key, run in checkpoints.items()
        if run.checkpoint.sha256 in opened
    }


def _missing_records(
    draft: dict[str, Any],
    needed: Set[tuple[str, int]],
    checkpoints: Mapping[tuple[str, int], _RegisteredRun],
    scored_under: Mapping[tuple[str, int], str],
) -> list[str]:
    """Baselines that an earlier registration opened the set for, without records."""
    name = f"{draft['set_name']}.{draft['format']}.parquet"
    return [
        f"the records of {arm}, seed {seed}, which the registration "
        f"{scored_under[arm, seed][:12]} opened it for, are missing: put them back, or confirm "
        "that registration again if it was cut"
        for arm, seed in sorted(needed & scored_under.keys())
        if not (checkpoints[arm, seed].run / "records" / name).is_file()
    ]


def _known_already(draft: dict[str, Any], scored_under: Mapping[tuple[str, int], str]) -> list[str]:
    """What a draft claims or asks for although its outcome could be known."""
    set_name, form = draft["set_name"], draft["format"]
    pairs = [(f"contrast {one['name']!r}", one, one["seeds"]) for one in draft["contrasts"]]
    pairs += [
        (f"rule {rule['name']!r}", rule["gain"], rule["seeds"])
        for rule in draft.get("rules") or []
        if set_name in rule["sets"] and rule.get("format", form) == form
    ]
    found = [
        f"{what} compares {pair['arm']} and {pair['baseline']}, seed {seed}, which were both "
        "scored on it before"
        for what, pair, seeds in pairs
        for seed in seeds
        if {(pair["arm"], int(seed)), (pair["baseline"], int(seed))} <= set(scored_under)
    ]
    found += [
        f"also_scored has {arm}, seed {seed}, which was scored on it before"
        for arm, seeds in (draft.get("also_scored") or {}).items()
        for seed in seeds
        if (arm, int(seed)) in scored_under
    ]
    return found


def _check_scored(
    registration: Registration, ledger: Ledger, records: Sequence[Records]
) -> list[str]:
    """Records that are not what the ledger says came out of the one scoring."""
    found = []
    for one in records:
        noted = ledger.scored(registration.sha256, one.header.checkpoint_sha256)
        name = f"{one.header.label}, seed {one.header.seed}"
        if not noted:
            found.append(f"the ledger does not know the scoring of {name}")
        elif len(noted) > 1:
            found.append(f"{name} was scored {len(noted)} times")
        elif noted != [one.sha256]:
            found.append(f"the records of {name} were changed after they were scored")
    return found


def _format(name: str) -> EvaluationFormat:
    if name in ("training", "packed"):
        return EvaluationFormat()
    stride, _, reach = name.removeprefix("stride").partition("-")
    if not name.startswith("stride") or not stride.isdigit():
        raise ValueError(f"format must be training, packed or strideN-REACH; got {name!r}.")
    return EvaluationFormat(int(stride), reach)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


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
