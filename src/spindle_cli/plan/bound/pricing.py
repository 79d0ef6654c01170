"""The cheapest allocation of a MetaOp by prices: what one op takes of its devices and of its own time.

With prices p_k of a second of a device of type k, and f of a second of the op,

    min over T and n of  T (sum over k of p_k n_k + f),  where n devices do the whole batch within T

T is the time of some share on some type. Within T a device of type k does at most c_k(T) samples, so n is the
cheapest that covers the batch: whole numbers for one or two types; for more it is relaxed to fractions, which
is never dearer. So what is found is a lower bound of all allocations that a plan can have, however it cuts
the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from math import inf
from typing import NamedTuple, Protocol

import numpy as np

from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.cutting.allocations import degrees_of, groups_of_type
from spindle_cli.plan.cutting.shares import Seconds, ShareTimes, share_times
from spindle_cli.plan.problem import Point
from spindle_cli.profile.types import MetaOpProfile

# Of so many MetaOps, degrees and clusters what was worked out is kept.
_MOST_KEPT = 1024


class Column(NamedTuple):
    """An allocation of the program: seconds of an op, and how many devices of each type it takes."""

    op_s: float
    counts: tuple[float, ...]

    @property
    def device_s(self) -> float:
        """Device-seconds of an op, of all types."""
        return sum(self.counts) * self.op_s

    def cost(self, prices: Sequence[float], flow: float) -> float:
        """What an op costs by these prices, in seconds of the iteration."""
        per_second = sum(price * count for price, count in zip(prices, self.counts, strict=True))
        return self.op_s * (per_second + flow)


def column_of(point: Point) -> Column:
    """A point as an allocation of the program."""
    return Column(point.op_s, tuple(map(float, point.of_types)))


def worth(point: Point, prices: Sequence[float]) -> float:
    """What an op on an allocation takes of its devices, by prices of a second of each type."""
    return column_of(point).cost(prices, 0.0)


class Offer(Protocol):
    """Some of a MetaOp's allocations."""

    def cheapest(self, prices: Sequence[float], flow: float) -> Column | None:
        """The one that costs least; None where there is none."""
        ...


class Listed:
    """Allocations that are listed one by one."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns
        self._op_s = np.array([column.op_s for column in columns])
        self._counts = np.array([column.counts for column in columns])

    def cheapest(self, prices: Sequence[float], flow: float) -> Column:
        return self._columns[int(np.argmin(self._op_s * (self._counts @ np.array(prices) + flow)))]


def hull(seconds: Sequence[float], costs: Sequence[float]) -> list[int]:
    """The corners of the lower convex hull of allocations that are slower one after another: mixes of others
    cost at least as much as mixes of these.
    """
    corners: list[int] = []
    for place, (op_s, cost) in enumerate(zip(seconds, costs, strict=True)):
        if corners and cost >= costs[corners[-1]]:
            continue  # slower and no cheaper
        while len(corners) > 1:
            left, middle = corners[-2:]
            height, rise = costs[middle] - costs[left], cost - costs[left]
            if height * (op_s - seconds[left]) < rise * (seconds[middle] - seconds[left]):
                break
            corners.pop()
        corners.append(place)
    return corners


def pricings(metaop: MetaOpProfile, cluster: Cluster, forwards: float, least_tp: int = 1) -> list[Pricing]:
    """Those of every degree of tensor parallelism of at least so much, where an op runs forward so often."""
    degrees = degrees_of(metaop, cluster, least_tp)
    return [
        pricing_of(times, tuple(groups_of_type(cluster, kind, times.tp) for kind in cluster.types))
        for times in share_times(metaop, cluster, forwards=forwards, degrees=degrees)
    ]


@lru_cache(_MOST_KEPT)
def pricing_of(times: ShareTimes, groups: tuple[int, ...]) -> Pricing:
    """Return the pricing of these times and groups, one object for equal ones."""
    return Pricing(times, groups)


class Pricing:
    """The prices of one MetaOp's allocations at one tensor-parallel degree, by groups of each device type."""

    def __init__(self, times: ShareTimes, groups: Sequence[int]) -> None:
        self.tp, self._batch_size = times.tp, times.batch_size
        self._groups = groups
        shortest = [type_times.at_least_s[1:] for type_times in times.of_types]
        self._op_s: Seconds = np.unique(np.concatenate([s[np.isfinite(s)] for s in shortest]))
        # By type and time: samples of one share, 0 where none is through by then.
        self._samples = np.array([np.searchsorted(s, self._op_s, side="right") for s in shortest], float)
        room = self._samples.T @ np.array(groups, float) >= self._batch_size
        self._op_s, self._samples = self._op_s[room], self._samples[:, room]

    @property
    def shortest_s(self) -> float:
        """Seconds before which no cut on any of the devices is through; infinite where there is no room."""
        return float(self._op_s[0]) if self._op_s.size else inf

    def cheapest(self, prices: Sequence[float], flow: float) -> Column | None:
        """The allocation that costs least; None where there is no room for any."""
        if not self._op_s.size:
            return None
        per_group = np.array(prices) * self.tp
        counts = self._exact(per_group) if len(per_group) == 2 else self._relaxed(per_group)
        cost = self._op_s * (per_group @ counts + flow)
        place = int(np.argmin(cost))
        return Column(float(self._op_s[place]), tuple(float(n) * self.tp for n in counts[:, place]))

    def _exact(self, prices: Seconds) -> Seconds:
        """Price allocations on two types: every number of the first with the fewest of the second."""
        first, second = np.arange(self._groups[0] + 1)[:, None], self._second
        cost = np.where(second <= self._groups[1], prices[0] * first + prices[1] * second, np.inf)
        best = np.argmin(cost, axis=0)
        return np.array([best, second[best, np.arange(second.shape[1])]], float)

    @cached_property
    def _second(self) -> Seconds:
        """By number of groups of the first of two types, and by time: the fewest of the second that do the
        rest; one more than there are where these are too few.
        """
        first = np.arange(self._groups[0] + 1)[:, None]
        left = np.maximum(0.0, self._batch_size - first * self._samples[0])
        with np.errstate(divide="ignore", invalid="ignore"):
            second = np.where(left > 0, np.ceil(left / self._samples[1]), 0.0)
        return np.minimum(second, self._groups[1] + 1)

    def _relaxed(self, prices: Seconds) -> Seconds:
        """The type whose samples cost least first, as far as it goes; of one type alone whole numbers."""
        counts = np.zeros_like(self._samples)
        with np.errstate(divide="ignore", invalid="ignore"):
            per_sample = np.where(self._samples > 0, prices[:, None] / self._samples, np.inf)
        left = np.full(self._op_s.shape, float(self._batch_size))
        columns = np.arange(self._op_s.size)
        for kinds in np.argsort(per_sample, axis=0, kind="stable"):
            samples = self._samples[kinds, columns]
            with np.errstate(divide="ignore", invalid="ignore"):
                wanted = np.where(samples > 0, left / samples, 0.0)
            taken = np.minimum(wanted, np.array(self._groups, float)[kinds])
            counts[kinds, columns] = taken
            left = np.maximum(0.0, left - taken * samples)
        return np.ceil(counts - 1e-9) if len(prices) == 1 else counts
