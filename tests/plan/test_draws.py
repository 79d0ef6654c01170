"""Random numbers of the searches: of the right distribution, and from the same state the same."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from spindle_cli.plan.search import draws

COUNT = 20_000


@numba.njit
def drawn(random: NDArray[np.int64], numbers: NDArray[np.float64]) -> None:
    for place in range(len(numbers)):
        numbers[place, 0] = draws.draw(random, 7)
        numbers[place, 1] = draws.share(random)
        numbers[place, 2] = draws.normal(random)


def test_whole_numbers_and_shares_are_alike_likely_and_normals_have_the_variance_1() -> None:
    """Bounds are five standard errors of a mean wide, and more."""
    numbers = np.zeros((COUNT, 3))
    drawn(draws.state_of(3), numbers)
    whole, shares, normals = numbers.T
    assert set(whole) == set(range(7))
    assert all(abs(np.mean(whole == number) - 1 / 7) < 0.0125 for number in range(7))
    assert shares.min() >= 0
    assert shares.max() < 1
    assert abs(shares.mean() - 1 / 2) < 0.0105
    assert abs(normals.mean()) < 0.036
    assert abs(normals.var() - 1) < 0.05
    assert abs(np.mean(np.abs(normals) < 1) - 0.6827) < 0.017
    again = np.zeros((COUNT, 3))
    drawn(draws.state_of(3), again)
    assert (again == numbers).all()
