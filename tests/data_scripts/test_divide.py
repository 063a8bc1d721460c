"""`data_scripts.divide`: documents dealt out to splits, and cut."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data_scripts.divide import cut, divide, main
from tests.data_scripts.conftest import write_shard


def texts(folder: Path, split: str) -> list[str]:
    return pq.read_table(folder / f"{split}.parquet")["text"].to_pylist()


def test_documents_are_dealt_out_and_equal_ones_stay_together(tmp_path):
    documents = [f"document {i}" for i in range(20)]
    write_shard(tmp_path / "a.parquet", [*documents, None, "document 3"])
    counts = divide([str(tmp_path / "*.parquet")], tmp_path / "out", {"train": 8, "val": 2})
    assert counts == {"train": 17, "val": 4}
    train, val = (texts(tmp_path / "out", split) for split in ("train", "val"))
    assert sorted({*train, *val}) == sorted(documents)
    assert not set(train) & set(val)
    assert train.count("document 3") == 2
    again = divide([str(tmp_path / "*.parquet")], tmp_path / "two", {"train": 8, "val": 2})
    assert again == counts
    assert texts(tmp_path / "two", "val") == val


@pytest.mark.parametrize("length", [1, 5, 12, 100])
def test_pieces_make_up_the_text(length):
    text = "a line\nand some words, then averyverylongword at last "
    pieces = cut(text, length)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= length
    if length == 12:
        assert pieces[0] == "a line\nand "  # cut after a space where there is one


def test_pieces_go_where_their_document_goes(tmp_path):
    write_shard(tmp_path / "a.parquet", ["one two three", "four five six"])
    main(
        [
            *(str(tmp_path / "a.parquet"), "--out", str(tmp_path / "out")),
            *("--parts", "train=1", "val=1", "--piece-characters", "6", "--max-pieces", "2"),
        ]
    )
    assert texts(tmp_path / "out", "train") == ["one ", "two "]
    assert texts(tmp_path / "out", "val") == ["four ", "five "]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing*.parquet", "--parts", "train=1"], "nothing"),
        (["a.parquet", "--parts", "train"], "--parts must be NAME=SHARE"),
        (["a.parquet", "--parts", "train=0"], "--parts must be NAME=SHARE"),
    ],
)
def test_bad_input(tmp_path, arguments, message, capsys):
    write_shard(tmp_path / "a.parquet", ["text"])
    arguments[0] = str(tmp_path / arguments[0])
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
