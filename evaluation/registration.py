"""Registrations: what is fixed, hashed and dated before a confirmation set is scored (Section 3.6).

A registration is a JSON file that holds its own hash. The chunk set keeps a ledger of all that
happened to its confirmation splits, `confirmation_ledger.jsonl`: one line an event (registered,
opened, scored), each with the hash of the line before. Neither can prove a date to someone who
distrusts the whole machine: commit the registration, or publish its hash, before scoring.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evaluation.identity import code_sha256
from evaluation.records import Records, RecordsHeader

LEDGER_NAME = "confirmation_ledger.jsonl"
FIELDS = (
    *("title", "set_name", "format", "bootstrap", "contrasts", "rules", "checkpoints"),
    *("data_sha256", "targets_sha256", "code_sha256", "git_commit", "git_commit_date", "date"),
    "previous",
)


def now() -> str:
    """The time in UTC, to the second, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def content_sha256(content: dict[str, Any]) -> str:
    """Hash of a registration's content, its own `sha256` left out."""
    kept = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


class Ledger:
    """The events of a chunk set's confirmation splits, oldest first.

    Args:
        chunk_set: the chunk set's folder.
    """

    def __init__(self, chunk_set: Path) -> None:
        self.path = chunk_set / LEDGER_NAME
        self._is_locked = False
        self._read()

    def _read(self) -> None:
        text = self.path.read_text() if self.path.is_file() else ""
        self._lines = text.splitlines()
        try:
            self.events: list[dict[str, Any]] = [json.loads(line) for line in self._lines]
        except ValueError as error:
            raise ValueError(
                f"{self.path} must hold one JSON object a line: {error}. Where its last line was "
                "cut off, by a full disk say, remove that line."
            ) from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Read the ledger anew and keep other processes from adding to it meanwhile."""
        if self._is_locked:
            yield
            return
        with self.path.open("a") as file:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            self._is_locked = True
            try:
                self._read()
                yield
            finally:
                self._is_locked = False

    @property
    def head(self) -> str | None:
        """Hash of the last line, None in an empty ledger."""
        return _line_sha256(self._lines[-1]) if self._lines else None

    def of(self, event: str, registration: str | None = None) -> list[dict[str, Any]]:
        """Events of one kind, of one registration if given."""
        return [
            found
            for found in self.events
            if found["event"] == event and registration in (None, found["registration"])
        ]

    def scored(self, registration: str, checkpoint: str) -> list[str]:
        """Hashes of the records that a checkpoint's scoring under a registration gave."""
        return [
            event["records_sha256"]
            for event in self.of("scored", registration)
            if event["checkpoint_sha256"] == checkpoint
        ]

    def openings(self, set_name: str) -> dict[str, dict[str, Any]]:
        """Checkpoint hash -> the event that opened a split for it first."""
        found: dict[str, dict[str, Any]] = {}
        for event in self.of("opened"):
            if event["set_name"] == set_name:
                found.setdefault(event["checkpoint_sha256"], event)
        return found

    def append(self, event: str, registration: str, **facts: Any) -> None:
        """Add one event with the current time."""
        with self.locked():
            found = {
                "event": event,
                "registration": registration,
                "date": now(),
                "previous": self.head,
                **facts,
            }
            line = json.dumps(found, sort_keys=True)
            with self.path.open("a") as file:
                file.write(line + "\n")
            self._lines.append(line)
            self.events.append(found)

    def problems(self) -> list[str]:
        """Where the chain of hashes is broken, or time runs backwards."""
        found = []
        previous, date = None, ""
        for number, (line, event) in enumerate(zip(self._lines, self.events, strict=True), 1):
            if event.get("previous") != previous:
                found.append(f"the ledger was edited: line {number} does not follow the one before")
            if event["date"] < date:
                found.append(f"the ledger's line {number} is dated before the one above it")
            previous, date = _line_sha256(line), event["date"]
        return found


@dataclass(frozen=True)
class Registration:
    """A registration as read; `content` has `FIELDS` and `sha256`."""

    content: dict[str, Any]

    @property
    def sha256(self) -> str:
        """The hash that names it."""
        return str(self.content["sha256"])

    def authorise(self, header: RecordsHeader, chunk_set: Path) -> RecordsHeader:
        """Allow a scoring that was registered, and mark its header with the registration.

        Raises:
            ValueError: saying what differs from the registration, or was tampered with.
        """
        ledger = Ledger(chunk_set)
        problems = self.problems(ledger)
        for name in ("set_name", "format", "data_sha256", "targets_sha256"):
            if getattr(header, name) != self.content[name]:
                problems.append(
                    f"{name} is registered as {self.content[name]}, not {getattr(header, name)}"
                )
        if header.ablated:
            problems.append("an ablated table is not registered")
        if self.scored_checkpoints.get(header.checkpoint_sha256) != (header.arm, header.seed):
            problems.append(
                f"the checkpoint of {header.arm}, seed {header.seed}, is not among those "
                f"registered to be scored ({header.checkpoint_sha256[:12]})"
            )
        opened = ledger.openings(header.set_name).get(header.checkpoint_sha256)
        if opened is not None and opened["registration"] != self.sha256:
            problems.append(
                f"{header.label} was already scored on it under the registration "
                f"{opened['registration'][:12]}"
            )
        if problems:
            raise ValueError(refusal(header.set_name, problems))
        return replace(header, registration=self.sha256)

    @property
    def checkpoints(self) -> dict[str, tuple[str, int]]:
        """Checkpoint hash -> arm and seed."""
        return {
            entry["sha256"]: (entry["arm"], int(entry["seed"]))
            for entry in self.content["checkpoints"]
        }

    @property
    def scored_checkpoints(self) -> dict[str, tuple[str, int]]:
        """`checkpoints` without those that its rules read on other sets alone."""
        scored = {entry["sha256"] for entry in self.content["checkpoints"] if entry["scored"]}
        return {digest: arm for digest, arm in self.checkpoints.items() if digest in scored}

    def to_score(self, ledger: Ledger) -> list[str]:
        """Hashes of the checkpoints that it opens its split for: no other registration did."""
        opened = ledger.openings(self.content["set_name"])
        return [
            digest
            for digest in self.scored_checkpoints
            if digest not in opened or opened[digest]["registration"] == self.sha256
        ]

    def note_opened(self, header: RecordsHeader, chunk_set: Path) -> None:
        """Note in the ledger that a checkpoint's scoring begins; a cut scoring may be resumed.

        Raises:
            ValueError: if the checkpoint was scored to the end before: it is scored once.
        """
        ledger = Ledger(chunk_set)
        if ledger.scored(self.sha256, header.checkpoint_sha256):
            raise ValueError(
                f"Each checkpoint is scored once on {header.set_name}; {header.label}, seed "
                f"{header.seed}, was, and its records are gone or changed. Put them back."
            )
        ledger.append(
            "opened",
            self.sha256,
            set_name=header.set_name,
            arm=header.arm,
            seed=header.seed,
            checkpoint_sha256=header.checkpoint_sha256,
        )

    def note_scored(self, records: Records, chunk_set: Path) -> None:
        """Note in the ledger what a checkpoint's scoring gave; the same again is not noted.

        Raises:
            ValueError: if the ledger holds another result of it.
        """
        ledger = Ledger(chunk_set)
        with ledger.locked():
            header = records.header
            noted = ledger.scored(self.sha256, header.checkpoint_sha256)
            if noted == [records.sha256]:
                return
            if noted:
                raise ValueError(
                    f"Each checkpoint is scored once on {header.set_name}; {header.label}, seed "
                    f"{header.seed}, was scored by another process meanwhile, with another result."
                )
            ledger.append(
                "scored",
                self.sha256,
                set_name=header.set_name,
                checkpoint_sha256=header.checkpoint_sha256,
                records_sha256=records.sha256,
                code_sha256=code_sha256(),
            )

    def problems(self, ledger: Ledger) -> list[str]:
        """What speaks against the registration's date, place and code."""
        content = self.content
        found = ledger.problems()
        events = ledger.of("registered", self.sha256)
        if not events:
            found.append("the ledger of the chunk set does not know this registration")
        elif events[0]["date"] != content["date"]:
            found.append(
                f"it is dated {content['date']}, but was entered in the ledger at "
                f"{events[0]['date']}"
            )
        elif events[0]["previous"] != content["previous"]:
            found.append("the ledger before it is not the one it was registered in")
        for date, what in self._earlier_facts():
            if content["date"] < date:
                found.append(f"it is dated {content['date']}, before {what} ({date})")
        for event in ledger.of("opened", self.sha256)[:1]:
            if event["date"] < content["date"]:
                found.append(f"the split was opened at {event['date']}, before it")
        if content["date"] > now():
            found.append(f"it is dated {content['date']}, in the future")
        if content["code_sha256"] != code_sha256():
            found.append(
                "the code that scores and judges has changed since (code_sha256). Check out commit "
                f"{content['git_commit']}, or, where nothing was scored yet, register again"
            )
        return found

    def _earlier_facts(self) -> Iterable[tuple[str, str]]:
        """Dates that the registration must follow, and what they are of."""
        if self.content["git_commit_date"]:
            yield self.content["git_commit_date"], "its own code's commit"
        for entry in self.content["checkpoints"]:
            if entry["trained"]:
                name = f"{entry['arm']}, seed {entry['seed']}"
                yield entry["trained"], f"the training of {name} began"


def refusal(set_name: str, problems: Sequence[str]) -> str:
    """One sentence from what speaks against opening a split."""
    return f"{set_name} stays closed, and nothing on it counts as confirmed: {'; '.join(problems)}."


def read_registration(path: Path) -> Registration:
    """Read a registration and check it against its own hash.

    Raises:
        ValueError: if it is no registration, or was changed after it was hashed.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} must be a registration in JSON: {error}.") from None
    if not isinstance(content, dict) or set(content) != {*FIELDS, "sha256"}:
        raise ValueError(
            f"{path} must have the fields of a registration, {', '.join(FIELDS)}. Write it with "
            "`python -m evaluation.protocol register`."
        )
    found = content_sha256(content)
    if found != content["sha256"]:
        raise ValueError(
            f"{path} was changed after it was registered: its content has the hash {found[:12]}, "
            f"it says {content['sha256'][:12]}. Restore the original."
        )
    return Registration(content)


def _line_sha256(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()
