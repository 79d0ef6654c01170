"""Plans that leave nodes idle, where links to more nodes cost more than these bring.

On one type parts are whole groups of nodes: nodes of one group are alike, and what a schedule on some of them
gains is small beside a second search of all. No schedule of whole batches on n devices ends before the work
by the allocations that take least of the devices' time, over n. Parts for which that, and then the linear
program, is below the best iteration so far are planned for, where memory is short only if a quick plan comes
near.

On several types parts are so many nodes of each group. No schedule of whole batches in one ends before

    sum_m L_m min_a T_m(a) (sum_k p_k n_k(a)) / sum_k p_k N_k

for any prices p of a second of a device of type k: all that its N_k devices have to do is worth as much at
least. Parts whose bound is above the best iteration so far are left. Of the others, those that are best for
one MetaOp after another are planned for by themselves, by what plans for one type if they have one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf, isinf
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.find import PlanResult
from spindle_cli.plan.best.parts import Part, groups_of, on_all, parts_of, with_idle
from spindle_cli.plan.best.request import PlanRequest
from spindle_cli.plan.bound.bound import Bound, lower_bound
from spindle_cli.plan.bound.pricing import worth
from spindle_cli.plan.pipelines.candidates import may_gain
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import WORTH, Node, Point, Problem
from spindle_cli.plan.schedule import Candidate
from spindle_cli.plan.search.evaluate import EvaluatedCandidate, evaluate_as_placed
from spindle_cli.plan.search.memory_fallback import NEAR
from spindle_cli.plan.search.posed import NO_SEARCH
from spindle_cli.plan.strategies.baselines import in_turn
from spindle_cli.profile.types import Profile

# Most parts whose bound is worked out, the largest first.
MOST_PARTS = 2
# On several types: most parts that get a quick plan, of those that could be fastest; and how many a search.
MOST_PLANNED, MOST_SEARCHED = 48, 2
TOO_SLOW = "sums over the links to more nodes would take longer than these save"

# The best plan for a cluster of what is asked for; None: nothing fits.
Find = Callable[[Cluster, PlanRequest], PlanResult | None]


def or_on_fewer(
    profile: Profile, cluster: Cluster, request: PlanRequest, whole: PlanResult, find: Find
) -> PlanResult:
    """A plan, or one that leaves nodes of one type idle and is shorter by `WORTH`.

    Args:
        whole: the best plan of those that may use all devices.
        find: plans for a part of the cluster.
    """
    is_free = request.strategy == "spindle" and request.effort != NO_SEARCH and not request.shares_out_more
    if not is_free or len(cluster.nodes) == 1:
        return whole
    best, problem = whole, make_problem(profile, cluster)
    if not may_gain(whole.best.prediction, lower_bound(problem).lower_bound_s):
        return whole
    for part in _parts(problem, (1 - WORTH) * whole.best.prediction.iteration_s):
        best_s = best.best.prediction.iteration_s
        try:
            if lower_bound(make_problem(profile, part.cluster)).lower_bound_s >= (1 - WORTH) * best_s:
                continue
            # Where memory is short a search takes long, and what makes it so shows in a quick plan.
            if whole.is_short and not _comes_near(
                find(part.cluster, replace(request, effort=NO_SEARCH)), best_s
            ):
                continue
            searched = find(part.cluster, request)
        except NoPlanError:  # an op has no allocation there
            continue
        moved = None if searched is None else on_all(profile, cluster, part, searched)
        if moved is not None and moved.best.prediction.iteration_s < (1 - WORTH) * best_s:
            best = with_idle(moved, cluster.num_devices - len(part.devices), TOO_SLOW)
    return best


def _comes_near(quick: PlanResult | None, than_s: float) -> bool:
    return quick is not None and quick.best.prediction.iteration_s <= NEAR * than_s


def _parts(problem: Problem, than_s: float) -> list[Part]:
    """Parts in which a schedule could end earlier."""
    work_s = sum(
        node.num_ops * min(point.num_devices * point.op_s for point in node.points) for node in problem.nodes
    )
    parts = [part for part in groups_of(problem.cluster) if work_s / len(part.devices) < than_s]
    return sorted(parts, key=lambda part: -len(part.devices))[:MOST_PARTS]


Mask: TypeAlias = npt.NDArray[np.bool_]
# Plans for some cluster by itself.
PlanFor: TypeAlias = Callable[[Cluster], PlanResult | None]


def on_best_part(problem: Problem, bound: Bound, whole: PlanResult, plan_for: PlanFor) -> PlanResult:
    """The best plan, also of those that leave nodes idle.

    A search is taken to gain as much on a part, over one MetaOp after another, as it did on all devices.

    Args:
        whole: the best plan of those that may use all devices.
        plan_for: what plans for a part.
    """
    whole_s = whole.best.prediction.iteration_s
    enough_s = (1 - WORTH) * whole_s
    parts = parts_that_could_be_faster(problem, bound, enough_s)[:MOST_PLANNED]
    plain = _in_turn(problem, _everything(problem)) if parts else None
    gain = 1.0 if plain is None else min(1.0, whole_s / plain.prediction.iteration_s)
    best = whole
    for evaluated, part in _fastest_in_turn(problem, parts, enough_s / gain):
        if gain * evaluated.prediction.iteration_s < enough_s:
            planned = _planned(problem, part, plan_for)
            best = best if planned is None or best.best.rank() <= planned.best.rank() else planned
    return best if best.best.prediction.iteration_s < enough_s else _with_idle_said(problem, whole)


def _with_idle_said(problem: Problem, whole: PlanResult) -> PlanResult:
    """Note in a plan that it leaves nodes idle, if these would compute if sums took no time."""
    candidate = _candidate_in_turn(problem, _everything(problem))
    busy = _nodes_of(problem, (slice_.devices for slice_ in whole.best.slices))
    wanted = set() if candidate is None else _nodes_of(problem, candidate.devices or ())
    idle = sum(problem.cluster.node_sizes[node] for node in wanted - busy)
    return with_idle(whole, idle, TOO_SLOW) if idle else whole


def _nodes_of(problem: Problem, devices: Iterable[Sequence[int]]) -> set[int]:
    return {problem.cluster.node_of[device] for some_devices in devices for device in some_devices}


def _everything(problem: Problem) -> Part:
    return Part(problem.cluster, tuple(range(problem.num_devices)))


def _fastest_in_turn(
    problem: Problem, parts: Sequence[Part], within_s: float
) -> list[tuple[EvaluatedCandidate, Part]]:
    """The best parts for one MetaOp after another, as many as are searched for longer, the best first; of
    those that take `within_s` at most.

    An iteration takes at least as long as its schedule, so what cannot be one of these is not evaluated.
    """
    candidates = [
        (candidate, part) for part in parts if (candidate := _candidate_in_turn(problem, part)) is not None
    ]
    fastest: list[tuple[EvaluatedCandidate, Part]] = []
    for candidate, part in sorted(candidates, key=lambda item: item[0].pieces[-1].end_s):
        if candidate.pieces[-1].end_s > within_s:
            break
        evaluated = evaluate_as_placed(problem, candidate)
        if evaluated is not None:
            fastest.append((evaluated, part))
            fastest = sorted(fastest, key=lambda item: item[0].rank())[:MOST_SEARCHED]
            if len(fastest) == MOST_SEARCHED:
                within_s = min(within_s, fastest[-1][0].prediction.iteration_s)
    return fastest


def _in_turn(problem: Problem, part: Part) -> EvaluatedCandidate | None:
    """One MetaOp after another, each on the fastest allocation that the part has; None if that does not fit,
    or one has none.
    """
    candidate = _candidate_in_turn(problem, part)
    return None if candidate is None else evaluate_as_placed(problem, candidate)


def _candidate_in_turn(problem: Problem, part: Part) -> Candidate | None:
    room = _room(problem, part)

    def fastest(_: Problem, node: Node) -> Point | None:
        return next((point for point in reversed(node.points) if _has_room(point, room)), None)

    return in_turn(problem, "spindle", part.devices, fastest)


def _room(problem: Problem, part: Part) -> tuple[int, ...]:
    """Devices of each type of the whole cluster."""
    return tuple(part.cluster.num_of_type.get(kind, 0) for kind in problem.cluster.types)


def _has_room(point: Point, room: Sequence[int]) -> bool:
    return all(count <= most for count, most in zip(point.counts or (), room, strict=True))


def parts_that_could_be_faster(problem: Problem, bound: Bound, than_s: float) -> list[Part]:
    """Parts in which a schedule could end earlier, those first in which it could end first."""
    costs = [_Costs(problem, prices) for prices in (bound.prices, _prices_by_speed(problem))]
    parts = []
    for part in parts_of(problem.cluster):
        bound_s = max(cost.bound_s(_room(problem, part)) for cost in costs)
        if bound_s < than_s:
            parts.append(replace(part, bound_s=bound_s))
    return sorted(parts, key=lambda part: (part.bound_s, len(part.devices)))


def _prices_by_speed(problem: Problem) -> tuple[float, ...]:
    """A second of a device of each type for what of the workload it does by itself: the program's prices are
    nothing where a chain, and not the number of devices, is what keeps it from ending earlier.
    """
    kinds = range(len(problem.cluster.types))
    alone_s = [
        _Costs(problem, [float(kind == type_number) for kind in kinds]).of_one_type(type_number)
        for type_number in kinds
    ]
    return tuple(0.0 if isinf(seconds) else 1 / seconds for seconds in alone_s)


class _Costs:
    """What all ops are worth by some prices, of any number of parts."""

    def __init__(self, problem: Problem, prices: Sequence[float]) -> None:
        self._prices = prices
        self._num_ops = [node.num_ops for node in problem.nodes]
        self._counts = [np.array([point.counts for point in node.points]) for node in problem.nodes]
        self._worth = [np.array([worth(point, prices) for point in node.points]) for node in problem.nodes]

    def bound_s(self, room: Sequence[int]) -> float:
        """Seconds before which no schedule with so many devices of each type ends."""
        of_devices = sum(price * count for price, count in zip(self._prices, room, strict=True))
        if of_devices <= 0:
            return 0.0
        masks = [np.all(counts <= np.array(room), axis=1) for counts in self._counts]
        return self._least(masks) / of_devices

    def of_one_type(self, kind: int) -> float:
        """What all ops are worth at least on devices of one type; infinite where an op has no allocation."""
        return self._least([counts.sum(axis=1) == counts[:, kind] for counts in self._counts])

    def _least(self, has_room: Sequence[Mask]) -> float:
        nodes = zip(self._num_ops, self._worth, has_room, strict=True)
        return sum(ops * float(np.min(costs, where=mask, initial=inf)) for ops, costs, mask in nodes)


def _planned(problem: Problem, part: Part, plan_for: PlanFor) -> PlanResult | None:
    """The plan for a part as one of the whole cluster; None if nothing fits."""
    try:
        of_part = plan_for(part.cluster)
    except NoPlanError:  # an op has no allocation there, which is no reason to have no plan
        return None
    moved = None if of_part is None else on_all(problem.profile, problem.cluster, part, of_part)
    return None if moved is None else with_idle(moved, problem.num_devices - len(part.devices), TOO_SLOW)
