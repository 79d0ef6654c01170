"""Moves of the search that change a piece and let what then starts late pick its devices again, in compiled
loops.

A change of one piece alone mostly delays those behind it on the same devices, so it is not taken, however
much there is to gain once they have moved out of its way.
"""

from __future__ import annotations

from math import inf

from spindle_cli.plan.compiled import compiled
from spindle_cli.plan.refine.evaluate import lay_out
from spindle_cli.plan.refine.moves import (
    cut,
    groups_are_inside,
    put,
    reorder_piece,
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
    """A piece is changed, and what starts later for it goes to devices that are free earlier."""
    keys_s = work.keys_s
    lay_out(tables, schedule, work)
    keys_s[:] = -1.0  # what is not there before picks its devices
    _place(tables, schedule, work, False)
    for number in range(1, 1 + schedule.order[0]):
        keys_s[schedule.order[number]] = work.passes[schedule.order[number]].start_s
    if not _change_one(tables, schedule, work):
        return False
    lay_out(tables, schedule, work)
    _place(tables, schedule, work, True)
    for piece in range(len(schedule.pieces)):
        if schedule.pieces[piece].metaop >= 0 and not groups_are_inside(tables, schedule, piece):
            return False
    return True


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
    return reorder_piece(tables, schedule, work)


@compiled
def _place(tables: Tables, schedule: Schedule, work: Work, repairs: bool) -> None:
    """Place passes in time in their order, as if messages took none.

    Args:
        repairs: whether forward passes that start later than `keys_s` says go to other devices.
    """
    passes, states = work.passes, work.states
    for device in range(len(states)):
        states[device].free_s = 0.0
    for number in range(1, 1 + schedule.order[0]):
        current = schedule.order[number]
        piece, ready_s = current >> 1, 0.0
        if current & 1:
            ready_s = passes[current - 1].end_s
            for edge in range(work.edge_from[piece], work.edge_from[piece + 1]):
                ready_s = max(ready_s, passes[2 * work.edges[edge].taker + 1].end_s)
        else:
            for at in range(work.in_from[piece], work.in_from[piece + 1]):
                ready_s = max(ready_s, passes[2 * work.edges[work.in_edges[at]].maker].end_s)
        start_s = max(ready_s, _free_s(tables, schedule, work, piece))
        if repairs and not current & 1 and start_s > work.keys_s[current] * (1 + LATE):
            start_s = _pick(tables, schedule, work, piece, ready_s, start_s)
        passes[current].start_s = start_s
        passes[current].end_s = start_s + passes[current].seconds
        for place in range(tables.options[schedule.pieces[piece].option].devices):
            states[schedule.devices[piece, place]].free_s = passes[current].end_s


@compiled
def _free_s(tables: Tables, schedule: Schedule, work: Work, piece: int) -> float:
    """When all devices of a piece are free."""
    free_s = 0.0
    for place in range(tables.options[schedule.pieces[piece].option].devices):
        free_s = max(free_s, work.states[schedule.devices[piece, place]].free_s)
    return free_s


@compiled
def _pick(
    tables: Tables, schedule: Schedule, work: Work, piece: int, ready_s: float, start_s: float
) -> float:
    """Move a piece to consecutive devices on which it starts earlier, of those to the ones that wait least;
    when it starts. They begin at a multiple of the largest power of two in their number.
    """
    option = schedule.pieces[piece].option
    count = tables.options[option].devices
    step = max(count & -count, tables.options[option].tp)
    first, least_s, least_wait_s = -1, start_s * (1 - LATE), inf
    for begin in range(0, len(tables.devices) - count + 1, step):
        free_s, wait_s = ready_s, 0.0
        for device in range(begin, begin + count):
            free_s = max(free_s, work.states[device].free_s)
        if free_s > least_s:
            continue
        for device in range(begin, begin + count):
            wait_s += free_s - work.states[device].free_s
        if free_s < least_s or wait_s < least_wait_s:
            first, least_s, least_wait_s = begin, free_s, wait_s
    if first < 0 or not put(tables, schedule, piece, option, first):
        return start_s
    return least_s
