"""Random changes of a guide's numbers, that the searches of schedules draw."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from random import Random


def scaled_at_random(values: Sequence[float], spread: float, random: Random) -> tuple[float, ...]:
    """One of the values multiplied by a log-normal factor."""
    place = random.randrange(len(values))
    return (*values[:place], values[place] * exp(random.gauss(0, spread)), *values[place + 1 :])
