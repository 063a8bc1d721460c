"""Parquet shards of a Hub dataset: resolved once, downloaded with resume, checked, thrown away.

A shard's name, size and sha256 come from the Hub before anything is downloaded. A download goes on
where it stopped, also in another process; it counts only when its sha256 is the Hub's.

huggingface_hub is imported where it is used: it takes as long to import as all else together, and
most builds download nothing.
"""

from __future__ import annotations

import fcntl
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_scripts.chunk_set import file_sha256
from data_scripts.sources import ParquetShard

_TRANSIENT_STATUSES = (408, 429, 500, 502, 503, 504)
_BLOCK_BYTES = 1 << 20
_PATHS_PER_QUESTION = 100


@dataclass(frozen=True)
class Retries:
    """How long to go on when a download does not.

    Attributes:
        attempts: in a row without a new byte, before it is given up.
        first_wait: seconds before the second attempt; doubled each time.
        longest_wait: seconds; also the most that a server's Retry-After is believed.
        timeout: seconds without an answer or a byte that count as a failure.
    """

    attempts: int = 8
    first_wait: float = 1.0
    longest_wait: float = 120.0
    timeout: float = 30.0


RETRIES = Retries()


class _Transient(Exception):
    """Something that may go better next time."""


@dataclass(frozen=True)
class HubShard:
    """One Parquet file of a Hub dataset at a fixed revision, downloaded when it is read.

    Attributes:
        repo_id: of the dataset.
        revision: a commit id.
        file: its path in the dataset.
        num_bytes, hub_sha256: what the Hub says of it.
        folder: where it is kept.
        delete: whether it is thrown away once its documents are staged.
    """

    repo_id: str
    revision: str
    file: str
    num_bytes: int
    hub_sha256: str
    folder: Path
    delete: bool = False

    @property
    def name(self) -> str:
        """The file's name without its folder."""
        return Path(self.file).name

    @property
    def path(self) -> Path:
        """Where it lies once it is downloaded."""
        return self.folder / self.name

    @property
    def _part(self) -> Path:
        return self.folder / f".{self.name}.{self.hub_sha256[:12]}.part"

    @property
    def _lock(self) -> Path:
        return self.folder / f".{self.name}.lock"

    def remove(self) -> None:
        """Delete all that its download has left."""
        for path in (self.path, self._part, self._lock):
            path.unlink(missing_ok=True)

    def check(self) -> None:
        """A shard on the Hub is checked when it has been downloaded."""

    def sha256(self) -> str:
        """The Hub's hash, without a download."""
        return self.hub_sha256

    def documents(self) -> Iterator[tuple[str, bytes | None]]:
        """Download it if it is not there; then as a local Parquet shard."""
        local = ParquetShard(self.fetch())
        local.check()
        yield from local.documents()

    def release(self) -> None:
        """Its documents are staged: delete the file, if it is not to be kept."""
        if self.delete:
            self.path.unlink(missing_ok=True)

    def fetch(self, stop: threading.Event | None = None) -> Path:
        """Download the file, or what is missing of it.

        Args:
            stop: gives up, with an InterruptedError, soon after it is set.

        Raises:
            ValueError: if the Hub refuses it, or keeps sending another content.
            ConnectionError: if the Hub cannot be reached, after all retries.
            OSError: if the disk is full.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with _locked(self._lock):
            if self.path.is_file() and file_sha256(self.path) == self.hub_sha256:
                return self.path
            self.path.unlink(missing_ok=True)
            part = self._part
            self._complete(part, stop or threading.Event())
            part.replace(self.path)
        return self.path

    def _complete(self, part: Path, stop: threading.Event) -> None:
        """Bring a partial file to its end, with retries, and check it."""
        failures, most_bytes = 0, _size(part)
        while True:
            try:
                self._download_rest(part, stop)
                return
            except Exception as error:
                if stop.is_set() or not _is_transient(error):
                    raise
                progressed = _size(part) > most_bytes
                most_bytes = max(most_bytes, _size(part))
                failures = 1 if progressed else failures + 1
                if failures >= RETRIES.attempts:
                    raise _final(self, error, failures) from error
                stop.wait(_waiting_time(error, failures))

    def _download_rest(self, part: Path, stop: threading.Event) -> None:
        """One request for the bytes that are missing, then the hash."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session

        have = _size(part)
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        url = hf_hub_url(
            self.repo_id,
            self.file,
            repo_type="dataset",
            revision=self.revision,
            endpoint=hub_endpoint(),
        )
        if have < self.num_bytes:
            with get_session().stream(
                "GET", url, headers=headers, timeout=RETRIES.timeout, follow_redirects=True
            ) as response:
                _raise_for_status(response, self)
                with part.open("ab" if response.status_code == 206 else "wb") as file:
                    for block in response.iter_bytes(_BLOCK_BYTES):
                        file.write(block)
                        if stop.is_set():
                            raise InterruptedError(f"the download of {self.name} was stopped")
        if _size(part) < self.num_bytes:
            raise _Transient(f"{_size(part):,} of {self.num_bytes:,} bytes came")
        if (found := file_sha256(part)) != self.hub_sha256:
            part.unlink()
            raise _Transient(f"the content has sha256 {found}, the Hub says {self.hub_sha256}")


def hub_endpoint() -> str | None:
    """The Hub's address: HF_ENDPOINT as it is now, or None for huggingface_hub's own."""
    return os.environ.get("HF_ENDPOINT") or None


def find_shards(
    repo_id: str, files: Sequence[str], folder: Path, revision: str | None = None
) -> tuple[str, list[HubShard]]:
    """Resolve a revision, and what the Hub says of some files at it.

    Args:
        repo_id: of a dataset.
        files: their paths in it.
        folder: where they shall be kept.
        revision: branch, tag or commit; None is the main branch.

    Returns:
        The revision as a commit id, and the shards in the order of `files`.

    Raises:
        ValueError: if the dataset, the revision or a file is missing or access is refused.
        ConnectionError: if the Hub cannot be reached, after all retries.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=hub_endpoint())
    commit = _asked(repo_id, lambda: api.dataset_info(repo_id, revision=revision).sha)
    infos = {}
    for start in range(0, len(files), _PATHS_PER_QUESTION):
        paths = list(files[start : start + _PATHS_PER_QUESTION])
        answer = _asked(
            repo_id,
            lambda paths=paths: api.get_paths_info(
                repo_id, paths, repo_type="dataset", revision=commit
            ),
        )
        infos |= {info.path: info for info in answer}
    missing = [file for file in files if getattr(infos.get(file), "lfs", None) is None]
    if missing:
        raise ValueError(
            f"{repo_id} at {commit} must hold every shard as an LFS file, which has a sha256; "
            f"{len(missing)} are missing, the first {missing[0]}. Choose another --revision."
        )
    return commit, [
        HubShard(repo_id, commit, file, infos[file].size, infos[file].lfs.sha256, folder)
        for file in files
    ]


def _asked(repo_id: str, question: Callable[[], Any]) -> Any:
    """The answer to a metadata question, with retries."""
    failures = 0
    while True:
        try:
            return question()
        except Exception as error:
            failures += 1
            if not _is_transient(error):
                raise _refused(repo_id, error) from None
            if failures >= RETRIES.attempts:
                raise ConnectionError(
                    f"the Hub did not answer for {repo_id} in {failures} attempts: "
                    f"{_first_line(error)}. Check the network, then run the same command again."
                ) from error
            time.sleep(_waiting_time(error, failures))


def _raise_for_status(response: Any, shard: HubShard) -> None:
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import hf_raise_for_status

    try:
        hf_raise_for_status(response)
    except HfHubHTTPError as error:
        if error.response.status_code == 416:  # the server's file is shorter than it said
            raise _Transient("the Hub sends fewer bytes than it announces") from None
        if error.response.status_code in _TRANSIENT_STATUSES:
            raise
        raise _refused(f"{shard.repo_id}/{shard.file}", error) from None


def _refused(what: str, error: Exception) -> Exception:
    """An error that a user can act on, for one that retries cannot cure."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return ValueError(f"{what} needs the Hub, but HF_HUB_OFFLINE is set. Unset it.")
    if not isinstance(error, HfHubHTTPError):
        return error
    status = error.response.status_code
    advice = (
        "Log in with `hf auth login` or set HF_TOKEN, and accept the dataset's terms if it has any."
        if status in (401, 403)
        else "Check the name, --revision, and HF_ENDPOINT if it is set."
    )
    return ValueError(f"the Hub must give access to {what}; it answered {status}. {advice}")


def _final(shard: HubShard, error: Exception, failures: int) -> Exception:
    if isinstance(error, _Transient):
        return ValueError(
            f"{shard.file} must be what the Hub lists; in {failures} attempts {error}. "
            "Run the same command later, or choose another --revision."
        )
    return ConnectionError(
        f"{shard.file} could not be downloaded in {failures} attempts without progress: "
        f"{_first_line(error)}. What has come is kept: check the network and run the same "
        "command again."
    )


def _is_transient(error: Exception) -> bool:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in _TRANSIENT_STATUSES
    if isinstance(error, OfflineModeIsEnabled):
        return False
    if isinstance(error, OSError):  # of these a full disk is the one to expect
        return isinstance(error, ConnectionError | TimeoutError)
    # huggingface_hub's HTTP client has been renamed before; its transport errors are no OSErrors.
    return isinstance(error, _Transient) or type(error).__module__.partition(".")[0] in (
        "httpx",
        "httpx2",
        "httpcore",
        "httpcore2",
    )


def _waiting_time(error: Exception, failures: int) -> float:
    """Seconds until the next attempt: the server's wish, or doubling, with some spread."""
    response = getattr(error, "response", None)
    wish = "" if response is None else response.headers.get("Retry-After", "")
    if wish.isdigit():
        return min(float(wish), RETRIES.longest_wait)
    wait = min(RETRIES.first_wait * 2.0 ** (failures - 1), RETRIES.longest_wait)
    return wait * (0.75 + 0.5 * random.random())  # so that workers do not come back all at once


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One download of a file at a time, over threads and processes."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
