"""The test Hub against huggingface_hub itself: what another room pushes and reads works here."""

from __future__ import annotations

import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    hf_hub_download,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.hub_repo import Repo
from tests.hub_server import Fault, HubServer

REPO = "me/model"


@pytest.fixture
def api(hub: HubServer) -> HfApi:
    return HfApi(endpoint=hub.endpoint, token=hub.token)


def add(path: str, content: bytes) -> CommitOperationAdd:
    return CommitOperationAdd(path, content)


def test_a_folder_is_pushed_and_read_back(api, tmp_path):
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    weights = bytes(range(256)) * 5000
    (source / "model.safetensors").write_bytes(weights)
    (source / "sub" / "config.json").write_text('{"a": 1}')
    (source / "empty.bin").write_bytes(b"")
    api.create_repo(REPO)
    api.create_repo(REPO, exist_ok=True)
    info = api.upload_folder(repo_id=REPO, folder_path=source, commit_message="all of it")
    assert api.repo_info(REPO).sha == info.oid
    names = [".gitattributes", "empty.bin", "model.safetensors", "sub/config.json"]
    assert sorted(api.list_repo_files(REPO)) == names
    path = hf_hub_download(REPO, "model.safetensors", local_dir=tmp_path / "down")
    assert (tmp_path / "down" / "model.safetensors").read_bytes() == weights
    assert path.endswith("model.safetensors")
    snapshot = api.snapshot_download(REPO, cache_dir=tmp_path / "cache")
    assert (tmp_path / snapshot / "sub" / "config.json").read_text() == '{"a": 1}'
    [file] = api.get_paths_info(REPO, ["model.safetensors"])
    assert (file.size, file.lfs.size) == (len(weights), len(weights))
    listed = {entry.path: type(entry).__name__ for entry in api.list_repo_tree(REPO)}
    assert listed["sub"] == "RepoFolder"
    assert [commit.title for commit in api.list_repo_commits(REPO)] == [
        "all of it",
        "initial commit",
    ]


def test_an_object_that_is_there_is_not_sent_again(api, hub):
    api.create_repo(REPO)
    for branch_file in ("a.bin", "b.bin"):
        api.create_commit(REPO, [add(branch_file, b"same" * 100)], commit_message=branch_file)
    assert sum(request.startswith("PUT /lfs/") for request in hub.requests) == 1
    assert len(api.list_repo_files(REPO)) == 3


def test_branches_tags_and_old_revisions(api):
    api.create_repo(REPO)
    first = api.create_commit(REPO, [add("a.txt", b"1")], commit_message="one").oid
    api.create_branch(REPO, branch="step")
    api.create_branch(REPO, branch="step", exist_ok=True)
    api.create_commit(REPO, [add("a.txt", b"2")], commit_message="two", revision="step")
    api.create_tag(REPO, tag="v1", revision=first)
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_tag(REPO, tag="v1", revision=first)
    refs = api.list_repo_refs(REPO)
    assert sorted(branch.name for branch in refs.branches) == ["main", "step"]
    assert [(tag.name, tag.target_commit) for tag in refs.tags] == [("v1", first)]
    assert api.repo_info(REPO, revision="v1").sha == api.repo_info(REPO).sha == first
    assert api.repo_info(REPO, revision="step").sha != first
    api.delete_tag(REPO, tag="v1")
    api.delete_branch(REPO, branch="step")
    with pytest.raises(RevisionNotFoundError):
        api.repo_info(REPO, revision="step")


def test_deletions_and_a_parent_that_has_moved(api):
    api.create_repo(REPO, repo_type="dataset")
    files = [add(name, b"x") for name in ("keep.txt", "drop.txt", "old/a.txt", "old/b/c.txt")]
    parent = api.create_commit(REPO, files, commit_message="four", repo_type="dataset").oid
    deletions = [CommitOperationDelete("drop.txt"), CommitOperationDelete("old/")]
    api.create_commit(
        REPO, deletions, commit_message="two gone", repo_type="dataset", parent_commit=parent
    )
    assert sorted(api.list_repo_files(REPO, repo_type="dataset")) == [".gitattributes", "keep.txt"]
    late = [add("keep.txt", b"y")]
    with pytest.raises(HfHubHTTPError, match="412"):
        api.create_commit(
            REPO, late, commit_message="late", repo_type="dataset", parent_commit=parent
        )


def test_what_is_missing_or_private_is_refused_as_on_the_hub(api, hub, tmp_path):
    with pytest.raises(RepositoryNotFoundError):
        api.repo_info("me/nothing")
    hub.repos["model", REPO] = Repo("model", REPO, private=True)
    with pytest.raises(RepositoryNotFoundError):
        HfApi(endpoint=hub.endpoint, token=False).repo_info(REPO)
    assert api.repo_info(REPO).private
    with pytest.raises(EntryNotFoundError):
        hf_hub_download(REPO, "nothing.txt", local_dir=tmp_path)
    with pytest.raises(RevisionNotFoundError):
        api.list_repo_files(REPO, revision="nowhere")
    with pytest.raises(HfHubHTTPError, match="401"):
        HfApi(endpoint=hub.endpoint, token="hf_wrong").create_repo("me/other")


def test_cards_are_validated(api, hub):
    ModelCard("---\nlicense: apache-2.0\n---\n# A model").validate()
    with pytest.raises(ValueError, match="license"):
        ModelCard("---\nlicense: unknown-to-the-hub\n---\n# A model").validate()
    assert api.whoami()["name"] == "me"
    assert "POST /api/validate-yaml" in hub.requests


@pytest.mark.parametrize("status", [403, 429, 503])
def test_statuses(api, hub, status):
    api.create_repo(REPO)
    hub.faults.append(Fault(r"POST .*/commit/main", status=status, headers={"Retry-After": "0"}))
    with pytest.raises(HfHubHTTPError, match=str(status)):
        api.create_commit(REPO, [add("a.txt", b"1")], commit_message="no")
    api.create_commit(REPO, [add("a.txt", b"1")], commit_message="yes")
    assert [commit.title for commit in api.list_repo_commits(REPO)] == ["yes", "initial commit"]


def test_downloads_from_another_host(api, hub, tmp_path):
    api.create_repo(REPO)
    api.create_commit(REPO, [add("a.bin", b"x" * 1000)], commit_message="one")
    hub.cdn = hub.other_host()
    path = hf_hub_download(REPO, "a.bin", local_dir=tmp_path, token=hub.token)
    assert (tmp_path / path).read_bytes() == b"x" * 1000
    assert any(request.startswith("GET /cdn") for request in hub.requests)


def test_gated(api, hub):
    api.create_repo(REPO)
    hub.faults.append(Fault("GET /api/models", status=403, error_code="GatedRepo"))
    with pytest.raises(GatedRepoError):
        api.repo_info(REPO)
