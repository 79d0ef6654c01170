"""What the processors do beside the slices, as far as a run tells it from the slices themselves.

Planned, a slice takes its curve's seconds times its stretch: 1 + T / X, where T is what its device does
beside its slices and X what it computes by the curves (`account/compute.py`). Measured, only the product is
known; and what the device did outside of all that is timed (`other_s`): so much of T is in no slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from spindle_cli.account.compute import processor_overhead
from spindle_cli.account.traffic import Traffic
from spindle_cli.calibrate.reading import Run
from spindle_cli.calibrate.times.curves import EQUAL
from spindle_cli.plan.types import Slice
from spindle_cli.profile.types import Profile

# Of what a device computes as it was measured, at most so much may be the processor's other work.
MOST_BESIDE = 0.5
# Rounds until stretches agree with the seconds that they leave: each at least halves what is missing.
_ROUNDS = 60
# Costs are told apart where there are so many slices more than unknown numbers, where as they are ops do not
# agree to so much, and where with others they do so much better: four times the standard error (an F-test of
# one number).
_LEAST_FREE = 2
_AGREES = 1e-6
_CLEARLY = 4.0
_GRID, _THIRDS = 20, 60

# A MetaOp's name, into how many shares its batch is cut, tp, the rows of shares that are not equal; and of
# several types of device those that have them.
_Share = tuple[str, int, int, tuple[int, ...] | None, tuple[str, ...]]


@dataclass(frozen=True)
class Beside:
    """A run's slices with what their devices do beside them.

    Attributes:
        slices: of the plan. `took_s`: of each, forward and backward as measured.
        beside_s: of each device, by the profile's processor costs.
        outside_s: of each device, what it did outside of all that is timed.
        type_of: each device's type, where there are several.
    """

    slices: Sequence[Slice]
    took_s: Sequence[float]
    beside_s: Sequence[float]
    outside_s: Sequence[float]
    type_of: Sequence[str] | None = None

    @classmethod
    def of(cls, run: Run, profile: Profile, traffic: Traffic) -> Beside:
        """Work out what devices do beside the slices of a run whose plan moves `traffic`."""
        plan = run.plan
        communication = processor_overhead(
            profile.processor,
            plan.cluster.node_of,
            plan.slices,
            profile.by_name,
            traffic.messages(),
            traffic.collectives,
            profile.accumulate,
        )
        took_s = [slice_time.forward_s + slice_time.backward_s for slice_time in run.measured.slices]
        outside_s = [0.0] * plan.cluster.num_devices
        for device in run.measured.devices:
            outside_s[device.device] = device.other_s or 0.0
        type_of = plan.cluster.type_of if plan.cluster.is_mixed else None
        return cls(plan.slices, took_s, communication.seconds, outside_s, type_of)

    def shares(self) -> list[tuple[float, float]]:
        """For each slice, what the device that does most beside it did so, by the profile's costs, and what
        that one did outside of all that is timed: as shares of what it computed.
        """
        of_device = _by_device(self.slices, self.took_s, len(self.beside_s))
        shares = [
            (beside_s / took_s, outside_s / took_s) if took_s else (0.0, 0.0)
            for beside_s, outside_s, took_s in zip(self.beside_s, self.outside_s, of_device, strict=True)
        ]
        return [max(shares[device] for device in slice_.devices) for slice_ in self.slices]

    def stretches(self, times: float) -> list[float]:
        """For each slice, by how much work beside it stretches it: so that the seconds that are left
        (measured over stretch) have the same stretches by the planner's formula.

        Args:
            times: that the profile's processor costs count; no device does more than `MOST_BESIDE` beside.
        """
        inside_s = [
            max(0.0, times * beside_s - outside_s)
            for beside_s, outside_s in zip(self.beside_s, self.outside_s, strict=True)
        ]
        stretches = [1.0] * len(self.slices)
        for _ in range(_ROUNDS if any(inside_s) else 0):
            own_s = [took_s / stretch for took_s, stretch in zip(self.took_s, stretches, strict=True)]
            of_device = _by_device(self.slices, own_s, len(self.beside_s))
            stretched = [
                1.0 + other_s / compute_s if compute_s else 1.0
                for other_s, compute_s in zip(inside_s, of_device, strict=True)
            ]
            before, stretches = (
                stretches,
                [max(stretched[device] for device in slice_.devices) for slice_ in self.slices],
            )
            if stretches == before:
                break
        return stretches

    def own_s(self, times: float) -> list[tuple[_Share, float]]:
        """For each slice that computes nothing again and waits for no copies of activations, what an op of it
        took without what its devices did beside it; `times`: see `stretches`.
        """
        return [
            (self._ran_as(slice_), took_s / stretch / slice_.num_ops)
            for slice_, took_s, stretch in zip(self.slices, self.took_s, self.stretches(times), strict=True)
            if took_s > 0 and not slice_.recompute and not slice_.offload
        ]

    def _ran_as(self, slice_: Slice) -> _Share:
        types = () if self.type_of is None else tuple(self.type_of[device] for device in slice_.devices)
        return slice_.metaop, slice_.shares_of_batch, slice_.tp, slice_.rows, types


def processor_times(runs: Sequence[Beside]) -> float:
    """Return how many times as large as in the profile the processor's costs are: told apart from the slices
    where the same shares of MetaOps ran beside more and beside less of it, else 1; and never so large that
    they would leave a device less than half of what it was seen to compute.
    """
    most = min(
        ((MOST_BESIDE + outside) / share for run in runs for share, outside in run.shares() if share > 0),
        default=None,
    )
    if most is None:
        return 1.0
    told = _told_apart(runs, most)
    times = min(most, 1.0) if told is None else told
    return 1.0 if abs(times - 1.0) <= EQUAL else times


def _told_apart(runs: Sequence[Beside], most: float) -> float | None:
    """Find with which costs the seconds that are left of an op on equal shares of a batch agree best; None
    where they agree without any change, or hardly better with one.
    """
    shares = [key for run in runs for key, _ in run.own_s(1.0)]
    free = len(shares) - len(set(shares)) - 1
    if free < _LEAST_FREE:
        return None
    best_times = _least(lambda times: _disagreement(runs, times), most)
    now, then = _disagreement(runs, 1.0), _disagreement(runs, best_times)
    if now <= _AGREES**2 or now - then <= _CLEARLY**2 * then / free:
        return None
    return best_times


def _disagreement(runs: Sequence[Beside], times: float) -> float:
    """Return the squared distances of ops' own seconds from the mean of those on the same share, over that
    mean.
    """
    groups: dict[_Share, list[float]] = {}
    for key, own_s in (share_and_seconds for run in runs for share_and_seconds in run.own_s(times)):
        groups.setdefault(key, []).append(own_s)
    means = {key: fmean(seconds) for key, seconds in groups.items()}
    return sum((own_s / means[key] - 1) ** 2 for key, seconds in groups.items() for own_s in seconds)


def _least(of: Callable[[float], float], most: float) -> float:
    """Find where a function is least between 0 and `most`: the best of a grid, and around it by thirds."""
    best = min(range(_GRID + 1), key=lambda number: of(most * number / _GRID))
    low, high = most * max(best - 1, 0) / _GRID, most * min(best + 1, _GRID) / _GRID
    for _ in range(_THIRDS):
        third = (high - low) / 3
        if of(low + third) <= of(high - third):
            high -= third
        else:
            low += third
    return (low + high) / 2


def _by_device(slices: Sequence[Slice], seconds: Sequence[float], num_devices: int) -> list[float]:
    total = [0.0] * num_devices
    for slice_, own_s in zip(slices, seconds, strict=True):
        for device in slice_.devices:
            total[device] += own_s
    return total
