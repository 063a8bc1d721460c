"""`build climbmix` against a test Hub: a small dataset in the same schema, a small shard list."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_scripts import downloads, staging
from data_scripts.build import main as build
from data_scripts.chunk_set import ChunkSet
from data_scripts.climbmix import MANIFESTS, ShardList
from data_scripts.downloads import Retries
from data_scripts.verify import find_problems
from data_scripts.verify import main as verify
from tests.data_scripts.conftest import make_text, write_shard
from tests.data_scripts.test_build import hashes
from tests.hub_server import Fault

REPO = "karpathy/small"
SHARD_LIST = {
    "repo_id": REPO,
    "file": "shard_{:05d}.parquet",
    "chunk_length": 64,
    "min_tokens": 65,
    "tokenizer": {"shards": [[0, 1]], "vocab_size": 384, "characters": 1_000_000},
    "splits": {
        "train": {"shards": [[2, 3], [5, 6]], "kind": "chunks"},
        "dev_val": {"shards": [[9, 9]], "kind": "documents", "overlaps": "list"},
        "confirmation": {
            "shards": [[7, 8]],
            "kind": "documents",
            "overlaps": "drop",
            "confirmation": True,
        },
    },
    "expected": {
        "train": {"num_chunks": 100},
        "dev_val": {"num_documents": 6, "num_overlaps": 1},
        "confirmation": {"num_overlaps": 2},
    },
}


def shard_texts(number: int) -> list[str]:
    texts = [make_text(100 * number + j, 5 + 60 * (j % 4)) for j in range(9)]
    if number == 9:  # one development document begins like a training document
        texts.append(make_text(203, 185) + " and more")
    if number == 8:  # and two confirmation documents like one of each
        texts += [make_text(607, 185) + " and more", make_text(903, 185) + " and so on"]
    return texts


@pytest.fixture(scope="module")
def content(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("hub")
    return {
        f"shard_{i:05d}.parquet": write_shard(folder / "shard", shard_texts(i)).read_bytes()
        for i in range(10)
    }


@pytest.fixture
def listed(hub, content, tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(downloads, "RETRIES", Retries(attempts=4, first_wait=0.01, timeout=5.0))
    hub.add_repo(REPO, content)
    path = tmp_path / "list.json"
    path.write_text(json.dumps(SHARD_LIST))
    return path


def arguments(listed: Path, out: Path, *more: str) -> list[str]:
    return ["climbmix", "--manifest", str(listed), "--out", str(out), *more]


def downloaded(hub) -> list[str]:
    return [request for request in hub.requests if request.startswith("GET /datasets")]


def test_what_is_built_and_recorded(hub, listed, tmp_path, capsys):
    build(arguments(listed, tmp_path / "set"))
    chunk_set = ChunkSet.open(tmp_path / "set", verify=True)
    revision = hub.repos["dataset", REPO].branches["main"]
    assert chunk_set.manifest["hub"] == {"repo_id": REPO, "revision": revision}
    splits = chunk_set.manifest["splits"]
    train_shards = [shard["name"] for shard in splits["train"]["shards"]]
    assert train_shards == [f"shard_{i:05d}.parquet" for i in (2, 3, 5, 6)]
    files = hub.repos["dataset", REPO].resolve("main").files
    assert all(
        shard["sha256"] == files[shard["name"]].sha256
        for split in splits.values()
        for shard in split["shards"]
    )
    assert [overlap["split"] for overlap in splits["dev_val"]["overlaps"]] == ["train"]
    assert splits["dev_val"]["num_documents"] == splits["dev_val"]["num_documents_before_overlaps"]
    confirmation = splits["confirmation"]
    assert [overlap["split"] for overlap in confirmation["overlaps"]] == ["train", "dev_val"]
    assert confirmation["num_documents"] == confirmation["num_documents_before_overlaps"] - 2
    assert chunk_set.is_confirmation("confirmation")
    printed = capsys.readouterr().out
    assert f"near {100:>11,} " in printed
    num_chunks = splits["train"]["num_chunks"]
    assert f"found {num_chunks:>11,}  ({num_chunks / 100 - 1:+.2%})" in printed
    assert f"2 overlaps dropped of {confirmation['num_documents_before_overlaps']}" in printed
    assert find_problems(tmp_path / "set") == []
    assert (tmp_path / "set.shards" / "shard_00002.parquet").is_file()


def test_the_same_set_as_from_local_files(hub, listed, content, tmp_path):
    build(arguments(listed, tmp_path / "set"))
    folder = tmp_path / "local"
    folder.mkdir()
    for name, raw in content.items():
        (folder / name).write_bytes(raw)
    build(
        [
            *("parquet", "--out", str(tmp_path / "other"), "--chunk_length", "64", "--split"),
            *(f"train={folder}/shard_0000[2356].parquet", f"dev_val={folder}/shard_00009.parquet"),
            *("--tokenizer", str(tmp_path / "set"), "--keep_overlaps"),
        ]
    )
    hub_set, local_set = ChunkSet.open(tmp_path / "set"), ChunkSet.open(tmp_path / "other")
    assert np.array_equal(hub_set.train_chunks(), local_set.train_chunks())
    assert hub_set.target_sha256("dev_val") == local_set.target_sha256("dev_val")


def test_bounded_disk_and_faults_change_nothing(hub, listed, tmp_path):
    build(arguments(listed, tmp_path / "plain"))
    hub.requests.clear()
    hub.faults += [
        Fault("GET /datasets.*00003", cut_after=500, times=2),
        Fault("GET /datasets.*00006", status=429, headers={"Retry-After": "0"}),
        Fault("GET /datasets.*00009", corrupt=True),
        Fault("GET /datasets.*00007", truncate_to=300),
        Fault("GET /datasets.*00008", status=503),
    ]
    build(arguments(listed, tmp_path / "set", "--delete_shards"))
    assert hashes(tmp_path / "set") == hashes(tmp_path / "plain")
    assert all(fault.seen for fault in hub.faults)
    assert not (tmp_path / "set.shards").exists()


def test_only_a_few_shards_lie_on_the_disk(hub, listed, tmp_path, monkeypatch):
    train = {"train": {"shards": [[0, 9]], "kind": "chunks"}}
    listed.write_text(json.dumps(SHARD_LIST | {"splits": train, "expected": {}}))
    most = 0
    tokenise = staging.tokenise_documents

    def watched(documents, tokenizer, rules):
        nonlocal most
        result = tokenise(documents, tokenizer, rules)
        most = max(most, len(list((tmp_path / "down").glob("[!.]*.parquet"))))
        return result

    build(arguments(listed, tmp_path / "first"))  # for its tokenizer
    monkeypatch.setattr(staging, "tokenise_documents", watched)
    options = ("--tokenizer", str(tmp_path / "first"), "--num_downloads", "1", "--delete_shards")
    build(arguments(listed, tmp_path / "set", *options, "--download_dir", str(tmp_path / "down")))
    assert 1 <= most <= 4  # of ten: one is read, two are ahead, one may still be falling in


def test_deleting_shards_leaves_other_files_alone(hub, listed, tmp_path):
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    options = ("--delete_shards", "--download_dir", str(folder), "--max_chunks", "10")
    build(arguments(listed, tmp_path / "set", *options))
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]
    assert len(ChunkSet.open(tmp_path / "set").train_chunks()) == 10


def test_an_interrupted_build_downloads_only_what_is_missing(
    hub,
    listed,
    tmp_path,
    monkeypatch,
):
    build(arguments(listed, tmp_path / "plain"))
    tokenise = staging.tokenise_documents
    calls = []

    def interrupted(documents, tokenizer, rules):
        calls.append(1)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return tokenise(documents, tokenizer, rules)

    monkeypatch.setattr(staging, "tokenise_documents", interrupted)
    options = ("--delete_shards", "--num_downloads", "1")
    with pytest.raises(KeyboardInterrupt):
        build(arguments(listed, tmp_path / "set", *options))
    monkeypatch.undo()
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    hub.requests.clear()
    trained = []
    monkeypatch.setattr("data_scripts.build.train_tokenizer", lambda *_, **__: trained.append(1))
    build(arguments(listed, tmp_path / "set", *options))
    assert hashes(tmp_path / "set") == hashes(tmp_path / "plain")
    assert trained == []  # the tokenizer of the interrupted build was taken
    again = {request.rpartition("/")[2].split()[0] for request in downloaded(hub)}
    assert not again & {f"shard_{i:05d}.parquet" for i in (0, 1, 2, 3)}
    # Of shards 5 and 6, being read and ahead of it, what had arrived is not loaded again.
    assert {f"shard_{i:05d}.parquet" for i in (7, 8, 9)} <= again


@pytest.mark.multi_process
def test_several_processes_as_a_command(hub, listed, tmp_path):
    build(arguments(listed, tmp_path / "plain"))
    command = [sys.executable, "-m", "data_scripts.build"]
    options = ("--num-processes", "2", "--delete-shards")
    done = subprocess.run(
        [*command, *arguments(listed, tmp_path / "set", *options)],
        env={**os.environ, **hub.environment()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert hashes(tmp_path / "set") == hashes(tmp_path / "plain")
    assert not (tmp_path / "set.shards").exists()


def test_a_shard_without_text_is_named(hub, listed, tmp_path):
    path = write_shard(tmp_path / "bad", ["x"], column="content")
    hub.commit(REPO, {"shard_00005.parquet": path.read_bytes()})
    with pytest.raises(ValueError, match=r"shard_00005\.parquet must have a string column 'text'"):
        build(arguments(listed, tmp_path / "set"))
    assert not (tmp_path / "set").exists()


def test_a_missing_shard_is_named_before_anything_is_downloaded(hub, listed, tmp_path):
    repo = hub.repos["dataset", REPO]
    files = dict(repo.resolve("main").files)
    del files["shard_00006.parquet"]
    repo.commit("main", files, "one less")
    with pytest.raises(ValueError, match=r"1 are missing, the first shard_00006\.parquet"):
        build(arguments(listed, tmp_path / "set"))
    assert downloaded(hub) == []
    assert not (tmp_path / "set.building").exists()


def test_an_older_revision(hub, listed, content, tmp_path):
    first = hub.repos["dataset", REPO].branches["main"]
    build(arguments(listed, tmp_path / "set"))
    hub.commit(REPO, {"shard_00002.parquet": content["shard_00004.parquet"]})
    build(arguments(listed, tmp_path / "later"))
    build(arguments(listed, tmp_path / "again", "--revision", first))
    assert hashes(tmp_path / "again") == hashes(tmp_path / "set")
    sets = [ChunkSet.open(tmp_path / name) for name in ("set", "later")]
    assert sets[0].target_sha256("train") != sets[1].target_sha256("train")


def test_the_papers_list():
    listed = ShardList.read(MANIFESTS / "climbmix.json")
    files = listed.split_files()
    assert len(files["train"]) == 120
    assert files["train"][82:84] == ["shard_00102.parquet", "shard_00200.parquet"]
    assert files["dev_heldout"] == ["shard_06540.parquet", "shard_06541.parquet"]
    assert listed.files(listed.content["tokenizer"]["shards"])[-1] == "shard_00009.parquet"
    assert listed.content["expected"]["train"]["num_chunks"] == 62_538
    assert listed.content["splits"]["confirmation"]["confirmation"]
    packed = ShardList.read(MANIFESTS / "climbmix_packed.json").content
    assert packed["splits"]["val"]["max_chunks"] * packed["chunk_length"] == 40 * 2**19


def test_a_list_that_is_none(tmp_path):
    path = tmp_path / "list.json"
    with pytest.raises(ValueError, match="--manifest must be a JSON file"):
        ShardList.read(path)
    path.write_text('{"repo_id": "a/b"}')
    with pytest.raises(ValueError, match=r"must hold .*tokenizer.*; found repo_id"):
        ShardList.read(path)
    path.write_text(json.dumps(SHARD_LIST | {"splits": {"train": {"shard": [[1, 2]]}}}))
    with pytest.raises(ValueError, match=r"split train may hold .*found shard\."):
        ShardList.read(path)


def test_verify_asks_the_hub_for_the_shards(hub, listed, content, tmp_path, capsys):
    build(arguments(listed, tmp_path / "set"))
    hub.requests.clear()
    verify([str(tmp_path / "set")])
    assert any("paths-info" in request for request in hub.requests)
    assert downloaded(hub) == []
    repo = hub.repos["dataset", REPO]
    first = repo.branches["main"]
    files = dict(repo.commits[first].files)
    files["shard_00003.parquet"] = files["shard_00004.parquet"]
    repo.commits[first].files.update(files)
    with pytest.raises(ValueError, match=r"shard shard_00003\.parquet of .* is not the one"):
        verify([str(tmp_path / "set")])
    del repo.commits[first].files["shard_00003.parquet"]
    with pytest.raises(ValueError, match=r"1 are missing, the first shard_00003\.parquet"):
        verify([str(tmp_path / "set")])
    hub.requests.clear()
    verify([str(tmp_path / "set"), "--no-download"])
    assert hub.requests == []
    assert "verified" in capsys.readouterr().out


def test_verify_names_a_local_shard_that_is_missing_or_another(hub, listed, tmp_path):
    build(arguments(listed, tmp_path / "set"))
    shards = tmp_path / "set.shards"
    verify([str(tmp_path / "set"), "--shards", str(shards)])
    (shards / "shard_00005.parquet").unlink()
    with (shards / "shard_00008.parquet").open("ab") as file:
        file.write(b"x")
    with pytest.raises(
        ValueError,
        match=r"shard shard_00005\.parquet is missing.*shard shard_00008\.parquet in .* is not the",
    ):
        verify([str(tmp_path / "set"), "--shards", str(shards)])


def test_packed_rows_from_the_hub(hub, listed, tmp_path):
    splits = {
        "train": {"shards": [[0, 3]], "kind": "chunks", "content": "packed"},
        "val": {"shards": [[9, 9]], "kind": "documents", "content": "packed", "max_chunks": 5},
    }
    packed = SHARD_LIST | {"splits": splits, "chunk_length": 32, "expected": {}, "min_tokens": 2}
    listed.write_text(json.dumps(packed))
    arguments = ["packed", "--manifest", str(listed), "--out", str(tmp_path / "set")]
    build([*arguments, "--delete_shards"])
    # Two of the shards are the tokenizer's too; none is downloaded twice.
    assert len(downloaded(hub)) == len(set(downloaded(hub))) == 5
    assert not (tmp_path / "set.shards").exists()
    chunk_set = ChunkSet.open(tmp_path / "set", verify=True)
    assert chunk_set.chunk_length == 32
    assert len(chunk_set.documents("val")) == 5
    assert chunk_set.manifest["source"] == "packed"
    assert find_problems(tmp_path / "set") == []
