"""Moves of the search that change a slice and let what then starts late pick its devices again, in compiled
loops.

A change of one slice alone mostly delays those behind it on the same devices, so it is not taken, however
much there is to gain once they have moved out of its way.
"""

from __future__ import annotations

from math import inf

from spindle_cli.plan.compiled import compiled
from spindle_cli.plan.refine.evaluate import lay_out
from spindle_cli.plan.refine.moves import (
    count_of,
    cut,
    groups_are_inside,
    put,
    reorder_slice,
    resize,
    shift_cut,
    uncut,
)
from spindle_cli.plan.refine.schedule import Schedule, Work
from spindle_cli.plan.refine.tables import Tables
from spindle_cli.plan.search.draws import draw

# What starts this share of the time so far later than before picks its devices again, and takes others where
# it starts that much earlier on them.
LATE = 1e-3


@compiled
def change_and_repair(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """A slice is changed, and what starts later for it goes to devices that are free earlier."""
    if not work.is_known[0]:
        _find_starts(tables, schedule, work)
    if not _change_one(tables, schedule, work):
        return False
    lay_out(tables, schedule, work)
    _place(tables, schedule, work, True)
    for index in range(len(schedule.slices)):
        if schedule.slices[index].metaop >= 0 and not groups_are_inside(tables, schedule, index):
            return False
    return True


@compiled
def _find_starts(tables: Tables, schedule: Schedule, work: Work) -> None:
    """Set when passes start before anything is changed."""
    lay_out(tables, schedule, work)
    work.alone_s[:] = -1.0  # what is not there before picks its devices
    _place(tables, schedule, work, False)
    for number in range(1, 1 + schedule.order[0]):
        work.alone_s[schedule.order[number]] = work.passes[schedule.order[number]].start_s
    work.is_known[0] = 1


@compiled
def _change_one(tables: Tables, schedule: Schedule, work: Work) -> bool:
    which = draw(work.random, 8)
    if which < 4:
        return resize(tables, schedule, work)
    if which == 4:
        return cut(tables, schedule, work)
    if which == 5:
        return uncut(schedule, work)
    if which == 6:
        return shift_cut(schedule, work)
    return reorder_slice(tables, schedule, work)


@compiled
def _place(tables: Tables, schedule: Schedule, work: Work, repairs: bool) -> None:
    """Place passes in time in their order, as if messages took none.

    Args:
        repairs: whether forward passes that start later than `alone_s` says go to other devices.
    """
    passes, states = work.passes, work.states
    for device in range(len(states)):
        states[device].free_s = 0.0
    for number in range(1, 1 + schedule.order[0]):
        current = schedule.order[number]
        index, ready_s = current >> 1, 0.0
        if current & 1:
            ready_s = passes[current - 1].end_s
            for edge in range(work.edge_from[index], work.edge_from[index + 1]):
                ready_s = max(ready_s, passes[2 * work.edges[edge].taker + 1].end_s)
        else:
            for at in range(work.in_from[index], work.in_from[index + 1]):
                ready_s = max(ready_s, passes[2 * work.edges[work.in_edges[at]].maker].end_s)
        start_s = max(ready_s, _free_s(tables, schedule, work, index))
        if repairs and not current & 1 and start_s > work.alone_s[current] * (1 + LATE):
            start_s = _pick(tables, schedule, work, index, ready_s, start_s)
        passes[current].start_s = start_s
        passes[current].end_s = start_s + passes[current].seconds
        for place in range(tables.options[schedule.slices[index].option].devices):
            states[schedule.devices[index, place]].free_s = passes[current].end_s


@compiled
def _free_s(tables: Tables, schedule: Schedule, work: Work, index: int) -> float:
    """When all devices of a slice are free."""
    free_s = 0.0
    for place in range(tables.options[schedule.slices[index].option].devices):
        free_s = max(free_s, work.states[schedule.devices[index, place]].free_s)
    return free_s


@compiled
def _pick(
    tables: Tables, schedule: Schedule, work: Work, index: int, ready_s: float, start_s: float
) -> float:
    """Move a slice to consecutive devices of each type on which it starts earlier, of those to the ones that
    wait least; when it starts. They begin at a multiple of the largest power of two in their number.
    """
    option, firsts = schedule.slices[index].option, work.firsts[0]
    earlier_s = ready_s
    for of_type in range(len(firsts)):
        count = count_of(tables, option, of_type)
        if count:
            free_s = _pick_of_type(tables, work, option, of_type, ready_s, start_s * (1 - LATE))
            if firsts[of_type] < 0:
                return start_s
            earlier_s = max(earlier_s, free_s)
    if not put(tables, schedule, firsts, index, option):
        return start_s
    return earlier_s


@compiled
def _pick_of_type(
    tables: Tables, work: Work, option: int, of_type: int, ready_s: float, within_s: float
) -> float:
    """Set in `firsts` with which of a type's devices a slice may begin so that all it takes are free soonest;
    when they are. -1: none are within `within_s`.
    """
    count, begin = count_of(tables, option, of_type), tables.type_from[of_type]
    step = max(count & -count, tables.options[option].tp)
    room = tables.type_from[of_type + 1] - begin
    work.firsts[0, of_type] = -1
    least_s, least_wait_s = within_s, inf
    for first in range(0, room - count + 1, step):
        free_s, wait_s = ready_s, 0.0
        for place in range(begin + first, begin + first + count):
            free_s = max(free_s, work.states[tables.by_type[place]].free_s)
        if free_s > least_s:
            continue
        for place in range(begin + first, begin + first + count):
            wait_s += free_s - work.states[tables.by_type[place]].free_s
        if free_s < least_s or wait_s < least_wait_s:
            work.firsts[0, of_type], least_s, least_wait_s = first, free_s, wait_s
    return least_s
