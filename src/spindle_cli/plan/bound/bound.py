"""The linear program over the whole graph: a lower bound on every schedule, and the allocation it rests on.

Sets        MetaOps m with L_m ops; A_m, the valid numbers of devices of m; E, the edges; N devices.
Data        T_m(n), seconds of one op of m on n devices.
Variables   x[m,n] >= 0, ops of m that run on n devices; s[m] >= 0, start of m; C, end of the iteration
(seconds).

    minimise C
    ops[m]        every op is run               sum_n x[m,n] = L_m
    end[m]        m runs in sequence            s[m] + sum_n T_m(n) x[m,n] <= C         (m without consumers)
    edge[i,j]     producers come first          s[i] + sum_n T_i(n) x[i,n] <= s[j]      for (i,j) in E
    devices       devices are limited           sum_m sum_n n T_m(n) x[m,n] <= N C

Seconds are divided by the problem's `serial_s` inside the program, so that the solver's tolerances mean
something.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spindle_cli.plan.bound.solver import LinearProgram
from spindle_cli.plan.problem import Node, Point, Problem

# Above what adding up a few hundred floats can be off by.
FLOAT_SLACK = 1e-12


@dataclass(frozen=True)
class Bound:
    """The program's optimum.

    Attributes:
        lower_bound_s: no schedule ends earlier.
        ops: for each node, (point, ops on it) of its allocations with a positive number of ops, ascending in
            devices.
        start_s: start of each node in the optimum.
        device_value_s: seconds by which the bound falls per device added (dual of `devices`).
        critical: for each node, seconds of bound per second added to it (dual of its precedence rows).
    """

    lower_bound_s: float
    ops: tuple[tuple[tuple[Point, float], ...], ...]
    start_s: tuple[float, ...]
    device_value_s: float
    critical: tuple[float, ...]


def lower_bound(problem: Problem) -> Bound:
    """Solve the program of this module.

    Raises:
        SolverError: the solver failed (never for a valid problem).
    """
    unit_s = problem.serial_s
    program = LinearProgram("allocation")
    end = program.variable("C")
    starts = [program.variable(f"s_{node.index}") for node in problem.nodes]
    hulls = [hull_points(node) for node in problem.nodes]
    ops = [[program.variable(f"x_{i}_{k}") for k in range(len(hull))] for i, hull in enumerate(hulls)]
    program.minimise({end: 1.0})

    devices = {end: -float(problem.num_devices)}
    for node, hull, variables in zip(problem.nodes, hulls, ops, strict=True):
        i = node.index
        program.equal(f"ops_{i}", dict.fromkeys(variables, 1.0), node.num_ops)
        finish = {x: point.op_s / unit_s for x, point in zip(variables, hull, strict=True)} | {starts[i]: 1.0}
        if not node.consumers:
            program.at_most(f"end_{i}", finish | {end: -1.0}, 0.0)
        for j in node.consumers:
            program.at_most(f"edge_{i}_{j}", finish | {starts[j]: -1.0}, 0.0)
        devices |= {
            x: point.num_devices * point.op_s / unit_s for x, point in zip(variables, hull, strict=True)
        }
    program.at_most("devices", devices, 0.0)

    solution = program.solve()
    end_s = solution.objective * unit_s
    flow = [_flow(node, solution.duals) for node in problem.nodes]
    device_price = abs(solution.duals["devices"])
    return Bound(
        lower_bound_s=_certified_s(problem, solution.duals, flow, device_price),
        ops=tuple(
            tuple(
                (point, solution.values[f"x_{i}_{k}"])
                for k, point in enumerate(hull)
                if solution.values[f"x_{i}_{k}"] > 1e-7
            )
            for i, hull in enumerate(hulls)
        ),
        start_s=tuple(solution.values[f"s_{i}"] * unit_s for i in range(len(hulls))),
        device_value_s=device_price * end_s,
        critical=tuple(flow),
    )


def hull_points(node: Node) -> tuple[Point, ...]:
    """The points on the lower convex hull of (seconds, device-seconds) per op: an optimum needs no other."""
    hull: list[Point] = []
    for point in reversed(node.points):  # ascending in seconds
        if hull and point.num_devices * point.op_s >= hull[-1].num_devices * hull[-1].op_s:
            continue  # slower and no cheaper
        while len(hull) >= 2 and _above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return tuple(reversed(hull))


def _above(left: Point, middle: Point, right: Point) -> bool:
    """Whether `middle` lies on or above the line from `left` to `right` in (seconds, device-seconds)."""
    run, rise = right.op_s - left.op_s, right.num_devices * right.op_s - left.num_devices * left.op_s
    height = middle.num_devices * middle.op_s - left.num_devices * left.op_s
    return height * run >= rise * (middle.op_s - left.op_s)


def _flow(node: Node, duals: Mapping[str, float]) -> float:
    if not node.consumers:
        return abs(duals[f"end_{node.index}"])
    return sum(abs(duals[f"edge_{node.index}_{j}"]) for j in node.consumers)


def _certified_s(
    problem: Problem, duals: Mapping[str, float], flow: Sequence[float], device_price: float
) -> float:
    """The Lagrangian bound of the dual values: true whatever the solver's tolerances, unlike its objective.

    With prices p of a device-second and f[i] of a second of i's duration, every schedule that ends by U has
    C >= sum_m L_m min_n T_m(n) (p n + f[m]), less U times what the dual values break their own constraints
    by: at most as much flow leaves a MetaOp as enters it, and N p plus the flow to the end is 1.
    """
    entering = [0.0] * len(problem.nodes)
    to_end = 0.0
    for node in problem.nodes:
        for j in node.consumers:
            entering[j] += abs(duals[f"edge_{node.index}_{j}"])
        if not node.consumers:
            to_end += flow[node.index]
    broken = sum(max(0.0, into - out) for into, out in zip(entering, flow, strict=True))
    broken += max(0.0, problem.num_devices * device_price + to_end - 1.0)
    priced_s = sum(
        node.num_ops
        * min(point.op_s * (device_price * point.num_devices + flow[node.index]) for point in node.points)
        for node in problem.nodes
    )
    return (priced_s - broken * problem.serial_s) * (1 - FLOAT_SLACK)
