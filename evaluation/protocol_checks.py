"""What the ledger and the runs' files say against registering or confirming (Section 3.6)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from data_scripts.chunk_set import ChunkSet
from evaluation.checkpoints import Checkpoint, open_checkpoint
from evaluation.identity import refuse_stale
from evaluation.records import read_header, read_records
from evaluation.registration import Ledger, Registration
from evaluation.rules import rule_pairs

Arm = tuple[str, int]
"""An arm's name and a seed."""


@dataclass(frozen=True)
class Run:
    """A finished run. `trained` is when its training began, None where it does not say."""

    folder: Path
    checkpoint: Checkpoint
    trained: str | None


def runs_by_arm(runs: Sequence[Path]) -> dict[Arm, Run]:
    """Arm and seed -> its run.

    Raises:
        ValueError: if two runs are of one arm and seed.
    """
    found: dict[Arm, Run] = {}
    for run in runs:
        checkpoint = open_checkpoint(run)
        key = (checkpoint.arm, checkpoint.seed)
        if key in found:
            raise ValueError(
                f"There must be one run of {key[0]}, seed {key[1]}; found "
                f"{found[key].folder} and {run}."
            )
        found[key] = Run(run, checkpoint, _trained(run))
    return found


def _trained(run: Path) -> str | None:
    """When a run's training began, a time that its registration cannot precede."""
    file = run / "results.json"
    started = json.loads(file.read_text()).get("started") if file.is_file() else None
    return None if started is None else iso_time(datetime.fromisoformat(started).timestamp())


def iso_time(seconds: float) -> str:
    """Seconds since 1970 as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def refuse_other_records(runs: Sequence[Path], chunk_set: ChunkSet) -> None:
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


def rule_arms(rule: dict[str, Any]) -> set[Arm]:
    """Arms and seeds that a rule reads."""
    return {
        (pair[side], int(seed))
        for pair in rule_pairs(rule)
        for side in ("arm", "baseline")
        for seed in rule["seeds"]
    }


def closed_sets(draft: dict[str, Any], chunk_set: ChunkSet) -> list[str]:
    """The confirmation splits that a draft or registration names."""
    named = [
        draft["set_name"],
        *(name for rule in draft.get("rules") or [] for name in rule["sets"]),
    ]
    closed = [s for s in chunk_set.evaluation_splits() if chunk_set.is_confirmation(s)]
    return [name for name in dict.fromkeys(named) if name in closed]


def problems_of_draft(
    draft: dict[str, Any],
    scored: Set[Arm],
    checkpoints: Mapping[Arm, Run],
    chunk_set: ChunkSet,
    ledger: Ledger,
) -> list[str]:
    """What the ledger and the runs' records say against registering a draft."""
    closed = closed_sets(draft, chunk_set)
    if not closed:
        return []
    runs = [run.folder for run in checkpoints.values()]
    problems = [*ledger.problems(), *unaccounted(runs, closed, ledger)]
    if draft["set_name"] in closed:
        problems += _known_already(draft, checkpoints, ledger)
        problems += without_records(scored, checkpoints, draft, ledger)
    for rule in draft.get("rules") or []:
        read = {checkpoints[key].checkpoint.sha256 for key in rule_arms(rule) if key in checkpoints}
        has_all = rule_arms(rule) <= set(checkpoints)
        for name in (name for name in rule["sets"] if name in closed):
            if has_all and read <= set(ledger.openings(name)):
                problems.append(
                    f"rule {rule['name']!r} reads checkpoints that were all scored on {name} "
                    "before: its value is known. Take it out"
                )
    return problems


def _known_already(
    draft: dict[str, Any],
    checkpoints: Mapping[Arm, Run],
    ledger: Ledger,
) -> list[str]:
    """What a draft claims or asks for although it could be known."""
    set_name = draft["set_name"]
    opened = ledger.openings(set_name)
    under = {
        key: opened[run.checkpoint.sha256]["registration"][:12]
        for key, run in checkpoints.items()
        if run.checkpoint.sha256 in opened
    }
    found = [
        f"contrast {entry['name']!r} compares {entry['arm']} and {entry['baseline']}, seed {seed}, "
        f"which were both scored on {set_name} before (registration "
        f"{under[entry['arm'], int(seed)]}): its value is known. Take that seed out"
        for entry in draft["contrasts"]
        for seed in entry["seeds"]
        if {(entry["arm"], int(seed)), (entry["baseline"], int(seed))} <= set(under)
    ]
    found += [
        f"also_scored has {arm}, seed {seed}, which was scored on {set_name} before (registration "
        f"{under[arm, int(seed)]}). Take it out"
        for arm, seeds in (draft.get("also_scored") or {}).items()
        for seed in seeds
        if (arm, int(seed)) in under
    ]
    return found


def without_records(
    scored: Iterable[Arm],
    checkpoints: Mapping[Arm, Run],
    content: dict[str, Any],
    ledger: Ledger,
    own: str | None = None,
) -> list[str]:
    """Checkpoints that an earlier registration opened the split for, without their records.

    Args:
        scored: arms that a draft or registration wants scored.
        checkpoints: their runs.
        content: the draft or registration.
        ledger: of the chunk set.
        own: hash of the registration, which may still score its own.
    """
    name = f"{content['set_name']}.{content['format']}.parquet"
    opened = ledger.openings(content["set_name"])
    found = []
    for arm, seed in sorted(set(scored) & set(checkpoints)):
        run = checkpoints[arm, seed]
        event = opened.get(run.checkpoint.sha256)
        if (
            event is None
            or event["registration"] == own
            or (run.folder / "records" / name).is_file()
        ):
            continue
        found.append(
            f"{arm}, seed {seed}, is scored once, and the registration "
            f"{event['registration'][:12]} did so; its records/{name} are not in {run.folder}. Put "
            "them back, or confirm that registration again if it was cut"
        )
    return found


def unaccounted(
    runs: Sequence[Path], sets: Sequence[str], ledger: Ledger, pending: str | None = None
) -> list[str]:
    """Scores and records of confirmation splits that the ledger does not account for.

    Args:
        runs: run folders.
        sets: the splits.
        ledger: of the chunk set.
        pending: hash of a registration whose scoring may have been cut before the ledger noted it.
    """
    found = []
    for run in runs:
        for set_name in sets:
            files = sorted((run / "records").glob(f"{set_name}.*.parquet"))
            for file in files:
                records = read_records(file)
                header = records.header
                name = f"{header.label}, seed {header.seed}"
                if header.set_name != set_name:
                    continue
                if header.registration is None:
                    found.append(f"{name}, was scored on {set_name} without a registration")
                    continue
                noted = ledger.scored(header.registration, header.checkpoint_sha256)
                if noted and noted != [records.sha256]:
                    found.append(f"the records of {name} were changed after they were scored")
                elif not noted and header.registration != pending:
                    found.append(
                        f"{name}, has records of the registration {header.registration[:12]}, but "
                        "the ledger knows of no such scoring. If it was cut, confirm that "
                        "registration again"
                    )
            if pending is None and not files and list((run / "scores").glob(f"{set_name}.*.npz")):
                found.append(
                    f"{run.name} holds scores of {set_name} without records. If their scoring was "
                    "cut, confirm that registration again"
                )
    return found


def notes_on(registration: Registration, ledger: Ledger) -> list[str]:
    """What a reader of the verdicts must know about earlier scorings of the split."""
    content = registration.content
    set_name = content["set_name"]
    found = []
    opened = ledger.openings(set_name)
    for digest, (arm, seed) in registration.checkpoints.items():
        event = opened.get(digest)
        if event is not None and event["registration"] != registration.sha256:
            note = f"{arm}, seed {seed}, was scored before, under the registration "
            note += event["registration"][:12]
            codes = {e["code_sha256"] for e in ledger.of("scored", event["registration"])}
            if codes - {content["code_sha256"]}:
                note += ", by other code: see that its development records stay the same with this"
            found.append(note)
        found += [
            f"another checkpoint of {arm}, seed {seed}, was scored on {set_name} before, under the "
            f"registration {other['registration'][:12]}"
            for sha, other in opened.items()
            if (other["arm"], other["seed"]) == (arm, seed)
            and sha != digest
            and other["date"] <= content["date"]
        ]
    return found
