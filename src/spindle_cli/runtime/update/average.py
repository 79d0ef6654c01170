"""The moving average of the weights: each rank keeps that of what its optimizers step.

It is what `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn` makes of the same parameters, of
the masters where there are any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from spindle_cli.runtime.update.owned_ranges import Elements, OwnedRange
from spindle_cli.workload.settings.updates import Average


class WeightAverage:
    """The average of some owned ranges."""

    def __init__(self, settings: Average, owned_ranges: Sequence[OwnedRange]) -> None:
        self._settings = settings
        self._owned = tuple(owned_ranges)
        self._tensors = [torch.zeros_like(owned.tensor.detach()) for owned in self._owned]
        self._place: Mapping[tuple[str, Elements | None], int] = {
            (owned.name, owned.part): place for place, owned in enumerate(self._owned)
        }
        self._begun = [False] * len(self._owned)
        self._updates = 0

    def update(self) -> None:
        """Move the average towards the weights, where a step that was made is one of every so many."""
        self._updates += 1
        if self._updates % self._settings.every:
            return
        going_on: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for place, owned in enumerate(self._owned):
            mine, weights = self._tensors[place], owned.tensor.detach()
            if not self._begun[place]:
                mine.copy_(weights)
                self._begun[place] = True
                continue
            averages, parameters = going_on.setdefault(mine.dtype, ([], []))
            averages.append(mine)
            parameters.append(weights)
        for averages, parameters in going_on.values():
            torch._foreach_lerp_(averages, parameters, 1 - self._settings.decay)

    def of(self, owned: OwnedRange) -> Tensor | None:
        """The average of an owned range; None before the first."""
        place = self._place[owned.name, owned.part]
        return self._tensors[place] if self._begun[place] else None

    def resume(self, steps_done: int, saved: Iterable[tuple[OwnedRange, Tensor]]) -> None:
        """Go on from a checkpoint after so many steps; what it has no average of begins with the next one."""
        self._updates = steps_done
        for owned, values in saved:
            place = self._place[owned.name, owned.part]
            self._tensors[place].copy_(values)
            self._begun[place] = True

    def exchange(self) -> None:
        """Let the parameters and their averages change places; what has no average stays."""
        for place, owned in enumerate(self._owned):
            if self._begun[place]:
                weights = owned.tensor.detach()
                kept = weights.clone()
                weights.copy_(self._tensors[place])
                self._tensors[place].copy_(kept)
