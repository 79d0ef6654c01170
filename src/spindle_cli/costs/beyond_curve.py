"""How much longer the ops of a slice take on its devices than their curve says: for sums and gathers over the
shares of their batch (of batch norms, and of contrastive losses); for what devices share out of parameters
(`parameters.py`); and where memory is short, for ops that are computed again, and activations that are in
host memory from the forward to the backward pass.

An op's activations are copied out when its forward pass has ended, one op after another; an op starts when at
most one such copy is under way, and the slice's forward pass ends when none is. They are copied back one
after another: those of the last op from the start of the slice's backward pass, those of another one when
that behind it, of those that are moved, is through; of its neighbour, when that begins. Out and back at once,
each way at the link's full speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Protocol

from spindle_cli.costs.flops import reached_by_gradients
from spindle_cli.costs.links import all_gather_s, all_reduce_s, transfer_s
from spindle_cli.costs.memory import SliceShape, inner_bytes, op_needs
from spindle_cli.costs.parameters import Moved, SharedOut, moved_in_passes
from spindle_cli.costs.shares import OpSeconds, Timed, cuts_by_share, times_of
from spindle_cli.files.cluster import Cluster, Link
from spindle_cli.profile.types import MetaOp
from spindle_cli.units import MIB


class _Recomputed(Protocol):
    @property
    def recompute(self) -> bool: ...
    @property
    def selective(self) -> bool: ...


class Again(Enum):
    """What ops run again of their forward passes, backward."""

    NOTHING = "nothing"
    SELECTIVE = "selective"  # all but what takes longest, which is kept
    ALL = "all"

    @classmethod
    def of(cls, slice_: _Recomputed) -> Again:
        """Those of a slice, or on an allocation, but for such whose activations are in host memory."""
        if not slice_.recompute:
            return cls.NOTHING
        return cls.SELECTIVE if slice_.selective else cls.ALL


class _Recomputable(Protocol):
    @property
    def selective_share(self) -> float | None: ...


def share_again(metaop: _Recomputable, *, selective: bool) -> float:
    """The share of an op's forward pass that runs once more where it is recomputed: all of it; or as much as
    the profile says, where what takes longest is kept.
    """
    return 1.0 if not selective or metaop.selective_share is None else metaop.selective_share


def forwards_again(slice_: SliceShape, metaop: _Recomputable) -> float:
    """How many forward passes of one op the backward passes of all of a slice's ops compute again."""
    return slice_.num_recomputed * share_again(metaop, selective=slice_.selective)


def saved_bytes(metaop: MetaOp) -> int:
    """The bytes that an op need not keep for the whole batch, on average, where it is recomputed."""
    return max(0, metaop.activation_bytes_per_op - inner_bytes(metaop))


def selectively_saved_bytes(metaop: MetaOp) -> int:
    """The bytes that an op need not keep for the whole batch, on average, where all but what takes longest is
    recomputed; 0 where that is not known.
    """
    if metaop.selective_share is None:
        return 0
    entries = [entry for entry in metaop.memory if entry.tp == 1]
    ends = [*(entry.first_op for entry in entries[1:]), metaop.num_ops]
    saved = 0
    for entry, end in zip(entries, ends, strict=True):
        kept = entry.kept_bytes[1] if entry.selective_bytes is None else entry.selective_bytes[1]
        saved += (end - entry.first_op) * (entry.kept_bytes[1] - kept)
    return max(0, min(round(saved / metaop.num_ops), saved_bytes(metaop)))


# Host memory is taken in blocks of so many bytes, a power of two: to one, torch rounds up what it locks.
HOST_BLOCK_BYTES = 2 * MIB


def spread_over(first: int, last: int, share: float) -> tuple[tuple[int, int], ...]:
    """At most this share of the ops [first, last) but the last one, as evenly apart as can be, as ranges. The
    last op's activations would have nothing to hide behind, and what hides behind as many ops as are from one
    to the next hides behind those that follow the last one that is moved.
    """
    others = last - 1 - first
    count = int(share * others + 1e-9)
    ranges: list[tuple[int, int]] = []
    for number in range(count):
        op = first + number * others // count
        if ranges and ranges[-1][1] == op:
            ranges[-1] = ranges[-1][0], op + 1
        else:
            ranges.append((op, op + 1))
    return tuple(ranges)


def is_offloaded(slice_: SliceShape) -> list[bool]:
    """Say for each op of a slice whether its activations are in host memory from forward to backward."""
    first, last = slice_.ops
    return [any(low <= op < high for low, high in slice_.offload) for op in range(first, last)]


def hidden_share(
    metaop: MetaOp, dp: float, tp: int, forward_s: float, backward_s: float, link: Link
) -> float:
    """The share of so many shares' ops in a row whose copies hide behind what all of them compute."""
    counts = op_needs(metaop, (0, metaop.num_ops), dp, tp)
    kept = sum(count * needs.kept for count, needs in counts) / metaop.num_ops
    if kept <= 0:
        return 0.0
    return min(1.0, min(forward_s, backward_s) / transfer_s(round(kept), link))


def hidden_on(slice_: SliceShape, metaop: MetaOp, op: OpSeconds, links: Iterable[Link | None]) -> float:
    """The share of a slice's ops whose copies hide behind what all of them compute, on each of its shares:
    all last as long as the slowest, and each is copied over a link of its own.

    Args:
        op: what an op takes in the slice, without what is computed again.
        links: of each share; None: nothing is known of it.
    """
    parts = dict.fromkeys(zip(cuts_by_share(slice_), links, strict=True))
    return min(
        0.0 if link is None else hidden_share(metaop, cuts, slice_.tp, op.forward_s, op.backward_s, link)
        for cuts, link in parts
    )


def links_of_shares(slice_: SliceShape, cluster: Cluster) -> list[Link | None]:
    """The link to host memory that each share of a slice has; None: nothing is known of it."""
    return [_link_of_share(slice_, share, cluster) for share in range(slice_.dp)]


@dataclass(frozen=True)
class Stalls:
    """Seconds that a slice's passes take longer."""

    forward_s: float = 0.0
    backward_s: float = 0.0


def stalls(
    slice_: SliceShape,
    metaop: MetaOp,
    cluster: Cluster,
    op: OpSeconds,
    of_shares: Sequence[OpSeconds] | None = None,
) -> Stalls:
    """How much longer a slice's passes last for copies, until the last of its shares is through.

    Each share has copies of its own size, over the link of its own devices; one that computes faster than the
    slowest has as much longer to make them.

    Args:
        op: what an op takes in the slice, without what is computed again.
        of_shares: the same of each share by itself; None: as long on all.
    """
    if not slice_.offload:
        return Stalls()
    share_ops = of_shares or (op,) * slice_.dp
    parts = dict.fromkeys(
        (share_op, cuts, link)
        for share, (share_op, cuts) in enumerate(zip(share_ops, cuts_by_share(slice_), strict=False))
        if (link := _link_of_share(slice_, share, cluster)) is not None
    )
    passes = [
        _passes_s(slice_, metaop, share_op, _copies(slice_, metaop, cuts, link))
        for share_op, cuts, link in parts
    ]
    if not passes:
        return Stalls()
    alone = _computing_s(slice_, metaop, op)
    # With times of their own no share need take as long as the slowest pass of each kind.
    passes += [alone] if of_shares is not None else []
    forward_s, backward_s = (max(seconds) for seconds in zip(*passes, strict=True))
    return Stalls(forward_s - alone[0], backward_s - alone[1])


def stalls_of_share(
    slice_: SliceShape, metaop: MetaOp, cluster: Cluster, share: int, op: OpSeconds
) -> Stalls:
    """How much longer than its ops one share's own passes take for copies.

    Args:
        share: its place among those of the slice, from 0.
        op: what an op takes on it, without what is computed again.
    """
    link = _link_of_share(slice_, share, cluster)
    if not slice_.offload or link is None:
        return Stalls()
    copies = _copies(slice_, metaop, cuts_by_share(slice_)[share], link)
    (forward_s, backward_s), alone = _passes_s(slice_, metaop, op, copies), _computing_s(slice_, metaop, op)
    return Stalls(forward_s - alone[0], backward_s - alone[1])


def _link_of_share(slice_: SliceShape, share: int, cluster: Cluster) -> Link | None:
    devices = slice_.devices[share * slice_.tp : (share + 1) * slice_.tp]
    return cluster.host_link_among(cluster.node_of[device] for device in devices)


def _copies(slice_: SliceShape, metaop: MetaOp, cuts: float, link: Link) -> list[float | None]:
    """Seconds of each op's copy, out or back; None: it is not moved."""
    kept = [
        needs.kept for count, needs in op_needs(metaop, slice_.ops, cuts, slice_.tp) for _ in range(count)
    ]
    return [
        transfer_s(round(size), link) if out else None
        for size, out in zip(kept, is_offloaded(slice_), strict=True)
    ]


def _passes_s(
    slice_: SliceShape, metaop: MetaOp, op: OpSeconds, copies: Sequence[float | None]
) -> tuple[float, float]:
    """Seconds of both passes, with what they wait for copies."""
    return _forward_s(op.forward_s, copies), _backward_s(_backward_of_ops(slice_, metaop, op), copies)


def _computing_s(slice_: SliceShape, metaop: MetaOp, op: OpSeconds) -> tuple[float, float]:
    """Seconds of both passes, where nothing waits."""
    backward_s = _backward_of_ops(slice_, metaop, op)
    return len(backward_s) * op.forward_s, sum(backward_s)


def _backward_of_ops(slice_: SliceShape, metaop: MetaOp, op: OpSeconds) -> list[float]:
    """Seconds of each op's backward pass: what is recomputed runs forward once more."""
    again_s = op.forward_s * share_again(metaop, selective=slice_.selective) if slice_.recompute else 0.0
    return [op.backward_s + (0.0 if out else again_s) for out in is_offloaded(slice_)]


def _forward_s(op_s: float, copies: Sequence[float | None]) -> float:
    now_s = 0.0
    before_s = last_s = 0.0  # when the copy before the last one, and the last one, have ended
    for copy_s in copies:
        now_s = max(now_s, before_s) + op_s
        if copy_s is not None:
            before_s, last_s = last_s, max(now_s, last_s) + copy_s
    return max(now_s, last_s)


def _backward_s(ops_s: Sequence[float], copies: Sequence[float | None]) -> float:
    now_s = 0.0
    waiting = [copy_s for copy_s in copies if copy_s is not None]
    back_s = waiting.pop() if waiting else 0.0  # when what is needed next has come back
    for place in reversed(range(len(copies))):
        starts_s = max(now_s, back_s) if copies[place] is not None else now_s
        now_s = starts_s + ops_s[place]
        if copies[place] is not None and waiting:
            is_neighbour = copies[place - 1] is not None
            back_s = (starts_s if is_neighbour else now_s) + waiting.pop()
    return now_s


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
