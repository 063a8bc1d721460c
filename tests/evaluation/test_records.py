"""Records survive a round trip, and refuse whatever would make them wrong silently."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evaluation.class_bpb.statistics import BY_BAND, CLASS_NAMES, ClassSums
from evaluation.records import (
    Records,
    RecordsHeader,
    filter_records,
    merge_records,
    read_header,
    read_records,
    write_records,
)

HEADER = RecordsHeader(
    arm="b_table",
    seed=44,
    baseline="b",
    set_name="dev",
    format="training",
    ablated=False,
    reach="chunk",
    has_table=True,
    table_source="document",
    table_orders=4,
    chunk_length=64,
    row_length=16,
    checkpoint_sha256="c" * 64,
    data_sha256="d" * 64,
    targets_sha256="e" * 64,
    document_ids=("one", "two", "three", "four"),
)


def make_records(seed: int = 0, classes_seed: int = 0, **changes) -> Records:
    """Records with about a third of all cells filled; the seed decides the losses alone."""
    header = replace(HEADER, **changes)
    shape = (len(header.document_ids), len(CLASS_NAMES))
    rng = np.random.default_rng(classes_seed)
    num_targets = rng.integers(1, 50, shape) * (rng.random(shape) < 0.3)
    num_bytes = num_targets * 3
    nats = np.random.default_rng(seed).exponential(2.0, shape) * num_targets
    return Records(header, ClassSums(nats, num_targets, num_bytes), num_bytes + (num_targets > 9))


def test_round_trip(tmp_path: Path) -> None:
    records = make_records()
    path = tmp_path / "records" / "dev.training.parquet"
    write_records(records, path)
    found = read_records(path)
    assert found.header == records.header == read_header(path)
    for mine, theirs in zip(found.sums, records.sums, strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert mine.dtype == theirs.dtype
    np.testing.assert_array_equal(found.reference_bytes, records.reference_bytes)
    assert found.sha256 == records.sha256
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_file_explains_itself(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    records = make_records()
    write_records(records, path)
    table = pq.read_table(path)
    assert table.column_names == [
        *("document", "class", "nats", "targets", "bytes", "reference_bytes")
    ]
    assert table.schema.field("nats").type == pa.float64()
    assert len(table) == np.count_nonzero(records.sums.num_targets)  # filled cells only
    assert b"copy_to_1_16_visible.match_4_right" in table.schema.metadata[b"doctab_class_names"]


def test_the_hash_sees_every_part() -> None:
    records = make_records()
    nats = records.sums.nats.copy()
    nats[1, 3] = np.nextafter(nats[1, 3], np.inf)
    hashes = {
        records.sha256,
        make_records(seed=1).sha256,
        make_records(arm="other").sha256,
        Records(records.header, records.sums._replace(nats=nats), records.reference_bytes).sha256,
        Records(records.header, records.sums, records.sums.num_bytes).sha256,
    }
    assert len(hashes) == 5
    assert make_records().sha256 == records.sha256


def test_mean_nats_of_groups_and_of_none() -> None:
    records = make_records()
    chosen = [
        place for place, name in enumerate(CLASS_NAMES) if name.startswith(("order_0", "order_1"))
    ]
    nats, counts = (array[:, chosen].sum() for array in records.sums[:2])
    assert records.mean_nats(BY_BAND, ["order_0", "order_1"]) == pytest.approx(nats / counts)
    assert np.isnan(records.mean_nats(BY_BAND, []))


def test_filter_keeps_order_and_sums() -> None:
    records = make_records()
    kept = filter_records(records, keep=["three", "one"])
    assert kept.header.document_ids == ("one", "three")
    np.testing.assert_array_equal(kept.sums.nats, records.sums.nats[[0, 2]])
    dropped = filter_records(records, drop=["two", "four"])
    assert dropped.sha256 == kept.sha256
    with pytest.raises(ValueError, match="Every listed document must be in dev"):
        filter_records(records, drop=["five"])
    with pytest.raises(ValueError, match="No document is left"):
        filter_records(records, keep=["one"], drop=["one"])


def test_merge_joins_disjoint_documents() -> None:
    records = make_records()
    halves = ["one", "two"]
    parts = [filter_records(records, keep=halves), filter_records(records, drop=halves)]
    assert merge_records(parts).sha256 == records.sha256
    with pytest.raises(ValueError, match="ids must be distinct"):
        merge_records([records, parts[0]])
    other = replace(parts[1], header=replace(parts[1].header, seed=45, format="stride8-chunk"))
    with pytest.raises(ValueError, match="they differ in seed, format"):
        merge_records([parts[0], other])


def test_bad_records_are_refused() -> None:
    records = make_records()
    nats = records.sums.nats.copy()
    nats[0, 0] = np.nan
    with pytest.raises(ValueError, match="nats must be finite"):
        Records(records.header, records.sums._replace(nats=nats), records.reference_bytes)
    with pytest.raises(ValueError, match="num_targets must have shape"):
        Records(
            records.header,
            records.sums._replace(num_targets=records.sums.num_targets[:2]),
            records.reference_bytes,
        )


def test_bad_files_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.parquet"
    text.write_text("not Parquet")
    with pytest.raises(ValueError, match="must be a Parquet file of records"):
        read_records(text)
    plain = tmp_path / "plain.parquet"
    pq.write_table(pa.table({"a": [1]}), plain)
    with pytest.raises(ValueError, match="has no records header"):
        read_records(plain)
    write_records(make_records(), plain)
    table = pq.read_table(plain)
    metadata = dict(table.schema.metadata)
    metadata[b"doctab_class_names"] = b'["other"]'
    pq.write_table(table.replace_schema_metadata(metadata), plain)
    with pytest.raises(ValueError, match="other classes than this code"):
        read_records(plain)
    with pytest.raises(ValueError, match="must have version 1 and the fields"):
        RecordsHeader.from_json('{"version": 1, "arm": "b"}')
