"""A MetaOp's curve and sizes for another batch size, from what is known of the shares of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from spindle_cli.profile.types import CurvePoint, MetaOpProfile, OfDevice, ShareTime, by_device

OpTimes: TypeAlias = tuple[float, float, float]  # forward, backward, and of both the op's own collectives


def rebatched(metaop: MetaOpProfile, batch_size: int, *, more_devices: int = 1) -> MetaOpProfile:
    """A MetaOp with another batch size; see `questions.edit.with_batch_size`.

    Args:
        more_devices: so many times as many shares are offered as its curve has, if that splits the batch.
    """
    ratio = batch_size / metaop.batch_size
    known = [_Known.of(metaop, points) for points in _by_type_and_tp(metaop.curve)]
    points = [
        each.point(dp, batch_size)
        for each in known
        for dp in range(1, each.most_dp(more_devices) + 1)
        if batch_size % dp == 0
    ]
    shares = [*metaop.shares, *(each.share(batch_size) for each in known if each.lacks_share(batch_size))]
    inner = metaop.inner_output_bytes
    return MetaOpProfile.model_validate(
        metaop.model_dump()
        | {
            "batch_size": batch_size,
            "activation_bytes_per_op": round(metaop.activation_bytes_per_op * ratio),
            "memory": [entry.rebatched(ratio).model_dump() for entry in metaop.memory],
            "field_bytes": {op: round(size * ratio) for op, size in metaop.field_bytes.items()},
            "output_bytes": round(metaop.output_bytes * ratio),
            "matrices": [each.rebatched(ratio).model_dump() for each in metaop.matrices],
            "inner_output_bytes": None if inner is None else round(inner * ratio),
            "flops_per_op": None if metaop.flops_per_op is None else metaop.flops_per_op * ratio,
            "fit": None,
            "curve": [
                point.model_dump() for point in _in_order(points, lambda point: (point.num_devices, point.tp))
            ],
            "shares": [
                share.model_dump() for share in _in_order(shares, lambda share: (share.samples, share.tp))
            ],
        }
    )


def _in_order(
    entries: Sequence[OfDevice], place: Callable[[OfDevice], tuple[int, int]]
) -> Iterator[OfDevice]:
    """One type of device after the other, ascending within each, as profiles have them."""
    for own in by_device(entries).values():
        yield from sorted(own, key=place)


def _by_type_and_tp(curve: Sequence[CurvePoint]) -> Iterator[list[CurvePoint]]:
    for own in by_device(curve).values():
        for tp in sorted({point.tp for point in own}):
            yield [point for point in own if point.tp == tp]


@dataclass(frozen=True)
class _Known:
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
    def of(cls, metaop: MetaOpProfile, points: Sequence[CurvePoint]) -> _Known:
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
    upper = next((i for i, known in enumerate(shares) if known >= share), len(shares) - 1)
    upper = max(upper, 1)
    x0, x1, y0, y1 = *shares[upper - 1 : upper + 1], *seconds[upper - 1 : upper + 1]
    at = y0 + (y1 - y0) * (share - x0) / (x1 - x0)
    if share > shares[-1]:  # where small shares sum more inside, the line may fall
        return max(at, seconds[-1])
    # Below the smallest known share an op is not faster than the line through zero, nor negative.
    return max(at, 0.0) if share >= shares[0] else max(at, y0 * share / x0)
