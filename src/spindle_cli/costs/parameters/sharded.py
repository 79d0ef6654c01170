"""How much longer passes take where devices share out parameters and gradients: for gathers of what an op
uses, and scatters of the gradients that it makes (ZeRO stages 2 and 3).

The gather for an op starts with the op before it, the first one's with the pass; the scatter of an op's
gradients runs beside the next op's backward pass, and the last one ends the pass. All go one after another
over one communicator. So with g gathers, s scatters and c compute of ops 1 to n in the order in which they
run,

    pass = g_1 + sum over i of max(c_i, g_(i+1) + s_(i-1)) + s_n       (g_(n+1) = s_0 = 0)

and forward passes have no scatters. What belongs to several ops of a slice is gathered for the first that
runs, and scattered behind the last. What is not trained is gathered by itself, and never scattered; where no
gradient comes to a slice, it is gathered forward alone. So is what is kept from a slice's forward pass to its
backward pass; if another slice has it already, not even that, which is not seen here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from spindle_cli.costs.links import Spread, per_node
from spindle_cli.costs.memory import SliceShape
from spindle_cli.costs.parameters.blocks import Block, BlockUse, blocks_of
from spindle_cli.costs.parameters.unequal import parts_collective_s
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding, ShardingOf, ShardWeights
from spindle_cli.profile.types import MetaOp


class SharedOut(Protocol):
    """What is needed of a plan, or of a profile that one is looked for."""

    @property
    def sharding(self) -> ShardingOf: ...
    @property
    def gradient_bytes_per_param(self) -> float: ...
    @property
    def shard_weights(self) -> ShardWeights: ...


def level_of(metaop: MetaOp, sharding: ShardingOf) -> Sharding:
    """What the devices of a MetaOp share out of its parameters."""
    return sharding.get(metaop.parameters or metaop.name, Sharding.OPTIMIZER)


@dataclass(frozen=True)
class Moved:
    """Seconds of the collectives of each op of a slice, first to last.

    `forward`, `backward`: its gathers in that pass; `scatters`: of gradients that are complete with it.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    scatters: tuple[float, ...]

    def longer_s(self, forward_s: float, backward_s: float) -> tuple[float, float]:
        """How much longer each pass of the slice takes.

        Args:
            forward_s, backward_s: what one of its ops computes.
        """
        nothing = (0.0,) * len(self.forward)
        return (
            _longer_s(forward_s, self.forward, nothing),
            _longer_s(backward_s, self.backward[::-1], self.scatters[::-1]),
        )


def _longer_s(compute_s: float, gathers: Sequence[float], scatters: Sequence[float]) -> float:
    """How much longer ops take, in the order in which they run, than what they compute."""
    beside = zip((*gathers[1:], 0.0), (0.0, *scatters[:-1]), strict=True)
    held_up = sum(max(0.0, gather + scatter - compute_s) for gather, scatter in beside)
    return gathers[0] + held_up + scatters[-1]


def moved_in_passes(
    piece: SliceShape, metaop: MetaOp, cluster: Cluster, step: SharedOut, *, is_reached: bool = True
) -> Moved | None:
    """What a slice, which runs on all devices that hold its parameters, gathers and scatters; None: nothing.

    What tensor parallelism splits is shared out by the devices with the same part of it, the rest by all.

    Args:
        is_reached: whether gradients come to its MetaOp (`reached_by_gradients`).
    """
    if not level_of(metaop, step.sharding).is_by_pass or len(piece.devices) == 1:
        return None
    first, last = piece.ops
    used: dict[tuple[Block, bool], _Use] = {}
    for op in range(first, last):
        for use in blocks_of(metaop, op):
            level = use.level(step.sharding)
            if level.is_by_pass:
                key = use.block, use.parts(2) > 1
                known = used.get(key, _Use(op - first, op - first, level))
                used[key] = known.and_then(op - first, use, piece.tp)
    seconds = _Seconds(piece, cluster, step.shard_weights)
    in_ranges = 1 - (metaop.optimizer.whole_share if metaop.optimizer else 0.0)
    forward, backward, scatters = ([0.0] * (last - first) for _ in range(3))
    for (_, is_split), each in used.items():
        for num_bytes in (in_ranges * each.trained, each.frozen) if each.level.is_fetched else ():
            gather_s = seconds.of(num_bytes, is_split=is_split)
            forward[each.first] += gather_s
            backward[each.last] += gather_s if is_reached and each.level is Sharding.PARAMETERS else 0.0
        scatters[each.first] += seconds.of(step.gradient_bytes_per_param * each.trained, is_split=is_split)
    return Moved(tuple(forward), tuple(backward), tuple(scatters))


@dataclass(frozen=True)
class _Use:
    """A block in a slice: which of its ops are the first and the last that use it; what devices share out of
    it; bytes of it that a device needs, trained ones and others.
    """

    first: int
    last: int
    level: Sharding
    trained: float = 0.0
    frozen: float = 0.0

    def and_then(self, op: int, use: BlockUse, tp: int) -> _Use:
        """With a later op's use of it, on one of so many devices of a tensor-parallel group."""
        parts = use.parts(tp)
        trained = max(self.trained, use.trained_bytes / parts)
        return _Use(self.first, op, self.level, trained, max(self.frozen, use.frozen_bytes / parts))


class _Seconds:
    """The seconds of gathers, and of scatters, which take as long, over the devices of a slice."""

    def __init__(self, piece: SliceShape, cluster: Cluster, weights: ShardWeights) -> None:
        self._cluster = cluster
        self._weights = weights
        parts = {
            self._sharers(piece.devices[part :: piece.tp], side_by_side=piece.tp) for part in range(piece.tp)
        }
        self._spreads = {True: parts, False: {self._sharers(piece.devices)}}
        self._known: dict[tuple[float, bool], float] = {}

    def _sharers(self, devices: Sequence[int], *, side_by_side: int = 1) -> tuple[Spread, tuple[int, ...]]:
        """How devices lie on the nodes, and their weights, ascending, where these are not equal.
        `side_by_side`: of as many parts of the same layers, all of which are on each of the nodes.
        """
        own = sorted(self._weights[device] for device in devices) if self._weights else []
        spread = per_node(devices, self._cluster)._replace(side_by_side=side_by_side)
        return spread, tuple(own) if len(set(own)) > 1 else ()

    def of(self, num_bytes: float, *, is_split: bool) -> float:
        """As long as the slowest part takes."""
        if not num_bytes:
            return 0.0
        key = num_bytes, is_split
        if key not in self._known:
            spreads = self._spreads[is_split]
            self._known[key] = max(
                parts_collective_s(num_bytes, spread, 1, self._cluster, weights)
                for spread, weights in spreads
            )
        return self._known[key]
