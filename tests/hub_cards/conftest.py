"""Two tiny arms, trained, scored and reported once; and copies of them to spoil."""

import os
import shutil
from pathlib import Path

import pytest

from data_scripts.chunk_set import ChunkSet
from data_scripts.export import export_parquet
from evaluation.report import build_report
from evaluation.score import score_runs
from tests.hub_fixtures import hub  # noqa: F401  a fixture of this folder's tests
from tests.training.conftest import TINY_MODEL
from training.config import build_recipe
from training.train import train

METRIC = Path(__file__).parents[2] / "evaluation" / "class_bpb"


@pytest.fixture(scope="session")
def scored_runs(tmp_path_factory, chunk_set):
    """A base arm and its table arm, trained for a moment, scored and reported."""
    folder = tmp_path_factory.mktemp("runs")
    runs = []
    for name, table in (("b", False), ("b_table", True)):
        plain = {
            "name": name,
            "baseline": "b" if table else None,
            "output_dir": str(folder / name),
            "model": TINY_MODEL | {"document_table": table},
            "data": {"chunk_set": str(chunk_set), "chunk_length": 64},
            "training": {
                "num_updates": 4,
                "tokens_per_update": 256,
                "tokens_per_micro_batch": 256,
                "checkpoint_every": 2,
                "num_threads": 1,
            },
        }
        recipe = build_recipe(plain, name)
        assert train(recipe) == 0
        runs.append(recipe.run_dir)
    score_runs(runs, ChunkSet.open(chunk_set), ["dev_val"])
    build_report(runs, folder / "report", num_resamples=200)
    return runs


@pytest.fixture
def runs(scored_runs, tmp_path):
    """Copies of the two arms that a test may change."""
    return [shutil.copytree(run, tmp_path / "runs" / run.name) for run in scored_runs]


@pytest.fixture(scope="session")
def parquet_set(tmp_path_factory, chunk_set):
    """The tiny chunk set, exported."""
    out = tmp_path_factory.mktemp("export") / "parquet"
    export_parquet(ChunkSet.open(chunk_set), out)
    return out


@pytest.fixture
def waits(monkeypatch):
    """Seconds that would have been slept."""
    found = []
    monkeypatch.setattr("time.sleep", found.append)
    return found


@pytest.fixture
def outside(hub, tmp_path):  # noqa: F811
    """The environment of a process elsewhere: the test Hub, an empty cache, no display."""
    home = tmp_path / "home"
    home.mkdir()
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "LD_LIBRARY_PATH", "LANG")}
    variables = {"HF_HOME": str(home), "HOME": str(home), "OMP_NUM_THREADS": "1"}
    return kept | variables | hub.environment()
