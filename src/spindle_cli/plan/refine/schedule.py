"""A plan as the search changes it, and the places that evaluating it takes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spindle_cli.account.activations import PASSES_AHEAD
from spindle_cli.plan.refine.tables import Floats, Ints, Records, Tables

ShortInts = NDArray[np.int32]

# Into how many slots time is cut, in which a network card carries messages or does not, and what share of the
# first plan's iteration they cover: behind them it does not.
SLOTS = 1024
COVERED = 1.25
# Loads of ways of messages that are kept, in numbers for each way, and at least so many.
LOADS, LEAST_LOADS = 1 << 19, 256
# Homes whose worth of a sum is kept.
WORTHS = 1 << 10
# Sums and gathers whose seconds are kept.
COLLECTIVES = 1 << 14
# How often each move is tried at first, of all tries, in the order of `moves.change`; the last one is a
# change with repair.
OFTEN = (16, 8, 8, 10, 6, 12, 6, 4, 6, 4, 8, 3, 4, 3, 8, 4, 38)
# Slices that a MetaOp has at most.
MOST_SLICES = 24


_INT, _FLOAT = np.int64, np.float64
# Some ops [first, last) of a MetaOp on an option of it; -1 as MetaOp: the place is free.
SLICE = np.dtype([(name, _INT) for name in ("metaop", "first", "last", "option")])
# A pass: how long it takes, when its parameters have been gathered, when it runs, and how long what follows
# it takes at least; by their places in the order, or 0, the pass with the start of which its devices hold
# buffers for what it takes; and the first message that waits for this one's start, by one more than its item
# in `heap`.
PASS = np.dtype(
    [
        *((name, _FLOAT) for name in ("seconds", "gathered_s", "start_s", "end_s", "rest_s")),
        *((name, _INT) for name in ("opener", "held_back")),
    ]
)
# Two slices of which one takes what the other makes, and whether they have the same devices; bytes of a whole
# batch; when all of it has arrived, and its gradients.
EDGE = np.dtype(
    [
        *((name, _INT) for name in ("maker", "taker", "is_alike")),
        *((name, _FLOAT) for name in ("num_bytes", "arrived_s", "returned_s")),
    ]
)
# A block of parameters in a schedule: into how many fragments tensor parallelism splits it at most, and the
# number of the first; how many ops have still to use it; when its gradients, or its parameters, are there.
USE = np.dtype(
    [*((name, _INT) for name in ("parts", "fragment_from", "left")), ("done_s", _FLOAT)],
)
# A fragment of a block, the number of its home, and of the sum or gather that it is part of.
FRAGMENT = np.dtype([(name, _INT) for name in ("block", "home", "sum")])
# A sum or a gather of a home: by when it is ready or needed; its bytes; when it ends.
SUM = np.dtype([("home", _INT), *((name, _FLOAT) for name in ("key_s", "num_bytes", "end_s"))])
# Where the fragments are that the same devices hold: how many devices, on how many nodes, the most and fewest
# of a node, and the fewest network cards of one; the slowest links among them, and whether what goes between
# nodes goes around each node first; the sum that its next fragment joins, or -1; trained bytes of all of them
# that each device updates; bytes that each holds all the time of those blocks that all ops have alike; bytes
# from which a sum is worth its latency.
HOME = np.dtype(
    [
        *((name, _INT) for name in ("count", "nodes", "most", "fewest", "cards", "near", "far")),
        *((name, _INT) for name in ("by_node", "open_sum", "shape")),
        *((name, _FLOAT) for name in ("trained", "held", "worth_bytes")),
    ]
)
# A device: when its passes are through, and how long those take that are not yet placed; bytes of tensors
# now, at most, and what it updates; the bytes by which the account of a plan had more than what is worked out
# here; bytes of activations in host memory now, and at most; with how many devices of its node it exchanges
# messages, and whether with other nodes.
STATE = np.dtype(
    [
        *((name, _FLOAT) for name in ("free_s", "rest_s", "level", "peak", "updated", "correction")),
        *((name, _FLOAT) for name in ("in_host", "most_in_host")),
        *((name, _INT) for name in ("peers", "crosses")),
    ]
)


class Schedule(NamedTuple):
    """Slices of MetaOps, and one order of all of their passes. P places for slices.

    Attributes:
        slices: [P] `SLICE`.
        devices: [P, N] in the order in which they hold shares.
        of_metaop: [M, 1 + `MOST_SLICES`] how many slices a MetaOp has, and which, in the order of its ops.
        order: [1 + 2 P] how many passes there are, and which: twice the slice, and one more where it is the
            backward pass.
    """

    slices: Records
    devices: Ints
    of_metaop: Ints
    order: Ints


def free_schedule(tables: Tables, num_places: int) -> Schedule:
    """One without slices."""
    slices = np.zeros(num_places, SLICE)
    slices["metaop"] = -1
    return Schedule(
        slices=slices,
        devices=np.zeros((num_places, len(tables.devices)), np.int64),
        of_metaop=np.zeros((len(tables.metaops) - 1, 1 + MOST_SLICES), np.int64),
        order=np.zeros(1 + 2 * num_places, np.int64),
    )


class Work(NamedTuple):
    """What is worked out of a schedule.

    Attributes:
        passes: [2 P] `PASS`.
        masks: [P, W] devices of a slice, 64 to a word.
        edge_from: [P + 1] where the edges of each slice to its takers begin; `edges`: `EDGE`.
        in_from, in_edges: [P + 1] and numbers of the edges to each slice.
        heap_s, heap: when something is ready to be sent, and which edge: twice its number, and one more where
            it is the gradients; first what is ready first (a binary heap).
        sent_s: by these items, when something can be sent. `held_behind`: one more than the item of what
            waits for the same pass, or 0.
        next_on: [N, `PASSES_AHEAD`] of each device, places of the next passes in the order, or 0.
        received: [P] bytes of a batch that a slice's devices receive for it.
        made: bytes of gradients that each op of a slice makes.
        uses: [B] `USE`.
        begins: [B + 1] whether a block begins a stretch: other slices use it than the one before.
        fragments: [F] `FRAGMENT` of all blocks in turn; `fragment_masks`: [F, W] devices that hold each, by
            the fragments of the first block of its stretch.
        held: [B, N] bytes that a device has all the time of each block of a stretch, by the first of them;
            `held_parts`: of which fragments, as bits.
        group_masks: [T, W] of a slice, the devices with the same fragments.
        table: hashes of homes; `groups`: of tensor-parallel groups, and `group_slots`: how many of these, and
            where.
        homes: [F + 1] `HOME`; the last one is that of the devices of a slice that sums over its shares.
        home_devices: [F + 1, N] of each home.
        worth_keys, worth_bytes: [W] by hashes of how homes lie on the nodes, bytes from which their sums are
            worth their latency, as far as that has been worked out.
        collective_keys, collective_bytes, collective_s: [C] by hashes of the same and of sizes, whose sums
            and gathers of which sizes take how long.
        class_of: [N] devices that are in the same homes of several devices are of one class; `class_hashes`:
            [N] of these homes; `class_table`: of classes by these hashes.
        classes: [F, 1 + 2 N] how many classes a home has, and which; and of homes on several nodes N and the
            numbers of network cards that several devices have.
        class_free_s: [2 N] when sums of a class, or over a card, are through.
        card_seen: [N] the last home that has been seen to use a card.
        sums: [F] `SUM`; `sum_order`: [F] the order in which they run.
        keys_s: what sums or passes are sorted by.
        names: [P] hashes of slices' allocations and devices.
        port_free_s: [4 N] when ways of messages are free: out and in, inside of nodes and of cards.
        taken_s: [4 N] what the messages of an edge take of each; `touched`: which these are.
        load_keys, load_counts, load_ports: the same of edges that have been worked out, by hashes of their
            ends: [R] how many ways, and [R, 4 N] which. `load_ends`, `load_s`: [R, 4 N] of those that are
            busy equally long in turn, where they end, and for how long. `load_bytes`: [R] the most that a
            device receives.
        card_slots: [N, S] of each card, slots of time with messages, 64 to a word; `home_slots`: [F, S] of
            any card of a home. `slot_s`: [1] the length of a slot.
        peers: [N, W] with which of its node each device exchanges messages, 64 to a word.
        states: [N] `STATE`.
        place: [2 P] of passes in the order.
        alone_s: [2 P] when the passes of the schedule that is changed start, if messages take no time; -1 of
            what has no slice. `is_known`: [1] whether that is so.
        firsts: [2, T] which of each type's devices two slices begin with.
        filled: [N] of the schedule that is changed, the part of each device's memory that is taken.
        often, gained, spent: by moves, how often each is drawn, what changes by it have taken off the cost of
            late, and the passes that were placed for these.
        random: [1] state of the random numbers.
    """

    passes: Records
    masks: Ints
    edge_from: Ints
    edges: Records
    in_from: Ints
    in_edges: Ints
    heap_s: Floats
    heap: Ints
    sent_s: Floats
    held_behind: Ints
    next_on: Ints
    received: Floats
    made: Floats
    uses: Records
    begins: Ints
    fragments: Records
    fragment_masks: Ints
    held: Floats
    held_parts: Ints
    group_masks: Ints
    table: Ints
    groups: Ints
    group_slots: Ints
    homes: Records
    home_devices: Ints
    worth_keys: Ints
    worth_bytes: Floats
    collective_keys: Ints
    collective_bytes: Floats
    collective_s: Floats
    class_of: Ints
    class_hashes: Ints
    class_table: Ints
    classes: Ints
    class_free_s: Floats
    card_seen: Ints
    sums: Records
    sum_order: Ints
    keys_s: Floats
    names: Ints
    port_free_s: Floats
    taken_s: Floats
    touched: Ints
    load_keys: Ints
    load_counts: Ints
    load_ports: ShortInts
    load_ends: ShortInts
    load_s: Floats
    load_bytes: Floats
    card_slots: Ints
    home_slots: Ints
    slot_s: Floats
    peers: Ints
    states: Records
    place: Ints
    alone_s: Floats
    is_known: Ints
    firsts: Ints
    filled: Floats
    often: Ints
    gained: Floats
    spent: Floats
    random: Ints


def work_for(tables: Tables, num_places: int, iteration_s: float) -> Work:
    """The places for schedules of so many slices at most, which take about so long."""
    num_devices, num_blocks = len(tables.devices), len(tables.blocks)
    words = -(-num_devices // 64)
    most_parts = int(tables.options["tp"].max())
    num_fragments = sum(most_parts if is_split else 1 for is_split in tables.blocks["is_split"])
    # A slice has an edge to the next one of its MetaOp, the last one to those that take the MetaOp's output.
    num_edges = num_places + int(np.where(tables.takers["of_every"], MOST_SLICES, 1).sum())
    ints = np.int64
    num_loads = max(LEAST_LOADS, 1 << (LOADS // (4 * num_devices)).bit_length())
    return Work(
        passes=np.zeros(2 * num_places, PASS),
        masks=np.zeros((num_places, words), ints),
        edge_from=np.zeros(num_places + 1, ints),
        edges=np.zeros(num_edges, EDGE),
        in_from=np.zeros(num_places + 1, ints),
        in_edges=np.zeros(num_edges, ints),
        heap_s=np.zeros(2 * num_edges),
        heap=np.zeros(2 * num_edges, ints),
        sent_s=np.zeros(2 * num_edges),
        held_behind=np.zeros(2 * num_edges, ints),
        next_on=np.zeros((num_devices, PASSES_AHEAD), ints),
        received=np.zeros(num_places),
        made=np.zeros(int(tables.metaops["num_ops"].max())),
        uses=np.zeros(num_blocks, USE),
        begins=np.zeros(num_blocks + 1, ints),
        fragments=np.zeros(num_fragments, FRAGMENT),
        fragment_masks=np.zeros((num_fragments, words), ints),
        held=np.zeros((num_blocks, num_devices)),
        held_parts=np.zeros((num_blocks, num_devices), ints),
        group_masks=np.zeros((most_parts, words), ints),
        table=np.zeros(1 << (2 * num_fragments).bit_length(), ints),
        groups=np.zeros(1 << (2 * num_places * num_devices).bit_length(), ints),
        group_slots=np.zeros(1 + num_places * num_devices, ints),
        homes=np.zeros(num_fragments + 1, HOME),
        home_devices=np.zeros((num_fragments + 1, num_devices), ints),
        worth_keys=np.full(WORTHS, -1, ints),
        worth_bytes=np.zeros(WORTHS),
        collective_keys=np.full(COLLECTIVES, -1, ints),
        collective_bytes=np.zeros(COLLECTIVES),
        collective_s=np.zeros(COLLECTIVES),
        class_of=np.zeros(num_devices, ints),
        class_hashes=np.zeros(num_devices, ints),
        class_table=np.zeros(1 << (2 * num_devices).bit_length(), ints),
        classes=np.zeros((num_fragments, 1 + 2 * num_devices), ints),
        class_free_s=np.zeros(2 * num_devices),
        card_seen=np.zeros(num_devices, ints),
        sums=np.zeros(num_fragments, SUM),
        sum_order=np.zeros(num_fragments, ints),
        keys_s=np.zeros(max(num_fragments, 2 * num_places)),
        names=np.zeros(num_places, ints),
        port_free_s=np.zeros(4 * num_devices),
        taken_s=np.zeros(4 * num_devices),
        touched=np.zeros(4 * num_devices, ints),
        load_keys=np.zeros(num_loads, ints),
        load_counts=np.zeros(num_loads, ints),
        load_ports=np.zeros((num_loads, 4 * num_devices), np.int32),
        load_ends=np.zeros((num_loads, 4 * num_devices), np.int32),
        load_s=np.zeros((num_loads, 4 * num_devices)),
        load_bytes=np.zeros(num_loads),
        card_slots=np.zeros((num_devices, SLOTS // 64), ints),
        home_slots=np.zeros((num_fragments, SLOTS // 64), ints),
        slot_s=np.full(1, COVERED * iteration_s / SLOTS),
        peers=np.zeros((num_devices, words), ints),
        states=np.zeros(num_devices, STATE),
        place=np.zeros(2 * num_places, ints),
        alone_s=np.zeros(2 * num_places),
        is_known=np.zeros(1, ints),
        firsts=np.zeros((2, len(tables.type_from) - 1), ints),
        filled=np.zeros(num_devices),
        often=np.array(OFTEN),
        gained=np.zeros(len(OFTEN)),
        spent=np.zeros(len(OFTEN)),
        random=np.zeros(1, ints),
    )
