"""A cluster whose devices are replica groups: each stands for all of one, with their memory and links
together.

What such a device holds whole, its replica group shares out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise

from spindle_cli.files.cluster import (
    MAX_MEMORY_GIB,
    MOST_GB_PER_S,
    BetweenLink,
    Cluster,
    Link,
    Links,
    NodeGroup,
)
from spindle_cli.units import GIB


@dataclass(frozen=True)
class ReplicaGroup:
    """Devices of one type that share out parameters among themselves.

    Attributes:
        devices: of the cluster, consecutive ones.
        cluster: they alone.
    """

    devices: tuple[int, ...]
    cluster: Cluster

    @property
    def size(self) -> int:
        """How many devices it has."""
        return len(self.devices)

    @property
    def kind(self) -> str:
        """What replica groups of as many devices of the same type have alike."""
        return f"{self.cluster.device_type}-x{self.size}"

    @property
    def num_cards(self) -> int:
        """Network cards that its devices send and receive through."""
        return sum(self.cluster.cards_of_node)


def replica_groups_of(cluster: Cluster, sizes: Sequence[int]) -> tuple[ReplicaGroup, ...]:
    """Replica groups of so many devices, one behind the other. All devices of one are of the same type."""
    ends = accumulate(sizes, initial=0)
    return tuple(_replica_group(cluster, range(first, end)) for first, end in pairwise(ends))


def _replica_group(cluster: Cluster, devices: range) -> ReplicaGroup:
    group_of_node = [group for group in cluster.nodes for _ in range(group.count)]
    on_node = Counter(cluster.node_of[device] for device in devices)
    nodes = tuple(_with_devices(group_of_node[node], count) for node, count in on_node.items())
    return ReplicaGroup(tuple(devices), cluster.changed(nodes=nodes, links=cluster.links_among(on_node)))


def _with_devices(group: NodeGroup, count: int) -> NodeGroup:
    """A node with so many of its devices, and the cards of these, linked as the cluster says."""
    nics = max(1, group.cards * count // group.devices)
    update = {"count": 1, "devices": count, "nics": nics, "name": None, "links": None}
    return group.model_copy(update=update)


def cluster_of(
    replica_groups: Sequence[ReplicaGroup], cluster: Cluster, beside_bytes: float = 0.0
) -> Cluster:
    """One device for each replica group, a node by itself, with what plans may take of all its devices; links
    as fast as those of all devices of the smaller replica group at once.

    Args:
        replica_groups: those of one kind one behind the other. Of a kind by itself a replica group is a type
            of device.
        beside_bytes: of each device's memory, what is left free.
    """
    kinds = {replica_group.kind: replica_group for replica_group in replica_groups}
    counts = Counter(replica_group.kind for replica_group in replica_groups)
    nodes = tuple(
        NodeGroup(
            count=counts[kind],
            devices=1,
            device=kind if len(kinds) > 1 else replica_group.cluster.device_type,
            memory_gib=min(MAX_MEMORY_GIB, sum(_memory_bytes(replica_group, beside_bytes)) / GIB),
            reserve_gib=sum(replica_group.cluster.reserve_bytes) / GIB,
        )
        for kind, replica_group in kinds.items()
    )
    pairs = tuple(
        BetweenLink(groups=pair, **_link(pair, kinds, cluster).model_dump())
        for pair in combinations(kinds, 2)
    )
    least = min(kinds, key=lambda kind: kinds[kind].num_cards)
    link = _link((least, least), kinds, cluster)
    links = Links(intra_node=link, inter_node=link, between=pairs)
    return Cluster(name=f"{cluster.name}, replica groups", nodes=nodes, links=links, backend=cluster.talks_by)


def _memory_bytes(replica_group: ReplicaGroup, beside_bytes: float) -> Iterator[float]:
    """The memory that each device of a replica group has for the plan: without what comes on top of it."""
    for memory, reserve in zip(
        replica_group.cluster.fill_bytes, replica_group.cluster.reserve_bytes, strict=True
    ):
        yield max(reserve + 1.0, memory - beside_bytes)


def _link(pair: tuple[str, str], kinds: dict[str, ReplicaGroup], cluster: Cluster) -> Link:
    """Between replica groups of two kinds: as many links side by side as the smaller has, each with an equal
    part of every message.
    """
    first, second = (kinds[kind] for kind in pair)
    links = cluster.links_among(
        cluster.node_of[device] for replica_group in (first, second) for device in replica_group.devices
    )
    if cluster.is_inside_node(range(cluster.num_devices)):
        return side_by_side(links.intra_node, min(first.size, second.size))
    return side_by_side(links.inter_node, min(first.num_cards, second.num_cards))


def side_by_side(link: Link, times: int) -> Link:
    """So many of a link, each with an equal part of every message; no faster than a link can be."""

    def together(speed: float) -> float:
        return min(MOST_GB_PER_S, times * speed)

    curve = link.curve and tuple((times * size, together(speed)) for size, speed in link.curve)
    return Link(latency_us=link.latency_us, bandwidth_gb_per_s=together(link.bandwidth_gb_per_s), curve=curve)
