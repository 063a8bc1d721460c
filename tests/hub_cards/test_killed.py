"""A push that is killed: nothing half done on the Hub, and the next push sends only the rest."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_killed_push_is_gone_on_with(hub, outside, scored_runs):
    command = [sys.executable, "-m", "hub_cards.push", str(scored_runs[1]), "--repo_id", "me/b"]
    pushes = hub.fault_for

    def stall_at_the_commit(request):
        while "commit/main" in request and stalled:
            time.sleep(0.05)
        return pushes(request)

    stalled = [True]
    hub.fault_for = stall_at_the_commit
    process = subprocess.Popen(command, cwd=ROOT, env=outside, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while len(hub.lfs) < 6 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    uploaded = set(hub.lfs)
    assert "model.safetensors" not in hub.repos["model", "me/b"].resolve("main").files
    assert uploaded
    hub.fault_for = pushes
    stalled.clear()
    hub.requests.clear()
    result = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    sent = {r.rpartition("/")[2] for r in hub.requests if r.startswith("PUT")}
    assert not sent & uploaded
    files = hub.repos["model", "me/b"].resolve("main").files
    weights = (scored_runs[1] / "final" / "model.safetensors").read_bytes()
    assert files["model.safetensors"].content == weights
    assert hub.token not in result.stdout + result.stderr
