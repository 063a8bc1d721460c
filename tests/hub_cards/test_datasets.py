"""A chunk set on the Hub: its card, its configurations, and what stays closed."""

import json
import shutil

import pytest
import yaml

from data_scripts.build import main as build
from data_scripts.chunk_set import ChunkSet, file_sha256
from data_scripts.export import export_parquet
from hub_cards.dataset_cards import dataset_card
from hub_cards.push import main
from hub_cards.rendering import sections, tables


def _edit(path, change):
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def test_the_card_says_what_the_files_say(parquet_set, chunk_set):
    text = dataset_card(parquet_set, "me/set", "cc0-1.0")
    manifest = json.loads((chunk_set / "manifest.json").read_text())
    counts = json.loads((parquet_set / "counts.json").read_text())
    header = yaml.safe_load(text.split("---", 2)[1])
    assert header["configs"] == counts["configs"]
    assert header["license"] == "cc0-1.0"
    assert [title for title, _ in sections(text)] == [
        *("set", "Load", "Sources", "Filter", "Splits", "Overlaps", "Hashes", "Licence"),
        "Citation",
    ]
    found = {row["split"]: row for rows in tables(text) for row in rows if "targets" in row}
    assert set(found) == {"train", "dev_val"}
    for name, row in found.items():
        for column in ("documents", "chunks", "targets"):
            assert row[column] == f"{manifest['splits'][name][f'num_{column}']:,}"
    for shown in (
        file_sha256(chunk_set / "manifest.json"),
        ChunkSet.open(chunk_set).target_sha256("dev_val"),
        f"at least {manifest['min_tokens']:,} tokens",
        *manifest["notes"],
    ):
        assert shown in text


def test_another_manifest_or_count_is_refused(parquet_set, tmp_path):
    folder = shutil.copytree(parquet_set, tmp_path / "one")
    _edit(folder / "manifest.json", lambda m: m.update(seed=7))
    with pytest.raises(ValueError, match=r"manifest.json must have the sha256 of counts.json"):
        dataset_card(folder, "me/set", "mit")
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"manifest.json, which does not exist"):
        dataset_card(folder, "me/set", "mit")
    with pytest.raises(ValueError, match="license must be one of"):
        dataset_card(parquet_set, "me/set", "free")


def test_a_chunk_set_is_exported_on_the_way(hub, chunk_set, parquet_set):
    flags = ["--repo-id", "me/set", "--license", "other", "--license-name", "the authors' own"]
    assert main([str(chunk_set), *flags]) == 0
    files = hub.repos["dataset", "me/set"].resolve("main").files
    for path in parquet_set.rglob("*"):
        name = path.relative_to(parquet_set).as_posix()
        if path.is_file() and name != "README.md":
            assert files[name].content == path.read_bytes()
    card = files["README.md"].content.decode()
    assert "license_name: the authors' own" in card
    heads = dict(hub.repos["dataset", "me/set"].branches)
    assert main([str(chunk_set), *flags]) == 0
    assert hub.repos["dataset", "me/set"].branches == heads


def test_a_confirmation_split_stays_at_home_and_the_card_says_so(hub, tmp_path):
    for split, letter in (("train", "a"), ("dev", "b"), ("final", "c")):
        (tmp_path / split).mkdir()
        for number in range(4):
            words = (f"{letter}{number}{i * 7919 % 97} " for i in range(400))
            (tmp_path / split / f"{number}.txt").write_text("".join(words))
    out = tmp_path / "set"
    globs = [f"{split}={tmp_path}/{split}/*.txt" for split in ("train", "dev", "final")]
    build(
        [
            *("text", "--split", *globs, "--confirmation", "final"),
            *("--chunk_length", "64", "--vocab_size", "300", "--out", str(out)),
        ]
    )
    assert main([str(out), "--repo_id", "me/set", "--license", "mit"]) == 0
    files = hub.repos["dataset", "me/set"].resolve("main").files
    assert not any("final-" in name for name in files)
    assert "`final` is for one registered confirmation" in files["README.md"].content.decode()
    opened = tmp_path / "opened"
    export_parquet(ChunkSet.open(out), opened, include_confirmation=True)
    assert main([str(opened), "--repo_id", "me/opened", "--license", "mit"]) == 0
    files = hub.repos["dataset", "me/opened"].resolve("main").files
    assert any(name.startswith("confirmation/final-") for name in files)
    assert "registered confirmation" not in files["README.md"].content.decode()
