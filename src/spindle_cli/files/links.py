"""Links between two devices: of the same node, of two nodes, and the slowest of several."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from math import log
from typing import Annotated, Any

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from spindle_cli.files.artifact import Model
from spindle_cli.units import GB, US

# More, or less, is no link; what programs and simulations make of these stays finite.
MOST_LATENCY_US = 1e9
LEAST_GB_PER_S, MOST_GB_PER_S = 1e-6, 1e9

BandwidthCurve = tuple[tuple[float, float], ...]  # (bytes, gb_per_s)


class Link(Model):
    """How long a message between two devices takes.

    Attributes:
        latency_us: Microseconds before the first byte.
        bandwidth_gb_per_s: 10^9 bytes per second, one way, of large messages.
        curve: Bandwidth by message size, [[bytes, gb_per_s], ...] with ascending bytes; interpolated over the
            logarithm of the size, and constant outside. Without it the one bandwidth holds for every size.
    """

    latency_us: Annotated[float, Field(ge=0, le=MOST_LATENCY_US)]
    bandwidth_gb_per_s: Annotated[float, Field(ge=LEAST_GB_PER_S, le=MOST_GB_PER_S)]
    curve: BandwidthCurve | None = None

    @field_validator("curve")
    @classmethod
    def _curve_ascends(cls, curve: BandwidthCurve | None) -> BandwidthCurve | None:
        if curve is None:
            return None
        if not curve:
            raise ValueError("expected at least one [bytes, gb_per_s] pair, or no curve at all")
        if any(size <= 0 or not LEAST_GB_PER_S <= speed <= MOST_GB_PER_S for size, speed in curve):
            raise ValueError(
                f"expected positive bytes, and gb_per_s from {LEAST_GB_PER_S:g} to {MOST_GB_PER_S:g}, in "
                "every pair"
            )
        if any(later[0] <= earlier[0] for earlier, later in pairwise(curve)):
            raise ValueError("expected ascending bytes")
        return curve

    @property
    def latency_s(self) -> float:
        """Seconds before the first byte arrives."""
        return self.latency_us * US

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Bytes per second for large messages, one way."""
        return self.bandwidth_gb_per_s * GB


class GroupLinks(Model):
    """Links of one group of nodes, in the place of those that the cluster has for all.

    Attributes:
        intra_node: Between devices of one of its nodes.
        host: From a device to its node's memory and back, each way at the full speed at once.
    """

    intra_node: Link | None = None
    host: Link | None = None

    @model_validator(mode="after")
    def _says_something(self) -> GroupLinks:
        if self.intra_node is None and self.host is None:
            raise ValueError("expected intra_node, or host, or both")
        return self

    @model_serializer(mode="wrap")
    def _without_nothing(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _known(serialize(self))


class BetweenLink(Link):
    """The link between nodes of two groups, or between those of one that is named twice.

    Attributes:
        groups: Names of the two groups.
    """

    groups: tuple[str, str]


class Links(Model):
    """The kinds of link.

    Attributes:
        intra_node: Between devices of one node.
        inter_node: Between nodes.
        host: From a device to its node's memory and back, each way at the full speed at once; absent: plans
            move no activations there.
        between: Between nodes of these groups, in the place of `inter_node`.
    """

    intra_node: Link
    inter_node: Link
    host: Link | None = None
    between: tuple[BetweenLink, ...] = ()

    @model_serializer(mode="wrap")
    def _without_nothing(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _known(serialize(self))


def _known(data: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if value not in (None, (), [])}


def shared_by(link: Link, count: int) -> Link:
    """What each of so many devices has of a link that all use at once: equal parts of its bandwidth."""
    if count == 1:
        return link
    curve = link.curve and tuple((size, speed / count) for size, speed in link.curve)
    own = {"bandwidth_gb_per_s": link.bandwidth_gb_per_s / count, "curve": curve}
    return link.model_copy(update=own)


def gb_per_s(link: Link, num_bytes: float) -> float:
    """One-way bandwidth for a message of this size: the link's curve over log(bytes), constant outside it."""
    curve = link.curve
    if curve is None:
        return link.bandwidth_gb_per_s
    if num_bytes <= curve[0][0]:
        return curve[0][1]
    if num_bytes >= curve[-1][0]:
        return curve[-1][1]
    above = bisect_right(curve, num_bytes, key=lambda pair: pair[0])
    (low_bytes, low), (high_bytes, high) = curve[above - 1], curve[above]
    share = log(num_bytes / low_bytes) / log(high_bytes / low_bytes)
    return low + share * (high - low)


def slowest_of(links: Iterable[Link]) -> Link:
    """The bandwidth of the slowest for each size of message, the latency of the longest: what a ring over all
    of them has.
    """
    each = list(dict.fromkeys(links))
    sizes = sorted({size for link in each for size, _ in link.curve or ()})
    # As it is: what several share may be less than a file may say.
    return Link.model_construct(
        latency_us=max(link.latency_us for link in each),
        bandwidth_gb_per_s=min(link.bandwidth_gb_per_s for link in each),
        curve=tuple((size, min(gb_per_s(link, size) for link in each)) for size in sizes) or None,
    )
