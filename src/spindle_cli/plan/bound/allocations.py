"""What an op of a MetaOp takes on shares of every size, however its batch is cut, on every type of device."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.bound.pricing import hull
from spindle_cli.plan.bound.program import Array
from spindle_cli.plan.problem import SHORTEST_S
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, ShareTime

# Sizes of shares that are told apart; of larger batches there are ranges of sizes, each with the least that
# any of them takes.
MOST_SIZES = 4096
# Of the shares that a program begins with, how much a second of the chain counts beside one of a device.
WEIGHTS = (0.02, 0.2)


@dataclass(frozen=True, eq=False)
class Shares:
    """Shares that an op may run on; arrays with an entry for each.

    Attributes:
        batch_size: samples of the whole batch.
        fewest, most: samples of a share: the same but for ranges of sizes.
        tp: devices that run a share together.
        kinds: their type, as an index of the cluster's.
        forward_s, op_s: seconds of an op's forward pass, and of both passes.
        sample_s: seconds of both passes for each sample.
        own_s: seconds of both that the op's own collectives take, at most.
    """

    batch_size: int
    fewest: Array
    most: Array
    tp: Array
    kinds: npt.NDArray[np.intp]
    forward_s: Array
    op_s: Array
    sample_s: Array
    own_s: Array

    @cached_property
    def devices(self) -> Array:
        """Devices on which the whole batch runs at once, in such shares."""
        return self.batch_size * self.tp / self.most

    @cached_property
    def device_s(self) -> Array:
        """Device-seconds of an op, if the whole batch runs on such shares."""
        return self.batch_size * self.tp * self.sample_s

    @cached_property
    def largest(self) -> Array:
        """Samples of the largest share, of any type of device, that is through in the time of this one: a
        slice that takes so long has no larger one.
        """
        largest = np.empty_like(self.op_s)
        for tp in np.unique(self.tp):
            of_degree = np.flatnonzero(self.tp == tp)
            order = of_degree[np.argsort(self.most[of_degree], kind="stable")]
            at_least_s = np.minimum.accumulate(self.op_s[order][::-1])[::-1]
            largest[of_degree] = self.most[order][
                np.searchsorted(at_least_s, self.op_s[of_degree], side="right") - 1
            ]
        return largest

    @cached_property
    def corners(self) -> npt.NDArray[np.intp]:
        """Shares of which one is cheapest, whatever seconds of an op and of a device of each type cost."""
        corners = []
        for kind in np.unique(self.kinds):
            of_kind = np.flatnonzero(self.kinds == kind)
            of_kind = of_kind[np.lexsort((self.device_s[of_kind], self.op_s[of_kind]))]
            corners.append(of_kind[hull(self.op_s[of_kind].tolist(), self.device_s[of_kind].tolist())])
        return np.concatenate(corners)

    def taken(self, numbers: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Shares:
        """Some of the shares, by their numbers or by whether they are among these."""
        arrays = (getattr(self, array.name)[numbers] for array in fields(self) if array.name != "batch_size")
        return Shares(self.batch_size, *arrays)

    def again(self, forwards: Array) -> Shares:
        """The shares with as many forward passes more."""
        op_s = self.op_s + forwards * self.forward_s
        return replace(self, op_s=op_s, sample_s=self.sample_s * (op_s / self.op_s))


def shares_of(metaop: MetaOpProfile, cluster: Cluster) -> Shares:
    """All shares that a plan for the cluster can have: those of the curve, and all sizes between two that are
    known, for which time is linear.
    """
    room = devices_of_kinds(cluster)

    def kind_of(entry: CurvePoint | ShareTime) -> int | None:
        if not cluster.is_mixed:
            return 0
        return cluster.types.index(entry.device) if entry.device in cluster.types else None

    seconds_by_kind: defaultdict[tuple[int, int], list[tuple[float, float, float, float]]] = defaultdict(list)
    for share in metaop.shares:
        kind = kind_of(share)
        if kind is not None and share.tp <= room[kind]:
            seconds_by_kind[kind, share.tp].append((share.samples, *_seconds(share)))
    parts = [_between(np.array(entries), kind, tp) for (kind, tp), entries in seconds_by_kind.items()]
    points = [
        (metaop.batch_size / point.dp, *_seconds(point), point.tp, kind)
        for point in metaop.curve
        if (kind := kind_of(point)) is not None and point.num_devices <= sum(room)
    ]
    parts += [_exactly(np.array(points))] if points else []
    fewest, most, tp, kinds, *seconds = np.concatenate(parts, axis=1)
    return Shares(metaop.batch_size, fewest, most, tp, kinds.astype(np.intp), *seconds)


def devices_of_kinds(cluster: Cluster) -> list[int]:
    """How many devices of each type there are; of those of one type, whatever it is called."""
    return list(cluster.num_of_type.values()) if cluster.is_mixed else [cluster.num_devices]


def _seconds(entry: CurvePoint | ShareTime) -> tuple[float, float, float]:
    return entry.forward_s, entry.forward_s + entry.backward_s, entry.communication_s


def _exactly(entries: Array) -> Array:
    samples, forward_s, op_s, own_s, tp, kind = entries.T
    return np.array([samples, samples, tp, kind, forward_s, op_s, op_s / samples, own_s])


def _between(entries: Array, kind: int, tp: int) -> Array:
    """Shares of every size from the smallest to the largest that is known."""
    knots, *seconds = entries[np.argsort(entries[:, 0], kind="stable")].T
    first, last = int(knots[0]), int(knots[-1])
    is_fine = last - first < MOST_SIZES
    sizes = (
        np.arange(first, last + 1, dtype=float)
        if is_fine
        else np.unique(np.concatenate([knots, np.round(np.geomspace(first, last, MOST_SIZES))]))
    )
    forward_s, op_s, own_s = (np.interp(sizes, knots, values) for values in seconds)
    if is_fine:
        of_all = np.full_like(sizes, tp), np.full_like(sizes, kind)
        return _exactly(np.array([sizes, forward_s, op_s, own_s, *of_all]).T)
    # Between two of the sizes time, and time for each sample, are least at one of them.
    least = (_ends(values, np.minimum) for values in (forward_s, op_s, op_s / sizes))
    count = len(sizes) - 1
    of_all = np.full(count, float(tp)), np.full(count, float(kind))
    return np.array([sizes[:-1], sizes[1:], *of_all, *least, _ends(own_s, np.maximum)])


def _ends(values: Array, of_two: np.ufunc) -> Array:
    return np.asarray(of_two(values[:-1], values[1:]))


def first_of(shares: Shares, chain_s: Array, device_s: Array) -> tuple[int, ...]:
    """Shares that a program begins with: of each type of device, those that cost least if a second of the
    chain, beside one of a device, counts so much of both.
    """
    first: dict[int, None] = {}
    for kind in np.unique(shares.kinds):
        of_kind = np.flatnonzero(shares.kinds == kind)
        of_chain, of_devices = (
            seconds[of_kind] / max(float(seconds[of_kind].min()), SHORTEST_S)
            for seconds in (chain_s, device_s)
        )
        for weight in WEIGHTS:
            first[int(of_kind[np.argmin(weight * of_chain + (1 - weight) * of_devices)])] = None
    return tuple(first)
