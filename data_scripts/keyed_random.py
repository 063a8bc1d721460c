"""Random numbers that are a pure function of their keys.

Every random choice in the data (the permutation of chunks, table dropout, the controls' donors)
is keyed by what it belongs to, for example (seed, chunk, row), rather than drawn from a stream.
So it does not depend on batch size, number of processes, restarts, or numpy's version.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def _mix(state: np.ndarray) -> np.ndarray:
    """The output function of splitmix64 (Steele et al. 2014), element by element."""
    state = (state ^ (state >> np.uint64(30))) * _MULTIPLIER_1
    state = (state ^ (state >> np.uint64(27))) * _MULTIPLIER_2
    return state ^ (state >> np.uint64(31))


def keyed_bits(*keys: npt.ArrayLike) -> np.ndarray:
    """64 random bits for each combination of keys.

    Args:
        *keys: integers or integer arrays; they broadcast against each other. Their order matters.

    Returns:
        uint64 array in the broadcast shape of the keys.
    """
    state = np.zeros(np.broadcast_shapes(*(np.shape(key) for key in keys)), np.uint64)
    with np.errstate(over="ignore"):
        for key in keys:
            word = np.asarray(key).astype(np.int64).view(np.uint64)
            state = _mix((state ^ word) + _INCREMENT)
    return state


def keyed_uniform(*keys: npt.ArrayLike) -> np.ndarray:
    """Uniform float64 in [0, 1), with 53 random bits, for each combination of keys."""
    return (keyed_bits(*keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def keyed_permutation(length: int, seed: int) -> np.ndarray:
    """A permutation of `range(length)` that depends on the seed alone: int64 [length]."""
    return np.argsort(keyed_bits(seed, np.arange(length)), kind="stable")
