"""In which way each group of parameters is summed and gathered: in ranges of which size, padded or each by
itself; inside of nodes and then between them; or as a sum of all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

from spindle_cli.account.types import ParameterGroup
from spindle_cli.costs.links import (
    by_node_s,
    per_node,
    spread_all_gather_s,
    spread_all_reduce_s,
)
from spindle_cli.costs.parameters.unequal import is_padded
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding

# By nodes some devices need two communicators more, each with more than half a GiB of every device: their
# sums and gathers have to take so much less of a step together.
_WORTH_S = 0.01


def with_ways(
    groups: Iterable[ParameterGroup],
    weights: Sequence[int],
    cluster: Cluster,
    *,
    sharded: bool,
    by_node: bool = True,
) -> tuple[ParameterGroup, ...]:
    """Groups with the weights of their devices, where these differ, and the fastest way of each collective.

    Args:
        weights: of each device of the cluster; none: all ranges are equal.
        sharded: devices share optimizer state.
        by_node: something may go by nodes.
    """
    found = [_with_weights(group, weights, cluster) if weights else group for group in groups]
    if not sharded or cluster.talks_by != "nccl":
        return tuple(found)
    of_devices: dict[tuple[int, ...], list[int]] = {}
    for place, group in enumerate(found):
        if _has_ways(group):
            of_devices.setdefault(group.devices, []).append(place)
    for devices, places in of_devices.items():
        ways = _Ways(devices, cluster)
        nodes = ways.nodes_worth([found[place] for place in places]) if by_node else ()
        for place in places:
            found[place] = ways.fastest(found[place], nodes)
    return tuple(found)


def _with_weights(group: ParameterGroup, weights: Sequence[int], cluster: Cluster) -> ParameterGroup:
    own = tuple(weights[device] for device in group.devices)
    is_whole = group.is_gathered or group.sharding is Sharding.NONE
    if is_whole or len(set(own)) == 1:
        return group
    spread = per_node(group.devices, cluster)
    return replace(
        group,
        weights=own,
        pads_sum=is_padded(group.num_bytes, own, spread, cluster),
        pads_gather=is_padded(group.parameter_bytes, own, spread, cluster),
    )


def _has_ways(group: ParameterGroup) -> bool:
    """Whether it lies whole on all of its devices, and they share out nothing but the optimizer's state, in
    equal ranges.
    """
    return (
        len(group.devices) > 1
        and group.sharding is Sharding.OPTIMIZER
        and group.is_trained
        and not (group.is_gathered or group.weights)
    )


class _Ways:
    """Of groups of the same devices."""

    def __init__(self, devices: tuple[int, ...], cluster: Cluster) -> None:
        self._devices, self._cluster = devices, cluster
        self._spread = per_node(devices, cluster)
        self._seconds: dict[int, tuple[float, float, float]] = {}

    def _of(self, num_bytes: int) -> tuple[float, float, float]:
        """Seconds of as many bytes summed whole, scattered or gathered at once, and by nodes."""
        if num_bytes not in self._seconds:
            at = num_bytes, self._spread, self._cluster
            by_node = by_node_s(*at) if self._spread.goes_by_node else inf
            self._seconds[num_bytes] = spread_all_reduce_s(*at), spread_all_gather_s(*at), by_node
        return self._seconds[num_bytes]

    def nodes_worth(self, groups: Iterable[ParameterGroup]) -> tuple[tuple[int, ...], ...]:
        """The devices by nodes, where that is worth it for all of the groups together; none where it is not.
        Ranges lie in other places then, whichever way each group goes.
        """
        if not self._spread.goes_by_node:
            return ()
        saved_s = 0.0
        for group in groups:
            for whole_s, at_once_s, by_s in map(self._of, (group.num_bytes, group.parameter_bytes)):
                saved_s += min(whole_s, at_once_s) - min(whole_s, by_s)
        if saved_s < _WORTH_S:
            return ()
        found: dict[int, list[int]] = {}
        for device in self._devices:
            found.setdefault(self._cluster.node_of[device], []).append(device)
        return tuple(map(tuple, found.values()))

    def fastest(self, group: ParameterGroup, nodes: tuple[tuple[int, ...], ...]) -> ParameterGroup:
        """A group with its ways."""
        is_whole = [
            whole_s < (by_s if nodes else at_once_s)
            for whole_s, at_once_s, by_s in map(self._of, (group.num_bytes, group.parameter_bytes))
        ]
        if not (nodes or any(is_whole)):
            return group
        return replace(group, sums_whole=is_whole[0], gathers_whole=is_whole[1], nodes=nodes)
