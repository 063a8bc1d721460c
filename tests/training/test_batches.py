"""Batches are a pure function of (update, micro-batch, rank, world size)."""

from pathlib import Path

import numpy as np
import pytest
import torch

from data_scripts.chunk_set import ChunkSet
from data_scripts.rows import TableOptions
from modeling_doctab import naive
from training.batches import BatchLoader, BatchPlan, RowMaker, target_sha256
from training.config import load_recipe
from training.setup import batch_plan

RECIPES = Path(__file__).parents[2] / "training" / "recipes" / "paper"


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2])
def test_same_global_batches_for_any_world_and_micro_batch(world, micro):
    plan = BatchPlan(chunks_per_update=8, chunks_per_micro_batch=micro, world_size=world)
    for update in (0, 3):
        seen = [
            position
            for rank in range(world)
            for i in range(plan.micro_batches)
            for position in plan.chunk_positions(update, i, rank)
        ]
        assert sorted(seen) == list(range(update * 8, update * 8 + 8))


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="8 chunks does not divide .* 2 chunks on 3 processes"):
        BatchPlan(8, 2, 3)


@pytest.mark.parametrize(("world", "micro"), [(1, 16), (2, 16), (4, 16), (8, 8), (64, 1)])
def test_more_processes_take_smaller_micro_batches(world, micro):
    plan = batch_plan(load_recipe(RECIPES / "b.yaml"), world)
    assert (plan.chunks_per_update, plan.chunks_per_micro_batch) == (64, micro)
    assert plan.micro_batches * micro * world == 64


def test_processes_that_cannot_share_an_update_are_refused():
    with pytest.raises(ValueError, match="must divide the 64 chunks of an update; got 3"):
        batch_plan(load_recipe(RECIPES / "b.yaml"), 3)


def make_rows(chunk_set, row_length, table=True):
    opened = ChunkSet.open(chunk_set)
    options = TableOptions(4) if table else None
    return RowMaker(opened.train_chunks(), row_length, opened.bos_token_id, options)


def test_loader_yields_the_plan_in_order_from_any_update(chunk_set):
    make = make_rows(chunk_set, 32)
    plan = BatchPlan(4, 2)
    whole = list(BatchLoader(make, plan, 0, 0, 5, num_threads=3))
    late = list(BatchLoader(make, plan, 0, 3, 5, num_threads=1))
    assert len(whole) == 10
    for a, b in zip(whole[6:], late, strict=True):
        assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("row_length", [16, 32, 64])
def test_targets_are_the_frozen_stream_whatever_the_row(chunk_set, row_length):
    make = make_rows(chunk_set, row_length, table=row_length != 16)
    plan = BatchPlan(4, 4)
    batches = list(BatchLoader(make, plan, 0, 0, 3))
    seen = torch.cat([b["shift_labels"].flatten() for b in batches]).numpy()
    assert np.array_equal(seen, make.chunks[np.arange(12) % len(make.chunks)].flatten())
    assert target_sha256(make.chunks, plan, 3) == target_sha256(make.chunks, BatchPlan(4, 1, 2), 3)


def test_the_table_sees_the_chunk_and_the_model_sees_the_row(chunk_set):
    make = make_rows(chunk_set, 16)
    batch = make(range(0, 2))
    bos = make.bos_token_id
    for i in range(2):
        stream = [bos, *make.chunks[i][:-1].tolist()]
        expected = naive.lookup(stream)
        rows = slice(4 * i, 4 * i + 4)
        assert batch["table_order"][rows].flatten().tolist() == [e[0] for e in expected]
        assert batch["table_candidate"][rows].flatten().tolist() == [e[1] for e in expected]
        assert batch["table_distance"][rows].flatten().tolist() == [e[2] for e in expected]
        inputs = batch["input_ids"][rows]
        assert (inputs[:, 0] == bos).all()
        assert inputs[:, 1:].flatten().tolist() == [x for j, x in enumerate(stream) if j % 16]


def test_the_set_repeats_in_order(chunk_set):
    make = make_rows(chunk_set, 64, table=False)
    count = len(make.chunks)
    again = make(range(count, count + 2))
    first = make(range(0, 2))
    assert torch.equal(again["input_ids"], first["input_ids"])
