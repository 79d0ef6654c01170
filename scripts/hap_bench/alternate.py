"""Program and ratios in turn, each for the other as it is, until the program's price stops falling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hap_bench.operators import Operator
from hap_bench.program import Prices, Step
from hap_bench.ratios import best_ratios
from hap_bench.search import cheapest

MOST_ROUNDS = 20


@dataclass(frozen=True)
class Alternated:
    """What the alternation ends with.

    Attributes:
        ratios: of each type, a device's.
        price_s: what the program takes by HAP's own prices.
        rounds: searches until the price stopped falling.
    """

    program: tuple[Step, ...]
    ratios: tuple[float, ...]
    price_s: float
    rounds: int


def alternate(operators: Sequence[Operator], batch_size: int, prices: Prices) -> Alternated:
    """From ratios by speed."""
    whole = sum(n * speed for n, speed in zip(prices.counts, prices.flops_per_s, strict=True))
    ratios = tuple(speed / whole for speed in prices.flops_per_s)
    best: Alternated | None = None
    for rounds in range(1, MOST_ROUNDS + 1):
        program = cheapest(operators, batch_size, prices, ratios)
        ratios = best_ratios(program, prices)
        price_s = sum(prices.step_s(step, ratios) for step in program)
        if best is not None and price_s >= best.price_s * (1 - 1e-9):
            break
        best = Alternated(program, ratios, price_s, rounds)
    assert best is not None, "the first round has a program"
    return best
