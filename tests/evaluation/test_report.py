"""The report from synthetic records: pairing, numbers, files, and refusals."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from evaluation.class_bpb.statistics import bits_per_byte, compare
from evaluation.contrasts import contrast
from evaluation.records import Records, filter_records, write_records
from evaluation.report import build_report, main
from evaluation.tables import Table, split_table
from tests.evaluation.test_records import make_records


def improved(records: Records, saved: float, **changes) -> Records:
    """The same targets, every class's nats lower by a share that differs between documents."""
    share = saved * np.linspace(-0.1, 1.0, len(records.header.document_ids))[:, None]
    sums = records.sums._replace(nats=records.sums.nats * (1 - share))
    return replace(records, header=replace(records.header, **changes), sums=sums)


BASE = make_records(arm="b", baseline=None, has_table=False)
ARM = improved(BASE, 0.1, arm="b_table", baseline="b", has_table=True)


def write_run(folder: Path, *records: Records, flops: float | None = 1e6) -> Path:
    header = records[0].header
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"name": header.arm, "seed": header.seed}))
    if flops is not None:
        (folder / "results.json").write_text(json.dumps({"flops_per_token": flops}))
    for one in records:
        write_records(one, folder / "records" / f"{one.header.file_stem}.parquet")
    return folder


def test_contrast_is_the_engine_s_comparison() -> None:
    found = contrast(ARM, BASE, 100, seed=5)
    totals = (ARM.sums.nats.sum(1, keepdims=True), BASE.sums.nats.sum(1, keepdims=True))
    expected = compare(*totals, ARM.sums.num_bytes.sum(1, keepdims=True), 100, seed=5)
    assert found.comparison.gain_interval == expected.gain_interval
    base_bpb = bits_per_byte(BASE.sums.nats, BASE.sums.num_bytes)
    arm_bpb = bits_per_byte(ARM.sums.nats, ARM.sums.num_bytes)
    assert found.gain == pytest.approx(base_bpb - arm_bpb, abs=1e-12)  # float64 sums, reordered
    for partition in ("target_cell", "band", "table_state", "match"):
        split = found.gain_by(partition)
        assert split is not None
        assert math.fsum(split.values()) == pytest.approx(found.gain, abs=1e-12)


def test_other_row_lengths_are_summed_over_visibility() -> None:
    # Move every visible copy of the arm to the hidden cell of the same band.
    sums = [array.copy() for array in ARM.sums]
    for array in sums:
        for band in range(6):
            visible = slice((2 + 2 * band) * 9, (3 + 2 * band) * 9)
            hidden = slice((3 + 2 * band) * 9, (4 + 2 * band) * 9)
            array[:, hidden] += array[:, visible]
            array[:, visible] = 0
    moved = replace(ARM, sums=type(ARM.sums)(*sums), header=replace(ARM.header, row_length=64))
    found, before = contrast(moved, BASE, 10), contrast(ARM, BASE, 10)
    assert found.gain_by("target_cell") is None
    assert found.gain_by("band") == pytest.approx(before.gain_by("band"), abs=1e-12)
    assert found.gain_by("table_state") is not None
    # Equal counts do not save a partition whose meaning differs.
    renamed = replace(ARM, header=replace(ARM.header, table_source="shuffled"))
    assert contrast(renamed, BASE, 10).gain_by("table_state") is None


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        (replace(ARM, header=replace(ARM.header, set_name="other")), "set_name: other and dev"),
        (replace(ARM, header=replace(ARM.header, format="stride8-chunk")), "format: stride8"),
        (replace(ARM, header=replace(ARM.header, data_sha256="f")), "or another tokenizer"),
        (filter_records(ARM, drop=["one"]), "same documents in the same order"),
        (
            replace(ARM, header=replace(ARM.header, document_ids=("two", "one", "three", "four"))),
            "same documents in the same order",
        ),
        (
            replace(ARM, sums=ARM.sums._replace(num_bytes=ARM.sums.num_bytes * 2)),
            "same num_bytes in every document",
        ),
    ],
)
def test_unlike_scores_are_not_compared(arm: Records, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        contrast(arm, BASE)


def test_report_pairs_prints_and_writes(tmp_path: Path) -> None:
    base = write_run(tmp_path / "b", BASE)
    arm = write_run(tmp_path / "b_table", ARM)
    report = build_report([base, arm], tmp_path / "out", num_resamples=50)
    found = contrast(ARM, BASE, 50)
    low, high = found.comparison.gain_interval
    row = next(line for line in report.text.splitlines() if line.startswith("| b_table s44 "))
    cells = [cell.strip() for cell in row.strip("|").split("|")][:6]
    assert cells == [
        "b_table s44",
        f"{bits_per_byte(ARM.sums.nats, ARM.sums.num_bytes):.5f}",
        "b",
        f"{found.gain:+.4f}",
        f"[{low:+.4f}, {high:+.4f}]",
        "75.0%",
    ]
    assert "copy (4, 8] hidden" in report.text
    with (tmp_path / "out" / "dev.training.band.csv").open() as file:
        rows = list(csv.reader(file))
    split = found.gain_by("band")
    assert split is not None
    gains = [f"{gain:+.4f}" for gain in split.values()]
    assert [line[1].split()[0] for line in rows[1:-1]] == gains
    assert [line[0] for line in rows[1:3]] == ["order 0", "order 1"]
    assert rows[-1] == ["all", f"{found.gain:+.4f}"]
    written = (tmp_path / "out" / "report.md").read_text()
    assert report.groups[0].text in written
    assert report.groups[0].summary in written
    assert report.groups[0].summary.count("**") == 4  # two titles
    assert "![dev, training format (data dddddddd)](dev.training.png)" in written
    assert (tmp_path / "out" / "dev.training.png").read_bytes().startswith(b"\x89PNG")
    assert all(file.is_file() for file in report.files)
    contents = written.partition("\n\n")[0].splitlines()
    assert contents[0] == (
        "- [dev, training format (data dddddddd)](#dev-training-format-data-dddddddd)"
    )
    headings = [line for line in written.splitlines() if line.startswith("##")]
    assert len(contents) == len(headings) > 10


def test_of_many_contrasts_each_is_a_row() -> None:
    found = contrast(ARM, BASE, 50)
    few, many = (split_table([found] * count, "band") for count in (6, 7))
    assert few is not None
    assert many is not None
    assert few.columns == ("class", *["b_table s44 over b"] * 6)
    assert many.columns == ("contrast", *(row[0] for row in few.rows))
    assert many.rows == (("b_table s44 over b", *(row[1] for row in few.rows)),) * 7


def test_gains_are_written_into_runs(tmp_path: Path) -> None:
    base = write_run(tmp_path / "b", BASE)
    arm = write_run(tmp_path / "b_table", ARM)
    build_report([base, arm], tmp_path / "out", num_resamples=50, seed=3)
    gains = json.loads((arm / "gains.json").read_text())
    found = contrast(ARM, BASE, 50, seed=3)
    assert gains["bootstrap"] == {"num_resamples": 50, "seed": 3}
    entry = gains["sets"]["dev.training"]
    assert entry["gain"] == found.gain
    assert tuple(entry["gain_interval"]) == found.comparison.gain_interval
    assert entry["baseline_records_sha256"] == BASE.sha256
    assert entry["gain_by"]["band"] == found.gain_by("band")
    alone = json.loads((base / "gains.json").read_text())["sets"]["dev.training"]
    assert alone["baseline"] is None
    assert "gain" not in alone
    assert alone["bits_per_byte"] == bits_per_byte(BASE.sums.nats, BASE.sums.num_bytes)


def test_groups_do_not_mix(tmp_path: Path) -> None:
    strided = improved(ARM, 0.0, format="stride8-chunk")
    ablated = improved(BASE, -0.2, arm="b_table", baseline="b", has_table=True, ablated=True)
    runs = [
        write_run(tmp_path / "b", BASE),
        write_run(tmp_path / "b_table", ARM, strided, ablated),
        write_run(tmp_path / "b_s45", improved(BASE, 0.01, seed=45)),
    ]
    report = build_report(runs, tmp_path / "out", num_resamples=10)
    training, stride = report.groups
    assert [result.label for result in training.results] == [
        *("b s44", "b_table (ablated) s44", "b_table s44", "b s45")
    ]
    pairs = {result.label: result.contrast for result in training.results}
    assert pairs["b s45"] is None
    ablated_pair = pairs["b_table (ablated) s44"]
    assert ablated_pair is not None
    assert ablated_pair.baseline.sha256 == BASE.sha256
    assert ablated_pair.gain < 0
    assert [result.contrast for result in stride.results] == [None]
    assert "b (missing)" in stride.text
    names = set(json.loads((runs[1] / "gains.json").read_text())["sets"])
    assert names == {"dev.training", "dev.training-ablated", "dev.stride8-chunk"}


def test_records_alone_are_enough(tmp_path: Path, capsys) -> None:
    files = []
    for name, records in (("x", BASE), ("y", ARM)):
        files.append(tmp_path / f"{name}.parquet")
        write_records(records, files[-1])
    assert main([*map(str, files), "--out", str(tmp_path / "out"), "--num-resamples", "10"]) == 0
    assert "b_table s44" in capsys.readouterr().out
    quiet = [*map(str, files), "--out", str(tmp_path / "out"), "--num-resamples", "10", "--quiet"]
    assert main(quiet) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Written: ")
    assert not list(tmp_path.glob("*.json"))


def test_one_document_has_no_interval_in_json(tmp_path: Path) -> None:
    arm = write_run(tmp_path / "t", filter_records(ARM, keep=["two"]))
    base = write_run(tmp_path / "b", filter_records(BASE, keep=["two"]), flops=None)
    with pytest.warns(UserWarning, match="One document"):
        build_report([base, arm], tmp_path / "out")
    assert (
        json.loads((arm / "gains.json").read_text())["sets"]["dev.training"]["gain_interval"]
        is None
    )


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["empty"], "has no records. Score it first"),
        (["b", "other_b"], "There must be one result for b, seed 44"),
        (["b", "short"], "same documents in the same order"),
    ],
)
def test_bad_input_exits_2_with_one_line(tmp_path: Path, capsys, paths, message) -> None:
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "b", BASE)
    write_run(tmp_path / "other_b", improved(BASE, 0.5))
    write_run(tmp_path / "short", filter_records(ARM, drop=["one"]))
    arguments = [str(tmp_path / path) for path in paths]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert message in error[0]


def test_tables_line_up() -> None:
    table = Table("t", "Title", ("a", "value"), (("row", "1"), ("a longer row", "+0.1234")))
    assert table.to_markdown().splitlines()[2:] == [
        "| a            |   value |",
        "| :----------- | ------: |",
        "| row          |       1 |",
        "| a longer row | +0.1234 |",
    ]
    assert table.to_csv() == "a,value\nrow,1\na longer row,+0.1234\n"


def test_help_reads_well(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "95% document-bootstrap" in capsys.readouterr().out


def test_summary_prints_the_arms_and_target_cells_alone(tmp_path: Path, capsys) -> None:
    base = make_records(arm="b")
    runs = [
        write_run(tmp_path / "b", base),
        write_run(tmp_path / "b_table", improved(base, 0.1, arm="b_table", baseline="b")),
    ]
    assert main([*map(str, runs), "--out", str(tmp_path / "out"), "--summary"]) == 0
    printed = capsys.readouterr().out
    assert "Bits per byte" in printed
    assert "Gain by target cell" in printed
    assert "Table 6" not in printed
