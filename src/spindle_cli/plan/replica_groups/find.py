"""The best plan whose devices are replica groups, each of which shares out what it runs, where memory is
short.

Shared out by all devices, parameters take least memory, but every batch is cut into as many shares as there
are devices, and small shares are slow. Replica groups have fewer, larger shares each, run different tasks at
the same time, and hold their parameters as often as there are replica groups that run them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, groupby, product
from math import inf

from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.find import PlanResult
from spindle_cli.plan.best.request import PlanRequest
from spindle_cli.plan.replica_groups.cluster import replica_groups_of
from spindle_cli.plan.replica_groups.planner import ReplicaGroupsPlanner, planner_of
from spindle_cli.plan.replica_groups.profile import shared_out
from spindle_cli.profile.types import Profile

# Into how many replica groups devices are cut, in steps of this part of all devices. Of each number that cut
# is planned whose schedules' lower bound is lowest.
NUMBERS = (2, 3)
CUT_STEPS = 8
# Of cuts whose bounds differ by less than this, those with fewer kinds of replica groups are searched sooner.
BOUNDS_ALIKE = 1.01
# With less nobody waits for several searches more.
LEAST_EFFORT = 1
# They are made before other plans where the best one known takes more than this many times as long as the
# lower bound: nearer to it others are often faster, and leave few replica groups to plan.
REPLICA_GROUPS_FIRST = 1.15


class InReplicaGroups:
    """The best plan whose devices are replica groups, made when it is first asked for: of other kinds what is
    not faster is then left out.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        request: PlanRequest,
        lower_bound_s: float,
        simulated_s: Callable[[PlanResult], float],
    ) -> None:
        """
        Args:
            lower_bound_s: before which no schedule of whole batches ends.
            simulated_s: a plan's iteration by simulation: of when replica groups sum and send the prediction
                knows less.
        """
        self._profile, self._cluster, self._asked = profile, cluster, request
        self._far_s = REPLICA_GROUPS_FIRST * lower_bound_s
        self._simulated_s = simulated_s
        self._known: tuple[PlanResult | None, float] | None = None

    def or_less_s(self, known_s: float) -> float:
        """Seconds of the best plan of replica groups, as predicted and as simulated, or `known_s` if that is
        less, or not far from the lower bound: of a plan that is known where memory is short. From the first
        call on no plan of replica groups is looked for that is slower.

        Raises:
            BelowBoundError: a bug of the planner.
        """
        return min(known_s, self._best(known_s)[1]) if known_s > self._far_s else known_s

    def or_better(self, incumbent: PlanResult | None) -> PlanResult | None:
        """The best plan; `incumbent` where none of replica groups is faster, as predicted and as simulated,
        or memory is not short.

        Args:
            incumbent: the best of other plans; None: nothing fits, or nothing that could be faster.

        Raises:
            BelowBoundError: a bug of the planner.
        """
        if incumbent is None:
            return self._best(inf)[0]
        best, _ = self._best(incumbent.best.prediction.iteration_s) if incumbent.is_short else (None, inf)
        if best is None or best.best.prediction.iteration_s >= incumbent.best.prediction.iteration_s:
            return incumbent
        return best if self._simulated_s(best) < self._simulated_s(incumbent) else incumbent

    def _best(self, than_s: float) -> tuple[PlanResult | None, float]:
        """The best plan of replica groups, if it was faster than what was known when it was first asked for,
        and its seconds.
        """
        if self._known is None:
            self._known = self._made(than_s) if self._is_possible() else (None, inf)
        return self._known

    def _made(self, than_s: float) -> tuple[PlanResult | None, float]:
        best: PlanResult | None = None
        best_s = inf
        for planner in _planners(self._profile, self._cluster, self._asked.effort):
            within_s = min(than_s, best_s)
            planned = planner.planned(within_s) if planner.lower_bound_s < within_s else None
            if planned is None:
                continue
            seconds = max(planned.best.prediction.iteration_s, self._simulated_s(planned))
            if seconds < best_s:
                best, best_s = planned, seconds
        return best, best_s

    def _is_possible(self) -> bool:
        """Whether nothing is asked for that plans of replica groups cannot be."""
        request, profile = self._asked, self._profile
        is_free = request.micro_batches is None and request.sharding is None and not request.equal_shares
        is_searched = request.strategy == "spindle" and request.effort >= LEAST_EFFORT
        # Parts of what devices share out say nothing of replica groups, whose own are equal.
        is_shared = profile.optimizer_state_sharded and not profile.shard_weights
        return request.gives_up and is_free and is_searched and is_shared


def _planners(profile: Profile, cluster: Cluster, effort: int) -> Iterator[ReplicaGroupsPlanner]:
    """The cut that is worth most, for each number of replica groups."""
    shared = profile.sharded(shared_out(profile))
    for number in NUMBERS:
        planners = (
            planner_of(shared, cluster, replica_groups_of(cluster, sizes), effort)
            for sizes in sizes_of(number, cluster)
        )
        possible = [planner for planner in planners if planner is not None]
        if possible:
            least_s = min(planner.lower_bound_s for planner in possible)
            near = [planner for planner in possible if planner.lower_bound_s <= BOUNDS_ALIKE * least_s]
            yield min(near, key=lambda planner: planner.num_kinds)


def sizes_of(number: int, cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """All ways to cut the devices of each type into so many replica groups of two devices or more of one
    type: in steps, type after type, largest first.
    """
    counts = [len(list(devices)) for _, devices in groupby(cluster.type_of)]
    if len(counts) > len(cluster.types):  # replica groups of one kind are not all one behind the other
        return
    for numbers in product(range(1, number + 1), repeat=len(counts)):
        if sum(numbers) == number:
            sizes_of_types = (
                list(_cuts(count, count, max(1, count // CUT_STEPS), type_number))
                for count, type_number in zip(counts, numbers, strict=True)
            )
            yield from (tuple(chain(*sizes)) for sizes in product(*sizes_of_types))


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
