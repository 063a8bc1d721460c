"""What the test Hub answers, route by route: (status, headers, body) of each."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from tests.hub_repo import Commit, HubFile, Repo, is_lfs

if TYPE_CHECKING:
    from email.message import Message

    from tests.hub_server import Fault, HubServer

USER = "me"


class Refusal(Exception):
    """An answer other than success."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


_REPO = r"(?P<type>models|datasets|spaces)/(?P<repo>[^/]+/[^/]+)"
ROUTES: list[tuple[str, str, str]] = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/validate-yaml", "validate_yaml"),
    ("POST", r"/api/repos/create", "create_repo"),
    ("DELETE", r"/api/repos/delete", "delete_repo"),
    ("GET", rf"/api/{_REPO}(/revision/(?P<revision>.+))?", "repo_info"),
    ("GET", rf"/api/{_REPO}/tree/(?P<revision>[^/]+)(/(?P<path>.+))?", "tree"),
    ("POST", rf"/api/{_REPO}/paths-info/(?P<revision>[^/]+)", "paths_info"),
    ("GET", rf"/api/{_REPO}/refs", "refs"),
    ("GET", rf"/api/{_REPO}/commits/(?P<revision>[^/]+)", "commits"),
    ("POST", rf"/api/{_REPO}/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", rf"/api/{_REPO}/commit/(?P<revision>[^/]+)", "commit"),
    ("POST", rf"/api/{_REPO}/branch/(?P<name>[^/]+)", "create_branch"),
    ("DELETE", rf"/api/{_REPO}/branch/(?P<name>[^/]+)", "delete_branch"),
    ("POST", rf"/api/{_REPO}/tag/(?P<revision>[^/]+)", "create_tag"),
    ("DELETE", rf"/api/{_REPO}/tag/(?P<name>[^/]+)", "delete_tag"),
    ("POST", r"/(?P<rest>.+)\.git/info/lfs/objects/batch", "lfs_batch"),
    ("POST", r"/(?P<rest>.+)\.git/info/lfs/objects/verify", "lfs_verify"),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", "lfs_put"),
    ("GET|HEAD", r"/cdn/(?P<oid>[0-9a-f]{64})", "cdn"),
    (
        "GET|HEAD",
        r"/((?P<type>datasets|spaces)/)?(?P<repo>[^/]+/[^/]+)/(resolve|raw)/"
        r"(?P<revision>[^/]+)/(?P<path>.+)",
        "resolve",
    ),
]


# Questions that change nothing, and uploads to a signed address.
NEEDS_NO_TOKEN = ("paths_info", "validate_yaml", "lfs_put")


class Answers:
    """The protocol, on the state of a `HubServer`; a request handler inherits from it.

    Attributes:
        hub: the server.
        headers, query, body: of the request.
        fault: that applies to the request, if any.
    """

    hub: HubServer
    headers: Message
    query: dict[str, list[str]]
    body: bytes
    fault: Fault | None

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def _require_token(self) -> None:
        if not self._has_token():
            raise Refusal(401, "Invalid credentials in Authorization header")

    def _repo(self, repo_type: str, repo_id: str) -> Repo:
        repo = self.hub.repos.get((repo_type, repo_id))
        if repo is None or (repo.private and not self._has_token()):
            raise Refusal(404 if self._has_token() else 401, "Repository not found", "RepoNotFound")
        return repo

    @staticmethod
    def _commit_of(repo: Repo, revision: str) -> Commit:
        commit = repo.resolve(revision)
        if commit is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    # Answers: (status, headers, body).

    def _whoami(self) -> tuple:
        self._require_token()
        auth = {"accessToken": {"role": "write", "displayName": "test"}}
        return _json({"type": "user", "name": USER, "fullname": USER, "orgs": [], "auth": auth})

    def _validate_yaml(self) -> tuple:
        content = json.loads(self.body)["content"]
        if not content.startswith("---\n"):
            warning = {"message": "empty or missing yaml metadata in repo card"}
            return _json({"errors": [], "warnings": [warning]})
        if "license: unknown-to-the-hub" in content:
            return _json(
                {"errors": [{"message": '"license" must be one of ..'}], "warnings": []}, 400
            )
        return _json({"errors": [], "warnings": []})

    def _create_repo(self) -> tuple:
        asked = json.loads(self.body)
        repo_type = asked.get("type") or "model"
        repo_id = f"{asked.get('organization') or USER}/{asked['name']}"
        prefix = "" if repo_type == "model" else f"{repo_type}s/"
        url = f"{self.hub.endpoint}/{prefix}{repo_id}"
        if (repo_type, repo_id) in self.hub.repos:
            return _json({"error": "You already created this repo", "url": url}, 409)
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.repos[repo_type, repo_id] = Repo(repo_type, repo_id, private)
        return _json({"url": url, "name": repo_id, "id": repo_id})

    def _delete_repo(self) -> tuple:
        asked = json.loads(self.body)
        repo_id = f"{asked.get('organization') or USER}/{asked['name']}"
        if self.hub.repos.pop((asked.get("type") or "model", repo_id), None) is None:
            raise Refusal(404, "Repository not found", "RepoNotFound")
        return _json({})

    def _repo_info(self, repo: Repo, revision: str = "main") -> tuple:
        commit = self._commit_of(repo, revision)
        siblings = []
        for path, file in sorted(commit.files.items()):
            entry: dict[str, Any] = {"rfilename": path}
            if "blobs" in self.query:
                entry |= {"size": len(file.content), "blobId": file.git_oid}
                entry |= {"lfs": _lfs_info(file)} if file.lfs else {}
            siblings.append(entry)
        info = {"_id": repo.repo_id, "id": repo.repo_id, "sha": commit.oid, "private": repo.private}
        info |= {"modelId": repo.repo_id} if repo.repo_type == "model" else {}
        info |= {"author": repo.repo_id.split("/")[0], "disabled": False, "gated": False}
        info |= {"tags": [], "downloads": 0, "likes": 0, "siblings": siblings}
        info |= {"lastModified": _DATE, "createdAt": _DATE}
        return _json(info)

    def _tree(self, repo: Repo, revision: str, path: str = "") -> tuple:
        files = self._commit_of(repo, revision).files
        prefix = f"{path}/" if path else ""
        recursive = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        entries, folders = [], set()
        for name in sorted(files):
            if not name.startswith(prefix):
                continue
            parts = name.removeprefix(prefix).split("/")
            folders |= {prefix + "/".join(parts[:i]) for i in range(1, len(parts))}
            if recursive or len(parts) == 1:
                entries.append(_entry(name, files[name]))
        if not recursive:
            folders = {name for name in folders if "/" not in name.removeprefix(prefix)}
        if path and not entries and not folders:
            raise Refusal(404, f"{path} does not exist", "EntryNotFound")
        return _json([*(_folder(name) for name in sorted(folders)), *entries])

    def _paths_info(self, repo: Repo, revision: str) -> tuple:
        files = self._commit_of(repo, revision).files
        if "json" in self.headers.get("Content-Type", ""):
            paths = json.loads(self.body)["paths"]
        else:
            paths = parse_qs(self.body.decode()).get("paths", [])
        entries = [_entry(path, files[path]) for path in paths if path in files]
        entries += [
            _folder(path) for path in paths if any(name.startswith(f"{path}/") for name in files)
        ]
        return _json(entries)

    def _refs(self, repo: Repo) -> tuple:
        def listed(kind: str, names: dict[str, str]) -> list[dict[str, str]]:
            return [
                {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": oid}
                for name, oid in names.items()
            ]

        branches, tags = listed("heads", repo.branches), listed("tags", repo.tags)
        return _json({"branches": branches, "tags": tags, "converts": [], "pullRequests": []})

    def _commits(self, repo: Repo, revision: str) -> tuple:
        self._commit_of(repo, revision)
        entries = [
            {"id": commit.oid, "title": commit.title, "message": commit.message}
            | {"date": _DATE, "authors": [{"user": USER}]}
            for commit in repo.history(revision)
        ]
        return _json(entries)

    def _preupload(self, repo: Repo, revision: str) -> tuple:
        files = self._commit_of(repo, revision).files
        answers = []
        for asked in json.loads(self.body)["files"]:
            path = asked["path"]
            mode = "lfs" if is_lfs(path, asked["size"]) else "regular"
            answer = {"path": path, "uploadMode": mode, "shouldIgnore": False}
            if path in files:
                answer["oid"] = files[path].etag
            answers.append(answer)
        return _json({"files": answers})

    def _commit(self, repo: Repo, revision: str) -> tuple:
        if revision not in repo.branches:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        files = dict(self._commit_of(repo, revision).files)
        title = message = ""
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                title, message = value["summary"], value.get("description", "")
                parent = value.get("parentCommit")
                if parent is not None and parent != repo.branches[revision]:
                    raise Refusal(412, f"the branch is not at {parent} any more")
            else:
                self._apply(item["key"], value, files)
        oid = repo.commit(revision, files, title, message)
        url = f"{self.hub.endpoint}/{repo.repo_id}/commit/{oid}"
        return _json({"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})

    def _apply(self, key: str, value: dict[str, Any], files: dict[str, HubFile]) -> None:
        """One operation of a commit, on the snapshot in the making."""
        path = value["path"]
        if key == "file":
            files[path] = HubFile(base64.b64decode(value["content"]), False)
        elif key == "lfsFile":
            known = self.hub.lfs | {file.sha256: file.content for file in files.values()}
            if value["oid"] not in known:
                raise Refusal(400, f"LFS object {value['oid']} of {path} was not uploaded")
            files[path] = HubFile(known[value["oid"]], True)
        elif key == "deletedFile":
            if files.pop(path, None) is None:
                raise Refusal(404, f"{path} does not exist", "EntryNotFound")
        elif key == "deletedFolder":
            for name in [name for name in files if name.startswith(path.rstrip("/") + "/")]:
                del files[name]
        else:
            raise Refusal(400, f"unknown operation {key}")

    def _create_branch(self, repo: Repo, name: str) -> tuple:
        if name in repo.branches:
            raise Refusal(409, f"branch {name} already exists")
        start = json.loads(self.body or b"{}").get("startingPoint", "main")
        repo.branches[name] = self._commit_of(repo, start).oid
        return _json({})

    def _delete_branch(self, repo: Repo, name: str) -> tuple:
        if repo.branches.pop(name, None) is None:
            raise Refusal(404, f"no branch {name}", "RevisionNotFound")
        return _json({})

    def _create_tag(self, repo: Repo, revision: str) -> tuple:
        name = json.loads(self.body)["tag"]
        if name in repo.tags:
            raise Refusal(409, f"tag {name} already exists")
        repo.tags[name] = self._commit_of(repo, revision).oid
        return _json({})

    def _delete_tag(self, repo: Repo, name: str) -> tuple:
        if repo.tags.pop(name, None) is None:
            raise Refusal(404, f"no tag {name}", "RevisionNotFound")
        return _json({})

    def _lfs_batch(self, rest: str) -> tuple:
        objects = []
        for asked in json.loads(self.body)["objects"]:
            answer: dict[str, Any] = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.hub.lfs:
                verify = f"{self.hub.endpoint}/{rest}.git/info/lfs/objects/verify"
                upload = f"{self.hub.endpoint}/lfs/{asked['oid']}"
                authorization = {"Authorization": f"Bearer {self.hub.token}"}
                answer["actions"] = {
                    "upload": {"href": upload, "header": {}},
                    "verify": {"href": verify, "header": authorization},
                }
            objects.append(answer)
        return _json({"transfer": "basic", "objects": objects})

    def _lfs_put(self, oid: str) -> tuple:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refusal(400, f"the content's sha256 is not {oid}")
        self.hub.lfs[oid] = self.body
        return 200, {"ETag": f'"{oid}"'}, b""

    def _lfs_verify(self, rest: str) -> tuple:
        asked = json.loads(self.body)
        found = self.hub.lfs.get(asked["oid"])
        if found is None or len(found) != asked["size"]:
            raise Refusal(404, f"LFS object {asked['oid']} is not there in {asked['size']} bytes")
        return _json({})

    def _resolve(self, repo: Repo, revision: str, path: str) -> tuple:
        commit = self._commit_of(repo, revision)
        if path not in commit.files:
            raise Refusal(404, f"{path} does not exist", "EntryNotFound")
        file = commit.files[path]
        headers = {"ETag": f'"{file.etag}"', "X-Repo-Commit": commit.oid}
        if not file.lfs:
            return self._content(file, headers)
        size = len(file.content)
        if self.fault is not None and self.fault.truncate_to is not None:
            size = min(size, self.fault.truncate_to)
        headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(size)}
        if self.hub.cdn is None:
            return self._content(file, headers)
        self.hub.lfs[file.sha256] = file.content
        return 302, headers | {"Location": f"{self.hub.cdn}/cdn/{file.sha256}"}, b""

    def _cdn(self, oid: str) -> tuple:
        if "Authorization" in self.headers:  # a signed address; the token must not leave the Hub
            raise Refusal(400, "Only one auth mechanism allowed")
        file = HubFile(self.hub.lfs[oid], True)
        return self._content(file, {"ETag": f'"{file.git_oid}"'})

    def _content(self, file: HubFile, headers: dict[str, str]) -> tuple:
        """The file, or the range of it that is asked for."""
        body, total = file.content, len(file.content)
        if self.fault is not None and self.fault.truncate_to is not None:
            body = body[: self.fault.truncate_to]
            total = len(body)
        if self.fault is not None and self.fault.corrupt:
            body = body[:-1] + bytes([body[-1] ^ 1])
        headers |= {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if match is None:
            return 200, headers, body
        start, end = int(match[1]), min(int(match[2] or total - 1), total - 1)
        if start >= total:
            return 416, {**headers, "Content-Range": f"bytes */{total}"}, b""
        headers["Content-Range"] = f"bytes {start}-{end}/{total}"
        return 206, headers, body[start : end + 1]


_DATE = "2026-01-01T00:00:00.000Z"


def _json(value: Any, status: int = 200) -> tuple[int, dict[str, str], bytes]:
    return status, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _lfs_info(file: HubFile) -> dict[str, Any]:
    num_bytes = len(file.content)
    return {"oid": file.sha256, "sha256": file.sha256, "size": num_bytes, "pointerSize": 134}


def _entry(path: str, file: HubFile) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "oid": file.git_oid, "size": len(file.content)}
    return entry | ({"lfs": _lfs_info(file)} if file.lfs else {})


def _folder(path: str) -> dict[str, str]:
    return {"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest()}
