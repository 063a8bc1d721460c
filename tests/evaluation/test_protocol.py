"""Registration and confirmation: verdicts, and everything that must not go unnoticed."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from data_scripts.chunk_set import ChunkSet
from evaluation import protocol, registration
from evaluation.contrasts import contrast
from evaluation.formats import EvaluationFormat, load_targets
from evaluation.protocol import confirm, main, register
from evaluation.records import read_records, write_records
from evaluation.registration import Ledger, Registration, content_sha256, read_registration
from evaluation.rules import (
    RuleOutcome,
    SeedVerdict,
    Verdict,
    apply_rule,
    check_contrasts,
    check_rules,
)
from evaluation.score import main as score
from evaluation.score import score_runs
from tests.evaluation.test_records import make_records
from tests.evaluation.test_report import improved

EXAMPLE = Path(protocol.__file__).with_name("example_registration.yaml")


def draft(**changes):
    entry = {"name": "H1", "says": "the gain", "arm": "b_table", "baseline": "b", "sign": "+"}
    content = {
        "title": "tiny",
        "set_name": "confirm",
        "format": "training",
        "bootstrap": {"num_resamples": 50, "seed": 3},
        "contrasts": [{**entry, "seeds": [44], "prediction": {"within": 0.5, "of": "dev"}}],
        "rules": [],
    }
    return content | changes


def part_rule(of: str, groups: list[str]) -> dict:
    """Claim 3: what share of B + table's gain comes from copies that the row does not show."""
    pair = {"arm": "b_table", "baseline": "b"}
    return {
        "name": "hidden copies carry the gain",
        "gain": pair | {"part": {"of": of, "groups": groups}},
        "relative_to": pair,
        "sets": ["dev"],
        "seeds": [44],
        "outcomes": [{"at_least": 0.5, "says": "most of it"}, {"says": "not most of it"}],
    }


@pytest.fixture
def runs(make_run, own_set) -> list[Path]:
    made = [make_run("b", document_table=False), make_run("b_table", baseline="b")]
    score_runs(made, own_set, ["dev"])
    return made


@pytest.fixture
def registered(runs, own_set, tmp_path) -> Path:
    path = tmp_path / "registration.json"
    path.write_text(json.dumps(register(draft(), runs, own_set).content))
    return path


@pytest.fixture
def later(make_run, own_set) -> Path:
    """An arm that comes after b and b_table, against b."""
    made = make_run("b_wide", document_table=False, short_window=4, baseline="b")
    score_runs([made], own_set, ["dev"])
    return made


@pytest.fixture
def second(runs, own_set, registered, later) -> Registration:
    """Of the later arm, after the first registration was confirmed."""
    confirm(read_registration(registered), runs, own_set)
    return register(later_draft(), [*runs, later], own_set)


def later_draft(**changes):
    return draft(contrasts=[draft()["contrasts"][0] | {"name": "H6", "arm": "b_wide"}], **changes)


def reregister(path: Path, own_set: ChunkSet, **changes) -> Registration:
    """A forgery that knows every hash: content and ledger rewritten to agree."""
    content = json.loads(path.read_text()) | changes
    content["sha256"] = content_sha256(content)
    line = {"event": "registered", "registration": content["sha256"], "date": content["date"]}
    line |= {"previous": content["previous"], "set_name": content["set_name"]}
    (own_set.path / registration.LEDGER_NAME).write_text(json.dumps(line, sort_keys=True) + "\n")
    return Registration(content)


def test_confirm_scores_once_and_says_what_it_found(runs, own_set, registered) -> None:
    found = confirm(read_registration(registered), runs, own_set)
    (verdict,) = found.verdicts
    records = [read_records(run / "records" / "confirm.training.parquet") for run in runs]
    expected = contrast(records[1], records[0], 50, 3)
    (seed,) = verdict.seeds
    assert (seed.gain, seed.interval) == (expected.gain, expected.comparison.gain_interval)
    dev = [read_records(run / "records" / "dev.training.parquet") for run in runs]
    on_dev = contrast(dev[1], dev[0], 50, 3).gain
    assert seed.bounds == pytest.approx((on_dev - 0.5, on_dev + 0.5), abs=1e-12)
    assert records[0].header.registration == read_registration(registered).sha256
    events = [event["event"] for event in Ledger(own_set.path).events]
    assert events == ["registered", "opened", "scored", "opened", "scored"]
    again = confirm(read_registration(registered), runs, own_set)
    assert again.text == found.text
    assert len(Ledger(own_set.path).events) == len(events)  # nothing is scored twice


def test_an_arm_without_a_contrast_is_scored_too(runs, make_run, own_set, tmp_path) -> None:
    extra = make_run("b_wide", document_table=False, short_window=4)
    with pytest.raises(ValueError, match=r"missing: b_wide \(seed 44\)"):
        register(draft(also_scored={"b_wide": [44]}), runs, own_set)
    with pytest.raises(ValueError, match="also_scored must be"):
        register(draft(also_scored={"b_wide": 44}), runs, own_set)
    path = tmp_path / "registration.json"
    content = register(draft(also_scored={"b_wide": [44]}), [*runs, extra], own_set).content
    path.write_text(json.dumps(content))
    confirm(read_registration(path), [*runs, extra], own_set)
    records = read_records(extra / "records" / "confirm.training.parquet")
    assert records.header.registration == content["sha256"]


def test_the_commands(runs, own_set, tmp_path, capsys) -> None:
    (tmp_path / "draft.yaml").write_text(yaml.safe_dump(draft()))
    out, result = tmp_path / "r.json", tmp_path / "c.json"
    common = [*map(str, runs), "--chunk-set", str(own_set.path)]
    assert main(["register", str(tmp_path / "draft.yaml"), *common, "--out", str(out)]) == 0
    assert read_registration(out).sha256 in capsys.readouterr().out
    assert main(["register", str(tmp_path / "draft.yaml"), *common, "--out", str(out)]) == 2
    assert "A registration is never overwritten" in capsys.readouterr().err
    assert main(["confirm", str(out), *common, "--out", str(result)]) == 0
    printed = capsys.readouterr().out
    assert "H1 confirmed" in printed or "H1 not confirmed" in printed
    written = json.loads(result.read_text())
    assert written["registration"] == read_registration(out).sha256
    assert set(written["contrasts"][0]["seeds"]) == {"44"}
    assert str(tmp_path) not in out.read_text() + result.read_text()


def test_score_needs_the_registration_and_honours_it(runs, own_set, registered, capsys) -> None:
    command = [str(runs[0]), "--chunk_set", str(own_set.path), "--sets", "confirm"]
    assert score(command) == 2
    assert "confirm is a confirmation split" in capsys.readouterr().err
    with pytest.raises(ValueError, match="stay closed until a registration"):
        load_targets(own_set, "confirm", full_chunks=True)
    command += ["--registration", str(registered)]
    assert score([*command, "--format", "stride", "--stride", "8"]) == 2
    assert "format is registered as training" in capsys.readouterr().err
    assert score(command) == 0
    confirm(read_registration(registered), runs, own_set)


@pytest.mark.parametrize(
    ("place", "has_records"),
    [
        ("evaluation.scoring.batch_nats", False),
        ("evaluation.registration.Registration.note_scored", True),  # between records and ledger
    ],
)
def test_a_cut_confirmation_is_resumed(
    runs, own_set, registered, monkeypatch, place, has_records
) -> None:
    def cut(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(place, cut)
        with pytest.raises(KeyboardInterrupt):
            confirm(read_registration(registered), runs, own_set)
    assert bool(list(runs[0].glob("records/confirm.*.parquet"))) == has_records
    confirm(read_registration(registered), runs, own_set)
    assert len(Ledger(own_set.path).of("scored")) == 2


def test_a_registration_holds_over_the_turn_of_a_second(runs, own_set, monkeypatch) -> None:
    ticks = iter(range(60))
    tick = lambda: f"2026-01-01T00:00:{next(ticks):02}+00:00"  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(protocol, "now", tick)
        patched.setattr(registration, "now", tick)
        found = register(draft(), runs, own_set)
    assert Ledger(own_set.path).of("registered")[0]["date"] == found.content["date"]


def test_records_of_another_checkpoint_are_refused(runs, own_set, make_run, tmp_path) -> None:
    path = runs[1] / "records" / "dev.training.parquet"
    records = read_records(path)
    write_records(
        replace(records, header=replace(records.header, checkpoint_sha256="f" * 64)), path
    )
    with pytest.raises(ValueError, match="is older than the checkpoint in"):
        register(draft(), runs, own_set)
    write_records(replace(records, header=replace(records.header, data_sha256="f" * 64)), path)
    with pytest.raises(ValueError, match="is of another chunk set than"):
        register(draft(), runs, own_set)
    assert Ledger(own_set.path).events == []


def test_a_part_that_these_runs_do_not_have_is_refused(make_run, own_set) -> None:
    whole = {"max_position_embeddings": own_set.chunk_length, "document_table": False}
    made = [make_run("b", **whole), make_run("b_table", baseline="b")]
    score_runs(made, own_set, ["dev"])
    with pytest.raises(
        ValueError, match="'hidden copies carry the gain': the gain of b_table over"
    ):
        register(draft(rules=[part_rule("target_cell", ["*hidden"])]), made, own_set)


def test_a_changed_registration_is_named(runs, own_set, registered) -> None:
    content = json.loads(registered.read_text())
    content["contrasts"][0]["sign"] = "-"
    registered.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="was changed after it was registered"):
        read_registration(registered)
    content["sha256"] = content_sha256(content)  # and hashed anew
    with pytest.raises(ValueError, match="the ledger of the chunk set does not know"):
        confirm(Registration(content), runs, own_set)


def test_a_registration_dated_back_is_named(runs, own_set, registered) -> None:
    content = json.loads(registered.read_text()) | {"date": "2020-01-01T00:00:00+00:00"}
    old, content["sha256"] = content["sha256"], content_sha256(content)
    path = own_set.path / registration.LEDGER_NAME
    path.write_text(path.read_text().replace(old, content["sha256"]))
    with pytest.raises(ValueError, match="but was entered in the ledger at"):
        confirm(Registration(content), runs, own_set)
    entries = json.loads(registered.read_text())["checkpoints"]
    trained = [entry | {"trained": "2021-01-01T00:00:00+00:00"} for entry in entries]
    forged = reregister(
        registered,
        own_set,
        date="2020-01-01T00:00:00+00:00",
        checkpoints=trained,
        git_commit_date="2022-02-02T00:00:00+00:00",
    )
    with pytest.raises(ValueError, match=r"before its own code's commit.*before the training of b"):
        confirm(forged, runs, own_set)
    forged = reregister(registered, own_set, date="2999-01-01T00:00:00+00:00")
    with pytest.raises(ValueError, match="in the future"):
        confirm(forged, runs, own_set)


def test_a_registration_after_the_opening_is_named(runs, own_set, registered) -> None:
    read = read_registration(registered)
    confirm(read, runs, own_set)
    path = own_set.path / registration.LEDGER_NAME
    path.write_text(path.read_text().replace('"date": "2', '"date": "1', 2))
    with pytest.raises(ValueError, match="the ledger was edited: line 2"):
        confirm(read, runs, own_set)


def test_a_bypass_is_named(runs, own_set, registered, monkeypatch) -> None:
    # The gate is taken out of the code, as someone might do by hand.
    with monkeypatch.context() as patched:
        patched.setattr(ChunkSet, "is_confirmation", lambda self, name: False)
        score_runs(runs[:1], own_set, ["confirm"])
    with pytest.raises(ValueError, match="b, seed 44, was scored on confirm without"):
        confirm(read_registration(registered), runs, own_set)
    with pytest.raises(ValueError, match="was scored on confirm without"):
        register(draft(title="another"), runs, own_set)


def test_records_cannot_be_replaced_or_made_again(runs, own_set, registered) -> None:
    read = read_registration(registered)
    confirm(read, runs, own_set)
    path = runs[1] / "records" / "confirm.training.parquet"
    records = read_records(path)
    better = replace(records, sums=records.sums._replace(nats=records.sums.nats * 0.9))
    write_records(better, path)
    with pytest.raises(ValueError, match="records of b_table, seed 44 were changed after"):
        confirm(read, runs, own_set)
    path.unlink()
    with pytest.raises(ValueError, match="Each checkpoint is scored once on confirm"):
        confirm(read, runs, own_set)


def test_a_later_arm_is_confirmed_against_a_baseline_scored_before(
    runs, own_set, registered, later, tmp_path
) -> None:
    first = read_registration(registered)
    confirm(first, runs, own_set)
    content = register(later_draft(), [*runs, later], own_set).content
    before = (runs[0] / "records" / "confirm.training.parquet").read_bytes()
    found = confirm(Registration(content), [*runs, later], own_set)
    assert (runs[0] / "records" / "confirm.training.parquet").read_bytes() == before
    scored = [one["registration"] for one in Ledger(own_set.path).of("scored")]
    assert scored == [first.sha256, first.sha256, content["sha256"]]
    records = [
        read_records(run / "records" / "confirm.training.parquet") for run in (later, runs[0])
    ]
    assert found.verdicts[0].seeds[0].gain == contrast(*records, 50, 3).gain
    assert found.notes == (
        f"b, seed 44, was scored before, under the registration {first.sha256[:12]}",
    )
    assert found.notes[0] in found.text
    assert json.loads(found.to_json())["notes"] == [*found.notes]
    # The first one still stands, with the later arm beside it; so does the second.
    confirm(first, [*runs, later], own_set)
    assert confirm(Registration(content), [*runs, later], own_set).text == found.text


def test_what_could_be_known_is_not_registered(runs, own_set, registered, later) -> None:
    confirm(read_registration(registered), runs, own_set)
    with pytest.raises(ValueError, match="contrast 'H1' compares b_table and b, seed 44, which we"):
        register(draft(title="second"), runs, own_set)
    new = later_draft()
    both = [*runs, later]
    with pytest.raises(ValueError, match="also_scored has b_table, seed 44, which was scored"):
        register(new | {"also_scored": {"b_table": [44]}}, both, own_set)
    rule = part_rule("target_cell", ["*hidden"]) | {"sets": ["confirm"]}
    for known in (rule, rule | {"format": "stride8-window"}):  # one scoring shows every format
        with pytest.raises(ValueError, match="rule 'hidden copies carry the gain' reads checkpoi"):
            register(new | {"rules": [known]}, both, own_set)
    # Without its records, a baseline's score is known all the same.
    hidden = [shutil.copytree(run, run.with_name(run.name + "_copy")) for run in runs]
    for run in hidden:
        for folder in ("records", "scores"):
            for file in (run / folder).glob("confirm.*"):
                file.unlink()
    with pytest.raises(ValueError, match=r"contrast 'H1' compares.*b, seed 44, is scored once"):
        register(draft(title="second"), hidden, own_set)
    with pytest.raises(ValueError, match="Put them back, or confirm that registration again"):
        register(new, [*hidden, later], own_set)
    # A rule sees no arm that was not given when it was registered.
    content = register(new | {"rules": [rule]}, [runs[0], later], own_set).content
    found = confirm(Registration(content), both, own_set)
    assert found.outcomes[0].value is None


def test_a_rule_s_arms_are_fixed_when_it_is_registered(runs, own_set, later, tmp_path) -> None:
    rule = part_rule("target_cell", ["*"]) | {"gain": {"arm": "b_wide", "baseline": "b"}}
    del rule["relative_to"]
    content = register(draft(rules=[rule]), [*runs, later], own_set).content
    assert {one["arm"]: one["scored"] for one in content["checkpoints"]} == {
        "b": True,
        "b_table": True,
        "b_wide": False,
    }
    found = confirm(Registration(content), [*runs, later], own_set)
    assert found.outcomes[0].value is not None
    assert not list((later / "records").glob("confirm.*"))  # read, not scored
    with pytest.raises(ValueError, match="checkpoint of b_wide, seed 44, is not among those"):
        score_runs([later], own_set, ["confirm"], registration=Registration(content))
    with pytest.raises(ValueError, match="no run holds the registered checkpoint of b_wide"):
        confirm(Registration(content), runs, own_set)


def test_two_runs_of_one_arm_are_refused(runs, own_set, registered) -> None:
    copy = shutil.copytree(runs[0], runs[0].with_name("copy"))
    for attempt in (
        lambda: register(draft(), [*runs, copy], own_set),
        lambda: confirm(read_registration(registered), [*runs, copy], own_set),
    ):
        with pytest.raises(ValueError, match="There must be one run of b, seed 44; found .*copy"):
            attempt()


def test_registrations_made_before_either_is_confirmed_share_a_baseline(
    runs, own_set, registered, later
) -> None:
    new = later_draft()
    second = register(new, [*runs, later], own_set)
    first = read_registration(registered)
    confirm(first, runs, own_set)
    found = confirm(second, [*runs, later], own_set)
    assert found.notes == (
        f"b, seed 44, was scored before, under the registration {first.sha256[:12]}",
    )
    assert len(Ledger(own_set.path).of("scored")) == 3


def test_the_baseline_s_records_are_looked_for_before_the_arm_is_scored(
    runs, own_set, later, second
) -> None:
    path = runs[0] / "records" / "confirm.training.parquet"
    path.rename(path.with_suffix(".away"))
    with pytest.raises(ValueError, match="its records/confirm.training.parquet are not in"):
        confirm(second, [*runs, later], own_set)
    assert not list((later / "records").glob("confirm.*"))
    path.with_suffix(".away").rename(path)


def test_a_baseline_that_other_code_scored_is_named(runs, own_set, later, monkeypatch) -> None:
    with monkeypatch.context() as patched:
        for module in (protocol, registration):
            patched.setattr(module, "code_sha256", lambda: "f" * 64)
        confirm(register(draft(), runs, own_set), runs, own_set)
    new = later_draft()
    second = register(new, [*runs, later], own_set)
    (note,) = confirm(second, [*runs, later], own_set).notes
    assert note.endswith("by other code: see that its development records stay the same with this")


def test_a_retrained_arm_is_named(runs, own_set, registered, make_run) -> None:
    first = read_registration(registered)
    confirm(first, runs, own_set)
    retrained = shutil.copytree(runs[1], runs[1].with_name("again"))
    for folder in ("records", "scores"):
        shutil.rmtree(retrained / folder)
    config = retrained / "final" / "config.json"
    config.write_text(config.read_text() + "\n")
    score_runs([retrained], own_set, ["dev"])
    again = register(draft(), [runs[0], retrained], own_set)
    notes = confirm(again, [runs[0], retrained], own_set).notes
    assert notes[1] == (
        "another checkpoint of b_table, seed 44, was scored on confirm before, under the "
        f"registration {first.sha256[:12]}"
    )


def test_a_ledger_holds_one_result_and_whole_lines(runs, own_set, registered) -> None:
    read = read_registration(registered)
    confirm(read, runs, own_set)
    records = read_records(runs[0] / "records" / "confirm.training.parquet")
    num_events = len(Ledger(own_set.path).events)
    read.note_scored(records, own_set.path)  # a second process with the same result
    assert len(Ledger(own_set.path).events) == num_events
    other = replace(records, sums=records.sums._replace(nats=records.sums.nats * 0.9))
    with pytest.raises(ValueError, match="by another process meanwhile, with another result"):
        read.note_scored(other, own_set.path)
    path = own_set.path / registration.LEDGER_NAME
    path.write_text(path.read_text() + '{"event": "op')
    with pytest.raises(ValueError, match="Where its last line was cut off"):
        Ledger(own_set.path)


def test_processes_wait_for_the_ledger(own_set) -> None:
    def add(number: int) -> None:
        Ledger(own_set.path).append("opened", str(number))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(40)))
    ledger = Ledger(own_set.path)
    assert len(ledger.events) == 40
    assert ledger.problems() == []


def test_an_earlier_registration_s_records_are_held_to_the_ledger(
    runs, own_set, later, second
) -> None:
    path = runs[0] / "records" / "confirm.training.parquet"
    records = read_records(path)
    worse = replace(records, sums=records.sums._replace(nats=records.sums.nats * 1.1))
    write_records(worse, path)
    for attempt in (
        lambda: register(later_draft(), [*runs, later], own_set),
        lambda: confirm(second, [*runs, later], own_set),
    ):
        with pytest.raises(ValueError, match="records of b, seed 44 were changed after"):
            attempt()
    foreign = replace(records, header=replace(records.header, registration="f" * 64))
    write_records(foreign, path)
    with pytest.raises(ValueError, match="registration ffffffffffff, but the ledger knows of no"):
        confirm(second, [*runs, later], own_set)


def test_other_checkpoints_and_code_are_refused(
    runs, own_set, registered, make_run, monkeypatch
) -> None:
    read = read_registration(registered)
    with pytest.raises(ValueError, match="no run holds the registered checkpoint of b_table"):
        confirm(read, runs[:1], own_set)
    other = make_run("c", seed=45)
    with pytest.raises(ValueError, match="checkpoint of c, seed 45, is not among those"):
        score_runs([other], own_set, ["confirm"], registration=read)
    with pytest.raises(ValueError, match="an ablated table is not registered"):
        score_runs(runs[1:], own_set, ["confirm"], ablated=True, registration=read)
    monkeypatch.setattr(registration, "code_sha256", lambda: "0" * 64)
    with pytest.raises(ValueError, match="the code that scores and judges has changed"):
        confirm(read, runs, own_set)


@pytest.mark.parametrize(
    ("gains", "intervals", "bounds", "outcome"),
    [
        ([0.01, 0.02], [(0.005, 0.015), (0.01, 0.03)], None, "H1 confirmed: it"),
        ([0.01, 0.02], [(0.005, 0.015), (-0.01, 0.05)], None, "H1 not confirmed: it"),
        ([-0.01], [(-0.02, -0.001)], None, "H1 not confirmed: it"),
        ([0.01], [(float("nan"), float("nan"))], None, "H1 not confirmed: it"),
        ([0.01], [(0.005, 0.015)], (0.012, 0.02), "H1 confirmed, prediction missed: it"),
        ([0.01], [(-0.005, 0.015)], (0.012, 0.02), "H1 not confirmed, prediction missed: it"),
    ],
)
def test_verdicts(gains, intervals, bounds, outcome) -> None:
    seeds = tuple(
        SeedVerdict(44 + i, gain, interval, bounds)
        for i, (gain, interval) in enumerate(zip(gains, intervals, strict=True))
    )
    assert str(Verdict("H1", "it", 1, seeds)).splitlines()[0] == outcome


def test_a_negative_sign_is_confirmed_below_zero() -> None:
    seeds = (SeedVerdict(44, -0.02, (-0.03, -0.01), None),)
    assert Verdict("H5", "", -1, seeds).confirmed
    assert not Verdict("H5", "", 1, seeds).confirmed


class _Gain:
    def __init__(self, gain: float) -> None:
        self.gain = gain


@pytest.mark.parametrize(
    ("rule", "gains", "expected"),
    [
        ("the table adds to local-global attention", [0.0079, 0.0123], (0.0079, "adds")),
        ("the table adds to local-global attention", [0.0049, 0.0123], (0.0049, "does not add")),
        (
            "the table and the bigram table are additive",
            [0.030, 0.034],
            (0.030 / 0.034, "additive"),
        ),
        ("the gain at width 768", [0.0110, 0.0113], (0.0110, "persists across these widths")),
        ("the gain at width 768", [0.0097, 0.0104], (0.0097, "a trend only")),
        ("the gain at width 768", [0.0059, 0.0104], (0.0059, "shrinks quickly")),
        ("the gain on packed short documents", [0.0001, 0.0002], (0.0001, "no gain")),
        ("the gain on packed short documents", [0.0030, 0.0042], (0.0030, "undecided")),
    ],
)
def test_the_paper_s_rules(rule, gains, expected) -> None:
    (entry,) = [one for one in yaml.safe_load(EXAMPLE.read_text())["rules"] if one["name"] == rule]
    relative = entry.get("relative_to", {}).get("arm")
    seen = []

    def find(arm, baseline, seed, set_name, form):
        seen.append((set_name, form))
        if relative is not None:
            return _Gain(gains[1] if arm == relative else gains[0])
        return _Gain(gains[entry["sets"].index(set_name)])

    outcome = apply_rule(entry, "training", find)
    assert (outcome.value, outcome.says) == (pytest.approx(expected[0]), expected[1])
    assert {form for _, form in seen} == {entry.get("format", "training")}
    missing = apply_rule(entry, "training", lambda *given: None)
    assert missing == RuleOutcome(rule, None, f"no records of seed 44 on {entry['sets'][0]}")


def test_a_rule_on_a_part_of_a_gain() -> None:
    base = make_records(arm="b", baseline=None)
    found = contrast(improved(base, 0.1, arm="b_table", baseline="b"), base, 50)
    split = found.gain_by("target_cell")
    assert split is not None
    hidden = sum(value for name, value in split.items() if name.endswith("hidden"))
    rule = part_rule("target_cell", ["*hidden"])
    check_rules([rule])
    outcome = apply_rule(rule, "training", lambda *given: found)
    assert outcome.value == pytest.approx(hidden / found.gain)
    assert 0 < hidden < found.gain
    everything = part_rule("target_cell", ["*", "*hidden"])
    assert apply_rule(everything, "training", lambda *given: found).value == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("of", "groups", "message"),
    [
        ("moons", ["*"], "a partition must be one of target_cell"),
        ("target_cell", ["*seen"], r"target_cell has no group \*seen; it has order_0"),
    ],
)
def test_a_rule_on_no_part_is_refused(of: str, groups: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rules([part_rule(of, groups)])


def test_the_example_is_the_paper_s(runs, own_set) -> None:
    example = yaml.safe_load(EXAMPLE.read_text())
    check_contrasts(example["contrasts"])
    check_rules(example["rules"])
    found = [(one["arm"], one["baseline"], one["sign"]) for one in example["contrasts"]]
    assert found == [
        ("b_table", "b", "+"),
        ("a_table", "a", "+"),
        ("lg512_table", "lg512", "+"),
        ("lg512", "b_table", "+"),
        ("l5_8k", "b_table", "-"),
    ]
    with pytest.raises(ValueError, match=r"missing: a \(seed 44\), a \(seed 45\)"):
        register(example | {"set_name": "confirm"}, runs, own_set)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"set_name": "nowhere"}, "'nowhere' is not one of dev, confirm"),
        ({"format": "strided"}, "format must be training, packed or strideN-REACH"),
        ({"bootstrap": {"seed": 1}}, "bootstrap must have num_resamples, 1 or more"),
        ({"bootstrap": {"num_resamples": 0, "seed": 0}}, "bootstrap must have num_resamples, 1"),
        ({"bootstrap": 2000}, "bootstrap must have num_resamples, 1 or more"),
        ({"contrasts": []}, "must hold at least one contrast"),
        ({"kind": 1}, r"unknown \['kind'\]"),
        ({"contrasts": [draft()["contrasts"][0] | {"sign": "?"}]}, "sign must be"),
        ({"contrasts": ["H1"]}, "Every contrast must be a mapping; got 'H1'"),
        ({"contrasts": [draft()["contrasts"][0] | {"seeds": []}]}, "seeds must be a list of one"),
        ({"contrasts": [draft()["contrasts"][0] | {"seeds": 44}]}, "seeds must be a list of one"),
        ({"contrasts": [draft()["contrasts"][0] | {"prediction": 0.1}]}, "a prediction must be"),
        ({"contrasts": [draft()["contrasts"][0] | {"prediction": {"of": 1}}]}, "a prediction must"),
        ({"contrasts": [draft()["contrasts"][0] | {"extra": 1}]}, r"unknown \['extra'\]"),
        (
            {"contrasts": [draft()["contrasts"][0] | {"prediction": {"within": 1, "of": "train"}}]},
            "score b_table and b, seed 44, there first",
        ),
        ({"rules": [{"name": "r"}]}, "rule 'r' must have"),
        ({"rules": ["r"]}, "Every rule must be a mapping; got 'r'"),
        ({"rules": [part_rule("target_cell", ["*hidden"]) | {"sets": "dev"}]}, "sets must be a"),
        ({"rules": [part_rule("target_cell", ["*hidden"]) | {"seeds": 44}]}, "seeds must be a"),
        ({"rules": [part_rule("target_cell", "*hidden")]}, "groups must be a list of one str"),
    ],
)
def test_incomplete_drafts_are_refused(runs, own_set, changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        register(draft(**changes), runs, own_set)
    assert Ledger(own_set.path).events == []


@pytest.mark.parametrize(
    ("outcomes", "message"),
    [
        ([{"at_least": 1, "says": "a"}], "every outcome but the last must have at_least"),
        (
            [{"at_least": 1, "says": "a"}, {"at_least": 2, "says": "b"}, {"says": "c"}],
            "at_least must fall",
        ),
    ],
)
def test_rules_must_have_one_outcome_for_every_value(outcomes, message) -> None:
    gain = {"arm": "b_table", "baseline": "b"}
    rule = {"name": "r", "gain": gain, "sets": ["dev"], "seeds": [44], "outcomes": outcomes}
    with pytest.raises(ValueError, match=message):
        check_rules([rule])


def test_a_development_set_may_be_registered_too(runs, own_set) -> None:
    entry = draft()["contrasts"][0] | {"prediction": {"at_least": -9, "at_most": -8}}
    found = confirm(
        register(draft(set_name="dev", contrasts=[entry]), runs, own_set), runs, own_set
    )
    assert found.verdicts[0].prediction_missed
    assert np.isfinite(found.verdicts[0].seeds[0].gain)
    assert EvaluationFormat().name == found.registration.content["format"]
