"""What a schedule costs: how long it takes, and what it lacks of memory, in compiled loops.

What a search has found is evaluated by the prediction and by `account/` themselves (`search.py`).
"""

from __future__ import annotations

from math import inf

from spindle_cli.plan.compiled import compiled
from spindle_cli.plan.refine.homes import MULTIPLIER, batch_sums_s, find_homes, sums_shares
from spindle_cli.plan.refine.host import moving_s
from spindle_cli.plan.refine.memory import memory
from spindle_cli.plan.refine.passes import ROUNDING, run_passes, set_rest
from spindle_cli.plan.refine.schedule import Schedule, Work
from spindle_cli.plan.refine.sums import collect_sums, find_slots, gather, run_sums, sort_by
from spindle_cli.plan.refine.tables import Tables

# What each slice adds to the cost, as a share: with many a search takes longer, and finds less. And what each
# that recomputes or moves activations adds: it is not to where that only costs nothing.
SLICE_COST, RECOMPUTING = 1e-3, 5e-4


@compiled
def lay_out(tables: Tables, schedule: Schedule, work: Work) -> None:
    """Set the devices of slices as masks, the seconds of their passes, and the edges between them."""
    num_edges = 0
    for index in range(len(schedule.slices)):
        work.edge_from[index] = num_edges
        metaop = schedule.slices[index].metaop
        if metaop < 0:
            continue
        option = schedule.slices[index].option
        work.masks[index, :] = 0
        name = option + 1
        for place in range(tables.options[option].devices):
            device = schedule.devices[index, place]
            work.masks[index, device >> 6] |= 1 << (device & 63)
            name = name * MULTIPLIER + device + 1
        work.names[index] = name
        num_ops = schedule.slices[index].last - schedule.slices[index].first
        forward_s, backward_s = tables.options[option].forward_s, tables.options[option].backward_s
        if sums_shares(tables, schedule.slices[index]):
            more_forward_s, more_backward_s = batch_sums_s(tables, schedule, work, index)
            forward_s, backward_s = forward_s + more_forward_s, backward_s + more_backward_s
        work.passes[2 * index].seconds = num_ops * forward_s
        work.passes[2 * index + 1].seconds = num_ops * backward_s
        if tables.options[option].moved > 0.0:
            longer_s, longer_back_s = moving_s(tables, schedule.slices[index])
            work.passes[2 * index].seconds += longer_s
            work.passes[2 * index + 1].seconds += longer_back_s
        num_edges = _set_edges_of(tables, schedule, work, index, num_edges)
    work.edge_from[len(schedule.slices)] = num_edges
    _index_takers(work, num_edges)


@compiled
def _set_edges_of(tables: Tables, schedule: Schedule, work: Work, index: int, num_edges: int) -> int:
    """Set the edges of a slice to its takers, behind so many of other slices; how many there are now."""
    metaop = schedule.slices[index].metaop
    if schedule.slices[index].last < tables.metaops[metaop].num_ops:
        for place in range(schedule.of_metaop[metaop, 0]):
            follower = schedule.of_metaop[metaop, 1 + place]
            if schedule.slices[follower].first == schedule.slices[index].last:
                _set_edge(tables, schedule, work, num_edges, index, follower)
                work.edges[num_edges].num_bytes = tables.metaops[metaop].inner_bytes
                num_edges += 1
        return num_edges
    for number in range(tables.metaops[metaop].taker_from, tables.metaops[metaop + 1].taker_from):
        taker = tables.takers[number].metaop
        for place in range(schedule.of_metaop[taker, 0] if tables.takers[number].of_every else 1):
            _set_edge(tables, schedule, work, num_edges, index, schedule.of_metaop[taker, 1 + place])
            work.edges[num_edges].num_bytes = tables.metaops[metaop].output_bytes
            num_edges += 1
    return num_edges


@compiled
def _index_takers(work: Work, num_edges: int) -> None:
    """Set which edges there are to each slice."""
    begins = work.in_from
    begins[:] = 0
    for edge in range(num_edges):
        begins[work.edges[edge].taker] += 1
    total = 0
    for index in range(len(begins)):
        total += begins[index]
        begins[index] = total
    for edge in range(num_edges):
        begins[work.edges[edge].taker] -= 1
        work.in_edges[begins[work.edges[edge].taker]] = edge


@compiled
def _set_edge(tables: Tables, schedule: Schedule, work: Work, edge: int, maker: int, taker: int) -> None:
    """Set who takes what a slice makes, and whether on the same devices in the same shares."""
    work.edges[edge].maker, work.edges[edge].taker = maker, taker
    one, two = tables.options[schedule.slices[maker].option], tables.options[schedule.slices[taker].option]
    is_alike = one.dp == two.dp and one.tp == two.tp and one.end_from == two.end_from
    place = 0
    while is_alike and place < one.devices:
        is_alike = schedule.devices[maker, place] == schedule.devices[taker, place]
        place += 1
    work.edges[edge].is_alike = is_alike


@compiled
def time_s(tables: Tables, schedule: Schedule, work: Work, num_homes: int, within_s: float) -> float:
    """Seconds of an iteration whose passes have been placed as if nothing had to be gathered; no less than
    `within_s`, but not exact, where it takes longer.
    """
    homes, states = work.homes, work.states
    passes_s = 0.0
    for number in range(1, 1 + schedule.order[0]):
        passes_s = max(passes_s, work.passes[schedule.order[number]].end_s)
    work.class_free_s[:] = 0.0
    find_slots(work, tables.devices, num_homes)
    if tables.common[0].is_sharded:
        gather(tables, schedule, work, num_homes)
        set_rest(tables, schedule, work)
        passes_s = run_passes(tables, schedule, work, within_s)
        if passes_s > within_s:
            return passes_s
        find_slots(work, tables.devices, num_homes)
    num_sums = collect_sums(tables, schedule, work, num_homes, 1)
    run_sums(tables, work, num_sums, 1)
    for device in range(len(states)):
        states[device].updated = 0.0
    for home in range(num_homes):
        for place in range(homes[home].count):
            states[work.home_devices[home, place]].updated += homes[home].trained
    end_s = passes_s
    for device in range(len(states)):
        ready_s = max(states[device].free_s, work.class_free_s[work.class_of[device]])
        end_s = max(end_s, ready_s + tables.common[0].step_s * states[device].updated)
    return float(passes_s + (end_s - passes_s) / tables.common[0].batches)


@compiled
def ungathered_s(tables: Tables, schedule: Schedule, work: Work, within_s: float) -> float:
    """When the last pass ends, if nothing has to be gathered; no less than `within_s`, but not exact, where
    that is later. It takes a small part of the time that all of it takes, and rules out most changes.
    """
    for number in range(len(work.passes)):
        work.passes[number].gathered_s = 0.0
    set_rest(tables, schedule, work)
    return run_passes(tables, schedule, work, within_s)


@compiled
def _slice_factor(tables: Tables, schedule: Schedule) -> float:
    """What slices, and what they recompute or move, add to the cost, as a factor."""
    factor: float = 1 + SLICE_COST * schedule.order[0] / 2
    for number in range(1, 1 + schedule.order[0]):
        keeping = tables.options[schedule.slices[schedule.order[number] >> 1].option].keeping
        factor += RECOMPUTING / 2 if keeping else 0.0
    return factor


@compiled
def least_of(tables: Tables, schedule: Schedule, work: Work, most: float) -> float:
    """The least that a schedule costs, by its passes and messages alone; infinite where that is more than
    `most`. Where it is not, it leaves the passes in the order in which they start.
    """
    slices = _slice_factor(tables, schedule)
    within_s = most / slices * (1 + ROUNDING)
    lay_out(tables, schedule, work)
    least_s = ungathered_s(tables, schedule, work, within_s)
    if least_s > within_s:
        return inf
    for number in range(1, 1 + schedule.order[0]):
        work.keys_s[schedule.order[number]] = work.passes[schedule.order[number]].start_s
    sort_by(schedule.order, 1, 1 + schedule.order[0], work.keys_s)
    return least_s * slices


@compiled
def cost_of(
    tables: Tables, schedule: Schedule, work: Work, least: float, most: float, penalty: float
) -> tuple[float, float]:
    """What a schedule costs: its seconds, more where devices have no room, and for each slice; and the factor
    of what has no room. Infinite where it costs more than `most` for sure.

    Args:
        least: what `least_of` has just found of the schedule.
    """
    num_homes = find_homes(tables, schedule, work)
    over = 1 + penalty * memory(tables, schedule, work, num_homes)
    if least * over > most * (1 + ROUNDING):
        return inf, over
    factor = over * _slice_factor(tables, schedule)
    return factor * time_s(tables, schedule, work, num_homes, most / factor * (1 + ROUNDING)), over
