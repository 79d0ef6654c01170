"""Curves and shares corrected by what a run has measured: points and shares that ran get that, the others
follow their neighbours by how many times as long as a profile says ops take; shares follow the curve,
too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import log2
from statistics import fmean
from typing import NamedTuple

from spindle_cli.calibrate.times.points import Allocation, Measured, OpTimes, Points, known_times
from spindle_cli.costs.shares import share_seconds
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, Profile, ShareTime, Source

# Closer than this counts as equal: what is left of dividing and multiplying again.
EQUAL = 1e-9


@dataclass(frozen=True)
class Factor:
    """How many times as long as its curve, or shares, say an op takes."""

    forward: float
    backward: float

    def of(self, before: CurvePoint | ShareTime) -> OpTimes:
        """Return what the op of a point or share takes then."""
        return OpTimes(before.forward_s * self.forward, before.backward_s * self.backward)


def factor_of(before: CurvePoint | ShareTime | OpTimes, measured: Measured) -> Factor:
    """Measured over profiled; of both passes together for one that the profile has at no time at all."""
    times = measured.times
    before_s = before.forward_s + before.backward_s
    both = times.op_s / before_s if before_s else 1.0
    return Factor(
        times.forward_s / before.forward_s if before.forward_s else both,
        times.backward_s / before.backward_s if before.backward_s else both,
    )


def mean(factors: Iterable[Factor]) -> Factor:
    """Return the mean of factors, for each pass."""
    listed = list(factors)
    return Factor(fmean(factor.forward for factor in listed), fmean(factor.backward for factor in listed))


def is_equal(before: CurvePoint | ShareTime | OpTimes, times: OpTimes) -> bool:
    """Whether both passes take as long as known, but for what is left of arithmetic."""
    return all(
        abs(new - old) <= EQUAL * old
        for old, new in ((before.forward_s, times.forward_s), (before.backward_s, times.backward_s))
    )


# What MetaOps have in common whose ops do the same work on the same share of a batch: the kind of op, bytes
# of parameters, and operations for a sample.
Kind = tuple[str, int, float | None]


def kind_of(metaop: MetaOpProfile) -> Kind | None:
    """Return what ops of a MetaOp do, so that equal ones are told; None where nothing says it."""
    if metaop.op_kind is None:
        return None
    flops = metaop.flops_per_op
    per_sample = None if flops is None else float(f"{flops / metaop.batch_size:.9g}")
    return metaop.op_kind, metaop.param_bytes_per_op, per_sample


# By samples of a share and tp: how many times as long equal ops of any MetaOp took that ran on it.
OfEqualOps = dict[tuple[Fraction, int], Factor]


def calibrated_metaops(profile: Profile, measured: Points) -> tuple[MetaOpProfile, ...]:
    """Return all MetaOps of a profile of one type of device with their curves corrected.

    A point that ran takes what was measured. Another one is scaled: as the point of a MetaOp of the same
    kind that ran on the same share of a batch; else as its own MetaOp's neighbouring points that ran, between
    two of them by the logarithm of the number of devices.
    """
    factors = {
        (name, ways, tp): factor_of(known_times(profile.by_name[name], ways, tp), times)
        for (name, ways, tp), times in measured.items()
    }
    by_kind = _by_kind(profile, factors)
    metaops = []
    for metaop in profile.metaops:
        kind = kind_of(metaop)
        equal_ops = {} if kind is None else by_kind.get(kind, {})
        own_factors = {
            (ways, tp): factor for (name, ways, tp), factor in factors.items() if name == metaop.name
        }
        curve = []
        for point in metaop.curve:
            ran = measured.get((metaop.name, point.dp, point.tp))
            if ran is not None:
                curve.append(_measured_point(point, ran))
                continue
            same = equal_ops.get((Fraction(metaop.batch_size, point.dp), point.tp))
            factor = same or neighbours(own_factors, point)
            curve.append(point if factor is None else _scaled(point, factor))
        ran_here = {(ways, tp): times for (name, ways, tp), times in measured.items() if name == metaop.name}
        metaops.append(_with_curve(metaop, tuple(curve), ran_here, equal_ops))
    return tuple(metaops)


def neighbours(factors: Mapping[tuple[Fraction | int, int], Factor], point: CurvePoint) -> Factor | None:
    """Return the factor of the points that ran next to one that did not: of its own degree of tensor
    parallelism where there are any; None where its MetaOp did not run at all.
    """
    same = {ways * tp: [factor] for (ways, tp), factor in factors.items() if tp == point.tp}
    if not same:
        for (ways, tp), factor in factors.items():
            same.setdefault(ways * tp, []).append(factor)
    if not same:
        return None
    by_devices = {n: mean(of_devices) for n, of_devices in same.items()}
    below = max((n for n in by_devices if n <= point.num_devices), default=None)
    above = min((n for n in by_devices if n >= point.num_devices), default=None)
    if below is None or above is None:
        nearest = above if below is None else below
        assert nearest is not None, "one that ran is below or above"
        return by_devices[nearest]
    if below == above:
        return by_devices[below]
    share = log2(point.num_devices / below) / log2(above / below)
    low, high = by_devices[below], by_devices[above]
    return Factor(
        low.forward + share * (high.forward - low.forward),
        low.backward + share * (high.backward - low.backward),
    )


def _by_kind(profile: Profile, factors: Mapping[Allocation, Factor]) -> dict[Kind, OfEqualOps]:
    """Return the mean of the MetaOps that ran so, by kind, then by samples of a share and tp."""
    factors_by_kind: dict[Kind, dict[tuple[Fraction, int], list[Factor]]] = {}
    for (name, ways, tp), factor in factors.items():
        metaop = profile.by_name[name]
        kind = kind_of(metaop)
        if kind is not None:
            share = Fraction(metaop.batch_size) / ways, tp
            factors_by_kind.setdefault(kind, {}).setdefault(share, []).append(factor)
    return {
        kind: {share: mean(of_share) for share, of_share in by_share.items()}
        for kind, by_share in factors_by_kind.items()
    }


def _measured_point(point: CurvePoint, measured: Measured) -> CurvePoint:
    update = {"source": "measured", "spread": None, "repeats": measured.steps}
    return point.model_copy(update={**_times(point, measured.times), **update})


def _scaled(point: CurvePoint, factor: Factor) -> CurvePoint:
    changed = _times(point, factor.of(point))
    if not changed:
        return point
    return point.model_copy(update={**changed, "source": "fitted", "spread": None, "repeats": None})


def _times(point: CurvePoint, times: OpTimes) -> dict[str, float]:
    """Return the seconds that differ from a point's; its own collectives take no more than all of it."""
    pairs = {
        "forward_s": (point.forward_s, times.forward_s),
        "backward_s": (point.backward_s, times.backward_s),
    }
    changed = {name: new for name, (old, new) in pairs.items() if abs(new - old) > EQUAL * old}
    if changed and point.communication_s > times.op_s:
        changed["communication_s"] = times.op_s
    return changed


def _with_curve(
    metaop: MetaOpProfile, curve: Sequence[CurvePoint], ran: Ran, equal_ops: OfEqualOps
) -> MetaOpProfile:
    """Give a MetaOp another curve, and shares that agree with it and with what ran; the fit was of the old
    one.
    """
    same = all(
        (old.forward_s, old.backward_s) == (new.forward_s, new.backward_s)
        for old, new in zip(metaop.curve, curve, strict=True)
    )
    fields = {name: getattr(metaop, name) for name in type(metaop).model_fields}
    return type(metaop)(
        **{
            **fields,
            "curve": tuple(curve),
            "shares": calibrated_shares(metaop, curve, ran, equal_ops),
            "fit": metaop.fit if same else None,
        }
    )


# Of one MetaOp: into how many such shares its batch would be cut, and tp.
Ran = Mapping[tuple[Fraction | int, int], Measured]


class _ShareFactor(NamedTuple):
    """What is known of a share: how many times as long as before it takes, and how long."""

    factor: Factor
    times: OpTimes
    source: Source


_BySamples = dict[Fraction, _ShareFactor]  # of one degree of tensor parallelism


def calibrated_shares(
    metaop: MetaOpProfile, curve: Sequence[CurvePoint], ran: Ran, equal_ops: OfEqualOps
) -> tuple[ShareTime, ...]:
    """Return a MetaOp's shares, of one type of device. Those that the curve has are as it has them; those
    that ran, as measured, and are among them from now on where they lie between two; others go with equal ops
    on the same share, else with the nearest share, of the same `tp`, of the curve or that ran.

    Args:
        curve: its points now, in the old ones' order.
        equal_ops: what MetaOps of its kind took.
    """
    by_tp = _factors_by_tp(metaop, curve, ran)
    shares = sorted((*metaop.shares, *_between(metaop, ran)), key=lambda share: (share.samples, share.tp))
    return tuple(_share(share, by_tp.get(share.tp, {}), equal_ops) for share in shares)


def _factors_by_tp(metaop: MetaOpProfile, curve: Sequence[CurvePoint], ran: Ran) -> dict[int, _BySamples]:
    by_tp: dict[int, _BySamples] = {}
    for (ways, tp), measured in ran.items():
        factor = factor_of(known_times(metaop, ways, tp), measured)
        by_tp.setdefault(tp, {})[Fraction(metaop.batch_size) / ways] = _ShareFactor(
            factor, measured.times, "measured"
        )
    for old, new in zip(metaop.curve, curve, strict=True):
        times = OpTimes(new.forward_s, new.backward_s)
        of_point = _ShareFactor(factor_of(old, Measured(times, 1.0, 1)), times, new.source)
        by_tp.setdefault(old.tp, {})[Fraction(metaop.batch_size, old.dp)] = of_point
    return by_tp


def _between(metaop: MetaOpProfile, ran: Ran) -> Iterator[ShareTime]:
    """Shares that ran between two that the profile has, as these say; but for those that took as long."""
    have = {(share.samples, share.tp) for share in metaop.shares}
    for (ways, tp), measured in ran.items():
        samples = int(Fraction(metaop.batch_size) / ways)
        before = share_seconds(metaop.shares, samples, tp)
        if (samples, tp) in have or before is None:
            continue
        if not is_equal(OpTimes(before.forward_s, before.backward_s), measured.times):
            yield ShareTime(samples=samples, tp=tp, source="fitted", **before._asdict())


def _share(share: ShareTime, by_samples: _BySamples, equal_ops: OfEqualOps) -> ShareTime:
    samples = Fraction(share.samples)
    source: Source = "fitted"
    if samples in by_samples:
        _, times, source = by_samples[samples]
    elif (samples, share.tp) in equal_ops:
        times = equal_ops[samples, share.tp].of(share)
    elif by_samples:
        nearest = min(by_samples, key=lambda candidate: abs(log2(candidate / samples)))
        times = by_samples[nearest].factor.of(share)
    else:
        return share
    if is_equal(share, times):
        return share
    update = {"forward_s": times.forward_s, "backward_s": times.backward_s, "source": source}
    update["communication_s"] = min(share.communication_s, times.op_s)
    return share.model_copy(update=update)
