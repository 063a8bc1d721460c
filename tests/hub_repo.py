"""What the test Hub keeps: repositories, commits, branches, tags and files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

LFS_SUFFIXES = (".parquet", ".safetensors", ".bin", ".npz", ".npy", ".arrow", ".png")
LFS_BYTES = 1_000_000  # a larger file is LFS whatever its name


@dataclass(frozen=True)
class HubFile:
    """One file of a commit."""

    content: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def git_oid(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.git_oid


@dataclass(frozen=True)
class Commit:
    """A snapshot; `files` is path -> HubFile."""

    oid: str
    title: str
    message: str
    parent: str | None
    files: dict[str, HubFile]


class Repo:
    """A repository: commits by id, branches and tags by name."""

    def __init__(self, repo_type: str, repo_id: str, private: bool = False) -> None:
        self.repo_type, self.repo_id, self.private = repo_type, repo_id, private
        self.commits: dict[str, Commit] = {}
        self.branches: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.commit("main", {".gitattributes": HubFile(b"", False)}, "initial commit")

    def commit(self, branch: str, files: dict[str, HubFile], title: str, message: str = "") -> str:
        """Make `files` the branch's new snapshot; returns the commit's id."""
        parent = self.branches.get(branch)
        listing = "".join(f"{path}\0{files[path].etag}\n" for path in sorted(files))
        identity = f"{self.repo_type}/{self.repo_id}\0{parent}\0{title}\0{message}\0{listing}"
        oid = hashlib.sha1(identity.encode()).hexdigest()
        self.commits[oid] = Commit(oid, title, message, parent, files)
        self.branches[branch] = oid
        return oid

    def resolve(self, revision: str) -> Commit | None:
        """The commit that a branch, tag or commit id names."""
        name = revision.removeprefix("refs/heads/").removeprefix("refs/tags/")
        return self.commits.get(self.branches.get(name, self.tags.get(name, name)))

    def history(self, revision: str) -> list[Commit]:
        """Commits from the newest to the first."""
        found, commit = [], self.resolve(revision)
        while commit is not None:
            found.append(commit)
            commit = self.commits.get(commit.parent or "")
        return found


def is_lfs(path: str, num_bytes: int) -> bool:
    """Whether the Hub would store a file as LFS."""
    return num_bytes > 0 and (path.endswith(LFS_SUFFIXES) or num_bytes > LFS_BYTES)
