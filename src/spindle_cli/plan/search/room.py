"""How tasks get along with little room for activations: in how many micro-batches each is cut, and which of
its ops recompute, chosen together by the seconds that they take.

Where everything runs on the same devices, one part of the MetaGraph forward and backward after the other, the
activations of one part are there at a time. So all parts have the same room, and each takes what is fastest
in it, whatever the others do: more micro-batches pay what ops take for any number of samples once more for
each, recomputed ops their forward pass once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from operator import sub

from spindle_cli.costs.beyond_curve import share_again
from spindle_cli.plan.problem import MemoryFallback, Point
from spindle_cli.plan.search.memory_fallback import savable_bytes, saving
from spindle_cli.profile.types import MetaOpProfile


@dataclass(frozen=True)
class CutPart:
    """A part of the MetaGraph whose tasks are cut into some micro-batches.

    Attributes:
        counts: of micro-batches, by task; all alike.
        metaops: one micro-batch of each MetaOp.
        points: where each runs, by name.
        seconds: of all micro-batches, forward and backward, nothing recomputed.
    """

    counts: Mapping[str, int]
    metaops: Sequence[MetaOpProfile]
    points: Mapping[str, Point]
    seconds: float

    @cached_property
    def kept_bytes(self) -> float:
        """Return the bytes of activations on all devices if each keeps as many as the one with most."""
        return self._unevenness * sum(
            metaop.num_ops * metaop.activation_bytes_per_op for metaop in self.metaops
        )

    @cached_property
    def _unevenness(self) -> float:
        """How many times the mean share the largest one has."""
        largest = (
            (max(map(sub, point.rows[1:], point.rows)) if point.rows else ceil(metaop.batch_size / point.dp))
            * (point.dp / metaop.batch_size)
            for metaop in self.metaops
            for point in [self.points[metaop.name]]
        )
        return max(largest)

    def within(self, room_bytes: float) -> FittedPart | None:
        """As fast as it is with so much room for activations; None: it needs more."""
        left = max(0.0, self.kept_bytes - room_bytes) / self._unevenness
        if left > savable_bytes(self.metaops):
            return None
        split = [name for name, point in self.points.items() if point.tp > 1]
        less = saving(self.metaops, left, split) if left else MemoryFallback()
        again_s = sum(ops * self.points[name].forward_s for name, ops in less.recompute.items())
        for metaop in self.metaops:
            ops = less.selective.get(metaop.name, 0)
            again_s += ops * share_again(metaop, selective=True) * self.points[metaop.name].forward_s
        count = max(self.counts.values())
        return FittedPart(self.seconds + count * again_s, self.counts, less)


@dataclass(frozen=True)
class FittedPart:
    """What a part does for the room that it has. `fallback`: what it recomputes."""

    seconds: float
    counts: Mapping[str, int]
    fallback: MemoryFallback


@dataclass(frozen=True)
class Fitted:
    """What all parts do. `counts`: of micro-batches by task, of those that are cut."""

    counts: Mapping[str, int]
    fallback: MemoryFallback


def all_within(parts: Iterable[Sequence[CutPart]], room_bytes: float) -> Fitted | None:
    """Each part in the way that is fastest in this room, of equals the one with fewest micro-batches; None
    where one has none.

    Args:
        parts: the ways to cut each part, by ascending numbers of micro-batches.
    """
    counts: dict[str, int] = {}
    recompute: dict[str, int] = {}
    selective: dict[str, int] = {}
    for ways in parts:
        fitted = [part for way in ways if (part := way.within(room_bytes)) is not None]
        if not fitted:
            return None
        best = min(fitted, key=lambda part: part.seconds)
        counts |= {task: count for task, count in best.counts.items() if count > 1}
        recompute |= best.fallback.recompute
        selective |= best.fallback.selective
    return Fitted(counts, MemoryFallback(recompute=recompute, selective=selective))
