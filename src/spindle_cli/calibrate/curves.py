"""Curves corrected by measured points: these get what was measured, the others follow their neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import log2
from statistics import fmean

from spindle_cli.calibrate.points import Allocation, Measured, OpTimes, Points, known_times
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, Profile, ShareTime, Source

# Closer than this counts as equal: what is left of dividing and multiplying again.
EQUAL = 1e-9


@dataclass(frozen=True)
class Factor:
    """How many times as long as its curve says an op takes."""

    forward: float
    backward: float

    def of(self, point: CurvePoint) -> OpTimes:
        """What a point's op takes then."""
        return OpTimes(point.forward_s * self.forward, point.backward_s * self.backward)


def calibrated_metaops(profile: Profile, measured: Points) -> tuple[MetaOpProfile, ...]:
    """All MetaOps of a profile of one type of device with their curves corrected.

    A point that ran takes what was measured. Another one is scaled: as the point of a MetaOp of the same
    kind that ran on the same share of a batch; else as its own MetaOp's neighbouring points that ran, between
    two of them by the logarithm of the number of devices.
    """
    factors = {
        (name, ways, tp): factor_of(known_times(profile.by_name[name], ways, tp), each)
        for (name, ways, tp), each in measured.items()
    }
    shares = _by_share(profile, factors)
    found = []
    for metaop in profile.metaops:
        kind = _kind(metaop)
        own = {(ways, tp): each for (name, ways, tp), each in factors.items() if name == metaop.name}
        curve = []
        for point in metaop.curve:
            ran = measured.get((metaop.name, point.dp, point.tp))
            if ran is not None:
                curve.append(_measured_point(point, ran))
                continue
            same = (
                None if kind is None else shares.get((kind, Fraction(metaop.batch_size, point.dp), point.tp))
            )
            factor = same or neighbours(own, point)
            curve.append(point if factor is None else _scaled(point, factor))
        ran_here = {(ways, tp): each for (name, ways, tp), each in measured.items() if name == metaop.name}
        found.append(_with_curve(metaop, tuple(curve), ran_here))
    return tuple(found)


def factor_of(point: CurvePoint | ShareTime | OpTimes, measured: Measured) -> Factor:
    """Measured over profiled; of both passes together for one that the profile has at no time at all."""
    times = measured.times
    before_s = point.forward_s + point.backward_s
    both = times.op_s / before_s if before_s else 1.0
    return Factor(
        times.forward_s / point.forward_s if point.forward_s else both,
        times.backward_s / point.backward_s if point.backward_s else both,
    )


def neighbours(own: Mapping[tuple[Fraction | int, int], Factor], point: CurvePoint) -> Factor | None:
    """The factor of the points that ran next to one that did not: of its own degree of tensor parallelism
    where there are any; None where its MetaOp did not run at all.
    """
    same = {ways * tp: [each] for (ways, tp), each in own.items() if tp == point.tp}
    if not same:
        for (ways, tp), each in own.items():
            same.setdefault(ways * tp, []).append(each)
    if not same:
        return None
    known = {n: _mean(each) for n, each in same.items()}
    below = max((n for n in known if n <= point.num_devices), default=None)
    above = min((n for n in known if n >= point.num_devices), default=None)
    if below is None or above is None:
        nearest = above if below is None else below
        assert nearest is not None, "one that ran is below or above"
        return known[nearest]
    if below == above:
        return known[below]
    share = log2(point.num_devices / below) / log2(above / below)
    low, high = known[below], known[above]
    return Factor(
        low.forward + share * (high.forward - low.forward),
        low.backward + share * (high.backward - low.backward),
    )


def _mean(factors: Iterable[Factor]) -> Factor:
    found = list(factors)
    return Factor(fmean(each.forward for each in found), fmean(each.backward for each in found))


_Kind = tuple[str, int, float | None]


def _kind(metaop: MetaOpProfile) -> _Kind | None:
    """What MetaOps have in common whose ops do the same work on the same share of a batch."""
    if metaop.op_kind is None:
        return None
    flops = metaop.flops_per_op
    per_sample = None if flops is None else float(f"{flops / metaop.batch_size:.9g}")
    return metaop.op_kind, metaop.param_bytes_per_op, per_sample


def _by_share(
    profile: Profile, factors: Mapping[Allocation, Factor]
) -> dict[tuple[_Kind, Fraction, int], Factor]:
    """By kind, samples of a share, and tp: the mean of the MetaOps that ran so."""
    found: dict[tuple[_Kind, Fraction, int], list[Factor]] = {}
    for (name, ways, tp), factor in factors.items():
        metaop = profile.by_name[name]
        kind = _kind(metaop)
        if kind is not None:
            found.setdefault((kind, Fraction(metaop.batch_size) / ways, tp), []).append(factor)
    return {key: _mean(each) for key, each in found.items()}


def _measured_point(point: CurvePoint, measured: Measured) -> CurvePoint:
    update = {"source": "measured", "spread": None, "repeats": measured.steps}
    return point.model_copy(update={**_times(point, measured.times), **update})


def _scaled(point: CurvePoint, factor: Factor) -> CurvePoint:
    changed = _times(point, factor.of(point))
    if not changed:
        return point
    return point.model_copy(update={**changed, "source": "fitted", "spread": None, "repeats": None})


def _times(point: CurvePoint, times: OpTimes) -> dict[str, float]:
    """The seconds that differ from a point's; its own collectives take no more than all of it."""
    pairs = {
        "forward_s": (point.forward_s, times.forward_s),
        "backward_s": (point.backward_s, times.backward_s),
    }
    changed = {name: new for name, (old, new) in pairs.items() if abs(new - old) > EQUAL * old}
    if changed and point.communication_s > times.op_s:
        changed["communication_s"] = times.op_s
    return changed


_Ran = Mapping[tuple[Fraction | int, int], Measured]  # of one MetaOp


def _with_curve(metaop: MetaOpProfile, curve: Sequence[CurvePoint], ran: _Ran) -> MetaOpProfile:
    """With another curve, and shares that agree with it and with what ran; the fit was of the old one."""
    same = all(
        (old.forward_s, old.backward_s) == (new.forward_s, new.backward_s)
        for old, new in zip(metaop.curve, curve, strict=True)
    )
    fields = {name: getattr(metaop, name) for name in type(metaop).model_fields}
    return type(metaop)(
        **{
            **fields,
            "curve": tuple(curve),
            "shares": _shares(metaop, curve, ran),
            "fit": metaop.fit if same else None,
        }
    )


def _shares(metaop: MetaOpProfile, curve: Sequence[CurvePoint], ran: _Ran) -> tuple[ShareTime, ...]:
    """Those that the curve has, as it has them; those that ran, as measured; others by the factor of the
    nearest share, of the same `tp`, of either.
    """
    known: dict[int, dict[Fraction, tuple[Factor, OpTimes, Source]]] = {}
    for (ways, tp), each in ran.items():
        factor = factor_of(known_times(metaop, ways, tp), each)
        samples = Fraction(metaop.batch_size) / ways
        known.setdefault(tp, {})[samples] = factor, each.times, "measured"
    for old, new in zip(metaop.curve, curve, strict=True):
        times = OpTimes(new.forward_s, new.backward_s)
        samples, factor = Fraction(metaop.batch_size, old.dp), factor_of(old, Measured(times, 1.0, 1))
        known.setdefault(old.tp, {})[samples] = factor, times, new.source
    return tuple(_share(share, known.get(share.tp, {})) for share in metaop.shares)


def _share(share: ShareTime, known: Mapping[Fraction, tuple[Factor, OpTimes, Source]]) -> ShareTime:
    """One of them; `known`: by samples."""
    if not known:
        return share
    nearest = min(known, key=lambda samples: abs(log2(samples / share.samples)))
    factor, times, source = known[nearest]
    if nearest != share.samples:
        times, source = (
            OpTimes(share.forward_s * factor.forward, share.backward_s * factor.backward),
            "fitted",
        )
    if all(
        abs(new - old) <= EQUAL * old
        for old, new in ((share.forward_s, times.forward_s), (share.backward_s, times.backward_s))
    ):
        return share
    update = {"forward_s": times.forward_s, "backward_s": times.backward_s, "source": source}
    update["communication_s"] = min(share.communication_s, times.op_s)
    return share.model_copy(update=update)
