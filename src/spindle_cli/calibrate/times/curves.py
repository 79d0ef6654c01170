"""Curves corrected by measured points: these get what was measured, the others follow their neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import log2

from spindle_cli.calibrate.times.factors import (
    EQUAL,
    Factor,
    Kind,
    OfEqualOps,
    factor_of,
    kind_of,
    mean,
)
from spindle_cli.calibrate.times.points import Allocation, Measured, OpTimes, Points, known_times
from spindle_cli.calibrate.times.shares import Ran, calibrated_shares
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, Profile


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
    by_kind = _by_kind(profile, factors)
    found = []
    for metaop in profile.metaops:
        kind = kind_of(metaop)
        equal_ops = {} if kind is None else by_kind.get(kind, {})
        own = {(ways, tp): each for (name, ways, tp), each in factors.items() if name == metaop.name}
        curve = []
        for point in metaop.curve:
            ran = measured.get((metaop.name, point.dp, point.tp))
            if ran is not None:
                curve.append(_measured_point(point, ran))
                continue
            same = equal_ops.get((Fraction(metaop.batch_size, point.dp), point.tp))
            factor = same or neighbours(own, point)
            curve.append(point if factor is None else _scaled(point, factor))
        ran_here = {(ways, tp): each for (name, ways, tp), each in measured.items() if name == metaop.name}
        found.append(_with_curve(metaop, tuple(curve), ran_here, equal_ops))
    return tuple(found)


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
    known = {n: mean(each) for n, each in same.items()}
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


def _by_kind(profile: Profile, factors: Mapping[Allocation, Factor]) -> dict[Kind, OfEqualOps]:
    """By kind, then samples of a share and tp: the mean of the MetaOps that ran so."""
    found: dict[Kind, dict[tuple[Fraction, int], list[Factor]]] = {}
    for (name, ways, tp), factor in factors.items():
        metaop = profile.by_name[name]
        kind = kind_of(metaop)
        if kind is not None:
            share = Fraction(metaop.batch_size) / ways, tp
            found.setdefault(kind, {}).setdefault(share, []).append(factor)
    return {kind: {share: mean(each) for share, each in own.items()} for kind, own in found.items()}


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


def _with_curve(
    metaop: MetaOpProfile, curve: Sequence[CurvePoint], ran: Ran, equal_ops: OfEqualOps
) -> MetaOpProfile:
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
            "shares": calibrated_shares(metaop, curve, ran, equal_ops),
            "fit": metaop.fit if same else None,
        }
    )
