"""When homes sum gradients and gather parameters, in compiled loops.

What belongs together, and in which order, is as `account/groups.py` and `placing/predict.py` have it; where
messages are under way on network cards, a sum stands still.
"""

from __future__ import annotations

from math import inf

from spindle_cli.plan.compiled import compiled
from spindle_cli.plan.refine.homes import known_collective_s, sums_shares
from spindle_cli.plan.refine.schedule import SLOTS, Schedule, Work
from spindle_cli.plan.refine.tables import Floats, Ints, Records, Tables


@compiled
def find_slots(work: Work, devices: Records, num_homes: int) -> None:
    """Set when any card of a home carries messages, from when each card does; inside of a node none does."""
    slots, cards = work.home_slots, work.card_slots
    for home in range(num_homes):
        if work.homes[home].nodes < 2:
            continue
        slots[home, :] = 0
        before = -1
        for place in range(work.homes[home].count):
            card = devices[work.home_devices[home, place]].card
            if card == before:
                continue
            before = card
            for word in range(slots.shape[1]):
                slots[home, word] |= cards[card, word]


@compiled
def set_slots(slots: Ints, slot_s: float, start_s: float, end_s: float) -> None:
    """Note that a card carries a message, in each slot in the middle of which it does."""
    first, last = int(start_s / slot_s + 0.5), min(int(end_s / slot_s + 0.5), SLOTS)
    for word in range(first >> 6, (last + 63) >> 6):
        low, high = max(first - 64 * word, 0), last - 64 * word
        bits = -1 << low
        slots[word] |= bits & ~(-1 << high) if high < 64 else bits


@compiled
def _through_s(slots: Ints, slot_s: float, start_s: float, seconds: float) -> float:
    """When something ends that stands still while any of its cards carries messages
    (`placing/card_loads.py`).
    """
    slot = int(start_s / slot_s)
    while slot < SLOTS:
        next_s = (slot + 1) * slot_s
        if not (slots[slot >> 6] >> (slot & 63)) & 1:
            if start_s + seconds <= next_s:
                break
            seconds -= next_s - start_s
        start_s = next_s
        slot += 1
    return start_s + seconds


@compiled
def _begin_blocks(tables: Tables, schedule: Schedule, work: Work, is_backward: int) -> None:
    """Set of each block how many ops have still to run that complete it, and, of gathers, when an op first
    needs it.
    """
    uses = work.uses
    for block in range(len(uses)):
        uses[block].left = tables.blocks[block].users if is_backward else 1
        uses[block].done_s = 0.0 if is_backward else inf
    if is_backward:
        return
    for number in range(1, 1 + schedule.order[0]):
        current = schedule.order[number]
        if current & 1:
            continue
        slice_, start_s = schedule.slices[current >> 1], work.passes[current].start_s
        op_from = tables.metaops[slice_.metaop].op_from
        op_s = work.passes[current].seconds / (slice_.last - slice_.first)
        for op in range(slice_.first, slice_.last):
            time_s = start_s + (op - slice_.first) * op_s
            for at in range(tables.ops[op_from + op].block_from, tables.ops[op_from + op + 1].block_from):
                use = uses[tables.used[at].block]
                use.done_s = min(use.done_s, time_s)


@compiled
def collect_sums(tables: Tables, schedule: Schedule, work: Work, num_homes: int, is_backward: int) -> int:
    """Set what is summed as backward passes complete it, or gathered as forward passes come to it, and what
    goes together: fragments of a home until they are worth a sum. How many sums there are.
    """
    uses, num_sums = work.uses, 0
    _begin_blocks(tables, schedule, work, is_backward)
    for home in range(num_homes):
        work.homes[home].open_sum = -1
    for number in range(1, 1 + schedule.order[0]):
        current = schedule.order[number]
        if current & 1 != is_backward:
            continue
        slice_, start_s = schedule.slices[current >> 1], work.passes[current].start_s
        op_from, num_ops = tables.metaops[slice_.metaop].op_from, slice_.last - slice_.first
        op_s = work.passes[current].seconds / num_ops
        # Where ops sum inside of a pass, nothing else is summed before it is through.
        is_whole = tables.options[slice_.option].tp > 1 or sums_shares(tables, slice_)
        for step in range(num_ops):
            op = op_from + (slice_.last - 1 - step if is_backward else slice_.first + step)
            complete_s = start_s + (num_ops if is_whole else step + 1) * op_s
            for at in range(tables.ops[op].block_from, tables.ops[op + 1].block_from):
                use = uses[tables.used[at].block]
                use.left -= 1
                if is_backward:
                    use.done_s = max(use.done_s, complete_s)
                if not use.left:
                    num_sums = _add_block(tables, work, tables.used[at].block, num_sums, is_backward)
    return num_sums


@compiled
def _add_block(tables: Tables, work: Work, block: int, num_sums: int, is_backward: int) -> int:
    """Add a block's fragments to the sums or gathers of their homes; how many there are now."""
    use, common = work.uses[block], tables.common[0]
    num_bytes = tables.blocks[block].trained / use.parts
    for fragment in range(use.fragment_from, use.fragment_from + use.parts):
        home = work.homes[work.fragments[fragment].home]
        work.fragments[fragment].sum = -1
        if home.count < 2:
            continue
        if home.open_sum < 0:
            home.open_sum = num_sums
            work.sums[num_sums].home = work.fragments[fragment].home
            work.sums[num_sums].key_s, work.sums[num_sums].num_bytes = use.done_s, 0.0
            num_sums += 1
        joined = work.sums[home.open_sum]
        work.fragments[fragment].sum = home.open_sum
        joined.num_bytes += num_bytes
        joined.key_s = max(joined.key_s, use.done_s) if is_backward else min(joined.key_s, use.done_s)
        if common.width * joined.num_bytes >= home.worth_bytes:
            home.open_sum = -1
    return num_sums


@compiled
def run_sums(tables: Tables, work: Work, num_sums: int, is_backward: int) -> None:
    """Let homes sum or gather, each as soon as all of its devices are free, in the order of `key_s`."""
    order, sums, free_s, common = work.sum_order, work.sums, work.class_free_s, tables.common[0]
    for number in range(num_sums):
        order[number], work.keys_s[number] = number, sums[number].key_s
    sort_by(order, 0, num_sums, work.keys_s)
    rounds = 1 if common.is_sharded else 2
    for number in range(num_sums):
        collective = sums[order[number]]
        home, classes = work.homes[collective.home], work.classes[collective.home]
        num_bytes = collective.num_bytes * (common.width if is_backward else 1.0)
        seconds = known_collective_s(tables, work, home, num_bytes, rounds)
        start_s = collective.key_s if is_backward else 0.0
        for place in range(1, 1 + classes[0]):
            start_s = max(start_s, free_s[classes[place]])
        collective.end_s = start_s + seconds
        if home.nodes > 1:
            collective.end_s = _through_s(work.home_slots[collective.home], work.slot_s[0], start_s, seconds)
        for place in range(1, 1 + classes[0]):
            free_s[classes[place]] = collective.end_s


@compiled
def sort_by(order: Ints, begin: int, end: int, keys: Floats) -> None:
    """Sort numbers by their keys (Shell's sort; gaps of Ciura, FCT 2001)."""
    for gap in (301, 132, 57, 23, 10, 4, 1):
        for number in range(begin + gap, end):
            moved = order[number]
            key_s = keys[moved]
            place = number
            while place >= begin + gap and keys[order[place - gap]] > key_s:
                order[place] = order[place - gap]
                place -= gap
            order[place] = moved


@compiled
def gather(tables: Tables, schedule: Schedule, work: Work, num_homes: int) -> None:
    """Set when parameters have been gathered that slices use."""
    uses = work.uses
    num_sums = collect_sums(tables, schedule, work, num_homes, 0)
    run_sums(tables, work, num_sums, 0)
    for block in range(len(uses)):
        use = uses[block]
        use.done_s = 0.0
        for fragment in range(use.fragment_from, use.fragment_from + use.parts):
            if work.fragments[fragment].sum >= 0:
                use.done_s = max(use.done_s, work.sums[work.fragments[fragment].sum].end_s)
    for number in range(len(schedule.slices)):
        slice_ = schedule.slices[number]
        if slice_.metaop < 0:
            continue
        op_s = work.passes[2 * number].seconds / (slice_.last - slice_.first)
        op_from, gathered_s = tables.metaops[slice_.metaop].op_from, 0.0
        for op in range(slice_.first, slice_.last):
            for at in range(tables.ops[op_from + op].block_from, tables.ops[op_from + op + 1].block_from):
                done_s = uses[tables.used[at].block].done_s
                gathered_s = max(gathered_s, done_s - (op - slice_.first) * op_s)
        work.passes[2 * number].gathered_s = gathered_s
