"""`training.study`: runs side by side, Ctrl-C, and going on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.data_scripts.conftest import make_text
from tests.training.conftest import TINY_MODEL
from training.study import Study
from training.study_drafts import Draft
from training.study_plan import read_study

ROOT = Path(__file__).parents[2]


def write_study(folder: Path, num_updates: int) -> Path:
    recipe = {
        "name": "b",
        "model": TINY_MODEL | {"document_table": False},
        "data": {"chunk_length": 64},
        "training": {
            "num_updates": num_updates,
            "tokens_per_update": 256,
            "tokens_per_micro_batch": 256,
        },
    }
    arms = folder / "recipes"
    arms.mkdir()
    (arms / "b.yaml").write_text(yaml.safe_dump(recipe))
    table = {"base": "b.yaml", "name": "b_table", "baseline": "b"}
    (arms / "b_table.yaml").write_text(yaml.safe_dump(table | {"model": {"document_table": True}}))
    study = {
        "title": "tiny",
        "recipes": str(arms),
        "data": {"chunk_set": ["data_scripts.verify {out}/chunk_set"]},
        "groups": {
            "core": {"data": "chunk_set", "sets": ["dev"], "arms": {"b": [44], "b_table": [44]}}
        },
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study))
    return path


@pytest.fixture
def out(tmp_path, chunk_set) -> Path:
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "chunk_set").symlink_to(chunk_set)
    return folder


def start(study: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "training.study", study, "--out", out, "--yes", *more]
    return subprocess.Popen(
        [*map(str, command), "--until", "runs"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_updates(process: subprocess.Popen[str], out: Path, runs: int, least: int) -> None:
    """Until so many runs have done `least` updates."""
    deadline = time.monotonic() + 120
    while True:
        done = [p.read_text().count("\n") for p in out.glob("runs/*/metrics.jsonl")]
        if sum(count >= least for count in done) >= runs:
            return
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def states(out: Path) -> set[str]:
    found = [json.loads(p.read_text())["state"] for p in out.glob("runs/*/status.json")]
    return set(found)


@pytest.mark.multi_process
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_saves_every_run_and_the_same_command_goes_on(tmp_path, out, jobs):
    study = write_study(tmp_path, 3000)
    process = start(study, out, "--jobs", jobs)
    wait_for_updates(process, out, int(jobs), 3)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal sends
    printed = process.communicate(timeout=60)[0]
    assert process.returncode in (1, 75), printed
    assert states(out) == {"stopped"}, printed
    updates = [json.loads(p.read_text())["update"] for p in out.glob("runs/*/status.json")]
    assert all(0 < update < 3000 for update in updates)

    # The same command goes on where they stopped.
    again = start(study, out, "--jobs", jobs)
    wait_for_updates(again, out, int(jobs), max(updates) + 3)
    os.killpg(again.pid, signal.SIGINT)
    again.communicate(timeout=60)
    lines = (out / "runs/b_s44/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines] == list(range(len(lines)))


def test_a_failed_run_stops_the_study_and_is_named(tmp_path, out):
    study = write_study(tmp_path, 4)
    # Only the trainer can know that the rows are too long for the chunks.
    recipe = yaml.safe_load((tmp_path / "recipes/b_table.yaml").read_text())
    recipe["model"]["vocab_size"] = 301
    (tmp_path / "recipes/b_table.yaml").write_text(yaml.safe_dump(recipe))
    process = start(study, out, "--jobs", "2")
    printed = process.communicate(timeout=120)[0]
    assert process.returncode == 1
    assert "error: b_table_s44 ended with exit code 2, see " in printed
    assert "model.vocab_size is 301" in (out / "logs/b_table_s44.log").read_text()


def test_finished_runs_are_not_trained_again(tmp_path, out):
    study = write_study(tmp_path, 2)
    process = start(study, out, "--jobs", "2")
    assert process.communicate(timeout=120)[0].startswith("tiny\n2 runs to train: about 0.0 hours")
    assert process.returncode == 0
    assert not list(out.glob("runs/*/checkpoints"))
    plan = read_study(study)
    assert all(arm.is_done for arm in Study(plan, out).arms)
    recipe = yaml.safe_load((tmp_path / "recipes/b.yaml").read_text())
    recipe["training"]["num_updates"] = 3
    (tmp_path / "recipes/b.yaml").write_text(yaml.safe_dump(recipe))
    assert not any(arm.is_done for arm in Study(plan, out).arms)


@pytest.mark.multi_process
def test_a_kill_of_the_study_stops_its_runs(tmp_path, out):
    process = start(write_study(tmp_path, 3000), out, "--jobs", "2")
    wait_for_updates(process, out, 2, 3)
    process.terminate()  # the study alone, as `kill PID` does
    printed = process.communicate(timeout=60)[0]
    assert process.returncode != 0, printed
    assert states(out) == {"stopped"}, printed


def test_a_study_killed_between_commands_ends(tmp_path):
    code = "import os, signal, training.phases as p; p.forward_sigterm(); "
    code += "p.run('-c', 'pass'); os.kill(os.getpid(), signal.SIGTERM); print('still here')"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 128 + signal.SIGTERM
    assert "still here" not in found.stdout


def write_draft(folder: Path, arms: list[str], study: Path) -> None:
    pairs = [{"arm": arm, "baseline": "b", "seeds": [44]} for arm in arms]
    (folder / "draft.yaml").write_text(yaml.safe_dump({"contrasts": pairs}))
    plain = yaml.safe_load(study.read_text())
    plain["registration"] = str(folder / "draft.yaml")
    plain["groups"]["more"] = plain["groups"]["core"] | {"arms": {"b_table": [44]}}
    plain["groups"]["core"]["arms"] = {"b": [44]}
    study.write_text(yaml.safe_dump(plain))


def test_a_draft_of_arms_that_nobody_trains_is_refused_at_once(tmp_path, out):
    study = write_study(tmp_path, 2)
    write_draft(tmp_path, ["b_table", "b_moon"], study)
    with pytest.raises(ValueError, match="names b_moon, seed 44, which the study does not train"):
        Study(read_study(study), out)
    (tmp_path / "draft.yaml").unlink()
    with pytest.raises(ValueError, match="must be a registration's draft"):
        Study(read_study(study), out)


def test_some_groups_alone_register_nothing(tmp_path, out, capsys):
    study = write_study(tmp_path, 2)
    write_draft(tmp_path, ["b_table"], study)
    found = Study(read_study(study), out, groups=["core"])
    found.register()
    found.confirm()
    assert "is not registered: it names arms of groups" in capsys.readouterr().out
    assert not list(out.glob("*.json"))


CONTRAST = {"name": "H1", "says": "it helps", "arm": "b_table", "baseline": "b", "sign": "+"}
DRAFT = {
    "title": "tiny",
    "set_name": "confirmation",
    "format": "training",
    "bootstrap": {"num_resamples": 50, "seed": 0},
    "contrasts": [CONTRAST | {"seeds": [44]}],
}


def test_a_draft_that_changed_after_it_was_registered_is_named(tmp_path):
    path = tmp_path / "draft.yaml"
    path.write_text(yaml.safe_dump(DRAFT))
    draft = Draft(path, tmp_path, 1)
    registered = [DRAFT["contrasts"][0] | {"bounds": {"44": [0.0, 1.0]}}]
    content = DRAFT | {"contrasts": registered, "rules": [], "sha256": "0"}
    draft.registration.write_text(json.dumps(content))
    draft.check()
    later = [*DRAFT["contrasts"], CONTRAST | {"name": "H2", "seeds": [45]}]
    path.write_text(yaml.safe_dump(DRAFT | {"contrasts": later}))
    with pytest.raises(ValueError, match="draft.yaml: contrasts differs from what was registered"):
        draft.check()
    assert Draft(path, tmp_path, 2).registration.name == "registration_2.json"


@pytest.mark.slow
def test_a_later_arm_is_confirmed_by_the_same_command(tmp_path):
    study = write_study(tmp_path, 2)
    for name, seed in (("train", 1), ("dev_val", 2), ("confirmation", 3)):
        texts = [make_text(100 * seed + i, 300) for i in range(4)]
        (tmp_path / f"{name}.txt").write_text("\n\n".join(texts))
    splits = " ".join(f"{n}={tmp_path}/{n}.txt" for n in ("train", "dev_val", "confirmation"))
    plain = yaml.safe_load(study.read_text())
    plain["data"]["chunk_set"] = [
        f"data_scripts.build text --out {{out}}/chunk_set --split {splits} "
        "--confirmation confirmation --chunk_length 64 --vocab_size 300"
    ]
    core = plain["groups"]["core"] | {"sets": ["dev_val"]}
    plain |= {"groups": {"core": core}, "detail": {"mixture": ["b"], "attention": ["b"]}}
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(yaml.safe_dump(DRAFT))
    plain["registration"] = str(first)
    study.write_text(yaml.safe_dump(plain))
    out = tmp_path / "out"
    command = [*map(str, (sys.executable, "-m", "training.study", study, "--out", out)), "--yes"]
    subprocess.run(command, cwd=ROOT, check=True)
    before = (out / "confirmation.json").read_bytes()

    bigram = {"base": "b.yaml", "name": "b_bigram", "baseline": "b"}
    recipe = tmp_path / "recipes" / "b_bigram.yaml"
    recipe.write_text(yaml.safe_dump(bigram | {"model": {"bigram_rows": 64}}))
    contrast = CONTRAST | {"name": "H2", "arm": "b_bigram", "seeds": [44]}
    second.write_text(yaml.safe_dump(DRAFT | {"contrasts": [contrast]}))
    plain["registration"] = [str(first), str(second)]
    plain["detail"]["attention"].append("b_bigram")
    plain["groups"]["later"] = core | {"arms": {"b_bigram": [44]}}
    study.write_text(yaml.safe_dump(plain))
    subprocess.run(command, cwd=ROOT, check=True)
    assert (out / "confirmation.json").read_bytes() == before
    found = json.loads((out / "confirmation_2.json").read_text())
    assert list(found["contrasts"][0]["seeds"]) == ["44"]
    assert found["notes"][0].startswith("b, seed 44, was scored before")
    assert (out / "report" / "report.md").is_file()
    measured = sorted(path.parents[1].name for path in out.glob("runs/*/attention/dev_val.json"))
    assert measured == ["b_bigram_s44", "b_s44"]


def test_a_chunk_set_that_lends_its_tokenizer_is_built_too(tmp_path, out):
    study = write_study(tmp_path, 2)
    plain = yaml.safe_load(study.read_text())
    plain["data"]["packed"] = ["data_scripts.build packed --tokenizer {out}/chunk_set"]
    plain["groups"]["short"] = plain["groups"]["core"] | {"data": "packed"}
    study.write_text(yaml.safe_dump(plain))
    assert list(Study(read_study(study), out, groups=["short"]).data) == ["chunk_set", "packed"]


@pytest.mark.parametrize(
    ("named", "key"),
    [
        ({"detail": {"attention": ["b", "a_table"]}}, "detail.attention"),
        ({"cards": ["a_table"]}, "cards"),
    ],
)
def test_arms_that_a_plan_names_must_be_trained(tmp_path, named, key):
    study = write_study(tmp_path, 2)
    study.write_text(yaml.safe_dump(yaml.safe_load(study.read_text()) | named))
    with pytest.raises(ValueError, match=f"{key} names the arm 'a_table'; no group trains it"):
        read_study(study)


def test_unknown_groups_are_named(tmp_path, out):
    plan = read_study(write_study(tmp_path, 2))
    with pytest.raises(ValueError, match="'cores' is none"):
        Study(plan, out, groups=["cores"])
