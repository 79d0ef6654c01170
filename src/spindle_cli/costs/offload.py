"""Activations in host memory from forward to backward: which ops', and how long their copies hold passes up.

An op's activations are copied out when its forward pass has ended, one op after another; an op starts when at
most one such copy is under way, and the slice's forward pass ends when none is. They are copied back one
after another: those of the last op from the start of the slice's backward pass, those of another one when
that behind it, of those that are moved, is through; of its neighbour, when that begins. Out and back at once,
each way at the link's full speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spindle_cli.costs.links import transfer_s
from spindle_cli.costs.memory import SliceShape, op_needs
from spindle_cli.costs.share_sizes import cuts_like_largest
from spindle_cli.files.cluster import Cluster, Link
from spindle_cli.profile.types import MetaOp
from spindle_cli.units import MIB

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


def is_offloaded(piece: SliceShape) -> list[bool]:
    """Of each op of a slice, whether its activations are in host memory from forward to backward."""
    first, last = piece.ops
    return [any(low <= op < high for low, high in piece.offload) for op in range(first, last)]


def hidden_share(
    metaop: MetaOp, dp: float, tp: int, forward_s: float, backward_s: float, link: Link
) -> float:
    """Of so many shares' ops in a row, the share whose copies hide behind what all of them compute."""
    counts = op_needs(metaop, (0, metaop.num_ops), dp, tp)
    kept = sum(count * needs.kept for count, needs in counts) / metaop.num_ops
    if kept <= 0:
        return 0.0
    return min(1.0, min(forward_s, backward_s) / transfer_s(round(kept), link))


@dataclass(frozen=True)
class Stalls:
    """Seconds that a slice's passes take longer."""

    forward_s: float = 0.0
    backward_s: float = 0.0


def stalls(
    piece: SliceShape, metaop: MetaOp, cluster: Cluster, forward_s: float, backward_s: float, again_s: float
) -> Stalls:
    """How long a slice's passes wait for copies, on a device with its largest share.

    Args:
        forward_s, backward_s: of each op, without what is computed again.
        again_s: of each op that is recomputed, what its backward pass takes longer.
    """
    link = cluster.host_link
    if not piece.offload or link is None:
        return Stalls()
    offloaded = is_offloaded(piece)
    shares = cuts_like_largest(piece)
    kept = [
        needs.kept for count, needs in op_needs(metaop, piece.ops, shares, piece.tp) for _ in range(count)
    ]
    copies = [
        transfer_s(round(size), link) if out else None for size, out in zip(kept, offloaded, strict=True)
    ]
    again = again_s if piece.recompute else 0.0
    ops_s = [backward_s + (0.0 if out else again) for out in offloaded]
    return Stalls(
        _forward_s(forward_s, copies) - len(copies) * forward_s, _backward_s(ops_s, copies) - sum(ops_s)
    )


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
