"""Plans for a part of a cluster: where sums over slow links cost more than the devices behind them bring, the
best plan leaves some nodes idle.

A part is so many nodes of each group. No schedule of whole batches in it ends before

    sum_m L_m min_a T_m(a) (sum_k p_k n_k(a)) / sum_k p_k N_k

for any prices p of a second of a device of type k: all that its N_k devices have to do is worth as much at
least. Parts whose bound is above the best iteration so far are left. Of the others, those that are best for
one MetaOp after another are planned for by themselves, by what plans for one type if they have one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, isinf
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.find import Found
from spindle_cli.plan.bound.bound import Bound
from spindle_cli.plan.mixed.baselines import in_turn
from spindle_cli.plan.problem import WORTH, Node, Point, Problem
from spindle_cli.plan.schedule import Draft
from spindle_cli.plan.search.judge import Judged, judge_as_placed, measure_as_they_are
from spindle_cli.plan.search.passes_apart import apart

# Numbers of nodes of a group that are tried, beside none and all.
NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Most parts that get a quick plan, of those that could be fastest; and how many of them a search.
MOST_PLANNED, MOST_SEARCHED = 48, 2


@dataclass(frozen=True)
class Part:
    """Some nodes of a cluster.

    Attributes:
        cluster: of these alone.
        devices: of the whole cluster, by their numbers in the part.
        bound_s: no schedule of whole batches in it ends earlier.
    """

    cluster: Cluster
    devices: tuple[int, ...]
    bound_s: float = 0.0


Mask: TypeAlias = npt.NDArray[np.bool_]
# Plans for some cluster by itself.
PlanFor: TypeAlias = Callable[[Cluster], Found | None]


def on_best_part(problem: Problem, bound: Bound, whole: Found, plan_for: PlanFor) -> Found:
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
    for judged, part in _fastest_in_turn(problem, parts, enough_s / gain):
        if gain * judged.prediction.iteration_s < enough_s:
            found = _planned(problem, part, plan_for)
            best = best if found is None or best.best.rank() <= found.best.rank() else found
    return best if best.best.prediction.iteration_s < enough_s else _with_idle_said(problem, whole)


def _with_idle_said(problem: Problem, whole: Found) -> Found:
    """Note in a plan that it leaves nodes idle, if these would compute if sums took no time."""
    draft = _draft_in_turn(problem, _everything(problem))
    busy = _nodes_of(problem, (piece.devices for piece in whole.best.slices))
    wanted = set() if draft is None else _nodes_of(problem, draft.devices or ())
    idle = sum(problem.cluster.node_sizes[node] for node in wanted - busy)
    return _noted(whole, idle) if idle else whole


def _nodes_of(problem: Problem, devices: Iterable[Sequence[int]]) -> set[int]:
    return {problem.cluster.node_of[device] for own in devices for device in own}


def _noted(found: Found, idle: int) -> Found:
    """With what is said of so many devices that stay idle."""
    stay = "1 device stays" if idle == 1 else f"{idle} devices stay"
    note = f"{stay} idle: sums over the links to more nodes would take longer than these save."
    return replace(found, note=note if found.note is None else f"{found.note} {note}")


def _everything(problem: Problem) -> Part:
    return Part(problem.cluster, tuple(range(problem.num_devices)))


def _fastest_in_turn(problem: Problem, parts: Sequence[Part], within_s: float) -> list[tuple[Judged, Part]]:
    """The best parts for one MetaOp after another, as many as are searched for longer, the best first; of
    those that take `within_s` at most.

    An iteration takes at least as long as its schedule, so what cannot be one of these is not judged.
    """
    drafts = [(draft, part) for part in parts if (draft := _draft_in_turn(problem, part)) is not None]
    found: list[tuple[Judged, Part]] = []
    for draft, part in sorted(drafts, key=lambda item: item[0].pieces[-1].end_s):
        if draft.pieces[-1].end_s > within_s:
            break
        judged = judge_as_placed(problem, draft)
        if judged is not None:
            found.append((judged, part))
            found = sorted(found, key=lambda item: item[0].rank())[:MOST_SEARCHED]
            if len(found) == MOST_SEARCHED:
                within_s = min(within_s, found[-1][0].prediction.iteration_s)
    return found


def _in_turn(problem: Problem, part: Part) -> Judged | None:
    """One MetaOp after another, each on the fastest allocation that the part has; None if that does not fit,
    or one has none.
    """
    draft = _draft_in_turn(problem, part)
    return None if draft is None else judge_as_placed(problem, draft)


def _draft_in_turn(problem: Problem, part: Part) -> Draft | None:
    room = _room(problem, part)

    def fastest(_: Problem, node: Node) -> Point | None:
        return next((point for point in reversed(node.points) if _has_room(point, room)), None)

    return in_turn(problem, "spindle", part.devices, fastest)


def _room(problem: Problem, part: Part) -> tuple[int, ...]:
    """Devices of each type of the whole cluster."""
    return tuple(part.cluster.num_of_type.get(kind, 0) for kind in problem.cluster.types)


def _has_room(point: Point, room: Sequence[int]) -> bool:
    return all(count <= most for count, most in zip(point.counts or (), room, strict=True))


def parts_of(cluster: Cluster) -> Iterator[Part]:
    """Parts of a cluster, but the whole."""
    yield from _of_sizes(
        cluster,
        [sorted({0, group.count, *(n for n in NODES if n < group.count)}) for group in cluster.nodes],
    )


def groups_of(cluster: Cluster) -> Iterator[Part]:
    """The parts that are whole groups of nodes."""
    yield from _of_sizes(cluster, [[0, group.count] for group in cluster.nodes])


def _of_sizes(cluster: Cluster, sizes: Sequence[Sequence[int]]) -> Iterator[Part]:
    """Parts with so many nodes of each group, but the whole."""
    everything = tuple(group.count for group in cluster.nodes)
    for counts in product(*sizes):
        if any(counts) and counts != everything:
            yield _part(cluster, counts)


def _part(cluster: Cluster, counts: Sequence[int]) -> Part:
    """The first nodes of each group."""
    devices: list[int] = []
    first = 0
    for group, count in zip(cluster.nodes, counts, strict=True):
        devices += range(first, first + count * group.devices)
        first += group.count * group.devices
    nodes = tuple(
        group.model_copy(update={"count": count})
        for group, count in zip(cluster.nodes, counts, strict=True)
        if count
    )
    labels = {group.label for group in nodes}
    between = tuple(link for link in cluster.links.between if labels.issuperset(link.groups))
    links = cluster.links.model_copy(update={"between": between})
    return Part(cluster.changed(nodes=nodes, links=links), tuple(devices))


def parts_that_could_be_faster(problem: Problem, bound: Bound, than_s: float) -> list[Part]:
    """Parts in which a schedule could end earlier, those first in which it could end first."""
    costs = [_Costs(problem, prices) for prices in (bound.prices, _prices_by_speed(problem))]
    found = []
    for part in parts_of(problem.cluster):
        bound_s = max(each.bound_s(_room(problem, part)) for each in costs)
        if bound_s < than_s:
            found.append(replace(part, bound_s=bound_s))
    return sorted(found, key=lambda part: (part.bound_s, len(part.devices)))


def _prices_by_speed(problem: Problem) -> tuple[float, ...]:
    """A second of a device of each type for what of the workload it does by itself: the program's prices are
    nothing where a chain, and not the number of devices, is what keeps it from ending earlier.
    """
    kinds = range(len(problem.cluster.types))
    alone_s = [_Costs(problem, [float(kind == own) for kind in kinds]).of_one_type(own) for own in kinds]
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
        each = zip(self._num_ops, self._worth, has_room, strict=True)
        return sum(ops * float(np.min(costs, where=mask, initial=inf)) for ops, costs, mask in each)


def worth(point: Point, prices: Sequence[float]) -> float:
    """What an op on an allocation takes of its devices, by prices of a second of each type."""
    return point.op_s * sum(price * count for price, count in zip(prices, point.counts or (), strict=True))


def _planned(problem: Problem, part: Part, plan_for: PlanFor) -> Found | None:
    """The plan for a part as one of the whole cluster; None if nothing fits."""
    try:
        found = plan_for(part.cluster)
    except NoPlanError:  # an op has no allocation there, which is no reason to have no plan
        return None
    judged = None if found is None else _on_all(problem, part, found.best)
    if found is None or judged is None:
        return None
    return _noted(replace(found, best=judged), problem.num_devices - len(part.devices))


def _on_all(problem: Problem, part: Part, judged: Judged) -> Judged | None:
    """What is placed on the devices of a part, on those of the whole cluster."""
    slices = tuple(
        piece.model_copy(update={"devices": tuple(part.devices[device] for device in piece.devices)})
        for piece in judged.slices
    )
    moved = measure_as_they_are(problem, "spindle", slices, judged.after)
    return moved if moved is None or moved.is_apart else apart(problem, moved)
