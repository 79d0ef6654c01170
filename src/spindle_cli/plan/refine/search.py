"""The search itself: from a plan that fits to a shorter one.

Late acceptance (Burke and Bykov, European Journal of Operational Research 258, 2017): a change is taken if
what comes of it is no worse than what there was, or than what there was some changes ago. It goes by an
estimate in compiled loops; after every so many passes that were placed in time, its best is evaluated by the
prediction and the account that every plan is evaluated by, and the estimate of memory is put right by what
these say. Where that leads no further, another one begins from the same plan with other random numbers: what
they find depends on chance by several per cent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from spindle_cli.account.activations import edges_between, order_passes
from spindle_cli.account.device_memory import device_memory
from spindle_cli.account.traffic import communicator_bytes
from spindle_cli.account.types import Pass
from spindle_cli.costs.beyond_curve import Again, spread_over
from spindle_cli.plan.ordering.timed import timed
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.refine.loop import compiled_search
from spindle_cli.plan.refine.schedule import Schedule, Work, free_schedule, work_for
from spindle_cli.plan.refine.tables import Floats, Option, Tables, options_of, shape_of, tables_of
from spindle_cli.plan.schedule import placed_slices
from spindle_cli.plan.search.evaluate import EvaluatedCandidate, measure_as_they_are
from spindle_cli.plan.types import Slice

# Passes that are placed in time, for each MetaOp, until the best schedule is evaluated, on up to so many
# devices: on more, fewer, as each takes longer. And how often a search goes on so at most: as many times, and
# twice as often with each step of effort.
PASSES, OF_DEVICES = 25_000, 64
MARKS = 15
# So many marks in a row that gain less than this share of the iteration end a search. What is left of its
# marks is for another from the same plan with other random numbers, until there have been so many.
PATIENCE = 2
GAIN = 0.002
CHAINS = 6
# By how much longer what there was is taken to have been: when the search begins, so that it leaves the plan
# that it begins from, and where a mark gains less, when it goes on from its best.
MELT, HEAT = 0.05, 0.005
# How many changes ago what there was is compared with. The more there are, the more slowly it gets shorter,
# and the less depends on where it began.
LENGTH = 500
# Of the cost of a schedule, what a device that is full over its capacity by all of that adds.
PENALTY = 2.0
# What part of what sums add to the passes is taken to stay with every change (`loop.py`).
STAYS = 0.9
# Slices that there is room for beside those that the first schedule has, and for each MetaOp.
MORE_SLICES = 2
SEED = 1


def refined(problem: Problem, begins: Iterable[EvaluatedCandidate], effort: int) -> EvaluatedCandidate | None:
    """A plan that is shorter than those that it begins from, which fit, and fits; None where none was found,
    or the problem or the plans have what the search's tables cannot say (`tables_of`).

    It begins from the shortest that the tables can say.

    Args:
        effort: more of it goes on with the same searches.
    """
    in_order = sorted(begins, key=EvaluatedCandidate.rank)
    searches = (Search.of(problem, evaluated) for evaluated in in_order)
    search = next((started for started in searches if started is not None), None)
    if search is None:
        return None
    num_passes = PASSES * len(problem.profile.metaops) * OF_DEVICES // max(OF_DEVICES, problem.num_devices)
    best, left = in_order[0], MARKS << effort
    for number in range(CHAINS):
        chain = search if number == 0 else search.begun_anew(SEED + number)
        left -= _go_on_while_it_gains(chain, num_passes, left)
        best = min(best, chain.best, key=EvaluatedCandidate.rank)
    return best if best.rank() < in_order[0].rank() else None


def _go_on_while_it_gains(search: Search, num_passes: int, marks: int) -> int:
    """Search until `PATIENCE` marks in a row gain nothing, neither for the plan nor for what it is at; after
    how many marks, of so many at most.
    """
    gained_at, best_s, mark = 0, search.best.prediction.iteration_s, 0
    while mark < marks and mark - gained_at < PATIENCE:
        mark += 1
        is_falling = search.go_on(num_passes)
        if is_falling or search.best.prediction.iteration_s < (1 - GAIN) * best_s:
            gained_at, best_s = mark, search.best.prediction.iteration_s
    return mark


@dataclass
class Search:
    """A search under way.

    Attributes:
        problem, translation, tables: what is searched.
        begun: the plan that it begins from.
        best: the best plan so far, as every plan is evaluated.
        current, trial, shortest: the schedule that is changed next; the one that is tried; and the shortest
            that the estimate has room for.
        kept: the schedule of the last plan that was evaluated to fit.
        work: what evaluating takes, with what the estimate of memory is to be put right by.
        costs: of the current and the shortest.
        history: costs some changes ago.
    """

    problem: Problem
    translation: Translation
    tables: Tables
    begun: EvaluatedCandidate
    best: EvaluatedCandidate
    current: Schedule
    trial: Schedule
    shortest: Schedule
    kept: Schedule
    work: Work
    costs: Floats
    history: Floats

    @classmethod
    def of(cls, problem: Problem, evaluated: EvaluatedCandidate) -> Search | None:
        """From a plan that fits; None as `refined` says."""
        options = options_of(problem, evaluated.slices)
        numbers = tables_of(problem, options)
        if numbers is None:
            return None
        return cls._begun(problem, Translation(problem, numbers, options), numbers, evaluated, SEED)

    def begun_anew(self, seed: int) -> Search:
        """One from the same plan, with other random numbers."""
        search = self._begun(self.problem, self.translation, self.tables, self.begun, seed)
        assert search is not None, "tables say what this one has begun from"
        return search

    @classmethod
    def _begun(
        cls,
        problem: Problem,
        translation: Translation,
        numbers: Tables,
        evaluated: EvaluatedCandidate,
        seed: int,
    ) -> Search | None:
        num_places = 2 * len(evaluated.slices) + MORE_SLICES * len(numbers.metaops)
        begun = translation.schedule_of(evaluated.slices, num_places)
        if begun is None:
            return None
        trial, shortest, kept = (_copy(begun) for _ in range(3))
        work = work_for(numbers, num_places, evaluated.prediction.iteration_s)
        work.random[0] = seed
        costs, history = np.full(2, inf), np.full(LENGTH, inf)
        search = cls(
            problem=problem,
            translation=translation,
            tables=numbers,
            begun=evaluated,
            best=evaluated,
            current=begun,
            trial=trial,
            shortest=shortest,
            kept=kept,
            work=work,
            costs=costs,
            history=history,
        )
        search._put_right(begun, [need.total_bytes for need in evaluated.memory])
        search._run(begun, 0)
        history[:] = (1 + MELT) * costs[0]
        return search

    def go_on(self, num_passes: int) -> bool:
        """Search until so many passes have been placed, and judge what was found. Where what it is at becomes
        no shorter any more, it goes on from the shortest.

        Returns:
            Whether it is still on the way down from where it began to melt.
        """
        level_s, before_s = self.history.mean(), self.costs[1]
        self._run(self.current, num_passes)
        is_falling = self.history.mean() < (1 - GAIN) * level_s
        is_above = self.history.mean() > (1 + HEAT) * self.costs[1]
        if not is_falling:
            self.current = _copy(self.shortest)
            self.history[:] = (1 + HEAT) * self.costs[1]
        if self.costs[1] < before_s:
            self._evaluate(before_s)
        return bool(is_falling and is_above)

    def _evaluate(self, before_s: float) -> None:
        """Judge the shortest schedule; `before_s`: what the one before it takes."""
        slices = self.translation.slices_of(self.shortest)
        evaluated = measure_as_they_are(self.problem, self.best.strategy, slices)
        if evaluated is None:
            self._put_right(self.shortest, self._needed(slices))
            # What is recorded next has room by the corrected estimate.
            self.costs[1] = before_s
            self.current = _copy(self.kept)
            return
        self._put_right(self.shortest, [need.total_bytes for need in evaluated.memory])
        self.kept = _copy(self.shortest)
        if evaluated.rank() < self.best.rank():
            self.best = evaluated

    def _run(self, current: Schedule, num_passes: int) -> None:
        arrays = self.trial, self.shortest, self.work, self.history, self.costs
        compiled_search()(self.tables, current, *arrays, num_passes, PENALTY, STAYS)

    def _needed(self, slices: tuple[Slice, ...]) -> list[int]:
        """Bytes that each device needs, more than there are of some."""
        profile, cluster = self.problem.profile, self.problem.cluster
        taken = communicator_bytes(placed_slices(self.problem, slices))
        return [need.total_bytes for need in device_memory(profile.metaops, slices, cluster, profile, taken)]

    def _put_right(self, schedule: Schedule, needed: list[int]) -> None:
        """Correct the estimate by what the account says of a schedule's devices, as far as the schedule that
        is known to fit still does.
        """
        outside = np.array(self.problem.cluster.reserve_bytes)
        more = np.array(needed) - outside - self._peaks(schedule)
        room = self.tables.devices["capacity"] - self._peaks(self.kept)
        self.work.states["correction"] = np.minimum(more, room)

    def _peaks(self, schedule: Schedule) -> Floats:
        """Bytes that devices need at most, by the estimate."""
        costs = self.costs.copy()
        self._run(_copy(schedule), 0)
        self.costs[:] = costs
        return np.array(self.work.states["peak"])


def _copy(schedule: Schedule) -> Schedule:
    return Schedule(*(array.copy() for array in schedule))


class Translation:
    """Turns slices of a plan into the schedule that a search changes, and back."""

    def __init__(self, problem: Problem, tables: Tables, options: Sequence[Sequence[Option]]) -> None:
        """`options`: those that the tables are of."""
        self._problem, self._tables = problem, tables
        self._options = [option for of_metaop in options for option in of_metaop]
        self._metaops = {metaop.name: number for number, metaop in enumerate(problem.profile.metaops)}
        self._numbers = {
            (option.metaop.name, shape_of(option.point), option.again, option.moved > 0): number
            for number, option in enumerate(self._options)
        }

    def schedule_of(self, slices: Sequence[Slice], num_places: int) -> Schedule | None:
        """The schedule of some slices, with so many places for slices; None where an allocation or cut is
        none of those that tables have, or activations of other ops are moved to host memory.
        """
        schedule = free_schedule(self._tables, num_places)
        for number, slice_ in enumerate(slices):
            key = (
                slice_.metaop,
                shape_of(replace(self._problem.point_of(slice_), rows=slice_.rows)),
                Again.of(slice_),
                bool(slice_.offload),
            )
            option = self._numbers.get(key)
            if option is None or slice_.micro_batches > 1 or not self._goes_by_type(slice_):
                return None
            if slice_.offload != spread_over(*slice_.ops, self._options[option].moved):
                return None
            schedule.slices[number] = self._metaops[slice_.metaop], *slice_.ops, option
            schedule.devices[number, : len(slice_.devices)] = slice_.devices
        for metaop, of_metaop in enumerate(schedule.of_metaop):
            members = [number for number in range(len(slices)) if schedule.slices[number]["metaop"] == metaop]
            if len(members) >= len(of_metaop):
                return None
            members.sort(key=lambda number: int(schedule.slices[number]["first"]))
            of_metaop[: 1 + len(members)] = len(members), *members
        order = order_passes(slices, edges_between(slices, self._problem.profile.by_name))
        schedule.order[0] = len(order)
        schedule.order[1 : 1 + len(order)] = [2 * pass_.slice_index + pass_.is_backward for pass_ in order]
        return schedule

    def slices_of(self, schedule: Schedule) -> tuple[Slice, ...]:
        """Slices with the times of both passes, in order of start."""
        places = [place for place, metaop in enumerate(schedule.slices["metaop"]) if metaop >= 0]
        number_of = {place: number for number, place in enumerate(places)}
        order = [
            Pass(number_of[int(current) >> 1], bool(current & 1))
            for current in schedule.order[1 : 1 + schedule.order[0]]
        ]
        return timed(self._problem, [self._slice(schedule, place) for place in places], order)

    def _slice(self, schedule: Schedule, place: int) -> Slice:
        _, first, last, number = map(int, schedule.slices[place].item())
        option = self._options[number]
        devices = schedule.devices[place, : option.point.num_devices]
        return option.on(tuple(map(int, devices)), (first, last))

    def _goes_by_type(self, slice_: Slice) -> bool:
        """Whether a slice's devices are of one type after the other."""
        types = self._tables.devices["type"][list(slice_.devices)]
        return bool(np.all(types[:-1] <= types[1:]))
