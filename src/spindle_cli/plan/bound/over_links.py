"""What a bound adds for links (`any_cut.py`): to ops, to chains, and between MetaOps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from spindle_cli.costs.parameters import BlockUse, blocks_of
from spindle_cli.costs.work import reached_by_gradients
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.bound.allocations import Shares
from spindle_cli.plan.bound.collectives import LeastSeconds
from spindle_cli.plan.bound.program import Array
from spindle_cli.plan.problem import needs_whole_batch, parts_of
from spindle_cli.profile.types import MetaOpProfile, Profile


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


def starts_together(metaop: MetaOpProfile) -> bool:
    """Whether all devices that run an op of a MetaOp start it together, with all samples there."""
    return metaop.coupled or any(each.forward > 0 for each in metaop.batch_sums)


class OverLinks:
    """What links add, by MetaOp."""

    def __init__(self, profile: Profile, cluster: Cluster, shares: Mapping[str, Shares]) -> None:
        self._profile, self._shares = profile, shares
        self._least = LeastSeconds(cluster)

    @property
    def are_any(self) -> bool:
        """Whether anything is known of any MetaOp."""
        return bool(self._whole)

    def longer_s(self, metaop: MetaOpProfile) -> Array | float:
        """Seconds that an op's sums and gathers over its devices take more than its times say."""
        if not metaop.batch_sums:
            return 0.0
        both_s = np.zeros(self._least.num_devices + 1)
        for each in metaop.batch_sums:
            least_s = self._least.gather_in_pass_s if each.kind == "gather" else self._least.sum_s
            both_s += (each.forward + each.backward) * least_s(each.num_bytes)
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
        own, found = self._shares[metaop.name], []
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
                found.append(Taken(place, own.fewest / own.tp * sample_s, makers * largest * sample_s))
        return tuple(found)

    def parts(self, metaop: MetaOpProfile) -> tuple[int, ...]:
        """Into how many ops a MetaOp is cut, so that its first op is apart, or its last one, where links ask
        for what these run on.
        """
        is_first_apart = metaop.name in self._whole and (not metaop.inputs or starts_together(metaop))
        num_ops = metaop.num_ops - is_first_apart
        is_last_apart = metaop.name in self._taken and num_ops > 0
        parts = (1,) * is_first_apart + (num_ops - is_last_apart,) + (1,) * is_last_apart
        return tuple(count for count in parts if count)

    def updated_s(self, metaop: MetaOpProfile) -> Array | float:
        """Seconds that gradients of the first op's parameters are summed, and what is updated is gathered,
        by the share of this op; where its task is in one micro-batch, and nothing comes before it.
        """
        if metaop.inputs or metaop.name not in self._whole:
            return 0.0
        shares, found = self._shares[metaop.name], np.zeros(len(self._shares[metaop.name].tp))
        count = self._at_least(shares)
        for tp in np.unique(shares.tp):
            own = shares.tp == tp
            found[own] = self._of(self._update_s(metaop, int(tp)), count[own])
        return found

    def _update_s(self, metaop: MetaOpProfile, tp: int) -> Array:
        """By the number of devices that have a part each of what a tensor-parallel group splits."""
        block, profile, least = self._first_block(metaop), self._profile, self._least
        if block is None:
            return np.zeros(least.num_devices + 1)
        trained = block.trained_bytes - sum(each.num_bytes for each in metaop.matrices if each.op == 0)
        part = max(0.0, trained) / block.parts(tp)
        seconds = least.sum_s(profile.gradient_bytes_per_param * part)
        if profile.optimizer_state_sharded:
            gathered = part * (1 - (metaop.optimizer.whole_share if metaop.optimizer else 0.0))
            once_s = least.scatter_s(profile.gradient_bytes_per_param * part) + least.scatter_s(gathered)
            seconds = np.minimum(seconds, once_s)
        return np.asarray(seconds / profile.accumulate)

    @staticmethod
    def _first_block(metaop: MetaOpProfile) -> BlockUse | None:
        """Of the blocks of its first op whose gradients are summed as they are, the one with most trained."""
        matrices = {each.parameter for each in metaop.matrices}
        blocks = [use for use in blocks_of(metaop, 0) if not use.is_gathered and use.block[0] not in matrices]
        return max(blocks, key=lambda use: use.trained_bytes, default=None)

    @cached_property
    def _whole(self) -> frozenset[str]:
        """The MetaOps of tasks that are in one micro-batch, with those that they exchange values with."""
        part_of = parts_of(self._profile.metaops)
        whole = {part_of[each.name] for each in self._profile.metaops if needs_whole_batch(each)}
        return frozenset(name for name, part in part_of.items() if part in whole)

    @cached_property
    def _taken(self) -> frozenset[str]:
        """The MetaOps from whose last op others take something that links are asked for."""
        return frozenset(
            metaop.inputs[each.place] for metaop in self._profile.metaops for each in self.takes(metaop)
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
