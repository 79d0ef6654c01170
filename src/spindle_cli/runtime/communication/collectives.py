"""Collectives over flat tensors that ranks own ranges of: reduce-scatter and all-gather, in place.

Libraries have them for equal ranges. Unequal ones are padded to the largest and go around in a copy; or each
range goes by itself, one call for all, which moves no more than there is and waits longer. Over many nodes a
sum of everything may be faster than either. Which way a group of parameters takes is known beforehand
(`account/groups.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from spindle_cli.account.types import ParameterGroup
from spindle_cli.operators.tensor_group import as_summed
from spindle_cli.runtime.backends.gather_turns import GatherTurns
from spindle_cli.runtime.backends.side_stream import SideStream
from spindle_cli.runtime.communication.transfers import wait_for

if TYPE_CHECKING:
    from torch import Tensor

# torch 2.13 has given these new names, and warns of the old ones.
_reduce_scatter: Callable[..., dist.Work] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather: Callable[..., dist.Work] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


_AS_LONG_AS_THE_GROUP = timedelta(0)
# Of messages that make up a gather; others over the same communicator have tags of their own.
_GATHER_TAG = 1 << 20


@dataclass(frozen=True)
class Levels:
    """How a rank takes part in what goes inside of nodes first, and then between them.

    Of n nodes the i-th device's ranges lie one behind the other, for each node one: what it has of a scatter
    inside of its node.

    Attributes:
        inside: the ranks of this rank's node. `across`: those of the same place in all nodes.
        side: where the second of two collectives waits for the first.
    """

    inside: Members
    across: Members
    side: SideStream

    @property
    def position(self) -> int:
        """The position of this rank's range among all."""
        return self.inside.position * self.across.count + self.across.position


@dataclass(frozen=True)
class Members:
    """The ranks that hold some parameters, as one of them sees them.

    Attributes:
        count: how many there are.
        position: of this rank's range: of this rank among them, ascending, but where there are levels.
        communicator: of them; None is that of all ranks.
        weights: what their ranges of a flat tensor are in proportion to; none: they are equal.
        cuts: of unequal ranges, where each begins in the flat tensor, and its end.
        pads_sum, pads_gather: whether unequal ranges are padded to be summed, and to be gathered.
        sums_whole, gathers_whole: whether all of it is summed over all ranks instead, for a gather with zeros
            in place of the others' ranges.
        levels: by which what is not summed whole is scattered and gathered; None: all at once.
    """

    count: int
    position: int
    communicator: dist.ProcessGroup | None
    weights: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()
    pads_sum: bool = False
    pads_gather: bool = False
    sums_whole: bool = False
    gathers_whole: bool = False
    levels: Levels | None = None

    @classmethod
    def of(
        cls,
        ranks: tuple[int, ...],
        rank: int,
        communicator: dist.ProcessGroup | None,
        group: ParameterGroup | None = None,
    ) -> Members:
        """`ranks`: theirs, ascending; `rank`: this one's; `group`: what they share out, if anything."""
        position = sorted(ranks).index(rank)
        if group is None:
            return cls(len(ranks), position, communicator)
        return cls(
            len(ranks),
            position,
            communicator,
            group.weights,
            pads_sum=group.pads_sum,
            pads_gather=group.pads_gather,
            sums_whole=group.sums_whole,
            gathers_whole=group.gathers_whole,
        )

    def with_cuts(self, cuts: tuple[int, ...]) -> Members:
        """These members for a flat tensor that is cut there."""
        return replace(self, cuts=cuts) if cuts else self

    def with_levels(self, levels: Levels) -> Members:
        """These members where collectives go in levels."""
        return replace(self, position=levels.position, levels=levels)

    def ranges_in(self, flat: Tensor) -> tuple[Tensor, ...]:
        """What each rank owns of a flat tensor."""
        if self.cuts:
            return tuple(flat[first:last] for first, last in pairwise(self.cuts))
        return tuple(flat.view(self.count, -1))

    def range_in(self, flat: Tensor) -> Tensor:
        """What this rank owns of a flat tensor."""
        if self.cuts:
            return flat[self.cuts[self.position] : self.cuts[self.position + 1]]
        return flat.view(self.count, -1)[self.position]

    @property
    def largest(self) -> int:
        """Elements of the largest of unequal ranges."""
        return max(last - first for first, last in pairwise(self.cuts))

    @property
    def evenly(self) -> Members:
        """These members for a flat tensor of equal ranges."""
        return Members(self.count, self.position, self.communicator)


class Scatter(Protocol):
    """A reduce-scatter under way: `work` is what the library knows of it."""

    work: dist.Work

    def is_done(self) -> bool:
        """Whether `finish` would not wait."""

    def finish(self) -> None:
        """Wait; from here on this rank's range of the flat tensor is the sum, and the rest means nothing.

        Raises:
            PeerLostError: another rank is gone, or did not answer within the timeout.
        """


def start_scatter(flat: Tensor, members: Members) -> Scatter:
    """Start summing a flat tensor, so that each rank gets the sum of its own range."""
    if members.sums_whole:
        return _Started(_start_sum(flat, members))
    if members.levels is not None:
        return _InLevels(flat, members.levels)
    if members.cuts and members.pads_sum:
        return _PaddedSum(flat, members)
    if dist.get_backend(members.communicator) == "gloo":
        return _Exchange(flat, members)
    return _Started(_start_native_scatter(flat, members))


def scatter_buffer_bytes(flat: Tensor, members: Members) -> int:
    """Bytes that `start_scatter` takes until its scatter is finished."""
    if members.sums_whole:
        return 0
    if members.levels is not None:
        return scatter_buffer_bytes(flat, members.levels.inside)
    is_gloo = dist.get_backend(members.communicator) == "gloo"
    if not members.cuts:
        return flat.nbytes if is_gloo else 0
    if members.pads_sum:
        return (2 if is_gloo else 1) * members.count * members.largest * flat.itemsize
    return members.count * members.range_in(flat).nbytes if is_gloo else 0


def start_gather(flat: Tensor, members: Members, turns: GatherTurns | None = None) -> dist.Work:
    """Start giving every rank the ranges of all the others; where `turns` are taken, behind what has taken
    the last one.
    """
    if members.cuts and members.pads_gather:
        return _PaddedGather(flat, members, turns)
    start = partial(_start_gather, flat, members)
    return start() if turns is None else turns.take(start)


def _start_gather(flat: Tensor, members: Members) -> dist.Work:
    if members.gathers_whole:
        for position, part in enumerate(members.ranges_in(flat)):
            if position != members.position:
                part.zero_()
        return _start_sum(flat, members)
    if members.levels is not None:
        inside, across = members.levels.inside, members.levels.across
        _start_gather(inside.range_in(flat), across).wait()  # on a GPU of the stream, not of the host
        return _start_gather(flat, inside)
    if dist.get_backend(members.communicator) == "gloo":
        return _ToEachOther(flat, members)
    if members.cuts:  # of tensors of unequal sizes NCCL makes a broadcast each, in one call
        parts = list(members.ranges_in(flat))
        grouped: dist.Work = dist.all_gather(
            parts, parts[members.position], group=members.communicator, async_op=True
        )
        return grouped
    work: dist.Work = _all_gather(flat, members.range_in(flat), group=members.communicator, async_op=True)
    return work


def _start_native_scatter(flat: Tensor, members: Members) -> dist.Work:
    """The library's reduce-scatter, from the flat tensor into this rank's range of it."""
    local = as_summed(members.range_in(flat))
    if members.cuts:  # of tensors of unequal sizes NCCL makes a reduction each, in one call
        parts = [as_summed(part) for part in members.ranges_in(flat)]
        grouped: dist.Work = dist.reduce_scatter(local, parts, group=members.communicator, async_op=True)
        return grouped
    return _reduce_scatter(local, as_summed(flat), group=members.communicator, async_op=True)


def _start_sum(flat: Tensor, members: Members) -> dist.Work:
    work: dist.Work = dist.all_reduce(flat, group=members.communicator, async_op=True)
    return work


class _ToEachOther(dist.Work):
    """A gather over gloo in which each rank sends its range to each other rank, and takes theirs.

    gloo's own ways cost more: an all-gather makes a copy of all that it gathers, and copies from there, and a
    broadcast of each range leaves a link half idle, as ranges go one way after the other (gathering 3 MiB
    over two hosts with 1 Gbit/s between them takes 17 ms so, 16 ms by an all-gather, 25 ms by broadcasts;
    `scripts/bench_collectives.py --hosts 1000 --mib 3`).
    """

    def __init__(self, flat: Tensor, members: Members) -> None:
        super().__init__()
        ranges, position, count = members.ranges_in(flat), members.position, members.count
        group = members.communicator
        local = ranges[position]
        self._messages: list[dist.Work] = []
        for step in range(1, count):
            source, destination = (position - step) % count, (position + step) % count
            if ranges[source].numel():
                self._add(dist.irecv(ranges[source], group=group, group_src=source, tag=_GATHER_TAG))
            if local.numel():
                self._add(dist.isend(local, group=group, group_dst=destination, tag=_GATHER_TAG))
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None

    def _add(self, message: dist.Work | None) -> None:
        assert message is not None, "both ends are members"
        self._messages.append(message)

    def is_completed(self) -> bool:
        return not self._messages or self.get_future().done()

    def wait(self, timeout: timedelta = _AS_LONG_AS_THE_GROUP) -> bool:
        with self._lock:  # gloo waits for ever for a message that was waited for before
            while self._messages:
                self._messages[-1].wait(timeout)
                self._messages.pop()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return what is done when the gather is. gloo tells of a message's end only those who wait for it,
        so a thread does.
        """
        if self._future is None:
            self._future = torch.futures.Future()
            threading.Thread(target=self._wait_for, args=(self._future,), daemon=True).start()
        return self._future

    def _wait_for(self, future: torch.futures.Future[Any]) -> None:
        try:
            self.wait()
        except RuntimeError as error:  # whoever waits for the gather gets it again
            future.set_exception(error)
        else:
            future.set_result(None)


class _Started:
    """A collective of the library's own, behind which this rank's range is the sum."""

    def __init__(self, work: dist.Work) -> None:
        self.work = work

    def is_done(self) -> bool:
        done: bool = self.work.is_completed()
        return done

    def finish(self) -> None:
        wait_for(self.work)


class _InLevels:
    """A reduce-scatter inside of each node, and then one of its parts between the nodes."""

    def __init__(self, flat: Tensor, levels: Levels) -> None:
        with levels.side.behind_compute():
            start_scatter(flat, levels.inside).finish()  # on a GPU the stream waits for it, not the host
            self._across = start_scatter(levels.inside.range_in(flat), levels.across)
        self.work = self._across.work

    def is_done(self) -> bool:
        return self._across.is_done()

    def finish(self) -> None:
        self._across.finish()


class _Exchange:
    """Every rank hands each other one its part of that one's range; everyone adds up what it got, in the
    order of the ranks.

    What gloo calls a reduce-scatter is an all-reduce of a copy: twice the bytes, and as much memory as here.
    """

    def __init__(self, flat: Tensor, members: Members) -> None:
        self._range = members.range_in(flat)
        if members.cuts:
            sizes = [last - first for first, last in pairwise(members.cuts)]
            self._parts = flat.new_empty(members.count, self._range.numel())
            work = dist.all_to_all_single(
                self._parts.view(-1),
                flat,
                [self._range.numel()] * members.count,
                sizes,
                group=members.communicator,
                async_op=True,
            )
        else:
            self._parts = torch.empty_like(flat).view(members.count, -1)
            work = dist.all_to_all_single(self._parts, flat, group=members.communicator, async_op=True)
        assert work is not None, "this rank is a member"
        self.work: dist.Work = work

    def is_done(self) -> bool:
        done: bool = self.work.is_completed()
        return done

    def finish(self) -> None:
        wait_for(self.work)
        add_up(self._parts, self._range)


class _PaddedSum:
    """A reduce-scatter of a copy in which each rank's range is as long as the largest."""

    def __init__(self, flat: Tensor, members: Members) -> None:
        self._range = members.range_in(flat)
        self._padded = flat.new_zeros(members.count, members.largest)
        for row, part in zip(self._padded, members.ranges_in(flat), strict=True):
            row[: part.numel()].copy_(part)
        self._position = members.position
        self._scatter = start_scatter(self._padded.view(-1), members.evenly)
        self.work = self._scatter.work

    def is_done(self) -> bool:
        return self._scatter.is_done()

    def finish(self) -> None:
        self._scatter.finish()
        self._range.copy_(self._padded[self._position, : self._range.numel()])


class _PaddedGather(dist.Work):
    """A gather into a tensor in which each rank's range is as long as the largest, and a copy out of it."""

    def __init__(self, flat: Tensor, members: Members, turns: GatherTurns | None) -> None:
        super().__init__()
        self._parts = members.ranges_in(flat)
        self._padded = flat.new_zeros(members.count, members.largest)
        local = self._parts[members.position]
        self._padded[members.position, : local.numel()].copy_(local)
        self._work = start_gather(self._padded.view(-1), members.evenly, turns)

    def is_completed(self) -> bool:
        done: bool = self._work.is_completed()
        return done

    def wait(self, timeout: timedelta = _AS_LONG_AS_THE_GROUP) -> bool:
        self._work.wait(timeout)
        for part, row in zip(self._parts, self._padded, strict=True):
            part.copy_(row[: part.numel()])
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._work.get_future()


def add_up(parts: Tensor, out: Tensor) -> None:
    """Sum over the first dimension, in its order; rounded once where the dtype has less than 32 bits."""
    first, second, *rest = parts
    if rest and parts.itemsize < 4:
        torch.sum(parts, dim=0, out=out)
        return
    torch.add(first, second, out=out)  # 5 times as fast as `torch.sum` over two rows
    for part in rest:
        out.add_(part)
