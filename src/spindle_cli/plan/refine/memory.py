"""What a schedule needs of its devices' memory, in compiled loops.

As `account/` has it but for what is small: gradients of inputs, the place of messages ahead of their passes,
and what autocast has cast.
"""

from __future__ import annotations

from spindle_cli.costs import links
from spindle_cli.plan.compiled import compiled
from spindle_cli.plan.refine.homes import MULTIPLIER, find_summing, stretch_end, sums_shares, used_range
from spindle_cli.plan.refine.host import count_moved, moved_op
from spindle_cli.plan.refine.passes import find_peers
from spindle_cli.plan.refine.schedule import Schedule, Work
from spindle_cli.plan.refine.tables import NO_MOVING, Ints, Records, Tables

_communicator = compiled(links.bytes_of_collectives)

# Of what devices are over their capacity, how much more the mean counts than the worst.
MEAN_OVER = 20


@compiled
def memory(tables: Tables, schedule: Schedule, work: Work, num_homes: int) -> float:
    """How far devices are over their capacity, as a share of it: the worst one, and the mean of all many
    times over; or a node is over its own. 0: all have room. Leaves in `peak` what each device needs.
    """
    _set_lasting(tables, schedule, work, num_homes)
    states, common = work.states, tables.common[0]
    _see_passes(tables, schedule, work)
    find_peers(tables, schedule, work)
    worst, total = 0.0, 0.0
    for device in range(len(states)):
        state = states[device]
        # What each half of the devices sends has a communicator of its own.
        messages = 2 * (state.peers * common.peer_bytes + state.crosses * common.outside_bytes)
        state.peak = state.peak * common.filled + messages
        over = (state.peak + state.correction) / tables.devices[device].capacity - 1
        if over > 0.0:
            worst = max(worst, over)
            total += over / len(states)
    if common.keepings > NO_MOVING:
        in_host = 0.0
        for device in range(len(states)):
            # Devices of a node have numbers that follow each other.
            is_first = device == 0 or tables.devices[device].node != tables.devices[device - 1].node
            in_host = states[device].most_in_host + (0.0 if is_first else in_host)
            worst = max(worst, in_host / tables.devices[device].in_host - 1)
    return worst + MEAN_OVER * total


@compiled
def _set_lasting(tables: Tables, schedule: Schedule, work: Work, num_homes: int) -> None:
    """Set what devices hold all the time: parameters, gradients, state, communicators and batches' fields."""
    states, common = work.states, tables.common[0]
    everyone = _communicator(len(states), tables.devices[-1].node + 1, common.cards) / common.filled
    for device in range(len(states)):
        states[device].level, states[device].peak = everyone, 0.0
        states[device].in_host = states[device].most_in_host = 0.0
    _hold_homes(tables, work, num_homes)
    for block in range(len(tables.blocks)):
        if work.begins[block] and not tables.blocks[block].is_alike:
            work.held[block, :] = 0.0
            work.held_parts[block, :] = 0
    for number in range(work.group_slots[0]):
        work.groups[work.group_slots[1 + number]] = 0
    work.group_slots[0] = 0
    for index in range(len(schedule.slices)):
        if schedule.slices[index].metaop >= 0:
            _hold_for_ops(tables, schedule, work, index)
            _add_communicators(tables, schedule, work, index)


@compiled
def _hold_homes(tables: Tables, work: Work, num_homes: int) -> None:
    """Have the devices of each home hold what it has all the time, and the communicators of its sums."""
    states, filled = work.states, tables.common[0].filled
    for home in range(num_homes):
        record = work.homes[home]
        taken = 0.0
        if 1 < record.count < len(states):
            taken = _communicator(record.count, record.nodes, min(record.cards, record.fewest))
            if record.by_node:
                taken += _communicator(record.most, 1, 1) + _communicator(record.nodes, record.nodes, 1)
        for place in range(record.count):
            states[work.home_devices[home, place]].level += record.held
            states[work.home_devices[home, place]].level += taken / filled


@compiled
def _hold_for_ops(tables: Tables, schedule: Schedule, work: Work, index: int) -> None:
    """Have the devices of a slice hold the parameters of its ops that not all ops have alike, and the fields
    of a batch.
    """
    slice_, common, fields = schedule.slices[index], tables.common[0], 0.0
    option, op_from = tables.options[slice_.option], tables.metaops[slice_.metaop].op_from
    for op in range(op_from + slice_.first, op_from + slice_.last):
        fields += 2 * tables.ops[op].field_bytes
    at, end = used_range(tables, slice_)
    while at < end and not common.are_alike:
        begin, at = at, stretch_end(tables, work, at, end)
        if not tables.blocks[tables.used[begin].block].is_alike:
            _hold(tables, work, schedule.devices[index], option, begin, at)
    for place in range(option.devices):
        device = schedule.devices[index, place]
        part = tables.of_types[option.type_from + tables.devices[device].type].part
        work.states[device].level += fields * part


@compiled
def _add_communicators(tables: Tables, schedule: Schedule, work: Work, index: int) -> None:
    """Have the devices of a slice hold its communicators inside of passes: of all of its shares where these
    sum anything, and of its tensor-parallel groups.
    """
    slice_, devices, filled = schedule.slices[index], schedule.devices[index], tables.common[0].filled
    option = tables.options[slice_.option]
    if sums_shares(tables, slice_):
        home = work.homes[find_summing(tables, work, index)]
        taken = _communicator(home.count, home.nodes, min(home.cards, home.fewest)) / filled
        _add_communicator(work, devices, 0, option.devices, taken)
    if option.tp > 1:
        taken = _communicator(option.tp, 1, 1) / filled
        for begin in range(0, option.devices, option.tp):
            _add_communicator(work, devices, begin, option.tp, taken)


@compiled
def _add_communicator(work: Work, devices: Ints, begin: int, count: int, num_bytes: float) -> None:
    """Have devices hold a communicator of theirs, if they do not yet."""
    if _is_new_group(work, devices, begin, count):
        for place in range(begin, begin + count):
            work.states[devices[place]].level += num_bytes


@compiled
def _hold(tables: Tables, work: Work, devices: Ints, option: Records, at: int, end: int) -> None:
    """Have devices hold a stretch of `used`, as far as they do not for other slices: parameters, state and,
    where others have the same, gradients. What they hold of each block is noted by the first one.
    """
    used, common = tables.used[at], tables.common[0]
    block = used.block
    use = work.uses[block]
    if use.parts == 1:
        _hold_whole(tables, work, devices, option.devices, at, end)
        return
    fragments = use.parts // option.tp
    for group in range(option.tp):
        fragment = group * fragments
        count = work.homes[work.fragments[use.fragment_from + fragment].home].count
        num_bytes = used.lasting + used.state / (count if common.is_sharded else 1)
        if count > 1:
            num_bytes += used.trained * common.width
        bits = ((1 << fragments) - 1) << fragment
        for place in range(group, option.devices, option.tp):
            device = devices[place]
            before, before_parts = work.held[block, device], work.held_parts[block, device]
            held = num_bytes * fragments / use.parts
            if before_parts:
                most = max(num_bytes, before * use.parts / _count_bits(before_parts))
                held = most * _count_bits(before_parts | bits) / use.parts
            work.held[block, device], work.held_parts[block, device] = held, before_parts | bits
            work.states[device].level += (end - at) * (held - before)


@compiled
def _hold_whole(tables: Tables, work: Work, devices: Ints, num_devices: int, at: int, end: int) -> None:
    """Have devices hold a stretch of `used` that nothing splits."""
    used, common = tables.used[at], tables.common[0]
    count = work.homes[work.fragments[work.uses[used.block].fragment_from].home].count
    num_bytes = used.lasting + used.state / (count if common.is_sharded else 1)
    if count > 1:
        num_bytes += used.trained * common.width
    held = work.held[used.block]
    for place in range(num_devices):
        device = devices[place]
        if held[device] < num_bytes:
            work.states[device].level += (end - at) * (num_bytes - held[device])
            held[device] = num_bytes


@compiled
def _count_bits(bits: int) -> int:
    """How many bits are set, of a few."""
    count = 0
    while bits:
        count += bits & 1
        bits >>= 1
    return count


@compiled
def _is_new_group(work: Work, devices: Ints, begin: int, count: int) -> bool:
    """Whether a tensor-parallel group has not been seen, told by a hash of its devices; it has now."""
    groups, hashed = work.groups, count
    for place in range(begin, begin + count):
        hashed = hashed * MULTIPLIER + devices[place] + 1
    hashed |= 1  # 0: nothing
    slot = (hashed ^ (hashed >> 17)) & (len(groups) - 1)
    while groups[slot]:
        if groups[slot] == hashed:
            return False
        slot = (slot + 1) & (len(groups) - 1)
    groups[slot] = hashed
    work.group_slots[0] += 1
    work.group_slots[work.group_slots[0]] = slot
    return True


@compiled
def _see_passes(tables: Tables, schedule: Schedule, work: Work) -> None:
    """Let passes in their order take what they take while they run, keep, and give back."""
    received, states = work.received, work.states
    received[:] = 0.0
    for index in range(len(schedule.slices)):
        for edge in range(work.edge_from[index], work.edge_from[index + 1]):
            received[work.edges[edge].taker] += _crossing_bytes(work, edge)
    for block in range(len(work.uses)):
        work.uses[block].left = 1
    for number in range(1, 1 + schedule.order[0]):
        index, returned = schedule.order[number] >> 1, 0.0
        is_backward = schedule.order[number] & 1
        if is_backward:
            for edge in range(work.edge_from[index], work.edge_from[index + 1]):
                returned += _crossing_bytes(work, edge)
            _own_gradients(tables, work, schedule.slices[index])
        place, type_from = 0, tables.options[schedule.slices[index].option].type_from
        for of_type in range(type_from, type_from + tables.common[0].types):
            share = tables.of_types[of_type]
            if not share.devices:
                continue
            in_host = _bytes_in_host(tables, schedule.slices[index], share)
            if is_backward:
                most, left = _backward_bytes(tables, work, schedule.slices[index], share)
                most, left = most + returned * share.part, left - received[index] * share.part
                in_host = -in_host
            else:
                most, left = _forward_bytes(tables, schedule.slices[index], share)
                most, left = most + received[index] * share.part, left + received[index] * share.part
            for _ in range(share.devices):
                state = states[schedule.devices[index, place]]
                state.peak = max(state.peak, state.level + most)
                state.level += left
                state.in_host += in_host
                state.most_in_host = max(state.most_in_host, state.in_host)
                place += 1


@compiled
def _crossing_bytes(work: Work, edge: int) -> float:
    """Bytes that an edge carries to other devices."""
    return 0.0 if work.edges[edge].is_alike else float(work.edges[edge].num_bytes)


@compiled
def _forward_bytes(tables: Tables, slice_: Records, share: Records) -> tuple[float, float]:
    """The most that a forward pass takes of a device while it runs, and what it leaves. While what an op has
    made is on its way to host memory, others run.
    """
    kept, most, leaving, count, number = 0.0, 0.0, 0.0, count_moved(tables, slice_), 0
    for op in range(slice_.first, slice_.last):
        row = tables.op_bytes[share.bytes_from + op]
        most = max(most, kept + leaving + row.forward)
        if op != moved_op(slice_, count, number):
            kept += row.kept
            continue
        number += 1
        kept += 0.0 if moved_op(slice_, count, number) == op + 1 else row.left
        leaving = row.moved
    return max(most, kept), kept


@compiled
def _bytes_in_host(tables: Tables, slice_: Records, share: Records) -> float:
    """Bytes of host memory that a device's activations of a slice take."""
    num_bytes, count = 0.0, count_moved(tables, slice_)
    for number in range(count):
        num_bytes += tables.op_bytes[share.bytes_from + moved_op(slice_, count, number)].in_host
    return num_bytes


@compiled
def _backward_bytes(tables: Tables, work: Work, slice_: Records, share: Records) -> tuple[float, float]:
    """The most that a backward pass takes of a device while it runs, and what it leaves: gradients that no
    other device has, less what was kept. What was moved to host memory is there again while its op runs, and
    beside another one on its way back.
    """
    metaop, count = tables.metaops[slice_.metaop], count_moved(tables, slice_)
    gone, made, most, number = 0.0, 0.0, 0.0, count - 1
    back = tables.op_bytes[share.bytes_from + moved_op(slice_, count, number)].moved if count else 0.0
    handed = metaop.output_bytes if slice_.last == metaop.num_ops else metaop.inner_bytes
    for op in range(slice_.last - 1, slice_.first - 1, -1):
        made += work.made[op]
        row = tables.op_bytes[share.bytes_from + op]
        if op != moved_op(slice_, count, number):
            most = max(most, made - gone + back + row.backward)
            gone += row.kept
            continue
        number -= 1
        before = moved_op(slice_, count, number)
        following = tables.op_bytes[share.bytes_from + before].moved if before >= 0 else 0.0
        coming = following if before == op - 1 else 0.0
        most = max(most, made - gone + row.moved + coming + row.plain_backward)
        gone += 0.0 if moved_op(slice_, count, number + 2) == op + 1 else row.left
        back = following
    return most + handed * share.part, made - gone


@compiled
def _own_gradients(tables: Tables, work: Work, slice_: Records) -> None:
    """Set the bytes of gradients that each op of a slice is the first to make, and no other device has."""
    option, metaop = tables.options[slice_.option], tables.metaops[slice_.metaop]
    for op in range(slice_.last - 1, slice_.first - 1, -1):
        number = metaop.op_from + op
        work.made[op] = 0.0
        for at in range(tables.ops[number].block_from, tables.ops[number + 1].block_from):
            used = tables.used[at]
            use = work.uses[used.block]
            if not use.left:
                continue
            use.left = 0
            alone = 0
            for fragment in range(use.fragment_from, use.fragment_from + use.parts):
                alone += work.homes[work.fragments[fragment].home].count == 1
            parts = option.tp if tables.blocks[used.block].is_split else 1
            work.made[op] += tables.common[0].width * used.trained * alone / use.parts / parts
