"""What the processors do beside the slices, as far as a run tells it from the slices themselves.

Planned, a slice takes its curve's seconds times its stretch: 1 + T / X, where T is what its device does
beside its slices and X what it computes by the curves (`account/processor.py`). Measured, only the product is
known; and what the device did outside of all that is timed (`other_s`): so much of T is in no slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from spindle_cli.account.processor import beside_slices
from spindle_cli.account.traffic import Traffic
from spindle_cli.calibrate.reading import Run
from spindle_cli.plan.types import Slice
from spindle_cli.profile.types import Profile

# Of what a device computes as it was measured, at most so much may be the processor's other work.
MOST_BESIDE = 0.5
# Rounds until stretches agree with the seconds that they leave: each at least halves what is missing.
_ROUNDS = 60
# Costs are told apart where the shares of other work differ by so much, with so many slices more than unknown
# numbers, and with no larger error of the factor.
_LEAST_SPREAD = 0.05
_LEAST_FREE = 2
_MOST_ERROR = 0.1


@dataclass(frozen=True)
class Beside:
    """A run's slices with what their devices do beside them.

    Attributes:
        slices: of the plan. `took_s`: of each, forward and backward as measured.
        beside_s: of each device, by the profile's processor costs.
        outside_s: of each device, what it did outside of all that is timed.
    """

    slices: Sequence[Slice]
    took_s: Sequence[float]
    beside_s: Sequence[float]
    outside_s: Sequence[float]

    @classmethod
    def of(cls, run: Run, profile: Profile, traffic: Traffic) -> Beside:
        """Of a run whose plan moves `traffic`."""
        plan = run.plan
        beside = beside_slices(
            profile.processor,
            plan.cluster.num_devices,
            plan.slices,
            profile.by_name,
            traffic.messages(),
            traffic.collectives,
            profile.accumulate,
        )
        took_s = [each.forward_s + each.backward_s for each in run.measured.slices]
        outside_s = [0.0] * plan.cluster.num_devices
        for each in run.measured.devices:
            outside_s[each.device] = each.other_s or 0.0
        return cls(plan.slices, took_s, beside.seconds, outside_s)

    def shares(self) -> list[tuple[float, float]]:
        """Of each slice, what the device that does most beside it did so, by the profile's costs, and what
        that one did outside of all that is timed: as shares of what it computed.
        """
        of_device = _by_device(self.slices, self.took_s, len(self.beside_s))
        shares = [
            (beside_s / took_s, outside_s / took_s) if took_s else (0.0, 0.0)
            for beside_s, outside_s, took_s in zip(self.beside_s, self.outside_s, of_device, strict=True)
        ]
        return [max(shares[device] for device in piece.devices) for piece in self.slices]

    def stretches(self, times: float) -> list[float]:
        """Of each slice, so that the seconds that are left (measured over stretch) have the same stretches by
        the planner's formula.

        Args:
            times: that the profile's processor costs count; no device does more than `MOST_BESIDE` beside.
        """
        inside_s = [
            max(0.0, times * beside_s - outside_s)
            for beside_s, outside_s in zip(self.beside_s, self.outside_s, strict=True)
        ]
        found = [1.0] * len(self.slices)
        for _ in range(_ROUNDS):
            own_s = [took_s / stretch for took_s, stretch in zip(self.took_s, found, strict=True)]
            of_device = _by_device(self.slices, own_s, len(self.beside_s))
            stretched = [
                1.0 + other_s / compute_s if compute_s else 1.0
                for other_s, compute_s in zip(inside_s, of_device, strict=True)
            ]
            found = [max(stretched[device] for device in piece.devices) for piece in self.slices]
        return found


def processor_times(runs: Sequence[Beside]) -> float:
    """How many times as large as in the profile the processor's costs are: told apart from the slices where
    the same shares of MetaOps ran beside more and beside less of it, else 1; and never so large that they
    would leave a device less than half of what it was seen to compute.
    """
    most = min(
        ((MOST_BESIDE + outside) / share for run in runs for share, outside in run.shares() if share > 0),
        default=1.0,
    )
    told = _told_apart(runs)
    return min(most, 1.0 if told is None else told)


def _told_apart(runs: Sequence[Beside]) -> float | None:
    """Least squares: of slices with the same share of a MetaOp, seconds of an op x (1 + share outside - times
    x share beside) are the same. None where that leaves `times` open.
    """
    groups: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for run in runs:
        for piece, took_s, (beside, outside) in zip(run.slices, run.took_s, run.shares(), strict=True):
            if took_s > 0 and not piece.recompute:
                all_s = took_s / piece.num_ops * (1 + outside)
                group = groups.setdefault((piece.metaop, piece.dp, piece.tp), [])
                group.append((all_s, beside / (1 + outside)))
    wide = [found for found in groups.values() if _spread(found) >= _LEAST_SPREAD]
    free = sum(len(found) - 1 for found in wide) - 1
    if free < _LEAST_FREE:
        return None
    pairs = [pair for found in wide for pair in _around_mean(found)]
    square = sum(x * x for x, _ in pairs)
    times = sum(x * y for x, y in pairs) / square
    error = (sum((y - times * x) ** 2 for x, y in pairs) / free / square) ** 0.5
    return times if times >= 0 and error <= _MOST_ERROR else None


def _spread(found: Sequence[tuple[float, float]]) -> float:
    shares = [share for _, share in found]
    return max(shares) - min(shares)


def _around_mean(found: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """(other work, all) of each slice of a group, as distances from the group's means, over its seconds."""
    mean_s = fmean(op_s for op_s, _ in found)
    mean_beside_s = fmean(op_s * share for op_s, share in found)
    return [((op_s * share - mean_beside_s) / mean_s, (op_s - mean_s) / mean_s) for op_s, share in found]


def _by_device(slices: Sequence[Slice], seconds: Sequence[float], num_devices: int) -> list[float]:
    total = [0.0] * num_devices
    for piece, own_s in zip(slices, seconds, strict=True):
        for device in piece.devices:
            total[device] += own_s
    return total
