"""What was pushed, used by a process that cannot import the project.

One process does everything, since most of its time is imports: it reads the repositories, runs
every example of the cards, and writes what it found as JSON.
"""

import hashlib
import json
import re
import subprocess
import sys

import evaluate
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, pipeline

from data_scripts.chunk_set import ChunkSet
from hub_cards.push import main
from modeling_doctab import DocTabForCausalLM
from tests.hub_cards.conftest import METRIC

PROMPT = "the document table"
PRELUDE = """
import sys

class Blocked:
    rooms = ("modeling_doctab", "data_scripts", "training", "evaluation", "hub_cards")
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.rooms:
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Blocked())
for room in Blocked.rooms:
    try:
        __import__(room)
    except ImportError:
        continue
    raise SystemExit(f"{room} can be imported")
"""
SCRIPT = """
import contextlib, hashlib, io, json, pathlib
import datasets, evaluate, torch, transformers
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

job = json.loads(pathlib.Path("job.json").read_text())
found = {}

folder = pathlib.Path(snapshot_download("me/b_table"))
weights = (folder / "model.safetensors").read_bytes()
found["weights"] = hashlib.sha256(weights).hexdigest()
tokenizer = AutoTokenizer.from_pretrained("me/b_table", trust_remote_code=True)
ids = [tokenizer.bos_token_id, *tokenizer(job["prompt"], add_special_tokens=False)["input_ids"]]
found["ids"] = ids
model = AutoModelForCausalLM.from_pretrained("me/b_table", trust_remote_code=True)
found["logits"] = model(torch.tensor([ids])).logits[0, -1].tolist()
found["ends"] = model.generate(
    torch.tensor([ids]), max_new_tokens=8, do_sample=False
)[0].tolist()
early = AutoModelForCausalLM.from_pretrained(
    "me/b_table", revision="update0002-1K-tokens", trust_remote_code=True
)
found["early_logits"] = early(torch.tensor([ids])).logits[0, -1].tolist()
pipe = pipeline("text-generation", model="me/b_table", trust_remote_code=True)
found["pipeline"] = pipe(
    job["prompt"], max_new_tokens=8, do_sample=False
)[0]["generated_text"]

chunks = datasets.load_dataset("me/set")["train"].with_format("numpy")
found["chunks"] = hashlib.sha256(chunks[:]["targets"].astype("uint16").tobytes()).hexdigest()
documents = datasets.load_dataset("me/set", "documents", split="dev_val")
found["documents"] = documents[:]["tokens"]
found["document_ids"] = documents[:]["id"]

metric = evaluate.load("me/class_bpb")
found["metric"] = metric.compute(**job["columns"])

found["examples"] = {}
for name, codes in job["examples"].items():
    for code in codes:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, name, "exec"), {"__name__": "example"})
        found["examples"].setdefault(name, []).append(out.getvalue())
pathlib.Path("found.json").write_text(json.dumps(found))
"""
COLUMNS = {
    "nats": [2.31, 0.07, 4.02, 1.25],
    "num_bytes": [3, 4, 1, 2],
    "target_order": [0, 4, 1, 2],
    "target_distance": [0, 37, 512, 4000],
    "visible": [False, True, True, False],
    "table_order": [0, 4, 2, 2],
    "table_right": [False, True, False, True],
    "document": [0, 0, 1, 1],
    "baseline_nats": [2.35, 0.61, 4.01, 2.5],
}


def _examples(card):
    return re.findall(r"```python\n(.*?)```", card, re.S)


@pytest.fixture
def found(hub, outside, scored_runs, parquet_set, tmp_path):
    """Push everything, then what the fresh process found."""
    run, baseline = scored_runs[1], scored_runs[0]
    pushed = ["--repo_id", "me/b_table", "--baseline", str(baseline), "--checkpoints"]
    assert main([str(run), *pushed]) == 0
    assert main([str(parquet_set), "--repo_id", "me/set", "--license", "cc0-1.0"]) == 0
    assert main([str(METRIC), "--repo_id", "me/class_bpb"]) == 0
    cards = {
        f"{repo_type}:{branch}": _examples(repo.resolve(branch).files["README.md"].content.decode())
        for (repo_type, _), repo in hub.repos.items()
        for branch in repo.branches
    }
    assert all(cards.values())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    job = {"prompt": PROMPT, "columns": COLUMNS, "examples": cards}
    (elsewhere / "job.json").write_text(json.dumps(job))
    result = subprocess.run(
        [sys.executable, "-I", "-c", PRELUDE + SCRIPT],
        cwd=elsewhere,
        env=outside,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads((elsewhere / "found.json").read_text())


def test_everything_loads_and_is_the_same_elsewhere(found, scored_runs, chunk_set):
    final = scored_runs[1] / "final"
    results = json.loads((scored_runs[1] / "results.json").read_text())
    assert found["weights"] == results["final_sha256"]
    tokenizer = AutoTokenizer.from_pretrained(final, trust_remote_code=True)
    ids = [tokenizer.bos_token_id, *tokenizer(PROMPT, add_special_tokens=False)["input_ids"]]
    assert found["ids"] == ids
    with torch.no_grad():
        for folder, name in (
            (final, "logits"),
            (scored_runs[1] / "checkpoints" / "update_000002", "early_logits"),
        ):
            model = DocTabForCausalLM.from_pretrained(folder)
            assert found[name] == model(torch.tensor([ids])).logits[0, -1].tolist()
        model = DocTabForCausalLM.from_pretrained(final)
        ends = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0]
    assert found["ends"] == ends.tolist()
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    (here,) = pipe(PROMPT, max_new_tokens=8, do_sample=False)
    assert found["pipeline"] == here["generated_text"]
    assert len(found["pipeline"]) > len(PROMPT)
    assert found["logits"] != found["early_logits"]

    data = ChunkSet.open(chunk_set)
    chunks = np.ascontiguousarray(data.train_chunks())
    assert found["chunks"] == hashlib.sha256(chunks.tobytes()).hexdigest()
    documents = data.documents("dev_val")
    assert found["documents"] == [documents.document(i).tolist() for i in range(len(documents))]
    assert found["document_ids"] == documents.ids

    here = evaluate.load(str(METRIC)).compute(**COLUMNS)
    assert json.dumps(found["metric"]) == json.dumps(json.loads(json.dumps(here)))

    examples = found["examples"]
    assert set(examples) == {
        "model:main",
        "model:update0002-1K-tokens",
        "model:update0004-1K-tokens",
        "dataset:main",
        "space:main",
    }
    assert examples["model:main"][0].strip()
    assert f"{len(chunks)} ['targets', 'document', 'start']" in examples["dataset:main"][0]
