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

from tests.hub_answers import NEEDS_NO_TOKEN, ROUTES, Answers, Refusal
from tests.hub_repo import HubFile, Repo, is_lfs

TOKEN = "hf_test_token"


@dataclass
class Fault:
    """Something that goes wrong with matching requests.

    Attributes:
        match: regular expression, searched in "METHOD /path".
        status: answer with this status instead (401, 403, 409, 412, 429, 503, ..).
        cut_after: send this many bytes of the body, then cut the connection.
        truncate_to: send this many bytes as if they were the whole file.
        corrupt: flip a bit of the body; length and headers stay.
        drop: close the connection without an answer, and without doing what was asked.
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
    drop: bool = False
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
        cdn: None, or another host's address (`other_host()`) that LFS downloads are sent to.
    """

    token = TOKEN

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.cdn: str | None = None
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

    def other_host(self) -> str:
        """The server by another name, which clients must not send the token to."""
        return self.endpoint.replace("127.0.0.1", "localhost")

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


class _Handler(Answers, BaseHTTPRequestHandler):
    """One request: find the route, apply a fault if there is one, answer."""

    hub: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits for the client's delayed ACK

    def log_message(self, *_: object) -> None:
        """Be quiet."""

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        self.query = parse_qs(parts.query)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        byte_range = self.headers.get("Range")
        request = f"{self.command} {parts.path}" + (f" Range: {byte_range}" if byte_range else "")
        self.fault = self.hub.fault_for(request)
        if self.fault is not None and self.fault.drop:
            self.close_connection = True
            return
        try:
            if self.fault is not None and self.fault.status is not None:
                raise Refusal(self.fault.status, "a fault of the test", self.fault.error_code)
            action, arguments = self._route(parts.path)
            with self.hub.lock:
                answer = action(**arguments)
        except Refusal as refusal:
            self._refuse(refusal)
            return
        status, headers, body = answer
        self._send(status, headers, body)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle

    def _route(self, path: str) -> tuple[Callable[..., tuple], dict[str, Any]]:
        for methods, pattern, name in ROUTES:
            match = re.fullmatch(pattern, path)
            if match is None or self.command not in methods.split("|"):
                continue
            groups = {key: unquote(value) for key, value in match.groupdict().items() if value}
            if self.command in ("POST", "PUT", "DELETE") and name not in NEEDS_NO_TOKEN:
                self._require_token()
            if "repo" in groups:
                kind = groups.pop("type", "models").removesuffix("s")
                groups["repo"] = self._repo(kind, groups["repo"])
            return getattr(self, "_" + name), groups
        raise Refusal(404, f"no such route: {self.command} {path}")

    # Writing an answer.

    def _refuse(self, refusal: Refusal) -> None:
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
