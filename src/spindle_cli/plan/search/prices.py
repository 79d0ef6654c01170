"""What slices take of devices beside computing, as a search of schedules sees it that places none of them.

Where the devices lie is not known yet. So a slice is taken to lie on nodes side by side, and what is handed
on to move between nodes, unless it stays on as many devices as it was made on.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from spindle_cli.costs.links import bandwidth_bytes_per_s, per_node, spread_all_reduce_s
from spindle_cli.costs.memory import held_param_bytes, inner_bytes
from spindle_cli.files.cluster import Cluster, Link
from spindle_cli.plan.problem import Node, Point, Problem


class Message(NamedTuple):
    """Prices of what moves between slices.

    Attributes:
        latency_s: seconds of each, to the slice and, of its gradient, back.
        link: what it goes by.
        devices_of_node, cards_of_node: how many of a node's devices share how many cards.
    """

    latency_s: float
    link: Link
    devices_of_node: int
    cards_of_node: int

    @classmethod
    def on(cls, cluster: Cluster) -> Message:
        """Those between nodes; or between devices where there is one node."""
        nodes = range(len(cluster.node_sizes))
        links = cluster.links_among(nodes)
        if len(nodes) == 1:
            return cls(2 * links.intra_node.latency_s, links.intra_node, 1, 1)
        link, cards = links.inter_node, min(cluster.cards_of_node)
        return cls(2 * link.latency_s, link, max(cluster.node_sizes), cards)

    def seconds_per_byte(self, num_bytes: float, point: Point) -> float:
        """Seconds for each byte of a whole batch's activations, of so many bytes, that a slice on this
        allocation sends or receives, with its gradient.
        """
        share = max(1.0, num_bytes / point.dp)
        of_card = max(1.0, min(point.num_devices, self.devices_of_node) / self.cards_of_node)
        return 2 * of_card / point.dp / bandwidth_bytes_per_s(share, self.link)


def edge_bytes(producer: Node, consumer: Node) -> float:
    """Bytes of a whole batch that one node hands another."""
    if consumer.continues == producer.index:
        return float(inner_bytes(producer.metaop))
    return float(producer.metaop.output_bytes)


def sum_s(problem: Problem, node: Node, point: Point) -> float:
    """Seconds that gradient sums of one op take its devices, if all of its MetaOp are summed at once; of one
    batch.
    """
    metaop, profile = node.metaop, problem.profile
    held = sum(held_param_bytes(metaop, op, point.tp) for op in range(metaop.num_ops))
    num_bytes = held * metaop.trainable_fraction * profile.gradient_bytes_per_param
    of_all_s = _sum_side_by_side_s(num_bytes, point.num_devices, problem.cluster)
    return of_all_s / metaop.num_ops / profile.accumulate


@lru_cache(4096)
def _sum_side_by_side_s(num_bytes: float, num_devices: int, cluster: Cluster) -> float:
    return spread_all_reduce_s(num_bytes, per_node(range(num_devices), cluster), cluster)
