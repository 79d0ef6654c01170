"""The activations that slices hand to each other, and their gradients on the way back.

It says who holds which rows of a batch (`Layout`), which slice takes whose output (`Edge`), the one order in
which all passes run, what a slice's devices receive (`Crossings`), and what devices send to turn one layout
into another (`handed_over`).

The devices of a tensor-parallel group all take the same rows. Each may be sent all of them; or each a part,
which they gather among themselves, so that no more goes between nodes than is needed there.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from spindle_cli.account.types import Edge, Pass, PlacedPlan
from spindle_cli.costs.links import all_gather_s, transfer_s
from spindle_cli.costs.memory import SliceShape, inner_bytes
from spindle_cli.costs.shares import cuts_by_share
from spindle_cli.files.cluster import Cluster
from spindle_cli.profile.types import MetaOp
from spindle_cli.units import KIB

# Receives up to this many bytes together are posted as early as their data is made (program/transfers.py):
# they cost next to no memory, and what is posted before its sender sends arrives in one message where gloo
# would else need three. Others are posted so many passes before theirs: one that takes longer than a pass is
# then through in time.
EARLY_BYTES = 64 * KIB
PASSES_AHEAD = 2


def opened_at(place: int) -> int:
    """The place, among a device's passes, of the pass from whose start on the device holds receive buffers
    for what the pass at `place` takes, where these are not small; the first pass's are there from the start.
    """
    return max(0, place - PASSES_AHEAD)


@dataclass(frozen=True)
class Layout:
    """A micro-batch of a batch of `batch_size` samples over `devices`: `dp` shares, each held whole by `tp`
    consecutive devices of the list. `sums_shares`: inside of a pass the shares sum something over all of them
    (the statistics of batch norms). `micro_batch`: (k, K), the k-th of K equal parts of the batch.
    `offsets`: dp + 1 numbers, share i has the samples from `offsets[i]` to `offsets[i + 1]` of the
    micro-batch; None: equal shares.
    """

    devices: tuple[int, ...]
    dp: int
    tp: int
    batch_size: int
    sums_shares: bool = field(default=False, compare=False)
    micro_batch: tuple[int, int] = (0, 1)
    offsets: tuple[int, ...] | None = None

    @cached_property
    def samples(self) -> tuple[int, int]:
        """[first, last) of the batch that all shares have together."""
        number, count = self.micro_batch
        return number * self.batch_size // count, (number + 1) * self.batch_size // count

    @property
    def is_shared(self) -> bool:
        """Whether a share is less than the batch."""
        return self.dp > 1 or self.micro_batch[1] > 1

    @cached_property
    def share_of(self) -> dict[int, int]:
        """Index of the batch share that each device holds."""
        return {device: position // self.tp for position, device in enumerate(self.devices)}

    def member_of(self, device: int) -> int:
        """A device's place among those that hold its share."""
        return self.devices.index(device) % self.tp

    def rows(self, share: int) -> tuple[int, int]:
        """Samples [first, last) of a share, counted in the whole batch."""
        return self.cuts[share], self.cuts[share + 1]

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """dp + 1 samples, counted in the whole batch: share i has those from `cuts[i]` to `cuts[i + 1]`."""
        first, last = self.samples
        if self.offsets is not None:
            return tuple(first + offset for offset in self.offsets)
        return tuple(first + share * (last - first) // self.dp for share in range(self.dp + 1))

    def rows_of(self, device: int) -> tuple[int, int]:
        """Samples [first, last) that a device holds."""
        return self.rows(self.share_of[device])

    def holds(self, device: int, first: int, last: int) -> bool:
        """Whether a device holds all of the samples [first, last)."""
        share = self.share_of.get(device)
        if share is None:
            return False
        own_first, own_last = self.rows(share)
        return own_first <= first and last <= own_last

    def holders(self, share: int) -> tuple[int, ...]:
        """The `tp` devices that hold a share."""
        return self.devices[share * self.tp : (share + 1) * self.tp]

    def partners(self, share: int) -> tuple[int, ...]:
        """The devices that sum something inside of each pass, where a share of it takes part in that; else
        none.
        """
        if self.sums_shares:
            return self.devices
        return self.holders(share) if self.tp > 1 else ()

    def overlaps(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """The shares that hold some of the samples [first, last): (share, first, last) of what each holds of
        them, in order.
        """
        cuts = self.cuts
        share = max(0, bisect_right(cuts, first) - 1)
        while share < self.dp:
            low, high = cuts[share], cuts[share + 1]
            if low >= last:
                return
            if low < first:
                low = first
            if high > last:
                high = last
            if low < high:
                yield share, low, high
            share += 1


class Chunk(NamedTuple):
    """Samples [first, last) that `destination` takes from `source`; where both are the same device nothing is
    sent.
    """

    destination: int
    first: int
    last: int
    source: int


def route(source: Layout, destination: Layout) -> tuple[Chunk, ...]:
    """Every chunk that turns one layout into another, ordered by destination, then by row.

    A device that holds the rows itself is its own source; otherwise the holders of a share take turns over
    the destination's devices, so that the load spreads over them. Takes time in proportion to the number of
    chunks.
    """
    return tuple(sorted(_chunks(source, destination)))


def crossing(source: Layout, destination: Layout) -> list[Chunk]:
    """The chunks of `route` that one device sends to another, in no particular order."""
    if source == destination:
        return []
    if source.tp == destination.tp == 1 and source.cuts == destination.cuts:  # share by share, as mostly
        shares = zip(destination.devices, source.cuts, source.cuts[1:], source.devices, strict=False)
        return [Chunk(*share) for share in shares if share[0] != share[3] and share[1] < share[2]]
    return [chunk for chunk in _chunks(source, destination) if chunk.source != chunk.destination]


def _chunks(source: Layout, destination: Layout) -> Iterator[Chunk]:
    for share in range(destination.dp):
        overlaps = [
            (source.holders(source_share), first, last)
            for source_share, first, last in source.overlaps(*destination.rows(share))
        ]
        for index, device in enumerate(destination.holders(share)):
            turn = (share * destination.tp + index) % source.tp
            for holders, first, last in overlaps:
                yield Chunk(device, first, last, device if device in holders else holders[turn])


def slice_layouts(plan: PlacedPlan) -> tuple[Layout, ...]:
    """Who holds which samples, of each of `plan.slices`."""
    return tuple(layout_of(slice_, plan.by_name) for slice_ in plan.slices)


def layout_of(slice_: SliceShape, by_name: Mapping[str, MetaOp]) -> Layout:
    """Who holds which samples of a slice."""
    metaop = by_name[slice_.metaop]
    # An op that sums over its shares is never split by tensor parallelism as well.
    sums_shares = bool(metaop.batch_sums) and slice_.dp > 1
    micro_batch = slice_.micro_batch, slice_.shares_of_batch // slice_.dp
    return Layout(
        slice_.devices, slice_.dp, slice_.tp, metaop.batch_size, sums_shares, micro_batch, slice_.rows
    )


def slice_edges(plan: PlacedPlan) -> tuple[Edge, ...]:
    """`edges_between` a plan's slices."""
    return edges_between(plan.slices, plan.by_name)


def edges_between(slices: Sequence[SliceShape], by_name: Mapping[str, MetaOp]) -> tuple[Edge, ...]:
    """Edges between slices of the same micro-batch, ordered by consumer, then producer.

    Inside a MetaOp from each slice to the next. Between MetaOps from the slice with the producer's last op to
    the slice with the consumer's first op; or to each of the consumer's slices, where every one of its ops
    takes that input.
    """
    indices_of: dict[tuple[str, int], list[int]] = {}
    for index, slice_ in enumerate(slices):
        indices_of.setdefault((slice_.metaop, slice_.micro_batch), []).append(index)
    for indices in indices_of.values():
        indices.sort(key=lambda index: slices[index].ops)

    edges: list[Edge] = []
    for (consumer_name, micro_batch), indices in indices_of.items():
        metaop = by_name[consumer_name]
        edges.extend(Edge(producer, consumer, inner=True) for producer, consumer in pairwise(indices))
        for name in metaop.inputs:
            consumers = indices if name in metaop.inputs_of_every_op else indices[:1]
            edges.extend(
                Edge(producer, consumer, inner=False)
                for producer in indices_of.get((name, micro_batch), ())[-1:]
                for consumer in consumers
            )
    return tuple(sorted(edges, key=lambda edge: (edge.consumer, edge.producer)))


def edge_bytes(producer: SliceShape, edge: Edge, by_name: Mapping[str, MetaOp]) -> int:
    """Bytes that cross an edge from its producer for the whole batch, one way."""
    metaop = by_name[producer.metaop]
    return inner_bytes(metaop) if edge.inner else metaop.output_bytes


def pass_order(plan: PlacedPlan, edges: Sequence[Edge]) -> tuple[Pass, ...]:
    """`order_passes` of a plan's slices."""
    return order_passes(plan.slices, edges)


def order_passes(slices: Sequence[SliceShape], edges: Sequence[Edge]) -> tuple[Pass, ...]:
    """Every slice's forward and backward pass, each behind those that it takes from, otherwise by start, then
    place in the plan. Where slices say nothing of their backward passes, all of them come in the end, in
    reverse.

    Every device runs its passes in this order, so that all devices agree on it without asking each other.
    """
    starts = [slice_.start_s for slice_ in slices]
    forward_edges = [(edge.producer, edge.consumer) for edge in edges]
    if _is_mirrored(slices):
        return _mirrored_passes(_sorted(starts, forward_edges))
    count = len(slices)
    starts += [
        slice_.start_s if slice_.backward_start_s is None else slice_.backward_start_s for slice_ in slices
    ]
    before = [(index, count + index) for index in range(count)]
    before += forward_edges
    before += [(count + consumer, count + producer) for producer, consumer in forward_edges]
    return tuple(Pass(number % count, number >= count) for number in _sorted(starts, before))


def _is_mirrored(slices: Iterable[SliceShape]) -> bool:
    """Whether slices say nothing of their backward passes, which then run in reverse behind all forward
    passes.
    """
    return all(slice_.backward_start_s is None for slice_ in slices)


def _mirrored_passes(forward: Sequence[int]) -> tuple[Pass, ...]:
    """All slices' forward passes in this order, and then their backward passes in reverse."""
    return (
        *(Pass(index, is_backward=False) for index in forward),
        *(Pass(index, is_backward=True) for index in reversed(forward)),
    )


def backward_order(order: Sequence[Pass]) -> tuple[int, ...]:
    """Indices of slices in the order in which they run backward."""
    return tuple(index for index, is_backward in order if is_backward)


def _sorted(starts: Sequence[float], before: Sequence[tuple[int, int]]) -> list[int]:
    """The numbers from 0 on, sorted by their starts, with the first of each pair in `before` ahead of the
    second.
    """
    followers: dict[int, list[int]] = {}
    missing = [0] * len(starts)
    for first, second in before:
        followers.setdefault(first, []).append(second)
        missing[second] += 1
    ready = [(start, index) for index, start in enumerate(starts) if not missing[index]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for follower in followers.get(index, ()):
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (starts[follower], follower))
    assert len(order) == len(starts), "the MetaGraph of a plan has no cycle, so its passes have none"
    return order


class Taken(NamedTuple):
    """What a slice takes in from another one: the bytes for the whole batch, the number of the other,
    whether each of its ops takes it, so that its gradient is there from the first that has run backward on,
    and whether each device has made itself what it takes.
    """

    num_bytes: int
    producer: int
    by_every_op: bool
    stays: bool


class Crossings:
    """What crosses between all slices of a plan, which are in the order in which they start.

    A share that lies on the device already is not copied.
    """

    def __init__(self, slices: Sequence[SliceShape], by_name: Mapping[str, MetaOp]) -> None:
        self._slices = slices
        self._by_name = by_name
        self._places: dict[int, dict[int, int]] = {}
        self._sources: list[list[tuple[int, int]]] = [[] for _ in slices]  # of each slice: (bytes, producer)
        self._takers: list[list[tuple[int, int]]] = [[] for _ in slices]  # of each slice: (bytes, consumer)
        self._taken: list[list[Taken]] = [[] for _ in slices]
        self.edges = edges_between(slices, by_name)
        for edge in self.edges:
            producer = slices[edge.producer]
            whole = edge_bytes(producer, edge, by_name)
            of_every_op = by_name[slices[edge.consumer].metaop].inputs_of_every_op
            by_every_op = not edge.inner and producer.metaop in of_every_op
            stays = _place_of(producer) == _place_of(slices[edge.consumer])
            self._taken[edge.consumer].append(Taken(whole, edge.producer, by_every_op, stays))
            self._sources[edge.consumer].append((whole, edge.producer))
            self._takers[edge.producer].append((whole, edge.consumer))

    def received_by(self, index: int) -> list[float] | None:
        """Bytes that each device of a slice receives for it, in the order of its devices; None: nothing."""
        return self._missing(index, self._sources[index])

    def returned_to(self, index: int) -> list[float] | None:
        """Bytes of gradients of its outputs that each device of a slice receives, and of the sum of several;
        None: nothing.
        """
        takers = self._takers[index]
        missing = self._missing(index, takers)
        if len(takers) < 2:
            return missing
        slice_, most = self._slices[index], max(num_bytes for num_bytes, _ in takers)
        cuts = cuts_by_share(slice_)
        received = missing or [0.0] * len(slice_.devices)
        return [size + most / cuts[position // slice_.tp] for position, size in enumerate(received)]

    def taken_by(self, index: int) -> list[Taken]:
        """All that a slice takes in from other slices, on whichever devices they are."""
        return self._taken[index]

    def is_handed_on(self, index: int) -> bool:
        """Whether another slice takes what a slice makes."""
        return bool(self._takers[index])

    def _missing(self, index: int, peers: Sequence[tuple[int, int]]) -> list[float] | None:
        slice_ = self._slices[index]
        cuts = cuts_by_share(slice_)
        missing: list[float] | None = None
        for num_bytes, peer in peers:
            has = self._holder(peer, slice_)
            if has is _EVERYWHERE:
                continue
            missing = missing or [0.0] * len(slice_.devices)
            for position, device in enumerate(slice_.devices):
                if not has(device, position // slice_.tp):
                    missing[position] += num_bytes / cuts[position // slice_.tp]
        return missing

    def _holder(self, peer: int, slice_: SliceShape) -> Callable[[int, int], bool]:
        """A function that tells whether a device's share of the slice `peer` includes a share of `slice_`."""
        source = self._slices[peer]
        if _place_of(source) == _place_of(slice_):
            return _EVERYWHERE
        if source.rows is not None or slice_.rows is not None:
            layouts = layout_of(source, self._by_name), layout_of(slice_, self._by_name)
            return lambda device, share: layouts[0].holds(device, *layouts[1].rows(share))
        if peer not in self._places:
            self._places[peer] = {held: place for place, held in enumerate(source.devices)}
        places = self._places[peer]

        def has(device: int, share: int) -> bool:
            place = places.get(device)
            if place is None:
                return False
            held_share = place // source.tp
            return (
                held_share * slice_.dp <= share * source.dp
                and (share + 1) * source.dp <= (held_share + 1) * slice_.dp
            )

        return has


def _place_of(slice_: SliceShape) -> object:
    return slice_.devices, slice_.dp, slice_.tp, slice_.rows


def _EVERYWHERE(_: int, __: int) -> bool:  # noqa: N802 - a constant
    return True


WHOLE = (0, 1)


class Send(NamedTuple):
    """What one device sends to another: rows of the samples [first, last), or of these a part.

    `part`: (i, n), the i-th of n equal parts of a chunk's numbers, in the order in which they are in memory;
    the last ones are smaller where n does not divide it. `num_bytes`: of it.
    """

    source: int
    destination: int
    first: int
    last: int
    part: tuple[int, int]
    num_bytes: int


class HandedOver(NamedTuple):
    """All that crosses devices over an edge one way. `gather_s`: what the pass that takes it gathers then
    takes; 0 where nothing is sent in parts.
    """

    sends: tuple[Send, ...]
    gather_s: float = 0.0


def part_of(size: int, part: tuple[int, int]) -> tuple[int, int]:
    """[first, last) of so many numbers, or bytes, that a part has."""
    number, count = part
    part_size = -(-size // count)
    return min(size, number * part_size), min(size, (number + 1) * part_size)


def handed_over(source: Layout, destination: Layout, num_bytes: int, cluster: Cluster) -> HandedOver:
    """What is sent so that a batch of `num_bytes` gets from one layout to another.

    The devices of a tensor-parallel group are sent a part each, which they gather, where messages cross nodes
    and parts are faster by the links, the gathers included. Where any device holds rows of both layouts all
    are sent the whole: that device need not be sent what it has, and has no part to gather.
    """
    chunks = sorted(crossing(source, destination))
    whole = [_send(chunk, WHOLE, num_bytes, destination) for chunk in chunks]
    node_of = cluster.node_of
    stays = all(node_of[chunk.source] == node_of[chunk.destination] for chunk in chunks)
    if destination.tp == 1 or stays or not set(source.devices).isdisjoint(destination.devices):
        return HandedOver(tuple(whole))
    places = {
        device: place
        for share in range(destination.dp)
        for place, device in enumerate(sorted(destination.holders(share)))
    }
    parts = [
        _send(chunk, (places[chunk.destination], destination.tp), num_bytes, destination) for chunk in chunks
    ]
    gather_s = _gather_s(destination, whole, cluster)
    if busiest_s(parts, cluster) + gather_s < busiest_s(whole, cluster):
        return HandedOver(tuple(parts), gather_s)
    return HandedOver(tuple(whole))


def busiest_s(sends: Iterable[Send], cluster: Cluster) -> float:
    """Seconds until the busiest port is through; a device has one each way inside its node, a network card
    one between nodes.
    """
    busy_s: defaultdict[tuple[str, object], float] = defaultdict(float)
    for send in sends:
        inside = cluster.node_of[send.source] == cluster.node_of[send.destination]
        seconds = transfer_s(send.num_bytes, cluster.link(send.source, send.destination))
        for way, device in (("out", send.source), ("in", send.destination)):
            busy_s[way, device if inside else cluster.card_of[device]] += seconds
    return max(busy_s.values(), default=0.0)


def _send(chunk: Chunk, part: tuple[int, int], num_bytes: int, layout: Layout) -> Send:
    first, last = part_of(num_bytes * (chunk.last - chunk.first) // layout.batch_size, part)
    return Send(chunk.source, chunk.destination, chunk.first, chunk.last, part, last - first)


def _gather_s(layout: Layout, whole: Sequence[Send], cluster: Cluster) -> float:
    """Seconds that the devices of a share take to gather its chunks one after another, for the slowest
    share.
    """
    gathers_s = dict.fromkeys(range(layout.dp), 0.0)
    for send in whole:
        share = layout.share_of[send.destination]
        holders = layout.holders(share)
        if send.destination == holders[0]:
            gathers_s[share] += all_gather_s(send.num_bytes, holders, cluster)
    return max(gathers_s.values())


@dataclass(frozen=True, eq=False)
class PassOrder:
    """All passes of a plan, in one order; every device runs its passes in this order.

    `mirrors`: all slices run forward, and then all backward in reverse.
    """

    passes: Sequence[Pass]
    mirrors: bool

    @classmethod
    def of(cls, slices: Sequence[SliceShape], edges: Sequence[Edge]) -> PassOrder:
        """Find the order of the passes of slices, which are in order of start, with the edges between
        them.
        """
        if _is_mirrored(slices):
            return cls(_mirrored_passes(range(len(slices))), mirrors=True)
        return cls(order_passes(slices, edges), mirrors=False)

    def by_device(self, slices: Sequence[SliceShape], num_devices: int) -> list[list[Pass]] | None:
        """The passes of each device, in its order; None where they are mirrored."""
        if self.mirrors:
            return None
        passes: list[list[Pass]] = [[] for _ in range(num_devices)]
        for pass_ in self.passes:
            for device in slices[pass_.slice_index].devices:
                passes[device].append(pass_)
        return passes

    @cached_property
    def forward_at(self) -> Sequence[int]:
        """The place of each slice's forward pass among all passes."""
        return self._places(is_backward=False)

    @cached_property
    def backward_at(self) -> Sequence[int]:
        """The place of each slice's backward pass among all passes."""
        return self._places(is_backward=True)

    def place_of(self, pass_: Pass) -> int:
        """The place of a pass among all."""
        return (self.backward_at if pass_.is_backward else self.forward_at)[pass_.slice_index]

    def _places(self, *, is_backward: bool) -> Sequence[int]:
        places = [0] * (len(self.passes) // 2)
        for number, pass_ in enumerate(self.passes):
            if pass_.is_backward == is_backward:
                places[pass_.slice_index] = number
        return places
