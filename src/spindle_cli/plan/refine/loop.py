"""The loop of the search, compiled: changes of a schedule, and which of them are taken."""

from __future__ import annotations

from functools import cache
from math import inf
from typing import Any

from spindle_cli.account import groups
from spindle_cli.costs import links
from spindle_cli.plan.compiled import compiled, compiled_and_kept
from spindle_cli.plan.refine import (
    evaluate,
    homes,
    host,
    memory,
    moves,
    passes,
    repair,
    schedule,
    sums,
    tables,
)
from spindle_cli.plan.refine.evaluate import cost_of, least_of
from spindle_cli.plan.refine.moves import any_move, change, draw_what_gains
from spindle_cli.plan.refine.repair import change_and_repair
from spindle_cli.plan.refine.schedule import OFTEN, Schedule, Work
from spindle_cli.plan.refine.tables import Floats, Tables
from spindle_cli.plan.search import draws

COMPILING = "compiling the search for short memory: about a minute, once for each installation and version"
# The move that changes with repair; and after how many changes it is looked at what moves have gained.
REPAIRING = len(OFTEN) - 1
LOOKED_AT = 2000


@compiled
def copy_schedule(tables: Tables, source: Schedule, to: Schedule) -> None:
    """Make one schedule the same as another, as far as it has slices and these have devices."""
    for index in range(len(source.slices)):
        to.slices[index] = source.slices[index]
        if source.slices[index].metaop >= 0:
            for place in range(tables.options[source.slices[index].option].devices):
                to.devices[index, place] = source.devices[index, place]
    for metaop in range(len(source.of_metaop)):
        for place in range(1 + source.of_metaop[metaop, 0]):
            to.of_metaop[metaop, place] = source.of_metaop[metaop, place]
    for number in range(1 + source.order[0]):
        to.order[number] = source.order[number]


@compiled
def is_same(tables: Tables, first: Schedule, second: Schedule) -> bool:
    """Whether two schedules have the same slices at the same places, and run them in the same order."""
    if first.order[0] != second.order[0]:
        return False
    for number in range(1, 1 + first.order[0]):
        place = first.order[number] >> 1
        left, right = first.slices[place], second.slices[place]
        if first.order[number] != second.order[number] or left.option != right.option:
            return False
        if left.metaop != right.metaop or left.first != right.first or left.last != right.last:
            return False
        for at in range(tables.options[left.option].devices):
            if first.devices[place, at] != second.devices[place, at]:
                return False
    return True


@compiled
def note_filled(tables: Tables, work: Work) -> None:
    """Note what part of devices' memory the schedule takes that has just been evaluated."""
    for device in range(len(work.states)):
        state = work.states[device]
        work.filled[device] = (state.peak + state.correction) / tables.devices[device].capacity


@compiled
def is_changed(tables: Tables, schedule: Schedule, work: Work, move: int) -> bool:
    """Make a move, with repair where it is that one; False if it cannot be made."""
    if move == REPAIRING:
        return change_and_repair(tables, schedule, work)
    return change(tables, schedule, work, move)


@cache
def compiled_search() -> Any:
    """The loop, compiled."""

    def search(
        tables: Tables,
        current: Schedule,
        trial: Schedule,
        best: Schedule,
        work: Work,
        history: Floats,
        costs: Floats,
        num_passes: int,
        penalty: float,
        stays: float,
    ) -> int:
        """Change the current schedule until so many passes have been placed; how many changes were tried.

        Args:
            history: costs some changes ago.
            costs: of the current and of the best schedule; the first is found anew.
            penalty: of the cost, what a device that is full over its capacity by all of that adds.
            stays: what part of what sums add to the passes is taken to stay with every change, so that not
                all is worked out of each.
        """
        least = least_of(tables, current, work, inf)
        costs[0], over = cost_of(tables, current, work, least, inf, penalty)
        beyond = costs[0] / over - least
        note_filled(tables, work)
        if over == 1.0 and costs[0] < costs[1]:
            copy_schedule(tables, current, best)
            costs[1] = costs[0]
        placed, tried = 0, 0
        work.is_known[0] = 0
        while placed < num_passes:
            copy_schedule(tables, current, trial)
            tried += 1
            placed += 10  # what a change takes that cannot be made
            if tried % LOOKED_AT == 0:
                draw_what_gains(work)
            move = any_move(work)
            work.spent[move] += 10
            if not is_changed(tables, trial, work, move):
                continue
            placed += trial.order[0]
            work.spent[move] += trial.order[0]
            slot = tried % len(history)
            most = max(costs[0], history[slot])
            least = least_of(tables, trial, work, most - stays * beyond)
            if least == inf or is_same(tables, trial, current):
                history[slot] = costs[0]
                continue
            cost, over = cost_of(tables, trial, work, least, most, penalty)
            if cost <= most:
                copy_schedule(tables, trial, current)
                work.gained[move] += costs[0] - cost
                note_filled(tables, work)
                costs[0], beyond = cost, cost / over - least
                work.is_known[0] = 0
                if over == 1.0 and cost < costs[1]:
                    copy_schedule(tables, trial, best)
                    costs[1] = cost
            history[slot] = costs[0]
        return tried

    called = [
        *(evaluate, homes, host, memory, moves, passes, repair, schedule, sums, tables),
        *(groups, links, draws),
    ]
    return compiled_and_kept(search, called, COMPILING)
