"""Records from the command line: show, merge, diff and filter by lists of documents."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.contrasts import contrast
from evaluation.records import filter_records, read_records, write_records
from evaluation.records_command import main
from tests.evaluation.test_report import ARM, BASE


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / "arm.parquet", tmp_path / "base.parquet"]
    for path, records in zip(paths, (ARM, BASE), strict=True):
        write_records(records, path)
    (tmp_path / "overlaps.txt").write_text("# shared openings\ntwo\nof another set\n")
    return [str(path) for path in paths]


def test_filter_and_merge_are_inverse(files, tmp_path, capsys) -> None:
    left, right, whole = (str(tmp_path / f"{name}.parquet") for name in ("left", "right", "whole"))
    overlaps = str(tmp_path / "overlaps.txt")
    assert main(["filter", files[0], "--drop", overlaps, "--out", left]) == 0
    assert read_records(Path(left)).sha256 == filter_records(ARM, drop=["two"]).sha256
    (tmp_path / "keep.txt").write_text("two\n")
    assert main(["filter", files[0], "--keep", str(tmp_path / "keep.txt"), "--out", right]) == 0
    assert main(["merge", left, right, "--out", whole]) == 0
    ids = ("one", "three", "four", "two")
    assert read_records(Path(whole)).header.document_ids == ids
    capsys.readouterr()
    assert main(["show", whole, files[0]]) == 0
    lines = capsys.readouterr().out.splitlines()
    merged, original = [line for line in lines if "bpb" in line]
    assert merged == original


def test_diff_with_exclusions(files, tmp_path, capsys) -> None:
    options = ["--num-resamples", "20", "--drop", str(tmp_path / "overlaps.txt")]
    assert main(["diff", *files, *options]) == 0
    kept = [filter_records(one, drop=["two"]) for one in (ARM, BASE)]
    output = capsys.readouterr().out
    assert f"gain {contrast(*kept, 20).gain:+.5f} bpb" in output
    assert "of 3 documents" in output
    assert "Gain by target cell" in output


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["filter", "0", "--out", "x"], "filter needs --keep or --drop"),
        (["filter", "0", "--keep", "overlaps.txt", "--out", "x"], "Every listed document must be"),
        (["merge", "0", "1", "--out", "x"], "Parts must be scored alike; they differ in arm"),
        (["merge", "0", "0", "--out", "x"], "Document ids must be distinct"),
        (["merge", "0", "--out", "base.parquet"], "exists. Choose another --out"),
        (["diff", "0", "other.parquet"], "must be scored alike to be compared; found set_name"),
        (["show", "overlaps.txt"], "must be a Parquet file of records"),
    ],
)
def test_bad_commands_exit_2_with_one_line(files, tmp_path, capsys, command, message) -> None:
    other = replace(BASE, header=replace(BASE.header, set_name="other"))
    write_records(other, tmp_path / "other.parquet")
    names = {"0": files[0], "1": files[1]}
    given = [
        names.get(word, str(tmp_path / word) if "." in word or word == "x" else word)
        for word in command
    ]
    assert main(given) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_the_module_is_a_command(files) -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "evaluation.records", "show", files[0]]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert "b_table s44 on dev, training format" in found.stdout
