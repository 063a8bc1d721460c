"""One commit to one branch of the Hub: only what changed, and again from where it was cut.

Large files are uploaded first, addressed by their hash, and the commit that names them comes last.
So a push that is cut leaves the branch as it was, and the next push finds the uploaded files there.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    HFValidationError,
    LocalTokenNotFoundError,
)

from hub_cards.contents import Contents
from hub_cards.redaction import scrub
from hub_cards.run_files import file_sha256
from hub_cards.staging import matches

try:
    from httpx2 import HTTPError
except ImportError:  # huggingface_hub before its change of client
    from httpx import HTTPError

_WAIT_AND_TRY_AGAIN = (408, 409, 429, 500, 502, 503, 504)
_TRIES = 5
_LONGEST_WAIT = 60.0
_PUSH_AGAIN = "Nothing was committed: check the network and push again, what was uploaded is kept."


@dataclass(frozen=True)
class Pushed:
    """What a push did to a branch.

    Attributes:
        branch: its name.
        added: files that are new or changed.
        deleted: files of an earlier push that the folder does not hold any more.
        commit: the new commit's id; None if there was nothing to change.
    """

    branch: str
    added: tuple[str, ...]
    deleted: tuple[str, ...]
    commit: str | None


def create_repository(api: HfApi, repo_id: str, repo_type: str, private: bool) -> None:
    """Create the repository, or check that the existing one is as private as asked.

    Raises:
        ValueError: if the Hub refuses, or the repository is public and `private` was asked for.
    """
    options = {"space_sdk": "gradio"} if repo_type == "space" else {}

    def create() -> None:
        api.create_repo(
            repo_id, repo_type=repo_type, private=private or None, exist_ok=True, **options
        )

    patiently(create, repo_id)
    if private:
        info = patiently(lambda: api.repo_info(repo_id, repo_type=repo_type), repo_id)
        if not info.private:
            raise ValueError(
                f"{repo_id} must be private for --private; it exists and is public. Make it "
                "private in its settings, or choose another name."
            )


def push(api: HfApi, repo_id: str, repo_type: str, contents: Contents) -> Pushed:
    """Bring a branch to the folder's content, in one commit.

    Raises:
        ValueError: if the Hub refuses, or cannot be reached.
    """
    if contents.branch != "main":
        patiently(lambda: _create_branch(api, repo_id, repo_type, contents.branch), repo_id)
    return patiently(lambda: _commit_changes(api, repo_id, repo_type, contents), repo_id)


def _create_branch(api: HfApi, repo_id: str, repo_type: str, branch: str) -> None:
    """A branch from the repository's first commit, so that it holds nothing of main."""
    refs = api.list_repo_refs(repo_id, repo_type=repo_type)
    if any(ref.name == branch for ref in refs.branches):
        return
    first = api.list_repo_commits(repo_id, repo_type=repo_type)[-1].commit_id
    api.create_branch(repo_id, branch=branch, revision=first, repo_type=repo_type, exist_ok=True)


def _commit_changes(api: HfApi, repo_id: str, repo_type: str, contents: Contents) -> Pushed:
    parent = api.repo_info(repo_id, repo_type=repo_type, revision=contents.branch).sha
    there = {
        entry.path: entry
        for entry in api.list_repo_tree(
            repo_id, recursive=True, revision=parent, repo_type=repo_type
        )
        if hasattr(entry, "size")
    }
    folder = contents.folder
    here = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
    added = tuple(n for n, path in here.items() if n not in there or not _same(path, there[n]))
    deleted = tuple(n for n in sorted(there) if n not in here and matches(n, contents.owned))
    if not added and not deleted:
        return Pushed(contents.branch, (), (), None)
    info = api.create_commit(
        repo_id,
        operations=[
            *(CommitOperationAdd(name, str(here[name])) for name in added),
            *(CommitOperationDelete(name) for name in deleted),
        ],
        commit_message=contents.title,
        repo_type=repo_type,
        revision=contents.branch,
        parent_commit=parent,
    )
    return Pushed(contents.branch, added, deleted, info.oid)


def _same(path: Path, entry: Any) -> bool:
    """Whether the Hub holds this very file, by its size and hash."""
    size = path.stat().st_size
    if entry.size != size:
        return False
    if entry.lfs is not None:
        return entry.lfs.sha256 == file_sha256(path)
    return entry.blob_id == hashlib.sha1(b"blob %d\0" % size + path.read_bytes()).hexdigest()


def patiently(action: Callable[[], Any], repo_id: str, advice: str = _PUSH_AGAIN) -> Any:
    """Do it; wait and try again where the Hub is busy.

    Each try looks at the branch anew, so a commit that went through although its answer was lost
    is not made twice.

    Args:
        action: what to do.
        repo_id: the repository that errors name.
        advice: what to do where the Hub cannot be reached.

    Raises:
        ValueError: in one line and without a token, if it cannot be done.
    """
    for number in range(1, _TRIES + 1):
        try:
            return action()
        except (HFValidationError, LocalTokenNotFoundError) as error:
            raise ValueError(scrub(str(error).split("\n")[0])) from None
        except (HTTPError, OSError, RuntimeError) as error:
            found = _first_cause(error)
            if not isinstance(found, HTTPError | OSError):
                raise
            response = getattr(found, "response", None)
            if response is None:
                said = scrub(str(found)).split("\n")[0].rstrip(".")
                raise ValueError(
                    f"the Hub at {HfApi().endpoint} must be reachable; {said}. {advice}"
                ) from None
            if response.status_code not in _WAIT_AND_TRY_AGAIN or number == _TRIES:
                raise ValueError(_reason(found, response.status_code, repo_id)) from None
            _sleep(_wait(response.headers.get("Retry-After"), number))
    raise AssertionError("the loop returns or raises")


def _first_cause(error: BaseException) -> BaseException:
    """What the library wrapped: an answer of the Hub, or the reason that there was none."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HTTPError):
        cause = cause.__cause__
    return cause or error


def _wait(retry_after: str | None, number: int) -> float:
    if retry_after is not None and retry_after.isdigit():
        return min(float(retry_after), _LONGEST_WAIT)
    return min(2.0**number, _LONGEST_WAIT)


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def _reason(error: Exception, status: int, repo_id: str) -> str:
    """One line: what the Hub said, and what to do."""
    if status == 401:
        return (
            "the Hub must know who you are; it refused the token, or there is none (401). Log in "
            "with `hf auth login`, or set HF_TOKEN to a token that may write."
        )
    if status == 403:
        return (
            f"the token must be allowed to use {repo_id}; it is not (403). Use a token with access "
            "to it (to write, for a push), or another repository."
        )
    if status == 404:
        return f"{repo_id} must exist; the Hub found no such repository or branch (404)."
    if status == 412:
        return (
            f"{repo_id} must not change during a push; somebody else committed to it (412). Look "
            "at their commit, then push again."
        )
    if status == 409:
        return f"{repo_id} is being changed by somebody else (409). Push again later."
    if status == 429:
        return "the Hub must accept more requests; it asks to slow down (429). Push again later."
    said = scrub(getattr(error, "server_message", None) or str(error).split("\n")[0])
    return f"the Hub must accept the push to {repo_id}; it answered {status}: {said}."
