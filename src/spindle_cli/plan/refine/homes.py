"""Where parameters are, and how long their sums and gathers take, in compiled loops.

Fragments of parameters that the same devices hold have one home: they are summed together, and take one
communicator. As `account/groups.py` has it.
"""

from __future__ import annotations

from math import log

from spindle_cli.account import groups
from spindle_cli.costs import links
from spindle_cli.plan.compiled import compiled
from spindle_cli.plan.refine.schedule import Schedule, Work
from spindle_cli.plan.refine.tables import Floats, Ints, Records, Tables

_ring = compiled(links.ring_seconds)
_tree = compiled(links.tree_seconds)
_doubling = compiled(links.doubling_seconds)
_around_node = compiled(links.around_node_seconds)

INSIDE, BETWEEN = 0, 1
# Seconds that sums and gathers of a home have to save by going around nodes first (`account/groups.py`).
WORTH_S = 0.01
MULTIPLIER = 1000003


@compiled
def find_homes(tables: Tables, schedule: Schedule, work: Work) -> int:
    """Find which fragments of parameters the same devices hold, and how many such homes there are."""
    num_fragments = _cut_blocks(tables, schedule, work)
    _spread_fragments(tables, schedule, work)
    fragments, homes, uses = work.fragments, work.homes, work.uses
    common, knots = tables.common[0], tables.knots
    num_homes = 0
    work.table[:] = -1
    for number in range(num_fragments):
        fragment = fragments[number]
        home = _home_of(fragments, work.fragment_masks, work.table, number)
        if home < 0:
            home = num_homes
            num_homes += 1
            _new_home(homes[home], work.home_devices[home], work.fragment_masks[number], tables.devices)
        fragment.home = home
        own = homes[home]
        sharers = own.count if common.is_sharded else 1
        block, parts = tables.blocks[fragment.block], uses[fragment.block].parts
        own.trained += block.trained / parts / sharers
        if block.is_alike:
            # Where devices alone have parameters, there is nothing to sum: gradients come and go with passes.
            gradients = common.width * block.trained if own.count > 1 else 0.0
            own.held += (block.lasting + block.state / sharers + gradients) / parts
    for home in range(num_homes):
        own = homes[home]
        own.by_node = common.is_sharded and _goes_by_node(own, common, knots)
        own.worth_bytes = _worth_a_sum(own, common, knots)
    return num_homes


@compiled
def _worth_a_sum(own: Records, common: Records, knots: Floats) -> float:
    """Bytes from which a sum is worth its latency (`account.groups.sum_bytes`)."""
    num_bytes = float(groups.LEAST_SUM_BYTES)
    large_s_per_byte = collective_s(own, common, knots, groups.LARGE_SUM_BYTES, 2) / groups.LARGE_SUM_BYTES
    while num_bytes < groups.MOST_SUM_BYTES:
        if collective_s(own, common, knots, num_bytes, 2) <= 2 * num_bytes * large_s_per_byte:
            break
        num_bytes *= 2
    return num_bytes


@compiled
def _cut_blocks(tables: Tables, schedule: Schedule, work: Work) -> int:
    """Set into how many fragments blocks are split, and how many there are in all."""
    uses = work.uses
    for block in range(len(uses)):
        uses[block].parts, uses[block].users = 1, 0
    for number in range(len(schedule.pieces)):
        piece = schedule.pieces[number]
        if piece.metaop < 0:
            continue
        tp, op_from = tables.options[piece.option].tp, tables.metaops[piece.metaop].op_from
        begin, end = tables.ops[op_from + piece.first].block_from, tables.ops[op_from + piece.last].block_from
        for at in range(begin, end):
            use = uses[tables.used[at].block]
            use.users += 1
            if tables.blocks[tables.used[at].block].is_split:
                use.parts = max(use.parts, tp)
    num_fragments = 0
    for block in range(len(uses)):
        uses[block].fragment_from = num_fragments
        for _ in range(uses[block].parts if uses[block].users else 0):
            work.fragments[num_fragments].block = block
            work.fragment_masks[num_fragments, :] = 0
            num_fragments += 1
    return num_fragments


@compiled
def _spread_fragments(tables: Tables, schedule: Schedule, work: Work) -> None:
    """Set which devices hold each fragment; degrees of tensor parallelism divide each other."""
    masks, group_masks = work.fragment_masks, work.group_masks
    for number in range(len(schedule.pieces)):
        piece = schedule.pieces[number]
        if piece.metaop < 0:
            continue
        tp, op_from = tables.options[piece.option].tp, tables.metaops[piece.metaop].op_from
        group_masks[:, :] = 0
        for place in range(tables.options[piece.option].devices):
            device = schedule.devices[number, place]
            group_masks[place % tp, device >> 6] |= 1 << (device & 63)
        begin, end = tables.ops[op_from + piece.first].block_from, tables.ops[op_from + piece.last].block_from
        for at in range(begin, end):
            block = tables.used[at].block
            use = work.uses[block]
            for part in range(use.parts):
                for word in range(masks.shape[1]):
                    held = work.masks[number, word]
                    if tables.blocks[block].is_split:
                        held = group_masks[part * tp // use.parts, word]
                    masks[use.fragment_from + part, word] |= held


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
        other = table[slot]
        same = True
        for word in range(masks.shape[1]):
            same = same and masks[number, word] == masks[other, word]
        if same:
            return int(fragments[other].home)
        slot = (slot + 1) & (slots - 1)
    table[slot] = number
    return -1


@compiled
def _new_home(own: Records, held_by: Ints, mask: Ints, devices: Records) -> None:
    """Set how a home's devices lie on the nodes. `held_by`: set to these."""
    count, nodes, here, most, fewest, node = 0, 0, 0, 0, len(devices), -1
    for device in range(len(devices)):
        if not (mask[device >> 6] >> (device & 63)) & 1:
            continue
        if devices[device].node != node:
            if here:
                most, fewest = max(most, here), min(fewest, here)
            node, here = devices[device].node, 0
            nodes += 1
        here += 1
        held_by[count] = device
        count += 1
    own.count, own.nodes, own.most, own.fewest = count, nodes, max(most, here), min(fewest, here)
    own.trained, own.held = 0.0, 0.0


@compiled
def _goes_by_node(own: Records, common: Records, knots: Floats) -> bool:
    """Whether a home's sums and gathers save enough by going around nodes first."""
    if own.count < 2 or own.nodes < 2 or own.most < 2 or own.most != own.fewest:
        return False
    num_bytes = own.trained * own.count
    own.by_node = 0
    at_once_s = collective_s(own, common, knots, num_bytes, 1)
    own.by_node = 1
    return bool(2 * (at_once_s - collective_s(own, common, knots, num_bytes, 1)) >= WORTH_S)


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
def collective_s(own: Records, common: Records, knots: Floats, num_bytes: float, rounds: int) -> float:
    """Seconds of a sum that all get (two rounds), or of a scatter or gather (one) over the devices of a home,
    in the fastest way.
    """
    count, nodes, most = own.count, own.nodes, own.most
    if count < 2 or num_bytes <= 0.0:
        return 0.0
    cards = min(common.cards, own.fewest)
    near_s, far_s = common.near_s, common.far_s
    near, far = bandwidth(knots, INSIDE, num_bytes), bandwidth(knots, BETWEEN, num_bytes)
    whole_s = min(
        _ring(num_bytes, 2, count, nodes, cards, near_s, near, far_s, far),
        _tree(num_bytes, nodes, most, cards, near_s, near, far_s, far),
    )
    if rounds == 2:
        return whole_s
    if own.by_node:
        part = num_bytes / most
        far = bandwidth(knots, BETWEEN, part)
        inside_s = _around_node(num_bytes, most, near_s, near)
        return min(whole_s, inside_s + _doubling(part, nodes, cards, most / cards, far_s, far))
    once_s = _ring(num_bytes, 1, count, nodes, cards, near_s, near, far_s, far)
    if most == 1:
        once_s = min(once_s, _doubling(num_bytes, nodes, cards, 1.0, far_s, far))
    return min(whole_s, once_s)
