"""Posing a profile on a cluster as a planning problem: MetaOps by index, with their allocations there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spindle_cli.costs.beyond_curve import Again
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.cutting.allocations import allocations, cuts_on_all, recomputed
from spindle_cli.plan.cutting.on_all import chosen_on_all
from spindle_cli.plan.problem import MemoryFallback, Node, Point, Problem, make_point, possible_points
from spindle_cli.profile.metagraph import producers_first
from spindle_cli.profile.types import MetaOpProfile, Profile


def make_problem(profile: Profile, cluster: Cluster, fallback: MemoryFallback | None = None) -> Problem:
    """Index the MetaGraph and cut the curves to the cluster's number of devices; on several types, nodes have
    `allocations` over these.

    Args:
        profile: as the cluster's types see it (`profile/mixed/seen.py`).
        fallback: what is given up for memory.

    Raises:
        NoPlanError: a MetaOp has no allocation on so few devices, or none on all devices with which it shares
            out parameters.
    """
    fallback = fallback or MemoryFallback()
    on_all = chosen_on_all(profile, cluster, cuts_on_all) if cluster.is_mixed else {}
    parts = [part for metaop in profile.metaops for part in _parts(metaop, fallback, cluster)]
    inputs = _inputs_of(parts)
    order = producers_first(dict(enumerate(inputs)))
    level = [0] * len(inputs)
    for i in order:
        level[i] = max((level[j] + 1 for j in inputs[i]), default=0)
    consumers = _consumers_of(inputs)
    nodes = tuple(
        Node(
            index=i,
            metaop=part.metaop,
            first_op=part.first_op,
            num_ops=part.num_ops,
            continues=i - 1 if part.first_op else None,
            points=_points(part, cluster, fallback, on_all.get(part.metaop.name)),
            inputs=inputs[i],
            consumers=tuple(consumers[i]),
            level=level[i],
        )
        for i, part in enumerate(parts)
    )
    return Problem(profile, cluster, nodes, order, fallback)


@dataclass(frozen=True)
class _Part:
    """Some ops of a MetaOp that recompute as much."""

    metaop: MetaOpProfile
    first_op: int
    num_ops: int
    again: Again


def _inputs_of(parts: Sequence[_Part]) -> list[tuple[int, ...]]:
    """List for each part those that it takes from: the one before it in its MetaOp, or the inputs' last."""
    last = {part.metaop.name: i for i, part in enumerate(parts)}
    return [
        (i - 1,) if part.first_op else tuple(last[name] for name in part.metaop.inputs)
        for i, part in enumerate(parts)
    ]


def _consumers_of(inputs: Sequence[Sequence[int]]) -> list[list[int]]:
    """List for each part those that take from it."""
    consumers: list[list[int]] = [[] for _ in inputs]
    for i, producers in enumerate(inputs):
        for j in producers:
            consumers[j].append(i)
    return consumers


def _parts(metaop: MetaOpProfile, fallback: MemoryFallback, cluster: Cluster) -> list[_Part]:
    """The parts of a MetaOp's ops by how they are recomputed; what tensor parallelism splits is so whole."""
    recomputed = fallback.recompute.get(metaop.name, 0)
    selective = min(fallback.selective.get(metaop.name, 0), metaop.num_ops - recomputed)
    if metaop.name in fallback.split or all(point.tp > 1 for point in possible_points(metaop, cluster)):
        recomputed, selective = recomputed + selective, 0
    counts = {
        Again.ALL: recomputed,
        Again.SELECTIVE: selective,
        Again.NOTHING: metaop.num_ops - recomputed - selective,
    }
    parts, first = [], 0
    for again, count in counts.items():
        if count:
            parts.append(_Part(metaop, first, count, again))
        first += count
    return parts


def _points(
    part: _Part, cluster: Cluster, fallback: MemoryFallback, on_all: Point | None
) -> tuple[Point, ...]:
    """The allocations of a node, the fastest last. `on_all`: the only one, on several types."""
    if not cluster.is_mixed:
        return _useful_points(part, cluster, fallback)
    metaop = part.metaop
    least_tp = fallback.least_tp if metaop.name in fallback.split else 1
    plain = allocations(metaop, cluster, least_tp) if on_all is None else (on_all,)
    return recomputed(plain, metaop, part.again)


def _useful_points(part: _Part, cluster: Cluster, fallback: MemoryFallback) -> tuple[Point, ...]:
    """The allocations that no smaller one equals: ascending in devices, strictly descending in seconds.

    A tensor-parallel group is of one node, so the cluster's nodes have to have as many groups as the
    allocation has shares.

    Raises:
        NoPlanError: the cluster has none.
    """
    metaop = part.metaop
    possible = possible_points(metaop, cluster)
    if part.again is Again.SELECTIVE:
        possible = [point for point in possible if point.tp == 1]
    if not possible:
        raise _no_allocation(metaop, cluster)
    least_tp = 1
    if metaop.name in fallback.split:
        least_tp = min(fallback.least_tp, max(point.tp for point in possible))
    points: list[Point] = []
    for candidate in sorted(possible, key=lambda point: (point.num_devices, point.op_s)):
        point = make_point(candidate, metaop, part.again)
        if candidate.tp >= least_tp and (not points or point.op_s < points[-1].op_s):
            points.append(point)
    return tuple(points)


def _no_allocation(metaop: MetaOpProfile, cluster: Cluster) -> NoPlanError:
    """The error for a MetaOp that has no allocation on a cluster."""
    if not metaop.curve:
        return NoPlanError(
            f"{metaop.name}: none of its allocations leaves it whole, as gathered gradients need it",
            hint=f"Profile {metaop.name} without tensor parallelism, too, or say `--sums dense`.",
        )
    fewest, num_devices = metaop.curve[0].num_devices, cluster.num_devices
    if fewest > num_devices:
        return NoPlanError(
            f"{metaop.name}: its smallest valid allocation has {fewest} devices, the cluster {num_devices}",
            hint=f"Plan for at least {fewest} devices, or profile {metaop.name} for fewer.",
        )
    shapes = ", ".join(f"dp {point.dp} x tp {point.tp}" for point in metaop.curve[:4])
    return NoPlanError(
        f"{metaop.name}: none of its allocations ({shapes}) has each of its tensor-parallel groups inside a "
        f"node; the nodes have {', '.join(str(size) for size in sorted(set(cluster.node_sizes)))} devices",
        hint=f"Plan for larger nodes, or profile {metaop.name} with less tensor parallelism.",
    )
