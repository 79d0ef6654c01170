"""Who holds which parameters under a plan: blocks of them, their fragments, and what is shared.

Parameters that are gathered for the ops of passes lie in one block of memory, which is there all the time
(`places_of`). What is gathered at the same time lies apart; what is not may lie in the same place. An op's
parameters are gathered with the op before it, and go behind the last op that uses them, forward and backward.
So two units are there at the same time where, in any slice, one is first used no later than by the op behind
the last one that uses the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fractions import Fraction
from math import lcm
from typing import NamedTuple

from spindle_cli.account.groups import replica_groups_among
from spindle_cli.costs.memory import SliceShape
from spindle_cli.costs.parameters import Block, BlockUse
from spindle_cli.files.sharding import Sharding, ShardWeights
from spindle_cli.profile.types import OptimizerBytes


class Sharers(NamedTuple):
    """The devices that hold a fragment of a block: how many they are, the sum of their weights, and the
    largest weight.
    """

    number: int
    weight: int
    largest: int


class Holders:
    """How many devices hold each fragment of each block of parameters."""

    def __init__(
        self,
        slices: Sequence[SliceShape],
        blocks: Iterable[tuple[int, Block, bool]],
        weights: ShardWeights = (),
    ) -> None:
        """`blocks`: (slice, block that it uses, whether all of it although others split it) of all, or of one
        of each kind. `weights`: of each device.
        """
        self._slices = slices
        self._weights = weights
        users: dict[Block, dict[int, int]] = {}
        for index, block, is_whole in blocks:
            parts = slices[index].tp if block[2] and not is_whole else 1
            parts_of_slice = users.setdefault(block, {})
            parts_of_slice[index] = min(parts, parts_of_slice.get(index, parts))
        self._users = {block: tuple(parts_of_slice.items()) for block, parts_of_slice in users.items()}
        self._of: dict[Block, tuple[Sharers, ...]] = {}
        self._counts: dict[tuple[tuple[tuple[int, int], ...], int], tuple[Sharers, ...]] = {}

    def of(self, block: Block) -> tuple[Sharers, ...]:
        """The devices that hold each of the finest common fragments of the block, which are equal."""
        if block not in self._of:
            users = self._users[block]
            self._of[block] = self._among(users, lcm(*(parts for _, parts in users)))
        return self._of[block]

    def _among(self, users: tuple[tuple[int, int], ...], count: int) -> tuple[Sharers, ...]:
        if (users, count) not in self._counts:
            slices = [(self._slices[index], parts) for index, parts in users]
            self._counts[users, count] = tuple(
                self._sharers(_with_fragment(i, count, slices)) for i in range(count)
            )
        return self._counts[users, count]

    def in_replica_group(self, block: Block, slice_index: int) -> tuple[Sharers, ...]:
        """Like `of`, but only among the devices that run those slices of the block that the devices of the
        slice `slice_index` run.
        """
        devices = frozenset(self._slices[slice_index].devices)
        users = [user for user in self._users[block] if devices.issuperset(self._slices[user[0]].devices)]
        return self._among(tuple(users), lcm(*(parts for _, parts in self._users[block])))

    def num_replica_groups(self, block: Block) -> int:
        """How many sets of devices there are that run the same of the slices that use a block, and have none
        in common; 0 where there are others, or one has no two devices.
        """
        return len(
            replica_groups_among([frozenset(self._slices[index].devices) for index, _ in self._users[block]])
        )

    def are_paired(self, block: Block) -> bool:
        """Whether it is shared out by two replica groups in the same ranges, so that each device exchanges
        all with one of the other replica group.
        """
        users = self._users[block]
        count = lcm(*(parts for _, parts in users))
        replica_groups: dict[frozenset[int], list[tuple[SliceShape, int]]] = {}
        for index, parts in users:
            slice_ = self._slices[index]
            replica_groups.setdefault(frozenset(slice_.devices), []).append((slice_, parts))
        ranges = [
            [self._ranges(_with_fragment(i, count, slices)) for i in range(count)]
            for slices in replica_groups.values()
        ]
        return len(ranges) == 2 and ranges[0] == ranges[1]

    def _ranges(self, devices: Collection[int]) -> list[Fraction]:
        """The parts of what they share out, by device."""
        weights = [self._weights[device] if self._weights else 1 for device in sorted(devices)]
        return [Fraction(weight, sum(weights)) for weight in weights]

    def _sharers(self, devices: Collection[int]) -> Sharers:
        if not self._weights:
            return Sharers(len(devices), len(devices), 1)
        weights = [self._weights[device] for device in devices]
        return Sharers(len(weights), sum(weights), max(weights))


def _with_fragment(index: int, count: int, slices: Iterable[tuple[SliceShape, int]]) -> set[int]:
    """The devices of slices, each in so many parts, that hold the `index`-th of `count` fragments."""
    return set().union(*(slice_.devices[index * parts // count :: parts] for slice_, parts in slices))


@dataclass(slots=True)
class Held:
    """A block of parameters on one device, as all blocks of its kind are there (`device/parts.py`).

    Attributes:
        num_bytes, trained_bytes: of the whole block.
        count: how many blocks there are of its kind.
        last_part: of the parts of slices that use it, the one that runs backward last; negative where another
            plan's alone do.
        is_whole: whether the device has all of it.
        shards: of it that the device has otherwise, as intervals of [0, 1].
        share: of the block, what the device has: the length of the union of its shards.
        owned: share of the block whose optimizer state the device has where devices share it.
        kept: share whose values and gradients it keeps where these are shared out, as part of a replica
            group.
        num_replica_groups: that share it out among themselves.
        are_paired: whether these are two with the same ranges.
        padded: how many times as long as its gradients the buffer of their sum is at most: as if all that
            share it had the largest range.
        summed: share whose gradients it sums with other devices.
        is_due: whether the step uses it, on any device.
        least_tp: of the slices that use it.
        num_fragments: equal ones that the devices hold in which they have parts in common.
        optimizer: what its optimizer keeps of it, where that is not as of all.
        sharding: what the devices that hold it share out.
    """

    num_bytes: float
    trained_bytes: float
    count: int
    last_part: int
    optimizer: OptimizerBytes | None = None
    sharding: Sharding = Sharding.OPTIMIZER
    is_whole: bool = False
    shards: set[tuple[float, float]] = field(default_factory=set)
    share: float = 0.0
    owned: float = 0.0
    kept: float = 0.0
    num_replica_groups: int = 1
    are_paired: bool = False
    padded: float = 1.0
    summed: float = 0.0
    is_due: bool = True
    num_fragments: int = 1
    least_tp: int = 1

    @property
    def own_bytes(self) -> float:
        """Trained bytes that no other device has: their gradients are made anew in every iteration."""
        if not self.is_due:
            return 0.0
        return (self.share - self.summed) * self.trained_bytes

    def updated_bytes(self, *, sharded: bool) -> float:
        """Trained bytes that the device's own optimizer steps; `sharded`: devices share what they can."""
        if not self.is_due:
            return 0.0
        return self.trained_bytes * (
            self.share * self._whole + (self.owned if sharded else self.share) * (1 - self._whole)
        )

    @property
    def _whole(self) -> float:
        """The share of what is trained that each device steps whole."""
        if self.sharding is Sharding.NONE:
            return 1.0
        return 0.0 if self.optimizer is None else self.optimizer.whole_share

    @property
    def is_by_pass(self) -> bool:
        """Whether several devices keep a range of it each, so that passes gather or sum it."""
        return self.sharding.is_by_pass and self.summed > 0

    @property
    def scattered_bytes(self) -> float:
        """Trained bytes whose gradients are whole only while a backward pass makes them."""
        return self.share * self.trained_bytes * (1 - self._whole) if self.is_by_pass else 0.0

    @property
    def gathered_units(self) -> tuple[float, ...]:
        """Bytes that are gathered while ops use them, in units: those that are trained, and the others."""
        if not (self.is_by_pass and self.sharding.is_fetched):
            return ()
        units = self.scattered_bytes, self.share * self.frozen_bytes
        return tuple(num_bytes for num_bytes in units if num_bytes)

    @property
    def frozen_bytes(self) -> float:
        """Bytes of the whole block that are not trained."""
        return self.num_bytes - self.trained_bytes

    @property
    def kept_bytes(self) -> float:
        """Gathered bytes that stay from a slice's forward pass to its backward pass."""
        return sum(self.gathered_units) if self.sharding is Sharding.KEPT else 0.0

    @property
    def lasting_bytes(self) -> float:
        """Bytes of parameters that are there all the time: of what is gathered, the device's own range."""
        if not self.gathered_units:
            return self.share * self.num_bytes
        ranged = self.trained_bytes * (1 - self._whole) + self.frozen_bytes
        return self.share * self.num_bytes - (self.share - self.kept) * ranged

    @property
    def lasting_gradient_bytes(self) -> float:
        """Trained bytes whose gradients are there all the time: of what several devices hold."""
        if not self.is_by_pass:
            return self.summed * self.trained_bytes
        return self.trained_bytes * (self.share * self._whole + self.kept * (1 - self._whole))

    @property
    def summed_bytes(self) -> float:
        """Trained bytes of whose gradients' sum, behind the last backward pass that adds to them, devices get
        a range each, as a buffer takes them.
        """
        if self.sharding is Sharding.NONE:
            return 0.0
        if (
            self.is_by_pass
        ):  # replica groups send of their range, and get for it: what is one part goes as it is
            return self._exchanged_bytes * (1 if self.are_paired else 2)
        return self.padded * self.summed * self.trained_bytes

    @property
    def handed_on_bytes(self) -> float:
        """Bytes of parameters in buffers while replica groups hand on what they have stepped, from the update
        until the first pass that gathers them; none where all goes from where it is to where it belongs.
        """
        return 2 * self._exchanged_bytes if self.is_by_pass and not self.are_paired else 0.0

    @property
    def _exchanged_bytes(self) -> float:
        """Bytes that the device, as one of a replica group, sends to other replica groups or gets from
        them.
        """
        others = (self.num_replica_groups - 1) / self.num_replica_groups
        return others * self.kept * self.trained_bytes * (1 - self._whole)

    def state_bytes(self, usual: float, *, sharded: bool) -> float:
        """Bytes that the optimizer keeps of it on the device. `usual`: for each trained byte of what has no
        settings of its own; `sharded`: as above.
        """
        shared = self.owned if sharded and self.sharding is not Sharding.NONE else self.share
        if self.optimizer is None:
            return self.trained_bytes * (shared * usual)
        optimizer = self.optimizer
        return self.trained_bytes * (
            shared * optimizer.state_per_param + self.share * optimizer.whole_state_per_param
        )

    @property
    def divided(self) -> tuple[object, ...]:
        """All that follows from which shards the device has, and who has them besides."""
        shares = self.share, self.kept, self.padded, self.summed
        return self.sharding, self.num_replica_groups, self.are_paired, self.num_fragments, *shares

    def divide(
        self,
        sharers: Sequence[Sharers],
        weight: int = 1,
        num_replica_groups: int = 1,
        *,
        are_paired: bool = False,
    ) -> None:
        """Set the shares from the devices that hold each of the block's equal fragments; `weight`: this one's
        among them. `num_replica_groups`: how often they are there, where these are those of one of several
        replica groups; `are_paired`: see above.
        """
        held = (
            sharers
            if self.is_whole
            else [
                of_fragment
                for fragment, of_fragment in enumerate(sharers)
                if any(first <= (fragment + 0.5) / len(sharers) < last for first, last in self.shards)
            ]
        )
        self.num_fragments = len(sharers)
        self.share = len(held) / len(sharers)
        self.kept = sum(weight / of_fragment.weight for of_fragment in held) / len(sharers)
        self.num_replica_groups, self.are_paired = num_replica_groups, are_paired
        self.owned = self.kept / num_replica_groups
        self.padded = max(
            (of_fragment.number * of_fragment.largest / of_fragment.weight for of_fragment in held),
            default=1.0,
        )
        self.summed = sum(of_fragment.number > 1 for of_fragment in held) / len(sharers)


@dataclass(frozen=True)
class SharedOut:
    """What a device holds of shared-out gradients beside its own ranges, while a slice runs backward: bytes
    by op, first to last.

    A whole gradient is there from the first op that adds to it in the backward pass to the last, and then
    scattered: at most one scatter is under way, until the next one starts or the pass ends. Parameters that
    are gathered have a place all the time (`places_of`).

    Attributes:
        gradients: whole gradients, those under way included; in bytes of parameters.
        under_way: of these, those that are being scattered.
        left: those whose scatter ends the backward pass.
    """

    gradients: Sequence[float]
    under_way: Sequence[float]
    left: float


def shared_out(uses: Sequence[Sequence[BlockUse]], held: Mapping[Block, Held]) -> SharedOut | None:
    """Work out the shared-out gradients of a slice whose ops use these blocks, on a device that holds them as
    `held` says; None: it shares out none.
    """
    spans: dict[Block, tuple[int, int]] = {}
    for position, of_op in enumerate(uses):
        for use in of_op:
            if held[use.block].is_by_pass:
                first, _ = spans.get(use.block, (position, position))
                spans[use.block] = first, position
    if not spans:
        return None
    made, complete = ([0.0] * len(uses) for _ in range(2))
    for block, (first, last) in spans.items():
        there = held[block]
        for position in range(first, last + 1):
            made[position] += there.scattered_bytes
        complete[first] += there.scattered_bytes
    under_way = [0.0] * len(uses)
    scattered = 0.0
    for position in range(len(uses) - 1, -1, -1):
        under_way[position] = scattered
        scattered = complete[position] or scattered
    gradients = [sum(both) for both in zip(made, under_way, strict=True)]
    return SharedOut(gradients, under_way, scattered)


class Span(NamedTuple):
    """The ops of a slice from the first that uses the parameters of a unit to the last."""

    slice_index: int
    first: int
    last: int


@dataclass(frozen=True)
class GatherUnit:
    """Parameters that are gathered together (an FSDP unit); `spans`: one for each slice that uses them."""

    num_bytes: float
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Places:
    """Where in the memory that parameters are gathered into each unit begins, and how many bytes all take."""

    offsets: tuple[float, ...]
    num_bytes: float


def places_of(units: Sequence[GatherUnit]) -> Places:
    """Give each unit its place in memory, as far to the front as the units leave room that are gathered at
    the same time and have their place already.

    Two orders are tried, and the one kept that takes less memory: the largest unit first (of equal ones the
    first that is used), and the order in which units are used. Where both the first and the last of many
    layers are larger than the others, the largest first leave no room for the layer between two that lie
    apart.
    """
    conflicts: list[set[int]] = [set() for _ in units]
    for first, second in _there_at_once(units):
        conflicts[first].add(second)
        conflicts[second].add(first)
    by_use = sorted(range(len(units)), key=lambda number: units[number].spans[:1])
    by_size = sorted(by_use, key=lambda number: -units[number].num_bytes)
    return min(
        (_placed(units, conflicts, order) for order in (by_size, by_use)), key=lambda places: places.num_bytes
    )


def _placed(units: Sequence[GatherUnit], conflicts: Sequence[Set[int]], order: Sequence[int]) -> Places:
    """Give units their places in this order. `conflicts`: of each unit, those gathered at the same time."""
    offsets = [0.0] * len(units)
    placed: set[int] = set()
    for number in order:
        taken = sorted(
            (offsets[neighbour], units[neighbour].num_bytes) for neighbour in conflicts[number] & placed
        )
        for begin, num_bytes in taken:
            if begin - offsets[number] >= units[number].num_bytes:
                break
            offsets[number] = max(offsets[number], begin + num_bytes)
        placed.add(number)
    ends = [begin + unit.num_bytes for begin, unit in zip(offsets, units, strict=True)]
    return Places(tuple(offsets), max(ends, default=0.0))


def _there_at_once(units: Sequence[GatherUnit]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of units that are gathered at the same time, some of them twice."""
    spans = sorted((span, number) for number, unit in enumerate(units) for span in unit.spans)
    still: list[tuple[Span, int]] = []
    for span, number in spans:
        still = [
            (before, earlier)
            for before, earlier in still
            if before.slice_index == span.slice_index and before.last + 1 >= span.first
        ]
        yield from ((number, earlier) for _, earlier in still if earlier != number)
        still.append((span, number))
