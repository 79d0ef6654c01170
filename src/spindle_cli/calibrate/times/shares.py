"""Shares corrected by what ran: these get what was measured, others follow the curve or what is nearest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from math import log2
from typing import NamedTuple

from spindle_cli.calibrate.times.factors import Factor, OfEqualOps, factor_of, is_equal
from spindle_cli.calibrate.times.points import Measured, OpTimes, known_times
from spindle_cli.costs.shares.times import share_seconds
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, ShareTime, Source

# Of one MetaOp: into how many such shares its batch would be cut, and tp.
Ran = Mapping[tuple[Fraction | int, int], Measured]


class _Known(NamedTuple):
    """What is known of a share: how many times as long as before it takes, and how long."""

    factor: Factor
    times: OpTimes
    source: Source


_BySamples = dict[Fraction, _Known]  # of one degree of tensor parallelism


def calibrated_shares(
    metaop: MetaOpProfile, curve: Sequence[CurvePoint], ran: Ran, equal_ops: OfEqualOps
) -> tuple[ShareTime, ...]:
    """A MetaOp's shares, of one type of device. Those that the curve has are as it has them; those that ran,
    as measured, and are among them from now on where they lie between two; others go with equal ops on the
    same share, else with the nearest share, of the same `tp`, of the curve or that ran.

    Args:
        curve: its points now, in the old ones' order.
        equal_ops: what MetaOps of its kind took.
    """
    known = _known(metaop, curve, ran)
    shares = sorted((*metaop.shares, *_between(metaop, ran)), key=lambda share: (share.samples, share.tp))
    return tuple(_share(share, known.get(share.tp, {}), equal_ops) for share in shares)


def _known(metaop: MetaOpProfile, curve: Sequence[CurvePoint], ran: Ran) -> dict[int, _BySamples]:
    found: dict[int, _BySamples] = {}
    for (ways, tp), each in ran.items():
        factor = factor_of(known_times(metaop, ways, tp), each)
        found.setdefault(tp, {})[Fraction(metaop.batch_size) / ways] = _Known(factor, each.times, "measured")
    for old, new in zip(metaop.curve, curve, strict=True):
        times = OpTimes(new.forward_s, new.backward_s)
        known = _Known(factor_of(old, Measured(times, 1.0, 1)), times, new.source)
        found.setdefault(old.tp, {})[Fraction(metaop.batch_size, old.dp)] = known
    return found


def _between(metaop: MetaOpProfile, ran: Ran) -> Iterator[ShareTime]:
    """Shares that ran between two that the profile has, as these say; but for those that took as long."""
    have = {(share.samples, share.tp) for share in metaop.shares}
    for (ways, tp), each in ran.items():
        samples = int(Fraction(metaop.batch_size) / ways)
        before = share_seconds(metaop.shares, samples, tp)
        if (samples, tp) in have or before is None:
            continue
        if not is_equal(OpTimes(before.forward_s, before.backward_s), each.times):
            yield ShareTime(samples=samples, tp=tp, source="fitted", **before._asdict())


def _share(share: ShareTime, known: _BySamples, equal_ops: OfEqualOps) -> ShareTime:
    samples = Fraction(share.samples)
    source: Source = "fitted"
    if samples in known:
        _, times, source = known[samples]
    elif (samples, share.tp) in equal_ops:
        times = equal_ops[samples, share.tp].of(share)
    elif known:
        nearest = min(known, key=lambda other: abs(log2(other / samples)))
        times = known[nearest].factor.of(share)
    else:
        return share
    if is_equal(share, times):
        return share
    update = {"forward_s": times.forward_s, "backward_s": times.backward_s, "source": source}
    update["communication_s"] = min(share.communication_s, times.op_s)
    return share.model_copy(update=update)
