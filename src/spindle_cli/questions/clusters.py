"""The same cluster with another number of devices."""

from __future__ import annotations

from spindle_cli.errors import UsageError
from spindle_cli.files.cluster import Cluster, NodeGroup


def with_devices(cluster: Cluster, num_devices: int) -> Cluster:
    """The first `num_devices` devices of a cluster; more than it has are added to its last node.

    Raises:
        UsageError: fewer than one device.
    """
    if num_devices < 1:
        raise UsageError(f"a cluster of {num_devices} devices was asked for; expected at least 1")
    groups: list[NodeGroup] = []
    left = num_devices
    for group in cluster.nodes:
        whole, rest = divmod(min(left, group.count * group.devices), group.devices)
        if whole:
            groups.append(group.model_copy(update={"count": whole}))
        if rest:
            groups.append(group.model_copy(update={"count": 1, "devices": rest}))
        left -= whole * group.devices + rest
    if left:
        last = groups.pop()
        if last.count > 1:
            groups.append(last.model_copy(update={"count": last.count - 1}))
        groups.append(last.model_copy(update={"count": 1, "devices": last.devices + left}))
    # A copy with update would keep the cached number of devices of the original.
    return Cluster(
        name=f"{cluster.name}, {num_devices} devices",
        nodes=tuple(groups),
        links=cluster.links,
        backend=cluster.backend,
    )
