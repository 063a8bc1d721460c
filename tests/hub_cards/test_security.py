"""What never leaves: pickles, links, unlisted files, tokens, code that would not load elsewhere."""

import os
import pickle
import shutil

import numpy as np
import pytest

from hub_cards.push import main
from hub_cards.redaction import scrub
from hub_cards.upload import patiently
from tests.hub_cards.test_push import REPO, _error, _files, _push


def test_unlisted_files_stay_at_home_and_are_named(hub, runs, capsys):
    final = runs[1] / "final"
    for name in ("pytorch_model.bin", "optimizer.pt", ".env", "notes.txt", "training_args.bin"):
        (final / name).write_bytes(b"x")
    (final / "sub").mkdir()
    (final / "sub" / "config.json").write_text("{}")
    (runs[1] / "records" / "x.pkl").write_bytes(pickle.dumps([]))
    assert _push(runs) == 0
    shown = capsys.readouterr().out
    for name in ("pytorch_model.bin", "optimizer.pt", ".env", "notes.txt", "x.pkl"):
        assert f"stays here: {name}" in shown
        assert not any(path.endswith(name) for path in _files(hub))
    assert not any("sub" in path for path in _files(hub))


@pytest.mark.parametrize(
    "name",
    ["final/model.safetensors", "final/tokenizer.json", "metrics.jsonl", "records/new.parquet"],
)
def test_symbolic_links_are_refused(hub, runs, tmp_path, capsys, name):
    outside = tmp_path / "secret"
    path = runs[1] / name
    if path.exists():
        shutil.move(path, outside)
    else:
        shutil.copy(next((runs[1] / "records").iterdir()), outside)
    path.symlink_to(outside)
    assert _push(runs) == 2
    assert "symbolic link" in _error(capsys)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["final", "records", "checkpoints/update_000002"])
def test_linked_folders_are_refused(hub, runs, tmp_path, capsys, name):
    shutil.move(runs[1] / name, tmp_path / "elsewhere")
    (runs[1] / name).symlink_to(tmp_path / "elsewhere")
    assert _push(runs, "--checkpoints") == 2
    assert "link" in (error := _error(capsys)) or "must be a folder" in error
    assert hub.requests == []


def test_a_pipe_does_not_hang_the_push(runs, capsys):
    (runs[1] / "metrics.jsonl").unlink()
    os.mkfifo(runs[1] / "metrics.jsonl")
    assert _push(runs, "--dry_run", "--out", str(runs[0] / "out")) == 2
    assert "must be a regular file" in _error(capsys)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", pickle.dumps({"a": 1}), "must be safetensors"),
        ("token_bytes.npy", pickle.dumps([1, 2]), "must be a plain array"),
        ("extra.py", b"import requests\n", "found requests"),
        ("extra.py", b"def f():\n    from numba import njit\n", "found numba"),
        ("tokenizer_config.json", b'{"a": "hf_%s"}' % (b"A" * 34), "no token of the Hub"),
    ],
)
def test_contents_that_are_refused(hub, runs, capsys, name, content, said):
    (runs[1] / "final" / name).write_bytes(content)
    assert _push(runs) == 2
    error = _error(capsys)
    assert said in error
    assert "AAAA" not in error
    assert hub.requests == []


def test_object_arrays_are_refused(hub, runs, capsys):
    array = np.empty(1, object)
    np.save(runs[1] / "final" / "token_bytes.npy", array, allow_pickle=True)
    assert _push(runs) == 2
    assert "must be a plain array" in _error(capsys)


def test_weights_other_than_the_results_are_refused(hub, runs, capsys):
    weights = runs[1] / "final" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    assert _push(runs) == 2
    assert "It was cut" in _error(capsys)
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert _push(runs) == 2
    assert "must be the file that results.json describes" in _error(capsys)


def test_the_users_own_token_in_a_recipe_is_refused(hub, runs, capsys):
    text = (runs[1] / "config.yaml").read_text().replace("name: b_table", f"name: {hub.token}")
    (runs[1] / "config.yaml").write_text(text)
    assert _push(runs) == 2
    assert hub.token not in _error(capsys)
    assert hub.requests == []


def test_errors_are_scrubbed(hub):
    other = "hf_" + "B" * 34
    text = f"Bearer {hub.token} and {other}"
    assert hub.token not in scrub(text)
    assert other not in scrub(text)

    def fail():
        raise OSError(f"proxy said {hub.token} {other}")

    with pytest.raises(ValueError, match="reachable") as caught:
        patiently(fail, REPO)
    assert hub.token not in str(caught.value)
    assert other not in str(caught.value)


def test_a_data_file_that_changed_is_refused(hub, parquet_set, tmp_path, capsys):
    folder = shutil.copytree(parquet_set, tmp_path / "set")
    path = next(folder.rglob("*.parquet"))
    path.write_bytes(path.read_bytes() + b"x")
    assert main([str(folder), "--repo_id", "me/d", "--license", "mit"]) == 2
    assert "as counts.json says" in _error(capsys)
    assert hub.requests == []
