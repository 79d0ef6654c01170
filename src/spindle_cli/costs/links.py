"""How long messages and collectives take over a cluster's links.

Latency plus bytes over bandwidth, as NCCL models it (`src/graph/tuning.cc`), by the algorithms that NCCL has
for each collective. Bytes and seconds throughout. The one definition: profile, planner, program simulator and
report call it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil, log2
from typing import NamedTuple

from spindle_cli.files.cluster import Cluster, Link
from spindle_cli.files.nodes import gb_per_s
from spindle_cli.units import GB

# Of a link's bandwidth, what NCCL takes trees to reach (NVIDIA/nccl src/graph/tuning.cc): `busBw * .9`, and
# of that so much from 64, 128, 256 bytes and so on (`treeCorrectionFactor` of the simple protocol).
_TREE_SPEED = 0.9
_OF_SMALLER = (*(0.9,) * 7, 0.8, 0.7, 0.6, 0.6, *(0.5,) * 6, 0.6, 0.6, 0.7, 0.8, 0.9)


def bandwidth_bytes_per_s(num_bytes: float, link: Link) -> float:
    """One-way bandwidth for a message of this size: the link's curve over log(bytes), constant outside it."""
    return gb_per_s(link, num_bytes) * GB


def transfer_s(num_bytes: float, link: Link) -> float:
    """Seconds for one message between two devices; nothing takes no time."""
    if num_bytes <= 0:
        return 0.0
    return link.latency_s + num_bytes / bandwidth_bytes_per_s(num_bytes, link)


def all_reduce_s(num_bytes: float, devices: Sequence[int], cluster: Cluster) -> float:
    """Seconds to sum `num_bytes` held by each of `devices` so that each has the sum.

    The faster of what the library can choose from: rings over all devices, or trees. Gloo only has one ring.
    """
    return spread_all_reduce_s(num_bytes, per_node(devices, cluster), cluster)


class Spread(NamedTuple):
    """How some devices lie on the nodes.

    `counts`: of each node that has any, how many, ascending. `nodes`: which these are, ascending, where not
    all nodes have equal links, and as many cards. `side_by_side`: how many sets that lie like this do the
    same at the same time, so that they share the nodes' cards.
    """

    counts: tuple[int, ...]
    nodes: tuple[int, ...] = ()
    side_by_side: int = 1

    @property
    def num_devices(self) -> int:
        """All of them."""
        return sum(self.counts)

    @property
    def goes_by_node(self) -> bool:
        """Whether there are several nodes, with equally many of the devices each, and several."""
        return len(self.counts) > 1 and len(set(self.counts)) == 1 and self.counts[0] > 1


def per_node(devices: Sequence[int], cluster: Cluster) -> Spread:
    """How some devices lie on the nodes."""
    counts = Counter(cluster.node_of[device] for device in devices)
    nodes = () if cluster.has_one_kind_of_nodes else tuple(sorted(counts))
    return Spread(tuple(sorted(counts.values())), nodes)


def spread_all_reduce_s(num_bytes: float, spread: Spread, cluster: Cluster) -> float:
    """`all_reduce_s` over devices that lie like this."""
    if spread.num_devices < 2 or num_bytes <= 0:
        return 0.0
    shape = _Shape(spread, cluster)
    ring_s = shape.ring_s(num_bytes, rounds=2)
    if cluster.talks_by == "gloo":
        return ring_s
    return min(ring_s, shape.tree_s(num_bytes))


def all_gather_s(num_bytes: float, devices: Sequence[int], cluster: Cluster) -> float:
    """Seconds until each of `devices`, holding an equal share of `num_bytes`, holds all of it.

    Run backwards it is a reduce-scatter, which takes as long. Rings over all devices: NCCL has no trees for
    it, nor goes it first inside nodes and then between them. Where each node has one of the devices NCCL may
    double what goes around in every step (PAT, from 2.23 on), in as many steps as the number of nodes has
    doublings.
    """
    return spread_all_gather_s(num_bytes, per_node(devices, cluster), cluster)


def spread_all_gather_s(num_bytes: float, spread: Spread, cluster: Cluster) -> float:
    """`all_gather_s` over devices that lie like this."""
    if spread.num_devices < 2 or num_bytes <= 0:
        return 0.0
    shape = _Shape(spread, cluster)
    ring_s = shape.ring_s(num_bytes, rounds=1)
    if cluster.talks_by == "gloo" or shape.most_per_node > 1:
        return ring_s
    return min(ring_s, shape.doubling_s(num_bytes))


def by_node_s(num_bytes: float, spread: Spread, cluster: Cluster) -> float:
    """Seconds of a scatter that goes around every node first, and then, for each device's part, over the
    nodes, all parts at once over the cards that there are; or of a gather the other way round.

    Args:
        spread: one that `goes_by_node`.
    """
    if num_bytes <= 0:
        return 0.0
    shape, local = _Shape(spread, cluster), spread.counts[0]
    bandwidth = bandwidth_bytes_per_s(num_bytes, shape.intra)
    inside_s = around_node_seconds(num_bytes, local, shape.intra.latency_s, bandwidth)
    return inside_s + shape.doubling_s(num_bytes / local, local / shape.num_cards)


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
        cards = cluster.cards_of_node
        fewest = min(cards[node] for node in spread.nodes) if spread.nodes else min(cards)
        self.num_cards = min(fewest / spread.side_by_side, min(counts))
        self.num_rings = min(1, self.num_cards) if cluster.talks_by == "gloo" else self.num_cards
        links = cluster.links_among(spread.nodes) if spread.nodes else cluster.links
        self.intra, self.inter = links.intra_node, links.inter_node

    def ring_s(self, num_bytes: float, rounds: int) -> float:
        """Rings of n devices: rounds x (n - 1) steps, each of 1/n of the bytes.

        As many rings side by side as every node has cards for its devices of the set, each crossing between
        two nodes once and by a card of its own, so that a node with few of them limits the others. A step is
        as slow as its slowest hop; the latency of a hop is paid where a ring has one.
        """
        return ring_seconds(
            num_bytes,
            rounds,
            self.num_devices,
            self.num_nodes,
            self.num_rings,
            self.intra.latency_s,
            bandwidth_bytes_per_s(num_bytes, self.intra),
            self.inter.latency_s,
            bandwidth_bytes_per_s(num_bytes, self.inter),
        )

    def tree_s(self, num_bytes: float) -> float:
        """A chain inside each node and binary trees over the nodes, up and down, pipelined, over as many
        cards as there are. Of two nodes each is the root of a tree with half of the bytes, which all cross
        once each way.
        """
        return tree_seconds(
            num_bytes,
            self.num_nodes,
            self.most_per_node,
            self.num_cards,
            self.intra.latency_s,
            bandwidth_bytes_per_s(num_bytes, self.intra),
            self.inter.latency_s,
            bandwidth_bytes_per_s(num_bytes, self.inter),
        )

    def doubling_s(self, num_bytes: float, at_once: float = 1.0) -> float:
        """Over a device of each node, distances between those that exchange doubling. `at_once`: how many of
        these share each card.
        """
        bandwidth = bandwidth_bytes_per_s(num_bytes, self.inter)
        return doubling_seconds(
            num_bytes, self.num_nodes, self.num_cards, at_once, self.inter.latency_s, bandwidth
        )


# The formulas by numbers alone, so that what counts in compiled loops has the same ones (`plan/refine`).


def ring_seconds(
    num_bytes: float,
    rounds: int,
    num_devices: int,
    num_nodes: int,
    num_rings: float,
    intra_latency_s: float,
    intra_bytes_per_s: float,
    inter_latency_s: float,
    inter_bytes_per_s: float,
) -> float:
    """Seconds of rings over several devices (`_Shape.ring_s`); bandwidths are those for so many bytes."""
    crossings = num_nodes if num_nodes > 1 else 0
    steps = rounds * (num_devices - 1)
    hops_s = (num_devices - crossings) * intra_latency_s + crossings * inter_latency_s
    slowest = intra_bytes_per_s
    if crossings:
        slowest = num_rings * inter_bytes_per_s
        if num_devices > crossings:
            slowest = min(intra_bytes_per_s, slowest)
    return steps * hops_s / num_devices + steps * num_bytes / num_devices / slowest


def tree_seconds(
    num_bytes: float,
    num_nodes: int,
    most_per_node: int,
    num_cards: float,
    intra_latency_s: float,
    intra_bytes_per_s: float,
    inter_latency_s: float,
    inter_bytes_per_s: float,
) -> float:
    """Seconds of chains and trees over several devices (`_Shape.tree_s`)."""
    hops_s = (most_per_node - 1) * intra_latency_s + ceil(log2(num_nodes)) * inter_latency_s
    moving_s = 2 * num_bytes / intra_bytes_per_s if most_per_node > 1 else 0.0
    if num_nodes > 1:
        crossing = num_bytes if num_nodes == 2 else 2 * num_bytes
        moving_s = max(moving_s, crossing / num_cards / inter_bytes_per_s)
    doublings = int(log2(max(1, num_bytes // 64)))
    speed = _TREE_SPEED * (_OF_SMALLER[doublings] if doublings < len(_OF_SMALLER) else 1.0)
    return 2 * hops_s + moving_s / speed


def doubling_seconds(
    num_bytes: float,
    num_nodes: int,
    num_cards: float,
    at_once: float,
    inter_latency_s: float,
    inter_bytes_per_s: float,
) -> float:
    """Seconds of exchanges over doubling distances (`_Shape.doubling_s`)."""
    moved = (num_nodes - 1) / num_nodes * num_bytes * at_once
    return ceil(log2(num_nodes)) * inter_latency_s + moved / (inter_bytes_per_s * min(1.0, num_cards))


def around_node_seconds(
    num_bytes: float, local: int, intra_latency_s: float, intra_bytes_per_s: float
) -> float:
    """Seconds of a scatter over the `local` devices of each node."""
    return (local - 1) * (intra_latency_s + num_bytes / local / intra_bytes_per_s)
