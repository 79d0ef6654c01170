"""Allocations of a MetaOp on a cluster of several types: so many devices of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np

from spindle_cli.costs.beyond_curve import Again
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.cutting.cuts import cutter_of, offsets
from spindle_cli.plan.cutting.shares import ShareTimes, share_times
from spindle_cli.plan.problem import SHORTEST_S, Point, with_again
from spindle_cli.profile.types import MetaOpProfile

# Numbers of shares of each type that are tried, up to all that there is room for: of the first of these lists
# that has no more combinations than are cut in reasonable time, or of the last.
FINE = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96, 128, 192, 256, 512, 1024)
MEDIUM = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
COARSE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MOST_COMBINATIONS = 1000
# Of so many MetaOps and clusters allocations are kept.
_MOST_KEPT = 1024


def allocations(metaop: MetaOpProfile, cluster: Cluster, least_tp: int = 1) -> tuple[Point, ...]:
    """Those that none beats which has as many devices of each type or fewer, of some numbers of devices that
    are enough for good plans: the fastest last.

    Args:
        least_tp: degree of tensor parallelism, if the MetaOp has as much anywhere in a node.

    Raises:
        NoPlanError: there is none.
    """
    of_degrees = share_times(metaop, cluster, degrees=degrees_of(metaop, cluster, least_tp))
    points = _of_groups(of_degrees, groups_of_degrees(of_degrees, cluster))
    if not points:
        raise NoPlanError(
            f"{metaop.name}: it has no allocation on the types of device of {cluster.name!r}: "
            f"{', '.join(cluster.types)}",
            hint="Profile it there for as many devices as there are, or for fewer.",
        )
    return points


@lru_cache(_MOST_KEPT)
def _of_groups(of_degrees: tuple[ShareTimes, ...], groups: tuple[tuple[int, ...], ...]) -> tuple[Point, ...]:
    """Return the allocations that no other beats, of so many groups of devices of each type for each degree;
    one object for equal times.
    """
    degrees = zip(of_degrees, groups, strict=True)
    return unbeaten(point for times, room in degrees for point in _of_degree(times, room))


@lru_cache(_MOST_KEPT)
def _of_degree(times: ShareTimes, room: tuple[int, ...]) -> tuple[Point, ...]:
    """Those of one degree that none of the same beats, the fastest first: problems ask for several degrees,
    from ever higher ones on.
    """
    return _fastest_first(cut_into(times, _counts(room)))


def cut_into(times: ShareTimes, counts: Iterable[tuple[int, ...]]) -> Iterator[Point]:
    """Allocations of these numbers of shares of each type, where there are samples for that many."""
    cutter = cutter_of(times)
    for shares in counts:
        samples = cutter.cut(shares) if 0 < sum(shares) <= times.batch_size else None
        point = None if samples is None else point_of_cut(times, shares, samples)
        if point is not None:
            yield point


def unbeaten(points: Iterable[Point]) -> tuple[Point, ...]:
    """Those that none beats which has as many devices of each type or fewer: the fastest last."""
    return tuple(reversed(_fastest_first(points)))


def _fastest_first(points: Iterable[Point]) -> tuple[Point, ...]:
    """Return allocations that no other beats, the fastest first; beating is transitive."""
    fastest: list[Point] = []
    in_order = sorted(points, key=lambda point: (point.op_s, point.num_devices))
    counts = np.array([point.counts for point in in_order])
    kept = np.empty_like(counts)
    for point, point_counts in zip(in_order, counts, strict=True):
        if not (kept[: len(fastest)] <= point_counts).all(axis=1).any():
            kept[len(fastest)] = point_counts
            fastest.append(point)
    return tuple(fastest)


def degrees_of(metaop: MetaOpProfile, cluster: Cluster, least_tp: int = 1) -> tuple[int, ...]:
    """Degrees of tensor parallelism of at least so much, or the largest that the cluster's nodes have room
    for; ascending.
    """
    degrees = sorted({share.tp for share in metaop.shares} | {point.tp for point in metaop.curve})
    room = [tp for tp in degrees if any(groups_of_type(cluster, kind, tp) for kind in cluster.types)]
    least = min(least_tp, max(room, default=1))
    return tuple(tp for tp in degrees if tp >= least)


def cuts_on_all(metaops: Sequence[MetaOpProfile], cluster: Cluster) -> list[dict[str, Point]]:
    """For each degree of tensor parallelism with which all of these run on all devices, their allocations by
    name, each batch cut so that its shares end together; the least degree first.
    """
    of_degrees: list[dict[str, Point]] = []
    common = set.intersection(*(set(degrees_of(metaop, cluster)) for metaop in metaops))
    for tp in sorted(common):
        counts = tuple(groups_of_type(cluster, kind, tp) for kind in cluster.types)
        if tp * sum(counts) < cluster.num_devices:
            continue
        points: dict[str, Point] = {}
        for metaop in metaops:
            (times,) = share_times(metaop, cluster, degrees=(tp,))
            samples = cutter_of(times).cut(counts)
            point = None if samples is None else point_of_cut(times, counts, samples)
            points |= {} if point is None else {metaop.name: point}
        if len(points) == len(metaops):
            of_degrees.append(points)
    return of_degrees


def _counts(groups: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Numbers of shares of each type that are tried, with so many groups of devices of each."""
    lists = (_sizes_up_to(groups, sizes) for sizes in (FINE, MEDIUM, COARSE))
    sizes_of_types = next(
        (sizes_of_types for sizes_of_types in lists if prod(map(len, sizes_of_types)) <= MOST_COMBINATIONS),
        None,
    )
    return product(*(sizes_of_types or _sizes_up_to(groups, COARSE)))


def _sizes_up_to(groups: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Return each type's sizes that there is room for, with none and all."""
    return [sorted({0, most, *(size for size in sizes if size < most)}) for most in groups]


def groups_of_degrees(of_degrees: Sequence[ShareTimes], cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """How many groups of devices of each type there are, for each degree."""
    return tuple(
        tuple(groups_of_type(cluster, kind, times.tp) for kind in cluster.types) for times in of_degrees
    )


def groups_of_type(cluster: Cluster, kind: str, tp: int) -> int:
    """How many groups of `tp` devices of one node and this type there are."""
    return sum(group.count * (group.devices // tp) for group in cluster.nodes if group.device == kind)


def point_of_cut(times: ShareTimes, counts: Sequence[int], samples: Sequence[int]) -> Point | None:
    """The allocation with these shares; None where the time of one is not known.

    Args:
        counts: shares of each type.
        samples: of each share, type after type.
    """
    kinds = [number for number, count in enumerate(counts) for _ in range(count)]
    parts = dict.fromkeys(zip(kinds, samples, strict=True))
    of_parts = [times.of_types[number].of_samples[count] for number, count in parts]
    ops = [op for op in of_parts if op is not None]
    if len(ops) < len(of_parts):
        return None
    forward_s, backward_s = (max(seconds) for seconds in list(zip(*ops, strict=True))[:2])
    dp = sum(counts)
    return Point(
        num_devices=dp * times.tp,
        dp=dp,
        tp=times.tp,
        forward_s=forward_s,
        backward_s=backward_s,
        op_s=max(forward_s + backward_s, SHORTEST_S),
        counts=tuple(count * times.tp for count in counts),
        rows=offsets(samples),
    )


def recomputed(points: Sequence[Point], metaop: MetaOpProfile, again: Again) -> tuple[Point, ...]:
    """Give these allocations for ops that recompute so much: where what takes longest is kept, those that are
    not split; where all are split, all of them, recomputed whole.
    """
    if again is Again.SELECTIVE:
        whole = [point for point in points if point.tp == 1]
        points, again = (whole, again) if whole else (points, Again.ALL)
    return tuple(with_again(point, metaop, again) for point in points)
