"""What collectives take at least over so many devices, wherever these lie.

With a and b the latency and the bandwidth of the fastest link of each kind, N devices in a node at most, and
S bytes over n devices:

* bytes: every device takes in (n - 1) / n of S in a scatter or gather, twice that in a sum, over links of
  max(b_inside, b_between): rings, trees and exchanges over doubling distances take no less.
* latency of a ring: n - 1 hops, of which one leaves each of the n / N nodes or more; for a sum twice.
* latency of what goes inside of nodes of p devices and between them: p - 1 hops, and one between nodes for
  every doubling of their number; for a sum twice.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

import numpy as np

from spindle_cli.files.cluster import Cluster, Link
from spindle_cli.plan.bound.program import Array
from spindle_cli.units import GB


class LeastSeconds:
    """Seconds of collectives by the number of devices, from 0 to all of the cluster: at least so many."""

    def __init__(self, cluster: Cluster) -> None:
        self.num_devices = cluster.num_devices
        self.most_in_node = max(cluster.node_sizes)
        self.num_nodes = len(cluster.node_sizes)
        inside = [group.intra_node or cluster.links.intra_node for group in cluster.nodes]
        between = [cluster.links.inter_node, *cluster.links.between] if self.num_nodes > 1 else []
        self.inside_bytes_per_s = max(map(_peak, inside))
        self.between_bytes_per_s = max(map(_peak, between), default=0.0)
        self._bytes_per_s = max(self.inside_bytes_per_s, self.between_bytes_per_s)
        self._inside_s = min(link.latency_s for link in inside)
        self._between_s = min((link.latency_s for link in between), default=self._inside_s)

    def scatter_s(self, num_bytes: float) -> Array:
        """Seconds of a scatter, or gather, of so many bytes."""
        return self._or_more(np.minimum(self._ring_s, self._by_node_s) + self._moving_s(num_bytes))

    def gather_in_pass_s(self, num_bytes: float) -> Array:
        """Seconds of a gather that does not go by nodes, but over one device of each."""
        one_each_s = np.where(self._counts <= self.num_nodes, self._doublings_s, np.inf)
        return self._or_more(np.minimum(self._ring_s, one_each_s) + self._moving_s(num_bytes))

    def sum_s(self, num_bytes: float) -> Array:
        """Seconds of a sum that all get."""
        return 2 * self._or_more(np.minimum(self._ring_s, self._by_node_s) + self._moving_s(num_bytes))

    @cached_property
    def _counts(self) -> Array:
        return np.arange(self.num_devices + 1, dtype=float)

    def _moving_s(self, num_bytes: float) -> Array:
        counts = np.maximum(self._counts, 1)
        return (counts - 1) / counts * num_bytes / self._bytes_per_s

    @cached_property
    def _ring_s(self) -> Array:
        counts = np.maximum(self._counts, 1)
        leaving = np.where(counts > self.most_in_node, np.ceil(counts / self.most_in_node), 0.0)
        hop_s = (counts - leaving) * self._inside_s + leaving * self._between_s
        shortest_s = min(self._inside_s, self._between_s) * counts
        return (counts - 1) * np.where(self._between_s >= self._inside_s, hop_s, shortest_s) / counts

    @cached_property
    def _doublings_s(self) -> Array:
        return np.ceil(np.log2(np.maximum(self._counts, 1))) * self._between_s

    @cached_property
    def _by_node_s(self) -> Array:
        counts = np.maximum(self._counts, 1)
        ways = [
            (local - 1) * self._inside_s + np.ceil(np.log2(np.ceil(counts / local))) * self._between_s
            for local in range(1, self.most_in_node + 1)
        ]
        return np.where(counts > 1, np.min(ways, axis=0), 0.0)

    @staticmethod
    def _or_more(seconds: Array) -> Array:
        """At least this over as many devices, or more."""
        seconds[:2] = 0.0
        return np.minimum.accumulate(seconds[::-1])[::-1]


@lru_cache(64)
def _peak(link: Link) -> float:
    return max(link.bandwidth_gb_per_s, *(speed for _, speed in link.curve or ()), 0.0) * GB
