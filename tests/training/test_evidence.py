"""What a study's evidence keeps of a run, and what stays behind."""

import json
from pathlib import Path

import yaml

from evaluation.records import read_records, write_records
from tests.evaluation.test_records import make_records
from training.evidence import copy_evidence


def test_evidence_holds_the_records_and_no_weights_or_paths(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "b_s44"
    records = make_records()
    write_records(records, run / "records" / "dev.training.parquet")
    recipe = {"name": "b", "output_dir": str(tmp_path), "data": {"chunk_set": str(tmp_path)}}
    (run / "config.yaml").write_text(yaml.safe_dump(recipe))
    (run / "results.json").write_text(json.dumps({"name": "b"}))
    (run / "metrics.jsonl").write_text(json.dumps({"update": 0, "bpb": 2.0, "mfu": 0.1}) + "\n")
    (run / "final").mkdir()
    (run / "final" / "model.safetensors").write_bytes(b"weights")
    (run / "final" / "README.md").write_text(f"python -m evaluation.score {run}")

    assert copy_evidence([run], tmp_path / "evidence") == 5
    copy = tmp_path / "evidence" / "b_s44"
    file = copy / "records" / "dev.training.parquet"
    found = read_records(file)
    assert found.sha256 == records.sha256
    assert found.header == records.header
    assert json.loads((copy / "metrics.jsonl").read_text()) == {"update": 0, "bpb": 2.0}
    assert (copy / "card.md").read_text() == "python -m evaluation.score runs/b_s44"
    assert not [
        f for f in copy.rglob("*") if f.is_file() and str(tmp_path).encode() in f.read_bytes()
    ]
