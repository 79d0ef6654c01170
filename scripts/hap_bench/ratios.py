"""The best ratios for a program, by HAP's linear program: its variables are each device's ratio and, of each
step, the seconds of the slowest device's compute and of what moves; devices of one type have one ratio.

    minimise sum_i (P_i + Q_i)
    P_i >= seconds that step i computes on type k, for every k
    Q_i >= seconds that step i moves, padded to the ratio of type k, for every k
    sum_k n_k b_k = 1
"""

from __future__ import annotations

from collections.abc import Sequence

from hap_bench.program import Moving, Prices, Step
from spindle_cli.plan.bound.solver import LinearProgram


def best_ratios(steps: Sequence[Step], prices: Prices) -> tuple[float, ...]:
    """Of each type, a device's ratio."""
    program = LinearProgram("ratios")
    types = range(len(prices.counts))
    ratios = [program.variable(f"b_{k}") for k in types]
    computed = [program.variable(f"P_{i}") for i in range(len(steps))]
    moved = [program.variable(f"Q_{i}") for i in range(len(steps))]
    program.minimise(dict.fromkeys((*computed, *moved), 1.0))
    program.equal("all", dict(zip(ratios, map(float, prices.counts), strict=True)), 1.0)
    for i, step in enumerate(steps):
        padded = [each for each in step.moved.items() if each[0] is not Moving.SUM]
        padded_s = prices.cluster.num_devices * sum(prices.moved_s(*each) for each in padded)
        for k, speed in enumerate(prices.flops_per_s):
            cut_s, whole_s = step.cut_flops / speed, step.whole_flops / speed
            program.at_most(f"P_{i}_{k}", {ratios[k]: cut_s, computed[i]: -1.0}, -whole_s)
            program.at_most(f"Q_{i}_{k}", {ratios[k]: padded_s, moved[i]: -1.0}, 0.0)
    values = program.solve().values
    return tuple(max(0.0, values[f"b_{k}"]) for k in types)
