from __future__ import annotations

import base64
import fcntl
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data_scripts import plans as plans_module
from data_scripts import staging
from data_scripts.build import main as build
from data_scripts.chunk_set import ChunkSet, file_sha256
from data_scripts.command_line import normalise_flags, run
from data_scripts.sources import python_files
from data_scripts.verify import find_problems
from tests.data_scripts.conftest import build_arguments, make_text, write_shard


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): file_sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_second_build_is_equal(chunk_set, shards, tmp_path):
    build(build_arguments(shards, tmp_path / "set"))
    assert hashes(tmp_path / "set") == hashes(chunk_set.path)
    assert [path.name for path in tmp_path.iterdir()] == ["set"]  # nothing is left beside it


@pytest.mark.multi_process
def test_two_processes_build_the_same(chunk_set, shards, tmp_path):
    build([*build_arguments(shards, tmp_path / "set"), "--num_processes", "2"])
    assert hashes(tmp_path / "set") == hashes(chunk_set.path)


@pytest.mark.parametrize("num_done", range(5))
def test_an_interrupted_build_leaves_no_set_and_goes_on(
    chunk_set, shards, tmp_path, monkeypatch, num_done
):
    out = tmp_path / "set"
    tokenise = staging.tokenise_documents
    calls = []

    def interrupted(documents, tokenizer, rules):
        calls.append(1)
        if len(calls) > num_done:
            raise KeyboardInterrupt
        return tokenise(documents, tokenizer, rules)

    monkeypatch.setattr(staging, "tokenise_documents", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(build_arguments(shards, out))
    for folder in (out, tmp_path / "set.building", tmp_path / "set.building" / "set"):
        with pytest.raises(ValueError, match=r"must hold manifest.json"):
            ChunkSet.open(folder)
    calls.clear()

    def counted(documents, tokenizer, rules):
        calls.append(1)
        return tokenise(documents, tokenizer, rules)

    monkeypatch.setattr(staging, "tokenise_documents", counted)
    build(build_arguments(shards, out))
    assert len(calls) == 5 - num_done  # five shards in all; the finished ones are not done again
    assert hashes(out) == hashes(chunk_set.path)


@pytest.mark.multi_process
@pytest.mark.parametrize("seen", ["train/00000.json", "train/00002.json", "dev/00000.json"])
def test_a_killed_build_goes_on(chunk_set, shards, tmp_path, seen):
    """SIGKILL to the build alone, its workers left behind, as soon as a file is there."""
    out = tmp_path / "set"
    arguments = [*build_arguments(shards, out), "--num_processes", "2"]
    command = [sys.executable, "-m", "data_scripts.build", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as build_:
        while not (tmp_path / "set.building" / "shards" / seen).exists():
            assert build_.poll() is None, "the build ended before it could be killed"
            time.sleep(0.001)
        build_.kill()
    assert not out.exists()
    build(build_arguments(shards, out))
    assert hashes(out) == hashes(chunk_set.path)


def test_interrupted_while_the_set_is_written(chunk_set, shards, tmp_path, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("data_scripts.assemble._manifest", stop)
    with pytest.raises(KeyboardInterrupt):
        build(build_arguments(shards, tmp_path / "set"))
    monkeypatch.undo()
    assert not (tmp_path / "set").exists()
    build(build_arguments(shards, tmp_path / "set"))
    assert hashes(tmp_path / "set") == hashes(chunk_set.path)


def test_a_changed_shard_is_tokenised_again(shards, tmp_path, monkeypatch):
    changed = tmp_path / "shards"
    changed.mkdir()
    for path in shards.iterdir():
        (changed / path.name).write_bytes(path.read_bytes())
    arguments = [*build_arguments(changed, tmp_path / "set"), "--tokenizer", str(tmp_path / "tok")]
    build(build_arguments(changed, tmp_path / "first"))
    (tmp_path / "first" / "tokenizer").rename(tmp_path / "tok")
    monkeypatch.setattr("data_scripts.assemble._manifest", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        build(arguments)
    monkeypatch.undo()
    new_text = make_text(12345, 200)
    write_shard(changed / "shard_00001.parquet", [new_text])
    build(arguments)
    fresh = [*build_arguments(changed, tmp_path / "again"), "--tokenizer", str(tmp_path / "tok")]
    build(fresh)
    assert hashes(tmp_path / "set") == hashes(tmp_path / "again")


def test_two_builds_into_one_folder(shards, tmp_path):
    (tmp_path / "set.building").mkdir()
    with (tmp_path / "set.building" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"another build into .*set is running"):
            build(build_arguments(shards, tmp_path / "set"))
    build(build_arguments(shards, tmp_path / "set"))


def test_a_folder_that_is_taken(shards, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="--out must be a new or an empty folder"):
        build(build_arguments(shards, tmp_path / "set"))
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_limits_and_kept_overlaps(shards, tmp_path):
    arguments = build_arguments(shards, tmp_path / "set")
    arguments += ["--max_chunks", "7", "--max-documents", "2", "--max_document_tokens", "100"]
    build([*arguments, "--keep_overlaps", "--min_tokens", "80"])
    chunk_set = ChunkSet.open(tmp_path / "set", verify=True)
    assert len(chunk_set.train_chunks()) == 7
    splits = chunk_set.manifest["splits"]
    assert splits["dev"]["num_documents"] == splits["confirmation"]["num_documents"] == 2
    assert set(np.diff(chunk_set.documents("dev").offsets)) == {100}
    # make_text(902) comes third in dev, so it is not among dev's first two.
    assert chunk_set.manifest["splits"]["confirmation"]["overlaps"] == []
    assert find_problems(chunk_set.path) == []


def test_listed_overlaps_verify(shards, tmp_path):
    build([*build_arguments(shards, tmp_path / "set"), "--keep_overlaps"])
    chunk_set = ChunkSet.open(tmp_path / "set")
    assert len(chunk_set.documents("dev")) == 6
    assert len(chunk_set.manifest["splits"]["dev"]["overlaps"]) == 1
    assert find_problems(chunk_set.path) == []


def test_text_files(tmp_path, chunk_set):
    for i in range(6):
        folder = tmp_path / ("a" if i < 4 else "b") / "deep"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.txt").write_bytes(make_text(i, 150).encode().replace(b" if ", b"\r\n"))
    build(
        [
            *("text", "--out", str(tmp_path / "set"), "--chunk_length", "64", "--tokenizer"),
            *(str(chunk_set.path), "--split", f"train={tmp_path}/a/**/*.txt"),
            f"dev={tmp_path}/b/**/*.txt",
        ]
    )
    text_set = ChunkSet.open(tmp_path / "set", verify=True)
    assert text_set.document_list("train")["ids"] == ["0.txt", "1.txt", "2.txt", "3.txt"]
    document = text_set.documents("dev").document(0)
    raw = (tmp_path / "b" / "deep" / "4.txt").read_bytes()
    assert text_set.token_bytes()[document].sum() == len(raw)  # line ends are kept as they are


def test_a_vocabulary_over_16_bits_is_stored_in_32(shards, tmp_path):
    words = ("".join(letters) for letters in itertools.product("abcdefghijklmnopq", repeat=4))
    tokens = [*(bytes([i]) for i in range(256)), *(word.encode() for word in words)]
    lines = [f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens)]
    (tmp_path / "large.tiktoken").write_text("".join(lines))
    arguments = build_arguments(shards, tmp_path / "set")
    build([*arguments, "--tokenizer", str(tmp_path / "large.tiktoken")])
    chunk_set = ChunkSet.open(tmp_path / "set", verify=True)
    assert chunk_set.train_chunks().dtype == np.uint32
    assert chunk_set.vocab_size == len(tokens) + 4
    assert find_problems(chunk_set.path) == []


@pytest.fixture
def small_library(tmp_path, monkeypatch):
    """A standard library without tests, and installed packages, both made of our text."""
    library, packages = tmp_path / "library", tmp_path / "packages"
    for root, first, count in ((library, 0, 30), (packages, 100, 40)):
        (root / "sub").mkdir(parents=True)
        for i in range(count):
            (root / "sub" / f"{i}.py").write_text(make_text(first + i, 150), encoding="utf-8")
    (library / "bad_encoding.py").write_bytes(b"\xff" * 5000)
    (library / "encodings").mkdir()
    (library / "encodings" / "table.py").write_text(make_text(1, 500))
    (library / "site-packages").mkdir()
    (library / "site-packages" / "other.py").write_text(make_text(2, 500))
    monkeypatch.setattr(plans_module, "standard_library", lambda: library)
    monkeypatch.setattr(plans_module, "installed_packages", lambda: packages)
    return library


STDLIB = [
    *("stdlib", "--chunk_length", "64", "--vocab_size", "384", "--num_dev_val", "3"),
    *("--num_dev_heldout", "2", "--out"),
]


def test_a_library_without_tests_is_topped_up_and_says_so(small_library, tmp_path, capsys):
    build([*STDLIB, str(tmp_path / "set"), "--max_chunks", "150"])
    chunk_set = ChunkSet.open(tmp_path / "set", verify=True)
    assert "training is topped up from installed packages" in capsys.readouterr().out
    assert any("topped up" in note for note in chunk_set.manifest["notes"])
    shards = [shard["name"] for shard in chunk_set.manifest["splits"]["train"]["shards"]]
    assert shards[0].startswith("stdlib") and shards[-1].startswith("packages")  # noqa: PT018
    assert len(chunk_set.train_chunks()) == 150
    assert (len(chunk_set.documents("dev_val")), len(chunk_set.documents("dev_heldout"))) == (3, 2)


def test_a_library_that_is_large_enough_is_not_topped_up(small_library, tmp_path, capsys):
    build([*STDLIB, str(tmp_path / "set"), "--max_chunks", "30"])
    assert "topped up" not in capsys.readouterr().out
    assert len(ChunkSet.open(tmp_path / "set").train_chunks()) == 30


def test_a_library_with_a_confirmation_split(small_library, tmp_path):
    more = ["--num_confirmation", "2"]
    build([*STDLIB, str(tmp_path / "set"), "--max_chunks", "30", *more])
    chunk_set = ChunkSet.open(tmp_path / "set", verify=True)
    assert chunk_set.is_confirmation("confirmation")
    assert chunk_set.manifest["splits"]["confirmation"]["num_documents"] == 2
    assert not chunk_set.is_confirmation("dev_val")


def test_a_library_that_is_too_small(small_library, tmp_path):
    with pytest.raises(
        ValueError, match=r"at least 200 long Python files; found 30 in .*build text"
    ):
        build([*STDLIB, str(tmp_path / "set"), "--num_dev_val", "48"])


def test_python_files_leave_out_what_is_no_code(small_library):
    files = python_files(small_library, 100)
    assert len(files) == 30
    assert all(name.startswith("sub/") for name in files)
    assert files != sorted(files)
    assert files == python_files(small_library, 100)
    assert python_files(small_library, 10**6) == []


@pytest.mark.slow
def test_the_demos_set(tmp_path):
    build(["stdlib", "--out", str(tmp_path / "set")])
    chunk_set = ChunkSet.open(tmp_path / "set", verify=True)
    assert (chunk_set.vocab_size, chunk_set.chunk_length) == (4096, 1024)
    assert chunk_set.evaluation_splits() == ["dev_val", "dev_heldout"]
    assert len(chunk_set.train_chunks()) == 480
    assert find_problems(chunk_set.path) == []


def swap(pattern: str, replacement: str):
    return lambda arguments: [argument.replace(pattern, replacement) for argument in arguments]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda a: [*a, "--split", "dev=x"], "--split dev is given twice"),
        (lambda a: [*a, "--split", "test"], "--split must be NAME=GLOB; found 'test'"),
        (swap("train=", "other="), "must name the training split train; found other"),
        (swap("shard_*", "none_*"), "must name at least one file"),
        (swap("dev=", "../dev="), "a split's name must be letters"),
        (swap("dev=", "tokenizer="), "cannot be named 'tokenizer'"),
        (lambda a: [*a, "--confirmation", "train"], "--confirmation must name evaluation splits"),
        (lambda a: [*a, "--confirmation", "tset"], "--confirmation must name evaluation splits"),
        (lambda a: [*a, "--vocab_size", "100"], "vocab_size must be at least 260"),
        (lambda a: [*a, "--vocab_size", "65000"], "Use more text or a smaller vocab_size"),
        (lambda a: [*a, "--chunk_length", "100000"], "must give at least one chunk of 100000"),
        (lambda a: [*a, "--min_tokens", "1"], "min_tokens counts BOS"),
        (lambda a: [*a, "--tokenizer", "/nowhere"], "must exist at /nowhere"),
    ],
)
def test_bad_input(shards, tmp_path, edit, message):
    with pytest.raises(ValueError, match=message):
        build(edit(build_arguments(shards, tmp_path / "set")))
    assert not (tmp_path / "set").exists()


def test_shards_that_are_not_right(tmp_path):
    def build_from(path):
        build([*build_arguments(tmp_path, tmp_path / "set"), "--split", f"x={path}"])

    write_shard(tmp_path / "shard_0.parquet", [make_text(0, 300)])
    write_shard(tmp_path / "dev.parquet", [make_text(1, 300)])
    write_shard(tmp_path / "confirmation.parquet", [make_text(2, 300)])
    other = write_shard(tmp_path / "other.parquet", ["a"], column="content")
    with pytest.raises(ValueError, match=r"must have a string column 'text'; found content"):
        build_from(other)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match=r"broken.parquet must be a Parquet file"):
        build_from(tmp_path / "broken.parquet")


def test_an_evaluation_split_that_keeps_nothing(shards, tmp_path):
    write_shard(tmp_path / "short.parquet", ["short"])
    arguments = [
        *build_arguments(shards, tmp_path / "set"),
        "--split",
        f"x={tmp_path}/short.parquet",
    ]
    with pytest.raises(ValueError, match="split x must keep at least one document of 65 tokens"):
        build(arguments)


def test_the_command_line(shards, chunk_set, tmp_path):
    def command(module, *arguments):
        result = subprocess.run(
            [sys.executable, "-m", f"data_scripts.{module}", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
        )
        return result.returncode, result.stdout, result.stderr.strip().splitlines()

    status, _, errors = command("build", *build_arguments(shards, chunk_set.path))
    assert status == 2
    assert len(errors) == 1
    assert errors[0].startswith("error: --out must be a new or an empty folder")
    status, output, _ = command("verify", chunk_set.path)
    assert (status, chunk_set.fingerprint in output) == (0, True)
    status, _, errors = command("verify", tmp_path)
    assert (status, len(errors)) == (2, 1)
    assert command("build")[0] == 2


def test_what_a_command_exits_with(capsys):
    def fail(error):
        def main():
            raise error

        return run(main)

    assert run(lambda: None) == 0
    assert fail(ValueError("x must hold")) == 2
    assert capsys.readouterr().err == "error: x must hold\n"
    assert fail(OSError(28, "No space left on device")) == 1
    assert "free some space and run the same command again" in capsys.readouterr().err
    assert fail(KeyboardInterrupt()) == 130


def test_flags_may_be_written_either_way():
    assert normalise_flags(["--a-b", "c-d", "--e-f=g-h", "-x", "--", "--i-j"]) == [
        *("--a_b", "c-d", "--e_f=g-h", "-x", "--", "--i-j")
    ]


def test_the_manifest_says_nothing_about_the_machine(chunk_set, shards):
    content = (chunk_set.path / "manifest.json").read_text()
    assert str(shards) not in content
    assert str(chunk_set.path.parent) not in content
    listed = json.loads(content)["splits"]["train"]["shards"]
    assert [shard["name"] for shard in listed] == [f"shard_0000{i}.parquet" for i in range(3)]
    assert listed[0]["sha256"] == file_sha256(shards / "shard_00000.parquet")
    assert listed[0]["read"] == 11
    assert listed[0]["null_or_empty"] == 2
