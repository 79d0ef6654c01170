"""When passes run, and the messages between them, in compiled loops: as `placing/passes.py` has it."""

from __future__ import annotations

from spindle_cli.plan.compiled import compiled
from spindle_cli.plan.refine.homes import BETWEEN, INSIDE, bandwidth
from spindle_cli.plan.refine.schedule import Schedule, Work
from spindle_cli.plan.refine.sums import set_slots
from spindle_cli.plan.refine.tables import Ints, Records, Tables

# By how much sums of the same seconds may differ by their order.
ROUNDING = 1e-9


@compiled
def send(
    tables: Tables, schedule: Schedule, work: Work, source: int, taker: int, num_bytes: float, ready_s: float
) -> float:
    """Send a batch from the devices of a piece to those of another as soon as ways are free; when all of it
    is there.
    """
    one, two = tables.options[schedule.pieces[source].option], tables.options[schedule.pieces[taker].option]
    num_touched = _load_ports(
        tables, work, schedule.devices[source], one, schedule.devices[taker], two, num_bytes
    )
    arrived_s, num_devices = ready_s, len(tables.devices)
    for number in range(num_touched):
        port = work.ports[work.touched[number]]
        start_s = max(ready_s, port.free_s)
        end_s = start_s + port.taken_s
        port.free_s, port.taken_s = end_s, 0.0
        arrived_s = max(arrived_s, end_s)
        card = work.touched[number] % num_devices
        if work.touched[number] >= 2 * num_devices:
            set_slots(work.card_slots[card], work.slot_s[0], start_s, end_s)
    return arrived_s


@compiled
def _load_ports(
    tables: Tables, work: Work, senders: Ints, one: Records, takers: Ints, two: Records, num_bytes: float
) -> int:
    """Add up what messages keep ports busy; how many ports these are (`account/activations.py`)."""
    ports, devices, common = work.ports, tables.devices, tables.common[0]
    parts, holders, shares, tp = one.dp, one.tp, two.dp, two.tp
    num_touched, known, near_s, far_s = 0, -1, 0.0, 0.0
    for place in range(shares * tp):
        device, share = takers[place], place // tp
        for part in range(share * parts // shares, -(-(share + 1) * parts // shares)):
            sender = senders[part * holders + place % holders]
            for holder in range(holders):
                if senders[part * holders + holder] == device:
                    sender = device
            if sender == device:
                continue
            overlap = min((share + 1) * parts, (part + 1) * shares) - max(share * parts, part * shares)
            if overlap != known:
                known = overlap
                size = num_bytes * overlap / (shares * parts)
                near_s = common.near_s + size / bandwidth(tables.knots, INSIDE, size)
                far_s = common.far_s + size / bandwidth(tables.knots, BETWEEN, size)
            if devices[sender].node == devices[device].node:
                way_out, way_in, seconds = sender, len(devices) + device, near_s
                work.peers[sender, device] = work.peers[device, sender] = 1
            else:
                way_out = 2 * len(devices) + devices[sender].card
                way_in, seconds = 3 * len(devices) + devices[device].card, far_s
                work.states[sender].crosses = work.states[device].crosses = 1
            for port in (way_out, way_in):
                if ports[port].taken_s == 0.0:
                    work.touched[num_touched] = port
                    num_touched += 1
                ports[port].taken_s += seconds
    return num_touched


@compiled
def _push(work: Work, size: int, ready_s: float, item: int) -> None:
    """Add what is ready to be sent to the heap of so many."""
    heap_s, heap, place = work.heap_s, work.heap, size
    while place and heap_s[(place - 1) >> 1] > ready_s:
        heap_s[place], heap[place] = heap_s[(place - 1) >> 1], heap[(place - 1) >> 1]
        place = (place - 1) >> 1
    heap_s[place], heap[place] = ready_s, item


@compiled
def _pop(work: Work, size: int) -> int:
    """Take what is ready first from the heap of so many."""
    heap_s, heap, place = work.heap_s, work.heap, 0
    first, last_s, last = heap[0], heap_s[size - 1], heap[size - 1]
    while 2 * place + 1 < size - 1:
        child = 2 * place + 1
        if child + 1 < size - 1 and heap_s[child + 1] < heap_s[child]:
            child += 1
        if heap_s[child] >= last_s:
            break
        heap_s[place], heap[place] = heap_s[child], heap[child]
        place = child
    heap_s[place], heap[place] = last_s, last
    return int(first)


@compiled
def _send_first(tables: Tables, schedule: Schedule, work: Work, size: int) -> None:
    """Send what is ready first of so much."""
    ready_s = work.heap_s[0]
    item = _pop(work, size)
    edge = work.edges[item >> 1]
    if item & 1:
        edge.returned_s = send(tables, schedule, work, edge.taker, edge.maker, edge.num_bytes, ready_s)
    else:
        edge.arrived_s = send(tables, schedule, work, edge.maker, edge.taker, edge.num_bytes, ready_s)


@compiled
def _free_all(work: Work) -> None:
    """Let devices, ports and cards be free from the start."""
    for port in range(len(work.ports)):
        work.ports[port].free_s = work.ports[port].taken_s = 0.0
    for device in range(len(work.states)):
        work.states[device].free_s, work.states[device].crosses = 0.0, 0
    work.peers[:, :] = 0
    work.card_slots[:, :] = 0


@compiled
def set_rest(tables: Tables, schedule: Schedule, work: Work) -> None:
    """Set how long what follows a pass takes at least, and all passes of a device."""
    passes, edges = work.passes, work.edges
    for device in range(len(work.states)):
        work.states[device].rest_s = 0.0
    for number in range(schedule.order[0], 0, -1):
        current = schedule.order[number]
        piece, rest_s = current >> 1, 0.0
        if current & 1:
            for at in range(work.in_from[piece], work.in_from[piece + 1]):
                behind = passes[2 * edges[work.in_edges[at]].maker + 1]
                rest_s = max(rest_s, behind.seconds + behind.rest_s)
        else:
            rest_s = passes[current + 1].seconds + passes[current + 1].rest_s
            for edge in range(work.edge_from[piece], work.edge_from[piece + 1]):
                behind = passes[2 * edges[edge].taker]
                rest_s = max(rest_s, behind.seconds + behind.rest_s)
        passes[current].rest_s = rest_s
        for place in range(tables.options[schedule.pieces[piece].option].devices):
            work.states[schedule.devices[piece, place]].rest_s += passes[current].seconds


@compiled
def run_passes(tables: Tables, schedule: Schedule, work: Work, within_s: float) -> float:
    """Place all passes in time, in their order; when the last one ends, or as soon as it is behind `within_s`
    for sure, the least that this can be. What has been made is sent at once, what is ready first before the
    others.
    """
    passes, states, edges, devices = work.passes, work.states, work.edges, schedule.devices
    _free_all(work)
    latest_s, least_s, num_waiting = 0.0, 0.0, 0
    for number in range(1, 1 + schedule.order[0]):
        current = schedule.order[number]
        is_backward, piece = current & 1, current >> 1
        begin = work.edge_from[piece] if is_backward else work.in_from[piece]
        end = work.edge_from[piece + 1] if is_backward else work.in_from[piece + 1]
        sent_s = -1.0
        for at in range(begin, end):
            edge = edges[at if is_backward else work.in_edges[at]]
            if not edge.is_alike:
                sent_s = max(sent_s, passes[2 * edge.taker + 1 if is_backward else 2 * edge.maker].end_s)
        while num_waiting and work.heap_s[0] <= sent_s:
            _send_first(tables, schedule, work, num_waiting)
            num_waiting -= 1
        start_s = passes[current - 1].end_s if is_backward else passes[current].gathered_s
        for at in range(begin, end):
            edge = edges[at if is_backward else work.in_edges[at]]
            if edge.is_alike:
                start_s = max(start_s, passes[2 * edge.taker + 1 if is_backward else 2 * edge.maker].end_s)
            else:
                start_s = max(start_s, edge.returned_s if is_backward else edge.arrived_s)
        count = tables.options[schedule.pieces[piece].option].devices
        for place in range(count):
            start_s = max(start_s, states[devices[piece, place]].free_s)
        end_s = start_s + passes[current].seconds
        passes[current].start_s, passes[current].end_s = start_s, end_s
        latest_s = max(latest_s, end_s)
        least_s = max(least_s, end_s + passes[current].rest_s)
        for place in range(count):
            state = states[devices[piece, place]]
            state.free_s = end_s
            state.rest_s -= passes[current].seconds
            least_s = max(least_s, end_s + state.rest_s)
        if least_s > within_s * (1 + ROUNDING):
            return float(least_s)
        begin = work.in_from[piece] if is_backward else work.edge_from[piece]
        end = work.in_from[piece + 1] if is_backward else work.edge_from[piece + 1]
        for at in range(begin, end):
            edge_number = work.in_edges[at] if is_backward else at
            if not edges[edge_number].is_alike:
                _push(work, num_waiting, end_s, 2 * edge_number + is_backward)
                num_waiting += 1
    return latest_s
