"""A program's communicators as process groups, made in the same order on every rank.

Each costs device memory and time to make; `program/transfers.py` says which there are, and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from spindle_cli.account.activations import Layout
from spindle_cli.account.types import Purpose
from spindle_cli.program.transfers import Directory
from spindle_cli.program.types import Communicator, Program


class Communicators:
    """Process groups by their communicator's index. That of everyone is torch's default group."""

    def __init__(self, communicators: Iterable[Communicator], timeout_s: float) -> None:
        """Make them. Collective: every rank calls this with the same communicators."""
        self.all = tuple(communicators)
        self.directory = Directory(self.all)
        # None stands for torch's default group.
        self._groups: dict[int, dist.ProcessGroup | None] = {}
        for communicator in self.all:
            self._groups[communicator.index] = (
                None
                if communicator.purpose is Purpose.EVERYONE
                else dist.new_group(list(communicator.ranks), timeout=timedelta(seconds=timeout_s))
            )

    def of(self, index: int) -> dist.ProcessGroup | None:
        """A communicator as torch.distributed's functions take it (None: all ranks)."""
        return self._groups[index]

    def summing(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the process group over which these ranks, ascending, sum gradients."""
        return self.of(self.directory.of_sum(ranks))

    def sharing(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """What these ranks, ascending, gather parameters and sum gradients over inside of passes."""
        return self.of(self.directory.of_shards(ranks))

    def inside(self, layout: Layout, share: int) -> dist.ProcessGroup | None:
        """What the passes of a share sum over inside."""
        index = self.directory.of_share(layout, share)
        assert index is not None, "its passes sum something"
        return self.of(index)

    def meet(self, programs: Sequence[Program], rank: int, device: torch.device) -> None:
        """Let all ranks meet once over each communicator, one after another; collective.

        NCCL connects two ranks when they first talk to each other, which takes long and can hold up the host:
        not in the first step.
        """
        for communicator in self.all:
            if rank not in communicator.ranks:
                continue
            group = self.of(communicator.index)
            pairs = _pairs(programs, communicator)
            if pairs:
                _exchange([pair for pair in pairs if rank in pair], rank, device, group)
            else:
                dist.all_reduce(torch.zeros(1, device=device), group=group)


def _pairs(programs: Iterable[Program], communicator: Communicator) -> list[tuple[int, int]]:
    """(source, destination) of all messages that go over a communicator, ascending."""
    pairs = {
        (action.transfer.source, action.transfer.destination)
        for program in programs
        for actions in program.actions.values()
        for action in actions
        if action.transfer is not None and action.communicator == communicator.index
    }
    return sorted(pairs)


def _exchange(
    pairs: list[tuple[int, int]], rank: int, device: torch.device, group: dist.ProcessGroup | None
) -> None:
    messages = [
        dist.P2POp(dist.isend, torch.zeros(1, device=device), destination, group)
        if source == rank
        else dist.P2POp(dist.irecv, torch.empty(1, device=device), source, group)
        for source, destination in pairs
    ]
    # A rank may take part in what other programs of these communicators send, and in nothing of this one's.
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()
