"""How long messages and collectives take over a cluster's links.

Latency plus bytes over bandwidth, as NCCL models it (`src/graph/tuning.cc`). Bytes and seconds throughout.
The one definition: profile, planner, program simulator and report call it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from math import ceil, log, log2
from typing import NamedTuple

from spindle_cli.files.cluster import Cluster, Link
from spindle_cli.units import GB


def bandwidth_bytes_per_s(num_bytes: float, link: Link) -> float:
    """One-way bandwidth for a message of this size: the link's curve over log(bytes), constant outside it."""
    curve = link.curve
    if curve is None:
        return link.bandwidth_bytes_per_s
    if num_bytes <= curve[0][0]:
        return curve[0][1] * GB
    if num_bytes >= curve[-1][0]:
        return curve[-1][1] * GB
    above = bisect_right(curve, num_bytes, key=lambda pair: pair[0])
    (low_bytes, low), (high_bytes, high) = curve[above - 1], curve[above]
    share = log(num_bytes / low_bytes) / log(high_bytes / low_bytes)
    return (low + share * (high - low)) * GB


def transfer_s(num_bytes: float, link: Link) -> float:
    """Seconds for one message between two devices; nothing takes no time."""
    if num_bytes <= 0:
        return 0.0
    return link.latency_s + num_bytes / bandwidth_bytes_per_s(num_bytes, link)


def all_reduce_s(num_bytes: float, devices: Sequence[int], cluster: Cluster) -> float:
    """Seconds to sum `num_bytes` held by each of `devices` so that each has the sum.

    The fastest of what the library can choose from: rings over all devices; on several nodes with equally
    many of the devices each, a reduce-scatter inside every node, a ring over the nodes for each of the shares
    at once, an all-gather inside; a tree (small messages). Gloo only has one ring.
    """
    return spread_all_reduce_s(num_bytes, per_node(devices, cluster), cluster)


class Spread(NamedTuple):
    """How some devices lie on the nodes.

    `counts`: of each node that has any, how many, ascending. `nodes`: which these are, ascending, where not
    all nodes have equal links.
    """

    counts: tuple[int, ...]
    nodes: tuple[int, ...] = ()

    @property
    def num_devices(self) -> int:
        """All of them."""
        return sum(self.counts)


def per_node(devices: Sequence[int], cluster: Cluster) -> Spread:
    """How some devices lie on the nodes."""
    counts = Counter(cluster.node_of[device] for device in devices)
    nodes = () if cluster.has_one_kind_of_links else tuple(sorted(counts))
    return Spread(tuple(sorted(counts.values())), nodes)


def spread_all_reduce_s(num_bytes: float, spread: Spread, cluster: Cluster) -> float:
    """`all_reduce_s` over devices that lie like this."""
    if spread.num_devices < 2 or num_bytes <= 0:
        return 0.0
    shape = _Shape(spread, cluster)
    ring_s = shape.ring_s(num_bytes, rounds=2)
    if cluster.talks_by == "gloo":
        return ring_s
    return min(ring_s, shape.tree_s(num_bytes), shape.hierarchical_s(num_bytes, rounds=2))


def all_gather_s(num_bytes: float, devices: Sequence[int], cluster: Cluster) -> float:
    """Seconds until each of `devices`, holding an equal share of `num_bytes`, holds all of it.

    Run backwards it is a reduce-scatter, which takes as long.
    """
    return spread_all_gather_s(num_bytes, per_node(devices, cluster), cluster)


def spread_all_gather_s(num_bytes: float, spread: Spread, cluster: Cluster) -> float:
    """`all_gather_s` over devices that lie like this."""
    if spread.num_devices < 2 or num_bytes <= 0:
        return 0.0
    shape = _Shape(spread, cluster)
    ring_s = shape.ring_s(num_bytes, rounds=1)
    if cluster.talks_by == "gloo":
        return ring_s
    return min(ring_s, shape.hierarchical_s(num_bytes, rounds=1))


def spread_ring_s(num_bytes: float, spread: Spread, cluster: Cluster) -> float:
    """Seconds in which so many bytes go around one ring of devices once; of none, its latency."""
    return _Shape(spread, cluster).ring_s(num_bytes, rounds=1)


def spread_collective_s(num_bytes: float, spread: Spread, rounds: int, cluster: Cluster) -> float:
    """Seconds of a collective whose bytes go around once (scatter, gather) or twice (a sum that all get)."""
    formula = spread_all_reduce_s if rounds == 2 else spread_all_gather_s
    return formula(num_bytes, spread, cluster)


class _Shape:
    """How a set of devices lies on the nodes."""

    def __init__(self, spread: Spread, cluster: Cluster) -> None:
        counts = spread.counts
        self.num_devices = spread.num_devices
        self.num_nodes = len(counts)
        self.most_per_node = max(counts)
        # As many cards of a node as it has devices in the set, whichever these are: NCCL's rings may leave a
        # node through any of its cards (NVIDIA/nccl src/graph/search.cc). Gloo has one ring.
        self.num_cards = min(min(cluster.cards_of_node), min(counts))
        self.num_rings = 1 if cluster.talks_by == "gloo" else self.num_cards
        self.is_even = len(set(counts)) == 1
        links = cluster.links_among(spread.nodes) if spread.nodes else cluster.links
        self.intra, self.inter = links.intra_node, links.inter_node

    def ring_s(self, num_bytes: float, rounds: int) -> float:
        """Rings of n devices: rounds x (n - 1) steps, each of 1/n of the bytes.

        As many rings side by side as every node has cards for its devices of the set, each crossing between
        two nodes once and by a card of its own, so that a node with few of them limits the others. A step is
        as slow as its slowest hop; the latency of a hop is paid where a ring has one.
        """
        n, crossings = self.num_devices, self.num_nodes if self.num_nodes > 1 else 0
        steps = rounds * (n - 1)
        latency_s = steps * ((n - crossings) * self.intra.latency_s + crossings * self.inter.latency_s) / n
        slowest = min(
            ([bandwidth_bytes_per_s(num_bytes, self.intra)] if n > crossings else [])
            + ([self.num_rings * bandwidth_bytes_per_s(num_bytes, self.inter)] if crossings else [])
        )
        return latency_s + steps * num_bytes / n / slowest

    def tree_s(self, num_bytes: float) -> float:
        """A chain inside each node and a binary tree over the nodes, up and down, pipelined."""
        hops_s = (self.most_per_node - 1) * self.intra.latency_s + ceil(
            log2(self.num_nodes)
        ) * self.inter.latency_s
        links = [self.intra] * (self.most_per_node > 1) + [self.inter] * (self.num_nodes > 1)
        slowest = min(bandwidth_bytes_per_s(num_bytes, link) for link in links)
        return 2 * hops_s + 2 * num_bytes / slowest

    def hierarchical_s(self, num_bytes: float, rounds: int) -> float:
        """A ring inside every node, and one over the nodes for each device's share, all shares at once, over
        as many cards as there are.
        """
        if self.num_nodes == 1 or not self.is_even or self.most_per_node == 1:
            return float("inf")
        local, nodes = self.most_per_node, self.num_nodes
        share = num_bytes / local
        inside_s = (
            rounds
            * (local - 1)
            * (self.intra.latency_s + num_bytes / local / bandwidth_bytes_per_s(num_bytes, self.intra))
        )
        between_s = (
            rounds
            * (nodes - 1)
            * (
                self.inter.latency_s
                + share / nodes / bandwidth_bytes_per_s(share, self.inter) * local / self.num_cards
            )
        )
        return inside_s + between_s
