"""Groups of parameters that their devices share out in unequal ranges: who has how much, how these move."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from spindle_cli.account.types import ParameterGroup
from spindle_cli.costs.links import per_node
from spindle_cli.costs.parameters.unequal import is_padded
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding


def with_weights(
    groups: Iterable[ParameterGroup], weights: Sequence[int], cluster: Cluster
) -> tuple[ParameterGroup, ...]:
    """Groups with the weights of their devices, where these differ, and the faster way of each collective.

    Args:
        weights: of each device of the cluster; none: all ranges are equal.
    """
    if not weights:
        return tuple(groups)
    return tuple(_with_weights(group, weights, cluster) for group in groups)


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
