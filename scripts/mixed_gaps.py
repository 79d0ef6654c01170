"""Where compute above the bound comes from, on devices of several types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.profile.mixed.seen import seen_on
from spindle_cli.profile.types import Profile


@dataclass(frozen=True)
class Gap:
    """Of compute above the bound, as shares of the bound; together all of it.

    By the bound's prices of a second of a device and of a chain of ops the allocations that the planner lists
    cost a little more than those of the bound, which may be fractions of devices; what it chose costs more
    than the cheapest of them; and devices and chains wait.
    """

    listed: float
    chosen: float
    waiting: float

    def __str__(self) -> str:
        return (
            f"{self.listed:.1%} as no cheaper allocations are listed, {self.chosen:.1%} as cheaper ones are "
            f"not chosen, {self.waiting:.1%} of devices and chains that wait"
        )


def gap_of(plan: Plan, profile: Profile) -> Gap:
    """The parts of a plan's gap."""
    cluster = plan.cluster
    problem = make_problem(seen_on(profile, cluster), cluster)
    bound = lower_bound(problem)
    price = dict(zip(cluster.types, bound.prices, strict=True))

    def cost(node: int, seconds: float, types: Sequence[str]) -> float:
        return seconds * (sum(price[kind] for kind in types) + bound.critical[node])

    places = {node.metaop.name: node.index for node in problem.nodes}
    spent_s = sum(
        cost(places[piece.metaop], seconds_of(piece), [cluster.type_of[device] for device in piece.devices])
        for piece in plan.slices
    )
    cheapest_s = _cheapest_s(problem, bound.prices, bound.critical)
    least_s = plan.predicted.lower_bound_s
    return Gap(
        cheapest_s / least_s - 1,
        (spent_s - cheapest_s) / least_s,
        (plan.predicted.compute_s - spent_s) / least_s,
    )


def seconds_of(piece: Slice) -> float:
    """How long a slice runs forward and backward."""
    apart_s = 0.0
    if piece.backward_start_s is not None and piece.backward_end_s is not None:
        apart_s = piece.backward_end_s - piece.backward_start_s
    return piece.end_s - piece.start_s + apart_s


def _cheapest_s(problem: Problem, prices: Sequence[float], flow: Sequence[float]) -> float:
    """What all ops cost on the cheapest allocations that are listed."""

    def per_second(counts: Sequence[int] | None) -> float:
        return sum(price * count for price, count in zip(prices, counts or (), strict=True))

    return sum(
        node.num_ops
        * min(point.op_s * (per_second(point.counts) + flow[node.index]) for point in node.points)
        for node in problem.nodes
    )
