"""What classes of targets cost each arm, and what they contribute to gains, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

from evaluation.class_bpb.statistics import (
    BY_BAND,
    BY_TARGET_CELL,
    Grouping,
    grouping_labels,
)
from evaluation.contrasts import Contrast
from evaluation.paper_tables import short_hash
from evaluation.records import Records
from evaluation.section import pair_hashes, pair_name
from evaluation.tables import MISSING, Table, signed


def class_profile(name: str, title: str, records: Sequence[Records]) -> Table:
    """Mean nats per target class of several arms on one set, one column an arm."""
    labels = grouping_labels(BY_BAND, records[0].header.chunk_length)
    columns = [_nats(one, BY_BAND) for one in records]
    rows = [(label, *cells) for label, *cells in zip(labels, *columns, strict=True)]
    rows.append(("records", *(short_hash(one) for one in records)))
    names = (f"{one.header.label} s{one.header.seed}" for one in records)
    return Table(name, title, ("class", *names), tuple(rows))


def cell_nats(name: str, title: str, records: Sequence[Records]) -> Table:
    """Mean nats per target cell, one row an arm: what each costs where the row shows the source."""
    labels = grouping_labels(BY_TARGET_CELL, records[0].header.chunk_length)
    rows = []
    for one in records:
        header = one.header
        form = "" if header.format == "training" else f", {header.format}"
        rows.append(
            (f"{header.label} s{header.seed}{form}", *_nats(one, BY_TARGET_CELL), short_hash(one))
        )
    return Table(name, title, ("arm", *labels, "records"), tuple(rows))


def _nats(records: Records, grouping: Grouping) -> list[str]:
    values = (records.mean_nats(grouping, [name]) for name in grouping.names)
    return [MISSING if isnan(value) else f"{value:.3f}" for value in values]


def class_effects(name: str, title: str, contrasts: Sequence[Contrast]) -> Table:
    """Gain of several contrasts by target class, one column a contrast."""
    labels = grouping_labels(BY_BAND, contrasts[0].arm.header.chunk_length)
    splits = [found.gain_by("band") or {} for found in contrasts]
    columns = [
        [signed(value) for value in split.values()] or [MISSING] * len(labels) for split in splits
    ]
    rows = [(label, *cells) for label, *cells in zip(labels, *columns, strict=True)]
    rows.append(("all", *(signed(found.gain) for found in contrasts)))
    rows.append(("records", *(pair_hashes(found) for found in contrasts)))
    names = (f"{pair_name(one)}, {one.arm.header.format}" for one in contrasts)
    return Table(name, title, ("class", *names), tuple(rows))
