"""How much else the machine did while it was measured, and whether the times can be trusted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import psutil

from spindle_cli.errors import RunFailedError
from spindle_cli.profile.machine.machine import own_cores
from spindle_cli.profile.types import Noise, OpTiming

# Beyond the first a profile is said to be noisy, beyond the second it is refused. Of the cores' time, what
# other processes took; and the median over the measurements of their interquartile range over their median.
NOTED_SHARE, MOST_SHARE = 0.05, 0.25
NOTED_SPREAD, MOST_SPREAD = 0.10, 0.30
# A measurement with more spread than this is made again, and the steadier one kept; but one in so many at
# most, for where all of them are unsteady that would not help.
AGAIN_SPREAD = 0.20
ONE_AGAIN_IN = 4


@dataclass(frozen=True)
class Work:
    """Processor seconds so far: `all_s` of everything on our cores, `own_s` of our processes."""

    at_s: float
    all_s: float
    own_s: float


def work_so_far(at_s: float, processes: Iterable[int]) -> Work:
    """Return what the cores that this process may use have done, and what these processes of it have (by
    their ids), itself included.
    """
    cores = own_cores()
    every = psutil.cpu_times(percpu=True)
    busy_s = sum(sum(times) - _idle_s(times) for core, times in enumerate(every) if core in cores)
    own_s = 0.0
    for number in (psutil.Process().pid, *processes):
        spent = psutil.Process(number).cpu_times()
        own_s += spent.user + spent.system
    return Work(at_s, busy_s, own_s)


def _idle_s(times: object) -> float:
    # `guest` is in `user` already.
    names = ("idle", "iowait", "guest", "guest_nice")
    return sum(getattr(times, name, 0.0) for name in names)


def taken_by_others(before: Work, after: Work, num_cores: int) -> float:
    """Share of the cores' time between two moments that went to other processes, 0 to 1."""
    available_s = (after.at_s - before.at_s) * num_cores
    others_s = (after.all_s - before.all_s) - (after.own_s - before.own_s)
    return min(max(others_s / available_s, 0.0), 1.0) if available_s > 0 else 0.0


def noise_of(others_share: float, timings: Iterable[OpTiming], measured_again: int) -> Noise:
    """Return what is to be said of the noise of some measurements."""
    spreads = [timing.slowest[-1].spread or 0.0 for timing in timings]
    return Noise(
        others_share=round(others_share, 4),
        spread=round(median(spreads), 4) if spreads else 0.0,
        worst_spread=round(max(spreads), 4) if spreads else 0.0,
        measured_again=measured_again,
    )


def steadier(first: OpTiming, second: OpTiming) -> OpTiming:
    """Choose of two measurements of one thing that with less spread."""
    return min(first, second, key=lambda timing: timing.slowest[-1].spread or 0.0)


def is_unsteady(timing: OpTiming) -> bool:
    """Whether it is to be measured again."""
    return (timing.slowest[-1].spread or 0.0) > AGAIN_SPREAD


def complaints(noise: Noise, most_share: float, most_spread: float) -> list[str]:
    """Return what is beyond these bounds, for people."""
    lines = []
    if noise.others_share > most_share:
        lines.append(f"other processes took {noise.others_share:.0%} of the cores' time")
    if noise.spread > most_spread:
        lines.append(
            f"half of the times vary by more than {noise.spread:.0%} (at worst {noise.worst_spread:.0%})"
        )
    return lines


def warning(noise: Noise) -> str | None:
    """Return what to say of a noisy profile; None of a quiet one."""
    lines = complaints(noise, NOTED_SHARE, NOTED_SPREAD)
    return f"measured while the machine was busy: {', and '.join(lines)}" if lines else None


def require_quiet(noise: Noise) -> None:
    """Refuse times that say little.

    Raises:
        RunFailedError: they are beyond the bounds.
    """
    lines = complaints(noise, MOST_SHARE, MOST_SPREAD)
    if lines:
        raise RunFailedError(
            f"the machine was too busy to measure: {', and '.join(lines)}; expected at most {MOST_SHARE:.0%} "
            f"of the time and a spread of {MOST_SPREAD:.0%}",
            hint="End what else runs and profile again. What was measured is kept: the same command with "
            "--accept-noise takes it as it is.",
        )
