"""Random numbers in compiled loops, the same on every machine."""

from __future__ import annotations

from math import cos, log, pi, sqrt

import numpy as np
from numpy.typing import NDArray

from spindle_cli.plan.compiled import compiled

# What a state keeps of its highest bits, of which a generator of this kind has the best.
_BITS = 30


def state_of(seed: int) -> NDArray[np.int64]:
    """The state of a generator's beginning: [1]."""
    return np.array([seed], np.int64)


@compiled
def draw(random: NDArray[np.int64], below: int) -> int:
    """A number from 0 on, below another, of a linear congruential generator (Knuth, MMIX)."""
    state = random[0] * 6364136223846793005 + 1442695040888963407
    random[0] = state
    return int(((state >> 33) & 0x3FFFFFFF) % below)


@compiled
def share(random: NDArray[np.int64]) -> float:
    """A number from 0 on, below 1."""
    return draw(random, 1 << _BITS) / (1 << _BITS)


@compiled
def normal(random: NDArray[np.int64]) -> float:
    """A number of the normal distribution (Box and Muller, Annals of Mathematical Statistics 29, 1958)."""
    radius = sqrt(-2 * log(1 - share(random)))
    return radius * cos(2 * pi * share(random))
