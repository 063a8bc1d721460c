"""Models side by side: from disk and from the Hub the same page, and evaluation's numbers."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hub_cards.compare import compare, load, main
from hub_cards.push import main as push
from hub_cards.rendering import tables
from tests.hub_server import Fault


def test_the_numbers_are_those_of_the_report(scored_runs):
    models = [model for run in scored_runs for model in load(str(run))]
    found = list(tables(compare(models, num_resamples=200)))
    row = found[1][1]
    values = json.loads((scored_runs[1] / "gains.json").read_text())["sets"]["dev_val.training"]
    low, high = values["gain_interval"]
    assert row["bits per byte"] == f"{values['bits_per_byte']:.5f}"
    assert row["gain"] == f"{values['gain']:+.4f}"
    assert row["95% interval"] == f"[{low:+.4f}, {high:+.4f}]"
    assert row["documents improved"] == f"{values['documents_improved']:.1%}"
    cells = found[2]
    column = models[1].label
    total = sum(float(cell[column]) for cell in cells)
    # Each of at most 14 printed numbers is rounded to four decimals.
    assert total == pytest.approx(values["bits_per_byte"], abs=14 * 0.5e-4)
    results = json.loads((scored_runs[1] / "results.json").read_text())
    assert found[0][1]["parameters"] == f"{results['parameters']:,}"


def test_the_hub_and_the_disk_give_the_same_page(hub, scored_runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    names = ["me/b", "me/b_table"]
    for run, name in zip(scored_runs, names, strict=True):
        assert push([str(run), "--repo_id", name]) == 0
    hub.requests.clear()
    capsys.readouterr()
    assert main(names) == 0
    from_hub = capsys.readouterr().out
    assert main([str(run) for run in scored_runs]) == 0
    from_disk = capsys.readouterr().out
    for run, name in zip(reversed(scored_runs), reversed(names), strict=True):
        from_disk = from_disk.replace(str(run), name)
    assert from_hub == from_disk
    assert not any("safetensors" in request for request in hub.requests)


def test_a_study_folder_becomes_a_page(scored_runs, tmp_path, capsys):
    out = tmp_path / "pages" / "results.md"
    assert main([str(scored_runs[0].parent), "--out", str(out), "--num-resamples", "50"]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    assert [row["model"] for row in next(tables(out.read_text()))] == ["b", "b_table"]


def test_a_study_s_evidence_is_not_listed_twice(scored_runs, tmp_path):
    for run in scored_runs:
        shutil.copytree(run, tmp_path / "study" / "runs" / run.name)
        shutil.copytree(run, tmp_path / "study" / "evidence" / run.name)
    assert [model.label for model in load(str(tmp_path / "study"))] == ["b", "b_table"]
    shutil.rmtree(tmp_path / "study" / "runs")
    assert [model.label for model in load(str(tmp_path / "study"))] == ["b", "b_table"]


def _with_header(run, **changes):
    path = next((run / "records").glob("*.parquet"))
    table = pq.read_table(path)
    metadata = dict(table.schema.metadata)
    header = json.loads(metadata[b"doctab_records"]) | changes
    metadata[b"doctab_records"] = json.dumps(header).encode()
    pq.write_table(table.replace_schema_metadata(metadata), path)


def test_other_targets_get_no_difference(runs):
    _with_header(runs[1], targets_sha256="0" * 64)
    page = compare([model for run in runs for model in load(str(run))], num_resamples=20)
    found = list(tables(page))
    assert found[1][1]["gain"] == "other targets"
    assert list(found[2][0]) == ["target cell", "share of targets", str(runs[0])]


def test_models_of_other_rows_are_compared_by_distance_band(runs):
    _with_header(runs[1], row_length=64)
    page = compare([model for run in runs for model in load(str(run))], num_resamples=20)
    names = [row["target cell"] for row in list(tables(page))[2]]
    assert "copy up to 4 tokens back" in names
    assert len(set(names)) == len(names)
    assert not any("visible" in name or "hidden" in name for name in names)


def test_refusals(hub, runs, tmp_path, capsys, waits, monkeypatch):
    (tmp_path / "empty").mkdir()
    shutil.rmtree(runs[1] / "records")
    other = shutil.copytree(runs[0], tmp_path / "other")
    pq.write_table(pa.table({"a": [1]}), next((other / "records").iterdir()))
    hub.add_repo("me/slow", {}, "model")
    hub.faults.append(Fault("me/slow", status=403, times=None))
    for arguments, said in [
        ([str(tmp_path / "empty")], "must be a run or hold scored runs"),
        ([str(runs[1])], "has none. Run python -m evaluation.score"),
        ([str(other)], "no records header"),
        (["a/b/c"], "it is neither"),
        (["nothing"], "it is neither"),
        (["me/missing"], "must exist"),
        (["me/slow"], "must be allowed"),
        ([str(runs[0]), "--num_resamples", "0"], "at least 1"),
    ]:
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert said in error, error
        assert error.count("\n") == 1
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert main(["me/elsewhere"]) == 2
    assert "http://127.0.0.1:9 must be reachable" in (error := capsys.readouterr().err)
    assert "Check the network, or compare folders." in error
