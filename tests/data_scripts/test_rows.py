from __future__ import annotations

import numpy as np
import pytest

from data_scripts.rows import (
    TableOptions,
    chunk_rows,
    donor_chunks,
    packed_rows,
    segments_at_bos,
    stride_windows,
)
from modeling_doctab import naive

BOS = 50
CHUNK = 48
FIELDS = ("table_order", "table_candidate", "table_distance")


@pytest.fixture
def targets():
    return np.random.default_rng(0).integers(0, 6, (5, CHUNK)).astype(np.uint16)


def naive_fields(inputs, **options):
    found = [naive.lookup([int(x) for x in row], **options) for row in inputs]
    return dict(zip(FIELDS, np.moveaxis(np.array(found), 2, 0), strict=True))


def streams(targets):
    return np.concatenate([np.full((len(targets), 1), BOS), targets[:, :-1]], axis=1)


@pytest.mark.parametrize("row_length", [CHUNK, CHUNK // 4, 1])
def test_the_table_sees_the_chunk_and_the_model_the_row(targets, row_length):
    rows = chunk_rows(targets, row_length, BOS, TableOptions())
    per_chunk = CHUNK // row_length
    expected = naive_fields(streams(targets))
    for i in range(len(targets)):
        for r in range(per_chunk):
            row, cut = i * per_chunk + r, slice(r * row_length, (r + 1) * row_length)
            assert rows["input_ids"][row, 0] == BOS
            np.testing.assert_array_equal(rows["input_ids"][row, 1:], targets[i, cut][:-1])
            np.testing.assert_array_equal(rows["shift_labels"][row], targets[i, cut])
            for name in FIELDS:
                np.testing.assert_array_equal(rows[name][row], expected[name][i, cut])
    assert all(array.dtype == np.int64 for array in rows.values())


def test_an_arm_without_a_table_gets_no_fields(targets):
    assert set(chunk_rows(targets, 12, BOS)) == {"input_ids", "shift_labels"}


def options(**changes):
    return TableOptions(**{"seed": 3} | changes)


SOURCES = [
    options(),
    options(orders=2),
    options(source="foreign"),
    options(source="shuffled"),
    options(dropout=0.5),
    options(source="foreign", dropout=0.5),
    options(source="shuffled", dropout=0.5),
    options(source="empty"),
]


@pytest.mark.parametrize("table", SOURCES, ids=str)
def test_2k_and_8k_views_have_equal_targets_and_fields(targets, table):
    if table.dropout:  # keyed by row, so rows of different lengths differ by design
        table = options(source=table.source)
    views = [
        chunk_rows(targets, length, BOS, table, np.arange(5), foreign=targets[::-1])
        for length in (CHUNK, CHUNK // 4)
    ]
    for name in ("shift_labels", *FIELDS):
        assert views[0][name].tobytes() == views[1][name].tobytes()


@pytest.mark.parametrize("table", SOURCES, ids=str)
def test_no_field_depends_on_a_later_token(targets, table):
    def fields(changed):
        rows = chunk_rows(changed, 12, BOS, table, np.arange(5), foreign=changed[[1, 2, 3, 4, 0]])
        return np.stack([rows[name].reshape(5, CHUNK) for name in FIELDS])

    before = fields(targets)
    for t in range(CHUNK):
        changed = targets.copy()
        changed[:, t:] = 7  # the input at t is target t - 1, so fields to t may not move
        np.testing.assert_array_equal(fields(changed)[:, :, : t + 1], before[:, :, : t + 1])


def test_fields_do_depend_on_earlier_tokens(targets):
    changed = targets.copy()
    changed[:, 0] = 7
    for table in SOURCES[:-1]:
        arguments = {"table": table, "chunk_indices": np.arange(5)}
        before = chunk_rows(targets, 12, BOS, foreign=targets, **arguments)
        after = chunk_rows(changed, 12, BOS, foreign=changed, **arguments)
        assert any((before[name] != after[name]).any() for name in FIELDS), table


def test_foreign_takes_the_donors_fields(targets):
    donors = targets[::-1]
    rows = chunk_rows(targets, 12, BOS, options(source="foreign"), foreign=donors)
    expected = chunk_rows(donors, 12, BOS, options())
    for name in FIELDS:
        np.testing.assert_array_equal(rows[name], expected[name])
    np.testing.assert_array_equal(rows["shift_labels"], targets.reshape(-1, 12))


def test_shuffled_takes_whole_triples_from_earlier_positions(targets):
    rows = chunk_rows(targets, CHUNK, BOS, options(source="shuffled"), np.arange(5))
    true = chunk_rows(targets, CHUNK, BOS, options())
    triples = np.stack([true[name] for name in FIELDS], axis=2)
    found = np.stack([rows[name] for name in FIELDS], axis=2)
    for i in range(5):
        for t in range(CHUNK):
            assert (triples[i, : t + 1] == found[i, t]).all(axis=1).any()
    assert (triples != found).any(axis=2).mean() > 0.5  # most positions got another's


def test_empty_is_no_match_everywhere(targets):
    rows = chunk_rows(targets, 12, BOS, options(source="empty"))
    ablated = chunk_rows(targets, 12, BOS, options(), ablate=True)
    for name in (*FIELDS, "input_ids", "shift_labels"):
        np.testing.assert_array_equal(rows[name], ablated[name])


def test_shuffled_positions_are_uniform_over_the_past():
    # Distinct ids but for one pair: its match at the last position is found where it is drawn.
    targets = np.tile(np.arange(100), (4000, 1))
    targets[:, 98] = 0
    rows = chunk_rows(
        targets, 100, BOS + 100, options(source="shuffled"), np.arange(4000, dtype=np.int64)
    )
    share = np.mean(rows["table_order"][:, 99] == 1)
    assert abs(share - 1 / 100) < 0.006  # four standard errors


def test_dropout_drops_whole_rows_keyed_by_seed_chunk_and_row(targets):
    many = np.tile(targets, (200, 1))
    full = chunk_rows(many, 12, BOS, options())
    rows = chunk_rows(many, 12, BOS, options(dropout=0.5), np.arange(1000))
    dropped = (rows["table_order"] == 0).all(axis=1) & (rows["table_candidate"] == -1).all(axis=1)
    dropped &= (rows["table_distance"] == 0).all(axis=1)
    for name in FIELDS:
        np.testing.assert_array_equal(rows[name][~dropped], full[name][~dropped])
    assert abs(dropped.mean() - 0.5) < 0.04  # 4,000 rows: five standard errors
    # The same rows whatever the batch: chunk 700 alone, and another seed.
    alone = chunk_rows(many[700:701], 12, BOS, options(dropout=0.5), np.array([700]))
    np.testing.assert_array_equal(alone["table_order"], rows["table_order"][2800:2804])
    other = chunk_rows(many, 12, BOS, options(dropout=0.5, seed=4), np.arange(1000))
    assert (other["table_order"] != rows["table_order"]).any()
    everything = chunk_rows(many, 12, BOS, options(dropout=1.0), np.arange(1000))
    assert not everything["table_order"].any()
    np.testing.assert_array_equal(rows["input_ids"], full["input_ids"])


def test_ablated(targets):
    rows = chunk_rows(targets, 12, BOS, TableOptions(), ablate=True)
    assert [np.unique(rows[name]).tolist() for name in FIELDS] == [[0], [-1], [0]]


def test_packed_rows_split_the_table_at_bos():
    targets = np.random.default_rng(1).integers(0, 4, (3, 60))
    targets[:, [13, 14, 40]] = BOS  # one document holds nothing but BOS
    rows = packed_rows(targets, BOS, TableOptions())
    inputs = streams(targets)
    segments = np.cumsum(inputs == BOS, axis=1) - 1
    np.testing.assert_array_equal(rows["input_ids"], inputs)
    np.testing.assert_array_equal(rows["segment_ids"], segments)
    for i in range(3):
        expected = naive_fields(inputs[i : i + 1], segment_ids=segments[i].tolist())
        for name in FIELDS:
            np.testing.assert_array_equal(rows[name][i : i + 1], expected[name])
    assert not rows["table_order"][:, [0, 1, 14, 15, 16, 41, 42]].any()
    unpacked = chunk_rows(targets, 60, BOS, TableOptions())
    for name in FIELDS:
        np.testing.assert_array_equal(rows[name], unpacked[name])


def test_segments_of_rows_that_do_not_open_with_bos():
    assert segments_at_bos(np.array([[1, BOS, 2], [BOS, 1, BOS]]), BOS).tolist() == [
        [0, 1, 1],
        [0, 0, 1],
    ]


@pytest.mark.parametrize("num_targets", [1, 7, 16, 17, 24, 95, 96, 97, 100])
@pytest.mark.parametrize("stride", [1, 5, 8, 16])
def test_stride_windows_score_every_target_once(num_targets, stride):
    document = np.random.default_rng(num_targets).integers(0, 6, num_targets)
    rows = stride_windows(document, 16, stride, BOS)
    scored = rows["target_index"] >= 0
    assert sorted(rows["target_index"][scored].tolist()) == list(range(num_targets))
    np.testing.assert_array_equal(
        rows["shift_labels"][scored], document[rows["target_index"][scored]]
    )
    assert (rows["shift_labels"][~scored] == -100).all()
    assert scored.any(axis=1).all()  # no window is made for nothing
    for k, (inputs, index) in enumerate(zip(rows["input_ids"], rows["target_index"], strict=True)):
        inside = document[k * stride : k * stride + 16]
        assert inputs[0] == BOS
        np.testing.assert_array_equal(inputs[1 : len(inside)], inside[:-1])
        # A later window scores its last `stride` targets: the context before them is longest.
        first = np.flatnonzero(index >= 0)[0]
        assert first == (0 if k == 0 else 16 - stride)


def test_stride_windows_with_chunk_reach_keep_the_training_chunks_fields():
    document = np.random.default_rng(2).integers(0, 5, 3 * CHUNK + 10)
    full, rest = document[: 3 * CHUNK].reshape(3, CHUNK), document[None, 3 * CHUNK :]
    training = chunk_rows(full, CHUNK, BOS, TableOptions())
    remainder = chunk_rows(rest, 10, BOS, TableOptions())
    expected = {
        name: np.concatenate([training[name].ravel(), remainder[name].ravel()]) for name in FIELDS
    }
    for window, stride in ((16, 8), (CHUNK, CHUNK // 2), (2 * CHUNK, 20)):
        rows = stride_windows(document, window, stride, BOS, TableOptions(), "chunk", CHUNK)
        scored = rows["target_index"] >= 0
        for name in FIELDS:
            np.testing.assert_array_equal(
                rows[name][scored], expected[name][rows["target_index"][scored]]
            )


def test_stride_of_a_row_with_chunk_reach_is_the_training_format():
    document = np.random.default_rng(3).integers(0, 5, 2 * CHUNK + 10)
    training = chunk_rows(document[: 2 * CHUNK].reshape(2, CHUNK), 12, BOS, TableOptions())
    rows = stride_windows(document, 12, 12, BOS, TableOptions(), "chunk", CHUNK)
    for name, expected in training.items():
        np.testing.assert_array_equal(rows[name][: len(expected)], expected)


def test_stride_windows_with_window_reach_look_up_their_own_inputs():
    document = np.random.default_rng(4).integers(0, 5, 130)
    for limit in (None, 9):
        rows = stride_windows(document, 32, 16, BOS, TableOptions(), "window", limit)
        expected = naive_fields(rows["input_ids"], reach=limit)
        scored = rows["target_index"] >= 0
        for name in FIELDS:
            np.testing.assert_array_equal(rows[name][scored], expected[name][scored])


def test_stride_windows_ablated_and_empty():
    rows = stride_windows(np.arange(20), 8, 4, BOS, TableOptions(), chunk_length=8, ablate=True)
    assert not rows["table_order"].any()
    empty = stride_windows(np.zeros(0, int), 8, 4, BOS, TableOptions(), chunk_length=8)
    assert {array.shape for array in empty.values()} == {(0, 8)}


def test_donors_come_from_other_documents_and_from_the_chunk_alone():
    documents = np.repeat([0, 1, 2], [50, 3, 2])
    donors = donor_chunks(documents, np.arange(55), seed=1)
    assert (documents[donors] != documents).all()
    assert set(donors[:50]) == set(range(50, 55))  # 50 draws: one of the five missed at 7e-5
    np.testing.assert_array_equal(donor_chunks(documents, np.array([54, 7]), 1), donors[[54, 7]])
    assert (donor_chunks(documents, np.arange(55), seed=2) != donors).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda y: chunk_rows(y, 13, BOS), "row_length must divide chunk_length; found 13 and 48"),
        (lambda y: chunk_rows(y, 0, BOS), "row_length must divide"),
        (lambda y: chunk_rows(y[0], 12, BOS), r"shape \[num_chunks, chunk_length\]; found uint16"),
        (lambda y: chunk_rows(y * 1.0, 12, BOS), "must be integers"),
        (lambda y: TableOptions(orders=9), "orders must be 1 to 8; found 9"),
        (lambda y: TableOptions(source="other"), "source must be one of document, foreign"),
        (lambda y: TableOptions(dropout=1.5), "dropout must be between 0 and 1; found 1.5"),
        (
            lambda y: chunk_rows(y, 12, BOS, options(dropout=0.5)),
            r"dropout needs chunk_indices of shape \[5\].*found None",
        ),
        (
            lambda y: chunk_rows(y, 12, BOS, options(source="shuffled"), np.arange(4)),
            r"source 'shuffled' needs chunk_indices of shape \[5\].*found shape \[4\]",
        ),
        (
            lambda y: chunk_rows(y, 12, BOS, options(source="foreign")),
            "source 'foreign' needs the donors' targets",
        ),
        (
            lambda y: chunk_rows(y, 12, BOS, options(source="foreign"), foreign=y[:2]),
            r"foreign must have the shape of targets, \[5, 48\]; found \[2, 48\]",
        ),
        (lambda y: donor_chunks(np.zeros(4, int), np.arange(4)), "at least two documents"),
        (lambda y: packed_rows(y, BOS, options(dropout=0.5)), "packed_rows makes the fields of"),
        (lambda y: stride_windows(y, 8, 4, BOS), "tokens must be one document's integers"),
        (lambda y: stride_windows(y[0], 8, 9, BOS), "stride must be 1 to the window, 8; found 9"),
        (lambda y: stride_windows(y[0], 8, 8, BOS, reach="row"), "reach must be 'chunk' or"),
        (lambda y: stride_windows(y[0], 8, 8, BOS, options()), "needs chunk_length"),
        (
            lambda y: stride_windows(y[0], 8, 8, BOS, chunk_length=0),
            "chunk_length must be at least 1; found 0",
        ),
        (
            lambda y: stride_windows(y[0], 8, 8, BOS, options(source="shuffled"), "window"),
            "stride_windows makes the fields of source 'document'",
        ),
    ],
)
def test_bad_arguments(targets, call, message):
    with pytest.raises(ValueError, match=message):
        call(targets)
