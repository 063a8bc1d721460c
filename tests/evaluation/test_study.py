"""Tables 1 to 7, the text's numbers and the refusals, from synthetic records."""

from __future__ import annotations

import csv
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from evaluation.attention import BandMeans, Diagnosis
from evaluation.attention_diagnostic import main as diagnose_main
from evaluation.class_bpb.statistics import BAND_NAMES, BY_BAND, TABLE_CELL_NAMES
from evaluation.contrasts import contrast, records_bits_per_byte
from evaluation.identity import checkpoint_sha256
from evaluation.mixture import main as mixture_main
from evaluation.paper import paper_arm, paper_rows
from evaluation.records import ReachCounts, Records, filter_records, write_records
from evaluation.report import build_report, main
from evaluation.score import main as score_main
from evaluation.study import make_studies, read_sources
from tests.evaluation.test_records import make_records
from tests.evaluation.test_report import improved

BASE = make_records(arm="b", baseline=None, has_table=False, set_name="dev_val")


def arm(name: str, gain: float = 0.1, **changes) -> Records:
    fields = {"arm": name, "baseline": "b", "has_table": True, "set_name": "dev_val"}
    return improved(BASE, gain, **{**fields, **changes})


def write_run(folder: Path, *records: Records, model=None, data=None, results=None, **more) -> Path:
    header = records[0].header
    folder.mkdir(parents=True)
    recipe = {"name": header.arm, "seed": header.seed, "baseline": header.baseline}
    recipe |= {"model": model or {}, "data": data or {}}
    (folder / "config.yaml").write_text(yaml.safe_dump(recipe))
    facts = {"flops_per_token": 1e6, "parameters": 2e6, "step0_loss": 9.01, "target_sha256": "ab"}
    (folder / "results.json").write_text(json.dumps(facts | (results or {})))
    lines = [
        {"update": i, "loss": 5 - i / 9, "bpb": 3 - i / 9, "update_seconds": 0.5} for i in range(20)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for one in records:
        write_records(one, folder / "records" / f"{one.header.file_stem}.parquet")
    return folder


def read_table(out: Path, name: str) -> dict[str, dict[str, str]]:
    """A CSV by its first column and, if there is one, the seed."""
    with (out / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    first = next(iter(rows[0]))
    return {row[first] + (f" {row['seed']}" if "seed" in row else ""): row for row in rows}


def test_tables_1_to_5_beside_the_paper(tmp_path: Path) -> None:
    found = arm("b_table")
    runs = [write_run(tmp_path / "b", BASE), write_run(tmp_path / "b_table", found)]
    runs.append(write_run(tmp_path / "own", arm("own")))
    report = build_report(runs, tmp_path / "out", num_resamples=50)
    pair = contrast(found, BASE, 50)
    one = read_table(tmp_path / "out", "table_1")
    bpb = records_bits_per_byte(found)
    assert one["B + table 44"]["Dev-val"] == f"{bpb:.5f} / 1.03129 / {bpb - 1.03129:+.5f}"
    assert one["B + table 44"]["records"] == found.sha256[:8]
    assert one["B + table 45"]["Dev-val"] == "— / 1.03434 / —"
    assert one["D (8K, 12L) 44"]["Confirmation"] == "— / 1.03753 / —"
    assert one["own 44"]["Dev-val"].endswith("/ — / —")
    assert len(one) == 22 + 1  # of the paper, and our own
    two = read_table(tmp_path / "out", "table_2")
    difference = f"{pair.gain - 0.0355:+.4f}"
    assert two["B -> b_table 44"]["Dev-val"] == f"{pair.gain:+.4f} / +0.0355 / {difference}"
    low, high = pair.comparison.gain_interval
    # The paper's intervals are of its confirmation set.
    assert f"[{low:+.4f}, {high:+.4f}] / —" in two["B -> b_table 44"].values()
    same = [improved(one, 0.0, set_name="confirmation") for one in (BASE, found)]
    runs = [write_run(tmp_path / f"confirmed{i}", one) for i, one in enumerate(same)]
    build_report(runs, tmp_path / "confirmed", num_resamples=50)
    row = read_table(tmp_path / "confirmed", "table_2")["B -> b_table 44"]
    low, high = contrast(same[1], same[0], 50).comparison.gain_interval
    assert f"[{low:+.4f}, {high:+.4f}] / [+0.0299, +0.0341]" in row.values()
    three = read_table(tmp_path / "out", "table_3")
    assert three["D 44"]["train s"] == "— / 2865 / —"
    for number, partition, label in ((4, "band", "order 0"), (5, "table_state", "order 0, wrong")):
        split = pair.gain_by(partition)
        assert split is not None
        table = read_table(tmp_path / "out", f"table_{number}")
        ours = split["order_0" if number == 4 else "order_0.wrong"]
        assert table[label]["b_table s44"].startswith(f"{ours:+.4f} / ")
        assert table[label]["lg512_table s44"].startswith("— / +0.00")
        assert table[label]["own s44"].endswith(" / — / —")
        assert table["records"]["b_table s44"] == f"{found.sha256[:8]} {BASE.sha256[:8]}"
    text = (tmp_path / "out" / "report.md").read_text()
    for number in range(1, 8):
        assert f"**Table {number}. " in text
        assert (tmp_path / "out" / f"table_{number}.tex").read_text().count("&") > 10
    for name in ("figure_1", "figure_2", "learning_curves"):
        assert f"]({name}.png)" in text
        assert (tmp_path / "out" / f"{name}.svg").read_text().startswith("<?xml")
    assert "contrasts vary by about 0.002" in text
    assert report.groups[0].summary in text


def test_tables_6_and_7(tmp_path: Path) -> None:
    packed = {"set_name": "val", "format": "packed", "data_sha256": "p" * 64, "row_length": 64}
    base = improved(BASE, 0.0, arm="packed", **packed)
    table = arm("packed_table", 0.2, **(packed | {"baseline": "packed"}))
    narrow = improved(BASE, 0.0, arm="lg512_w384")
    wide = arm("lg512_w384_table", 0.05, baseline="lg512_w384")
    runs = [write_run(tmp_path / r.header.arm, r) for r in (base, table, narrow, wide)]
    build_report(runs, tmp_path / "out", num_resamples=20)
    six = read_table(tmp_path / "out", "table_6")
    split = contrast(table, base, 20).gain_by("match")
    assert split is not None
    assert six["match ≥ 2 right"]["gain, val"].startswith(
        f"{split['match_2_right']:+.4f} / +0.0012"
    )
    assert six["match ≥ 2 right"]["gain, held-out"] == "— / +0.0013 / —"
    nats = base.sums.nats.sum(0)
    columns = [i for i in range(126) if i % 9 == 0]
    mean = nats[columns].sum() / base.sums.num_targets.sum(0)[columns].sum()
    assert six["no match"]["base nats"].startswith(f"{mean:.3f} / 2.764 / ")
    seven = read_table(tmp_path / "out", "table_7")
    gain = contrast(wide, narrow, 20).gain
    assert seven["384"]["gain, Dev-val"].startswith(f"{gain:+.4f} / +0.0132")
    assert seven["768"]["gain, Confirmation"] == "— / +0.0098 / —"
    one = read_table(tmp_path / "out", "table_1")
    assert one["packed_table 44"]["ClimbMix val"].startswith(f"{records_bits_per_byte(table):.5f}")


def with_violations(records: Records, count: int) -> Records:
    documents = len(records.header.document_ids)
    violations = np.zeros(documents, np.int64)
    violations[0] = count
    positions = np.full(documents, 1000)
    return replace(
        records, reach=ReachCounts(positions, violations, violations * 2.5, positions // 10)
    )


def test_violations_fail_with_an_explanation(tmp_path: Path, capsys) -> None:
    form = {"format": "stride8-chunk"}
    base = with_violations(improved(BASE, 0.0, **form), 7)
    mistaken = with_violations(arm("b_table", **form), 7)
    runs = [write_run(tmp_path / "b", base), write_run(tmp_path / "b_table", mistaken)]
    command = [*map(str, runs), "--out", str(tmp_path / "out"), "--num_resamples", "10"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "b_table s44 in the stride8-chunk format: at 7 of 4,000 positions" in error
    assert "b s44" not in error  # it has no table to be misled by
    assert main([*command, "--show-violations", "--quiet"]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert "reach violations, not results" in text
    row = read_table(tmp_path / "out", "text.reach")["b_table over b s44"]
    assert row["violations"] == "7 (0.18%)"
    hidden = np.array([name.startswith("copy_") and name.endswith("visible.no_match")
                       for name in _class_names()])  # fmt: skip
    count = int(mistaken.sums.num_targets.sum(0)[hidden].sum())
    assert row["visible copies without a match"] == f"{count} / 15357 / {count - 15357:+}"
    gain = contrast(mistaken, base, 10).gain
    assert row["gain"] == f"{gain:+.4f} / +0.0203 / {gain - 0.0203:+.4f}"
    cells = read_table(tmp_path / "out", "text.reach.cells")
    assert list(cells) == ["b s44, stride8-chunk", "b_table s44, stride8-chunk"]
    fine = tmp_path / "fine"
    write_run(fine, with_violations(arm("b_table"), 0))
    assert main([str(fine), "--out", str(tmp_path / "o"), "--num_resamples", "5", "--quiet"]) == 0


def _class_names() -> tuple[str, ...]:
    from evaluation.class_bpb.statistics import CLASS_NAMES

    return CLASS_NAMES


def test_records_older_than_the_checkpoint_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "b", BASE)
    (run / "final").mkdir()
    (run / "final" / "config.json").write_text("{}")
    save_file({"w": torch.zeros(1)}, run / "final" / "model.safetensors")
    with pytest.raises(ValueError, match="is older than the checkpoint"):
        build_report([run], tmp_path / "out")
    fresh = replace(BASE.header, checkpoint_sha256=checkpoint_sha256(run / "final"))
    write_records(replace(BASE, header=fresh), run / "records" / "dev_val.training.parquet")
    build_report([run], tmp_path / "out", num_resamples=5)


def test_sections_find_their_arms(tmp_path: Path) -> None:
    lg = {"window_pattern": "S", "document_table": False}
    runs = [
        write_run(tmp_path / "b", BASE, improved(BASE, 0.0, format="stride8-chunk"), model=lg),
        write_run(
            tmp_path / "b_table",
            with_violations(arm("b_table"), 0),
            arm("b_table", 0.02, format="stride8-chunk"),
            arm("b_table", -0.5, ablated=True),
            model=lg | {"document_table": True},
        ),
        write_run(tmp_path / "drop", arm("b_table_half", 0.06), data={"table_dropout": 0.5}),
        write_run(tmp_path / "heads", arm("heads", 0.03), model={"query_scaling": "head_gain"}),
        write_run(
            tmp_path / "wide",
            improved(BASE, 0.3, arm="w"),
            model=lg | {"hidden_size": 768},
            results={"flops_per_token": 1.04e6},
        ),
        write_run(
            tmp_path / "wide_table",
            arm("w_table", 0.35, baseline="w"),
            model=lg | {"hidden_size": 768, "document_table": True},
        ),
        write_run(
            tmp_path / "wide_foreign",
            arm("w_table_foreign", 0.2, baseline="w"),
            model=lg | {"hidden_size": 768, "document_table": True},
            data={"table_source": "foreign"},
        ),
        write_run(tmp_path / "bi", improved(BASE, 0.1, arm="bi"), model=lg | {"bigram_rows": 8}),
        write_run(
            tmp_path / "bi_table",
            arm("bi_table", 0.2, baseline="bi"),
            model=lg | {"bigram_rows": 8, "document_table": True},
        ),
    ]
    diagnosis(arm("heads"), 0.2, query_gains=[[1.0, 1.0], [1.25, 7.3]]).write(runs[3])
    out = tmp_path / "out"
    build_report(runs, out, num_resamples=20, exclude={"one", "elsewhere"}, show_violations=True)
    text = (out / "report.md").read_text()
    ablated = contrast(arm("b_table", -0.5, ablated=True), BASE, 20)
    assert f"{-ablated.gain:.3f} worse than the base" in text
    profile = read_table(out, "text.ablation.b_table.s44.dev_val.training.nats")
    assert list(profile["order 0"])[1:] == ["b s44", "b_table s44", "b_table (ablated) s44"]
    assert "b_table_half over b s44" in read_table(out, "text.dropout.gain")
    with (out / "text.learned_gains.csv").open() as file:
        layers = [(row["layer"], row["gain of each head"]) for row in csv.DictReader(file)]
    assert layers == [("0", "1.00 1.00"), ("1", "1.25 7.30")]
    assert "heads over b s44" in read_table(out, "text.temperature.gain")
    formats = (out / "text.formats.gain.csv").read_text()
    assert "stride8-chunk" in formats
    assert text.index("## dev_val, training format") < text.index("## dev_val, stride8-chunk")
    assert "b_table s44 < b s44" in (out / "text.formats.ranking.csv").read_text()
    versus = read_table(out, "text.width.versus")["w over b_table s44"]
    wider = contrast(improved(BASE, 0.3, arm="w"), arm("b_table"), 20).gain
    assert versus["gain: ours / paper / difference"] == f"{wider:+.4f} / — / —"
    profiled = next(iter(read_table(out, "text.width.classes").values()))
    assert [name.split()[0] for name in list(profiled)[1:]] == ["b_table", "w_table"]
    matched = read_table(out, "text.matched_flops")
    assert matched["w over b_table s44"]["FLOPs ratio"] == "1.040"
    assert read_table(out, "text.step0_loss")["b 44"]["step-0 loss"] == "9.0100"
    assert read_table(out, "text.step_times")["b 44"]["median s an update"] == "0.500"
    left = read_table(out, "text.overlaps")["b_table over b s44"]
    kept = contrast(*(filter_records(one, drop=["one"]) for one in (arm("b_table"), BASE)), 20).gain
    assert left["without them"] == f"{kept:+.4f}"
    visible = read_table(out, "text.visibility")["b_table over b s44"]
    split = contrast(arm("b_table"), BASE, 20).gain_by("target_cell")
    assert split is not None
    hidden = math.fsum(gain for name, gain in split.items() if name.endswith("hidden"))
    assert visible["hidden copies"].startswith(f"{hidden:+.4f} / +0.0277")
    assert "Missing" not in text.split("### Attention to")[0].split("### Copies")[1]
    assert "Missing" not in text.split("### Both reach")[0].split("### Table dropout")[1]


def test_layouts_of_other_rows_under_strides_and_at_other_costs(tmp_path: Path) -> None:
    table, wide = arm("b_table"), arm("lg512", 0.2, row_length=32, has_table=False)
    strided = [
        replace(one, header=replace(one.header, format=form))
        for one, form in ((table, "stride8-chunk"), (wide, "stride16-chunk"))
    ]
    costly = arm("lg1024", 0.3, row_length=32, has_table=False)
    runs = [
        write_run(tmp_path / "b", BASE, results={"flops_per_token": 2e6}),
        write_run(tmp_path / "b_table", table, strided[0]),
        write_run(tmp_path / "lg512", wide, strided[1]),
        write_run(tmp_path / "lg1024", costly, results={"flops_per_token": 1.12e6}),
        write_run(tmp_path / "d", arm("d", 0.4), results={"flops_per_token": 2e6}),
    ]
    build_report(runs, tmp_path / "out", num_resamples=20, show_violations=True)
    with (tmp_path / "out" / "text.formats.layouts.csv").open() as file:
        rows = list(csv.DictReader(file))
    gain = records_bits_per_byte(table) - records_bits_per_byte(wide)
    assert {row["format"]: row["gain: ours / paper / difference"] for row in rows} == {
        "training": f"{gain:+.4f} / +0.0057 / {gain - 0.00574:+.4f}",
        "stride, chunk reach": f"{gain:+.4f} / +0.0029 / {gain - 0.0029:+.4f}",
    }
    matched = read_table(tmp_path / "out", "text.matched_flops")
    assert list(matched) == ["lg512 over b_table s44", "lg1024 over b_table s44"]
    assert matched["lg1024 over b_table s44"]["FLOPs ratio"] == "1.120"
    cells = read_table(tmp_path / "out", "text.cells")["b_table s44"]
    of_order_0 = slice(len(TABLE_CELL_NAMES))
    nats, counts = (a[:, of_order_0].sum() for a in (table.sums.nats, table.sums.num_targets))
    assert cells["order 0"] == f"{nats / counts:.3f}"


def diagnosis(
    records: Records, weight: float, ablated: float | None = None, **changes
) -> Diagnosis:
    """Of the records' checkpoint; each band has one target more than the one before, from none."""

    def means(value: float) -> BandMeans:
        counts = {name: i for i, name in enumerate(BAND_NAMES)}
        values = {name: value if i else math.nan for name, i in counts.items()}
        return BandMeans(values, {name: 10 * v for name, v in values.items()}, counts)

    h = records.header
    facts = {"num_documents": 40, "chunk_length": h.chunk_length, "query_gains": []} | changes
    hashes = {"checkpoint_sha256": h.checkpoint_sha256, "data_sha256": h.data_sha256}
    last = None if ablated is None else means(ablated)
    return Diagnosis(h.arm, h.seed, h.set_name, whole=means(weight), ablated=last, **hashes | facts)


def test_attention_beside_the_paper(tmp_path: Path) -> None:
    base = improved(BASE, 0.0, arm="a")
    table = arm("a_table", baseline="a")
    scaled = arm("a_log_length", baseline="a", has_table=False)
    runs = [write_run(tmp_path / one.header.arm, one) for one in (base, table, scaled)]
    diagnosis(base, 0.25).write(runs[0])
    diagnosis(table, 0.125, 0.0625).write(runs[1])
    out = tmp_path / "out"
    build_report(runs, out, num_resamples=5)
    text = (out / "report.md").read_text()
    assert "Missing: a_log_length s44 (python -m evaluation.attention_diagnostic)" in text
    rows = read_table(out, "text.attention.dev_val")
    columns = [f"{name}: ours / paper / difference" for name in ("largest weight", "nats")]
    cells = {arm: [row[column] for column in columns] for arm, row in rows.items()}
    assert cells == {
        "a s44": ["0.250 / 0.140 / +0.110", "2.500 / 1.047 / +1.453"],
        "a_table s44": ["0.125 / 0.069 / +0.056", "1.250 / 1.008 / +0.242"],
        "a_table (ablated) s44": ["0.062 / 0.002 / +0.060", "0.625 / 2.354 / -1.729"],
        "a_log_length s44": ["— / 0.310 / —", "— / — / —"],
    }
    assert rows["a s44"]["copies"] == "4"
    assert rows["a s44"]["weights"] == base.header.checkpoint_sha256[:8]
    bands = read_table(out, "text.attention.dev_val.bands")
    assert list(bands["a s44"].values())[1:3] == ["—", "0.250 (2.500; 1)"]
    assert "a_log_length s44" not in bands


def test_attention_of_another_checkpoint_or_data(tmp_path: Path) -> None:
    run = write_run(tmp_path / "b", BASE)
    path = diagnosis(BASE, 0.25, data_sha256="f" * 64).write(run)
    build_report([run], tmp_path / "out", num_resamples=5)
    text = (tmp_path / "out" / "report.md").read_text()
    assert "Missing: b s44 (python -m evaluation.attention_diagnostic)" in text
    diagnosis(BASE, 0.25, checkpoint_sha256="0" * 64).write(run)
    with pytest.raises(ValueError, match=r"dev_val\.json is of another checkpoint than the run's"):
        build_report([run], tmp_path / "out")
    path.write_text("{}")
    with pytest.raises(ValueError, match="must be written by python -m evaluation.attention"):
        build_report([run], tmp_path / "out")


def test_the_report_needs_no_weights_and_no_scores(make_run, own_set, tmp_path: Path) -> None:
    set_path = str(own_set.path)
    whole = [
        make_run("b", document_table=False),
        make_run("b_table", baseline="b"),
        make_run("b_head_gain", baseline="b", document_table=False, query_scaling="head_gain"),
    ]
    names = list(map(str, whole))
    score = ["--chunk_set", set_path, "--sets", "dev"]
    assert score_main([*names, *score]) == 0
    assert score_main([names[1], *score, "--ablate_table"]) == 0
    for reach in ("chunk", "window"):
        assert score_main([*names, *score, "--format", "stride", "--reach", reach]) == 0
    assert mixture_main([names[0], "--chunk_set", set_path, "--fit_set", "dev", *score[2:]]) == 0
    assert diagnose_main([*names, "--chunk_set", set_path, "--set", "dev"]) == 0
    manifest = json.loads((own_set.path / "manifest.json").read_text())
    overlap = {"document": own_set.document_list("dev")["ids"][0], "split": "train", "equals": "x"}
    manifest["splits"]["dev"]["overlaps"] = [overlap]
    (own_set.path / "manifest.json").write_text(json.dumps(manifest))
    bare = tmp_path / "bare"
    (bare / "set").mkdir(parents=True)
    shutil.copy(own_set.path / "manifest.json", bare / "set")
    for run in whole:
        lines = [json.dumps({"update": i, "loss": 5.0, "update_seconds": 0.5}) for i in range(13)]
        (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        shutil.copytree(run, bare / run.name, ignore=shutil.ignore_patterns("final", "scores"))
    found = []
    for folder in (tmp_path, bare):
        runs, out = [str(folder / run.name) for run in whole], folder / "report"
        options = ["--num_resamples", "5", "--show_violations", "--quiet", "--out", str(out)]
        overlaps = own_set.path if folder == tmp_path else bare / "set"
        assert main([*runs, *options, "--chunk_set", str(overlaps)]) == 0
        found.append({f.name: f.read_bytes() for f in out.iterdir() if f.suffix in (".csv", ".md")})
    assert not list(bare.rglob("*.safetensors")) + list(bare.rglob("*.npz"))
    assert found[0] == found[1]
    assert {"text.learned_gains.csv", "text.attention.dev.csv", "text.mixture.csv"} <= {*found[1]}
    assert {"text.reach.csv", "text.overlaps.csv", "text.step_times.csv"} <= {*found[1]}
    assert b"Missing: python -m evaluation" not in found[1]["report.md"]


def test_missing_parts_are_named(tmp_path: Path) -> None:
    path = tmp_path / "alone.parquet"
    write_records(BASE, path)
    build_report([path], tmp_path / "out", num_resamples=5)
    text = (tmp_path / "out" / "report.md").read_text()
    assert "Missing: scores with --ablate_table." in text
    assert "Missing: metrics.jsonl of the runs." in text
    assert "Figure 2. Gain over B by target class: missing." in text


def test_two_chunk_sets_are_two_studies(tmp_path: Path) -> None:
    files = []
    for i, one in enumerate((BASE, improved(BASE, 0.0, data_sha256="f" * 64))):
        files.append(tmp_path / f"{i}.parquet")
        write_records(one, files[-1])
    studies = make_studies(read_sources(files), {"num_resamples": 5, "seed": 0})
    assert [study.data_sha256 for study in studies] == ["d" * 64, "f" * 64]
    build_report(files, tmp_path / "out", num_resamples=5)
    assert (tmp_path / "out" / "ffffffff" / "table_1.csv").is_file()


def test_exclusions_from_a_chunk_set(tmp_path: Path, own_set) -> None:
    files = []
    for one in (BASE, arm("b_table")):
        files.append(tmp_path / f"{one.header.arm}.parquet")
        write_records(one, files[-1])
    command = [*map(str, files), "--out", str(tmp_path / "out"), "--num_resamples", "5", "--quiet"]
    command += ["--chunk-set", str(own_set.path)]
    assert main(command) == 0
    assert "No document was listed" in (tmp_path / "out" / "report.md").read_text()
    manifest = json.loads((own_set.path / "manifest.json").read_text())
    manifest["splits"]["dev"]["overlaps"] = [{"document": "three", "split": "train", "equals": "x"}]
    (own_set.path / "manifest.json").write_text(json.dumps(manifest))
    assert main(command) == 0
    assert read_table(tmp_path / "out", "text.overlaps")["b_table over b s44"]["left out"] == "1"


def test_exclusions_from_a_file(tmp_path: Path, capsys) -> None:
    files = []
    for one in (BASE, arm("b_table")):
        files.append(tmp_path / f"{one.header.arm}.parquet")
        write_records(one, files[-1])
    (tmp_path / "list.txt").write_text("# overlaps\none\n")
    command = [*map(str, files), "--out", str(tmp_path / "out"), "--num_resamples", "5", "--quiet"]
    assert main([*command, "--exclude", str(tmp_path / "list.txt")]) == 0
    assert (tmp_path / "out" / "text.overlaps.csv").is_file()
    (tmp_path / "list.txt").write_text("# nothing\n")
    assert main([*command, "--exclude", str(tmp_path / "list.txt")]) == 2
    assert "must list at least one document" in capsys.readouterr().err


def test_small_arms_stand_in_the_rows_of_the_paper_s(tmp_path: Path) -> None:
    base = improved(BASE, 0.0, arm="lg")
    table = arm("lg_table", 0.05, baseline="lg")
    narrow = improved(BASE, 0.0, arm="lg_w96")
    runs = [
        write_run(tmp_path / "lg", base),
        write_run(tmp_path / "lg_table", table),
        write_run(tmp_path / "lg_w96", narrow, model={"hidden_size": 96}),
    ]
    build_report(runs, tmp_path / "out", num_resamples=50)
    one = read_table(tmp_path / "out", "table_1")
    bpb = records_bits_per_byte(table)
    row = one["LG512 + table, ours lg_table 44"]
    assert row["Dev-val"] == f"{bpb:.5f} / 1.01326 / {bpb - 1.01326:+.5f}"
    two = read_table(tmp_path / "out", "table_2")
    (key,) = [name for name in two if name.endswith("ours lg_table 44")]
    gain = contrast(table, base, 50).gain
    assert two[key]["Dev-val"].startswith(f"{gain:+.4f} / +0.0123 / ")
    assert "384, ours 96" in read_table(tmp_path / "out", "table_7")


def test_arms_of_the_paper_keep_their_names() -> None:
    names = {row["arm"] for number in (1, 2, 3, 7) for row in paper_rows(number)}
    assert {"l5_8k", "lg512_w384_table"} <= names
    assert {name: paper_arm(name) for name in names} == {name: name for name in names}
    assert paper_arm("l5") == "l5_8k"
    assert paper_arm("lg_w96_table") == "lg512_w384_table"
    assert paper_arm("lg_mixture") == "lg512_mixture"


def test_packed_records_of_two_studies_are_kept_apart(tmp_path: Path) -> None:
    runs = []
    for i, data in enumerate("de"):
        long = improved(BASE, 0.0, data_sha256=data * 64)
        short = {"set_name": "val", "format": "packed", "data_sha256": str(i) * 64}
        runs.append(write_run(tmp_path / data, long, improved(BASE, 0.0, **short)))
    with pytest.raises(ValueError, match="b, seed 44, was scored on val of two chunk sets"):
        build_report(runs, tmp_path / "out", num_resamples=20)


def test_fields_of_another_document_stand_beside_the_document_s(tmp_path: Path) -> None:
    table = {"model": {"document_table": True}}
    runs = [
        write_run(tmp_path / "b", BASE),
        write_run(tmp_path / "b_table", arm("b_table"), **table),
        write_run(tmp_path / "b_bigram", arm("b_bigram"), model={"document_table": False}),
        write_run(tmp_path / "b_drop", arm("b_drop"), data={"table_dropout": 0.5}, **table),
        write_run(
            tmp_path / "b_table_foreign",
            arm("b_table_foreign", 0.02),
            data={"table_source": "foreign"},
            **table,
        ),
    ]
    build_report(runs, tmp_path / "out", num_resamples=50)
    rows = read_table(tmp_path / "out", "text.other_fields")
    assert list(rows) == ["b_table over b s44", "b_table_foreign over b s44"]
    split = contrast(arm("b_table_foreign", 0.02), BASE, 50).gain_by("band")
    assert split is not None
    assert rows["b_table_foreign over b s44"]["order 0"] == f"{split['order_0']:+.4f}"
    without = build_report(runs[:-1], tmp_path / "less", num_resamples=50)
    assert "Missing: arms with table_source" in (tmp_path / "less" / "report.md").read_text()
    assert not [file for file in without.files if "other_fields" in file.name]


def test_two_arms_for_one_of_the_paper_s_are_refused(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "lg", improved(BASE, 0.0, arm="lg")),
        write_run(tmp_path / "lg512", improved(BASE, 0.1, arm="lg512")),
    ]
    with pytest.raises(ValueError, match="lg and lg512 both do"):
        build_report(runs, tmp_path / "out", num_resamples=50)


def test_a_page_s_numbers_come_from_records(tmp_path: Path) -> None:
    base, table = improved(BASE, 0.0, arm="lg"), arm("lg_table", 0.05, baseline="lg")
    counts = np.array([500, 0, 1000, 500])
    table = replace(table, reach=ReachCounts(counts * 2, counts, counts / 1.0, counts))
    runs = [write_run(tmp_path / "lg", base), write_run(tmp_path / "lg_table", table)]
    template = tmp_path / "README.md.jinja"
    template.write_text(
        '{% set p = pair("lg_table", "lg", 44, "dev_val") %}'
        '{{ bpb("lg_table", 44, "dev_val") }} {{ p.gain }} {{ p.interval }} {{ p.improved }} '
        '{{ p.part("band", "*") }} {{ p.share("band", "order_*", "copy_*") }} '
        '{{ result("lg", 44, "parameters", ",.0f") }} {{ p.records }} '
        '{{ read("confirmation.json").gain | signed }} '
        '{{ training_bpb("lg", 44, 2, 7) | signed }} {{ p.violations }}\n'
    )
    (tmp_path / "confirmation.json").write_text('{"gain": 0.25}')
    build_report(runs, tmp_path / "out", 50, show_violations=True, page=template)
    pair = contrast(table, base, 50)
    low, high = pair.comparison.gain_interval
    assert (tmp_path / "README.md").read_text() == (
        f"{records_bits_per_byte(table):.4f} {pair.gain:+.4f} [{low:+.4f}, {high:+.4f}] "
        f"{pair.comparison.documents_improved:.0%} {pair.gain:+.4f} 100% 2,000,000 "
        f"{table.sha256[:8]} {base.sha256[:8]} +0.2500 +2.5000 2,000\n"
    )


def test_a_page_may_stand_beside_another_study(tmp_path: Path) -> None:
    mine = [arm("lg", 0.0), arm("lg_table", 0.05, baseline="lg")]
    theirs = [improved(records, 0.01) for records in mine]
    runs = [write_run(tmp_path / "mine" / r.header.arm, r) for r in mine]
    for records in theirs:
        write_run(tmp_path / "theirs" / "evidence" / records.header.arm, records)
    template = tmp_path / "mine" / "README.md.jinja"
    template.write_text(
        '{% set other = beside("../theirs") %}{{ bpb("lg", 44, "dev_val") }} '
        '{{ other.bpb("lg", 44, "dev_val") }} '
        '{{ other.pair("lg_table", "lg", 44, "dev_val").targets("band", "order_*") }} '
        '{{ other.nats("lg", 44, "dev_val", "band", "order_*") }}'
    )
    build_report(runs, tmp_path / "out", 50, page=template)
    counts = BY_BAND.collapse(mine[0].sums.num_targets.sum(axis=0))
    share = sum(counts[list(BY_BAND.names).index(name)] for name in ("order_0", "order_1"))
    nats = BY_BAND.collapse(theirs[0].sums.nats.sum(axis=0))[:2].sum() / share
    share = share / counts.sum()
    assert 0 < share < 1
    assert template.with_suffix("").read_text() == (
        f"{records_bits_per_byte(mine[0]):.4f} {records_bits_per_byte(theirs[0]):.4f} {share:.1%} "
        f"{nats:.2f}"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{{ bpb("lg", 44, "confirmation") }}',
            "needs records of lg, seed 44, on confirmation",
        ),
        ('{{ result("lg", 44, "moons") }}', "needs moons in the results.json of lg, seed 44"),
        ('{{ training_bpb("lg", 44, 15, 24) }}', "of lg, seed 44; it has 5 of them"),
        ('{{ pair("lg", "lg_table", 44, "dev_val").violations }}', "lg has no table"),
        ('{{ read("moon.json") }}', "needs the file moon.json beside its template"),
        ('{{ nats("lg", 44, "dev_val", "band", "moon") }}', "band has no group moon"),
        (
            '{{ nats("lg", 44, "dev_val", "band", "order_0", form="packed") }}',
            "needs records of lg, seed 44, on dev_val, packed format",
        ),
        ('{{ beside("moon") }}', "needs run folders in moon/evidence"),
        ("{{ gains }}", "'gains' is undefined"),
        (
            '{{ pair("lg_table", "lg", 44, "dev_val").part("band", "moon") }}',
            "band has no group moon",
        ),
        ("{{ bpb( }}", "unexpected"),
    ],
)
def test_a_page_without_records_is_refused(tmp_path: Path, text: str, message: str) -> None:
    base, table = improved(BASE, 0.0, arm="lg"), arm("lg_table", 0.05, baseline="lg")
    runs = [write_run(tmp_path / "lg", base), write_run(tmp_path / "lg_table", table)]
    template = tmp_path / "README.md.jinja"
    template.write_text(text)
    with pytest.raises(ValueError, match=message):
        build_report(runs, tmp_path / "out", num_resamples=50, page=template)
    assert not (tmp_path / "README.md").exists()
