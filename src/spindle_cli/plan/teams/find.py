"""The best plan whose devices are teams, each of which shares out what it runs, where memory is short.

Shared out by all devices, parameters take least memory, but every batch is cut into as many shares as there
are devices, and small shares are slow. Teams have fewer, larger shares each, run different tasks at the same
time, and hold their parameters as often as there are teams that run them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.asked import Asked
from spindle_cli.plan.best.find import Found
from spindle_cli.plan.strategies.spindle import NO_SEARCH
from spindle_cli.plan.teams.cluster import teams_of
from spindle_cli.plan.teams.planner import TeamsPlanner, planner_of
from spindle_cli.plan.teams.profile import shared_out
from spindle_cli.profile.types import Profile

# Into how many teams devices are cut, in steps of this part of all devices. Of each number that cut is
# planned whose schedules' lower bound is lowest.
NUMBERS = (2, 3)
STEPS = 8


def in_teams(profile: Profile, cluster: Cluster, asked: Asked, found: Found | None) -> Found | None:
    """The best plan; `found` where none of teams is faster, or memory is not short.

    Args:
        found: the best of other plans; None: nothing fits.

    Raises:
        BelowBoundError: a bug of the planner.
    """
    if not _may_gain(profile, asked, found):
        return found
    best = found
    for planner in _planners(profile, cluster, asked.effort):
        than_s = inf if best is None else best.best.prediction.iteration_s
        planned = planner.planned(than_s) if planner.lower_bound_s < than_s else None
        if planned is not None and planned.best.prediction.iteration_s < than_s:
            best = planned
    return best


def _may_gain(profile: Profile, asked: Asked, found: Found | None) -> bool:
    """Whether memory is short, and nothing is asked for that plans of teams cannot be."""
    is_free = asked.micro_batches is None and asked.sharding is None and not asked.equal_shares
    is_searched = asked.strategy == "spindle" and asked.effort > NO_SEARCH
    is_possible = profile.optimizer_state_sharded and not profile.task_sets
    return is_free and is_searched and is_possible and (found is None or found.is_short)


def _planners(profile: Profile, cluster: Cluster, effort: int) -> Iterator[TeamsPlanner]:
    """Of each number of teams the cut that is worth most."""
    shared = profile.sharded(shared_out(profile))
    for number in NUMBERS:
        each = (
            planner_of(shared, cluster, teams_of(cluster, sizes), effort)
            for sizes in sizes_of(number, cluster.num_devices)
        )
        possible = [planner for planner in each if planner is not None]
        if possible:
            yield min(possible, key=lambda planner: planner.lower_bound_s)


def sizes_of(number: int, num_devices: int) -> Iterator[tuple[int, ...]]:
    """Of so many teams of two devices or more, largest first: all ways to cut devices in steps."""
    step = max(1, num_devices // STEPS)
    if num_devices % step == 0:
        yield from _cuts(num_devices, num_devices, step, number)


def _cuts(num_devices: int, largest: int, step: int, number: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut so many devices into `number` sizes, none larger than `largest`."""
    if number == 1:
        yield from [(num_devices,)] if 2 <= num_devices <= largest else []
        return
    for size in range(min(num_devices, largest), 1, -1):
        if size % step == 0:
            yield from ((size, *rest) for rest in _cuts(num_devices - size, size, step, number - 1))
