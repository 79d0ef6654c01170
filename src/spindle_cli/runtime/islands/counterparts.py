"""What workers in the same place of all islands say to each other.

It goes through host memory and gloo, whatever the devices are: links between islands are slow, so that a
copy to the host costs nothing beside them. What is told of each step has a channel of its own: a script may
look at a step's losses during an outer step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from spindle_cli.runtime.communication.transfers import wait_for
from spindle_cli.runtime.islands.island import Island


class Counterparts:
    """One worker's counterparts on other islands. Every call but `start_telling` waits; all are collective,
    over counterparts alone.
    """

    def __init__(self, island: Island, store: Store, timeout_s: float) -> None:
        """`store`: of all workers of the run."""
        self.island = island
        timeout = timedelta(seconds=timeout_s)

        def group(name: str) -> ProcessGroupGloo:
            own = PrefixStore(f"{name}-{island.rank}", store)
            return ProcessGroupGloo(own, island.number, island.count, timeout)

        self._outer, self._steps = group("outer steps"), group("steps")

    def gather(self, own: Tensor) -> list[Tensor]:
        """Every island's, in their order, on the device of this one's; equally large on all."""
        mine = own.detach().to("cpu").contiguous().reshape(-1)
        found = [torch.empty_like(mine) for _ in range(self.island.count)]
        into = [each.view(torch.uint8) for each in found]
        wait_for(_start_gather(self._outer, mine.view(torch.uint8), into))
        return [each.to(own.device).reshape(own.shape) for each in found]

    def all_say(self, value: bool) -> bool:
        """Whether all of them say so."""
        return all(bool(each.item()) for each in self.gather(torch.tensor([value], dtype=torch.uint8)))

    def meet(self) -> None:
        """Wait until all are here."""
        self.all_say(True)

    def start_telling(self, own: Tensor) -> Telling:
        """Start handing values on the host to all of them."""
        found = [torch.empty_like(own) for _ in range(self.island.count)]
        return Telling(_start_gather(self._steps, own, found), own, found)


def _start_gather(group: ProcessGroupGloo, own: Tensor, into: list[Tensor]) -> dist.Work:
    work: dist.Work = group.allgather([into], [own])  # type: ignore[attr-defined]  # torch leaves it untyped
    return work


class Telling:
    """Values on their way between counterparts."""

    def __init__(self, work: dist.Work, own: Tensor, found: Sequence[Tensor]) -> None:
        """`own` is held as long as it is sent."""
        self._work, self._own, self._found = work, own, found

    def has_arrived(self) -> bool:
        """Whether `await_all` would not wait."""
        return bool(self._work.is_completed())

    def await_all(self) -> Sequence[Tensor]:
        """Every island's, in their order."""
        wait_for(self._work)
        return self._found


class ToldStep:
    """A step's results, which become those of all islands once they have been told. `merged`: makes one of
    all islands' values.
    """

    def __init__(
        self, counterparts: Counterparts, merged: Callable[[Tensor], Tensor], values: Sequence[Tensor]
    ) -> None:
        """`values`: float64, on the host, changed in place when they are told. `merged`: takes
        [islands, numbers].
        """
        self._counterparts, self._values, self._merged = counterparts, tuple(values), merged
        self._telling: Telling | None = None
        self._is_told = False

    def begin(self) -> None:
        """Start telling what the values are now; once."""
        if self._telling is None:
            own = torch.cat([each.reshape(-1) for each in self._values])
            self._telling = self._counterparts.start_telling(own)

    def has_arrived(self) -> bool:
        """Whether `finish` would not wait."""
        return self._is_told or (self._telling is not None and self._telling.has_arrived())

    def finish(self) -> None:
        """Wait until all have told theirs, and take what they are together; once."""
        if self._is_told:
            return
        self.begin()
        assert self._telling is not None
        merged = self._merged(torch.stack(list(self._telling.await_all())))
        parts = torch.split(merged, [each.numel() for each in self._values])
        for each, part in zip(self._values, parts, strict=True):
            each.copy_(part.reshape(each.shape))
        self._is_told = True
