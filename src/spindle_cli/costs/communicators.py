"""Device memory that NCCL takes for communicators: buffers of every channel to every device that is met.

Worked out from NCCL's own sizes and compared with what was seen of others, not measured here. It shrinks with
`NCCL_BUFFSIZE` and `NCCL_MAX_NCHANNELS`. Of messages, workers bound the channels themselves
(`MESSAGE_CHANNELS`). gloo's buffers are in the host's memory, and small.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from spindle_cli.files.cluster import Cluster
from spindle_cli.units import KIB, MIB

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
    """The same by numbers alone: of devices on so many nodes, the fewest of whose network cards are those of
    a node. Of channels there are as many as the node has that has fewest, of which NCCL takes the least.
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
