"""Of allocations over several types of device, what gets to host memory and back behind what is computed.

All shares of a slice last as long as the slowest, and each device copies what it keeps of its own share over
the link of its own node. So of the ops of an allocation the share

    min over its shares of  min(forward, backward) / copy

hides, with the passes of the slowest share: what computes fast and has a slow link, or large shares, sets it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from spindle_cli.costs.recompute_and_offload import hidden_share
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.problem import Point
from spindle_cli.profile.types import MetaOpProfile


def hidden_shares(points: Sequence[Point], metaop: MetaOpProfile, cluster: Cluster) -> tuple[float, ...]:
    """Of each of a MetaOp's allocations, on which nothing is recomputed or moved: of its ops, the share whose
    copies hide.
    """
    return tuple(_hidden_share(point, metaop, cluster) for point in points)


def _hidden_share(point: Point, metaop: MetaOpProfile, cluster: Cluster) -> float:
    found = []
    for kind, samples in _largest_of_types(point, metaop.batch_size, cluster):
        link = cluster.host_link_of_type[kind]
        if link is None:
            return 0.0
        cuts = metaop.batch_size / samples
        found.append(hidden_share(metaop, cuts, point.tp, point.forward_s, point.backward_s, link))
    return min(found)


def _largest_of_types(point: Point, batch_size: int, cluster: Cluster) -> Iterator[tuple[str, float]]:
    """Of each type that an allocation has devices of, with the samples of their largest share."""
    assert point.counts is not None, "allocations over several types say how many of each"
    equal = batch_size / point.dp
    rows = point.rows
    samples = [equal] * point.dp if rows is None else [last - first for first, last in pairwise(rows)]
    first = 0
    for kind, count in zip(cluster.types, point.counts, strict=True):
        own = samples[first : first + count // point.tp]
        first += len(own)
        if own:
            yield kind, max(own)
