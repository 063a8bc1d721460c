"""Records: the document x class sums of one arm on one set in one format.

A Parquet file with one row for each class that a document has targets in, and a JSON header in the
schema's metadata. Every table and figure is made from records and results files alone, so anyone
can redo them without a model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from evaluation.class_bpb.statistics import CLASS_NAMES, NUM_CLASSES, ClassSums, Grouping

_METADATA_KEY = b"doctab_records"
_REACH_KEY = b"doctab_reach"
_VERSION = 1
_ABLATED_SUFFIX = "-ablated"


@dataclass(frozen=True)
class RecordsHeader:
    """What was scored, and how.

    Attributes:
        arm: the recipe's name.
        seed: of the training run.
        baseline: the arm it is compared with, or None.
        set_name: the evaluation split.
        format: `training`, `packed` or `strideN-REACH`; ablation stands apart.
        ablated: whether the model was given "no match" at every position.
        reach: span of the table's lookup, `chunk` or `window`.
        has_table: whether the model has a document table. The table cells of an arm without one are
            what a table would have returned in this format.
        table_source: where the table's fields come from, `document` or a control (`TableOptions`).
        table_orders: the longest suffix that the lookup tries.
        chunk_length: tokens; the distance bands are fractions of it.
        row_length: inputs that the model sees at once.
        checkpoint_sha256: of the weights and the model's configuration.
        data_sha256: the chunk set's fingerprint.
        targets_sha256: of the split's target tokens.
        document_ids: the documents, in the order of the sums' rows.
        registration: hash of the registration that a confirmation split was opened by, or None.
    """

    arm: str
    seed: int
    baseline: str | None
    set_name: str
    format: str
    ablated: bool
    reach: str
    has_table: bool
    table_source: str
    table_orders: int
    chunk_length: int
    row_length: int
    checkpoint_sha256: str
    data_sha256: str
    targets_sha256: str
    document_ids: tuple[str, ...]
    registration: str | None = None

    @property
    def file_stem(self) -> str:
        """`SET.FORMAT`, the name of the scores and records files."""
        return f"{self.set_name}.{self.format}{_ABLATED_SUFFIX if self.ablated else ''}"

    @property
    def label(self) -> str:
        """The arm as tables name it."""
        return f"{self.arm} (ablated)" if self.ablated else self.arm

    def to_json(self) -> str:
        """Serialise with sorted keys, so that equal headers have equal text."""
        found = {"version": _VERSION, **asdict(self)}
        if self.registration is None:
            del found["registration"]
        return json.dumps(found, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> RecordsHeader:
        """Read `to_json`'s text.

        Raises:
            ValueError: if the version is another one, or a field is missing or unknown.
        """
        found = {"registration": None, **json.loads(text)}
        version = found.pop("version", None)
        names = {field.name for field in fields(cls)}
        if version != _VERSION or set(found) != names:
            raise ValueError(
                f"The header must have version {_VERSION} and the fields {sorted(names)}; found "
                f"version {version} and {sorted(found)}. Score again with this code."
            )
        return cls(**{**found, "document_ids": tuple(found["document_ids"])})


@dataclass(frozen=True)
class ReachCounts:
    """What `evaluation.reach` found in the rows that were scored, each [documents].

    Attributes:
        positions: scored positions.
        violations: of them, those where the table knew less than the row shows (Section 4.6).
        violation_nats: their losses.
        further: positions whose match lies outside the row.
    """

    positions: npt.NDArray[np.int64]
    violations: npt.NDArray[np.int64]
    violation_nats: npt.NDArray[np.float64]
    further: npt.NDArray[np.int64]

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The four columns by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def rows(self, rows: Sequence[int]) -> ReachCounts:
        """The counts of some documents."""
        return ReachCounts(**{name: array[rows] for name, array in self.arrays().items()})


@dataclass(frozen=True)
class Records:
    """Sums by document and class, each [documents, 126].

    `sums.num_bytes` are exact UTF-8 bytes; `reference_bytes` use the reference's table, which is
    wrong for tokens that are partial UTF-8 sequences, and exist to reproduce its numbers. `reach`
    is None where the check has no meaning: an ablated table, or another document's fields.
    """

    header: RecordsHeader
    sums: ClassSums
    reference_bytes: npt.NDArray[np.int64]
    reach: ReachCounts | None = None

    def __post_init__(self) -> None:
        expected = (len(self.header.document_ids), NUM_CLASSES)
        for name, array in self._arrays().items():
            if array.shape != expected:
                raise ValueError(f"{name} must have shape {expected}; got {array.shape}.")
        for name, array in (self.reach.arrays() if self.reach else {}).items():
            if array.shape != expected[:1]:
                raise ValueError(f"{name} must have shape {expected[:1]}; got {array.shape}.")
        if len(set(self.header.document_ids)) != expected[0]:
            raise ValueError("Document ids must be distinct.")
        if not np.isfinite(self.sums.nats).all():
            raise ValueError("nats must be finite. Look for NaN losses in the scores.")

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {**self.sums._asdict(), "reference_bytes": self.reference_bytes}

    def mean_nats(self, grouping: Grouping, groups: Collection[str]) -> float:
        """Mean loss, in nats, of the targets in some of a grouping's groups; NaN if none is."""
        chosen = [grouping.names.index(name) for name in groups]
        counts = grouping.collapse(self.sums.num_targets.sum(axis=0))[chosen].sum()
        nats = grouping.collapse(self.sums.nats.sum(axis=0))[chosen].sum()
        return float(nats / counts) if counts else float("nan")

    @cached_property
    def sha256(self) -> str:
        """Hash of the header and the sums; independent of the file's compression and version."""
        digest = hashlib.sha256(self.header.to_json().encode())
        reach = self.reach.arrays() if self.reach else {}
        for array in [*self._arrays().values(), *reach.values()]:
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


# A quarter smaller than Parquet's defaults: evidence lies in repositories.
_SMALL: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 15,
    "use_dictionary": False,
    "column_encoding": {
        **dict.fromkeys(("document", "targets", "bytes", "reference_bytes"), "DELTA_BINARY_PACKED"),
        "nats": "BYTE_STREAM_SPLIT",
    },
}


def write_records(records: Records, path: Path) -> None:
    """Write one Parquet file, by way of a temporary one, so that a reader never sees half of it."""
    document, class_index = np.nonzero(records.sums.num_targets)
    cells = (document, class_index)
    table = pa.table(
        {
            "document": pa.array(document, pa.int32()),
            "class": pa.array(class_index, pa.uint8()),
            "nats": pa.array(records.sums.nats[cells], pa.float64()),
            "targets": pa.array(records.sums.num_targets[cells], pa.int64()),
            "bytes": pa.array(records.sums.num_bytes[cells], pa.int64()),
            "reference_bytes": pa.array(records.reference_bytes[cells], pa.int64()),
        }
    )
    # Class names travel along, so that a file explains itself without this package.
    metadata = {
        _METADATA_KEY: records.header.to_json().encode(),
        b"doctab_class_names": json.dumps(CLASS_NAMES).encode(),
    }
    if records.reach is not None:
        columns = {name: array.tolist() for name, array in records.reach.arrays().items()}
        metadata[_REACH_KEY] = json.dumps(columns).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp_{path.name}")
    # Without Arrow's copy of the schema, which would hold the metadata a second time.
    with pq.ParquetWriter(temporary, table.schema, store_schema=False, **_SMALL) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(metadata)
    temporary.replace(path)


def read_header(path: Path) -> RecordsHeader:
    """Read a records file's header alone.

    Raises:
        ValueError: if the file is not a records file of this version.
    """
    try:
        metadata = pq.read_schema(path).metadata or {}
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} must be a Parquet file of records: {error}") from None
    if _METADATA_KEY not in metadata:
        raise ValueError(f"{path} has no records header. Was it written by evaluation.score?")
    if json.loads(metadata[b"doctab_class_names"]) != list(CLASS_NAMES):
        raise ValueError(f"{path} has other classes than this code. Score again.")
    return RecordsHeader.from_json(metadata[_METADATA_KEY].decode())


def read_records(path: Path) -> Records:
    """Read one records file.

    Raises:
        ValueError: if it is not a records file, or its columns are inconsistent.
    """
    header = read_header(path)
    table = pq.read_table(path)
    shape = (len(header.document_ids), NUM_CLASSES)
    cells = (table["document"].to_numpy(), table["class"].to_numpy())

    def dense(column: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        values = np.zeros(shape, dtype)
        values[cells] = table[column].to_numpy()
        return values

    if len(table) and (cells[0].max() >= shape[0] or cells[1].max() >= shape[1]):
        raise ValueError(f"{path} names documents or classes that its header does not have.")
    reach = None
    if _REACH_KEY in (table.schema.metadata or {}):
        listed = json.loads(table.schema.metadata[_REACH_KEY])
        reach = ReachCounts(
            positions=np.array(listed["positions"], np.int64),
            violations=np.array(listed["violations"], np.int64),
            violation_nats=np.array(listed["violation_nats"], np.float64),
            further=np.array(listed["further"], np.int64),
        )
    return Records(
        header=header,
        sums=ClassSums(
            nats=dense("nats", np.float64),
            num_targets=dense("targets", np.int64),
            num_bytes=dense("bytes", np.int64),
        ),
        reference_bytes=dense("reference_bytes", np.int64),
        reach=reach,
    )


def read_document_list(path: Path) -> list[str]:
    """Document ids from a text file, one a line; empty lines and lines after # count nothing.

    Raises:
        ValueError: if it lists none.
    """
    lines = [line.strip() for line in path.read_text().splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ValueError(f"{path} must list at least one document, one a line; it lists none.")
    return found


def filter_records(
    records: Records, keep: Collection[str] | None = None, drop: Collection[str] = ()
) -> Records:
    """Keep the listed documents (all if None) without the dropped ones, in their old order.

    Raises:
        ValueError: if a listed document is not there, or none is left.
    """
    ids = records.header.document_ids
    unknown = (set(keep or ()) | set(drop)) - set(ids)
    if unknown:
        raise ValueError(
            f"Every listed document must be in {records.header.set_name}; "
            f"not there: {sorted(unknown)[:5]}."
        )
    wanted = set(ids if keep is None else keep) - set(drop)
    rows = [row for row, name in enumerate(ids) if name in wanted]
    if not rows:
        raise ValueError("No document is left. Check the list of documents.")
    return Records(
        header=replace(records.header, document_ids=tuple(ids[row] for row in rows)),
        sums=ClassSums(
            nats=records.sums.nats[rows],
            num_targets=records.sums.num_targets[rows],
            num_bytes=records.sums.num_bytes[rows],
        ),
        reference_bytes=records.reference_bytes[rows],
        reach=records.reach.rows(rows) if records.reach else None,
    )


def merge_records(parts: Sequence[Records]) -> Records:
    """Join records of disjoint documents, scored alike.

    Raises:
        ValueError: if there are none, a header field differs, or a document occurs twice.
    """
    if not parts:
        raise ValueError("merge_records needs at least one part.")
    first = parts[0].header
    for part in parts[1:]:
        differing = differing_fields(first, part.header, ignore=("document_ids",))
        if differing:
            raise ValueError(f"Parts must be scored alike; they differ in {', '.join(differing)}.")
    ids = tuple(name for part in parts for name in part.header.document_ids)
    reaches = [part.reach for part in parts if part.reach is not None]
    reach = None
    if len(reaches) == len(parts):
        columns = [reach.arrays() for reach in reaches]
        reach = ReachCounts(**{k: np.concatenate([c[k] for c in columns]) for k in columns[0]})
    return Records(
        header=replace(first, document_ids=ids),
        sums=ClassSums(
            nats=np.concatenate([part.sums.nats for part in parts]),
            num_targets=np.concatenate([part.sums.num_targets for part in parts]),
            num_bytes=np.concatenate([part.sums.num_bytes for part in parts]),
        ),
        reference_bytes=np.concatenate([part.reference_bytes for part in parts]),
        reach=reach,
    )


def differing_fields(
    one: RecordsHeader, other: RecordsHeader, ignore: Collection[str] = ()
) -> list[str]:
    """Names of the header fields that differ."""
    return [
        field.name
        for field in fields(RecordsHeader)
        if field.name not in ignore and getattr(one, field.name) != getattr(other, field.name)
    ]


if __name__ == "__main__":
    import sys

    from evaluation.records_command import main  # it needs this module complete

    sys.exit(main())
