"""Pushing to the test Hub: create, change, resume, and every refusal in one line."""

import os
import re

import pytest
from huggingface_hub import HfApi

from hub_cards.contents import branch_name
from hub_cards.push import main
from tests.hub_cards.conftest import METRIC
from tests.hub_server import Fault

REPO = "me/b_table"


def _push(runs, *flags):
    return main([str(runs[1]), "--repo_id", REPO, "--baseline", str(runs[0]), *flags])


def _files(hub, repo_type="model", repo_id=REPO, branch="main"):
    return hub.repos[repo_type, repo_id].resolve(branch).files


def _error(capsys):
    """The one line of an error."""
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    return lines[0]


def test_one_commit_with_everything(hub, scored_runs, capsys):
    assert _push(scored_runs) == 0
    repo = hub.repos["model", REPO]
    assert [c.title for c in repo.history("main")] == ["Upload b_table", "initial commit"]
    files = _files(hub)
    final = scored_runs[1] / "final"
    for path in final.iterdir():
        if path.is_file():
            assert files[path.name].content == path.read_bytes()
    for name in ("results.json", "gains.json", "metrics.jsonl", "records/dev_val.training.parquet"):
        assert files[name].content == (scored_runs[1] / name).read_bytes()
    assert {n for n in files if n.endswith(".png")} == {
        "figures/learning_curve.png",
        "figures/gain_by_target_cell.png",
    }
    card = files["README.md"].content.decode()
    assert f'folder = "{REPO}"' in card
    for text in (card, files["recipe.yaml"].content.decode()):
        assert str(scored_runs[1].parent) not in text
    assert not repo.private
    assert capsys.readouterr().out.endswith(f"{hub.endpoint}/{REPO}\n")


def test_a_second_push_changes_only_what_changed(hub, runs, capsys):
    assert _push(runs) == 0
    puts = [r for r in hub.requests if r.startswith("PUT")]
    assert _push(runs) == 0
    assert "main: nothing to change" in capsys.readouterr().out
    assert len(hub.repos["model", REPO].history("main")) == 2
    with (runs[1] / "metrics.jsonl").open("a") as file:
        file.write('{"update": 4, "loss": 1.0}\n')
    before = _files(hub)
    assert _push(runs) == 0
    after = _files(hub)
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {"metrics.jsonl", "figures/learning_curve.png"}
    assert [r for r in hub.requests if r.startswith("PUT")][: len(puts)] == puts
    assert sum(r.startswith("PUT") for r in hub.requests) == len(puts) + 1


def test_files_that_a_run_lost_are_deleted_and_somebody_elses_stay(hub, runs):
    assert _push(runs) == 0
    hub.commit(REPO, {"notes.md": b"mine", "special_tokens_map.json": b"{}"}, repo_type="model")
    assert _push(runs) == 0
    assert "notes.md" in _files(hub)
    assert "special_tokens_map.json" not in _files(hub)


def test_checkpoints_become_branches_of_their_own(hub, scored_runs):
    assert _push(scored_runs, "--checkpoints") == 0
    repo = hub.repos["model", REPO]
    branches = {"main", "update0002-1K-tokens", "update0004-1K-tokens"}
    assert set(repo.branches) == branches
    checkpoint = scored_runs[1] / "checkpoints" / "update_000002"
    files = _files(hub, branch="update0002-1K-tokens")
    weights = (checkpoint / "model.safetensors").read_bytes()
    assert files["model.safetensors"].content == weights
    assert weights != _files(hub)["model.safetensors"].content
    assert not {"optimizer.safetensors", "state.json", "results.json"} & set(files)
    assert 'revision="update0002-1K-tokens"' in files["README.md"].content.decode()
    heads = dict(repo.branches)
    assert _push(scored_runs, "--checkpoints") == 0
    assert repo.branches == heads


def test_branch_names_say_updates_and_tokens():
    assert branch_name(500, 500 * 2**19) == "update0500-262M-tokens"
    assert branch_name(50, 204_800) == "update0050-205K-tokens"


def test_private_is_private_before_anything_is_sent(hub, scored_runs, capsys):
    assert _push(scored_runs, "--private") == 0
    assert hub.repos["model", REPO].private
    hub.add_repo("me/open", {}, "model")
    assert main([str(scored_runs[1]), "--repo_id", "me/open", "--private"]) == 2
    assert "exists and is public" in _error(capsys)
    assert set(_files(hub, repo_id="me/open")) == {".gitattributes"}


def test_dry_run_writes_what_a_push_would_send(hub, scored_runs, tmp_path, capsys):
    out = tmp_path / "out"
    assert _push(scored_runs, "--dry-run", "--checkpoints", "--out", str(out)) == 0
    assert hub.requests == []
    listed = capsys.readouterr().out
    assert _push(scored_runs, "--checkpoints") == 0
    for branch in hub.repos["model", REPO].branches:
        pushed = {n: f.content for n, f in _files(hub, branch=branch).items() if n[0] != "."}
        folder = out / branch
        written = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        assert written == pushed
        assert all(f"  {name}\n" in listed for name in written)
    assert _push(scored_runs, "--dry_run", "--out", str(out)) == 2
    assert "must be empty or absent" in _error(capsys)


@pytest.mark.parametrize("at", ["PUT /lfs", "commit/main"])
def test_a_cut_push_leaves_the_branch_alone_and_the_next_goes_on(
    hub, scored_runs, capsys, waits, at
):
    hub.faults.append(Fault(at, drop=True, times=None))
    assert _push(scored_runs) == 2
    assert "push again, what was uploaded is kept" in _error(capsys)
    assert set(_files(hub)) == {".gitattributes"}
    uploaded = set(hub.lfs)
    assert bool(uploaded) == (at == "commit/main")
    hub.faults.clear()
    hub.requests.clear()
    assert _push(scored_runs) == 0
    assert "model.safetensors" in _files(hub)
    again = {r.rpartition("/")[2] for r in hub.requests if r.startswith("PUT")}
    assert not again & uploaded


def test_a_commit_whose_answer_was_lost_is_not_made_twice(hub, scored_runs, waits):
    hub.faults.append(Fault("commit/main", cut_after=3))
    assert _push(scored_runs) in (0, 2)
    assert _push(scored_runs) == 0
    assert len(hub.repos["model", REPO].history("main")) == 2


@pytest.mark.parametrize(
    ("match", "status", "said"),
    [
        ("repos/create", 401, "log in with `hf auth login`"),
        ("repos/create", 403, "must be allowed to use me/b_table"),
        ("commit/main", 403, "must be allowed to use me/b_table"),
        ("commit/main", 412, "somebody else committed"),
        ("commit/main", 400, "it answered 400"),
    ],
)
def test_refusals_of_the_hub_in_one_line(hub, scored_runs, capsys, waits, match, status, said):
    hub.faults.append(Fault(match, status=status, times=None))
    assert _push(scored_runs) == 2
    error = _error(capsys)
    assert said.lower() in error.lower()
    assert hub.token not in error
    assert waits == []


@pytest.mark.parametrize(
    ("status", "said"), [(409, "changed by somebody else"), (429, "slow down"), (503, "503")]
)
def test_a_busy_hub_is_waited_for_and_then_named(hub, scored_runs, capsys, waits, status, said):
    busy = Fault("commit/main", status=status, times=2, headers={"Retry-After": "7"})
    hub.faults.append(busy)
    assert _push(scored_runs) == 0
    assert busy.seen == 2
    assert waits[:2] == [7.0, 7.0]
    capsys.readouterr()
    hub.faults[:] = [Fault("commit/main", status=status, times=None)]
    (scored_runs[1] / "metrics.jsonl").touch()
    assert main([str(scored_runs[0]), "--repo_id", REPO]) == 2
    assert said in _error(capsys)
    assert len(hub.repos["model", REPO].history("main")) == 2


def test_somebody_elses_commit_in_between_is_not_overwritten(hub, scored_runs, capsys):
    assert _push(scored_runs) == 0
    pushes = hub.fault_for

    def commit_in_between(request):
        if "preupload" in request and len(hub.repos["model", REPO].history("main")) == 2:
            hub.commit(REPO, {"notes.md": b"theirs"}, repo_type="model")
        return pushes(request)

    hub.fault_for = commit_in_between
    assert main([str(scored_runs[0]), "--repo_id", REPO]) == 2
    assert "somebody else committed" in _error(capsys)
    assert b"b_table" in _files(hub)["README.md"].content


def test_no_network(hub, scored_runs, capsys, monkeypatch, waits):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert _push(scored_runs) == 2
    error = _error(capsys)
    assert "http://127.0.0.1:9 must be reachable" in error
    assert "push again" in error


def test_a_wrong_token_is_refused_and_never_shown(hub, scored_runs, capsys, monkeypatch):
    secret = "hf_" + "s3cret" * 6
    monkeypatch.setenv("HF_TOKEN", secret)
    assert _push(scored_runs) == 2
    assert "401" in (error := _error(capsys))
    assert secret not in error
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", os.devnull)
    assert _push(scored_runs) == 2
    assert "hf auth login" in _error(capsys)


def test_what_is_refused_before_anything_is_sent(hub, scored_runs, parquet_set, tmp_path, capsys):
    for arguments, said in [
        ([str(tmp_path), "--repo_id", REPO], "it is none"),
        ([str(tmp_path / "no"), "--repo_id", REPO], "must be a folder"),
        ([str(scored_runs[1]), "--repo_id", "b_table"], "Add the owner"),
        ([str(scored_runs[1]), "--repo_id", "me/b//x"], "must be OWNER/NAME"),
        ([str(scored_runs[1]), "--repo_id", REPO, "--license", "mine"], "Hub's identifiers"),
        ([str(parquet_set), "--repo_id", "me/d"], "needs --license"),
        ([str(parquet_set), "--repo_id", "me/d", "--checkpoints"], "are for runs"),
        ([str(METRIC), "--repo_id", "me/other"], "must end in /class_bpb"),
    ]:
        assert main(arguments) == 2
        assert said in _error(capsys)
    assert hub.requests == []


def test_the_metric_becomes_a_space(hub):
    assert main([str(METRIC), "--repo-id", "me/class_bpb"]) == 0
    files = _files(hub, "space", "me/class_bpb")
    names = {path.name for path in METRIC.iterdir() if path.is_file()}
    assert set(files) == names | {".gitattributes"}
    card = files["README.md"].content.decode()
    assert re.findall(r"evaluate\.load\((.+?)\)", card) == ['"me/class_bpb"']
    assert HfApi().repo_info("me/class_bpb", repo_type="space").id == "me/class_bpb"
