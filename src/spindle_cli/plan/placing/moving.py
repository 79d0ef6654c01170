"""How long it takes to move a batch from one layout to another, were nothing else under way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from spindle_cli.account.rows import Layout, crossing
from spindle_cli.costs.links import transfer_s
from spindle_cli.files.cluster import Cluster


def moving_s(moves: Iterable[tuple[Layout, Layout, int]], cluster: Cluster) -> float:
    """Seconds until the busiest port is through with all moves; a device has one each way inside its node, a
    network card one between nodes.

    Args:
        moves: from, to, and the bytes of the whole batch.
    """
    busy_s: defaultdict[tuple[str, object], float] = defaultdict(float)
    for source, destination, num_bytes in moves:
        for chunk in crossing(source, destination):
            own_bytes = num_bytes * (chunk.last - chunk.first) // destination.batch_size
            inside = cluster.node_of[chunk.source] == cluster.node_of[chunk.destination]
            seconds = transfer_s(own_bytes, cluster.link(chunk.source, chunk.destination))
            for way, device in (("out", chunk.source), ("in", chunk.destination)):
                busy_s[way, device if inside else cluster.card_of[device]] += seconds
    return max(busy_s.values(), default=0.0)
