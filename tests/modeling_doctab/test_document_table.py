"""The tensor lookup against plain loops: every window, segment, reach and vocabulary."""

import itertools
import math
import re
import sysconfig
from pathlib import Path

import pytest
import torch

from modeling_doctab import lookup_document_table, naive
from modeling_doctab.document_table import DocumentTableEmbedding, hash_bigrams, lookup_last


def assert_equals_naive(ids, max_order=4, segment_ids=None, reach=None):
    found = lookup_document_table(ids, max_order, segment_ids, reach)
    for i, row in enumerate(ids.tolist()):
        segments = None if segment_ids is None else segment_ids[i].tolist()
        expected = naive.lookup(row, max_order, segments, reach)
        ours = list(zip(*(field[i].tolist() for field in found), strict=True))
        assert ours == expected


ROWS = {
    "constant": torch.full((1, 60), 7),
    "period 2": torch.arange(60).remainder(2)[None],
    "period 50": torch.arange(200).remainder(50)[None],
    "all distinct": torch.arange(60)[None],
    "one token": torch.tensor([[3]]),
    "empty": torch.zeros((1, 0), dtype=torch.long),
    "few ids": torch.randint(0, 3, (4, 80), generator=torch.Generator().manual_seed(0)),
    "some ids": torch.randint(0, 20, (4, 120), generator=torch.Generator().manual_seed(1)),
    "262,144 ids": torch.randint(
        262_134, 262_144, (4, 120), generator=torch.Generator().manual_seed(2)
    ),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("max_order", [1, 2, 4, 8])
def test_equals_naive(name, max_order):
    assert_equals_naive(ROWS[name], max_order)


@pytest.mark.parametrize("reach", [1, 2, 7, 40, 1000])
def test_equals_naive_with_a_reach(reach):
    assert_equals_naive(ROWS["few ids"], reach=reach)


def test_a_longer_match_beyond_the_reach_gives_way_to_a_shorter_one_inside():
    row = torch.tensor([[1, 2, 9, 8, 7, 2, 6, 1, 2]])
    assert [f[0, -1].item() for f in lookup_document_table(row)] == [2, 9, 7]
    assert [f[0, -1].item() for f in lookup_document_table(row, reach=4)] == [1, 6, 3]


def test_equals_naive_with_segments():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 4, (6, 90), generator=generator)
    # Ids that return after a change still start another segment.
    segments = torch.randint(0, 2, (6, 90), generator=generator).cumsum(1) // 6 % 2
    assert_equals_naive(ids, segment_ids=segments)
    assert_equals_naive(ids, segment_ids=segments, reach=9)


@pytest.mark.slow
def test_equals_naive_on_300_000_real_positions():
    """Python's own source under a vocabulary of bytes and of words, in rows of 1,000."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    text = "".join(p.read_text(encoding="utf-8") for p in sorted(stdlib.glob("*.py"))[:40])
    words: dict[str, int] = {}
    pieces = re.findall(r"\w+|\W", text)[:300_000]
    by_word = torch.tensor([words.setdefault(w, len(words)) for w in pieces])
    assert len(by_word) == 300_000
    assert len(words) > 5000
    assert_equals_naive(by_word.view(300, 1000))


def test_padding_matches_nothing():
    ids = ROWS["few ids"].clone()
    ids[:, :9] = -1
    ids[0, 40:44] = -1
    assert_equals_naive(ids)
    table = lookup_document_table(ids)
    assert (table.order[:, :9] == 0).all()
    assert (table.candidate >= -1).all()


def test_the_candidate_never_comes_from_the_future():
    ids = ROWS["few ids"]
    table = lookup_document_table(ids)
    for t in range(10, ids.shape[1]):
        changed = ids.clone()
        changed[:, t + 1 :] = (changed[:, t + 1 :] + 1) % 3
        again = lookup_document_table(changed)
        for ours, theirs in zip(table, again, strict=True):
            assert torch.equal(ours[:, : t + 1], theirs[:, : t + 1])


@pytest.mark.parametrize("reach", [None, 5, 30])
def test_last_position_equals_the_whole_lookup(reach):
    bos = 2
    ids = ROWS["few ids"].clone()
    ids[0, :12] = -1
    for length in (1, 2, 3, 20, 60, 80):
        history = ids[:, :length]
        segments = (history == bos).long().cumsum(1)
        whole = lookup_document_table(history, 4, segments, reach)
        last = lookup_last(history, 4, bos, reach)
        for ours, theirs in zip(last, whole, strict=True):
            assert torch.equal(ours, theirs[:, -1:])


def test_embedding_rows_are_those_of_the_paper():
    embedding = DocumentTableEmbedding(vocab_size=50, hidden_size=4, orders=4, num_buckets=14)
    assert embedding.candidate_embedding.weight.shape == (200, 4)
    assert embedding.state_embedding.weight.shape == (57, 4)
    order = torch.tensor([[0, 1, 1, 2, 3, 4, 4, 4, 4]])
    distance = torch.tensor([[0, 1, 2, 3, 4, 7, 8, 8191, 9000]])
    candidate = torch.tensor([[-1, 0, 5, 6, 7, 8, 9, 10, 49]])
    table = (order, candidate, distance)
    expected = [
        naive.table_state(o, d)
        for o, d in zip(order[0].tolist(), distance[0].tolist(), strict=True)
    ]
    state = embedding.state(type(lookup_document_table(order))(*table))
    assert state[0].tolist() == expected
    assert expected[0] == 56
    assert expected[-1] == 3 * 14 + 13
    assert expected[1] == 0
    assert expected[7] == 3 * 14 + int(math.log2(8191))


def test_bigram_hash_equals_naive_and_spreads():
    ids = torch.randint(0, 8192, (2, 4000), generator=torch.Generator().manual_seed(4))
    rows = hash_bigrams(ids, 65_536)
    first = ids[0].tolist()
    pairs = itertools.pairwise(first)
    assert rows[0].tolist() == [naive.bigram_row(a, b, 65_536) for a, b in pairs]
    assert rows.unique().numel() > 7400  # 7,998 bigrams at random in 65,536 rows: 7,530


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.zeros(3, dtype=torch.long)}, r"\[rows, length\]"),
        ({"input_ids": torch.zeros(1, 3)}, "integers"),
        ({"input_ids": torch.zeros(1, 3, dtype=torch.long), "max_order": 9}, "1 to 8"),
        ({"input_ids": torch.zeros(1, 3, dtype=torch.long), "reach": 0}, "at least 1"),
        (
            {
                "input_ids": torch.zeros(1, 3, dtype=torch.long),
                "segment_ids": torch.zeros(1, 2, dtype=torch.long),
            },
            "segment_ids",
        ),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        lookup_document_table(**arguments)
