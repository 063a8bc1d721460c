"""A small Hub for tests: the protocol that huggingface_hub speaks, and faults on demand.

    with HubServer() as hub:
        api = HfApi(endpoint=hub.endpoint, token=hub.token)
        api.create_repo("me/data", repo_type="dataset")
        hub.faults.append(Fault("resolve", status=503, times=2))

Standard library only. Repositories have commits, branches and tags; files are regular or LFS, as on
the Hub. Reading needs no token, except from a private repository; writing does. Start programs with
`hub.environment()`, so that HF_ENDPOINT is set before huggingface_hub is imported. Xet is not
spoken: HF_HUB_DISABLE_XET=1 (in `environment()`) makes clients use plain HTTP.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub_repo import Commit, HubFile, Repo, is_lfs

TOKEN = "hf_test_token"
USER = "me"


@dataclass
class Fault:
    """Something that goes wrong with matching requests.

    Attributes:
        match: regular expression, searched in "METHOD /path".
        status: answer with this status instead (401, 403, 409, 412, 429, 503, ..).
        cut_after: send this many bytes of the body, then cut the connection.
        truncate_to: send this many bytes as if they were the whole file.
        corrupt: flip a bit of the body; length and headers stay.
        times: how many requests it hits; None: all.
        headers: of the answer with `status`, for example {"Retry-After": "0"}.
        error_code: of the answer with `status`: the X-Error-Code header.
        seen: how many it has hit.
    """

    match: str
    status: int | None = None
    cut_after: int | None = None
    truncate_to: int | None = None
    corrupt: bool = False
    times: int | None = 1
    headers: dict[str, str] = field(default_factory=dict)
    error_code: str | None = None
    seen: int = 0


class _QuietServer(ThreadingHTTPServer):
    """Says nothing about clients that have gone; the tests cut connections on purpose."""

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class HubServer:
    """The server; use it as a context manager.

    Attributes:
        endpoint: its URL, for HF_ENDPOINT or `HfApi(endpoint=...)`.
        faults: what goes wrong; the first that matches a request and has times left is applied.
        requests: "METHOD /path" of every request, in order, with " Range: ..." where there was one.
        lfs: uploaded LFS objects by sha256.
    """

    token = TOKEN

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.lock = threading.RLock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = _QuietServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def environment(self) -> dict[str, str]:
        """Variables for a program that shall use this server; set them before it imports."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": self.token,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
        }

    def add_repo(
        self, repo_id: str, files: dict[str, bytes], repo_type: str = "dataset", **options: Any
    ) -> Repo:
        """A repository with one commit that holds `files`."""
        repo = Repo(repo_type, repo_id, **options)
        with self.lock:
            self.repos[repo_type, repo_id] = repo
        self.commit(repo_id, files, repo_type=repo_type)
        return repo

    def commit(
        self,
        repo_id: str,
        files: dict[str, bytes],
        repo_type: str = "dataset",
        branch: str = "main",
        title: str = "files",
    ) -> str:
        """Add files to a branch, as somebody else's push would; returns the commit's id."""
        with self.lock:
            repo = self.repos[repo_type, repo_id]
            snapshot = dict(repo.resolve(branch).files)
            snapshot |= {path: HubFile(raw, is_lfs(path, len(raw))) for path, raw in files.items()}
            return repo.commit(branch, snapshot, title)

    def fault_for(self, request: str) -> Fault | None:
        """The fault that applies to this request, used up by one."""
        with self.lock:
            self.requests.append(request)
            for fault in self.faults:
                has_times_left = fault.times is None or fault.seen < fault.times
                if has_times_left and re.search(fault.match, request):
                    fault.seen += 1
                    return fault
        return None


class _Refusal(Exception):
    """An answer other than success."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


_REPO = r"(?P<type>models|datasets|spaces)/(?P<repo>[^/]+/[^/]+)"
_ROUTES: list[tuple[str, str, str]] = [
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
    (
        "GET|HEAD",
        r"/((?P<type>datasets|spaces)/)?(?P<repo>[^/]+/[^/]+)/(resolve|raw)/"
        r"(?P<revision>[^/]+)/(?P<path>.+)",
        "resolve",
    ),
]


# Questions that change nothing, and uploads to a signed address.
_NEEDS_NO_TOKEN = ("paths_info", "validate_yaml", "lfs_put")


class _Handler(BaseHTTPRequestHandler):
    """One request: find the route, apply a fault if there is one, answer."""

    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Be quiet."""

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        self.query = parse_qs(parts.query)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        byte_range = self.headers.get("Range")
        request = f"{self.command} {parts.path}" + (f" Range: {byte_range}" if byte_range else "")
        self.fault = self.hub.fault_for(request)
        try:
            if self.fault is not None and self.fault.status is not None:
                raise _Refusal(self.fault.status, "a fault of the test", self.fault.error_code)
            action, arguments = self._route(parts.path)
            with self.hub.lock:
                answer = action(**arguments)
        except _Refusal as refusal:
            self._refuse(refusal)
            return
        status, headers, body = answer
        self._send(status, headers, body)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle

    def _route(self, path: str) -> tuple[Callable[..., tuple], dict[str, Any]]:
        for methods, pattern, name in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match is None or self.command not in methods.split("|"):
                continue
            groups = {key: unquote(value) for key, value in match.groupdict().items() if value}
            if self.command in ("POST", "PUT", "DELETE") and name not in _NEEDS_NO_TOKEN:
                self._require_token()
            if "repo" in groups:
                kind = groups.pop("type", "models").removesuffix("s")
                groups["repo"] = self._repo(kind, groups["repo"])
            return getattr(self, "_" + name), groups
        raise _Refusal(404, f"no such route: {self.command} {path}")

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def _require_token(self) -> None:
        if not self._has_token():
            raise _Refusal(401, "Invalid credentials in Authorization header")

    def _repo(self, repo_type: str, repo_id: str) -> Repo:
        repo = self.hub.repos.get((repo_type, repo_id))
        if repo is None or (repo.private and not self._has_token()):
            raise _Refusal(
                404 if self._has_token() else 401, "Repository not found", "RepoNotFound"
            )
        return repo

    @staticmethod
    def _commit_of(repo: Repo, revision: str) -> Commit:
        commit = repo.resolve(revision)
        if commit is None:
            raise _Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
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
            raise _Refusal(404, "Repository not found", "RepoNotFound")
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
            raise _Refusal(404, f"{path} does not exist", "EntryNotFound")
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
            raise _Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        files = dict(self._commit_of(repo, revision).files)
        title = message = ""
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                title, message = value["summary"], value.get("description", "")
                parent = value.get("parentCommit")
                if parent is not None and parent != repo.branches[revision]:
                    raise _Refusal(412, f"the branch is not at {parent} any more")
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
                raise _Refusal(400, f"LFS object {value['oid']} of {path} was not uploaded")
            files[path] = HubFile(known[value["oid"]], True)
        elif key == "deletedFile":
            if files.pop(path, None) is None:
                raise _Refusal(404, f"{path} does not exist", "EntryNotFound")
        elif key == "deletedFolder":
            for name in [name for name in files if name.startswith(path.rstrip("/") + "/")]:
                del files[name]
        else:
            raise _Refusal(400, f"unknown operation {key}")

    def _create_branch(self, repo: Repo, name: str) -> tuple:
        if name in repo.branches:
            raise _Refusal(409, f"branch {name} already exists")
        start = json.loads(self.body or b"{}").get("startingPoint", "main")
        repo.branches[name] = self._commit_of(repo, start).oid
        return _json({})

    def _delete_branch(self, repo: Repo, name: str) -> tuple:
        if repo.branches.pop(name, None) is None:
            raise _Refusal(404, f"no branch {name}", "RevisionNotFound")
        return _json({})

    def _create_tag(self, repo: Repo, revision: str) -> tuple:
        name = json.loads(self.body)["tag"]
        if name in repo.tags:
            raise _Refusal(409, f"tag {name} already exists")
        repo.tags[name] = self._commit_of(repo, revision).oid
        return _json({})

    def _delete_tag(self, repo: Repo, name: str) -> tuple:
        if repo.tags.pop(name, None) is None:
            raise _Refusal(404, f"no tag {name}", "RevisionNotFound")
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
            raise _Refusal(400, f"the content's sha256 is not {oid}")
        self.hub.lfs[oid] = self.body
        return 200, {"ETag": f'"{oid}"'}, b""

    def _lfs_verify(self, rest: str) -> tuple:
        asked = json.loads(self.body)
        found = self.hub.lfs.get(asked["oid"])
        if found is None or len(found) != asked["size"]:
            raise _Refusal(404, f"LFS object {asked['oid']} is not there in {asked['size']} bytes")
        return _json({})

    def _resolve(self, repo: Repo, revision: str, path: str) -> tuple:
        commit = self._commit_of(repo, revision)
        if path not in commit.files:
            raise _Refusal(404, f"{path} does not exist", "EntryNotFound")
        file = commit.files[path]
        body, total = file.content, len(file.content)
        if self.fault is not None and self.fault.truncate_to is not None:
            body = body[: self.fault.truncate_to]
            total = len(body)
        if self.fault is not None and self.fault.corrupt:
            body = body[:-1] + bytes([body[-1] ^ 1])
        headers = {"ETag": f'"{file.etag}"', "X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes"}
        if file.lfs:
            headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(total)}
        headers["Content-Type"] = "application/octet-stream"
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if match is None:
            return 200, headers, body
        start, end = int(match[1]), min(int(match[2] or total - 1), total - 1)
        if start >= total:
            return 416, {**headers, "Content-Range": f"bytes */{total}"}, b""
        headers["Content-Range"] = f"bytes {start}-{end}/{total}"
        return 206, headers, body[start : end + 1]

    # Writing an answer.

    def _refuse(self, refusal: _Refusal) -> None:
        headers = {"X-Error-Message": str(refusal), "Content-Type": "application/json"}
        if refusal.code is not None:
            headers["X-Error-Code"] = refusal.code
        if self.fault is not None:
            headers |= self.fault.headers
        self._send(refusal.status, headers, json.dumps({"error": str(refusal)}).encode())

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.fault.cut_after if self.fault is not None else None
        try:
            self.wfile.write(body[:cut])
            if cut is not None and cut < len(body):
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # the client has gone
            self.close_connection = True


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
