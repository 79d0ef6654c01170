"""What the search changes about a schedule at a time, in compiled loops.

Each function changes something at random and says whether it could; it leaves a schedule that can be run, or
says False.
"""

from __future__ import annotations

from spindle_cli.plan.compiled import compiled
from spindle_cli.plan.refine.schedule import OFTEN, Schedule, Work
from spindle_cli.plan.refine.tables import Ints, Tables
from spindle_cli.plan.search.draws import draw

# Where so much of its memory is taken a device is short of it: slices elsewhere keep all activations.
SHORT = 0.9
# Of all draws, the part that does not go by what moves gained; into how many parts that is measured; and what
# part of what they gained counts on.
EVENLY, SCALE, FORGOTTEN = 0.5, 16, 0.5
# By how many allocations a slice becomes wider or narrower at most.
FURTHEST = 3


@compiled
def any_slice(schedule: Schedule, work: Work) -> int:
    """One of the slices."""
    metaop = draw(work.random, len(schedule.of_metaop))
    return int(schedule.of_metaop[metaop, 1 + draw(work.random, schedule.of_metaop[metaop, 0])])


@compiled
def count_of(tables: Tables, option: int, of_type: int) -> int:
    """How many devices of a type an allocation has."""
    return int(tables.of_types[tables.options[option].type_from + of_type].devices)


@compiled
def set_firsts(tables: Tables, schedule: Schedule, work: Work, index: int, firsts: Ints) -> None:
    """Set which of each type's devices a slice begins with; any, of a type of which it has none."""
    place = 0
    for of_type in range(len(firsts)):
        count = count_of(tables, schedule.slices[index].option, of_type)
        if count:
            firsts[of_type] = tables.devices[schedule.devices[index, place]].place
        else:
            firsts[of_type] = draw(work.random, tables.type_from[of_type + 1] - tables.type_from[of_type])
        place += count


@compiled
def put(tables: Tables, schedule: Schedule, firsts: Ints, index: int, option: int) -> bool:
    """Give a slice an allocation on consecutive devices of each type, from `firsts` on; False where a
    tensor-parallel group would not be inside of a node.
    """
    schedule.slices[index].option = option
    tp, place = tables.options[option].tp, 0
    for of_type in range(len(firsts)):
        begin, count = tables.type_from[of_type], count_of(tables, option, of_type)
        first = min(max(firsts[of_type], 0), tables.type_from[of_type + 1] - begin - count)
        first += begin - first % tp
        for number in range(count):
            schedule.devices[index, place] = tables.by_type[first + number]
            place += 1
    return groups_are_inside(tables, schedule, index)


@compiled
def groups_are_inside(tables: Tables, schedule: Schedule, index: int) -> bool:
    """Whether each tensor-parallel group of a slice is inside of a node."""
    tp = tables.options[schedule.slices[index].option].tp
    for place in range(tables.options[schedule.slices[index].option].devices):
        group = schedule.devices[index, place - place % tp]
        if tables.devices[group].node != tables.devices[schedule.devices[index, place]].node:
            return False
    return True


@compiled
def copy_devices(
    tables: Tables, schedule: Schedule, source: int, whole: int, index: int, at_end: int
) -> bool:
    """Give a slice devices of another one, which has the allocation `whole` and as many of each type, or
    more: the first ones of each, or the last.
    """
    begin, place, option = 0, 0, schedule.slices[index].option
    for of_type in range(len(tables.type_from) - 1):
        count, most = count_of(tables, option, of_type), count_of(tables, whole, of_type)
        skipped = begin + (most - count) * at_end
        for number in range(count):
            schedule.devices[index, place] = schedule.devices[source, skipped + number]
            place += 1
        begin += most
    return groups_are_inside(tables, schedule, index)


@compiled
def fits_in(tables: Tables, option: int, whole: int) -> bool:
    """Whether an allocation has as many devices of each type as another one, or fewer."""
    for of_type in range(len(tables.type_from) - 1):
        if count_of(tables, option, of_type) > count_of(tables, whole, of_type):
            return False
    return True


@compiled
def same_devices(schedule: Schedule, source: int, index: int) -> None:
    """Give a slice all devices of another one."""
    for place in range(schedule.devices.shape[1]):
        schedule.devices[index, place] = schedule.devices[source, place]


@compiled
def same_again(
    tables: Tables, schedule: Schedule, work: Work, index: int, fewest: int, most: int, whole: int
) -> int:
    """An option of a slice's MetaOp of so many devices that keeps as much; -1: there is none.

    Args:
        whole: an option of which it is to have no more devices of any type; -1: of none.
    """
    metaop, keeping = schedule.slices[index].metaop, tables.options[schedule.slices[index].option].keeping
    begin, end = tables.metaops[metaop].option_from, tables.metaops[metaop + 1].option_from
    num_right, match = 0, -1
    for is_chosen in range(2):
        wanted = draw(work.random, num_right) if is_chosen else 0
        for option in range(begin, end):
            if tables.options[option].keeping != keeping:
                continue
            if not fewest <= tables.options[option].devices <= most:
                continue
            if whole >= 0 and not fits_in(tables, option, whole):
                continue
            if is_chosen and not wanted:
                match = option
            wanted -= is_chosen
            num_right += 1 - is_chosen
        if not num_right:
            break
    return match


@compiled
def resize(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """A slice becomes wider or narrower, at either end of its devices."""
    index = any_slice(schedule, work)
    option = schedule.slices[index].option
    neighbour = _neighbour(tables, schedule, work, index)
    if neighbour < 0:
        return False
    at_end, firsts = draw(work.random, 2), work.firsts[0]
    if fits_in(tables, neighbour, option):
        schedule.slices[index].option = neighbour
        return copy_devices(tables, schedule, index, option, index, at_end)
    set_firsts(tables, schedule, work, index, firsts)
    for of_type in range(len(firsts)):
        more = count_of(tables, neighbour, of_type) - count_of(tables, option, of_type)
        firsts[of_type] -= more * at_end
    return put(tables, schedule, firsts, index, neighbour)


@compiled
def _neighbour(tables: Tables, schedule: Schedule, work: Work, index: int) -> int:
    """An option of a slice's MetaOp that keeps as much, with a few more or fewer devices of one type; on
    one type of device, one of the next in their order. -1: there is none.
    """
    option, metaop = schedule.slices[index].option, schedule.slices[index].metaop
    begin, end = tables.metaops[metaop].option_from, tables.metaops[metaop + 1].option_from
    steps, step = 1 + draw(work.random, FURTHEST), 1 if draw(work.random, 2) else -1
    of_type, neighbour = any_type(work), option
    while steps:
        neighbour += step
        if (
            not begin <= neighbour < end
            or tables.options[neighbour].keeping != tables.options[option].keeping
        ):
            return -1
        steps -= _differs_in(tables, neighbour, option, of_type)
    return int(neighbour)


@compiled
def _differs_in(tables: Tables, first: int, second: int, of_type: int) -> bool:
    """Whether two allocations have as many devices of all types but one."""
    for number in range(len(tables.type_from) - 1):
        if number != of_type and count_of(tables, first, number) != count_of(tables, second, number):
            return False
    return True


@compiled
def shift(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """A slice goes to devices a power of two further."""
    index = any_slice(schedule, work)
    step = (1 << draw(work.random, 5)) * (1 if draw(work.random, 2) else -1)
    firsts = work.firsts[0]
    set_firsts(tables, schedule, work, index, firsts)
    firsts[any_type(work)] += step
    return put(tables, schedule, firsts, index, schedule.slices[index].option)


@compiled
def any_type(work: Work) -> int:
    """One of the types of device."""
    num_types = work.firsts.shape[1]
    return draw(work.random, num_types) if num_types > 1 else 0


@compiled
def put_beside(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """A slice goes to an end of another one's devices, from inside or outside."""
    index, peer = any_slice(schedule, work), any_slice(schedule, work)
    option, peer_option = schedule.slices[index].option, schedule.slices[peer].option
    firsts = work.firsts[0]
    set_firsts(tables, schedule, work, peer, firsts)
    where, place = draw(work.random, 4), 0
    for of_type in range(len(firsts)):
        place += count_of(tables, peer_option, of_type)
        if where in (1, 3) and count_of(tables, peer_option, of_type):
            firsts[of_type] = tables.devices[schedule.devices[peer, place - 1]].place + 1
        if where > 1:
            firsts[of_type] -= count_of(tables, option, of_type)
    return put(tables, schedule, firsts, index, option)


@compiled
def join_devices(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """A slice gets devices of another one, of the same parameters more often than not."""
    index, peer = any_slice(schedule, work), any_slice(schedule, work)
    for _ in range(8):
        if _shares_parameters(tables, schedule, index, peer):
            break
        peer = any_slice(schedule, work)
    whole = schedule.slices[peer].option
    option = _option_inside(tables, schedule, work, index, whole)
    if option < 0:
        return False
    schedule.slices[index].option = option
    return copy_devices(tables, schedule, peer, whole, index, draw(work.random, 2))


@compiled
def _option_inside(tables: Tables, schedule: Schedule, work: Work, index: int, whole: int) -> int:
    """An option of a slice's MetaOp of as many devices as `whole` has, or at least half, and of each type no
    more; -1: there is none.
    """
    most = tables.options[whole].devices
    option = same_again(tables, schedule, work, index, most, most, whole)
    if option < 0:
        option = same_again(tables, schedule, work, index, (most + 1) // 2, most, whole)
    return int(option)


@compiled
def _shares_parameters(tables: Tables, schedule: Schedule, index: int, peer: int) -> bool:
    """Whether two different slices use the same parameters, or their MetaOps hang together."""
    one, two = schedule.slices[index].metaop, schedule.slices[peer].metaop
    is_near = tables.metaops[one].part == tables.metaops[two].part
    return index != peer and (is_near or _uses_same(tables, schedule, index, peer))


@compiled
def _uses_same(tables: Tables, schedule: Schedule, index: int, peer: int) -> bool:
    """Whether the first ops of the MetaOps of two slices use the same parameters."""
    one_op = tables.metaops[schedule.slices[index].metaop].op_from
    two_op = tables.metaops[schedule.slices[peer].metaop].op_from
    first, second = tables.ops[one_op].block_from, tables.ops[two_op].block_from
    has_both = first < tables.ops[one_op + 1].block_from and second < tables.ops[two_op + 1].block_from
    return bool(has_both and tables.used[first].block == tables.used[second].block)


@compiled
def swap_devices(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """Two slices change places; where these are of other types of device, each takes one of its allocations
    there.
    """
    index, peer = any_slice(schedule, work), any_slice(schedule, work)
    if index == peer or schedule.devices[index, 0] == schedule.devices[peer, 0]:
        return False
    own_firsts, peer_firsts = work.firsts[0], work.firsts[1]
    set_firsts(tables, schedule, work, index, own_firsts)
    set_firsts(tables, schedule, work, peer, peer_firsts)
    one, two = schedule.slices[index].option, schedule.slices[peer].option
    if not _has_same_types(tables, one, two):
        one = _option_inside(tables, schedule, work, index, schedule.slices[peer].option)
        two = _option_inside(tables, schedule, work, peer, schedule.slices[index].option)
        if min(one, two) < 0:
            return False
    is_right = put(tables, schedule, peer_firsts, index, one)
    return put(tables, schedule, own_firsts, peer, two) and is_right


@compiled
def _has_same_types(tables: Tables, first: int, second: int) -> bool:
    """Whether two allocations have devices of the same types."""
    for of_type in range(len(tables.type_from) - 1):
        if (count_of(tables, first, of_type) > 0) != (count_of(tables, second, of_type) > 0):
            return False
    return True


@compiled
def find_places(schedule: Schedule, work: Work) -> None:
    """Set where in the order each pass is."""
    for number in range(schedule.order[0]):
        work.place[schedule.order[1 + number]] = number


@compiled
def earliest_place(tables: Tables, schedule: Schedule, work: Work, current: int) -> int:
    """The first place in the order behind all that a pass takes."""
    index = current >> 1
    metaop = schedule.slices[index].metaop
    first = schedule.of_metaop[metaop, 1]
    earliest = 0
    for place in range(schedule.of_metaop[metaop, 0]):
        sibling = schedule.of_metaop[metaop, 1 + place]
        if not current & 1 and schedule.slices[sibling].last == schedule.slices[index].first:
            earliest = max(earliest, work.place[2 * sibling] + 1)
        if current & 1 and schedule.slices[sibling].first == schedule.slices[index].last:
            earliest = max(earliest, work.place[2 * sibling + 1] + 1)
    if not current & 1:
        for number in range(tables.metaops[metaop].input_from, tables.metaops[metaop + 1].input_from):
            if index == first or tables.inputs[number].of_every:
                maker = tables.inputs[number].metaop
                last = schedule.of_metaop[maker, schedule.of_metaop[maker, 0]]
                earliest = max(earliest, work.place[2 * last] + 1)
        return earliest
    earliest = max(earliest, work.place[2 * index] + 1)
    if schedule.slices[index].last == tables.metaops[metaop].num_ops:
        for number in range(tables.metaops[metaop].taker_from, tables.metaops[metaop + 1].taker_from):
            taker = tables.takers[number].metaop
            for place in range(schedule.of_metaop[taker, 0] if tables.takers[number].of_every else 1):
                earliest = max(earliest, work.place[2 * schedule.of_metaop[taker, 1 + place] + 1] + 1)
    return int(earliest)


@compiled
def latest_place(tables: Tables, schedule: Schedule, work: Work, current: int) -> int:
    """The last place in the order before all that take what a pass makes."""
    index = current >> 1
    metaop = schedule.slices[index].metaop
    first = schedule.of_metaop[metaop, 1]
    latest = schedule.order[0] - 1
    for place in range(schedule.of_metaop[metaop, 0]):
        sibling = schedule.of_metaop[metaop, 1 + place]
        if not current & 1 and schedule.slices[sibling].first == schedule.slices[index].last:
            latest = min(latest, work.place[2 * sibling] - 1)
        if current & 1 and schedule.slices[sibling].last == schedule.slices[index].first:
            latest = min(latest, work.place[2 * sibling + 1] - 1)
    if current & 1:
        for number in range(tables.metaops[metaop].input_from, tables.metaops[metaop + 1].input_from):
            if index == first or tables.inputs[number].of_every:
                maker = tables.inputs[number].metaop
                last = schedule.of_metaop[maker, schedule.of_metaop[maker, 0]]
                latest = min(latest, work.place[2 * last + 1] - 1)
        return int(latest)
    latest = min(latest, work.place[2 * index + 1] - 1)
    if schedule.slices[index].last == tables.metaops[metaop].num_ops:
        for number in range(tables.metaops[metaop].taker_from, tables.metaops[metaop + 1].taker_from):
            taker = tables.takers[number].metaop
            for place in range(schedule.of_metaop[taker, 0] if tables.takers[number].of_every else 1):
                latest = min(latest, work.place[2 * schedule.of_metaop[taker, 1 + place]] - 1)
    return int(latest)


@compiled
def move_to(schedule: Schedule, current: int, was: int, now: int) -> None:
    """Put a pass from one place in the order to another."""
    for number in range(was, now):
        schedule.order[1 + number] = schedule.order[2 + number]
    for number in range(was, now, -1):
        schedule.order[1 + number] = schedule.order[number]
    schedule.order[1 + now] = current


@compiled
def reorder(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """A pass runs earlier or later."""
    current = schedule.order[1 + draw(work.random, schedule.order[0])]
    return _reordered(tables, schedule, work, current)


@compiled
def _reordered(tables: Tables, schedule: Schedule, work: Work, current: int) -> bool:
    find_places(schedule, work)
    low = earliest_place(tables, schedule, work, current)
    high = latest_place(tables, schedule, work, current)
    was = work.place[current]
    if high <= low:
        return False
    now = low + draw(work.random, high - low + 1)
    move_to(schedule, current, was, now)
    return bool(now != was)


@compiled
def reorder_slice(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """Both passes of a slice run at other times."""
    index = any_slice(schedule, work)
    is_moved = _reordered(tables, schedule, work, 2 * index)
    return _reordered(tables, schedule, work, 2 * index + 1) or is_moved


@compiled
def free_place(schedule: Schedule) -> int:
    """A place for one more slice; -1: there is none."""
    for index in range(len(schedule.slices)):
        if schedule.slices[index].metaop < 0:
            return index
    return -1


@compiled
def cut(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """A slice becomes two, the second on an allocation of its own, where the first is or beside."""
    index = any_slice(schedule, work)
    second = cut_at_random(schedule, work, index)
    if second < 0:
        return False
    count = tables.options[schedule.slices[index].option].devices
    option = same_again(tables, schedule, work, second, count // 2, 2 * count, -1)
    if option < 0:
        return True
    firsts, step = work.firsts[0], draw(work.random, 3) - 1
    set_firsts(tables, schedule, work, index, firsts)
    for of_type in range(len(firsts)):
        firsts[of_type] += step * count_of(tables, option, of_type)
    return put(tables, schedule, firsts, second, option)


@compiled
def cut_at_random(schedule: Schedule, work: Work, index: int) -> int:
    """Cut a slice in two on the same devices, whose passes follow each other; the second one. -1: it cannot
    be.
    """
    first, last, metaop = (
        schedule.slices[index].first,
        schedule.slices[index].last,
        schedule.slices[index].metaop,
    )
    second = free_place(schedule)
    if last - first < 2 or second < 0 or schedule.of_metaop[metaop, 0] == schedule.of_metaop.shape[1] - 1:
        return -1
    middle = first + 1 + draw(work.random, last - first - 1)
    schedule.slices[second].metaop, schedule.slices[second].option = metaop, schedule.slices[index].option
    schedule.slices[second].first, schedule.slices[second].last = middle, last
    same_devices(schedule, index, second)
    schedule.slices[index].last = middle
    place = schedule.of_metaop[metaop, 0]
    while schedule.of_metaop[metaop, place] != index:
        schedule.of_metaop[metaop, 1 + place] = schedule.of_metaop[metaop, place]
        place -= 1
    schedule.of_metaop[metaop, 1 + place] = second
    schedule.of_metaop[metaop, 0] += 1
    _order_cut(schedule, index, second)
    return second


@compiled
def _order_cut(schedule: Schedule, index: int, second: int) -> None:
    """Have a new slice's forward pass run right behind that of the slice before it, its backward pass right
    before.
    """
    now = schedule.order[0] + 1
    for number in range(schedule.order[0] - 1, -1, -1):
        current = schedule.order[1 + number]
        if current == 2 * index:
            schedule.order[1 + now] = 2 * second
            now -= 1
        schedule.order[1 + now] = current
        now -= 1
        if current == 2 * index + 1:
            schedule.order[1 + now] = 2 * second + 1
            now -= 1
    schedule.order[0] += 2


@compiled
def uncut(schedule: Schedule, work: Work) -> bool:
    """A slice and the next one become one, on the devices of either."""
    metaop = draw(work.random, len(schedule.of_metaop))
    if schedule.of_metaop[metaop, 0] < 2:
        return False
    place = draw(work.random, schedule.of_metaop[metaop, 0] - 1)
    index, following = schedule.of_metaop[metaop, 1 + place], schedule.of_metaop[metaop, 2 + place]
    if draw(work.random, 2):
        schedule.slices[index].option = schedule.slices[following].option
        same_devices(schedule, following, index)
    join_next(schedule, metaop, place)
    return True


@compiled
def join_next(schedule: Schedule, metaop: int, place: int) -> None:
    """Join a MetaOp's slice with the next one. It runs forward when that did, backward when it did itself."""
    index, following = schedule.of_metaop[metaop, 1 + place], schedule.of_metaop[metaop, 2 + place]
    schedule.slices[index].last = schedule.slices[following].last
    schedule.slices[following].metaop = -1
    schedule.of_metaop[metaop, 0] -= 1
    for behind in range(place + 1, schedule.of_metaop[metaop, 0]):
        schedule.of_metaop[metaop, 1 + behind] = schedule.of_metaop[metaop, 2 + behind]
    now = 0
    for number in range(schedule.order[0]):
        current = schedule.order[1 + number]
        if current in (2 * index, 2 * following + 1):
            continue
        schedule.order[1 + now] = 2 * index if current == 2 * following else current
        now += 1
    schedule.order[0] = now


@compiled
def shift_cut(schedule: Schedule, work: Work) -> bool:
    """Ops go from a slice to the next one, or the other way."""
    metaop = draw(work.random, len(schedule.of_metaop))
    if schedule.of_metaop[metaop, 0] < 2:
        return False
    place = draw(work.random, schedule.of_metaop[metaop, 0] - 1)
    index, following = schedule.of_metaop[metaop, 1 + place], schedule.of_metaop[metaop, 2 + place]
    room = schedule.slices[following].last - schedule.slices[index].first - 1
    middle = schedule.slices[index].first + 1 + draw(work.random, room)
    is_moved = middle != schedule.slices[index].last
    schedule.slices[index].last = schedule.slices[following].first = middle
    return bool(is_moved)


@compiled
def keep_otherwise(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """A slice recomputes or moves more, or less."""
    return _kept_otherwise(tables, schedule, work, any_slice(schedule, work))


@compiled
def _kept_otherwise(tables: Tables, schedule: Schedule, work: Work, index: int) -> bool:
    option, metaop = schedule.slices[index].option, schedule.slices[index].metaop
    keeping = draw(work.random, tables.common[0].keepings)
    if keeping == tables.options[option].keeping:
        return False
    # What keeps less already may do so in another way: its devices have room because it does.
    if not tables.options[option].keeping and not _is_short(tables, schedule, work, index):
        return False
    before = tables.options[option]
    for number in range(tables.metaops[metaop].option_from, tables.metaops[metaop + 1].option_from):
        after = tables.options[number]
        if after.keeping == keeping and after.allocation == before.allocation:
            schedule.slices[index].option = number
            return True
    return False


@compiled
def _is_short(tables: Tables, schedule: Schedule, work: Work, index: int) -> bool:
    """Whether a slice has a device that is short of memory."""
    for place in range(tables.options[schedule.slices[index].option].devices):
        if work.filled[schedule.devices[index, place]] > SHORT:
            return True
    return False


@compiled
def keep_part_otherwise(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """Some ops of a slice recompute or move more, or less."""
    index = any_slice(schedule, work)
    second = cut_at_random(schedule, work, index)
    if second < 0:
        return False
    return _kept_otherwise(tables, schedule, work, second if draw(work.random, 2) else index)


@compiled
def gather_metaop(schedule: Schedule, work: Work) -> bool:
    """All ops of a MetaOp run on the devices of one of its slices, and keep as much as this."""
    metaop = draw(work.random, len(schedule.of_metaop))
    if schedule.of_metaop[metaop, 0] < 2:
        return False
    source = schedule.of_metaop[metaop, 1 + draw(work.random, schedule.of_metaop[metaop, 0])]
    for place in range(schedule.of_metaop[metaop, 0]):
        index = schedule.of_metaop[metaop, 1 + place]
        schedule.slices[index].option = schedule.slices[source].option
        same_devices(schedule, source, index)
    while schedule.of_metaop[metaop, 0] > 1:
        join_next(schedule, metaop, 0)
    return True


@compiled
def move_part(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """All passes of MetaOps that hang together run one after the other, at another time; those of others keep
    their order, as none of them takes what these make.
    """
    part = tables.metaops[draw(work.random, len(schedule.of_metaop))].part
    length = schedule.order[0]
    inside, outside = 0, 0
    for number in range(length):
        current = schedule.order[1 + number]
        if tables.metaops[schedule.slices[current >> 1].metaop].part == part:
            work.place[inside] = current
            inside += 1
        else:
            schedule.order[1 + outside] = current
            outside += 1
    if not outside:
        return False
    begin = draw(work.random, outside + 1)
    for number in range(outside - 1, begin - 1, -1):
        schedule.order[1 + number + inside] = schedule.order[1 + number]
    for number in range(inside):
        schedule.order[1 + begin + number] = work.place[number]
    return True


@compiled
def put_anywhere(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """A slice goes to any devices, of any number, that begin at a multiple of it or where another's do."""
    index, peer = any_slice(schedule, work), any_slice(schedule, work)
    option = same_again(tables, schedule, work, index, 1, len(tables.devices), -1)
    if option < 0:
        return False
    firsts = work.firsts[0]
    set_firsts(tables, schedule, work, peer, firsts)
    if draw(work.random, 2):
        for of_type in range(len(firsts)):
            count = count_of(tables, option, of_type)
            room = tables.type_from[of_type + 1] - tables.type_from[of_type]
            firsts[of_type] = count * draw(work.random, room // count) if count else 0
    return put(tables, schedule, firsts, index, option)


@compiled
def gather_component(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """All slices that use a slice's parameters go to its devices, or to as many of them as they can use."""
    source = any_slice(schedule, work)
    whole = schedule.slices[source].option
    most = tables.options[whole].devices
    is_moved = False
    for index in range(len(schedule.slices)):
        if schedule.slices[index].metaop < 0 or not _uses_same(tables, schedule, source, index):
            continue
        fewest = most
        option = -1
        while option < 0 and fewest:
            option = same_again(tables, schedule, work, index, fewest, most, whole)
            fewest //= 2
        if option < 0:
            return False
        schedule.slices[index].option = option
        if not copy_devices(tables, schedule, source, whole, index, 0):
            return False
        is_moved = True
    return is_moved


@compiled
def any_move(work: Work) -> int:
    """One of the moves, each as often as `often` says."""
    total = 0
    for move in range(len(work.often)):
        total += work.often[move]
    left, move = draw(work.random, total), 0
    while left >= work.often[move]:
        left -= work.often[move]
        move += 1
    return move


@compiled
def draw_what_gains(work: Work) -> None:
    """Draw moves from now on half as often as at first, and for the rest by what they have gained for each
    pass placed.
    """
    total, most = 0.0, 0
    for move in range(len(OFTEN)):
        most += OFTEN[move]
        total += max(0.0, work.gained[move]) / max(1.0, work.spent[move])
    for move in range(len(OFTEN)):
        share = 0.0
        if total > 0.0:
            share = max(0.0, work.gained[move]) / max(1.0, work.spent[move]) / total
        work.often[move] = int(EVENLY * OFTEN[move] * SCALE + (1 - EVENLY) * share * most * SCALE)
        work.gained[move] *= FORGOTTEN
        work.spent[move] *= FORGOTTEN


@compiled
def change(tables: Tables, schedule: Schedule, work: Work, move: int) -> bool:
    """Make a move."""
    if move == 0:
        return resize(tables, schedule, work)
    if move == 1:
        return shift(tables, schedule, work)
    if move == 2:
        return put_beside(tables, schedule, work)
    if move == 3:
        return join_devices(tables, schedule, work)
    if move == 4:
        return swap_devices(tables, schedule, work)
    if move == 5:
        return reorder(tables, schedule, work)
    if move == 6:
        return reorder_slice(tables, schedule, work)
    return _change_more(tables, schedule, work, move)


@compiled
def _change_more(tables: Tables, schedule: Schedule, work: Work, move: int) -> bool:
    """Make one of the moves that `change` has no place for."""
    if move == 7:
        return cut(tables, schedule, work)
    if move == 8:
        return uncut(schedule, work)
    if move == 9:
        return shift_cut(schedule, work)
    if move == 10:
        return keep_otherwise(tables, schedule, work)
    if move == 11:
        return keep_part_otherwise(tables, schedule, work)
    if move == 12:
        return gather_metaop(schedule, work)
    if move == 13:
        return move_part(tables, schedule, work)
    if move == 14:
        return put_anywhere(tables, schedule, work)
    return gather_component(tables, schedule, work)
