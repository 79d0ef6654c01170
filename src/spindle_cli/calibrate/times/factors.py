"""How many times as long as a profile says ops take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean

from spindle_cli.calibrate.times.points import Measured, OpTimes
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, ShareTime

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
