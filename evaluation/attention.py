"""What the attention diagnostic found, as one small file a set in the run folder (Section 4.4).

RUN/attention/SET.json is written by `evaluation.attention_diagnostic` and read by the report, which
thus needs no weights: neither for the weights on induction keys, nor for learned query gains.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from evaluation.class_bpb.statistics import BAND_NAMES, BY_BAND, grouping_labels
from evaluation.tables import MISSING, Table

FOLDER = "attention"


@dataclass(frozen=True)
class BandMeans:
    """Means by distance band over the copies whose source the row shows; NaN where there are none.

    Attributes:
        weight: band -> mean of the largest weight on the induction key.
        nats: band -> mean loss of the same targets.
        num_targets: band -> their number.
    """

    weight: dict[str, float]
    nats: dict[str, float]
    num_targets: dict[str, int]


@dataclass(frozen=True)
class Diagnosis:
    """One run's attention on one set.

    Attributes:
        arm, seed: of the run.
        set_name: the evaluation split.
        num_documents: of the split, from the first on; the first chunk of each was looked into.
        chunk_length: tokens; the bands are fractions of it.
        checkpoint_sha256: of the weights and the model's configuration.
        data_sha256: the chunk set's fingerprint.
        whole: the model as it is.
        ablated: the same model given "no match" everywhere, None for an arm without a table.
        query_gains: [layers][heads] learned gains g_h (Section 4.8), empty where none are learned.
    """

    arm: str
    seed: int
    set_name: str
    num_documents: int
    chunk_length: int
    checkpoint_sha256: str
    data_sha256: str
    whole: BandMeans
    ablated: BandMeans | None
    query_gains: list[list[float]]

    @property
    def variants(self) -> dict[str, BandMeans]:
        """Arm, `(ablated)` where the table is, and seed, as tables name them -> means."""
        found = {f"{self.arm} s{self.seed}": self.whole}
        if self.ablated is not None:
            found[f"{self.arm} (ablated) s{self.seed}"] = self.ablated
        return found

    def write(self, run: Path) -> Path:
        """Write RUN/attention/SET.json; returns its path."""
        path = run / FOLDER / f"{self.set_name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".tmp_{path.name}")
        temporary.write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")
        temporary.replace(path)
        return path

    def to_json(self) -> dict[str, object]:
        """Ready for JSON, which has no NaN: a band without copies is null."""
        content = asdict(self)
        for means in (content["whole"], content["ablated"]):
            for name in ("weight", "nats") if means else ():
                values = means[name].items()
                means[name] = {band: None if math.isnan(v) else v for band, v in values}
        return content


def read_diagnosis(path: Path) -> Diagnosis:
    """Read one RUN/attention/SET.json.

    Raises:
        ValueError: if it is none of this version.
    """
    try:
        content = json.loads(path.read_text())
        if set(content) != {field.name for field in fields(Diagnosis)}:
            raise ValueError(f"its fields are {sorted(content)}")
        for name in ("whole", "ablated"):
            content[name] = None if content[name] is None else _band_means(content[name])
        return Diagnosis(**content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} must be written by python -m evaluation.attention_diagnostic: {error}. "
            "Run it again."
        ) from None


def _band_means(content: dict[str, Any]) -> BandMeans:
    def means(name: str) -> dict[str, float]:
        values = {band: content[name][band] for band in BAND_NAMES}
        return {band: math.nan if v is None else float(v) for band, v in values.items()}

    counts = {band: int(content["num_targets"][band]) for band in BAND_NAMES}
    return BandMeans(means("weight"), means("nats"), counts)


def diagnosis_table(found: Sequence[Diagnosis], name: str = "attention") -> Table:
    """One row an arm, one column a band: `weight (nats; targets)`."""
    labels = grouping_labels(BY_BAND, found[0].chunk_length)[2:]
    rows = []
    for label, means in (item for one in found for item in one.variants.items()):
        cells = [
            f"{means.weight[band]:.3f} ({means.nats[band]:.3f}; {means.num_targets[band]:,})"
            if means.num_targets[band]
            else MISSING
            for band in BAND_NAMES
        ]
        rows.append((label, *cells))
    title = "Largest weight on the induction key (mean nats and number of the same targets)"
    return Table(name, f"{title}, {found[0].set_name}", ("arm", *labels), tuple(rows))
