"""Where parameters are, and how long their sums and gathers take, in compiled loops.

Fragments of parameters that the same devices hold have one home: they are summed together, and take one
communicator. As `account/groups.py` has it.
"""

from __future__ import annotations

from math import log

from spindle_cli.account import groups
from spindle_cli.costs import links
from spindle_cli.plan.compiled import compiled
from spindle_cli.plan.refine.host import count_moved
from spindle_cli.plan.refine.schedule import Schedule, Work
from spindle_cli.plan.refine.tables import Floats, Ints, Records, Tables

_ring = compiled(links.ring_seconds)
_tree = compiled(links.tree_seconds)
_doubling = compiled(links.doubling_seconds)
_around_node = compiled(links.around_node_seconds)

# Seconds that sums and gathers of a home have to save by going around nodes first (`account/groups.py`).
WORTH_S = 0.01
MULTIPLIER = 1000003


@compiled
def find_homes(tables: Tables, schedule: Schedule, work: Work) -> int:
    """Find which fragments of parameters the same devices hold, and how many such homes there are."""
    num_fragments = _cut_blocks(tables, schedule, work)
    _spread_fragments(tables, schedule, work)
    fragments, homes, uses = work.fragments, work.homes, work.uses
    common = tables.common[0]
    num_homes = 0
    work.table[:] = -1
    for number in range(num_fragments):
        fragment = fragments[number]
        block, parts = tables.blocks[fragment.block], uses[fragment.block].parts
        if work.begins[fragment.block]:
            home = _home_of(fragments, work.fragment_masks, work.table, number)
        else:
            home = fragments[number - parts].home
        if home < 0:
            home = num_homes
            num_homes += 1
            _new_home(tables, homes[home], work.home_devices[home], work.fragment_masks[number])
        fragment.home = home
        record = homes[home]
        sharers = record.count if common.is_sharded else 1
        record.trained += block.trained / parts / sharers
        if block.is_alike:
            # Where devices alone have parameters, there is nothing to sum: gradients come and go with passes.
            gradients = common.width * block.trained if record.count > 1 else 0.0
            record.held += (block.lasting + block.state / sharers + gradients) / parts
    for home in range(num_homes):
        record = homes[home]
        record.worth_bytes = _known_worth(tables, work, record)
        record.by_node = common.is_sharded and _goes_by_node(tables, work, record)
    _find_classes(work, num_homes)
    _add_cards(tables, work, num_homes)
    return num_homes


@compiled
def _find_classes(work: Work, num_homes: int) -> None:
    """Find which devices are in the same homes, so that sums need not look at each."""
    hashes, table = work.class_hashes, work.class_table
    hashes[:] = 0
    table[:] = -1
    for home in range(num_homes):
        if work.homes[home].count > 1:
            # Mixed, as sums of what grows evenly are the same for other homes, too.
            mixed = (home + 1) * MULTIPLIER
            mixed = (mixed ^ (mixed >> 29)) * MULTIPLIER
            mixed = (mixed ^ (mixed >> 32)) * MULTIPLIER
            for place in range(work.homes[home].count):
                hashes[work.home_devices[home, place]] += mixed ^ (mixed >> 31)
    for device in range(len(hashes)):
        slot = (hashes[device] ^ (hashes[device] >> 29)) & (len(table) - 1)
        while table[slot] >= 0 and hashes[table[slot]] != hashes[device]:
            slot = (slot + 1) & (len(table) - 1)
        if table[slot] < 0:
            table[slot] = device  # the first one gives its class its number
        work.class_of[device] = table[slot]
    for home in range(num_homes):
        home_classes = work.classes[home]
        home_classes[0] = 0
        for place in range(work.homes[home].count if work.homes[home].count > 1 else 0):
            device = work.home_devices[home, place]
            if work.class_of[device] == device:
                home_classes[0] += 1
                home_classes[home_classes[0]] = device


@compiled
def _add_cards(tables: Tables, work: Work, num_homes: int) -> None:
    """Add to the classes of homes on several nodes their shared network cards: a card carries one sum at a
    time.
    """
    work.card_seen[:] = -1
    for home in range(num_homes):
        home_classes = work.classes[home]
        for place in range(work.homes[home].count if work.homes[home].nodes > 1 else 0):
            device = tables.devices[work.home_devices[home, place]]
            if device.shares_card and work.card_seen[device.card] != home:
                work.card_seen[device.card] = home
                home_classes[0] += 1
                home_classes[home_classes[0]] = len(tables.devices) + device.card


@compiled
def _known_worth(tables: Tables, work: Work, home: Records) -> float:
    """Bytes from which a sum is worth its latency, worked out once for all homes that lie alike on nodes."""
    key = (home.count * MULTIPLIER + home.nodes) * MULTIPLIER + home.most
    key = (key * MULTIPLIER + home.fewest) * MULTIPLIER + home.cards
    key = (key * MULTIPLIER + home.near) * MULTIPLIER + home.far
    home.shape = key
    row = (key ^ (key >> 29)) & (len(work.worth_keys) - 1)
    if work.worth_keys[row] != key:
        work.worth_keys[row], work.worth_bytes[row] = key, _worth_a_sum(tables, home)
    return float(work.worth_bytes[row])


@compiled
def _worth_a_sum(tables: Tables, home: Records) -> float:
    """Bytes from which a sum is worth its latency (`account.groups.sum_bytes`)."""
    num_bytes = float(groups.LEAST_SUM_BYTES)
    large_s_per_byte = collective_s(tables, home, groups.LARGE_SUM_BYTES, 2) / groups.LARGE_SUM_BYTES
    while num_bytes < groups.MOST_SUM_BYTES:
        if collective_s(tables, home, num_bytes, 2) <= 2 * num_bytes * large_s_per_byte:
            break
        num_bytes *= 2
    return num_bytes


@compiled
def _cut_blocks(tables: Tables, schedule: Schedule, work: Work) -> int:
    """Set which blocks begin a stretch that the same slices use, and into how many fragments each is split;
    how many of these there are in all.
    """
    uses, begins = work.uses, work.begins
    begins[:] = 0
    for block in range(len(uses)):
        uses[block].parts = 1
    for number in range(len(schedule.slices)):
        slice_ = schedule.slices[number]
        if slice_.metaop < 0:
            continue
        tp = tables.options[slice_.option].tp
        at, end = used_range(tables, slice_)
        while at < end:
            run_end = min(tables.used[at].run_end, end)
            first, last = tables.used[at].block, tables.used[run_end - 1].block
            begins[first] = begins[last + 1] = 1
            for block in range(first, last + 1 if tp > 1 and tables.blocks[first].is_split else first):
                uses[block].parts = max(uses[block].parts, tp)
            at = run_end
    num_fragments = 0
    for block in range(len(uses)):
        uses[block].fragment_from = num_fragments
        for _ in range(uses[block].parts):
            work.fragments[num_fragments].block = block
            num_fragments += 1
    return num_fragments


@compiled
def used_range(tables: Tables, slice_: Records) -> tuple[int, int]:
    """The range of `used` that has what the ops of a slice use."""
    op_from = tables.metaops[slice_.metaop].op_from
    return tables.ops[op_from + slice_.first].block_from, tables.ops[op_from + slice_.last].block_from


@compiled
def stretch_end(tables: Tables, work: Work, at: int, end: int) -> int:
    """Where in `used`, before `end`, the blocks end that the same slices use as the one at a place of it."""
    block, stop = tables.used[at].block - at, min(tables.used[at].run_end, end)
    at += 1
    while at < stop and not work.begins[block + at]:
        at += 1
    return at


@compiled
def _spread_fragments(tables: Tables, schedule: Schedule, work: Work) -> None:
    """Set which devices hold each fragment of the first block of every stretch."""
    for block in range(len(work.uses)):
        use = work.uses[block]
        if work.begins[block]:
            work.fragment_masks[use.fragment_from : use.fragment_from + use.parts, :] = 0
    for number in range(len(schedule.slices)):
        if schedule.slices[number].metaop >= 0:
            _set_groups(tables, schedule, work, number)
            _spread_over(tables, schedule, work, number)


@compiled
def _set_groups(tables: Tables, schedule: Schedule, work: Work, number: int) -> None:
    """Set which devices of a slice hold the same fragments, where tensor parallelism splits blocks."""
    masks, option = work.group_masks, tables.options[schedule.slices[number].option]
    for group in range(option.tp if option.tp > 1 else 0):
        masks[group, :] = 0
        for place in range(group, option.devices, option.tp):
            device = schedule.devices[number, place]
            masks[group, device >> 6] |= 1 << (device & 63)


@compiled
def _spread_over(tables: Tables, schedule: Schedule, work: Work, number: int) -> None:
    """Have the devices of a slice hold fragments of what its ops use; degrees of tensor parallelism divide
    each other.
    """
    slice_, masks = schedule.slices[number], work.fragment_masks
    at, end = used_range(tables, slice_)
    while at < end:
        use = work.uses[tables.used[at].block]
        at = stretch_end(tables, work, at, end)
        groups = tables.options[slice_.option].tp if use.parts > 1 else 1
        fragments = use.parts // groups
        for part in range(use.parts):
            held = work.group_masks[part // fragments] if groups > 1 else work.masks[number]
            for word in range(masks.shape[1]):
                masks[use.fragment_from + part, word] |= held[word]


@compiled
def _home_of(fragments: Records, masks: Ints, table: Ints, number: int) -> int:
    """The home of the fragments that the same devices hold; -1: there is none, and this one begins one."""
    hashed = 0
    for word in range(masks.shape[1]):
        bits = masks[number, word]
        hashed = hashed * MULTIPLIER + (bits ^ (bits >> 29))
    slots = len(table)
    slot = (hashed ^ (hashed >> 17)) & (slots - 1)
    while table[slot] >= 0:
        peer = table[slot]
        same = True
        for word in range(masks.shape[1]):
            same = same and masks[number, word] == masks[peer, word]
        if same:
            return int(fragments[peer].home)
        slot = (slot + 1) & (slots - 1)
    table[slot] = number
    return -1


@compiled
def _new_home(tables: Tables, home: Records, held_by: Ints, mask: Ints) -> None:
    """Set how a home's devices lie on the nodes. `held_by`: set to these."""
    devices = tables.devices
    count, nodes, here, most, fewest, node = 0, 0, 0, 0, len(devices), -1
    cards, among = len(devices), 0
    for device in range(len(devices)):
        if not (mask[device >> 6] >> (device & 63)) & 1:
            continue
        if devices[device].node != node:
            if here:
                most, fewest = max(most, here), min(fewest, here)
            node, here = devices[device].node, 0
            nodes += 1
            cards = min(cards, devices[device].cards)
            if among // devices[device].kind % 3 < 2:
                among += devices[device].kind
        here += 1
        held_by[count] = device
        count += 1
    home.count, home.nodes, home.most, home.fewest = count, nodes, max(most, here), min(fewest, here)
    home.cards, home.near, home.far = cards, tables.among[among].near, tables.among[among].far
    home.trained, home.held = 0.0, 0.0


@compiled
def _goes_by_node(tables: Tables, work: Work, home: Records) -> bool:
    """Whether a home's sums and gathers save enough by going around nodes first."""
    if home.count < 2 or home.nodes < 2 or home.most < 2 or home.most != home.fewest:
        return False
    num_bytes = home.trained * home.count
    home.by_node = 0
    at_once_s = known_collective_s(tables, work, home, num_bytes, 1)
    home.by_node = 1
    return bool(2 * (at_once_s - known_collective_s(tables, work, home, num_bytes, 1)) >= WORTH_S)


@compiled
def bandwidth(knots: Floats, link: int, num_bytes: float) -> float:
    """Bytes a second of messages of this size (`files.nodes.gb_per_s`)."""
    if num_bytes <= knots[link, 0, 0]:
        return float(knots[link, 1, 0])
    for above in range(1, knots.shape[2]):
        if num_bytes < knots[link, 0, above]:
            low, high = knots[link, 0, above - 1], knots[link, 0, above]
            share = log(num_bytes / low) / log(high / low)
            return float(
                knots[link, 1, above - 1] + share * (knots[link, 1, above] - knots[link, 1, above - 1])
            )
    return float(knots[link, 1, -1])


@compiled
def collective_s(tables: Tables, home: Records, num_bytes: float, rounds: int) -> float:
    """Seconds of a sum that all get (two rounds), or of a scatter or gather (one) over the devices of a home,
    in the fastest way.
    """
    count, nodes, most, knots = home.count, home.nodes, home.most, tables.knots
    if count < 2 or num_bytes <= 0.0:
        return 0.0
    cards = min(home.cards, home.fewest)
    near_s, far_s = tables.latencies_s[home.near], tables.latencies_s[home.far]
    near, far = bandwidth(knots, home.near, num_bytes), bandwidth(knots, home.far, num_bytes)
    whole_s = min(
        _ring(num_bytes, 2, count, nodes, cards, near_s, near, far_s, far),
        _tree(num_bytes, nodes, most, cards, near_s, near, far_s, far),
    )
    if rounds == 2:
        return whole_s
    once_s = _gather_s(tables, home, num_bytes)
    if home.by_node:
        part = num_bytes / most
        far = bandwidth(knots, home.far, part)
        inside_s = _around_node(num_bytes, most, near_s, near)
        return min(whole_s, inside_s + _doubling(part, nodes, cards, most / cards, far_s, far))
    return min(whole_s, once_s)


@compiled
def known_collective_s(tables: Tables, work: Work, home: Records, num_bytes: float, rounds: int) -> float:
    """Seconds as `collective_s` has them, worked out once for each size and all homes that lie alike: most
    stay as they are from one schedule to the next.
    """
    key = 4 * home.shape + 2 * home.by_node + rounds - 1
    row = key * MULTIPLIER + int(num_bytes)
    row = (row ^ (row >> 29)) & (len(work.collective_keys) - 1)
    if work.collective_keys[row] != key or work.collective_bytes[row] != num_bytes:
        work.collective_keys[row], work.collective_bytes[row] = key, num_bytes
        work.collective_s[row] = collective_s(tables, home, num_bytes, rounds)
    return float(work.collective_s[row])


@compiled
def _gather_s(tables: Tables, home: Records, num_bytes: float) -> float:
    """Seconds of a scatter or gather over the devices of a home, all at once (`spread_all_gather_s`)."""
    cards, far_s = min(home.cards, home.fewest), tables.latencies_s[home.far]
    near = bandwidth(tables.knots, home.near, num_bytes)
    far = bandwidth(tables.knots, home.far, num_bytes)
    near_s = tables.latencies_s[home.near]
    once_s = _ring(num_bytes, 1, home.count, home.nodes, cards, near_s, near, far_s, far)
    if home.most == 1:
        once_s = min(once_s, _doubling(num_bytes, home.nodes, cards, 1.0, far_s, far))
    return float(once_s)


@compiled
def sums_shares(tables: Tables, slice_: Records) -> bool:
    """Whether ops of a slice sum or gather over the shares of their batch."""
    metaop = slice_.metaop
    has_sums = tables.metaops[metaop].sum_from < tables.metaops[metaop + 1].sum_from
    return bool(has_sums and tables.options[slice_.option].dp > 1)


@compiled
def find_summing(tables: Tables, work: Work, number: int) -> int:
    """Set how the devices of a slice lie on the nodes; the number of the home that tells it."""
    last = len(work.homes) - 1
    _new_home(tables, work.homes[last], work.home_devices[last], work.masks[number])
    return last


@compiled
def batch_sums_s(tables: Tables, schedule: Schedule, work: Work, number: int) -> tuple[float, float]:
    """Seconds that the sums of an op of a slice take beyond those that its option has, forward and backward
    (`costs/beyond_curve.py`).
    """
    slice_ = schedule.slices[number]
    home = work.homes[find_summing(tables, work, number)]
    forward_s, backward_s = 0.0, 0.0
    for at in range(tables.metaops[slice_.metaop].sum_from, tables.metaops[slice_.metaop + 1].sum_from):
        batch_sum = tables.batch_sums[at]
        if batch_sum.is_gather:
            once_s = _gather_s(tables, home, batch_sum.num_bytes)
        else:
            once_s = collective_s(tables, home, batch_sum.num_bytes, 2)
        forward_s += batch_sum.forward * once_s
        backward_s += batch_sum.backward * once_s
    both_s = forward_s + backward_s
    beyond = max(0.0, 1.0 - tables.options[slice_.option].sums_s / both_s) if both_s > 0.0 else 0.0
    forward_s *= beyond
    share_again = 0.0
    if tables.options[slice_.option].again_s > 0.0:
        share_again = 1.0 - count_moved(tables, slice_) / (slice_.last - slice_.first)
    return forward_s, backward_s * beyond + forward_s * share_again
