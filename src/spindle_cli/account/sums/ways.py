"""In which way each group of parameters is summed and gathered: in ranges of which size, padded or each by
itself, or as a sum of all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from spindle_cli.account.types import ParameterGroup
from spindle_cli.costs.links import Spread, is_faster_summed, per_node
from spindle_cli.costs.parameters.unequal import is_padded
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding


def with_ways(
    groups: Iterable[ParameterGroup], weights: Sequence[int], cluster: Cluster
) -> tuple[ParameterGroup, ...]:
    """Groups with the weights of their devices, where these differ, and the fastest way of each collective.

    Args:
        weights: of each device of the cluster; none: all ranges are equal.
    """
    spreads: dict[tuple[int, ...], Spread] = {}
    found = []
    for group in groups:
        if weights:
            group = _with_weights(group, weights, cluster)
        if _may_be_whole(group, cluster):
            if group.devices not in spreads:
                spreads[group.devices] = per_node(group.devices, cluster)
            group = _with_whole(group, spreads[group.devices], cluster)
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


def _may_be_whole(group: ParameterGroup, cluster: Cluster) -> bool:
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


def _with_whole(group: ParameterGroup, spread: Spread, cluster: Cluster) -> ParameterGroup:
    sums_whole = is_faster_summed(group.num_bytes, spread, cluster)
    gathers_whole = is_faster_summed(group.parameter_bytes, spread, cluster)
    if not (sums_whole or gathers_whole):
        return group
    return replace(group, sums_whole=sums_whole, gathers_whole=gathers_whole)
