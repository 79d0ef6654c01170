"""Collectives over flat tensors that ranks own equal ranges of: reduce-scatter and all-gather, in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from spindle_cli.runtime.communication.transfers import wait_for

if TYPE_CHECKING:
    from torch import Tensor

# torch 2.13 has given these new names, and warns of the old ones.
_reduce_scatter: Callable[..., dist.Work] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather: Callable[..., dist.Work] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


_AS_LONG_AS_THE_GROUP = timedelta(0)


@dataclass(frozen=True)
class Members:
    """The ranks that hold some parameters, as one of them sees them.

    Attributes:
        count: how many there are.
        position: of this rank among them, ascending.
        communicator: of them; None is that of all ranks.
    """

    count: int
    position: int
    communicator: dist.ProcessGroup | None

    @classmethod
    def of(cls, ranks: tuple[int, ...], rank: int, communicator: dist.ProcessGroup | None) -> Members:
        """`ranks`: theirs; `rank`: this one's."""
        return cls(len(ranks), sorted(ranks).index(rank), communicator)

    def range_in(self, flat: Tensor) -> Tensor:
        """What this rank owns of a flat tensor of `count` equal ranges."""
        return flat.view(self.count, -1)[self.position]


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
    if dist.get_backend(members.communicator) == "gloo":
        return _Exchange(flat, members)
    return _Native(flat, members)


def scatter_buffer_bytes(flat: Tensor, members: Members) -> int:
    """Bytes that `start_scatter` takes until its scatter is finished."""
    return flat.nbytes if dist.get_backend(members.communicator) == "gloo" else 0


def start_gather(flat: Tensor, members: Members) -> dist.Work:
    """Start giving every rank the ranges of all the others."""
    if dist.get_backend(members.communicator) == "gloo":
        return _FromEach(flat, members)
    work: dist.Work = _all_gather(flat, members.range_in(flat), group=members.communicator, async_op=True)
    return work


class _FromEach(dist.Work):
    """A gather to which each rank sends its range in a broadcast of its own.

    What gloo calls an all-gather makes a copy of all that it gathers, and copies from there: three times as
    much processor time for 52 MiB on four processes of one machine, and as long for 256 KiB (2 cores, no
    GPU, 2026-11-23).
    """

    def __init__(self, flat: Tensor, members: Members) -> None:
        super().__init__()
        self._works: list[dist.Work] = [
            dist.broadcast(own, group=members.communicator, group_src=position, async_op=True)
            for position, own in enumerate(flat.view(members.count, -1))
        ]

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, timeout: timedelta = _AS_LONG_AS_THE_GROUP) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.collect_all([work.get_future() for work in self._works])


class _Native:
    """The library's reduce-scatter, from the flat tensor into its own range."""

    def __init__(self, flat: Tensor, members: Members) -> None:
        self.work = _reduce_scatter(members.range_in(flat), flat, group=members.communicator, async_op=True)

    def is_done(self) -> bool:
        return self.work.is_completed()

    def finish(self) -> None:
        wait_for(self.work)


class _Exchange:
    """Every rank hands each other one its part of that one's range; everyone adds up what it got, in the
    order of the ranks.

    What gloo calls a reduce-scatter is an all-reduce of a copy: twice the bytes, and as much memory as here.
    """

    def __init__(self, flat: Tensor, members: Members) -> None:
        self._own = members.range_in(flat)
        self._parts = torch.empty_like(flat).view(members.count, -1)
        work = dist.all_to_all_single(self._parts, flat, group=members.communicator, async_op=True)
        assert work is not None, "this rank is a member"
        self.work: dist.Work = work

    def is_done(self) -> bool:
        done: bool = self.work.is_completed()
        return done

    def finish(self) -> None:
        wait_for(self.work)
        add_up(self._parts, self._own)


def add_up(parts: Tensor, out: Tensor) -> None:
    """Sum over the first dimension, in its order; rounded once where the dtype has less than 32 bits."""
    first, second, *others = parts
    if others and parts.itemsize < 4:
        torch.sum(parts, dim=0, out=out)
        return
    torch.add(first, second, out=out)  # 5 times as fast as `torch.sum` over two rows
    for other in others:
        out.add_(other)
