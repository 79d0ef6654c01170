"""The planning problem as the algorithms take it: MetaOps by index, curves cut to the cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import floor, log10

from spindle_cli.account.device.parts import UsesCache
from spindle_cli.account.groups import ParameterUses, planned_parameters
from spindle_cli.costs.beyond_curve import Again, BeyondCurve, share_again
from spindle_cli.costs.shares import times_of
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.types import Slice
from spindle_cli.profile.types import CurvePoint, MetaOp, MetaOpProfile, Profile

# An op takes at least a picosecond: a clock too coarse for it measured nothing, and nothing divides by zero.
SHORTEST_S = 1e-12
# By so much of its iteration a plan has to be shorter for what one pays for otherwise: more slices, idle
# nodes, other sums, unequal ranges. Predictions are not more exact.
WORTH = 0.01
# Of the longest time of a plan.
SIGNIFICANT_DIGITS = 10


@dataclass(frozen=True)
class Point:
    """A valid allocation of a MetaOp, and the seconds that one op takes on it, over the whole batch.

    Of an op's forward pass the share `again` is computed once more in its backward pass, and its activations
    are not kept; with `selective` those that take longest are.

    `counts`: on a cluster of several types of device, how many of each it takes, in the order of the types;
    its shares are of these in turn. `rows`: where these are not equal, as a slice says them.
    """

    num_devices: int
    dp: int
    tp: int
    forward_s: float
    backward_s: float
    op_s: float  # both together
    selective: bool = False
    again: float = 0.0
    counts: tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None

    @property
    def recompute(self) -> bool:
        """Whether activations are computed again."""
        return self.selective or self.again > 0

    @property
    def of_types(self) -> tuple[int, ...]:
        """How many devices of each of the cluster's types it takes, also of one."""
        return (self.num_devices,) if self.counts is None else self.counts


@dataclass(frozen=True)
class MemoryFallback:
    """How much speed is given up to save memory.

    Attributes:
        least_tp: degree of tensor parallelism of the MetaOps in `split`, or the largest that they have.
        split: names of MetaOps.
        recompute: by name of a MetaOp, how many of its first ops keep no activations.
        selective: by name of a MetaOp, how many ops behind these keep no more than what takes longest.
    """

    least_tp: int = 1
    split: frozenset[str] = frozenset()
    recompute: Mapping[str, int] = field(default_factory=dict)
    selective: Mapping[str, int] = field(default_factory=dict)

    @property
    def gives_up(self) -> bool:
        """Whether any speed is given up."""
        return bool(self.split) or self.keeps_less

    @property
    def keeps_less(self) -> bool:
        """Whether devices do not keep all activations."""
        return bool(self.recompute or self.selective)


@dataclass(frozen=True)
class Node:
    """A MetaOp; or a part of one, where only its first ops recompute their activations.

    Attributes:
        first_op, num_ops: the MetaOp's ops that it has.
        continues: index of the node with the ops before, if this is a later part.
        points: the fastest allocation per number of devices, ascending, each faster than all before it.
        inputs, consumers: indices of nodes.
        level: its MetaLevel.
    """

    index: int
    metaop: MetaOpProfile
    first_op: int
    num_ops: int
    continues: int | None
    points: tuple[Point, ...]
    inputs: tuple[int, ...]
    consumers: tuple[int, ...]
    level: int

    @cached_property
    def shortest_s(self) -> float:
        """Seconds of all its ops on the fastest allocation."""
        return self.num_ops * self.points[-1].op_s


@dataclass(frozen=True)
class Problem:
    """A profile on a cluster.

    Attributes:
        order: indices of `nodes`, producers first, otherwise as in the file.
        fallback: what is given up for memory.
    """

    profile: Profile
    cluster: Cluster
    nodes: tuple[Node, ...]
    order: tuple[int, ...]
    fallback: MemoryFallback = MemoryFallback()

    @property
    def num_devices(self) -> int:
        """Devices of the cluster."""
        return self.cluster.num_devices

    @cached_property
    def devices_of_types(self) -> tuple[int, ...]:
        """Devices of each of its types, also of one."""
        return tuple(self.cluster.num_of_type.values())

    @cached_property
    def rates(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """(devices, seconds per op) of each node's points, for inner loops."""
        return tuple(tuple((point.num_devices, point.op_s) for point in node.points) for node in self.nodes)

    @cached_property
    def producers(self) -> dict[str, tuple[int, ...]]:
        """By MetaOp, the nodes whose last op makes its inputs."""
        return {node.metaop.name: node.inputs for node in self.nodes if node.continues is None}

    @cached_property
    def part_of(self) -> dict[str, int]:
        """By MetaOp, a number that is the same for those that hang together: most often a task's."""
        return parts_of(self.profile.metaops)

    @cached_property
    def uses(self) -> ParameterUses:
        """The trained parameters of every op."""
        return planned_parameters(self.profile.by_name.values(), self.profile.sharding)

    @cached_property
    def known_uses(self) -> UsesCache:
        """Which parameters slices use, of those whose memory has been accounted for."""
        return UsesCache()

    @cached_property
    def least_communicators(self) -> dict[object, tuple[int, ...]]:
        """Bytes that each device needs at least for communicators, of placed slices that had no room for
        them: by where these are, as they are the same in every order of passes.
        """
        return {}

    @cached_property
    def beyond(self) -> BeyondCurve:
        """How much longer than their points say slices take on their devices."""
        return BeyondCurve(self.profile.by_name, self.cluster, self.profile)

    @cached_property
    def _points(self) -> dict[tuple[str, int, int, Again], Point]:
        return {
            (metaop.name, point.dp, point.tp, again): make_point(point, metaop, again)
            for metaop in self.profile.metaops
            for point in metaop.curve
            for again in Again
        }

    def point_of(self, slice_: Slice) -> Point:
        """The allocation that a slice runs on: of a whole batch in equal shares by the curve, of others by
        the shares, as a plan says them (`times_of`); as if nothing were moved to host memory.
        """
        if slice_.rows is not None or slice_.micro_batches > 1 or self.cluster.is_mixed:
            op = times_of(self.profile.by_name[slice_.metaop], slice_, self.cluster)
            assert op is not None, "no other shares are planned"
            times = {"dp": slice_.dp, "tp": slice_.tp, "forward_s": op.forward_s, "backward_s": op.backward_s}
            curve_point = CurvePoint(num_devices=len(slice_.devices), source="fitted", **times)
            point = make_point(curve_point, self.profile.by_name[slice_.metaop], Again.of(slice_))
        else:
            point = self._points[slice_.metaop, slice_.dp, slice_.tp, Again.of(slice_)]
        if self.cluster.is_mixed:
            kinds = Counter(self.cluster.type_of[device] for device in slice_.devices)
            counts = tuple(kinds[kind] for kind in self.cluster.types)
            point = replace(point, counts=counts, rows=slice_.rows)
        return point

    def op_s_of(self, slice_: Slice) -> tuple[float, float]:
        """Seconds of one op of a slice on average, forward and backward, as if nothing waited for copies:
        what is in host memory does not run again.
        """
        point = self.point_of(slice_)
        moved = slice_.num_offloaded / slice_.num_ops
        return point.forward_s, point.backward_s - moved * point.again * point.forward_s

    @cached_property
    def serial_s(self) -> float:
        """Every MetaOp alone on its fastest allocation, one after another: what is always possible."""
        return sum(node.shortest_s for node in self.nodes)

    @cached_property
    def ticks_per_s(self) -> int:
        """What times of plans are whole numbers of: a tick is a decimal fraction of a second."""
        return int(10 ** max(0, SIGNIFICANT_DIGITS - 1 - floor(log10(self.serial_s))))


def possible_points(metaop: MetaOpProfile, cluster: Cluster) -> list[CurvePoint]:
    """The allocations that there is room for."""
    return [point for point in metaop.curve if cluster.num_groups(point.tp) >= point.dp]


def make_point(point: CurvePoint, metaop: MetaOp, again: Again = Again.NOTHING) -> Point:
    """A point of a MetaOp's curve, of ops that recompute so much."""
    plain = Point(
        point.num_devices,
        point.dp,
        point.tp,
        point.forward_s,
        point.backward_s,
        max(point.forward_s + point.backward_s, SHORTEST_S),
    )
    return with_again(plain, metaop, again)


def with_again(point: Point, metaop: MetaOp, again: Again) -> Point:
    """The point for ops that recompute so much; `point`: of such as recompute nothing."""
    if again is Again.NOTHING:
        return point
    share = share_again(metaop, selective=again is Again.SELECTIVE)
    backward_s = point.backward_s + share * point.forward_s
    return replace(
        point,
        backward_s=backward_s,
        op_s=max(point.forward_s + backward_s, SHORTEST_S),
        selective=again is Again.SELECTIVE,
        again=share,
    )


def parts_of(metaops: Sequence[MetaOp]) -> dict[str, int]:
    """A number for each MetaOp, the same for those that hang together."""
    part_of = {metaop.name: number for number, metaop in enumerate(metaops)}
    members = {number: [name] for name, number in part_of.items()}
    for metaop in metaops:
        for name in metaop.inputs:
            kept, joined = part_of[name], part_of[metaop.name]
            if kept != joined:
                moved = members.pop(joined)
                members[kept] += moved
                part_of.update(dict.fromkeys(moved, kept))
    return part_of


def needs_whole_batch(metaop: MetaOpProfile) -> bool:
    """Whether a MetaOp's batch stays in one micro-batch: it sums something over it, or changes buffers with
    it, or nothing is known of shares.
    """
    return bool(not metaop.shares or metaop.batch_sums or metaop.changes_buffers)
