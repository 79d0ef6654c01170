"""How long a gather or a scatter takes of which the devices have unequal parts, and which way is faster.

Of B bytes over n devices, of which the largest part is L and the smallest s, on a ring of links of latency a
and bandwidth b:

* padded: equal parts of L each go around; (n - 1) (a + L / b).
* grouped: each part goes around by itself, all in one call. The link before a device carries all parts but
  its own, at most B - s, and a device begins its own one hop after the device before it, so that the last
  one is through after 2 (n - 1) hops: 2 (n - 1) a + (B - s) / b.

Grouped is faster where L - (B - s) / (n - 1) > a b: where the largest part is longer than the mean of all but
the smallest by more than a link carries within its latency. Of two devices, and of equal parts, padding
costs nothing. Under gloo an equal gather is a broadcast from each already, and a scatter a message to
each, so that grouping costs no latency there, and nothing is ever padded.

What padding saves is n - 1 latencies at most, and it takes a copy in memory and its time, which is not
counted here: so only what is small is padded (`MOST_PADDED_BYTES`).

HAP (Zhang et al., EuroSys 2024, arXiv 2401.05965) chooses between the same two for its all-gathers.
"""

from __future__ import annotations

from collections.abc import Sequence

from spindle_cli.costs.links import Spread, by_node_s, spread_all_gather_s, spread_collective_s, spread_ring_s
from spindle_cli.files.cluster import Cluster
from spindle_cli.units import MIB

# Of the padded copy of one collective: as much as gradient sums under way may take in buffers.
MOST_PADDED_BYTES = 32 * MIB


def padded_s(num_bytes: float, weights: Sequence[int], spread: Spread, cluster: Cluster) -> float:
    """Seconds with every part padded to the largest. `weights`: what the parts are in proportion to."""
    return spread_all_gather_s(num_bytes * len(weights) * max(weights) / sum(weights), spread, cluster)


def grouped_s(num_bytes: float, weights: Sequence[int], spread: Spread, cluster: Cluster) -> float:
    """Seconds with each part by itself, all in one call."""
    count = len(weights)
    if count < 2 or num_bytes <= 0:
        return 0.0
    # A ring moves (n - 1) / n of what it is said to.
    moved = num_bytes * (1 - min(weights) / sum(weights)) * count / (count - 1)
    once_s = spread_ring_s(moved, spread, cluster)
    if cluster.talks_by == "gloo":
        return once_s
    return once_s + spread_ring_s(0.0, spread, cluster)


def is_padded(num_bytes: float, weights: Sequence[int], spread: Spread, cluster: Cluster) -> bool:
    """Whether padding is faster, and small. Where both take as long the parts are grouped, which takes no
    copies.
    """
    if num_bytes * len(weights) * max(weights) / sum(weights) > MOST_PADDED_BYTES:
        return False
    return padded_s(num_bytes, weights, spread, cluster) < grouped_s(num_bytes, weights, spread, cluster)


def parts_collective_s(
    num_bytes: float,
    spread: Spread,
    rounds: int,
    cluster: Cluster,
    weights: Sequence[int] = (),
    *,
    by_node: bool = False,
) -> float:
    """`spread_collective_s`, of unequal parts in the way that `is_padded` says; none: all are equal.
    `by_node`: a scatter or gather inside of nodes and between them.
    """
    if by_node:
        return by_node_s(num_bytes, spread, cluster)
    if not weights or rounds != 1:
        return spread_collective_s(num_bytes, spread, rounds, cluster)
    way_s = padded_s if is_padded(num_bytes, weights, spread, cluster) else grouped_s
    return way_s(num_bytes, weights, spread, cluster)
