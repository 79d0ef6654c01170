"""Scaling curves between their measured points: piecewise alpha-beta, and how far it is off; memory, linear
in the samples.

On each segment between two neighbouring points, T(n) = alpha + beta * c + gamma * w / n (system.md, section
4): alpha does not shrink with more devices, beta * c is what the op itself communicates, gamma * w / n is its
work, divided. `beta_s` and `gamma_s` hold the products with c and w, which are the same for every n of a
segment. Positive and non-increasing everywhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median

from spindle_cli.profile.points import Fit, FitSegment
from spindle_cli.profile.types import CurvePoint, OpMemory, ShareMemory

_KEYS = ("kept_bytes", "forward_bytes", "backward_bytes", "first_backward_bytes")


@dataclass(frozen=True)
class _Knot:
    """Seconds on `n` devices, without and of the op's own communication."""

    n: int
    work_s: float
    communication_s: float


def fit_curve(points: Sequence[CurvePoint], max_n: int) -> Fit | None:
    """Return the fit through measured points of ascending n, reaching to `max_n`; None for fewer than two
    points.

    Points that rise with n are averaged with their neighbours first (pool adjacent violators), since more
    devices than are useful can be left idle. Beyond the last point the last segment goes on, but never faster
    than work / n.
    """
    if len(points) < 2:
        return None
    errors = leave_one_out_errors(points)
    return Fit(
        segments=_segments(points, max_n),
        leave_one_out_error=median(errors) if errors else None,
        worst_error=max(errors) if errors else None,
    )


def predict_s(segments: Sequence[FitSegment], n: int) -> float:
    """Seconds on `n` devices by the segment that holds `n`; outside all segments by the nearest."""
    for segment in segments:
        if n <= segment.to_n:
            break
    return segment.alpha_s + segment.beta_s + segment.gamma_s / n


def leave_one_out_errors(points: Sequence[CurvePoint]) -> list[float]:
    """Relative error at each inner point when the fit does not know it; empty with fewer than three points.

    The two ends stay: measured are always the fewest and the most devices, so nothing is ever predicted
    beyond them.
    """
    errors = []
    for left_out in range(1, len(points) - 1):
        point = points[left_out]
        others = [*points[:left_out], *points[left_out + 1 :]]
        predicted = predict_s(_segments(others, others[-1].num_devices), point.num_devices)
        errors.append(abs(predicted - point.op_s) / point.op_s)
    return errors


def fitted_point(points: Sequence[CurvePoint], fit: Fit, n: int) -> CurvePoint:
    """Return the curve's point for `n` devices (dp = n), with the neighbours' split into forward and
    backward.
    """
    total_s = predict_s(fit.segments, n)
    above = min(bisect_left([point.num_devices for point in points], n), len(points) - 1)
    neighbours = points[max(above - 1, 0) : above + 1]
    forward_share = sum(p.forward_s for p in neighbours) / sum(p.op_s for p in neighbours)
    return CurvePoint(
        num_devices=n,
        dp=n,
        forward_s=total_s * forward_share,
        backward_s=total_s * (1 - forward_share),
        source="fitted",
    )


def choose_measured(valid: Sequence[int], limit: int) -> tuple[int, ...]:
    """Choose which of the ascending valid numbers of devices to measure: all, or about `limit` of them.

    Those are evenly spaced over log(n), the first and the last among them.
    """
    if len(valid) <= limit:
        return tuple(valid)
    first, last = valid[0], valid[-1]
    wanted = [first * (last / first) ** (step / (limit - 1)) for step in range(limit)]
    nearest = {min(valid, key=lambda n: (abs(n / target - 1), n)) for target in wanted}
    return tuple(sorted(nearest | {first, last}))


def _segments(points: Sequence[CurvePoint], max_n: int) -> tuple[FitSegment, ...]:
    knots = _pooled([_Knot(p.num_devices, p.op_s - p.communication_s, p.communication_s) for p in points])
    if len(knots) == 1:
        only = knots[0]
        return (
            FitSegment(
                from_n=only.n,
                to_n=max(only.n, max_n),
                alpha_s=only.work_s,
                beta_s=only.communication_s,
                gamma_s=0,
            ),
        )
    segments = [_through(left, right) for left, right in pairwise(knots)]
    if max_n > knots[-1].n:
        segments.append(_beyond(knots[-1], segments[-1], max_n))
    return tuple(segments)


def _through(left: _Knot, right: _Knot) -> FitSegment:
    gamma_s = (left.work_s - right.work_s) / (1 / left.n - 1 / right.n)
    return FitSegment(
        from_n=left.n,
        to_n=right.n,
        alpha_s=left.work_s - gamma_s / left.n,
        beta_s=(left.communication_s + right.communication_s) / 2,
        gamma_s=gamma_s,
    )


def _beyond(last: _Knot, segment: FitSegment, max_n: int) -> FitSegment:
    alpha_s = max(segment.alpha_s, 0.0)
    return FitSegment(
        from_n=last.n,
        to_n=max_n,
        alpha_s=alpha_s,
        beta_s=last.communication_s,
        gamma_s=(last.work_s - alpha_s) * last.n,
    )


def _pooled(knots: Sequence[_Knot]) -> list[_Knot]:
    """Replace the work of knots by the nearest that does not increase."""
    work = non_increasing([knot.work_s for knot in knots])
    return [_Knot(knot.n, work_s, knot.communication_s) for knot, work_s in zip(knots, work, strict=True)]


# Of one op: (samples, what that share takes), each number of samples once.
Shares = Sequence[tuple[int, ShareMemory]]


def op_memory(
    ops: Sequence[Shares], tp: int, batch_size: int, joined: Sequence[int] = ()
) -> tuple[OpMemory, ...]:
    """Return what the ops of a MetaOp take, neighbours that take the same together; none if one is not known.

    `joined`: of each op, as `OpMemory.joined_bytes`; absent: 0.
    """
    if not all(ops):
        return ()
    fits = [tuple(_fit(shares, key, batch_size) for key in _KEYS) for shares in ops]
    kept = [_selective(shares, fit[0][0], batch_size) for shares, fit in zip(ops, fits, strict=True)]
    memories: list[OpMemory] = []
    first = 0
    for (fit, whole, selective), run in groupby(zip(fits, joined or [0] * len(fits), kept, strict=True)):
        pairs = dict(zip(_KEYS, fit, strict=True))
        memories.append(
            OpMemory(tp=tp, first_op=first, joined_bytes=whole, selective_bytes=selective, **pairs)
        )
        first += len(list(run))
    return tuple(memories)


def selective_share(ops: Sequence[Shares]) -> float | None:
    """Return the share of the ops' forward passes that runs again, on average, where all but what takes
    longest is recomputed: by the largest shares for which this is known. None where it is not known of an op.
    """
    largest = [
        max(
            ((rows, memory.selective.share) for rows, memory in shares if memory.selective is not None),
            default=None,
        )
        for shares in ops
    ]
    shares_known = [rows_and_share[1] for rows_and_share in largest if rows_and_share is not None]
    return (
        sum(shares_known) / len(shares_known) if shares_known and len(shares_known) == len(largest) else None
    )


def _selective(shares: Shares, fixed: int, batch_size: int) -> tuple[int, int] | None:
    """Return what is kept where an op is recomputed but for what takes longest, of the shares that this is
    known of; of one alone as much whatever the share as where nothing is recomputed (`fixed`): parameters
    that were cast are kept in any case.
    """
    points = [(rows, memory.selective.kept_bytes) for rows, memory in shares if memory.selective is not None]
    if len(points) == 1:
        points.append((0, min(fixed, points[0][1])))
    return _line(points, batch_size) if points else None


def _fit(shares: Shares, key: str, batch_size: int) -> tuple[int, int]:
    """(whatever the share, for the whole batch): the line through the smallest and the largest share, raised
    until no share lies above it.
    """
    return _line([(rows, getattr(memory, key)) for rows, memory in shares], batch_size)


def _line(points: Sequence[tuple[int, int]], batch_size: int) -> tuple[int, int]:
    ascending = sorted(points)
    (few, least), (many, most) = ascending[0], ascending[-1]
    slope = max(0.0, (most - least) / (many - few)) if many > few else most / many
    fixed = max(0.0, *(taken - slope * rows for rows, taken in ascending))
    return round(fixed), round(slope * batch_size)


def non_increasing(values: Sequence[float]) -> list[float]:
    """Return the non-increasing sequence nearest to `values`; same length, same mean."""
    blocks: list[tuple[float, int]] = []  # (mean, count)
    for value in values:
        mean, count = value, 1
        while blocks and blocks[-1][0] < mean:
            earlier, weight = blocks.pop()
            mean, count = (earlier * weight + mean * count) / (weight + count), weight + count
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


def non_decreasing(values: Sequence[float]) -> list[float]:
    """Return the non-decreasing sequence nearest to `values`; same length, same mean."""
    return non_increasing(values[::-1])[::-1]
