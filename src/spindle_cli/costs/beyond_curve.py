"""How much longer the ops of a slice take on its devices than their curve says: for sums and gathers over the
shares of their batch (of batch norms, and of contrastive losses), and for what devices share out of
parameters (`parameters.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Protocol

from spindle_cli.costs.flops import reached_by_gradients
from spindle_cli.costs.links import all_gather_s, all_reduce_s
from spindle_cli.costs.memory import SliceShape
from spindle_cli.costs.parameters import Moved, SharedOut, moved_in_passes
from spindle_cli.costs.shares import Timed, times_of
from spindle_cli.files.cluster import Cluster
from spindle_cli.profile.types import MetaOp


class _Sums(Protocol):
    @property
    def kind(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def forward(self) -> float: ...
    @property
    def backward(self) -> float: ...


class Summing(Timed, Protocol):
    """What is needed of a MetaOp."""

    @property
    def batch_sums(self) -> Sequence[_Sums]: ...


def batch_sums_s(sums: Iterable[_Sums], devices: Sequence[int], cluster: Cluster) -> tuple[float, float]:
    """Seconds of one op's sums over these devices, forward and backward."""
    forward_s = backward_s = 0.0
    for batch_sum in sums:
        collective_s = all_gather_s if batch_sum.kind == "gather" else all_reduce_s
        once_s = collective_s(batch_sum.num_bytes, devices, cluster)
        forward_s += batch_sum.forward * once_s
        backward_s += batch_sum.backward * once_s
    return forward_s, backward_s


def sums_beyond_curve_s(slice_: SliceShape, metaop: Summing, cluster: Cluster) -> tuple[float, float]:
    """Seconds that the sums of one op take longer on a slice's devices than its curve or shares have them,
    forward and backward: a curve was drawn for neighbours, or without knowing any links.
    """
    if slice_.dp == 1 or not metaop.batch_sums:
        return 0.0, 0.0
    forward_s, backward_s = batch_sums_s(metaop.batch_sums, slice_.devices, cluster)
    on_curve = times_of(metaop, slice_, cluster)
    on_curve_s = 0.0 if on_curve is None else on_curve.communication_s
    both_s = forward_s + backward_s
    beyond = max(0.0, 1.0 - on_curve_s / both_s) if both_s else 0.0
    return beyond * forward_s, beyond * backward_s


class BeyondCurve:
    """What the slices of a plan take beyond their curves, worked out once for each."""

    def __init__(self, by_name: Mapping[str, MetaOp], cluster: Cluster, step: SharedOut) -> None:
        """`step`: the plan, or the profile by which one is looked for."""
        self._by_name = by_name
        self._cluster = cluster
        self._step = step
        self._moved: dict[object, Moved | None] = {}

    def op_s(
        self, slice_: SliceShape, metaop: Summing, forward_s: float, backward_s: float
    ) -> tuple[float, float]:
        """Seconds of one op of a slice on average, forward and backward.

        Args:
            metaop: the slice's.
            forward_s, backward_s: of one op by the curve, the latter on average with the former where ops
                are recomputed.
        """
        forward_more_s, backward_more_s = sums_beyond_curve_s(slice_, metaop, self._cluster)
        num_ops = slice_.ops[1] - slice_.ops[0]
        backward_more_s += forward_more_s * slice_.num_recomputed / num_ops
        moved = self._of(slice_) if self._step.sharding else None
        if moved is None:
            return forward_more_s, backward_more_s
        longer = moved.longer_s(forward_s + forward_more_s, backward_s + backward_more_s)
        return forward_more_s + longer[0] / num_ops, backward_more_s + longer[1] / num_ops

    @cached_property
    def _reached(self) -> dict[str, bool]:
        return reached_by_gradients(self._by_name.values())

    def _of(self, slice_: SliceShape) -> Moved | None:
        key = slice_.metaop, slice_.ops, slice_.tp, slice_.devices
        if key not in self._moved:
            of_slice = self._by_name[slice_.metaop]
            is_reached = self._reached[slice_.metaop]
            self._moved[key] = moved_in_passes(
                slice_, of_slice, self._cluster, self._step, is_reached=is_reached
            )
        return self._moved[key]
