"""When passes run, and the messages between them, in compiled loops: as `account/pass_times.py` has it."""

from __future__ import annotations

from spindle_cli.account.activations import EARLY_BYTES, PASSES_AHEAD
from spindle_cli.plan.compiled import compiled, compiled_into_callers
from spindle_cli.plan.refine.homes import MULTIPLIER, bandwidth
from spindle_cli.plan.refine.schedule import Schedule, Work
from spindle_cli.plan.refine.sums import set_slots
from spindle_cli.plan.refine.tables import Ints, Records, Tables

# By how much sums of the same seconds may differ by their order.
ROUNDING = 1e-9
# Parts of a batch that overlap by less are next to each other.
TOUCH = 1e-12


@compiled_into_callers
def _send(tables: Tables, work: Work, row: int, ready_s: float) -> float:
    """Send what keeps the ports of a row of `load_ports` busy as soon as all are free; when all of it is
    there.
    """
    num_devices, free_s, ports = len(tables.devices), work.port_free_s, work.load_ports[row]
    start_s, begin, run = ready_s, 0, 0
    for number in range(work.load_counts[row]):
        start_s = max(start_s, free_s[ports[number]])
    arrived_s = start_s
    while begin < work.load_counts[row]:
        end, end_s = work.load_ends[row, run], start_s + work.load_s[row, run]
        arrived_s = max(arrived_s, end_s)
        for number in range(begin, end):
            free_s[ports[number]] = end_s
        if ports[begin] >= 2 * num_devices:
            for number in range(begin, end):
                set_slots(work.card_slots[ports[number] % num_devices], work.slot_s[0], start_s, end_s)
        begin, run = end, run + 1
    return arrived_s


@compiled_into_callers
def _load_of(
    tables: Tables, schedule: Schedule, work: Work, source: int, taker: int, num_bytes: float
) -> int:
    """The row of `load_ports` with what messages between two slices keep ports busy. Most slices stay as they
    are from one schedule to the next, so it is worked out where no row is called by both.
    """
    key = work.names[source] * MULTIPLIER + work.names[taker]
    key = key * MULTIPLIER + int(num_bytes)
    row = (key ^ (key >> 29)) & (len(work.load_keys) - 1)
    if work.load_keys[row] != key:
        _set_load(tables, schedule, work, row, source, taker, num_bytes)
        work.load_keys[row] = key
    return int(row)


@compiled
def _set_load(
    tables: Tables, schedule: Schedule, work: Work, row: int, source: int, taker: int, num_bytes: float
) -> None:
    """Work out what messages between two slices keep ports busy."""
    one, two = tables.options[schedule.slices[source].option], tables.options[schedule.slices[taker].option]
    num_touched, most_bytes = _load_ports(
        tables, work, schedule.devices[source], one, schedule.devices[taker], two, num_bytes
    )
    _group_ports(work, row, num_touched, 2 * len(tables.devices))
    work.load_counts[row], work.load_bytes[row] = num_touched, most_bytes


@compiled
def _group_ports(work: Work, row: int, num_touched: int, first_card: int) -> None:
    """Set a row of `load_ports`, those together that are busy equally long, cards apart from others."""
    placed, run = 0, 0
    for number in range(num_touched):
        port = work.touched[number]
        seconds, is_card = work.taken_s[port], port >= first_card
        if seconds == 0.0:  # it has its place beside an earlier one
            continue
        for at in range(number, num_touched):
            alike = work.touched[at]
            if work.taken_s[alike] == seconds and (alike >= first_card) == is_card:
                work.load_ports[row, placed] = alike
                work.taken_s[alike] = 0.0
                placed += 1
        work.load_ends[row, run], work.load_s[row, run] = placed, seconds
        run += 1


@compiled
def _load_ports(
    tables: Tables, work: Work, senders: Ints, one: Records, takers: Ints, two: Records, num_bytes: float
) -> tuple[int, float]:
    """Add up what messages keep ports busy; how many ports these are (`account/activations.py`), and the most
    bytes that a device receives.
    """
    devices, ends = tables.devices, tables.ends
    parts, holders, shares, tp = one.dp, one.tp, two.dp, two.tp
    num_touched, first = 0, 0
    last_overlap, last_near, last_far, near_s, far_s = -1.0, -1, -1, 0.0, 0.0
    most = 0.0
    for place in range(shares * tp):
        device, share, received = takers[place], place // tp, 0.0
        begin, end = ends[two.end_from + share], ends[two.end_from + share + 1]
        while ends[one.end_from + first + 1] < begin + TOUCH:
            first += 1
        for part in range(first, parts):
            part_begin, part_end = ends[one.end_from + part], ends[one.end_from + part + 1]
            if part_begin > end - TOUCH:
                break
            sender = _sender(senders, part * holders, holders, place, device)
            if sender == device:
                continue
            overlap = min(part_end, end) - max(part_begin, begin)
            received += overlap
            if abs(overlap - last_overlap) > TOUCH:
                last_overlap, last_near, last_far = overlap, -1, -1
            if devices[sender].node == devices[device].node:
                link = tables.among[devices[device].kind].near
                if link != last_near:
                    last_near, near_s = link, _message_s(tables, link, num_bytes * overlap)
                way_out, way_in, seconds = sender, len(devices) + device, near_s
            else:
                link = tables.among[devices[sender].kind + devices[device].kind].far
                if link != last_far:
                    last_far, far_s = link, _message_s(tables, link, num_bytes * overlap)
                way_out = 2 * len(devices) + devices[sender].card
                way_in, seconds = 3 * len(devices) + devices[device].card, far_s
            num_touched = _keep_busy(work, way_out, seconds, num_touched)
            num_touched = _keep_busy(work, way_in, seconds, num_touched)
        most = max(most, received)
    return num_touched, most * num_bytes


@compiled_into_callers
def _keep_busy(work: Work, port: int, seconds: float, num_touched: int) -> int:
    """Have a port be busy for longer; how many ports have been touched now."""
    is_new = work.taken_s[port] == 0.0
    if is_new:
        work.touched[num_touched] = port
    work.taken_s[port] += seconds
    return num_touched + int(is_new)


@compiled
def _sender(senders: Ints, begin: int, holders: int, place: int, device: int) -> int:
    """Which of the devices that hold a part of a batch sends it to a device: itself, if it is one of them."""
    for holder in range(begin, begin + holders):
        if senders[holder] == device:
            return device
    return int(senders[begin + place % holders])


@compiled
def find_peers(tables: Tables, schedule: Schedule, work: Work) -> None:
    """Set which devices of a node exchange messages, and which do so with other nodes."""
    work.peers[:, :] = 0
    for device in range(len(work.states)):
        work.states[device].peers = work.states[device].crosses = 0
    for index in range(len(schedule.slices)):
        for edge in range(work.edge_from[index], work.edge_from[index + 1]):
            if not work.edges[edge].is_alike:
                _find_peers_of(tables, schedule, work, index, work.edges[edge].taker)


@compiled
def _find_peers_of(tables: Tables, schedule: Schedule, work: Work, source: int, taker: int) -> None:
    one, two = tables.options[schedule.slices[source].option], tables.options[schedule.slices[taker].option]
    devices, states, ends, first = tables.devices, work.states, tables.ends, 0
    for place in range(two.dp * two.tp):
        device, share = schedule.devices[taker, place], place // two.tp
        begin, end = ends[two.end_from + share], ends[two.end_from + share + 1]
        while ends[one.end_from + first + 1] < begin + TOUCH:
            first += 1
        for part in range(first, one.dp):
            if ends[one.end_from + part] > end - TOUCH:
                break
            sender = _sender(schedule.devices[source], part * one.tp, one.tp, place, device)
            if sender == device:
                continue
            if devices[sender].node != devices[device].node:
                states[sender].crosses = states[device].crosses = 1
            elif not (work.peers[sender, device >> 6] >> (device & 63)) & 1:
                work.peers[sender, device >> 6] |= 1 << (device & 63)
                work.peers[device, sender >> 6] |= 1 << (sender & 63)
                states[sender].peers += 1
                states[device].peers += 1


@compiled
def _message_s(tables: Tables, link: int, num_bytes: float) -> float:
    """Seconds of one message over a link."""
    return float(tables.latencies_s[link] + num_bytes / bandwidth(tables.knots, link, num_bytes))


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


@compiled_into_callers
def _send_first(tables: Tables, schedule: Schedule, work: Work, size: int) -> None:
    """Send what is ready first of so much."""
    ready_s = work.heap_s[0]
    item = _pop(work, size)
    edge = work.edges[item >> 1]
    source, taker = edge.maker, edge.taker
    if item & 1:
        source, taker = taker, source
    row = _load_of(tables, schedule, work, source, taker, edge.num_bytes)
    there_s = _send(tables, work, row, ready_s)
    if item & 1:
        edge.returned_s = there_s
    else:
        edge.arrived_s = there_s


@compiled
def _free_all(work: Work) -> None:
    """Let devices, ports and cards be free from the start."""
    work.port_free_s[:] = 0.0
    for device in range(len(work.states)):
        work.states[device].free_s = 0.0
    work.card_slots[:, :] = 0


@compiled_into_callers
def _rest_s(work: Work, current: int) -> float:
    """Seconds that what follows a pass takes at least, those passes being known."""
    passes, edges, index, rest_s = work.passes, work.edges, current >> 1, 0.0
    if current & 1:
        for at in range(work.in_from[index], work.in_from[index + 1]):
            behind = passes[2 * edges[work.in_edges[at]].maker + 1]
            rest_s = max(rest_s, behind.seconds + behind.rest_s)
        return float(rest_s)
    rest_s = passes[current + 1].seconds + passes[current + 1].rest_s
    for edge in range(work.edge_from[index], work.edge_from[index + 1]):
        behind = passes[2 * edges[edge].taker]
        rest_s = max(rest_s, behind.seconds + behind.rest_s)
    return float(rest_s)


@compiled
def set_rest(tables: Tables, schedule: Schedule, work: Work) -> None:
    """Set how long what follows a pass takes at least, and all passes of a device; and with the start of
    which pass the devices of each hold buffers for what it takes: the last of those `PASSES_AHEAD` before it
    on one of them.
    """
    passes, next_on = work.passes, work.next_on
    next_on[:, :] = 0
    for device in range(len(work.states)):
        work.states[device].rest_s = 0.0
    for number in range(schedule.order[0], 0, -1):
        current = schedule.order[number]
        index = current >> 1
        passes[current].opener, passes[current].held_back = 0, 0
        passes[current].rest_s = _rest_s(work, current)
        for place in range(tables.options[schedule.slices[index].option].devices):
            device = schedule.devices[index, place]
            work.states[device].rest_s += passes[current].seconds
            opened = schedule.order[next_on[device, PASSES_AHEAD - 1]]
            if next_on[device, PASSES_AHEAD - 1]:
                passes[opened].opener = max(passes[opened].opener, number)
            for ahead in range(PASSES_AHEAD - 1, 0, -1):
                next_on[device, ahead] = next_on[device, ahead - 1]
            next_on[device, 0] = number
    for device in range(len(work.states)):
        # What its next passes take is there from its first pass on.
        for ahead in range(1, PASSES_AHEAD):
            opened = schedule.order[next_on[device, ahead]]
            if next_on[device, ahead]:
                passes[opened].opener = max(passes[opened].opener, next_on[device, 0])


@compiled
def run_passes(tables: Tables, schedule: Schedule, work: Work, within_s: float) -> float:
    """Place all passes in time, in their order; when the last one ends, or as soon as it is behind `within_s`
    for sure, the least that this can be. What has been made is sent as soon as its takers hold buffers for
    it, what is ready first before the others.
    """
    _free_all(work)
    latest_s, least_s, num_waiting = 0.0, 0.0, 0
    for number in range(1, 1 + schedule.order[0]):
        current = schedule.order[number]
        sent_s = _sent_s(work, current)
        while num_waiting and work.heap_s[0] <= sent_s:
            _send_first(tables, schedule, work, num_waiting)
            num_waiting -= 1
        least_s = max(least_s, _place(tables, schedule, work, current))
        latest_s = max(latest_s, work.passes[current].end_s)
        if least_s > within_s:
            return float(least_s)
        num_waiting = _send_held_back(work, current, num_waiting)
        num_waiting = _send_outputs(tables, schedule, work, number, num_waiting)
    return latest_s


@compiled_into_callers
def _edge_range(work: Work, index: int, to_takers: int) -> tuple[int, int]:
    """The range of `_edge_at` that has the edges of a slice to its takers, or those from its makers."""
    if to_takers:
        return work.edge_from[index], work.edge_from[index + 1]
    return work.in_from[index], work.in_from[index + 1]


@compiled_into_callers
def _edge_at(work: Work, at: int, to_takers: int) -> int:
    """The number of an edge at a place of `_edge_range`."""
    return at if to_takers else work.in_edges[at]


@compiled_into_callers
def _sent_s(work: Work, current: int) -> float:
    """When the last message is sent that a pass takes; -1: it takes none."""
    is_backward, sent_s = current & 1, -1.0
    begin, end = _edge_range(work, current >> 1, is_backward)
    for at in range(begin, end):
        edge = _edge_at(work, at, is_backward)
        if not work.edges[edge].is_alike:
            sent_s = max(sent_s, work.sent_s[2 * edge + is_backward])
    return sent_s


@compiled_into_callers
def _place(tables: Tables, schedule: Schedule, work: Work, current: int) -> float:
    """Place a pass in time, as soon as all that it takes is there and its devices are free; when the
    iteration's passes end at the earliest.
    """
    passes, is_backward, index = work.passes, current & 1, current >> 1
    start_s = passes[current - 1].end_s if is_backward else passes[current].gathered_s
    begin, end = _edge_range(work, index, is_backward)
    for at in range(begin, end):
        edge = work.edges[_edge_at(work, at, is_backward)]
        if edge.is_alike:
            start_s = max(start_s, passes[2 * edge.taker + 1 if is_backward else 2 * edge.maker].end_s)
        else:
            start_s = max(start_s, edge.returned_s if is_backward else edge.arrived_s)
    count = tables.options[schedule.slices[index].option].devices
    for place in range(count):
        start_s = max(start_s, work.states[schedule.devices[index, place]].free_s)
    end_s = start_s + passes[current].seconds
    passes[current].start_s, passes[current].end_s = start_s, end_s
    least_s = end_s + passes[current].rest_s
    for place in range(count):
        state = work.states[schedule.devices[index, place]]
        state.free_s = end_s
        state.rest_s -= passes[current].seconds
        least_s = max(least_s, end_s + state.rest_s)
    return float(least_s)


@compiled_into_callers
def _send_held_back(work: Work, current: int, num_waiting: int) -> int:
    """Let what has been held back for the start of a pass wait to be sent; how much waits now."""
    item = work.passes[current].held_back - 1
    while item >= 0:
        work.sent_s[item] = max(work.sent_s[item], work.passes[current].start_s)
        _push(work, num_waiting, work.sent_s[item], item)
        num_waiting += 1
        item = work.held_behind[item] - 1
    return num_waiting


@compiled_into_callers
def _send_outputs(tables: Tables, schedule: Schedule, work: Work, number: int, num_waiting: int) -> int:
    """Let what the pass at a place of the order has made wait to be sent, or for the start of another pass;
    how much waits to be sent now.
    """
    current = schedule.order[number]
    is_backward = current & 1
    begin, end = _edge_range(work, current >> 1, 1 - is_backward)
    for at in range(begin, end):
        edge = _edge_at(work, at, 1 - is_backward)
        if not work.edges[edge].is_alike:
            num_waiting += _send_or_hold_back(
                tables, schedule, work, num_waiting, number, 2 * edge + is_backward
            )
    return num_waiting


@compiled_into_callers
def _send_or_hold_back(
    tables: Tables, schedule: Schedule, work: Work, num_waiting: int, number: int, item: int
) -> int:
    """Have what the pass at a place of the order has made wait to be sent, with so much else, or for the pass
    from whose start on its takers hold buffers for it; how much more waits to be sent.
    """
    edge, passes = work.edges[item >> 1], work.passes
    maker, taker = schedule.order[number], 2 * edge.maker + 1 if item & 1 else 2 * edge.taker
    work.sent_s[item] = passes[maker].end_s
    opener = passes[taker].opener
    row = _load_of(tables, schedule, work, maker >> 1, taker >> 1, edge.num_bytes)
    if opener and work.load_bytes[row] > EARLY_BYTES:
        if opener > number:
            opens = passes[schedule.order[opener]]
            work.held_behind[item], opens.held_back = opens.held_back, item + 1
            return 0
        work.sent_s[item] = max(work.sent_s[item], passes[schedule.order[opener]].start_s)
    _push(work, num_waiting, work.sent_s[item], item)
    return 1
