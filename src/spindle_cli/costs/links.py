"""How long messages and collectives take over a cluster's links, and what communicators take of memory.

How long messages and collectives take over a cluster's links.

Latency plus bytes over bandwidth, as NCCL models it (`src/graph/tuning.cc`), by the algorithms that NCCL has
for each collective. Bytes and seconds throughout. The one definition: profile, planner, program simulator and
report call it.

Device memory that NCCL takes for communicators: buffers of every channel to every device that is met.

Worked out from NCCL's own sizes and compared with what was seen of others, not measured here. It shrinks with
`NCCL_BUFFSIZE` and `NCCL_MAX_NCHANNELS`. Of messages, workers bound the channels themselves
(`MESSAGE_CHANNELS`). gloo's buffers are in the host's memory, and small.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import ceil, log2
from typing import NamedTuple

from spindle_cli.files.cluster import Cluster, Link, gb_per_s
from spindle_cli.units import GB, KIB, MIB

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


# Of a channel over which one device sends to another: 10 MiB at the receiver, for buffers of the three
# protocols of 4, 4.7 and 0.5 MiB, and 2 MiB at the sender (sizes that NVIDIA/nccl issue 1685 sees allocated).
# Whoever sends to one and receives from one has both.
_BOTH_WAYS_BYTES = 12 * MIB
# Of collectives inside of one node: on 4 A100 with NVLink twelve rings are found, and NCCL takes each twice
# (NVIDIA/nccl issue 524). Without NVLink there are fewer, of which no cluster file tells.
_INSIDE_CHANNELS = 24
# Across nodes every network card ends one ring, taken twice, too.
_CHANNELS_OF_CARD = 2
# What workers set NCCL_MAX_P2P_NCHANNELS to, which bounds the channels to each other device (NVIDIA/nccl
# issue 1598). NCCL's own bound of 32 takes four times the memory, for messages that a step rarely waits for.
MESSAGE_CHANNELS = 8
# Of messages, of a channel to one more device of the node: 3.28 GB for 7 of them with 32 channels each
# (NVIDIA/nccl issue 1685, on 8 H100).
_MESSAGE_CHANNEL_BYTES = 14 * MIB
# Messages with other nodes, however many: one pool for what is sent and one for what is received, each of 16
# steps of a channel, of `NCCL_P2P_NET_CHUNKSIZE` (sharedNetBuffersInit in NCCL's src/transport/net.cc). The
# 512 MiB of NVIDIA/nccl issue 2363 are such a pool of 64 channels, with NVLink's steps of 512 KiB.
_OTHER_NODES_BYTES = 2 * MESSAGE_CHANNELS * 16 * 128 * KIB


def collectives_bytes(devices: Sequence[int], cluster: Cluster) -> int:
    """Bytes that each of these devices needs for collectives over all of them.

    In each channel a ring has one device before and one behind; a tree, which inside of a node is a chain,
    has n - 1 links of n devices, both ways. So a device has 1 + 2 (n - 1) / n times what both ways take: 576
    MiB of two devices of a node and 720 of four, where 544 and 688 were seen (NVIDIA/nccl issue 964, on 4
    A100 with NVLink).
    """
    cards: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    for device in devices:
        cards[cluster.node_of[device]].add(cluster.card_of[device])
    return bytes_of_collectives(len(devices), len(cards), min(map(len, cards.values())))


def bytes_of_collectives(num_devices: int, num_nodes: int, fewest_cards: int) -> int:
    """Bytes of the channels of collectives, by numbers alone: `devices` on so many nodes, the fewest of whose
    network cards are those of a node. There are as many channels as the node has that has fewest, of which
    NCCL takes the least.
    """
    if num_devices == 1:
        return 0
    channels = _INSIDE_CHANNELS
    if num_nodes > 1:
        channels = min(_INSIDE_CHANNELS, _CHANNELS_OF_CARD * fewest_cards)
    return channels * _BOTH_WAYS_BYTES * (3 * num_devices - 2) // num_devices


def messages_bytes(num_inside: int, *, outside: bool) -> int:
    """Bytes that a device needs for messages with so many others of its node, and with some outside of it."""
    inside = num_inside * MESSAGE_CHANNELS * _MESSAGE_CHANNEL_BYTES
    return inside + (_OTHER_NODES_BYTES if outside else 0)
