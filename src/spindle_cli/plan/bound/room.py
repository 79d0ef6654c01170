"""What ops take of devices' memory at least, on shares of any size, by the formulas of `costs/memory.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from spindle_cli.costs.beyond_curve import share_again
from spindle_cli.costs.memory import ALLOCATOR_SHARE, UNCOUNTED_SHARE, held_param_bytes, inner_bytes, op_needs
from spindle_cli.costs.parameters import Block, blocks_of, optimizer_bytes
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.bound.allocations import Shares, devices_of_kinds
from spindle_cli.plan.bound.program import Array
from spindle_cli.profile.types import MetaOpProfile, Profile


class Kept(NamedTuple):
    """Ways of keeping activations: shares with what an op takes on each of them, one way behind the other.

    Attributes:
        shares: with what is computed again.
        num_bytes: that an op keeps of the whole batch, on all devices together.
    """

    shares: Shares
    num_bytes: Array


def fits_alone(metaop: MetaOpProfile, shares: Shares, cluster: Cluster) -> Array:
    """Say of each share whether an op that runs on it fits a device of its type: its parameters, and what its
    forward pass takes, or what it keeps with what its backward pass takes. What is computed again, or comes
    back from the host, is there then as well.
    """
    most = np.zeros(len(devices_of_kinds(cluster)))
    for kind, num_bytes in zip(cluster.type_of, _tensor_bytes(cluster), strict=True):
        number = cluster.types.index(kind) if cluster.is_mixed else 0
        most[number] = max(most[number], num_bytes)
    taken = np.zeros(len(shares.tp))
    for tp in np.unique(shares.tp):
        of_degree = shares.tp == tp
        least = np.full(int(of_degree.sum()), np.inf)
        for needs in _needs(metaop, int(tp), shares.fewest[of_degree] / metaop.batch_size):
            least = np.minimum(least, np.maximum(needs.forward, needs.kept + needs.backward))
        held = min(held_param_bytes(metaop, op, int(tp)) for op in range(metaop.num_ops))
        taken[of_degree] = held + least
    return np.asarray(taken <= most[shares.kinds])


def keeping_less(metaop: MetaOpProfile, shares: Shares) -> Kept:
    """Shares whose ops keep all, only what takes longest, or their inputs alone."""
    kept, selected = np.zeros(len(shares.tp)), np.zeros(len(shares.tp))
    for tp in np.unique(shares.tp):
        of_degree = shares.tp == tp
        of_kinds = list(_needs(metaop, int(tp), shares.fewest[of_degree] / metaop.batch_size))
        copies = tp * metaop.batch_size / shares.most[of_degree]
        kept[of_degree] = copies * np.min([needs.kept for needs in of_kinds], axis=0)
        selected[of_degree] = copies * np.min([needs.selected for needs in of_kinds], axis=0)
    inputs = np.full_like(kept, inner_bytes(metaop))
    ways = [(0.0, kept), (1.0, np.minimum(inputs, kept))]
    if metaop.selective_share is not None:
        ways.append((share_again(metaop, selective=True), selected))
    every = np.tile(np.arange(len(kept)), len(ways))
    again = np.repeat([share for share, _ in ways], len(kept))
    return Kept(shares.taken(every).again(again), np.concatenate([num_bytes for _, num_bytes in ways]))


def room_beside_parameters(profile: Profile, cluster: Cluster) -> float:
    """Bytes of all devices together beside the parameters and their state, held once."""
    held: dict[Block, float] = {}
    for metaop in profile.metaops:
        state = optimizer_bytes(metaop, profile).state_per_param
        for op in range(metaop.num_ops):
            for use in blocks_of(metaop, op):
                num_bytes = use.num_bytes + state * use.trained_bytes
                held[use.block] = min(held.get(use.block, num_bytes), num_bytes)
    return sum(_tensor_bytes(cluster)) - sum(held.values())


def _tensor_bytes(cluster: Cluster) -> list[float]:
    """Bytes that counted tensors may take, by device."""
    beyond = (1 + UNCOUNTED_SHARE) * (1 + (0.0 if cluster.is_cpu else ALLOCATOR_SHARE))
    return [
        (num_bytes - reserve) / beyond
        for num_bytes, reserve in zip(cluster.memory_bytes, cluster.reserve_bytes, strict=True)
    ]


class _Needs(NamedTuple):
    """Bytes of an op on shares of several sizes, as `OpNeeds` has them. `selected`: kept, where all but what
    takes longest is computed again.
    """

    kept: Array
    selected: Array
    forward: Array
    backward: Array


def _needs(metaop: MetaOpProfile, tp: int, parts: Array) -> Iterator[_Needs]:
    """Those of every kind of op. `parts`: of the whole batch."""
    ops = 0, metaop.num_ops
    # Bytes are linear in the samples, so that those of a batch and of half of one tell all.
    for (_, whole), (_, half) in zip(op_needs(metaop, ops, 1, tp), op_needs(metaop, ops, 2, tp), strict=True):

        def of(of_whole: float, of_half: float) -> Array:
            return of_whole + 2 * (of_whole - of_half) * (parts - 1)

        kept = of(whole.kept, half.kept)
        selected = kept
        if np.isfinite(whole.selective):
            selected = np.minimum(kept, of(whole.selective, half.selective))
        yield _Needs(kept, selected, of(whole.forward, half.forward), of(whole.backward, half.backward))
