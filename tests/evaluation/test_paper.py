"""The paper's numbers as typed in: every relation between its tables that its text states."""

from __future__ import annotations

import math

import pytest

from evaluation.class_bpb.statistics import BY_BAND, BY_MATCH, BY_TABLE_STATE
from evaluation.paper import beside, by_seed, paper_gain, paper_results, paper_rows
from modeling_doctab import DocTabConfig
from modeling_doctab.accounting import count_parameters, flops_per_token

BPB = {
    (row["arm"], seed, name): values[i]
    for row in paper_rows(1)
    for name, values in row["bits_per_byte"].items()
    for i, seed in enumerate(row["seeds"])
}
ROUNDING = 0.00006  # half a unit of the gain's last digit, and of two values of five digits


def test_the_shape_of_the_tables() -> None:
    rows = [len(paper_rows(number)) for number in range(1, 8)]
    assert rows == [14, 4, 7, 8, 6, 5, 3]
    assert len(BPB) == (8 * 2 + 6) * 4
    assert paper_results()["contrast_deviation"] == 0.002


@pytest.mark.parametrize("row", paper_rows(2), ids=lambda row: row["arm"])
def test_gains_of_table_2_are_differences_of_table_1(row) -> None:
    for name, gains in row["gain"].items():
        for gain, seed in zip(gains, row["seeds"], strict=True):
            difference = BPB[row["baseline"], seed, name] - BPB[row["arm"], seed, name]
            assert gain == pytest.approx(difference, abs=ROUNDING)
    for (low, high), gain in zip(row["interval"], row["gain"]["confirmation"], strict=True):
        assert 0 < low < gain < high


@pytest.mark.parametrize(("number", "partition"), [(4, BY_BAND), (5, BY_TABLE_STATE)])
@pytest.mark.parametrize("arm", ["b_table", "lg512_table", "a_table"])
def test_class_terms_sum_to_the_gain(number, partition, arm) -> None:
    rows = paper_rows(number)
    assert {row["group"] for row in rows} <= set(partition.names)
    baseline = arm.removesuffix("_table")
    for i, seed in enumerate((44, 45)[: len(rows[0]["gain"][arm])]):
        total = math.fsum(row["gain"][arm][i] for row in rows)
        difference = BPB[baseline, seed, "dev_val"] - BPB[arm, seed, "dev_val"]
        # Each of 6 or 8 terms is rounded to .0001; Table 5 leaves out two rows of at most .0001.
        assert total == pytest.approx(difference, abs=0.0004 if number == 4 else 0.0006)
    shares = math.fsum(row["share"] for row in rows)
    assert shares == pytest.approx(1.0 if number == 4 else 0.98, abs=0.0015)


def test_table_5_is_within_table_4() -> None:
    order = {row["group"]: row for row in paper_rows(4)}
    states = {row["group"]: row for row in paper_rows(5)}
    for arm in ("b_table", "lg512_table", "a_table"):
        for level in ("order_0", "order_1"):
            parts = [row["gain"][arm][0] for group, row in states.items() if level in group]
            # Roundings of three values, and the row of order 1 without a match (.0001).
            assert math.fsum(parts) == pytest.approx(order[level]["gain"][arm][0], abs=0.00026)


def test_table_6_sums_to_the_packed_gain() -> None:
    rows, packed = paper_rows(6), paper_results()["table_6"]["bits_per_byte"]
    assert {row["group"] for row in rows} == set(BY_MATCH.names)
    assert math.fsum(row["share"] for row in rows) == pytest.approx(1, abs=0.0015)
    for name in ("val", "heldout"):
        total = math.fsum(row["gain"][name] for row in rows)
        difference = packed["packed"][name] - packed["packed_table"][name]
        assert total == pytest.approx(difference, abs=0.0003)  # five roundings


@pytest.mark.parametrize("row", paper_rows(7), ids=lambda row: str(row["width"]))
def test_gains_of_table_7_are_differences(row) -> None:
    for name, gain in row["gain"].items():
        base, arm = row["baseline_bits_per_byte"][name], row["bits_per_byte"][name]
        assert gain == pytest.approx(base - arm, abs=ROUNDING)
        if row["width"] == 512:
            assert (base, arm) == (BPB["lg512", 44, name], BPB["lg512_table", 44, name])


def test_costs_are_the_formula_s() -> None:
    layouts = {
        "b": {},
        "lg512": {"max_position_embeddings": 8192, "window_pattern": "S", "short_window": 512},
        "a": {"max_position_embeddings": 8192},
        "d": {"max_position_embeddings": 8192, "num_hidden_layers": 12},
    }
    costs = {row["arm"]: row for row in paper_rows(3)}
    sizes = {row["arm"]: row for row in paper_rows(1)}
    for arm, fields in layouts.items():
        config = DocTabConfig(document_table=False, **fields)
        flops = flops_per_token(config, config.max_position_embeddings)
        assert costs[arm]["flops_per_token"] == pytest.approx(flops, abs=0.005e8)
        assert sizes[arm]["flops_per_token"] == costs[arm]["flops_per_token"]
        millions = count_parameters(config) / 1e6
        assert sizes[arm]["parameters_millions"] == pytest.approx(millions, abs=0.05)
        # The paper prints 2.90 for B where 4/3 of the formula gives 2.895.
        with_recomputation = costs[arm]["flops_per_token_with_recomputation"]
        assert with_recomputation == pytest.approx(flops * 4 / 3, abs=0.006e8)


def test_text_and_tables_agree() -> None:
    text = paper_results()["text"]
    for name in ("dev_val", "dev_heldout", "confirmation"):
        base = BPB["a", 44, name]
        dropout = base - BPB["a_table_dropout", 44, name]
        assert text["dropout"]["gain"][name] == pytest.approx(dropout, abs=ROUNDING)
        for arm, gains in text["temperature"]["gain"].items():
            assert gains[name] == pytest.approx(base - BPB[arm, 44, name], abs=ROUNDING)
    for arm, gains in text["matched_flops"].items():
        for seed in (44, 45) if arm != "about" else ():
            gain = BPB["b_table", seed, "confirmation"] - BPB[arm, seed, "confirmation"]
            assert by_seed(gains, seed) == pytest.approx(gain, abs=ROUNDING)
            assert paper_gain(arm, "b_table", seed, "confirmation") == pytest.approx(gain)
    for arm, baselines in text["width"].items():
        for baseline, gains in baselines.items() if arm != "about" else ():
            for name, gain in gains.items():
                found = paper_gain(arm, baseline, 44, name)
                assert found == pytest.approx(gain, abs=ROUNDING)


def test_gains_of_pairs_that_no_table_lists() -> None:
    # Section 4.2, on the development sets.
    margins = {"dev_val": (0.0057, 0.0080), "dev_heldout": (0.0055, 0.0084)}
    for name, gains in margins.items():
        for seed, gain in zip((44, 45), gains, strict=True):
            assert paper_gain("lg512", "b_table", seed, name) == pytest.approx(gain, abs=ROUNDING)
    assert paper_gain("lg512_w768", "lg512_w768", 45, "dev_val") is None
    assert paper_gain("own", "b", 44, "dev_val") is None


def test_beside() -> None:
    assert beside(0.0125, 0.0126) == "+0.0125 / +0.0126 / -0.0001"
    assert beside(None, 1.06675, 5, signed=False) == "— / 1.06675 / —"
    assert beside(1.5, None, 1, signed=False) == "1.5 / — / —"
    assert (by_seed([1.0, 2.0], 45), by_seed([1.0], 45), by_seed(None, 44)) == (2.0, None, None)
