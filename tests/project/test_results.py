"""Committed results: each page says what its records say, and what was registered was confirmed."""

import json
import shutil
from pathlib import Path

import pytest

from evaluation.contrasts import records_bits_per_byte
from evaluation.page import render_page
from evaluation.paper import paper_arm
from evaluation.records import read_records
from evaluation.registration import read_registration
from evaluation.report import build_report
from evaluation.study import Study, make_studies, read_sources

RESULTS = Path(__file__).parents[2] / "results"
FOLDERS = sorted(path.parent for path in RESULTS.glob("*/README.md.jinja"))
REGISTRATIONS = sorted(RESULTS.glob("*/*registration.json"))
BOOTSTRAP = {"num_resamples": 2000, "seed": 0}  # evaluation.report's


def name(path: Path) -> str:
    return str(path.relative_to(RESULTS))


def study_of(folder: Path) -> Study:
    (study,) = make_studies(read_sources(sorted((folder / "evidence").iterdir())), BOOTSTRAP)
    return study


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_the_page_is_what_its_records_say(folder: Path) -> None:
    text = render_page(study_of(folder), folder / "README.md.jinja")
    assert text == (folder / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_the_report_is_what_its_records_say(folder: Path, tmp_path: Path) -> None:
    evidence = shutil.copytree(folder / "evidence", tmp_path / "evidence")
    build_report(sorted(evidence.iterdir()), tmp_path / "report", show_violations=True)
    kept = folder / "report"
    written = (tmp_path / "report" / "report.md").read_text()
    assert written == (kept / "report.md").read_text()
    for figure in kept.glob("*.png"):
        assert (tmp_path / "report" / figure.name).is_file(), figure.name


@pytest.mark.parametrize("path", REGISTRATIONS, ids=name)
def test_what_was_registered_was_scored_and_judged(path: Path) -> None:
    content = read_registration(path).content
    beside = path.with_name(path.name.replace("registration", "confirmation"))
    judged = json.loads(beside.read_text())
    assert judged["registration"] == content["sha256"]
    study = study_of(path.parent)
    registered = [read_registration(p).sha256 for p in path.parent.glob("*registration.json")]
    for entry in content["checkpoints"]:
        if not entry["scored"]:
            continue
        records = study.records(paper_arm(entry["arm"]), entry["seed"], content["set_name"])
        assert records is not None, entry["arm"]
        header = records.header
        assert header.checkpoint_sha256 == entry["sha256"]
        assert header.targets_sha256 == content["targets_sha256"]
        assert header.registration in registered
    for entry, verdict in zip(content["contrasts"], judged["contrasts"], strict=True):
        for seed, found in verdict["seeds"].items():
            pair = (paper_arm(entry["arm"]), paper_arm(entry["baseline"]))
            contrast = study.contrast(*pair, int(seed), content["set_name"])
            assert contrast is not None
            assert found["gain"] == pytest.approx(contrast.gain, abs=1e-12)


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_results_are_small(folder: Path) -> None:
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= 15 * 2**20


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/again/*/records/*.parquet")), ids=name)
def test_a_run_made_again_gives_the_same(path: Path) -> None:
    again = path.parents[1]
    first = path.parents[3] / "evidence" / again.name
    records, before = read_records(path), read_records(first / "records" / path.name)
    assert records_bits_per_byte(records) == pytest.approx(records_bits_per_byte(before), abs=5e-6)
    both = [json.loads((run / "results.json").read_text()) for run in (again, first)]
    assert both[0]["started"] != both[1]["started"]
    assert both[0]["final_sha256"] == both[1]["final_sha256"]


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_arms_of_one_seed_and_chunk_set_saw_the_same_targets(folder: Path) -> None:
    runs = [json.loads(p.read_text()) for p in (folder / "evidence").glob("*/results.json")]
    seen: dict[tuple[str, int], set[str]] = {}
    for run in runs:
        seen.setdefault((run["data_sha256"], run["seed"]), set()).add(run["target_sha256"])
    assert runs
    assert all(len(hashes) == 1 for hashes in seen.values())
