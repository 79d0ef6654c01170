"""How long the sums and gathers inside of an op's passes take that go over all shares of its batch: of batch
norms, and of contrastive losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from spindle_cli.costs.links import all_gather_s, all_reduce_s
from spindle_cli.costs.memory import SliceShape
from spindle_cli.costs.shares.times import Timed, times_of
from spindle_cli.files.cluster import Cluster


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
    for each in sums:
        collective_s = all_gather_s if each.kind == "gather" else all_reduce_s
        once_s = collective_s(each.num_bytes, devices, cluster)
        forward_s += each.forward * once_s
        backward_s += each.backward * once_s
    return forward_s, backward_s


def sums_beyond_curve_s(piece: SliceShape, metaop: Summing, cluster: Cluster) -> tuple[float, float]:
    """Seconds that the sums of one op take longer on a slice's devices than its curve or shares have them,
    forward and backward: a curve was drawn for neighbours, or without knowing any links.
    """
    if piece.dp == 1 or not metaop.batch_sums:
        return 0.0, 0.0
    forward_s, backward_s = batch_sums_s(metaop.batch_sums, piece.devices, cluster)
    known = times_of(metaop, piece, cluster)
    known_s = 0.0 if known is None else known.communication_s
    both_s = forward_s + backward_s
    beyond = max(0.0, 1.0 - known_s / both_s) if both_s else 0.0
    return beyond * forward_s, beyond * backward_s
