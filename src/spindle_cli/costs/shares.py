"""Shares of a slice's batch: how large they are, and what an op takes on them.

How large the shares of a slice are: equal ones, or by its `rows`.

What an op takes on a share of its batch, by the curve or the shares of its MetaOp.

A MetaOp's curve and sizes for another batch size, from what is known of the shares of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from pydantic import BaseModel

from spindle_cli.costs.memory import SliceShape
from spindle_cli.files.cluster import Cluster
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, OfDevice, ShareTime, by_device

Value = TypeVar("Value")


class Same(Generic[Value]):
    """A value that never changes as a key: equal to the same object alone, without a look at what it holds.

    Keys keep their values, so no other object gets their place in memory as long as they are in use.
    """

    __slots__ = ("of",)

    def __init__(self, of: Value) -> None:
        self.of = of

    def __hash__(self) -> int:
        return hash(id(self.of))

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Same) and self.of is value.of


def sizes(slice_: SliceShape) -> Sequence[int] | None:
    """Samples of each share; None where all have as many."""
    return None if slice_.rows is None else [last - first for first, last in pairwise(slice_.rows)]


def tells_shares_apart(slice_: SliceShape, cluster: Cluster) -> bool:
    """Whether what single shares of a slice took is kept: they are of unequal size, or the cluster has
    devices of several types.
    """
    return slice_.rows is not None or cluster.is_mixed


def cuts_like(slice_: SliceShape, samples: int) -> float:
    """The number of shares with `samples` samples that the whole batch of a slice with `rows` would make."""
    assert slice_.rows is not None, "equal shares need no rows to say their size"
    return slice_.rows[-1] * (slice_.shares_of_batch // slice_.dp) / samples


def cuts_by_share(slice_: SliceShape) -> Sequence[float]:
    """For each share, the number of shares of its size that the whole batch would make."""
    share_sizes = sizes(slice_)
    if share_sizes is None:  # as many as there are devices for, of a plan that nobody has checked
        return (slice_.shares_of_batch,) * ceil(len(slice_.devices) / slice_.tp)
    return [cuts_like(slice_, samples) for samples in share_sizes]


def largest_samples(slice_: SliceShape, batch_size: int) -> float:
    """Samples of the largest share of a slice, whose batch has `batch_size` samples."""
    share_sizes = sizes(slice_)
    return batch_size / slice_.shares_of_batch if share_sizes is None else max(share_sizes)


def cuts_like_largest(slice_: SliceShape) -> float:
    """The number of shares of the size of a slice's largest that the whole batch would make."""
    share_sizes = sizes(slice_)
    return slice_.shares_of_batch if share_sizes is None else cuts_like(slice_, max(share_sizes))


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


def times_of(metaop: Timed, slice_: SliceShape, cluster: Cluster) -> OpSeconds | None:
    """The seconds of one op of a slice: of whole batches by the curve, of micro-batches, and of unequal
    shares, by the shares, as long as the largest takes; where a cluster has devices of several types, as long
    as the longest of the shares, each on the type of its own devices. None: curve and shares do not have it.
    """
    if cluster.is_mixed:
        return _longest_of_types(metaop, slice_, cluster)
    if slice_.shares_of_batch == slice_.dp and slice_.rows is None:
        for point in metaop.curve:
            if (point.dp, point.tp) == (slice_.dp, slice_.tp):
                return OpSeconds(point.forward_s, point.backward_s, point.communication_s)
        return None
    return share_seconds(metaop.shares, largest_samples(slice_, metaop.batch_size), slice_.tp)


def times_of_share(metaop: Timed, slice_: SliceShape, share: int, cluster: Cluster) -> OpSeconds | None:
    """The seconds of one op on one share of a slice, on the type of its own devices. None: curve and shares
    do not have it.

    Args:
        share: its place among those of the slice, from 0.
    """
    share_sizes = sizes(slice_)
    if cluster.is_mixed:
        samples = metaop.batch_size / slice_.shares_of_batch if share_sizes is None else share_sizes[share]
        return share_on_type(metaop, cluster.type_of[slice_.devices[share * slice_.tp]], samples, slice_.tp)
    if share_sizes is None:
        return times_of(metaop, slice_, cluster)
    return share_seconds(metaop.shares, share_sizes[share], slice_.tp)


def times_of_shares(metaop: Timed, slice_: SliceShape, cluster: Cluster) -> Sequence[OpSeconds] | None:
    """The seconds of one op on each share of a slice, where a cluster has devices of several types. None: all
    are of one type, and the largest share's times hold for all; or curve and shares do not have one.
    """
    if not cluster.is_mixed:
        return None
    of_shares = [times_of_share(metaop, slice_, share, cluster) for share in range(slice_.dp)]
    ops = [op for op in of_shares if op is not None]
    return ops if len(ops) == len(of_shares) else None


def _longest_of_types(metaop: Timed, slice_: SliceShape, cluster: Cluster) -> OpSeconds | None:
    equal = metaop.batch_size / slice_.shares_of_batch
    samples = sizes(slice_) or (equal,) * slice_.dp
    first_of_share = slice_.devices[:: slice_.tp]
    parts = dict.fromkeys(
        (cluster.type_of[device], count) for device, count in zip(first_of_share, samples, strict=False)
    )
    of_parts = [share_on_type(metaop, device, count, slice_.tp) for device, count in parts]
    ops = [op for op in of_parts if op is not None]
    if len(ops) < len(of_parts):
        return None
    return OpSeconds(*(max(seconds) for seconds in zip(*ops, strict=True)))


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
    return _known(
        tuple(share for share in shares.of if share.device == device and share.tp == tp),
        tuple(point for point in curve.of if point.device == device and point.tp == tp),
        batch_size,
    )


@lru_cache(_MOST_KEPT)
def _known(shares: tuple[ShareTime, ...], points: tuple[CurvePoint, ...], batch_size: int) -> KnownShares:
    """Also of other MetaOps with equal shares the same object."""
    return KnownShares(shares, points, batch_size)


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


OpTimes: TypeAlias = tuple[float, float, float]  # forward, backward, and of both the op's own collectives


def rebatched(metaop: MetaOpProfile, batch_size: int, *, more_devices: int = 1) -> MetaOpProfile:
    """A MetaOp with another batch size; see `questions.edit.with_batch_size`.

    Args:
        more_devices: so many times as many shares are offered as its curve has, if that splits the batch.
    """
    ratio = batch_size / metaop.batch_size
    times_by_type = [_TimesOnType.of(metaop, points) for points in _by_type_and_tp(metaop.curve)]
    points = [point for times in times_by_type for point in times.points_at(batch_size, more_devices)]
    shares = [
        *metaop.shares,
        *(times.share(batch_size) for times in times_by_type if times.lacks_share(batch_size)),
    ]
    inner = metaop.inner_output_bytes
    return MetaOpProfile.model_validate(
        metaop.model_dump()
        | {
            "batch_size": batch_size,
            "activation_bytes_per_op": round(metaop.activation_bytes_per_op * ratio),
            "memory": _dumped(entry.rebatched(ratio) for entry in metaop.memory),
            "field_bytes": {op: round(size * ratio) for op, size in metaop.field_bytes.items()},
            "output_bytes": round(metaop.output_bytes * ratio),
            "matrices": _dumped(matrix.rebatched(ratio) for matrix in metaop.matrices),
            "inner_output_bytes": None if inner is None else round(inner * ratio),
            "flops_per_op": None if metaop.flops_per_op is None else metaop.flops_per_op * ratio,
            "fit": None,
            "curve": _dumped(_in_order(points, lambda point: (point.num_devices, point.tp))),
            "shares": _dumped(_in_order(shares, lambda share: (share.samples, share.tp))),
        }
    )


def _dumped(entries: Iterable[BaseModel]) -> list[dict[str, object]]:
    return [entry.model_dump() for entry in entries]


def _in_order(
    entries: Sequence[OfDevice], place: Callable[[OfDevice], tuple[int, int]]
) -> Iterator[OfDevice]:
    """One type of device after the other, ascending within each, as profiles have them."""
    for entries_of_type in by_device(entries).values():
        yield from sorted(entries_of_type, key=place)


def _by_type_and_tp(curve: Sequence[CurvePoint]) -> Iterator[list[CurvePoint]]:
    for points in by_device(curve).values():
        for tp in sorted({point.tp for point in points}):
            yield [point for point in points if point.tp == tp]


@dataclass(frozen=True)
class _TimesOnType:
    """What one type of device takes for shares of a MetaOp's batch, at one tensor-parallel degree.

    Attributes:
        points: of the curve.
        seconds: of a share, by its samples: the curve's, and those that `shares` has besides.
        has_shares: whether `shares` has any of them.
    """

    points: Sequence[CurvePoint]
    seconds: Mapping[float, OpTimes]
    has_shares: bool

    @classmethod
    def of(cls, metaop: MetaOpProfile, points: Sequence[CurvePoint]) -> _TimesOnType:
        first = points[0]
        shares = [share for share in metaop.shares if (share.device, share.tp) == (first.device, first.tp)]
        seconds = {float(share.samples): _times(share) for share in shares}
        return cls(
            points,
            seconds | {metaop.batch_size / point.dp: _times(point) for point in points},
            bool(shares),
        )

    def most_dp(self, more_devices: int) -> int:
        """What is never split over the batch stays so."""
        most = max(point.dp for point in self.points)
        return most * more_devices if most > 1 else most

    def points_at(self, batch_size: int, more_devices: int) -> Iterator[CurvePoint]:
        """Yield the curve's points for another batch size, one for each number of shares that splits it."""
        for dp in range(1, self.most_dp(more_devices) + 1):
            if batch_size % dp == 0:
                yield self.point(dp, batch_size)

    def point(self, dp: int, batch_size: int) -> CurvePoint:
        """The new curve's point at `dp` shares."""
        tp, device = self.points[0].tp, self.points[0].device
        forward_s, backward_s, communication_s = self._at(batch_size / dp)
        return CurvePoint(
            num_devices=dp * tp,
            dp=dp,
            tp=tp,
            forward_s=forward_s,
            backward_s=backward_s,
            communication_s=communication_s,
            source="fitted",
            device=device,
        )

    def lacks_share(self, samples: int) -> bool:
        """Whether `shares` end below this one: a batch that is cut unequally may have any share up to it."""
        return self.has_shares and samples > max(self.seconds)

    def share(self, samples: int) -> ShareTime:
        tp, device = self.points[0].tp, self.points[0].device
        forward_s, backward_s, communication_s = self._at(samples)
        return ShareTime(
            samples=samples,
            tp=tp,
            forward_s=forward_s,
            backward_s=backward_s,
            communication_s=communication_s,
            source="fitted",
            device=device,
        )

    def _at(self, share: float) -> OpTimes:
        sizes = sorted(self.seconds)
        forward_s, backward_s, communication_s = zip(*(self.seconds[size] for size in sizes), strict=True)
        return (
            _read_at(sizes, forward_s, share),
            _read_at(sizes, backward_s, share),
            _read_at(sizes, communication_s, share),
        )


def _times(entry: CurvePoint | ShareTime) -> OpTimes:
    return entry.forward_s, entry.backward_s, entry.communication_s


def _read_at(shares: Sequence[float], seconds: Sequence[float], share: float) -> float:
    """Seconds at a batch share, linear between the known ones, which ascend; a single known one is scaled."""
    if len(shares) == 1:
        return seconds[0] * share / shares[0]
    upper = next((i for i, size in enumerate(shares) if size >= share), len(shares) - 1)
    upper = max(upper, 1)
    x0, x1, y0, y1 = *shares[upper - 1 : upper + 1], *seconds[upper - 1 : upper + 1]
    at = y0 + (y1 - y0) * (share - x0) / (x1 - x0)
    if share > shares[-1]:  # where small shares sum more inside, the line may fall
        return max(at, seconds[-1])
    # Below the smallest known share an op is not faster than the line through zero, nor negative.
    return max(at, 0.0) if share >= shares[0] else max(at, y0 * share / x0)
