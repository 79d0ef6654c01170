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


class PeerReplicas:
    """One worker's peer replicas on other islands. Every call but `start_telling` waits; all are collective,
    over peer replicas alone.
    """

    def __init__(self, island: Island, store: Store, timeout_s: float) -> None:
        """`store`: the one that all workers of the run share."""
        self.island = island
        timeout = timedelta(seconds=timeout_s)

        def group(name: str) -> ProcessGroupGloo:
            prefixed = PrefixStore(f"{name}-{island.rank}", store)
            return ProcessGroupGloo(prefixed, island.number, island.count, timeout)

        self._outer, self._steps = group("outer steps"), group("steps")

    def gather(self, values: Tensor) -> list[Tensor]:
        """Every island's, in their order, on the device of this one's; equally large on all."""
        mine = values.detach().to("cpu").contiguous().reshape(-1)
        gathered = [torch.empty_like(mine) for _ in range(self.island.count)]
        into = [part.view(torch.uint8) for part in gathered]
        wait_for(_start_gather(self._outer, mine.view(torch.uint8), into))
        return [part.to(values.device).reshape(values.shape) for part in gathered]

    def all_say(self, value: bool) -> bool:
        """Say whether the value is true on every island. Collective."""
        return all(bool(answer.item()) for answer in self.gather(torch.tensor([value], dtype=torch.uint8)))

    def meet(self) -> None:
        """Wait until the peers of all islands are here."""
        self.all_say(True)

    def start_telling(self, values: Tensor) -> Telling:
        """Start handing values on the host to all of them."""
        gathered = [torch.empty_like(values) for _ in range(self.island.count)]
        return Telling(_start_gather(self._steps, values, gathered), values, gathered)


def _start_gather(group: ProcessGroupGloo, values: Tensor, into: list[Tensor]) -> dist.Work:
    work: dist.Work = group.allgather([into], [values])  # type: ignore[attr-defined]  # torch leaves it untyped
    return work


class Telling:
    """Values on their way between peer replicas."""

    def __init__(self, work: dist.Work, values: Tensor, gathered: Sequence[Tensor]) -> None:
        """`values`: this rank's, which are held until they have been sent."""
        self._work, self._values, self._gathered = work, values, gathered

    def has_arrived(self) -> bool:
        """Whether `await_all` would not wait."""
        return bool(self._work.is_completed())

    def await_all(self) -> Sequence[Tensor]:
        """Return every island's values, in the order of the islands."""
        wait_for(self._work)
        return self._gathered


class ToldStep:
    """A step's results, which become those of all islands once they have been told. `merged`: makes one of
    all islands' values.
    """

    def __init__(
        self, peer_replicas: PeerReplicas, merged: Callable[[Tensor], Tensor], values: Sequence[Tensor]
    ) -> None:
        """`values`: float64, on the host, changed in place when they are told. `merged`: takes
        [islands, numbers].
        """
        self._peer_replicas, self._values, self._merged = peer_replicas, tuple(values), merged
        self._telling: Telling | None = None
        self._is_told = False

    def begin(self) -> None:
        """Start telling what the values are now; once."""
        if self._telling is None:
            values = torch.cat([value.reshape(-1) for value in self._values])
            self._telling = self._peer_replicas.start_telling(values)

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
        parts = torch.split(merged, [value.numel() for value in self._values])
        for value, part in zip(self._values, parts, strict=True):
            value.copy_(part.reshape(value.shape))
        self._is_told = True
