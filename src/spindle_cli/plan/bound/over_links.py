"""What a bound adds for links (`any_cut.py`): to ops, to chains, and between MetaOps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property, lru_cache
from math import log
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spindle_cli.costs.flops import reached_by_gradients
from spindle_cli.costs.parameters import BlockUse, blocks_of
from spindle_cli.files.cluster import Cluster, Link
from spindle_cli.plan.bound.allocations import Shares
from spindle_cli.plan.bound.program import Array
from spindle_cli.plan.problem import needs_whole_batch, parts_of
from spindle_cli.profile.types import MetaOpProfile, Profile
from spindle_cli.units import GB

# Numbers of devices that an op may be spread over are told apart from one to so many times as many.
SPREAD_STEP = 1.15


class Taken(NamedTuple):
    """What an op waits for behind the last op of a MetaOp that it takes from, as a difference.

    Attributes:
        place: of that MetaOp among its inputs.
        own_s: by its share, seconds.
        less_s: by the share of the other op, seconds that it waits less.
    """

    place: int
    own_s: Array
    less_s: Array


class Spread(NamedTuple):
    """Shares of an op on numbers of devices in all.

    Attributes:
        numbers: the shares.
        most: devices that all its shares have in all, at most.
        sum_s: seconds that gradients of the op's parameters are summed, and what is updated is gathered.
    """

    numbers: npt.NDArray[np.intp]
    most: Array
    sum_s: Array


def starts_together(metaop: MetaOpProfile) -> bool:
    """Whether all devices that run an op of a MetaOp start it together, with all samples there."""
    return metaop.coupled or any(batch_sum.forward > 0 for batch_sum in metaop.batch_sums)


class OverLinks:
    """What links add, by MetaOp."""

    def __init__(
        self, profile: Profile, cluster: Cluster, shares: Mapping[str, Shares], uncut: Collection[str] = ()
    ) -> None:
        """`uncut`: tasks that are in one micro-batch as that is asked for."""
        self._profile, self._shares, self._uncut = profile, shares, uncut
        self._least = LeastSeconds(cluster)

    @property
    def are_any(self) -> bool:
        """Whether anything is known of any MetaOp."""
        return bool(self._whole) or any(map(self._is_summed, self._profile.metaops))

    def longer_s(self, metaop: MetaOpProfile) -> Array | float:
        """Seconds that an op's sums and gathers over its devices take more than its times say."""
        if not metaop.batch_sums:
            return 0.0
        both_s = np.zeros(self._least.num_devices + 1)
        for batch_sum in metaop.batch_sums:
            least_s = self._least.gather_in_pass_s if batch_sum.kind == "gather" else self._least.sum_s
            both_s += (batch_sum.forward + batch_sum.backward) * least_s(batch_sum.num_bytes)
        shares = self._shares[metaop.name]
        count = self._at_least(shares)
        on_all_s = self._of(both_s, np.where(count > 1, count * shares.tp, 1))
        return np.maximum(0.0, on_all_s - shares.own_s)

    def takes(self, metaop: MetaOpProfile) -> tuple[Taken, ...]:
        """What the first op of a MetaOp waits for that needs all samples at once: messages to the device with
        the largest share, and with their gradients back.
        """
        if not starts_together(metaop) or metaop.name not in self._whole:
            return ()
        shares, taken = self._shares[metaop.name], []
        for place, name in enumerate(metaop.inputs):
            producer = self._profile.by_name[name]
            if producer.batch_size != metaop.batch_size:
                continue
            ways = 2 if self._reached[name] else 1
            sample_bytes = ways * producer.output_bytes / producer.batch_size
            least = self._least
            largest = self._shares[name].largest
            rates = [(least.inside_bytes_per_s + least.between_bytes_per_s, 1)]
            if least.num_nodes > 1:
                rates.append((least.between_bytes_per_s, least.most_in_node))
            for bytes_per_s, makers in rates:
                sample_s = sample_bytes / bytes_per_s
                taken.append(Taken(place, shares.fewest / shares.tp * sample_s, makers * largest * sample_s))
        return tuple(taken)

    def parts(self, metaop: MetaOpProfile) -> tuple[int, ...]:
        """Into how many ops a MetaOp is cut, so that its first op is apart, or its last one, where links ask
        for what these run on.
        """
        is_first_apart = self._is_summed(metaop) or (metaop.name in self._whole and starts_together(metaop))
        num_ops = metaop.num_ops - is_first_apart
        is_last_apart = metaop.name in self._taken and num_ops > 0
        parts = (1,) * is_first_apart + (num_ops - is_last_apart,) + (1,) * is_last_apart
        return tuple(count for count in parts if count)

    def spread(self, metaop: MetaOpProfile) -> Spread | None:
        """How the first op of a MetaOp that takes no inputs may be spread over devices; None where nothing of
        it is summed.
        """
        if not self._is_summed(metaop):
            return None
        shares, num_devices = self._shares[metaop.name], self._least.num_devices
        if metaop.name in self._whole:  # all shares run at once, in groups of one size
            every, tp, fewest = np.arange(len(shares.tp)), shares.tp, np.ones(1)
            needed = np.minimum(self._at_least(shares) * tp, num_devices)
        else:
            # Of groups of several sizes, as micro-batches may have, the largest hold least of what is split.
            every, tp = shares.corners, np.full_like(shares.tp, shares.tp.max())
            fewest = np.unique(np.round(SPREAD_STEP ** np.arange(int(log(num_devices, SPREAD_STEP)) + 1)))
            needed = np.ones_like(tp)
        most = np.append(fewest[1:] - 1, num_devices)
        numbers, places = np.repeat(every, len(most)), np.tile(np.arange(len(most)), len(every))
        groups = np.ceil(np.maximum(fewest[places], needed[numbers]) / tp[numbers])
        sum_s = np.zeros(len(groups))
        for degree in np.unique(tp):
            of_degree = tp[numbers] == degree
            sum_s[of_degree] = self._of(self._update_s(metaop, int(degree)), groups[of_degree])
        return Spread(numbers, most[places], sum_s)

    def _is_summed(self, metaop: MetaOpProfile) -> bool:
        block = None if metaop.inputs or self._least.num_devices == 1 else self._first_block(metaop)
        return block is not None and block.trained_bytes > 0

    def _update_s(self, metaop: MetaOpProfile, tp: int) -> Array:
        """By the number of devices that have a part each of what a tensor-parallel group splits."""
        block, profile, least = self._first_block(metaop), self._profile, self._least
        if block is None:
            return np.zeros(least.num_devices + 1)
        trained = block.trained_bytes - sum(matrix.num_bytes for matrix in metaop.matrices if matrix.op == 0)
        part = max(0.0, trained) / block.parts(tp)
        seconds = least.sum_s(profile.gradient_bytes_per_param * part)
        if profile.optimizer_state_sharded:
            gathered = part * (1 - (metaop.optimizer.whole_share if metaop.optimizer else 0.0))
            once_s = least.scatter_s(profile.gradient_bytes_per_param * part) + least.scatter_s(gathered)
            seconds = np.minimum(seconds, once_s)
        return np.asarray(seconds / profile.accumulate)

    @staticmethod
    def _first_block(metaop: MetaOpProfile) -> BlockUse | None:
        """Return the first op's block with most trained whose gradients are summed as they are."""
        matrices = {matrix.parameter for matrix in metaop.matrices}
        blocks = [use for use in blocks_of(metaop, 0) if not use.is_gathered and use.block[0] not in matrices]
        return max(blocks, key=lambda use: use.trained_bytes, default=None)

    @cached_property
    def _whole(self) -> frozenset[str]:
        """The MetaOps of tasks that are in one micro-batch, with those that they exchange values with."""
        part_of = parts_of(self._profile.metaops)
        whole = {
            part_of[metaop.name]
            for metaop in self._profile.metaops
            if needs_whole_batch(metaop) or metaop.task in self._uncut
        }
        return frozenset(name for name, part in part_of.items() if part in whole)

    @cached_property
    def _taken(self) -> frozenset[str]:
        """The MetaOps from whose last op others take something that links are asked for."""
        return frozenset(
            metaop.inputs[taken.place] for metaop in self._profile.metaops for taken in self.takes(metaop)
        )

    @cached_property
    def _reached(self) -> dict[str, bool]:
        return reached_by_gradients(self._profile.metaops)

    def _at_least(self, shares: Shares) -> Array:
        """How many shares the whole batch is cut into at least, by one of them."""
        return np.ceil(shares.batch_size / shares.largest * (1 - 1e-9))

    def _of(self, seconds: Array, counts: Array) -> Array:
        """Seconds for so many devices, or for all where there are fewer."""
        return np.asarray(seconds[np.minimum(counts, self._least.num_devices).astype(int)])


class LeastSeconds:
    """Says what collectives take at least, by the number of devices, from 0 to all of the cluster, wherever
    these lie.

    With a and b the latency and the bandwidth of the fastest link of each kind, N devices in a node at most,
    and S bytes over n devices:

    * bytes: every device takes in (n - 1) / n of S in a scatter or gather, twice that in a sum, over links of
      max(b_inside, b_between): rings, trees and exchanges over doubling distances take no less.
    * latency of a ring: n - 1 hops, of which one leaves each of the n / N nodes or more; for a sum twice.
    * latency of what goes inside of nodes of p devices and between them: p - 1 hops, and one between nodes
      for every doubling of their number; for a sum twice.
    """

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
