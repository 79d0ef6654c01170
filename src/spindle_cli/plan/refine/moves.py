"""What the search changes about a schedule at a time, in compiled loops.

Each function changes something at random and says whether it could; it leaves a schedule that can be run, or
says False.
"""

from __future__ import annotations

from spindle_cli.plan.compiled import compiled
from spindle_cli.plan.refine.schedule import OFTEN, Schedule, Work
from spindle_cli.plan.refine.tables import Ints, Tables
from spindle_cli.plan.search.draws import draw

# Where so much of its memory is taken a device is short of it: pieces elsewhere keep all activations.
SHORT = 0.9
# Of all draws, the part that does not go by what moves gained; into how many parts that is measured; and what
# part of what they gained counts on.
EVENLY, SCALE, FORGOTTEN = 0.5, 16, 0.5
# By how many allocations a piece becomes wider or narrower at most.
FURTHEST = 3


@compiled
def any_piece(schedule: Schedule, work: Work) -> int:
    """One of the pieces."""
    metaop = draw(work.random, len(schedule.of_metaop))
    return int(schedule.of_metaop[metaop, 1 + draw(work.random, schedule.of_metaop[metaop, 0])])


@compiled
def count_of(tables: Tables, option: int, of_type: int) -> int:
    """How many devices of a type an allocation has."""
    return int(tables.of_types[tables.options[option].type_from + of_type].devices)


@compiled
def set_firsts(tables: Tables, schedule: Schedule, work: Work, piece: int, firsts: Ints) -> None:
    """Set which of each type's devices a piece begins with; any, of a type of which it has none."""
    place = 0
    for of_type in range(len(firsts)):
        count = count_of(tables, schedule.pieces[piece].option, of_type)
        if count:
            firsts[of_type] = tables.devices[schedule.devices[piece, place]].place
        else:
            firsts[of_type] = draw(work.random, tables.type_from[of_type + 1] - tables.type_from[of_type])
        place += count


@compiled
def put(tables: Tables, schedule: Schedule, firsts: Ints, piece: int, option: int) -> bool:
    """Give a piece an allocation on consecutive devices of each type, from `firsts` on; False where a
    tensor-parallel group would not be inside of a node.
    """
    schedule.pieces[piece].option = option
    tp, place = tables.options[option].tp, 0
    for of_type in range(len(firsts)):
        begin, count = tables.type_from[of_type], count_of(tables, option, of_type)
        first = min(max(firsts[of_type], 0), tables.type_from[of_type + 1] - begin - count)
        first += begin - first % tp
        for number in range(count):
            schedule.devices[piece, place] = tables.by_type[first + number]
            place += 1
    return groups_are_inside(tables, schedule, piece)


@compiled
def groups_are_inside(tables: Tables, schedule: Schedule, piece: int) -> bool:
    """Whether each tensor-parallel group of a piece is inside of a node."""
    tp = tables.options[schedule.pieces[piece].option].tp
    for place in range(tables.options[schedule.pieces[piece].option].devices):
        group = schedule.devices[piece, place - place % tp]
        if tables.devices[group].node != tables.devices[schedule.devices[piece, place]].node:
            return False
    return True


@compiled
def copy_devices(
    tables: Tables, schedule: Schedule, source: int, whole: int, piece: int, at_end: int
) -> bool:
    """Give a piece devices of another one, which has the allocation `whole` and as many of each type, or
    more: the first ones of each, or the last.
    """
    begin, place, option = 0, 0, schedule.pieces[piece].option
    for of_type in range(len(tables.type_from) - 1):
        count, most = count_of(tables, option, of_type), count_of(tables, whole, of_type)
        skipped = begin + (most - count) * at_end
        for number in range(count):
            schedule.devices[piece, place] = schedule.devices[source, skipped + number]
            place += 1
        begin += most
    return groups_are_inside(tables, schedule, piece)


@compiled
def fits_in(tables: Tables, option: int, whole: int) -> bool:
    """Whether an allocation has as many devices of each type as another one, or fewer."""
    for of_type in range(len(tables.type_from) - 1):
        if count_of(tables, option, of_type) > count_of(tables, whole, of_type):
            return False
    return True


@compiled
def same_devices(schedule: Schedule, source: int, piece: int) -> None:
    """Give a piece all devices of another one."""
    for place in range(schedule.devices.shape[1]):
        schedule.devices[piece, place] = schedule.devices[source, place]


@compiled
def same_again(
    tables: Tables, schedule: Schedule, work: Work, piece: int, fewest: int, most: int, whole: int
) -> int:
    """An option of a piece's MetaOp of so many devices that keeps as much; -1: there is none.

    Args:
        whole: an option of which it is to have no more devices of any type; -1: of none.
    """
    metaop, keeping = schedule.pieces[piece].metaop, tables.options[schedule.pieces[piece].option].keeping
    begin, end = tables.metaops[metaop].option_from, tables.metaops[metaop + 1].option_from
    num_right, found = 0, -1
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
                found = option
            wanted -= is_chosen
            num_right += 1 - is_chosen
        if not num_right:
            break
    return found


@compiled
def resize(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """A piece becomes wider or narrower, at either end of its devices."""
    piece = any_piece(schedule, work)
    option = schedule.pieces[piece].option
    other = _neighbour(tables, schedule, work, piece)
    if other < 0:
        return False
    at_end, firsts = draw(work.random, 2), work.firsts[0]
    if fits_in(tables, other, option):
        schedule.pieces[piece].option = other
        return copy_devices(tables, schedule, piece, option, piece, at_end)
    set_firsts(tables, schedule, work, piece, firsts)
    for of_type in range(len(firsts)):
        more = count_of(tables, other, of_type) - count_of(tables, option, of_type)
        firsts[of_type] -= more * at_end
    return put(tables, schedule, firsts, piece, other)


@compiled
def _neighbour(tables: Tables, schedule: Schedule, work: Work, piece: int) -> int:
    """An option of a piece's MetaOp that keeps as much, with a few more or fewer devices of one type; on
    one type of device, one of the next in their order. -1: there is none.
    """
    option, metaop = schedule.pieces[piece].option, schedule.pieces[piece].metaop
    begin, end = tables.metaops[metaop].option_from, tables.metaops[metaop + 1].option_from
    steps, step = 1 + draw(work.random, FURTHEST), 1 if draw(work.random, 2) else -1
    of_type, other = any_type(work), option
    while steps:
        other += step
        if not begin <= other < end or tables.options[other].keeping != tables.options[option].keeping:
            return -1
        steps -= _differs_in(tables, other, option, of_type)
    return int(other)


@compiled
def _differs_in(tables: Tables, option: int, other: int, of_type: int) -> bool:
    """Whether two allocations have as many devices of all types but one."""
    for number in range(len(tables.type_from) - 1):
        if number != of_type and count_of(tables, option, number) != count_of(tables, other, number):
            return False
    return True


@compiled
def shift(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """A piece goes to devices a power of two further."""
    piece = any_piece(schedule, work)
    step = (1 << draw(work.random, 5)) * (1 if draw(work.random, 2) else -1)
    firsts = work.firsts[0]
    set_firsts(tables, schedule, work, piece, firsts)
    firsts[any_type(work)] += step
    return put(tables, schedule, firsts, piece, schedule.pieces[piece].option)


@compiled
def any_type(work: Work) -> int:
    """One of the types of device."""
    num_types = work.firsts.shape[1]
    return draw(work.random, num_types) if num_types > 1 else 0


@compiled
def put_beside(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """A piece goes to an end of another one's devices, from inside or outside."""
    piece, other = any_piece(schedule, work), any_piece(schedule, work)
    option, beside = schedule.pieces[piece].option, schedule.pieces[other].option
    firsts = work.firsts[0]
    set_firsts(tables, schedule, work, other, firsts)
    where, place = draw(work.random, 4), 0
    for of_type in range(len(firsts)):
        place += count_of(tables, beside, of_type)
        if where in (1, 3) and count_of(tables, beside, of_type):
            firsts[of_type] = tables.devices[schedule.devices[other, place - 1]].place + 1
        if where > 1:
            firsts[of_type] -= count_of(tables, option, of_type)
    return put(tables, schedule, firsts, piece, option)


@compiled
def join_devices(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """A piece gets devices of another one, of the same parameters more often than not."""
    piece, other = any_piece(schedule, work), any_piece(schedule, work)
    for _ in range(8):
        if _shares_parameters(tables, schedule, piece, other):
            break
        other = any_piece(schedule, work)
    whole = schedule.pieces[other].option
    option = _option_inside(tables, schedule, work, piece, whole)
    if option < 0:
        return False
    schedule.pieces[piece].option = option
    return copy_devices(tables, schedule, other, whole, piece, draw(work.random, 2))


@compiled
def _option_inside(tables: Tables, schedule: Schedule, work: Work, piece: int, whole: int) -> int:
    """An option of a piece's MetaOp of as many devices as `whole` has, or at least half, and of each type no
    more; -1: there is none.
    """
    most = tables.options[whole].devices
    option = same_again(tables, schedule, work, piece, most, most, whole)
    if option < 0:
        option = same_again(tables, schedule, work, piece, (most + 1) // 2, most, whole)
    return int(option)


@compiled
def _shares_parameters(tables: Tables, schedule: Schedule, piece: int, other: int) -> bool:
    """Whether two different pieces use the same parameters, or their MetaOps hang together."""
    one, two = schedule.pieces[piece].metaop, schedule.pieces[other].metaop
    is_near = tables.metaops[one].part == tables.metaops[two].part
    return piece != other and (is_near or _uses_same(tables, schedule, piece, other))


@compiled
def _uses_same(tables: Tables, schedule: Schedule, piece: int, other: int) -> bool:
    """Whether the first ops of the MetaOps of two pieces use the same parameters."""
    one_op = tables.metaops[schedule.pieces[piece].metaop].op_from
    two_op = tables.metaops[schedule.pieces[other].metaop].op_from
    first, second = tables.ops[one_op].block_from, tables.ops[two_op].block_from
    has_both = first < tables.ops[one_op + 1].block_from and second < tables.ops[two_op + 1].block_from
    return bool(has_both and tables.used[first].block == tables.used[second].block)


@compiled
def swap_devices(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """Two pieces change places; where these are of other types of device, each takes one of its allocations
    there.
    """
    piece, other = any_piece(schedule, work), any_piece(schedule, work)
    if piece == other or schedule.devices[piece, 0] == schedule.devices[other, 0]:
        return False
    of_piece, of_other = work.firsts[0], work.firsts[1]
    set_firsts(tables, schedule, work, piece, of_piece)
    set_firsts(tables, schedule, work, other, of_other)
    one, two = schedule.pieces[piece].option, schedule.pieces[other].option
    if not _has_same_types(tables, one, two):
        one = _option_inside(tables, schedule, work, piece, schedule.pieces[other].option)
        two = _option_inside(tables, schedule, work, other, schedule.pieces[piece].option)
        if min(one, two) < 0:
            return False
    is_right = put(tables, schedule, of_other, piece, one)
    return put(tables, schedule, of_piece, other, two) and is_right


@compiled
def _has_same_types(tables: Tables, option: int, other: int) -> bool:
    """Whether two allocations have devices of the same types."""
    for of_type in range(len(tables.type_from) - 1):
        if (count_of(tables, option, of_type) > 0) != (count_of(tables, other, of_type) > 0):
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
    piece = current >> 1
    metaop = schedule.pieces[piece].metaop
    first = schedule.of_metaop[metaop, 1]
    found = 0
    for place in range(schedule.of_metaop[metaop, 0]):
        other = schedule.of_metaop[metaop, 1 + place]
        if not current & 1 and schedule.pieces[other].last == schedule.pieces[piece].first:
            found = max(found, work.place[2 * other] + 1)
        if current & 1 and schedule.pieces[other].first == schedule.pieces[piece].last:
            found = max(found, work.place[2 * other + 1] + 1)
    if not current & 1:
        for number in range(tables.metaops[metaop].input_from, tables.metaops[metaop + 1].input_from):
            if piece == first or tables.inputs[number].of_every:
                maker = tables.inputs[number].metaop
                last = schedule.of_metaop[maker, schedule.of_metaop[maker, 0]]
                found = max(found, work.place[2 * last] + 1)
        return found
    found = max(found, work.place[2 * piece] + 1)
    if schedule.pieces[piece].last == tables.metaops[metaop].num_ops:
        for number in range(tables.metaops[metaop].taker_from, tables.metaops[metaop + 1].taker_from):
            taker = tables.takers[number].metaop
            for place in range(schedule.of_metaop[taker, 0] if tables.takers[number].of_every else 1):
                found = max(found, work.place[2 * schedule.of_metaop[taker, 1 + place] + 1] + 1)
    return int(found)


@compiled
def latest_place(tables: Tables, schedule: Schedule, work: Work, current: int) -> int:
    """The last place in the order before all that take what a pass makes."""
    piece = current >> 1
    metaop = schedule.pieces[piece].metaop
    first = schedule.of_metaop[metaop, 1]
    found = schedule.order[0] - 1
    for place in range(schedule.of_metaop[metaop, 0]):
        other = schedule.of_metaop[metaop, 1 + place]
        if not current & 1 and schedule.pieces[other].first == schedule.pieces[piece].last:
            found = min(found, work.place[2 * other] - 1)
        if current & 1 and schedule.pieces[other].last == schedule.pieces[piece].first:
            found = min(found, work.place[2 * other + 1] - 1)
    if current & 1:
        for number in range(tables.metaops[metaop].input_from, tables.metaops[metaop + 1].input_from):
            if piece == first or tables.inputs[number].of_every:
                maker = tables.inputs[number].metaop
                last = schedule.of_metaop[maker, schedule.of_metaop[maker, 0]]
                found = min(found, work.place[2 * last + 1] - 1)
        return int(found)
    found = min(found, work.place[2 * piece + 1] - 1)
    if schedule.pieces[piece].last == tables.metaops[metaop].num_ops:
        for number in range(tables.metaops[metaop].taker_from, tables.metaops[metaop + 1].taker_from):
            taker = tables.takers[number].metaop
            for place in range(schedule.of_metaop[taker, 0] if tables.takers[number].of_every else 1):
                found = min(found, work.place[2 * schedule.of_metaop[taker, 1 + place]] - 1)
    return int(found)


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
def reorder_piece(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """Both passes of a piece run at other times."""
    piece = any_piece(schedule, work)
    is_moved = _reordered(tables, schedule, work, 2 * piece)
    return _reordered(tables, schedule, work, 2 * piece + 1) or is_moved


@compiled
def free_place(schedule: Schedule) -> int:
    """A place for one more piece; -1: there is none."""
    for piece in range(len(schedule.pieces)):
        if schedule.pieces[piece].metaop < 0:
            return piece
    return -1


@compiled
def cut(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """A piece becomes two, the second on an allocation of its own, where the first is or beside."""
    piece = any_piece(schedule, work)
    other = cut_at_random(schedule, work, piece)
    if other < 0:
        return False
    count = tables.options[schedule.pieces[piece].option].devices
    option = same_again(tables, schedule, work, other, count // 2, 2 * count, -1)
    if option < 0:
        return True
    firsts, step = work.firsts[0], draw(work.random, 3) - 1
    set_firsts(tables, schedule, work, piece, firsts)
    for of_type in range(len(firsts)):
        firsts[of_type] += step * count_of(tables, option, of_type)
    return put(tables, schedule, firsts, other, option)


@compiled
def cut_at_random(schedule: Schedule, work: Work, piece: int) -> int:
    """Cut a piece in two on the same devices, whose passes follow each other; the second one. -1: it cannot
    be.
    """
    first, last, metaop = (
        schedule.pieces[piece].first,
        schedule.pieces[piece].last,
        schedule.pieces[piece].metaop,
    )
    other = free_place(schedule)
    if last - first < 2 or other < 0 or schedule.of_metaop[metaop, 0] == schedule.of_metaop.shape[1] - 1:
        return -1
    middle = first + 1 + draw(work.random, last - first - 1)
    schedule.pieces[other].metaop, schedule.pieces[other].option = metaop, schedule.pieces[piece].option
    schedule.pieces[other].first, schedule.pieces[other].last = middle, last
    same_devices(schedule, piece, other)
    schedule.pieces[piece].last = middle
    place = schedule.of_metaop[metaop, 0]
    while schedule.of_metaop[metaop, place] != piece:
        schedule.of_metaop[metaop, 1 + place] = schedule.of_metaop[metaop, place]
        place -= 1
    schedule.of_metaop[metaop, 1 + place] = other
    schedule.of_metaop[metaop, 0] += 1
    _order_cut(schedule, piece, other)
    return other


@compiled
def _order_cut(schedule: Schedule, piece: int, other: int) -> None:
    """Have a new piece's forward pass run right behind that of the piece before it, its backward pass right
    before.
    """
    now = schedule.order[0] + 1
    for number in range(schedule.order[0] - 1, -1, -1):
        current = schedule.order[1 + number]
        if current == 2 * piece:
            schedule.order[1 + now] = 2 * other
            now -= 1
        schedule.order[1 + now] = current
        now -= 1
        if current == 2 * piece + 1:
            schedule.order[1 + now] = 2 * other + 1
            now -= 1
    schedule.order[0] += 2


@compiled
def uncut(schedule: Schedule, work: Work) -> bool:
    """A piece and the next one become one, on the devices of either."""
    metaop = draw(work.random, len(schedule.of_metaop))
    if schedule.of_metaop[metaop, 0] < 2:
        return False
    place = draw(work.random, schedule.of_metaop[metaop, 0] - 1)
    piece, other = schedule.of_metaop[metaop, 1 + place], schedule.of_metaop[metaop, 2 + place]
    if draw(work.random, 2):
        schedule.pieces[piece].option = schedule.pieces[other].option
        same_devices(schedule, other, piece)
    join_next(schedule, metaop, place)
    return True


@compiled
def join_next(schedule: Schedule, metaop: int, place: int) -> None:
    """Join a MetaOp's piece with the next one. It runs forward when that did, backward when it did itself."""
    piece, other = schedule.of_metaop[metaop, 1 + place], schedule.of_metaop[metaop, 2 + place]
    schedule.pieces[piece].last = schedule.pieces[other].last
    schedule.pieces[other].metaop = -1
    schedule.of_metaop[metaop, 0] -= 1
    for behind in range(place + 1, schedule.of_metaop[metaop, 0]):
        schedule.of_metaop[metaop, 1 + behind] = schedule.of_metaop[metaop, 2 + behind]
    now = 0
    for number in range(schedule.order[0]):
        current = schedule.order[1 + number]
        if current in (2 * piece, 2 * other + 1):
            continue
        schedule.order[1 + now] = 2 * piece if current == 2 * other else current
        now += 1
    schedule.order[0] = now


@compiled
def shift_cut(schedule: Schedule, work: Work) -> bool:
    """Ops go from a piece to the next one, or the other way."""
    metaop = draw(work.random, len(schedule.of_metaop))
    if schedule.of_metaop[metaop, 0] < 2:
        return False
    place = draw(work.random, schedule.of_metaop[metaop, 0] - 1)
    piece, other = schedule.of_metaop[metaop, 1 + place], schedule.of_metaop[metaop, 2 + place]
    room = schedule.pieces[other].last - schedule.pieces[piece].first - 1
    middle = schedule.pieces[piece].first + 1 + draw(work.random, room)
    is_moved = middle != schedule.pieces[piece].last
    schedule.pieces[piece].last = schedule.pieces[other].first = middle
    return bool(is_moved)


@compiled
def keep_otherwise(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """A piece recomputes or moves more, or less."""
    return _kept_otherwise(tables, schedule, work, any_piece(schedule, work))


@compiled
def _kept_otherwise(tables: Tables, schedule: Schedule, work: Work, piece: int) -> bool:
    option, metaop = schedule.pieces[piece].option, schedule.pieces[piece].metaop
    keeping = draw(work.random, tables.common[0].keepings)
    if keeping == tables.options[option].keeping:
        return False
    # What keeps less already may do so in another way: its devices have room because it does.
    if not tables.options[option].keeping and not _is_short(tables, schedule, work, piece):
        return False
    before = tables.options[option]
    for other in range(tables.metaops[metaop].option_from, tables.metaops[metaop + 1].option_from):
        after = tables.options[other]
        if after.keeping == keeping and after.allocation == before.allocation:
            schedule.pieces[piece].option = other
            return True
    return False


@compiled
def _is_short(tables: Tables, schedule: Schedule, work: Work, piece: int) -> bool:
    """Whether a piece has a device that is short of memory."""
    for place in range(tables.options[schedule.pieces[piece].option].devices):
        if work.filled[schedule.devices[piece, place]] > SHORT:
            return True
    return False


@compiled
def keep_part_otherwise(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """Some ops of a piece recompute or move more, or less."""
    piece = any_piece(schedule, work)
    other = cut_at_random(schedule, work, piece)
    if other < 0:
        return False
    return _kept_otherwise(tables, schedule, work, other if draw(work.random, 2) else piece)


@compiled
def gather_metaop(schedule: Schedule, work: Work) -> bool:
    """All ops of a MetaOp run on the devices of one of its pieces, and keep as much as this."""
    metaop = draw(work.random, len(schedule.of_metaop))
    if schedule.of_metaop[metaop, 0] < 2:
        return False
    source = schedule.of_metaop[metaop, 1 + draw(work.random, schedule.of_metaop[metaop, 0])]
    for place in range(schedule.of_metaop[metaop, 0]):
        piece = schedule.of_metaop[metaop, 1 + place]
        schedule.pieces[piece].option = schedule.pieces[source].option
        same_devices(schedule, source, piece)
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
        if tables.metaops[schedule.pieces[current >> 1].metaop].part == part:
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
    """A piece goes to any devices, of any number, that begin at a multiple of it or where another's do."""
    piece, other = any_piece(schedule, work), any_piece(schedule, work)
    option = same_again(tables, schedule, work, piece, 1, len(tables.devices), -1)
    if option < 0:
        return False
    firsts = work.firsts[0]
    set_firsts(tables, schedule, work, other, firsts)
    if draw(work.random, 2):
        for of_type in range(len(firsts)):
            count = count_of(tables, option, of_type)
            room = tables.type_from[of_type + 1] - tables.type_from[of_type]
            firsts[of_type] = count * draw(work.random, room // count) if count else 0
    return put(tables, schedule, firsts, piece, option)


@compiled
def gather_component(tables: Tables, schedule: Schedule, work: Work) -> bool:
    """All pieces that use a piece's parameters go to its devices, or to as many of them as they can use."""
    source = any_piece(schedule, work)
    whole = schedule.pieces[source].option
    most = tables.options[whole].devices
    is_moved = False
    for piece in range(len(schedule.pieces)):
        if schedule.pieces[piece].metaop < 0 or not _uses_same(tables, schedule, source, piece):
            continue
        fewest = most
        option = -1
        while option < 0 and fewest:
            option = same_again(tables, schedule, work, piece, fewest, most, whole)
            fewest //= 2
        if option < 0:
            return False
        schedule.pieces[piece].option = option
        if not copy_devices(tables, schedule, source, whole, piece, 0):
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
        return reorder_piece(tables, schedule, work)
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
