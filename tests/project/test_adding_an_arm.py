"""docs/adding_an_arm.md: its patch applies, is right, trains, and ends as a row of the report."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCH = ROOT / "docs" / "adding_an_arm.patch"
ROOMS = ("modeling_doctab", "data_scripts", "training", "evaluation")
TINY = [
    *("--model", "vocab_size=300", "--model", "hidden_size=32", "--model", "num_hidden_layers=2"),
    *("--model", "head_dim=16", "--model", "max_position_embeddings=32"),
    *("--model", "query_scaling_base=32", "--chunk_length", "64", "--num_updates", "3"),
    *("--tokens_per_update", "256", "--tokens_per_micro_batch", "256", "--num_threads", "1"),
]

CHECK = """
import numpy as np, torch
from data_scripts.rows import TableOptions, chunk_rows
from modeling_doctab import DocTabConfig, DocTabForCausalLM
from modeling_doctab.accounting import count_parameters
from modeling_doctab.document_table import count_matches, lookup_document_table

BOS, V, T = 0, 12, 64
targets = np.random.default_rng(0).integers(1, V, (3, T))
targets[1, 30] = BOS
rows = chunk_rows(targets, T, BOS, TableOptions(counts=True))
ids, order = rows["input_ids"], rows["table_order"]
expected = np.zeros_like(ids)
for row, t in np.argwhere(order > 0):
    n = order[row, t]
    start = max(s for s in range(t + 1) if ids[row, s] == BOS)
    ends = range(start + n - 1, t)
    suffix = ids[row, t - n + 1 : t + 1].tolist()
    expected[row, t] = sum(ids[row, s - n + 1 : s + 1].tolist() == suffix for s in ends)
assert expected.max() > 3
np.testing.assert_array_equal(rows["table_count"], expected)

x = torch.from_numpy(ids)
documents = (x == BOS).long().cumsum(1)
table = lookup_document_table(x, 4, documents)
assert torch.equal(count_matches(x, table.order, 4, documents), torch.from_numpy(expected))

torch.manual_seed(0)
fields = dict(vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
              max_position_embeddings=T, bos_token_id=BOS, table_reach=T)
base = DocTabForCausalLM(DocTabConfig(**fields)).eval()
torch.manual_seed(0)
model = DocTabForCausalLM(DocTabConfig(**fields, table_counts=True)).eval()
assert count_parameters(model.config) == sum(p.numel() for p in model.parameters())
assert torch.equal(base(x).logits, model(x).logits)  # it starts as its base
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter, dtype=torch.float32).to(parameter.dtype))
    passed = {name: torch.from_numpy(a) for name, a in rows.items() if name.startswith("table_")}
    whole = model(x[2:], use_cache=False).logits
    given = model(x[2:], use_cache=False, **{k: v[2:] for k, v in passed.items()}).logits
    assert torch.equal(whole, given)
    wrong = model(x[2:], use_cache=False, table_count=passed["table_count"][2:] * 4).logits
    assert not torch.allclose(whole, wrong)  # the field matters
    prefix = model(x[2:, :40], use_cache=True)
    name = "cache" if "cache" in prefix else "past_key_values"
    step = model(x[2:, 40:41], **{name: prefix[name]}).logits
    torch.testing.assert_close(step[:, 0], whole[:, 40], atol=1e-5, rtol=0)
"""


def python(folder: Path, *arguments: object) -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def patched(tmp_path_factory) -> Path:
    """A copy of the rooms with the patch applied."""
    folder = tmp_path_factory.mktemp("patched")
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", "--verbose", str(PATCH)], cwd=folder, check=True)
    return folder


def test_the_example_equals_plain_loops(patched):
    python(patched, "-c", CHECK)


@pytest.mark.slow
def test_the_example_goes_from_recipe_to_table_row(patched, chunk_set):
    recipes = patched / "training" / "recipes" / "small"
    for arm in ("b", "b_table_counts"):
        run = ("training.train", recipes / f"{arm}.yaml", "--output_dir", f"runs/{arm}")
        python(patched, "-m", *run, "--chunk_set", chunk_set, *TINY)
    runs = [patched / "runs" / arm for arm in ("b", "b_table_counts")]
    python(patched, "-m", "evaluation.score", *runs, "--chunk_set", chunk_set, "--sets", "dev_val")
    python(patched, "-m", "evaluation.report", *runs, "--out", "report", "--quiet")
    with (patched / "report" / "table_2.csv").open() as file:
        rows = {row["base -> arm"]: row for row in csv.DictReader(file)}
    ours = rows["b -> b_table_counts"]["Dev-val"].split(" / ")[0]
    assert 0 < abs(float(ours)) < 1
