"""Islands as the training loop sees them: when they average, and in which order checkpoints are saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from spindle_cli.runtime.communication.gradients import GradientPool
from spindle_cli.runtime.islands.outer import OuterOptimizer
from spindle_cli.runtime.islands.peer_replicas import PeerReplicas, ToldStep

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class OuterSteps:
    """One rank's. `every`: after so many steps there is one."""

    peer_replicas: PeerReplicas
    outer: OuterOptimizer
    every: int

    def is_due(self, step: int) -> bool:
        """Whether there is one behind a step, counted from 0."""
        return (step + 1) % self.every == 0

    def step(self, pool: GradientPool) -> None:
        """Bring the islands together; from here on their parameters are the same. Collective."""
        pool.await_all_parameters()
        self.outer.step()
        pool.hand_on_parameters()

    def teller(self, merged: Callable[[Tensor], Tensor]) -> Callable[[Sequence[Tensor]], ToldStep]:
        """What makes a step's results those of all islands, by `merged` (`ToldStep`)."""
        return partial(ToldStep, self.peer_replicas, merged)

    def save(self, save: Callable[[], None]) -> None:
        """Save a checkpoint of each island: the first one's last, so that where it is whole, all are."""
        if self.peer_replicas.island.number > 0:
            save()
        self.peer_replicas.meet()
        if self.peer_replicas.island.number == 0:
            save()
