"""What an op takes on a share of its batch, by the curve or the shares of its MetaOp."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from spindle_cli.costs.memory import SliceShape
from spindle_cli.costs.share_sizes import largest_samples
from spindle_cli.profile.types import CurvePoint, ShareTime


class OpSeconds(NamedTuple):
    """Of one op on one share, by the devices that hold it together.

    `communication_s`: of both, what the op's own collectives take.
    """

    forward_s: float
    backward_s: float
    communication_s: float = 0.0


def point_of_share(dp: int, tp: int, op: OpSeconds) -> CurvePoint:
    """A point of a curve from what an op takes on the largest of its shares."""
    return CurvePoint(
        num_devices=dp * tp,
        dp=dp,
        tp=tp,
        forward_s=op.forward_s,
        backward_s=op.backward_s,
        source="fitted",
        communication_s=op.communication_s,
    )


class Timed(Protocol):
    """What is known of a MetaOp's times."""

    @property
    def batch_size(self) -> int: ...
    @property
    def curve(self) -> Sequence[CurvePoint]: ...
    @property
    def shares(self) -> Sequence[ShareTime]: ...


def times_of(metaop: Timed, piece: SliceShape) -> OpSeconds | None:
    """Of one op of a slice: of whole batches by the curve, of micro-batches, and of unequal shares, by the
    shares, as long as the largest takes; None: these do not have it.
    """
    if piece.shares_of_batch == piece.dp and piece.rows is None:
        for point in metaop.curve:
            if (point.dp, point.tp) == (piece.dp, piece.tp):
                return OpSeconds(point.forward_s, point.backward_s, point.communication_s)
        return None
    return share_seconds(metaop.shares, largest_samples(piece, metaop.batch_size), piece.tp)


def share_seconds(shares: Sequence[ShareTime], samples: float, tp: int) -> OpSeconds | None:
    """Between two entries linear in the samples; None below the first entry and beyond the last."""
    known = [share for share in shares if share.tp == tp]
    place = bisect_left([share.samples for share in known], samples)
    if place == len(known):
        return None
    above = known[place]
    if above.samples == samples:
        return OpSeconds(above.forward_s, above.backward_s, above.communication_s)
    if place == 0:
        return None
    below = known[place - 1]
    part = (samples - below.samples) / (above.samples - below.samples)

    def between(low: float, high: float) -> float:
        return low + part * (high - low)

    return OpSeconds(
        between(below.forward_s, above.forward_s),
        between(below.backward_s, above.backward_s),
        between(below.communication_s, above.communication_s),
    )
