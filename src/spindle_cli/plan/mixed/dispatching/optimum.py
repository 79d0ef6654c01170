"""On which of its allocations a MetaOp runs in the linear program over several types."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spindle_cli.plan.bound.pricing import Column
from spindle_cli.plan.problem import Point

# What the program runs fewer ops on is left out.
FEWEST_OPS = 0.3
# An allocation that takes more than so many times as long counts as further off, by so much for each time.
LATE, LATE_WEIGHT = 1.02, 3.0


def optimum_ops(
    points: Sequence[Point], used: Sequence[tuple[Column, float]], prices: Sequence[float]
) -> dict[int, float]:
    """By number of the allocation, how many ops run on it. The program's own may have numbers of devices that
    none of these has: each is taken for the nearest, by what the devices are worth that it has more or fewer.

    Args:
        prices: by type, of a second of a device; above 0.
    """
    counts = np.array([point.counts or () for point in points])
    op_s = np.array([point.op_s for point in points])
    found: dict[int, float] = {}
    for column, ops in used:
        if ops < FEWEST_OPS:
            continue
        own = np.array(column.counts)
        others = np.abs(counts - own) @ np.array(prices) / float(own @ np.array(prices))
        late = np.maximum(0.0, op_s / column.op_s - LATE)
        nearest = int(np.argmin(others + LATE_WEIGHT * late))
        found[nearest] = found.get(nearest, 0.0) + ops
    return found
