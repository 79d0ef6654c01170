"""A bound of all schedules on several types of device, however batches are cut.

Every sample of every MetaOp runs on some type, and takes there at least the time u_mk of a device in the
share that takes least for each. With prices l_k of the types' time, sum over k of N_k l_k = 1,

    C >= sum over m of L_m B_m min over k of l_k u_mk

whatever the prices; the linear program finds those for which it is largest. And no schedule is shorter than
its longest chain of MetaOps, each on the share that is through first on any type.
"""

from __future__ import annotations

from math import inf

import numpy as np

from spindle_cli.plan.bound.bound import FLOAT_SLACK
from spindle_cli.plan.bound.solver import LinearProgram
from spindle_cli.plan.cutting.shares import share_times
from spindle_cli.plan.problem import Problem


def mixed_lower_bound_any_s(problem: Problem) -> float:
    """Seconds before which no schedule ends."""
    types = problem.cluster.types
    numbers = [problem.cluster.num_of_type[kind] for kind in types]
    work_s: list[list[float]] = []
    longest_s = [0.0] * len(problem.nodes)
    for i in problem.order:
        node = problem.nodes[i]
        of_types, shortest_s = [inf] * len(types), inf
        for times in share_times(node.metaop, problem.cluster):
            for number, each in enumerate(times.of_types):
                samples = np.arange(1, len(each.op_s))
                if not np.isfinite(each.op_s[1:]).any():
                    continue
                of_types[number] = min(of_types[number], times.tp * float(np.min(each.op_s[1:] / samples)))
                shortest_s = min(shortest_s, float(np.min(each.op_s[1:])))
        work_s.append([node.num_ops * node.metaop.batch_size * sample_s for sample_s in of_types])
        before_s = max((longest_s[j] for j in node.inputs), default=0.0)
        longest_s[i] = before_s + node.num_ops * shortest_s
    return max(_work_s(work_s, numbers), *longest_s) * (1 - FLOAT_SLACK)


def _work_s(work_s: list[list[float]], numbers: list[int]) -> float:
    """Device-seconds of each MetaOp on each type, over the devices, each where that ends soonest."""
    unit_s = sum(min(each) for each in work_s)
    program = LinearProgram("work")
    end = program.variable("C")
    rows = [{end: -float(number)} for number in numbers]
    for m, of_types in enumerate(work_s):
        shares = {}
        for k, seconds in enumerate(of_types):
            if seconds < inf:
                shares[k] = program.variable(f"y_{m}_{k}")
                rows[k][shares[k]] = seconds / unit_s
        program.equal(f"all_{m}", dict.fromkeys(shares.values(), 1.0), 1.0)
    for k, row in enumerate(rows):
        program.at_most(f"devices_{k}", row, 0.0)
    program.minimise({end: 1.0})
    duals = program.solve().duals
    prices = [abs(duals[f"devices_{k}"]) for k in range(len(numbers))]
    whole = sum(number * price for number, price in zip(numbers, prices, strict=True))
    if not whole:
        return 0.0
    return (
        sum(
            min(price * seconds for price, seconds in zip(prices, each, strict=True) if seconds < inf)
            for each in work_s
        )
        / whole
    )
