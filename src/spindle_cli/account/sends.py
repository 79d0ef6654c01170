"""What devices send each other to turn one layout into another, and what they gather then.

The devices of a tensor-parallel group all take the same rows. Each may be sent all of them; or each a part,
which they gather among themselves, so that no more goes between nodes than is needed there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from spindle_cli.account.rows import Chunk, Layout, crossing
from spindle_cli.costs.links import all_gather_s, transfer_s
from spindle_cli.files.cluster import Cluster

WHOLE = (0, 1)


class Send(NamedTuple):
    """What one device sends to another: rows of the samples [first, last), or of these a part.

    `part`: (i, n), the i-th of n equal parts of a chunk's numbers, in the order in which they are in memory;
    the last ones are smaller where n does not divide it. `num_bytes`: of it.
    """

    source: int
    destination: int
    first: int
    last: int
    part: tuple[int, int]
    num_bytes: int


class HandedOver(NamedTuple):
    """All that crosses devices over an edge one way. `gather_s`: what the pass that takes it gathers then
    takes; 0 where nothing is sent in parts.
    """

    sends: tuple[Send, ...]
    gather_s: float = 0.0


def part_of(size: int, part: tuple[int, int]) -> tuple[int, int]:
    """[first, last) of so many numbers, or bytes, that a part has."""
    number, count = part
    each = -(-size // count)
    return min(size, number * each), min(size, (number + 1) * each)


def handed_over(source: Layout, destination: Layout, num_bytes: int, cluster: Cluster) -> HandedOver:
    """What is sent so that a batch of `num_bytes` gets from one layout to another, in parts where some of it
    crosses nodes, and that, with the gathers behind it, is faster by the links.

    Not where any device holds rows of both: it need not be sent what it has, and has no part to gather.
    """
    chunks = sorted(crossing(source, destination))
    whole = [_send(chunk, WHOLE, num_bytes, destination) for chunk in chunks]
    node_of = cluster.node_of
    stays = all(node_of[chunk.source] == node_of[chunk.destination] for chunk in chunks)
    if destination.tp == 1 or stays or not set(source.devices).isdisjoint(destination.devices):
        return HandedOver(tuple(whole))
    places = {
        device: place
        for share in range(destination.dp)
        for place, device in enumerate(sorted(destination.holders(share)))
    }
    parts = [
        _send(chunk, (places[chunk.destination], destination.tp), num_bytes, destination) for chunk in chunks
    ]
    gather_s = _gather_s(destination, whole, cluster)
    if busiest_s(parts, cluster) + gather_s < busiest_s(whole, cluster):
        return HandedOver(tuple(parts), gather_s)
    return HandedOver(tuple(whole))


def busiest_s(sends: Iterable[Send], cluster: Cluster) -> float:
    """Seconds until the busiest port is through; a device has one each way inside its node, a network card
    one between nodes.
    """
    busy_s: defaultdict[tuple[str, object], float] = defaultdict(float)
    for send in sends:
        inside = cluster.node_of[send.source] == cluster.node_of[send.destination]
        seconds = transfer_s(send.num_bytes, cluster.link(send.source, send.destination))
        for way, device in (("out", send.source), ("in", send.destination)):
            busy_s[way, device if inside else cluster.card_of[device]] += seconds
    return max(busy_s.values(), default=0.0)


def _send(chunk: Chunk, part: tuple[int, int], num_bytes: int, layout: Layout) -> Send:
    first, last = part_of(num_bytes * (chunk.last - chunk.first) // layout.batch_size, part)
    return Send(chunk.source, chunk.destination, chunk.first, chunk.last, part, last - first)


def _gather_s(layout: Layout, whole: Sequence[Send], cluster: Cluster) -> float:
    """Of the share whose devices take longest to gather its chunks one after another."""
    gathers_s = dict.fromkeys(range(layout.dp), 0.0)
    for send in whole:
        share = layout.share_of[send.destination]
        holders = layout.holders(share)
        if send.destination == holders[0]:
            gathers_s[share] += all_gather_s(send.num_bytes, holders, cluster)
    return max(gathers_s.values())
