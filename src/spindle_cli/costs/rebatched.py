"""A MetaOp's curve and sizes for another batch size, from what is known of the shares of its own."""

from __future__ import annotations

from collections.abc import Sequence

from spindle_cli.profile.types import CurvePoint, MetaOpProfile


def rebatched(metaop: MetaOpProfile, batch_size: int, *, more_devices: int = 1) -> MetaOpProfile:
    """A MetaOp with another batch size; see `questions.edit.with_batch_size`.

    Args:
        more_devices: so many times as many shares are offered as its curve has, if that splits the batch.
    """
    ratio = batch_size / metaop.batch_size
    points = [
        _point(metaop, same_tp, dp, batch_size)
        for same_tp in _by_tp(metaop.curve)
        for dp in range(1, _most_dp(same_tp, more_devices) + 1)
        if batch_size % dp == 0
    ]
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
            "curve": sorted(
                (point.model_dump() for point in points), key=lambda p: (p["num_devices"], p["tp"])
            ),
        }
    )


def _most_dp(curve: Sequence[CurvePoint], more_devices: int) -> int:
    """What is never split over the batch stays so."""
    most = max(point.dp for point in curve)
    return most * more_devices if most > 1 else most


def _by_tp(curve: Sequence[CurvePoint]) -> list[list[CurvePoint]]:
    return [[point for point in curve if point.tp == tp] for tp in sorted({point.tp for point in curve})]


def _point(metaop: MetaOpProfile, curve: Sequence[CurvePoint], dp: int, batch_size: int) -> CurvePoint:
    """The new curve's point at `dp` shares, from the old points of one tensor-parallel degree."""
    share = batch_size / dp
    old_shares = [metaop.batch_size / point.dp for point in curve]
    tp = curve[0].tp
    return CurvePoint(
        num_devices=dp * tp,
        dp=dp,
        tp=tp,
        forward_s=_read_at(old_shares, [point.forward_s for point in curve], share),
        backward_s=_read_at(old_shares, [point.backward_s for point in curve], share),
        communication_s=_read_at(old_shares, [point.communication_s for point in curve], share),
        source="fitted",
    )


def _read_at(shares: Sequence[float], seconds: Sequence[float], share: float) -> float:
    """Seconds at a batch share, linear between the known ones; a single known one is scaled."""
    known = sorted(zip(shares, seconds, strict=True))
    if len(known) == 1:
        return known[0][1] * share / known[0][0]
    upper = next((i for i, (x, _) in enumerate(known) if x >= share), len(known) - 1)
    upper = max(upper, 1)
    (x0, y0), (x1, y1) = known[upper - 1], known[upper]
    at = y0 + (y1 - y0) * (share - x0) / (x1 - x0)
    if share > known[-1][0]:  # where small shares sum more inside, the line may fall
        return max(at, known[-1][1])
    # Below the smallest known share an op is not faster than the line through zero, nor negative.
    return max(at, 0.0) if share >= known[0][0] else max(at, y0 * share / x0)
