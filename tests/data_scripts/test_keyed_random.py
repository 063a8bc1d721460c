from __future__ import annotations

import numpy as np

from data_scripts.keyed_random import keyed_bits, keyed_permutation, keyed_uniform


def test_one_key_is_one_step_of_splitmix64():
    # The generator's published first output for seed 0.
    assert int(keyed_bits(0)) == 0xE220A8397B1DCDAF


def test_a_value_depends_on_its_keys_alone():
    whole = keyed_bits(3, np.arange(10)[:, None], np.arange(7)[None, :])
    assert whole.shape == (10, 7)
    assert int(keyed_bits(3, 4, 5)) == int(whole[4, 5])
    assert len(np.unique(whole)) == 70
    assert int(keyed_bits(3, 5, 4)) != int(whole[4, 5])
    assert int(keyed_bits(4, 4, 5)) != int(whole[4, 5])


def test_uniform():
    values = keyed_uniform(1, np.arange(20_000))
    assert values.min() >= 0
    assert values.max() < 1
    # Standard errors are 0.002 and 0.0006.
    assert abs(values.mean() - 1 / 2) < 0.01
    assert abs(values.var() - 1 / 12) < 0.003


def test_permutation():
    order = keyed_permutation(1000, 5)
    assert sorted(order.tolist()) == list(range(1000))
    assert order.tolist() == keyed_permutation(1000, 5).tolist()
    assert order.tolist() != keyed_permutation(1000, 6).tolist()
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.15  # standard error 0.03
