"""A cluster whose devices are teams: each stands for all of one, with their memory and links together.

What such a device holds whole, its team shares out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spindle_cli.files.cluster import Cluster
from spindle_cli.files.links import Link, Links
from spindle_cli.files.nodes.group import NodeGroup


@dataclass(frozen=True)
class Team:
    """Devices that share out parameters among themselves.

    Attributes:
        devices: of the cluster, consecutive ones: of whole nodes, or of a part of one.
        cluster: they alone.
    """

    devices: tuple[int, ...]
    cluster: Cluster

    @property
    def size(self) -> int:
        """How many devices it has."""
        return len(self.devices)


def equal_teams(cluster: Cluster, count: int) -> tuple[Team, ...]:
    """So many teams of two devices or more, of whole nodes each or of equal parts of one; none where the
    cluster is not cut so, or its nodes are not all equal.
    """
    (size, left), (group, *others) = divmod(cluster.num_devices, count), cluster.nodes
    is_cut = size % group.devices == 0 or group.devices % size == 0
    if others or left or size < 2 or not is_cut:
        return ()
    own = group.model_copy(
        update={
            "count": max(1, size // group.devices),
            "devices": min(size, group.devices),
            "nics": max(1, group.cards * min(size, group.devices) // group.devices),
        }
    )
    alone = cluster.changed(name=f"{cluster.name}, {size} devices", nodes=(own,))
    firsts = range(0, cluster.num_devices, size)
    return tuple(Team(tuple(range(first, first + size)), alone) for first in firsts)


def cluster_of(teams: Sequence[Team], cluster: Cluster, filled: float = 1.0) -> Cluster:
    """One device for each team, with the memory and reserve of all its devices, as many on a node as there
    are teams; links as fast as those of all its devices at once.

    Args:
        filled: how much of their memory beyond the reserve there is.
    """
    size = teams[0].size
    group = teams[0].cluster.nodes[0]
    reserve_gib = cluster.reserve_bytes[0] / 2**30
    usable_gib = group.memory_gib - reserve_gib
    per_node = max(1, cluster.nodes[0].devices // size)
    node = NodeGroup(
        count=len(teams) // per_node,
        devices=per_node,
        device=group.device,
        memory_gib=size * (reserve_gib + filled * usable_gib),
        reserve_gib=size * reserve_gib,
    )
    links = Links(
        intra_node=faster(cluster.links.intra_node, size),
        inter_node=faster(cluster.links.inter_node, sum(teams[0].cluster.cards_of_node)),
    )
    return Cluster(name=f"{cluster.name}, teams", nodes=(node,), links=links, backend=cluster.talks_by)


def faster(link: Link, times: int) -> Link:
    """So many of a link side by side, each with an equal part of every message."""
    curve = link.curve and tuple((times * size, times * speed) for size, speed in link.curve)
    speed = times * link.bandwidth_gb_per_s
    return Link(latency_us=link.latency_us, bandwidth_gb_per_s=speed, curve=curve)
