"""What an op takes on a share of its batch, by the curve or the shares of its MetaOp."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from spindle_cli.costs.memory import SliceShape
from spindle_cli.costs.same import Same
from spindle_cli.costs.shares.sizes import largest_samples, sizes
from spindle_cli.files.cluster import Cluster
from spindle_cli.profile.types import CurvePoint, ShareTime

# Of so many MetaOps, types and degrees what is known of shares is kept to be asked again.
_MOST_KEPT = 8192


class OpSeconds(NamedTuple):
    """The seconds of one op on one share, by the devices that hold it together.

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


def times_of(metaop: Timed, piece: SliceShape, cluster: Cluster) -> OpSeconds | None:
    """The seconds of one op of a slice: of whole batches by the curve, of micro-batches, and of unequal
    shares, by the shares, as long as the largest takes; where a cluster has devices of several types, as long
    as the longest of the shares, each on the type of its own devices. None: curve and shares do not have it.
    """
    if cluster.is_mixed:
        return _longest_of_types(metaop, piece, cluster)
    if piece.shares_of_batch == piece.dp and piece.rows is None:
        for point in metaop.curve:
            if (point.dp, point.tp) == (piece.dp, piece.tp):
                return OpSeconds(point.forward_s, point.backward_s, point.communication_s)
        return None
    return share_seconds(metaop.shares, largest_samples(piece, metaop.batch_size), piece.tp)


def times_of_share(metaop: Timed, piece: SliceShape, share: int, cluster: Cluster) -> OpSeconds | None:
    """The seconds of one op on one share of a slice, on the type of its own devices. None: curve and shares
    do not have it.

    Args:
        share: its place among those of the slice, from 0.
    """
    own = sizes(piece)
    if cluster.is_mixed:
        samples = metaop.batch_size / piece.shares_of_batch if own is None else own[share]
        return share_on_type(metaop, cluster.type_of[piece.devices[share * piece.tp]], samples, piece.tp)
    if own is None:
        return times_of(metaop, piece, cluster)
    return share_seconds(metaop.shares, own[share], piece.tp)


def times_of_shares(metaop: Timed, piece: SliceShape, cluster: Cluster) -> Sequence[OpSeconds] | None:
    """The seconds of one op on each share of a slice, where a cluster has devices of several types. None: all
    are of one type, and the largest share's times hold for all; or curve and shares do not have one.
    """
    if not cluster.is_mixed:
        return None
    found = [times_of_share(metaop, piece, share, cluster) for share in range(piece.dp)]
    known = [op for op in found if op is not None]
    return known if len(known) == len(found) else None


def _longest_of_types(metaop: Timed, piece: SliceShape, cluster: Cluster) -> OpSeconds | None:
    equal = metaop.batch_size / piece.shares_of_batch
    samples = sizes(piece) or (equal,) * piece.dp
    first_of_share = piece.devices[:: piece.tp]
    parts = dict.fromkeys(
        (cluster.type_of[device], count) for device, count in zip(first_of_share, samples, strict=False)
    )
    known = [share_on_type(metaop, device, count, piece.tp) for device, count in parts]
    found = [each for each in known if each is not None]
    if len(found) < len(known):
        return None
    return OpSeconds(*(max(seconds) for seconds in zip(*found, strict=True)))


class KnownShares:
    """Shares of one degree of tensor parallelism, and of one type of device, to be asked many times."""

    def __init__(
        self, shares: Iterable[ShareTime], points: Iterable[CurvePoint] = (), batch_size: int = 0
    ) -> None:
        """`points`: what is known besides, of equal shares of a batch of so many samples."""
        self._shares = list(shares)
        self._samples = [share.samples for share in self._shares]
        self._points = [
            (point.dp, OpSeconds(point.forward_s, point.backward_s, point.communication_s))
            for point in points
        ]
        self._batch_size = batch_size
        self._known: dict[float, OpSeconds | None] = {}

    def seconds(self, samples: float) -> OpSeconds | None:
        """Between two entries linear in the samples; below the first entry and beyond the last those of the
        point that has such shares, or None.
        """
        if samples not in self._known:
            self._known[samples] = self._found(samples)
        return self._known[samples]

    def _found(self, samples: float) -> OpSeconds | None:
        place = bisect_left(self._samples, samples)
        if place == len(self._shares):
            return self._of_point(samples)
        above = self._shares[place]
        if above.samples == samples:
            return OpSeconds(above.forward_s, above.backward_s, above.communication_s)
        if place == 0:
            return self._of_point(samples)
        below = self._shares[place - 1]
        part = (samples - below.samples) / (above.samples - below.samples)

        def between(low: float, high: float) -> float:
            return low + part * (high - low)

        return OpSeconds(
            between(below.forward_s, above.forward_s),
            between(below.backward_s, above.backward_s),
            between(below.communication_s, above.communication_s),
        )

    def _of_point(self, samples: float) -> OpSeconds | None:
        return next((op for dp, op in self._points if dp * samples == self._batch_size), None)


def shares_on_type(metaop: Timed, device: str, tp: int) -> KnownShares:
    """What is known of one op on devices of a type: by its shares, or by the points of its curve that have
    such shares. It is the same object for the same shares and curve.
    """
    return _shares_on_type(Same(metaop.shares), Same(metaop.curve), metaop.batch_size, device, tp)


@lru_cache(_MOST_KEPT)
def _shares_on_type(
    shares: Same[Sequence[ShareTime]],
    curve: Same[Sequence[CurvePoint]],
    batch_size: int,
    device: str,
    tp: int,
) -> KnownShares:
    return KnownShares(
        (share for share in shares.of if share.device == device and share.tp == tp),
        (point for point in curve.of if point.device == device and point.tp == tp),
        batch_size,
    )


def share_on_type(metaop: Timed, device: str, samples: float, tp: int) -> OpSeconds | None:
    """The seconds of one op on a share of so many samples by devices of a type; None: nothing is known of
    it.
    """
    return shares_on_type(metaop, device, tp).seconds(samples)


def share_seconds(shares: Sequence[ShareTime], samples: float, tp: int) -> OpSeconds | None:
    """Between two entries linear in the samples; None below the first entry and beyond the last."""
    return _shares_of_degree(Same(shares), tp).seconds(samples)


@lru_cache(_MOST_KEPT)
def _shares_of_degree(shares: Same[Sequence[ShareTime]], tp: int) -> KnownShares:
    return KnownShares(share for share in shares.of if share.tp == tp)
