"""Device memory that NCCL takes for communicators: buffers of every channel to every device that is met.

What was seen of others, not measured here. It grows with the channels that NCCL finds links for, and shrinks
with `NCCL_BUFFSIZE` and `NCCL_MAX_NCHANNELS`. Of messages, workers bound the channels themselves
(`MESSAGE_CHANNELS`). gloo's buffers are in the host's memory, and small.
"""

from __future__ import annotations

from spindle_cli.units import MIB

# Collectives of two devices, and of more: NVIDIA/nccl issue 964, on 4 A100 with NVLink.
_OF_TWO_BYTES = 544 * MIB
_OF_MORE_BYTES = 688 * MIB
# What workers set NCCL_MAX_P2P_NCHANNELS to, which bounds the channels to each other device (NVIDIA/nccl
# issue 1598). NCCL's own bound of 32 takes four times the memory, for messages that a step rarely waits for.
MESSAGE_CHANNELS = 8
# Of a channel to one more device of the node: 3.28 GB for 7 of them with 32 channels each (NVIDIA/nccl issue
# 1685, on 8 H100).
_CHANNEL_BYTES = 14 * MIB
# Messages with other nodes, however many: one buffer for all (NVIDIA/nccl issues 1450 and 2363, on 8 B300).
_OTHER_NODES_BYTES = 512 * MIB


def collectives_bytes(num_devices: int) -> int:
    """Bytes that each of these devices needs for collectives over all of them."""
    if num_devices == 1:
        return 0
    return _OF_TWO_BYTES if num_devices == 2 else _OF_MORE_BYTES


def messages_bytes(num_inside: int, *, outside: bool) -> int:
    """Bytes that a device needs for messages with so many others of its node, and with some outside of it."""
    return num_inside * MESSAGE_CHANNELS * _CHANNEL_BYTES + (_OTHER_NODES_BYTES if outside else 0)
