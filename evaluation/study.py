"""All records and results of a study, found by arm, seed, set and format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from evaluation.attention import FOLDER as ATTENTION_FOLDER
from evaluation.attention import Diagnosis, read_diagnosis
from evaluation.contrasts import Contrast, contrast, records_bits_per_byte
from evaluation.identity import checkpoint_sha256, refuse_stale
from evaluation.paper import paper_arm
from evaluation.records import Records, read_records

# A set's column in Table 1 -> where its records are: set names in the packed format.
_PACKED_SETS = {"climbmix_val": ("climbmix_val", "val")}


@dataclass(frozen=True)
class Source:
    """One records file, and the run folder it lies in, if any."""

    path: Path
    records: Records
    run: Path | None

    @property
    def is_mixture(self) -> bool:
        """Whether the records are of `evaluation.mixture`, which trained nothing."""
        return self.path.parent.name == "mixture"


def read_sources(paths: Sequence[Path]) -> list[Source]:
    """Read the records of run folders (their mixtures too) and records files.

    Raises:
        ValueError: if a path holds no records, or they or the run's attention files are of another
            checkpoint.
    """
    found: dict[Path, Source] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} does not exist. Give run folders or records files.")
        files = [path]
        if path.is_dir():
            files = sorted((path / "records").glob("*.parquet"))
            files += sorted((path / "mixture").glob("*.parquet"))
        if not files:
            raise ValueError(f"{path} has no records. Score it first: python -m evaluation.score.")
        for file in files:
            parent = file.parent.parent
            in_run = file.parent.name in ("records", "mixture")
            run = parent if in_run and (parent / "config.yaml").is_file() else None
            if path.is_dir():
                run = path
            found[file.resolve()] = Source(file, read_records(file), run)
    _refuse_stale(list(found.values()))
    _refuse_other_attention(list(found.values()))
    return list(found.values())


def _refuse_stale(sources: Sequence[Source]) -> None:
    """Refuse records of a checkpoint that is no longer the run's."""
    hashes: dict[Path, str] = {}
    for source in sources:
        if source.run is None:
            continue
        folder = source.run / "final" if (source.run / "final").is_dir() else source.run
        if not list(folder.glob("*.safetensors")):
            continue  # records that travelled without their model
        current = hashes.setdefault(folder, checkpoint_sha256(folder))
        refuse_stale(source.path, source.records.header.checkpoint_sha256, folder, current)


def _refuse_other_attention(sources: Sequence[Source]) -> None:
    """Refuse attention files that are not of the checkpoint that the records are of."""
    hashes: dict[Path, set[str]] = {}
    for source in sources:
        if source.run is not None:
            hashes.setdefault(source.run, set()).add(source.records.header.checkpoint_sha256)
    for run, known in hashes.items():
        for file in sorted((run / ATTENTION_FOLDER).glob("*.json")):
            found = read_diagnosis(file).checkpoint_sha256
            if known != {found}:
                raise ValueError(
                    f"{file} is of another checkpoint than the run's records: {found[:12]}, not "
                    f"{', '.join(sorted(one[:12] for one in known))}. Run python -m "
                    "evaluation.attention_diagnostic again."
                )


@dataclass(frozen=True)
class Study:
    """The records of one chunk set, with packed sets beside it.

    Arms go by the paper's names here: a small one stands where its original would (`paper_arm`).

    Attributes:
        data_sha256: the chunk set's fingerprint.
        sources: records and their runs.
        bootstrap: num_resamples and seed.
    """

    data_sha256: str
    sources: tuple[Source, ...]
    bootstrap: dict[str, int]
    _contrasts: dict[tuple[str, str], Contrast] = field(default_factory=dict)

    @cached_property
    def _by_key(self) -> dict[tuple[str, int, str, str, bool], Source]:
        found: dict[tuple[str, int, str, str, bool], Source] = {}
        for source in self.sources:
            h = source.records.header
            key = (paper_arm(h.arm), h.seed, h.set_name, h.format, h.ablated)
            first = found.setdefault(key, source).records
            if first.header.arm != h.arm:
                raise ValueError(
                    f"One arm must stand for the paper's {key[0]}; {first.header.arm} and {h.arm} "
                    "both do. Report on them apart."
                )
            if first.header.data_sha256 != h.data_sha256:
                raise ValueError(
                    f"{h.label}, seed {h.seed}, was scored on {h.set_name} of two chunk sets "
                    f"({first.header.data_sha256[:12]}, {h.data_sha256[:12]}). Report on two "
                    "studies apart."
                )
        return found

    def own_name(self, arm: str, name: str) -> str:
        """The paper's name of an arm, with our recipe's behind it where that differs."""
        own = next((s.records.header.arm for key, s in self._by_key.items() if key[0] == arm), arm)
        return name if own == arm else f"{name}, ours {own}"

    def records(
        self, arm: str, seed: int, set_name: str, form: str = "training", ablated: bool = False
    ) -> Records | None:
        """One arm's records, or None; `climbmix_val` is the packed set of that column."""
        for name in _PACKED_SETS.get(set_name, (set_name,)):
            chosen = "packed" if set_name in _PACKED_SETS else form
            source = self._by_key.get((arm, seed, name, chosen, ablated))
            if source is not None:
                return source.records
        return None

    def bits_per_byte(self, arm: str, seed: int, set_name: str) -> float | None:
        """In the training format (`climbmix_val`: packed), or None."""
        found = self.records(arm, seed, set_name)
        return None if found is None else records_bits_per_byte(found)

    def contrast(
        self,
        arm: str,
        baseline: str,
        seed: int,
        set_name: str,
        form: str = "training",
        ablated: bool = False,
    ) -> Contrast | None:
        """`arm` against `baseline` of one seed, or None where records are missing."""
        mine = self.records(arm, seed, set_name, form, ablated)
        theirs = self.records(baseline, seed, set_name, form)
        if mine is None or theirs is None:
            return None
        return self.pair(mine, theirs)

    def pair(self, mine: Records, theirs: Records) -> Contrast:
        """A contrast, bootstrapped once."""
        key = (mine.sha256, theirs.sha256)
        if key not in self._contrasts:
            resamples, seed = self.bootstrap["num_resamples"], self.bootstrap["seed"]
            self._contrasts[key] = contrast(mine, theirs, resamples, seed)
        return self._contrasts[key]

    @cached_property
    def arms(self) -> list[tuple[str, int]]:
        """Every arm and seed, in the order they were given."""
        return list(dict.fromkeys((key[0], key[1]) for key in self._by_key))

    @cached_property
    def trained_arms(self) -> list[tuple[str, int]]:
        """`arms` without the output mixtures."""
        headers = [source.records.header for source in self.sources if not source.is_mixture]
        trained = {(paper_arm(header.arm), header.seed) for header in headers}
        return [key for key in self.arms if key in trained]

    @cached_property
    def pairs(self) -> list[tuple[str, str, int]]:
        """Every arm, its recipe's baseline, and seed, of arms that name one."""
        headers = [
            source.records.header for source in self.sources if not source.records.header.ablated
        ]
        found = [
            (paper_arm(h.arm), paper_arm(h.baseline), h.seed)
            for h in headers
            if h.baseline is not None
        ]
        return list(dict.fromkeys(found))

    def sets(self, form: str = "training") -> list[str]:
        """Names of the sets scored in a format; those of Table 1 come first."""
        known = ("dev_val", "dev_heldout", "confirmation")
        found = dict.fromkeys(key[2] for key in self._by_key if key[3] == form)
        return [name for name in known if name in found] + [n for n in found if n not in known]

    @cached_property
    def formats(self) -> list[str]:
        """Names of the formats found."""
        return list(dict.fromkeys(key[3] for key in self._by_key))

    @cached_property
    def main_set(self) -> str | None:
        """Dev-val where it was scored in the training format, else the first set, or None."""
        sets = self.sets()
        return sets[0] if sets else None

    def run(self, arm: str, seed: int) -> Path | None:
        """The run folder of an arm and seed, if it was given."""
        for source in self.sources:
            header = source.records.header
            if (paper_arm(header.arm), header.seed) == (arm, seed) and source.run is not None:
                return source.run
        return None

    def attention(self, arm: str, seed: int) -> dict[str, Diagnosis]:
        """Set name -> the run's diagnosis on it, of this study's data."""
        run = self.run(arm, seed)
        files = sorted((run / ATTENTION_FOLDER).glob("*.json")) if run else []
        data = {source.records.header.data_sha256 for source in self.sources}
        found = [read_diagnosis(file) for file in files]
        return {one.set_name: one for one in found if one.data_sha256 in data}

    def results(self, arm: str, seed: int) -> dict[str, Any]:
        """The run's results.json, empty where there is none."""
        run = self.run(arm, seed)
        return read_results(run)

    def recipe(self, arm: str, seed: int) -> dict[str, Any]:
        """The run's config.yaml, empty where there is none."""
        run = self.run(arm, seed)
        if run is None or not (run / "config.yaml").is_file():
            return {}
        found: dict[str, Any] = yaml.safe_load((run / "config.yaml").read_text())
        return found

    def metrics(self, arm: str, seed: int) -> list[dict[str, Any]]:
        """The updates of the run's metrics.jsonl, the latest entry of each, in order."""
        run = self.run(arm, seed)
        if run is None or not (run / "metrics.jsonl").is_file():
            return []
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        latest = {entry["update"]: entry for entry in lines if "loss" in entry}
        return [latest[update] for update in sorted(latest)]


def read_results(run: Path | None) -> dict[str, Any]:
    """A run's results.json, empty where there is none."""
    if run is None or not (run / "results.json").is_file():
        return {}
    found: dict[str, Any] = json.loads((run / "results.json").read_text())
    return found


def make_studies(sources: Sequence[Source], bootstrap: dict[str, int]) -> list[Study]:
    """One study a chunk set with formats other than packed; packed sets join each."""
    packed = [source for source in sources if source.records.header.format == "packed"]
    long = [source for source in sources if source.records.header.format != "packed"]
    if not long:
        return [Study(packed[0].records.header.data_sha256, tuple(packed), bootstrap)]
    by_data: dict[str, list[Source]] = {}
    for source in long:
        by_data.setdefault(source.records.header.data_sha256, []).append(source)
    return [Study(data, (*members, *packed), bootstrap) for data, members in by_data.items()]
