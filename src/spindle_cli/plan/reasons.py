"""Why each MetaOp got its devices, by the prices of the linear program (`plan/bound/bound.py`): what an op
costs on an allocation is its seconds, times what a second of each of the devices is worth and of its own.

On a cluster of several types, seconds are of an op on the whole batch, forward and backward: of all
micro-batches together, cut as the plan cuts them, and without what is recomputed or moved for memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from spindle_cli.costs.shares import share_on_type, sizes, times_of
from spindle_cli.files.artifact import Model
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.any_number import on_any_number
from spindle_cli.plan.best.micro_batches import cut_profile
from spindle_cli.plan.bound.bound import Bound, cheapest_columns, lower_bound
from spindle_cli.plan.bound.pricing import Column, column_of
from spindle_cli.plan.cutting.allocations import degrees_of, groups_of_type, point_of_cut
from spindle_cli.plan.cutting.cuts import cutter_of
from spindle_cli.plan.cutting.shares import share_times
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import Node, Point
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.profile.mixed.seen import seen_on
from spindle_cli.profile.types import MetaOpProfile, Profile

# A MetaOp is critical when the bound grows by at least this much of each second added to it.
CRITICAL = 1e-6
# Ops of the program's optimum that are fewer than this are none.
SOME_OPS = 1e-6


class Choice(Model):
    """One number of devices that a MetaOp could have had.

    Attributes:
        num_devices: How many devices.
        op_s: Seconds of an op.
        device_s: Device-seconds of an op.
        priced: Its seconds and device-seconds at the program's prices, over the cheapest choice's, less 1:
            what it wastes.
        bound_ops: Ops that run on it in the bound's optimum.
        plan_ops: Ops that run on it in the plan.
    """

    num_devices: int
    op_s: float
    device_s: float
    priced: float
    bound_ops: float
    plan_ops: int


class Reason(Model):
    """Why a MetaOp got its devices.

    Attributes:
        metaop: Name of the MetaOp.
        critical: Seconds that the bound grows by per second added to it.
        choices: The numbers of devices that it could have had.
    """

    metaop: str
    critical: float
    choices: tuple[Choice, ...]


def bound_on(profile: Profile, cluster: Cluster) -> Bound:
    """Solve the linear program of a profile on a cluster."""
    return lower_bound(make_problem(seen_on(profile, cluster), cluster))


def reasons(plan: Plan, profile: Profile) -> tuple[Reason, ...]:
    """For each MetaOp, what its choices cost at the program's prices, and which were taken; with shares
    that are not equal, where the plan has any. Of devices of several types `type_reasons` says it.
    """
    if plan.cluster.is_mixed:
        return ()
    profile = seen_on(profile, plan.cluster)
    wide = on_any_number(profile, plan.cluster) if any(p.rows is not None for p in plan.slices) else None
    problem = make_problem(wide or profile, plan.cluster)
    bound = lower_bound(problem)
    return tuple(_reason(bound, node, plan.slices) for node in problem.nodes)


def _reason(bound: Bound, node: Node, slices: tuple[Slice, ...]) -> Reason:
    flow = bound.critical[node.index]
    costs = [column_of(point).cost(bound.prices, flow) for point in node.points]
    cheapest = min(costs)
    in_bound = {column.counts: ops for column, ops in bound.ops[node.index]}
    in_plan: dict[int, int] = {}
    # Micro-batches on the same devices run the same ops.
    for (first, last), devices in {
        (slice_.ops, len(slice_.devices)) for slice_ in slices if slice_.metaop == node.metaop.name
    }:
        in_plan[devices] = in_plan.get(devices, 0) + last - first
    return Reason(
        metaop=node.metaop.name,
        critical=flow if flow > CRITICAL else 0.0,
        choices=tuple(
            Choice(
                num_devices=point.num_devices,
                op_s=point.op_s,
                device_s=point.num_devices * point.op_s,
                priced=cost / cheapest - 1 if cheapest > 0 else 0.0,
                bound_ops=in_bound.get(column_of(point).counts, 0.0),
                plan_ops=in_plan.get(point.num_devices, 0),
            )
            for point, cost in zip(node.points, costs, strict=True)
        ),
    )


class OnTypes(Model):
    """An allocation of a MetaOp.

    Attributes:
        of_types: Devices of each type that it has.
        tp: Devices that hold a share.
        op_s: Seconds of an op.
        priced: Its seconds and device-seconds at the program's prices, over the cheapest allocation's, less
            1: what it wastes.
    """

    of_types: dict[str, int]
    tp: int
    op_s: float
    priced: float


class TypeShares(Model):
    """Shares of as many samples on devices of one type.

    Attributes:
        device: The type.
        num_shares: How many shares there are.
        samples: Samples of each.
        share_s: When these are through with an op.
    """

    device: str
    num_shares: int
    samples: int
    share_s: float


class OneMore(Model):
    """A slice with one more share on devices of a type, whether or not the cluster has them.

    Attributes:
        device: The type.
        op_s: Seconds of an op; null: the batch has no sample for it, or nothing is known of such shares.
    """

    device: str
    op_s: float | None


class Taken(OnTypes):
    """What the plan runs ops on.

    Attributes:
        ops: How many ops, of all micro-batches on average.
        shares: Its shares, type after type.
        best_cut_s: Seconds of an op with the batch cut over these devices as well as can be; null: the
            profile does not know.
        alone: Allocations on each single type, of as many devices or all that there are.
        one_more: The slice with one more share, on each type.
    """

    ops: float
    shares: tuple[TypeShares, ...]
    best_cut_s: float | None
    alone: tuple[OnTypes, ...]
    one_more: tuple[OneMore, ...]


class InBound(Model):
    """What ops run on in the program's optimum.

    Attributes:
        of_types: Devices of each type; of three types and more, parts of devices as well.
        op_s: Seconds of an op.
        ops: How many ops.
    """

    of_types: dict[str, float]
    op_s: float
    ops: float


class TypeReason(Model):
    """Why a MetaOp got its devices.

    Attributes:
        metaop: Its name.
        num_ops: How many ops it has.
        micro_batches: Into how many micro-batches its batch is cut.
        critical: Seconds that the bound grows by per second added to it.
        shares_out: Whether the devices of a slice share out its parameters or gradients, so that it cannot
            run on others.
        in_plan: What its ops run on, what most do first.
        in_bound: What they run on in the program's optimum.
        fastest: The fastest of all allocations that plans are made of.
        cheapest: The cheapest of these by the prices.
    """

    metaop: str
    num_ops: int
    micro_batches: int = 1
    critical: float
    shares_out: bool
    in_plan: tuple[Taken, ...]
    in_bound: tuple[InBound, ...]
    fastest: OnTypes
    cheapest: OnTypes


class TypeReasons(Model):
    """Why MetaOps have their types of devices.

    Attributes:
        prices: By type, seconds of the bound that a second of one of its devices is worth.
        metaops: One entry for each MetaOp.
    """

    prices: dict[str, float]
    metaops: tuple[TypeReason, ...]


def type_reasons(plan: Plan, profile: Profile) -> TypeReasons | None:
    """Say for each MetaOp what it runs on, and what else it could; None on devices of one type."""
    cluster = plan.cluster
    if not cluster.is_mixed:
        return None
    profile = seen_on(profile, cluster)
    problem = make_problem(profile, cluster)
    bound = lower_bound(problem)
    # Micro-batches are looked at as the plan cuts them, and prices are of whole batches all the same.
    cut = make_problem(cut_profile(profile, plan.micro_batches, cluster), cluster)
    columns = cheapest_columns(problem, bound)
    reasons = []
    for node, cut_node, column in zip(problem.nodes, cut.nodes, columns, strict=True):
        flow = bound.critical[node.index]
        least = [column.cost(bound.prices, flow)]
        least += [_cost(point, bound.prices, flow) for point in node.points]
        ask = _NodeCosts(
            metaop=node.metaop,
            part=cut_node.metaop,
            count=plan.micro_batches.get(node.metaop.task, 1),
            cluster=cluster,
            prices=bound.prices,
            flow=flow,
            least=min(least),
        )
        level = plan.sharding.get(node.metaop.parameters or node.metaop.name)
        reasons.append(
            TypeReason(
                metaop=node.metaop.name,
                num_ops=node.num_ops,
                micro_batches=ask.count,
                critical=flow if flow > CRITICAL else 0.0,
                shares_out=level is not None and level.is_by_pass,
                in_plan=_in_plan(ask, plan.slices),
                in_bound=_in_bound(bound.ops[node.index], cluster),
                fastest=ask.on(cut_node.points[-1]),
                cheapest=ask.on(min(cut_node.points, key=lambda point: _cost(point, bound.prices, flow))),
            )
        )
    return TypeReasons(prices=dict(zip(cluster.types, bound.prices, strict=True)), metaops=tuple(reasons))


def _cost(point: Point, prices: Sequence[float], flow: float) -> float:
    """Return what an op costs, in seconds of the iteration."""
    return column_of(point).cost(prices, flow)


@dataclass(frozen=True)
class _NodeCosts:
    """A MetaOp that is asked about.

    Attributes:
        part: it with the batch of one of its `count` micro-batches.
        least: what an op of whole batches costs at least.
    """

    metaop: MetaOpProfile
    part: MetaOpProfile
    count: int
    cluster: Cluster
    prices: Sequence[float]
    flow: float
    least: float

    def on(self, point: Point) -> OnTypes:
        """Return an allocation of a micro-batch as an answer."""
        cost = self.count * _cost(point, self.prices, self.flow)
        return OnTypes(
            of_types=self.named(point.of_types),
            tp=point.tp,
            op_s=self.count * point.op_s,
            priced=cost / self.least - 1 if self.least > 0 else 0.0,
        )

    def named(self, counts: Sequence[int]) -> dict[str, int]:
        """Numbers of devices by type, of those that there are any of."""
        return {kind: count for kind, count in zip(self.cluster.types, counts, strict=True) if count}

    def best_cut(self, groups: Sequence[int], tp: int) -> Point | None:
        """The best cut over so many shares of each type; None where the profile does not know of it."""
        (times,) = share_times(self.part, self.cluster, degrees=(tp,))
        samples = cutter_of(times).cut(groups)
        return None if samples is None else point_of_cut(times, groups, samples)

    def alone(self, number: int, num_devices: int) -> OnTypes | None:
        """Return the best allocation on the type of this number alone, with as many devices, or all that do
        something.
        """
        largest = [self._largest(number, num_devices, tp) for tp in degrees_of(self.part, self.cluster)]
        points = [point for point in largest if point is not None]
        return self.on(min(points, key=lambda point: point.op_s)) if points else None

    def _largest(self, number: int, num_devices: int, tp: int) -> Point | None:
        """Return the allocation with the most shares of one type that there are devices, samples and times
        for.
        """
        kinds = self.cluster.types
        room = min(
            num_devices // tp,
            groups_of_type(self.cluster, kinds[number], tp),
            self.part.batch_size,
        )
        for count in range(room, 0, -1):
            groups = [count if place == number else 0 for place in range(len(kinds))]
            point = self.best_cut(groups, tp)
            if point is not None:
                return point
        return None


def _in_plan(ask: _NodeCosts, slices: Sequence[Slice]) -> tuple[Taken, ...]:
    """Return the allocations that the plan takes, each once, whichever devices it is of."""
    by_allocation: dict[tuple[int, tuple[TypeShares, ...]], list[Slice]] = {}
    for slice_ in slices:
        if slice_.metaop == ask.metaop.name:
            by_allocation.setdefault((slice_.tp, _shares(ask, slice_)), []).append(slice_)
    allocations = [_taken(ask, shares, alike) for (_, shares), alike in by_allocation.items()]
    return tuple(sorted(allocations, key=lambda taken: (-taken.ops, taken.op_s)))


def _shares(ask: _NodeCosts, slice_: Slice) -> tuple[TypeShares, ...]:
    """Return the shares of a slice, type after type, the largest first."""
    cluster = ask.cluster
    samples_by_share = sizes(slice_) or [round(ask.metaop.batch_size / slice_.shares_of_batch)] * slice_.dp
    kinds = [cluster.type_of[device] for device in slice_.devices[:: slice_.tp]]
    counts = Counter(zip(kinds, samples_by_share, strict=True))
    shares = []
    for (kind, samples), count in sorted(
        counts.items(), key=lambda item: (cluster.types.index(item[0][0]), -item[0][1])
    ):
        op = share_on_type(ask.metaop, kind, samples, slice_.tp)
        assert op is not None, "no other shares are planned"
        share_s = ask.count * (op.forward_s + op.backward_s)
        shares.append(TypeShares(device=kind, num_shares=count, samples=samples, share_s=share_s))
    return tuple(shares)


def _taken(ask: _NodeCosts, shares: tuple[TypeShares, ...], slices: Sequence[Slice]) -> Taken:
    """Return the allocation that these slices run on."""
    first, types = slices[0], ask.cluster.types
    op = times_of(ask.metaop, first, ask.cluster)
    assert op is not None, "no other allocations are planned"
    groups = [sum(share.num_shares for share in shares if share.device == kind) for kind in types]
    point = Point(
        num_devices=len(first.devices),
        dp=first.dp,
        tp=first.tp,
        forward_s=op.forward_s,
        backward_s=op.backward_s,
        op_s=op.forward_s + op.backward_s,
        counts=tuple(count * first.tp for count in groups),
    )
    allocated = ask.on(point)
    is_alone = len(allocated.of_types) == 1
    others = [number for number, kind in enumerate(types) if not (is_alone and kind in allocated.of_types)]
    alone = [ask.alone(number, point.num_devices) for number in others]
    best = ask.best_cut(groups, first.tp)
    return Taken(
        **dict(allocated),
        ops=sum(slice_.num_ops for slice_ in slices) / ask.count,
        shares=shares,
        best_cut_s=None if best is None else ask.count * best.op_s,
        alone=tuple(allocation for allocation in alone if allocation is not None),
        one_more=tuple(_one_more(ask, groups, number, first.tp) for number in range(len(types))),
    )


def _one_more(ask: _NodeCosts, groups: Sequence[int], number: int, tp: int) -> OneMore:
    more = [count + (place == number) for place, count in enumerate(groups)]
    point = ask.best_cut(more, tp)
    return OneMore(device=ask.cluster.types[number], op_s=None if point is None else ask.count * point.op_s)


def _in_bound(used: Sequence[tuple[Column, float]], cluster: Cluster) -> tuple[InBound, ...]:
    return tuple(
        InBound(
            of_types={kind: count for kind, count in zip(cluster.types, column.counts, strict=True) if count},
            op_s=column.op_s,
            ops=ops,
        )
        for column, ops in sorted(used, key=lambda column_and_ops: -column_and_ops[1])
        if ops > SOME_OPS
    )
