"""The loop on several processes, after a cut, and on packed rows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from data_scripts.rows import TableOptions, packed_rows
from evaluation import partial_scores, scoring
from evaluation.checkpoints import load_model, open_checkpoint
from evaluation.formats import EvaluationFormat, load_targets, score_units
from evaluation.partial_scores import PartialScores
from evaluation.plans import row_plan
from evaluation.score import main, score_runs
from evaluation.scores import COLUMNS, read_scores
from evaluation.scoring import share_units
from modeling_doctab import naive
from tests.evaluation import naive_classes
from tests.evaluation.conftest import CHUNK_LENGTH, ROW_LENGTH
from tests.evaluation.test_records import HEADER

ROOT = Path(__file__).resolve().parents[2]
EXACT = tuple(name for name in COLUMNS if name != "nats")


def assert_same_scores(one, other) -> None:
    np.testing.assert_allclose(one.nats, other.nats, atol=1e-5)  # float32 logits of about 1
    for name in EXACT:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("stride", [None, 8])
def test_shares_are_disjoint_whole_and_even(make_run, chunk_set, num_ranks, stride) -> None:
    form = EvaluationFormat(stride)
    plan = row_plan(open_checkpoint(make_run("arm")), chunk_set)
    targets = load_targets(chunk_set, "dev", full_chunks=stride is None)
    units = score_units(targets, form, plan)
    done = np.zeros(len(targets.tokens), np.bool_)
    done[units[0, 0] : units[0, 1]] = True  # one unit finished, one half done
    done[units[1, 0] : units[1, 0] + 9] = True
    shares = [share_units(units, done, rank, num_ranks) for rank in range(num_ranks)]
    assert sorted(np.concatenate(shares)) == list(range(1, len(units)))
    loads = [int((units[share, 1] - units[share, 0]).sum()) for share in shares]
    assert max(loads) - min(loads) <= (units[:, 1] - units[:, 0]).max()


def test_a_cut_loses_only_what_was_not_saved(make_run, chunk_set, monkeypatch) -> None:
    whole, cut = make_run("whole"), make_run("cut")
    score_runs([whole], chunk_set, ["dev"], batch_size_tokens=32)
    monkeypatch.setattr(partial_scores, "SAVE_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(PartialScores.__init__, "__defaults__", (0.0,))
    plain, calls = scoring.batch_nats, []

    def interrupted(model, batch, *rest):
        calls.append(int((batch.target_index >= 0).sum()))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return plain(model, batch, *rest)

    monkeypatch.setattr(scoring, "batch_nats", interrupted)
    with pytest.raises(KeyboardInterrupt):
        score_runs([cut], chunk_set, ["dev"], batch_size_tokens=32)
    assert not (cut / "records").exists()
    saved = sum(calls[:3])
    (cut / "scores" / ".partial_dev.training" / "piece_half.npz").write_bytes(b"half a file")
    score_runs([cut], chunk_set, ["dev"], batch_size_tokens=48)
    ours, theirs = (read_scores(run / "scores" / "dev.training.npz") for run in (cut, whole))
    assert sum(calls[4:]) == len(ours.nats) - saved
    assert_same_scores(ours, theirs)
    assert not list((cut / "scores").glob(".partial*"))


def test_pieces_of_another_model_are_not_taken_up(tmp_path: Path) -> None:
    one = PartialScores(tmp_path, HEADER, 5)
    place = np.array([1, 3])
    one.add(place=place, **{name: np.ones(2, dtype) for name, dtype in COLUMNS.items()})
    one.save()
    same, other = (
        PartialScores(tmp_path, header, 5)
        for header in (HEADER, type(HEADER)(**{**vars(HEADER), "checkpoint_sha256": "f" * 64}))
    )
    same.load()
    other.load()
    assert same.done.tolist() == [False, True, False, True, False]
    assert same.scores.nats[1] == 1.0
    assert not other.done.any()


def test_packed_rows_equal_plain_loops(make_run, packed_set) -> None:
    run = make_run("packed", max_position_embeddings=CHUNK_LENGTH)
    assert main([str(run), "--chunk_set", str(packed_set.path), "--sets", "dev"]) == 0
    scores = read_scores(run / "scores" / "dev.packed.npz")
    assert scores.header.format == "packed"
    documents = packed_set.documents("dev")
    bos = packed_set.bos_token_id
    rows = packed_rows(np.asarray(documents.tokens).reshape(-1, CHUNK_LENGTH), bos, TableOptions())
    segments = rows.pop("segment_ids")
    batch = {name: torch.from_numpy(array) for name, array in rows.items()}
    labels = batch.pop("shift_labels")
    model = load_model(open_checkpoint(run), torch.device("cpu"))
    losses = model.target_nats(targets=labels, **batch).flatten()
    np.testing.assert_array_equal(scores.nats, losses.numpy())
    targets = load_targets(packed_set, "dev", full_chunks=True)
    for row in range(len(documents)):
        stream = [bos, *documents.document(row).tolist()]
        table = naive.lookup(stream[:-1], 4, segments[row].tolist())
        for slot in range(CHUNK_LENGTH):
            place = row * CHUNK_LENGTH + slot
            assert scores.table_order[place] == table[slot][0]
            start = max(i for i in range(slot + 1) if stream[i] == bos)
            expected = (0, 0)
            if stream[slot + 1] != bos:  # within the document that opens at `start`
                segment = stream[start + 1 : slot + 2]
                expected = naive_classes.target_order(segment, slot - start, bos)
            assert (targets.order[place], targets.distance[place]) == expected
    assert not scores.violation.any()


def test_a_long_row_arm_on_packed_rows(make_run, packed_set) -> None:
    run = make_run("long", max_position_embeddings=256, table_reach=256)
    (result,) = score_runs([run], packed_set, ["dev"])
    assert (result.records.header.format, result.records.header.row_length) == ("packed", 64)


def test_packed_rows_have_no_strides(make_run, packed_set) -> None:
    with pytest.raises(ValueError, match="Stride windows need whole documents"):
        score_runs([make_run("arm")], packed_set, ["dev"], EvaluationFormat(8))


def test_a_model_of_another_vocabulary_is_refused(make_run, chunk_set) -> None:
    run = make_run("small", vocab_size=chunk_set.vocab_size - 1, bos_token_id=3)
    with pytest.raises(ValueError, match="must know the chunk set's tokens; small has 269 ids"):
        score_runs([run], chunk_set, ["dev"])


def launch(num_processes: int, *arguments: str) -> subprocess.Popen[str]:
    launcher = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_config.yaml"]
    ports = ["--main_process_port", "0"] if num_processes > 1 else []
    return subprocess.Popen(
        [
            *(sys.executable, *launcher, "--num_processes", str(num_processes), *ports),
            *("-m", "evaluation.score", *arguments),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.multi_process
@pytest.mark.parametrize("options", [[], ["--format", "stride", "--stride", "5"]])
def test_two_processes_give_the_same_scores(make_run, chunk_set, options) -> None:
    alone, together = make_run("alone"), make_run("together")
    common = ["--chunk_set", str(chunk_set.path), "--sets", "dev", *options]
    assert main([str(alone), *common]) == 0
    process = launch(2, str(together), *common, "--batch_size_tokens", "40")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    (file,) = (together / "scores").glob("*.npz")
    assert_same_scores(read_scores(file), read_scores(alone / "scores" / file.name))
    assert "(1 of 2 processes)" in output


@pytest.mark.multi_process
def test_killed_with_two_processes_and_resumed_with_one(make_run, chunk_set) -> None:
    whole, cut = make_run("whole"), make_run("cut")
    common = ["--chunk_set", str(chunk_set.path), "--sets", "dev"]
    assert main([str(whole), *common]) == 0
    slow = (
        "import time, runpy, sys\n"
        "from evaluation import partial_scores, scoring\n"
        "partial_scores.PartialScores.__init__.__defaults__ = (0.0,)\n"
        "plain = scoring.batch_nats\n"
        "def slowly(*given):\n    time.sleep(0.3)\n    return plain(*given)\n"
        "scoring.batch_nats = slowly\n"
        "sys.argv = ['evaluation.score', *sys.argv[1:]]\n"
        "runpy.run_module('evaluation.score', run_name='__main__')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow, str(cut), *common, "--batch_size_tokens", "16"], cwd=ROOT
    )
    folder = cut / "scores" / ".partial_dev.training"
    deadline = time.monotonic() + 120
    while len(list(folder.glob("piece_*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    saved = len(list(folder.glob("piece_*")))
    assert saved >= 3
    assert main([str(cut), *common, "--batch_size_tokens", "64"]) == 0
    assert_same_scores(*(read_scores(run / "scores" / "dev.training.npz") for run in (cut, whole)))
    assert not folder.exists()


def test_the_header_is_kept(make_run, chunk_set) -> None:
    """Row length and seed of the table's controls come from the run."""
    checkpoint = open_checkpoint(make_run("arm", seed=7, data={"table_source": "shuffled"}))
    assert (checkpoint.table.source, checkpoint.table.seed) == ("shuffled", 7)
    assert row_plan(checkpoint, chunk_set).row_length == ROW_LENGTH
