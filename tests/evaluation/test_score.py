"""Scoring against plain loops over rows, and everything that it must refuse or reuse."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from data_scripts.chunk_set import ChunkSet, DocumentSplit
from data_scripts.rows import TableOptions, chunk_rows
from evaluation.checkpoints import load_model, open_checkpoint
from evaluation.class_bpb.statistics import CLASS_NAMES
from evaluation.formats import EvaluationFormat, load_targets
from evaluation.score import main, score_runs
from evaluation.scores import make_records, read_scores
from modeling_doctab import naive
from tests.evaluation import naive_classes
from tests.evaluation.conftest import CHUNK_LENGTH, ROW_LENGTH

ARMS = [
    pytest.param({"document_table": False}, id="b"),
    pytest.param({}, id="b_table"),
    pytest.param({"max_position_embeddings": CHUNK_LENGTH}, id="lg_table"),
    pytest.param({"table_orders": 2}, id="two_orders"),
]


def score_one(run: Path, chunk_set: ChunkSet, form: EvaluationFormat | None = None, **options):
    (result,) = score_runs([run], chunk_set, ["dev"], form, **options)
    header = result.records.header
    return result.records, read_scores(run / "scores" / f"{header.file_stem}.npz")


def plain_rows(chunk_set: ChunkSet, row_length: int, orders: int):
    """Document, place in the document, and the row with its fields, one row at a time."""
    documents = chunk_set.documents("dev")
    for index in range(len(documents)):
        tokens = documents.document(index).tolist()
        for chunk in range(len(tokens) // CHUNK_LENGTH):
            targets = tokens[chunk * CHUNK_LENGTH : (chunk + 1) * CHUNK_LENGTH]
            table = naive.lookup([chunk_set.bos_token_id, *targets[:-1]], orders)
            for start in range(0, CHUNK_LENGTH, row_length):
                place = chunk * CHUNK_LENGTH + start
                yield index, tokens, place, table[start : start + row_length]


@pytest.mark.parametrize("changes", ARMS)
def test_training_format_equals_plain_loops(make_run, chunk_set, changes) -> None:
    run = make_run("arm", **changes)
    records, scores = score_one(run, chunk_set, batch_size_tokens=100)
    model = load_model(open_checkpoint(run), torch.device("cpu"))
    config = model.config
    row_length = config.max_position_embeddings
    orders = config.table_orders if config.document_table else 4
    sums = np.zeros(records.sums.nats.shape)
    counts = np.zeros(records.sums.nats.shape, int)
    num_bytes = np.zeros(records.sums.nats.shape, int)
    position = 0
    for index, tokens, start, table in plain_rows(chunk_set, row_length, orders):
        seen = naive_classes.row_inputs(tokens, start, row_length, chunk_set.bos_token_id)
        targets = tokens[start : start + row_length]
        fields = {}
        if config.document_table:
            names = ("table_order", "table_candidate", "table_distance")
            columns = zip(*table, strict=True)
            fields = {n: torch.tensor([c]) for n, c in zip(names, columns, strict=True)}
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[token for token, _ in seen]]), **fields).logits
        losses = torch.nn.functional.cross_entropy(
            logits[0], torch.tensor(targets), reduction="none"
        )
        # 1e-5: float32 matrix products of one row and of several differ by rounding.
        found = scores.nats[position : position + row_length]
        np.testing.assert_allclose(found, losses.numpy(), atol=1e-5)
        for slot, y in enumerate(targets):
            n, d = naive_classes.target_order(tokens, start + slot, chunk_set.bos_token_id)
            visible = naive_classes.is_visible(tokens, start + slot, d, start, row_length)
            cell = naive_classes.target_cell(n, d, visible, CHUNK_LENGTH)
            name = f"{cell}.{naive_classes.table_cell(*table[slot][:2], y)}"
            sums[index, CLASS_NAMES.index(name)] += found[slot]
            counts[index, CLASS_NAMES.index(name)] += 1
            num_bytes[index, CLASS_NAMES.index(name)] += chunk_set.token_bytes()[y]
        position += row_length
    assert position == len(scores.nats)
    np.testing.assert_array_equal(records.sums.num_targets, counts)
    np.testing.assert_array_equal(records.sums.num_bytes, num_bytes)
    np.testing.assert_allclose(records.sums.nats, sums, rtol=1e-12)


def test_scores_equal_the_training_rows_bit_for_bit(make_run, chunk_set) -> None:
    run = make_run("arm")
    _, scores = score_one(run, chunk_set, batch_size_tokens=10**6)
    model = load_model(open_checkpoint(run), torch.device("cpu"))
    _, _, chunks = chunk_set.documents("dev").chunks()
    rows = chunk_rows(chunks, ROW_LENGTH, chunk_set.bos_token_id, TableOptions())
    batch = {name: torch.from_numpy(array) for name, array in rows.items()}
    labels = batch.pop("shift_labels")
    with torch.inference_mode():
        losses = model.target_nats(targets=labels, **batch).flatten()
        logits = model(**batch, use_cache=False).logits
        plain = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="none"
        )
    np.testing.assert_array_equal(scores.nats, losses.numpy())
    # cross_entropy forms the logarithm in another order.
    np.testing.assert_allclose(scores.nats, plain.numpy(), rtol=1e-5, atol=1e-5)


def test_batch_size_changes_nothing_beyond_rounding(make_run, chunk_set) -> None:
    _, one = score_one(make_run("one"), chunk_set, batch_size_tokens=1)
    _, many = score_one(make_run("many"), chunk_set, batch_size_tokens=10**6)
    np.testing.assert_allclose(one.nats, many.nats, atol=1e-5)  # float32 logits of about 1
    for name in ("table_order", "table_right", "table_distance", "slot"):
        np.testing.assert_array_equal(getattr(one, name), getattr(many, name))


@pytest.mark.parametrize("stride", [ROW_LENGTH, ROW_LENGTH // 2, 5])
@pytest.mark.parametrize("reach", ["chunk", "window"])
def test_strides_score_every_target_once(make_run, chunk_set, stride, reach) -> None:
    run = make_run("arm")
    form = EvaluationFormat(stride, reach)
    records, scores = score_one(run, chunk_set, form, batch_size_tokens=50)
    documents = chunk_set.documents("dev")
    assert len(scores.nats) == documents.offsets[-1]
    assert np.isfinite(scores.nats).all()
    assert records.header.file_stem == f"dev.stride{stride}-{reach}"
    # Within a document: the first window fills slots 0.., each later one its last `stride` slots.
    length = int(documents.offsets[1])
    expected = [i if i < ROW_LENGTH else ROW_LENGTH - stride + (i - ROW_LENGTH) % stride
                for i in range(length)]  # fmt: skip
    assert scores.slot[:length].tolist() == expected


def test_stride_of_a_row_with_chunk_reach_is_the_training_format(make_run, chunk_set) -> None:
    run = make_run("arm")
    _, training = score_one(run, chunk_set)
    _, strided = score_one(run, chunk_set, EvaluationFormat(ROW_LENGTH, "chunk"))
    offsets = chunk_set.documents("dev").offsets
    lengths = [end - start for start, end in pairwise(offsets)]
    full = np.concatenate(
        [
            start + np.arange(n - n % CHUNK_LENGTH)
            for start, n in zip(offsets, lengths, strict=False)
        ]
    )
    assert len(full) < offsets[-1]  # there are remainders to leave out
    np.testing.assert_allclose(strided.nats[full], training.nats, atol=1e-5)  # other batches
    for name in ("table_order", "table_right", "table_distance", "slot"):
        np.testing.assert_array_equal(getattr(strided, name)[full], getattr(training, name))


def test_ablation_gives_no_match_everywhere(make_run, chunk_set) -> None:
    run = make_run("arm")
    records, scores = score_one(run, chunk_set, ablated=True)
    _, whole = score_one(run, chunk_set)
    assert records.header.file_stem == "dev.training-ablated"
    assert not scores.table_order.any()
    assert whole.table_order.any()
    assert not np.allclose(scores.nats, whole.nats, atol=1e-2)
    model = load_model(open_checkpoint(run), torch.device("cpu"))
    _, _, chunks = chunk_set.documents("dev").chunks()
    rows = chunk_rows(chunks, ROW_LENGTH, chunk_set.bos_token_id)
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(rows["input_ids"]), ablate_table=True).logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(rows["shift_labels"]).flatten(), reduction="none"
    )
    np.testing.assert_allclose(scores.nats, losses.numpy(), atol=1e-5)


@pytest.mark.parametrize("source", ["foreign", "shuffled"])
def test_the_checkpoint_s_own_table_source_is_rebuilt(make_run, chunk_set, source) -> None:
    run = make_run("arm", data={"table_source": source, "table_dropout": 0.5})
    records, scores = score_one(run, chunk_set, batch_size_tokens=200)
    _, document = score_one(make_run("plain"), chunk_set)
    assert records.header.table_source == source
    assert (scores.table_order != document.table_order).mean() > 0.1
    # A candidate out of place is seldom right; dropout belongs to training alone.
    assert scores.table_right.mean() < document.table_right.mean()
    assert (scores.table_order > 0).mean() > 0.3


def test_finished_results_are_reused_by_hash(make_run, chunk_set, capsys) -> None:
    run = make_run("arm")
    (first,) = score_runs([run], chunk_set, ["dev"])
    (again,) = score_runs([run], chunk_set, ["dev"])
    assert (first.reused, again.reused) == (False, True)
    assert again.records.sha256 == first.records.sha256
    assert f"reused {again.path}" in capsys.readouterr().out
    (run / "scores" / "dev.training.npz").unlink()
    assert not score_runs([run], chunk_set, ["dev"])[0].reused
    weights = load_file(run / "final" / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"] * 1.5
    save_file(weights, run / "final" / "model.safetensors", metadata={"format": "pt"})
    (changed,) = score_runs([run], chunk_set, ["dev"])
    assert not changed.reused
    assert changed.records.header.checkpoint_sha256 != first.records.header.checkpoint_sha256
    (run / "scores" / "dev.training.npz").write_bytes(b"half a file")
    assert not score_runs([run], chunk_set, ["dev"])[0].reused


def test_records_are_made_from_scores(make_run, chunk_set) -> None:
    records, scores = score_one(make_run("arm"), chunk_set)
    targets = load_targets(chunk_set, "dev", full_chunks=True)
    assert make_records(scores, targets).sha256 == records.sha256
    with pytest.raises(ValueError, match="must cover the"):
        make_records(scores, load_targets(chunk_set, "dev", full_chunks=False))


def test_a_model_folder_of_another_architecture(tmp_path, chunk_set) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=chunk_set.vocab_size, n_positions=32, n_embd=16, n_layer=1, n_head=2
    )
    model = GPT2LMHeadModel(config).eval()
    folder = tmp_path / "gpt2"
    model.save_pretrained(folder)
    # GPT-2 calls its row length n_positions.
    assert "max_position_embeddings" not in json.loads((folder / "config.json").read_text())
    records, scores = score_one(folder, chunk_set)
    assert (records.header.arm, records.header.has_table) == ("gpt2", False)
    _, _, chunks = chunk_set.documents("dev").chunks()
    rows = chunk_rows(chunks, 32, chunk_set.bos_token_id)
    with torch.no_grad():
        logits = model(torch.from_numpy(rows["input_ids"])).logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(rows["shift_labels"]).flatten(), reduction="none"
    )
    np.testing.assert_allclose(scores.nats, losses.numpy(), atol=1e-5)


def test_a_diverged_model_is_refused(make_run, chunk_set) -> None:
    run = make_run("arm")
    weights = load_file(run / "final" / "model.safetensors")
    weights["lm_head.weight"][0, 0] = float("nan")
    save_file(weights, run / "final" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="Every loss must be finite; arm gives nan at target 0"):
        score_runs([run], chunk_set, ["dev"])
    assert not (run / "records").exists()


def command(run: Path, chunk_set: ChunkSet, *more: str) -> list[str]:
    return [str(run), "--chunk-set", str(chunk_set.path), "--sets", "dev", *more]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--sets", "dev_val"], "'dev_val' is not one of dev, confirm"),
        (["--sets", "confirm"], "confirm is a confirmation split"),
        (["--stride", "8"], "--stride and --reach belong to --format stride"),
        (["--format", "stride", "--stride", "0"], "stride must be at least 1"),
        (
            ["--format", "stride", "--stride", "17"],
            "--stride must be at most the row length; got 17 and 16",
        ),
        (["--batch-size-tokens", "0"], "--batch_size_tokens must be at least 1"),
    ],
)
def test_bad_commands_exit_2_with_one_line(make_run, chunk_set, capsys, more, message) -> None:
    assert main(command(make_run("arm"), chunk_set, *more)) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(error) == 1
    assert message in error[0]


def test_arms_that_do_not_fit_are_refused(make_run, chunk_set, tmp_path) -> None:
    with pytest.raises(ValueError, match="table reaches 32 tokens"):
        score_runs([make_run("short", table_reach=32)], chunk_set, ["dev"])
    odd = make_run("odd", max_position_embeddings=24, document_table=False)
    with pytest.raises(ValueError, match="row length must divide the chunk length; got 24"):
        score_runs([odd], chunk_set, ["dev"])
    base = make_run("base", document_table=False)
    with pytest.raises(ValueError, match="has no table to ablate"):
        score_runs([base], chunk_set, ["dev"], ablated=True)
    with pytest.raises(ValueError, match="table_orders must be at most 4"):
        score_runs([make_run("deep", table_orders=6)], chunk_set, ["dev"])
    shuffled = make_run("shuffled", data={"table_source": "shuffled"})
    with pytest.raises(ValueError, match="scored in the training format alone"):
        score_runs([shuffled], chunk_set, ["dev"], EvaluationFormat(8))
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "config.yaml").write_text(yaml.safe_dump({"name": "x"}))
    with pytest.raises(ValueError, match="Is the training done"):
        score_runs([unfinished], chunk_set, ["dev"])


def test_the_command_scores_and_reuses(make_run, chunk_set, capsys) -> None:
    run = make_run("arm")
    options = ["--format", "stride", "--ablate-table"]
    assert main(command(run, chunk_set, *options)) == 0
    assert (run / "records" / "dev.stride8-chunk-ablated.parquet").is_file()
    assert "tok/s" in capsys.readouterr().err  # the progress bar
    assert main(command(run, chunk_set, *options)) == 0
    assert "reused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "dev must hold documents to be scored; it is empty"),
        ([100, 63], "must have a full chunk of 64 targets; doc1 has 63"),
    ],
)
def test_sets_that_cannot_be_scored(make_run, chunk_set, monkeypatch, lengths, message) -> None:
    run = make_run("arm")
    whole = chunk_set.documents("dev")
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    names = [f"doc{i}" for i in range(len(lengths))]
    split = DocumentSplit(whole.tokens[: offsets[-1]], offsets, names, CHUNK_LENGTH)
    monkeypatch.setattr(ChunkSet, "documents", lambda self, name, opened_by: split)
    with pytest.raises(ValueError, match=message):
        score_runs([run], chunk_set, ["dev"])
    assert not (run / "records").exists()
