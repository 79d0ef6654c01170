"""The cheapest program of a chain for given ratios, by A* over how many operators are done and the layout."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate, count

from hap_bench.operators import Operator
from hap_bench.program import Layout, Prices, Step, steps_from

# How a batch arrives: each device loads its own samples.
START = Layout.SAMPLES


def cheapest(
    operators: Sequence[Operator], batch_size: int, prices: Prices, ratios: tuple[float, ...]
) -> tuple[Step, ...]:
    """The program.

    What is left to compute, if nothing had to move, is a bound that is never too high: so the first program
    that is complete is the cheapest.
    """
    left_s = _left_s(operators, batch_size, prices, ratios)
    order = count()
    heap: list[tuple[float, int, float, int, Layout, tuple[Step, ...]]] = []
    heapq.heappush(heap, (left_s[0], next(order), 0.0, 0, START, ()))
    done: set[tuple[int, Layout]] = set()
    while True:
        _, _, cost_s, place, layout, steps = heapq.heappop(heap)
        if place == len(operators):
            return steps
        if (place, layout) in done:
            continue
        done.add((place, layout))
        for step in steps_from(layout, operators[place], batch_size):
            next_s = cost_s + prices.step_s(step, ratios)
            bound_s = next_s + left_s[place + 1]
            heapq.heappush(heap, (bound_s, next(order), next_s, place + 1, step.given, (*steps, step)))


def _left_s(
    operators: Sequence[Operator], batch_size: int, prices: Prices, ratios: tuple[float, ...]
) -> list[float]:
    """From each operator on, what is computed at least."""
    least_s = [
        min(
            prices.computed_s(step, ratios)
            for layout in Layout
            for step in steps_from(layout, operator, batch_size)
        )
        for operator in operators
    ]
    return [*reversed(list(accumulate(reversed(least_s)))), 0.0]
