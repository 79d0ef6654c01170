"""In which way each group of parameters is summed and gathered: in ranges of which size, padded or each by
itself; inside of nodes and then between them; or as a sum of all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from spindle_cli.account.types import ParameterGroup
from spindle_cli.costs.links import (
    Spread,
    by_node_s,
    goes_by_node,
    per_node,
    spread_all_gather_s,
    spread_all_reduce_s,
)
from spindle_cli.costs.parameters.unequal import is_padded
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding

# Of what a sum and a gather take over all devices at once: by nodes they need more communicators, each of
# which takes memory, so that they have to take less than this.
_WORTH = 0.9


def with_ways(
    groups: Iterable[ParameterGroup], weights: Sequence[int], cluster: Cluster, *, sharded: bool
) -> tuple[ParameterGroup, ...]:
    """Groups with the weights of their devices, where these differ, and the fastest way of each collective.

    Args:
        weights: of each device of the cluster; none: all ranges are equal.
        sharded: devices share optimizer state.
    """
    spreads: dict[tuple[int, ...], Spread] = {}
    found = []
    for group in groups:
        if weights:
            group = _with_weights(group, weights, cluster)
        if sharded and _has_ways(group, cluster):
            if group.devices not in spreads:
                spreads[group.devices] = per_node(group.devices, cluster)
            group = _with_fastest(group, spreads[group.devices], cluster)
        found.append(group)
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


def _has_ways(group: ParameterGroup, cluster: Cluster) -> bool:
    """Whether it lies whole on all of its devices, and they share out nothing but the optimizer's state, in
    equal ranges.
    """
    return (
        cluster.talks_by == "nccl"
        and len(group.devices) > 1
        and group.sharding is Sharding.OPTIMIZER
        and group.is_trained
        and not (group.is_gathered or group.weights)
    )


def _with_fastest(group: ParameterGroup, spread: Spread, cluster: Cluster) -> ParameterGroup:
    """Ranges lie otherwise where they are scattered and gathered node by node, so that both are."""
    sizes = group.num_bytes, group.parameter_bytes
    whole_s = [spread_all_reduce_s(size, spread, cluster) for size in sizes]
    ranged_s = [spread_all_gather_s(size, spread, cluster) for size in sizes]
    nodes: tuple[tuple[int, ...], ...] = ()
    if goes_by_node(spread):
        by_node = [by_node_s(size, spread, cluster) for size in sizes]
        if sum(map(min, by_node, whole_s)) < _WORTH * sum(map(min, ranged_s, whole_s)):
            ranged_s, nodes = by_node, _by_node(group.devices, cluster)
    sums_whole, gathers_whole = (whole < ranged for whole, ranged in zip(whole_s, ranged_s, strict=True))
    if not (sums_whole or gathers_whole or nodes):
        return group
    return replace(group, sums_whole=sums_whole, gathers_whole=gathers_whole, nodes=nodes)


def _by_node(devices: Sequence[int], cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    found: dict[int, list[int]] = {}
    for device in devices:
        found.setdefault(cluster.node_of[device], []).append(device)
    return tuple(map(tuple, found.values()))
