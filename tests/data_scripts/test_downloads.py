"""Downloads over HTTP, and what goes wrong with them."""

from __future__ import annotations

import hashlib
import multiprocessing
import threading
import time

import pytest

from data_scripts import downloads
from data_scripts.downloads import HubShard, Retries, find_shards
from data_scripts.prefetch import Prefetch
from tests.hub_server import Fault

REPO = "karpathy/shards"
CONTENT = {f"shard_{i:05d}.parquet": bytes([i]) * 300_000 + b"end" for i in range(6)}
FILE = "shard_00000.parquet"


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(downloads, "RETRIES", Retries(attempts=4, first_wait=0.01, timeout=5.0))
    monkeypatch.setattr(downloads, "_BLOCK_BYTES", 10_000)


@pytest.fixture
def shard(hub, tmp_path) -> HubShard:
    hub.add_repo(REPO, CONTENT)
    _, [shard] = find_shards(REPO, [FILE], tmp_path / "down")
    return shard


def gets(hub) -> list[str]:
    return [
        request for request in hub.requests if request.startswith("GET") and "resolve" in request
    ]


def test_a_revision_is_resolved_and_the_hashes_are_the_hubs(hub, tmp_path):
    repo = hub.add_repo(REPO, CONTENT)
    first = repo.branches["main"]
    commit, shards = find_shards(REPO, list(CONTENT), tmp_path)
    assert commit == first
    for shard, (name, content) in zip(shards, CONTENT.items(), strict=True):
        assert (shard.file, shard.num_bytes) == (name, len(content))
        assert shard.sha256() == hashlib.sha256(content).hexdigest()
    assert gets(hub) == []  # nothing was downloaded
    hub.commit(REPO, {FILE: b"changed since"})
    assert find_shards(REPO, [FILE], tmp_path)[0] != first
    assert find_shards(REPO, [FILE], tmp_path, first)[1] == shards[:1]
    assert shards[0].fetch().read_bytes() == CONTENT[FILE]  # still what was resolved


def test_a_file_that_is_there_is_not_downloaded_again(shard, hub):
    assert shard.fetch().read_bytes() == CONTENT[FILE]
    assert shard.fetch().read_bytes() == CONTENT[FILE]
    assert len(gets(hub)) == 1


def test_a_damaged_file_is_downloaded_again(shard, hub):
    shard.fetch().write_bytes(b"not this")
    assert shard.fetch().read_bytes() == CONTENT[FILE]
    assert len(gets(hub)) == 2


def test_a_cut_connection_is_resumed_where_it_was_cut(shard, hub):
    hub.faults += [Fault("GET .*resolve", cut_after=100_000), Fault("Range", cut_after=50_000)]
    assert shard.fetch().read_bytes() == CONTENT[FILE]
    starts = [int(request.partition("bytes=")[2].rstrip("-") or 0) for request in gets(hub)]
    assert len(starts) == 3
    # What came before a cut is kept up to the block that was cut.
    assert 90_000 <= starts[1] <= 100_000
    assert 40_000 <= starts[2] - starts[1] <= 50_000


def test_a_download_from_another_host_is_resumed_there_without_the_token(shard, hub):
    hub.cdn = hub.other_host()
    hub.faults += [Fault("GET /cdn", cut_after=100_000), Fault("GET /cdn", status=503)]
    assert shard.fetch().read_bytes() == CONTENT[FILE]
    ranges = [request for request in hub.requests if request.startswith("GET /cdn")]
    assert ["Range" in request for request in ranges] == [False, True, True]


def test_an_interrupted_download_is_resumed_by_the_next_build(shard, hub):
    hub.faults.append(Fault("GET .*resolve", cut_after=200_000, times=None))
    hub.faults.insert(0, Fault("Range", cut_after=0, times=None))  # later attempts get nothing
    with pytest.raises(ConnectionError, match=r"shard_00000\.parquet could not be downloaded in 4"):
        shard.fetch()
    assert not shard.path.exists()
    hub.faults.clear()
    hub.requests.clear()
    assert shard.fetch().read_bytes() == CONTENT[FILE]
    [request] = gets(hub)
    assert int(request.partition("bytes=")[2].rstrip("-")) >= 190_000


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_hub_is_asked_again(shard, hub, status):
    hub.faults.append(Fault("GET .*resolve", status=status, times=3, headers={"Retry-After": "0"}))
    assert shard.fetch().read_bytes() == CONTENT[FILE]
    assert len(gets(hub)) == 4


def test_retry_after_is_obeyed(shard, hub):
    waits = []
    stop = threading.Event()
    stop.wait = waits.append
    hub.faults.append(Fault("GET .*resolve", status=429, headers={"Retry-After": "7"}))
    hub.faults.append(Fault("GET .*resolve", status=503, times=2))
    shard.fetch(stop)
    assert waits[0] == 7
    assert waits[2] > 1.2 * waits[1]  # doubled, with some spread


def test_a_hub_that_stays_busy_is_given_up(shard, hub):
    hub.faults.append(Fault("GET .*resolve", status=503, times=None))
    with pytest.raises(ConnectionError, match=r"in 4 attempts without progress.*run the same"):
        shard.fetch()
    assert len(gets(hub)) == 4


def test_a_metadata_question_is_repeated_too(hub, tmp_path):
    hub.add_repo(REPO, CONTENT)
    hub.faults += [Fault("GET /api", status=503), Fault("paths-info", status=429)]
    assert len(find_shards(REPO, list(CONTENT), tmp_path)[1]) == len(CONTENT)
    hub.faults.append(Fault("GET /api", status=503, times=None))
    with pytest.raises(ConnectionError, match="did not answer"):
        find_shards(REPO, list(CONTENT), tmp_path)


def test_a_wrong_content_is_thrown_away(shard, hub):
    hub.faults.append(Fault("GET .*resolve", corrupt=True, times=2))
    assert shard.fetch().read_bytes() == CONTENT[FILE]
    assert [("Range" in request) for request in gets(hub)] == [False, False, False]
    shard.path.unlink()
    hub.faults.append(Fault("GET .*resolve", corrupt=True, times=None))
    with pytest.raises(ValueError, match=r"must be what the Hub lists; .*the content has sha256"):
        shard.fetch()
    assert not shard.path.exists()


def test_a_truncated_file_is_completed_or_refused(shard, hub):
    hub.faults.append(Fault("GET .*resolve", truncate_to=1000))
    assert shard.fetch().read_bytes() == CONTENT[FILE]
    shard.path.unlink()
    hub.faults.append(Fault("GET .*resolve", truncate_to=1000, times=None))
    with pytest.raises(ValueError, match=r"must be what the Hub lists.*sends fewer bytes"):
        shard.fetch()
    assert not shard.path.exists()


@pytest.mark.parametrize(("status", "advice"), [(401, "HF_TOKEN"), (403, "terms"), (404, "name")])
def test_what_retries_cannot_cure_is_said_at_once(shard, hub, status, advice):
    hub.faults.append(Fault("GET .*resolve", status=status, times=None))
    with pytest.raises(ValueError, match=rf"it answered {status}\..*{advice}"):
        shard.fetch()
    assert len(gets(hub)) == 1


def test_what_is_not_there_is_named(hub, tmp_path):
    with pytest.raises(ValueError, match=r"must give access to karpathy/none; it answered 404"):
        find_shards("karpathy/none", [FILE], tmp_path)
    hub.add_repo(REPO, CONTENT)
    with pytest.raises(ValueError, match=r"it answered 404\. Check the name, --revision"):
        find_shards(REPO, [FILE], tmp_path, "nowhere")
    with pytest.raises(ValueError, match=r"2 are missing, the first shard_00008\.parquet"):
        find_shards(REPO, [FILE, "shard_00008.parquet", "shard_00009.parquet"], tmp_path)


def test_a_full_disk_ends_the_download_at_once(shard, hub):
    shard.folder.mkdir(parents=True)
    part = shard.folder / f".{shard.name}.{shard.hub_sha256[:12]}.part"
    part.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        shard.fetch()
    assert len(gets(hub)) == 1


def _fetch(shard: HubShard) -> None:
    shard.fetch()


@pytest.mark.multi_process
def test_two_processes_download_a_file_once(shard, hub):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_fetch, args=(shard,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(gets(hub)) == 1


def test_prefetching_stays_within_its_bound(hub, tmp_path):
    hub.add_repo(REPO, CONTENT)
    _, shards = find_shards(REPO, list(CONTENT), tmp_path / "down")

    def wait_for(count: int) -> None:
        """Until so many have been asked for; then a little longer, for one too many to show."""
        deadline = time.monotonic() + 10
        while len(gets(hub)) < count and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.1)
        assert len(gets(hub)) == count

    with Prefetch(shards, num_workers=2, ahead=3) as prefetch:
        wait_for(3)
        for number, shard in enumerate(shards):
            shard.fetch()
            prefetch.done(shard)
            wait_for(min(number + 4, len(shards)))
    assert sorted(path.name for path in (tmp_path / "down").glob("[!.]*")) == list(CONTENT)
