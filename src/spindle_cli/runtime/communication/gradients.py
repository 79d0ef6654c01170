"""The gradient pool: parameters held by several ranks share flat buckets, which are summed as soon as they
are complete. What is shared out of those that are not trained is here too, gathered as they are.

By default each rank of a group owns an equal range of every bucket (ZeRO-1, Rajbhandari et al. 2020): the sum
gives it that range of the gradients, it keeps optimizer state for that alone, and hands on the new values of
the parameters, which the others wait for only when they use them next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from spindle_cli.account.types import ParameterGroup
from spindle_cli.costs.memory import SUM_BUFFER_BYTES
from spindle_cli.runtime.backends.gather_turns import GatherTurns
from spindle_cli.runtime.backends.side_stream import SideStream
from spindle_cli.runtime.communication.bucket_maker import (
    AnyBucket,
    BucketMaker,
    RangedBucket,
    SummedBucket,
    TrainedBucket,
    lay_out,
)
from spindle_cli.runtime.communication.buckets import Bucket, Flags, ShardedBucket
from spindle_cli.runtime.communication.communicators import Communicators
from spindle_cli.runtime.communication.flat_bucket import FlatBucket, FrozenBucket
from spindle_cli.runtime.communication.gathered_bucket import GatheredBucket
from spindle_cli.runtime.communication.pass_bucket import PassBucket
from spindle_cli.runtime.communication.reached import Steady
from spindle_cli.runtime.communication.replica_groups.replica_group_bucket import ReplicaGroupBucket
from spindle_cli.runtime.measuring.timing import Passing
from spindle_cli.runtime.update.owned_ranges import OwnedRange
from spindle_cli.workload.initial.types import OwnValues


class GradientPool:
    """All trained parameters of this rank: those of other ranks too in buckets, its own alone as they are.

    `owned_ranges`: what its optimizer steps. `gather_memory`: what parameters are gathered into that devices
    share out; None: there are none.
    """

    def __init__(
        self,
        groups: tuple[ParameterGroup, ...],
        parameters: Mapping[str, nn.Parameter],
        communicators: Communicators,
        rank: int,
        *,
        stepped_whole: frozenset[str] = frozenset(),
        parts: Sequence[Sequence[ParameterGroup]] | None = None,
        shards: MutableMapping[str, OwnValues] | None = None,
        factors: torch.dtype | None = None,
        runs: Collection[int] | None = None,
        steady: Collection[str] = (),
    ) -> None:
        """`parameters`: this rank's by canonical name, which is also the groups' key for them.
        `stepped_whole`: those that every rank with them steps; of the others each steps its range. `parts`:
        the groups of each program that steps may run, which are some of all; None: one with all. `shards`: of
        parameters without memory, what this rank has; the pool takes it away. `factors`: the dtype of
        gathered factors of linear maps; None: that of their matrices. `runs`: the slices of a program that
        this rank runs, where there is one program alone. `steady`: the parameters that the same passes reach
        in every step.
        """
        device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
        reached_alike = {
            parameter: name
            for name, parameter in parameters.items()
            if name in steady and parameter.requires_grad
        }
        make = BucketMaker(
            parameters,
            communicators,
            rank,
            stepped_whole,
            shards or {},
            SideStream(device),
            factors,
            reached_alike,
        )
        shared = [group for group in groups if rank in group.devices and len(group.devices) > 1]
        self._buckets: dict[int, tuple[AnyBucket, ...]] = {group.index: make.of(group) for group in shared}
        self.gather_memory = lay_out(groups, self._buckets, runs)
        alone = _in_no_group(parameters, shared)
        self._local, self._local_names = tuple(alone.values()), tuple(alone)
        self.owned_ranges: tuple[OwnedRange, ...] = (
            *chain.from_iterable(bucket.owned_ranges for bucket in self._all()),
            *(OwnedRange(name, None, parameter) for name, parameter in alone.items()),
        )
        self._group_of = {bucket: index for index, buckets in self._buckets.items() for bucket in buckets}
        self._flags = _flags_of(shared, self._buckets, communicators, reached_alike)
        made_of = {group.blocks: self._buckets[group.index] for group in shared}
        self._parts = [_Part(part, made_of) for part in (parts or [groups])]
        self._part = self._parts[0]
        self._watch: Callable[[Passing, int, dist.Work], None] | None = None
        self._turns = GatherTurns(device)
        self._waiting: deque[SummedBucket | Callable[[], None]] = deque()
        self._under_way: deque[SummedBucket] = deque()

    def watch_with(self, watch: Callable[[Passing, int, dist.Work], None]) -> None:
        """Have `watch` called with every sum and gather that begins, and its group among all."""
        self._watch = watch

    def turn_to(self, part: int) -> None:
        """From here on the groups are those of one of the programs that steps may run."""
        if self._part is self._parts[part]:
            return
        self._part = self._parts[part]
        for item in (*self._all(), *self._flags.values()):
            if isinstance(item, Bucket | GatheredBucket | Flags):
                item.turn_to(part)

    def start_sum(self, group: int) -> None:
        """Start the sum of a parameter group, or let it wait for its turn."""
        self._waiting.extend(
            bucket for bucket in self._part.buckets[group] if isinstance(bucket, SummedBucket)
        )
        while self._under_way and self._under_way[0].is_summed():
            self._under_way.popleft().finish_sum()
        self._start_waiting()

    def start_flags(self, communicator: int) -> None:
        """Start telling the other ranks which parameters this one has reached, behind the sums that go over
        the same communicator. There are none where every rank steps all of them whole.
        """
        if communicator in self._flags:
            self.start_in_turn(partial(self._flags[communicator].start, self._part.summed))

    def start_in_turn(self, start: Callable[[], None]) -> None:
        """Call `start` when all sums have begun that the program has ahead of what it starts, as the order
        has to be that of the other ranks; one of those sums may wait for a buffer.
        """
        self._waiting.append(start)
        self._start_waiting()

    def finish_sums(self, groups: Iterable[int]) -> None:
        """Wait for the sums of some groups alone: their owned ranges' `.grad` is the whole iteration's
        gradient from here on.
        """
        for group in groups:
            for bucket in self._part.buckets[group]:
                assert isinstance(bucket, SummedBucket), "what passes sum is stepped with all else"
                assert bucket not in self._waiting, "sums that take no buffer wait for no turn"
                if bucket in self._under_way:
                    self._under_way.remove(bucket)
                    bucket.finish_sum()

    def names_of(self, part: int, groups: Iterable[int]) -> frozenset[str]:
        """The parameters that this rank steps of some groups of a program."""
        buckets = (bucket for group in groups for bucket in self._parts[part].buckets[group])
        return frozenset(
            owned.name
            for bucket in buckets
            if not isinstance(bucket, FrozenBucket)
            for owned in bucket.owned_ranges
        )

    @property
    def local_names(self) -> frozenset[str]:
        """The parameters that this rank alone has."""
        return frozenset(self._local_names)

    def finish(self) -> None:
        """Wait for all sums: from here on the owned ranges' `.grad` is the whole iteration's gradient."""
        while self._under_way:
            self._under_way.popleft().finish_sum()
            self._start_waiting()
        for flags in self._flags.values():
            flags.finish(self._part.summed)
        for bucket in self._all():
            if bucket not in self._part.summed and isinstance(bucket, Bucket | GatheredBucket):
                bucket.leave_out()
            elif bucket in self._part.summed and isinstance(bucket, RangedBucket):
                bucket.finish_gather()  # of what this rank holds, and has not run since

    def reset(self) -> None:
        """Forget all gradients, for the next iteration."""
        for parameter in self._local:
            parameter.grad = None
        for bucket in self._all():
            bucket.reset()
        for flags in self._flags.values():
            flags.reset()

    def start_gather(self, group: int) -> None:
        """Start exchanging the parameters of a group that the optimizers have stepped in ranges."""
        for bucket in reversed(self._part.buckets[group]):
            if isinstance(bucket, RangedBucket):
                self._note(Passing.GATHER, bucket, bucket.start_gather(self._turns))

    def hand_on_parameters(self) -> None:
        """Exchange all parameters that are stepped in ranges, outside of a step, and wait. Collective."""
        for group in sorted(self._buckets):
            for bucket in self._buckets[group]:
                if isinstance(bucket, ShardedBucket | ReplicaGroupBucket) or (
                    isinstance(bucket, PassBucket) and not bucket.is_fetched
                ):
                    bucket.start_gather()
                    bucket.finish_gather()

    def awaits(self, slice_index: int, op: int) -> bool:
        """Whether `await_parameters` has anything to wait for."""
        return any(bucket.is_gathering for bucket in self._part.users.get((slice_index, op), ()))

    def await_parameters(self, slice_index: int, op: int) -> None:
        """Wait until the parameters that a slice uses from this op on, but not before it, are those that the
        last step made.
        """
        for bucket in self._part.users.get((slice_index, op), ()):
            bucket.finish_gather()

    def await_all_parameters(self) -> None:
        """Wait until all parameters are those that the last step made."""
        for bucket in self._all():
            if isinstance(bucket, RangedBucket):
                bucket.finish_gather()

    def gather_gradients(self) -> None:
        """Make `.grad` of the parameters themselves whole too. Collective; after `finish`."""
        for bucket in self._all():
            if isinstance(bucket, RangedBucket):
                bucket.gather_gradients()

    @property
    def gathered(self) -> tuple[GatheredBucket, ...]:
        """The buckets of the matrices whose gradients are made of what all their ranks gather."""
        return tuple(bucket for bucket in self._all() if isinstance(bucket, GatheredBucket))

    @property
    def fetched(self) -> dict[str, tuple[OwnedRange, ...]]:
        """By name, what this rank has of the parameters that are whole in passes alone."""
        ranges_by_name: dict[str, tuple[OwnedRange, ...]] = {}
        for bucket in self._fetched_buckets():
            ranges_by_name |= dict.fromkeys(bucket.keys, ())
            for owned in bucket.own_ranges:
                ranges_by_name[owned.name] = (*ranges_by_name[owned.name], owned)
        return ranges_by_name

    @contextmanager
    def whole(self, names: Collection[str] | None = None) -> Iterator[bool]:
        """Inside, the parameters of these names, or all, are whole; collective, outside of passes. Gives
        whether this rank gives up any behind it.
        """
        taken = [
            bucket
            for bucket in self._fetched_buckets()
            if names is None or not set(names).isdisjoint(bucket.keys)
        ]
        for bucket in taken:
            bucket.start_fetch()
            bucket.finish_fetch()
        try:
            yield bool(taken)
        finally:
            for bucket in taken:
                bucket.give_up()

    def fetched_bucket(self, name: str) -> FlatBucket | None:
        """The bucket of a parameter that is whole in passes alone; None: it is always whole, or not here."""
        return next((bucket for bucket in self._fetched_buckets() if name in bucket.keys), None)

    def in_passes(self, part: int, group: int) -> tuple[PassBucket | FrozenBucket, ...]:
        """The buckets of a program's group that passes gather or sum themselves."""
        buckets = self._parts[part].buckets.get(group, ())
        return tuple(bucket for bucket in buckets if isinstance(bucket, PassBucket | FrozenBucket))

    def _fetched_buckets(self) -> Iterator[FlatBucket]:
        for buckets in self._buckets.values():
            yield from (bucket for bucket in buckets if isinstance(bucket, FlatBucket) and bucket.is_fetched)

    def _all(self) -> Iterator[TrainedBucket]:
        for buckets in self._buckets.values():
            yield from (bucket for bucket in buckets if not isinstance(bucket, FrozenBucket))

    def _start_waiting(self) -> None:
        """Start what waits, in order: all ranks start the same sums in the same order, so that whichever is
        first of all that are not through has been started by everyone or soon will be.
        """
        taken = sum(bucket.buffer_bytes for bucket in self._under_way)
        while self._waiting:
            first = self._waiting[0]
            if not isinstance(first, SummedBucket):
                first()
                self._waiting.popleft()
                continue
            taken += first.buffer_bytes
            if taken > SUM_BUFFER_BYTES and self._under_way:
                return
            self._waiting.popleft()
            self._note(Passing.SUM, first, first.start_sum())
            self._under_way.append(first)

    def _note(self, kind: Passing, bucket: AnyBucket, work: dist.Work) -> None:
        if self._watch is not None:
            self._watch(kind, self._group_of[bucket], work)


def _in_no_group(
    parameters: Mapping[str, nn.Parameter], groups: Iterable[ParameterGroup]
) -> dict[str, nn.Parameter]:
    """Those of the parameters that are trained and summed in none of these groups."""
    summed = {name for group in groups for name, _ in group.blocks}
    return {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.requires_grad and name not in summed
    }


def _flags_of(
    groups: Iterable[ParameterGroup],
    buckets: Mapping[int, Iterable[AnyBucket]],
    communicators: Communicators,
    steady: Steady,
) -> dict[int, Flags]:
    """By the communicator of their sums, what tells the ranks of groups which parameters each has reached:
    where each of them steps a range.
    """
    by_ranks: dict[tuple[int, ...], list[RangedBucket]] = {}
    for group in groups:
        if ranged := [bucket for bucket in buckets[group.index] if isinstance(bucket, RangedBucket)]:
            by_ranks.setdefault(group.devices, []).extend(ranged)
    return {
        communicators.directory.of_sum(ranks): Flags(made, communicators.summing(ranks), steady)
        for ranks, made in by_ranks.items()
    }


class _Part:
    """The buckets of one of the programs that steps may run, by its groups.

    `users`: the buckets that a slice uses from an op on. `summed`: all.
    """

    def __init__(
        self,
        groups: Iterable[ParameterGroup],
        made: Mapping[tuple[tuple[str, int], ...], tuple[AnyBucket, ...]],
    ) -> None:
        """`made`: this rank's buckets, by the blocks of their groups."""
        self.buckets: dict[int, tuple[AnyBucket, ...]] = {}
        self.users: dict[tuple[int, int], list[RangedBucket]] = {}
        for group in groups:
            buckets = made.get(group.blocks)
            if buckets is None:
                continue
            self.buckets[group.index] = buckets
            sharded = [bucket for bucket in buckets if isinstance(bucket, RangedBucket)]
            for user in zip(group.slices, group.first_ops, strict=True):
                self.users.setdefault(user, []).extend(sharded)
        self.summed = frozenset(
            bucket
            for group_buckets in self.buckets.values()
            for bucket in group_buckets
            if not isinstance(bucket, FrozenBucket)
        )
