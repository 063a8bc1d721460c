"""ROOFLINE.md says what the code computes."""

from pathlib import Path

import pytest

from benchmarks import roofline

PAGE = Path(roofline.__file__).with_name("ROOFLINE.md").read_text()


def test_the_page_holds_the_tables_of_today():
    assert roofline.update_table() in PAGE
    assert roofline.hours_table() in PAGE


def test_floor_of_b_by_hand():
    floor = roofline.floor("b")
    assert floor.flops == pytest.approx(2.1709e8 * 4 / 3 * 2**19, rel=1e-4)
    rtx = roofline.DEVICES[1]
    assert floor.seconds(rtx) == pytest.approx(floor.flops / 165.2e12)
    h200 = roofline.DEVICES[0]
    assert floor.seconds(h200) == pytest.approx(floor.num_bytes / 4.3e12)
