"""The best plan whose devices are teams, each of which shares out what it runs, where memory is short.

Shared out by all devices, parameters take least memory, but every batch is cut into as many shares as there
are devices, and small shares are slow. Teams have fewer, larger shares each, run different tasks at the same
time, and hold their parameters as often as there are teams that run them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, groupby, product
from math import inf

from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.asked import Asked
from spindle_cli.plan.best.find import Found
from spindle_cli.plan.teams.cluster import teams_of
from spindle_cli.plan.teams.planner import TeamsPlanner, planner_of
from spindle_cli.plan.teams.profile import shared_out
from spindle_cli.profile.types import Profile

# Into how many teams devices are cut, in steps of this part of all devices. Of each number that cut is
# planned whose schedules' lower bound is lowest.
NUMBERS = (2, 3)
STEPS = 8
# Of cuts whose bounds differ by less than this, those with fewer kinds of teams are searched sooner.
NEAR = 1.01
# With less nobody waits for several searches more.
LEAST_EFFORT = 1


def in_teams(
    profile: Profile,
    cluster: Cluster,
    asked: Asked,
    found: Found | None,
    simulated_s: Callable[[Found], float],
) -> Found | None:
    """The best plan; `found` where none of teams is faster, as predicted and as simulated, or memory is not
    short.

    Args:
        found: the best of other plans; None: nothing fits.
        simulated_s: a plan's iteration by simulation: of when teams sum and send the prediction knows less.

    Raises:
        BelowBoundError: a bug of the planner.
    """
    if not _may_gain(profile, asked, found):
        return found
    best = found
    for planner in _planners(profile, cluster, asked.effort):
        than_s = inf if best is None else best.best.prediction.iteration_s
        planned = planner.planned(than_s) if planner.lower_bound_s < than_s else None
        if planned is None or planned.best.prediction.iteration_s >= than_s:
            continue
        if best is None or simulated_s(planned) < simulated_s(best):
            best = planned
    return best


def _may_gain(profile: Profile, asked: Asked, found: Found | None) -> bool:
    """Whether memory is short, and nothing is asked for that plans of teams cannot be."""
    is_free = asked.micro_batches is None and asked.sharding is None and not asked.equal_shares
    is_searched = asked.strategy == "spindle" and asked.effort >= LEAST_EFFORT
    # Parts of what devices share out say nothing of teams, whose own are equal.
    is_possible = profile.optimizer_state_sharded and not (profile.task_sets or profile.shard_weights)
    return is_free and is_searched and is_possible and (found is None or found.is_short)


def _planners(profile: Profile, cluster: Cluster, effort: int) -> Iterator[TeamsPlanner]:
    """Of each number of teams the cut that is worth most."""
    shared = profile.sharded(shared_out(profile))
    for number in NUMBERS:
        each = (
            planner_of(shared, cluster, teams_of(cluster, sizes), effort)
            for sizes in sizes_of(number, cluster)
        )
        possible = [planner for planner in each if planner is not None]
        if possible:
            least_s = min(planner.lower_bound_s for planner in possible)
            near = [planner for planner in possible if planner.lower_bound_s <= NEAR * least_s]
            yield min(near, key=lambda planner: planner.num_kinds)


def sizes_of(number: int, cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Of so many teams, of two devices or more of one type: all ways to cut the devices of each type in
    steps, type after type, largest first.
    """
    counts = [len(list(devices)) for _, devices in groupby(cluster.type_of)]
    if len(counts) > len(cluster.types):  # teams of one kind are not all one behind the other
        return
    for numbers in product(range(1, number + 1), repeat=len(counts)):
        if sum(numbers) == number:
            each = (
                list(_cuts(count, count, max(1, count // STEPS), own))
                for count, own in zip(counts, numbers, strict=True)
            )
            yield from (tuple(chain(*sizes)) for sizes in product(*each))


def _cuts(num_devices: int, largest: int, step: int, number: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut so many devices into `number` sizes, none larger than `largest`, all but the last
    multiples of `step`.
    """
    if number == 1:
        yield from [(num_devices,)] if 2 <= num_devices <= largest else []
        return
    for size in range(min(num_devices, largest), 1, -1):
        if size % step == 0:
            yield from ((size, *rest) for rest in _cuts(num_devices - size, size, step, number - 1))
