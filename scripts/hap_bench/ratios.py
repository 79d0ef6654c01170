"""The best ratios for a program, by HAP's linear program: its variables are each device's ratio and, of each
step, the seconds of the slowest device's compute and of what moves; devices of one type have one ratio.

    minimise sum_i (P_i + Q_i)
    P_i >= seconds that step i computes on type k, for every k
    Q_i >= seconds that step i moves, padded to the ratio of type k, for every k
    sum_k n_k b_k = 1
"""

from __future__ import annotations

from collections.abc import Sequence

import pulp

from hap_bench.program import Moving, Prices, Step


def best_ratios(program: Sequence[Step], prices: Prices) -> tuple[float, ...]:
    """Of each type, a device's ratio."""
    model = pulp.LpProblem("ratios", pulp.LpMinimize)
    types = range(len(prices.counts))
    ratios = [pulp.LpVariable(f"b_{k}", 0, 1) for k in types]
    computed = [pulp.LpVariable(f"P_{i}", 0) for i in range(len(program))]
    moved = [pulp.LpVariable(f"Q_{i}", 0) for i in range(len(program))]
    model += pulp.lpSum(computed) + pulp.lpSum(moved)
    model += pulp.lpSum(n * b for n, b in zip(prices.counts, ratios, strict=True)) == 1
    for step, own_s, moving_s in zip(program, computed, moved, strict=True):
        padded_s = prices.cluster.num_devices * sum(
            prices.moved_s(kind, num_bytes)
            for kind, num_bytes in step.moved.items()
            if kind is not Moving.SUM
        )
        for k in types:
            speed = prices.flops_per_s[k]
            model += own_s >= step.cut_flops / speed * ratios[k] + step.whole_flops / speed
            model += moving_s >= padded_s * ratios[k]
    status = model.solve(pulp.PULP_CBC_CMD(msg=False))
    if pulp.LpStatus[status] != "Optimal":
        raise RuntimeError(f"no ratios: the solver says {pulp.LpStatus[status]}")
    return tuple(max(0.0, ratio.value()) for ratio in ratios)
