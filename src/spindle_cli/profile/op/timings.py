"""Times of one op on one batch share, and when enough repeats have been made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from spindle_cli.profile.types import PhaseTimes


@dataclass(frozen=True)
class Limits:
    """When a measurement may stop.

    Attributes:
        spread: enough once the interquartile range of the repeats over their median is at most this.
        max_s: seconds after which one op's measurement ends whatever the spread, warm-up included.
        min_repeats, max_repeats: at least and at most this many repeats.
        block_s: a repeat runs the op as often as fills this time. Where processes share cores and wall time
            is measured, it has to be several turns of the scheduler, or most repeats would see a core that is
            theirs alone.
    """

    spread: float = 0.05
    max_s: float = 0.5
    min_repeats: int = 5
    max_repeats: int = 50
    block_s: float = 0.002

    @property
    def warm_up_s(self) -> float:
        """Seconds of running before anything is timed; a first run is always made."""
        return self.max_s / 10

    @property
    def copies_s(self) -> float:
        """Seconds that one run over all copies of an op may take, so that enough of them fit `max_s`."""
        return self.max_s / (2 * self.min_repeats)


# Several turns of the scheduler: Linux gives a process about 3 ms at a time.
SHARED_CORES_BLOCK_S = 0.025
# Some periods of a control group's quota, in each of which its processes are stopped once they have used it
# up: 100 ms unless somebody sets another.
GRANTED_TIME_BLOCK_S = 0.3


@dataclass(frozen=True)
class Sample:
    """One repeat: mean seconds per run of the op within it."""

    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        """Forward and backward together."""
        return self.forward_s + self.backward_s


def spread_of(values: Sequence[float]) -> float:
    """Interquartile range over the median; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    first, middle, third = quantiles(values, n=4, method="inclusive")
    return (third - first) / middle if middle > 0 else 0.0


def is_enough(samples: Sequence[Sample], elapsed_s: float, limits: Limits) -> bool:
    """Whether these repeats, made in `elapsed_s`, settle the time."""
    if len(samples) < limits.min_repeats:
        # An op too slow for all repeats still gets three: fewer have no spread.
        return len(samples) >= 3 and elapsed_s > 2 * limits.max_s
    if len(samples) >= limits.max_repeats or elapsed_s >= limits.max_s:
        return True
    return spread_of([sample.total_s for sample in samples]) <= limits.spread


def runs_per_repeat(run_s: float, limits: Limits) -> int:
    """Return how many runs of an op make one repeat."""
    return max(1, min(round(limits.block_s / max(run_s, 1e-9)), 10_000))


def summarise(samples: Sequence[Sample]) -> PhaseTimes:
    """Medians and spread of repeats."""
    return PhaseTimes(
        forward_s=median(sample.forward_s for sample in samples),
        backward_s=median(sample.backward_s for sample in samples),
        spread=spread_of([sample.total_s for sample in samples]),
        repeats=len(samples),
    )


def slowest_of(per_process: Sequence[Sequence[Sample]]) -> tuple[PhaseTimes, ...]:
    """Summarise, for n = 1, 2, ..., the slowest of the first n processes in each repeat.

    A slice ends when the last of its devices ends. Repeats run in lockstep, so that the i-th of each process
    belong together.
    """
    return tuple(
        summarise(
            [
                max(together, key=lambda sample: sample.total_s)
                for together in zip(*per_process[:n], strict=True)
            ]
        )
        for n in range(1, len(per_process) + 1)
    )
