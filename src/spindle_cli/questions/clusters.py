"""Clusters like another one, with another number of devices."""

from __future__ import annotations

from spindle_cli.errors import UsageError
from spindle_cli.files.cluster import MAX_DEVICES, Cluster, Links, NodeGroup


def with_devices(cluster: Cluster, num_devices: int) -> Cluster:
    """The first `num_devices` devices of a cluster; more than it has are added to its last node.

    Raises:
        UsageError: fewer than one device, or more than can be planned for.
    """
    if not 1 <= num_devices <= MAX_DEVICES:
        raise UsageError(f"a cluster of {num_devices} devices was asked for; expected 1 to {MAX_DEVICES}")
    groups: list[NodeGroup] = []
    links, left = cluster.links, num_devices
    for group in cluster.nodes:
        whole, rest = divmod(min(left, group.count * group.devices), group.devices)
        if whole:
            groups.append(group.model_copy(update={"count": whole}))
        if rest:
            part, links = _parted(group.model_copy(update={"devices": rest}), links, is_new=bool(whole))
            groups.append(part)
        left -= whole * group.devices + rest
    if left:
        last = groups.pop()
        if last.count > 1:
            groups.append(last.model_copy(update={"count": last.count - 1}))
        larger = last.model_copy(update={"devices": last.devices + left})
        part, links = _parted(larger, links, is_new=last.count > 1)
        groups.append(part)
    labels = {group.label for group in groups}
    between = tuple(link for link in links.between if labels.issuperset(link.groups))
    return cluster.changed(
        name=f"{cluster.name}, {num_devices} devices",
        nodes=tuple(groups),
        links=links.model_copy(update={"between": between}),
    )


def with_one_more(cluster: Cluster, device: str) -> Cluster:
    """With one more device of a type, in the last node that has any."""
    place = max(number for number, group in enumerate(cluster.nodes) if group.device == device)
    group = cluster.nodes[place]
    larger = group.model_copy(update={"devices": group.devices + 1})
    larger, links = _parted(larger, cluster.links, is_new=group.count > 1)
    rest = (group.model_copy(update={"count": group.count - 1}),) if group.count > 1 else ()
    return cluster.changed(
        name=f"{cluster.name}, one more {device}",
        nodes=(*cluster.nodes[:place], *rest, larger, *cluster.nodes[place + 1 :]),
        links=links,
    )


def with_more_nodes(cluster: Cluster, place: int, num_nodes: int) -> Cluster:
    """With more nodes of the group at `place` in the cluster file; devices of later groups move up."""
    group = cluster.nodes[place]
    larger = group.model_copy(update={"count": group.count + num_nodes})
    return cluster.changed(
        name=f"{cluster.name}, {num_nodes * group.devices} more {group.label}",
        nodes=(*cluster.nodes[:place], larger, *cluster.nodes[place + 1 :]),
    )


def _parted(group: NodeGroup, links: Links, *, is_new: bool) -> tuple[NodeGroup, Links]:
    """A node of a group as a group of its own, with the links that the group has.

    Args:
        is_new: the rest of the group stays, and keeps its name.
    """
    one = group.model_copy(update={"count": 1})
    if not is_new or group.name is None:
        return one, links
    name = f"{group.name}, last node"
    between = [
        link.model_copy(update={"groups": tuple(name if own == group.name else own for own in groups)})
        for link in links.between
        if group.name in (groups := link.groups)
    ]
    both = links.model_copy(update={"between": (*links.between, *between)})
    return one.model_copy(update={"name": name}), both
