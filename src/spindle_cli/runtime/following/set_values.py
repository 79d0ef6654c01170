"""Numbers of a step that callbacks set on rank 0, on every rank before the next step reads them."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch.distributed as dist

from spindle_cli.errors import UsageError
from spindle_cli.files.artifact import shown
from spindle_cli.workload.step_values import StepValues, is_number


class SetValues:
    """One rank's side of it. Nothing is sent where no task declares such a number."""

    def __init__(self, values: StepValues, rank: int, kept: Mapping[str, float] | None = None) -> None:
        """Collective. `kept`: what a checkpoint has of them."""
        self._values = values
        self._rank = rank
        self._settable = {name: value for name, value in values.by_name.items() if value.is_set_by_callbacks}
        self._group = dist.new_group(backend="gloo") if self._settable and dist.get_world_size() > 1 else None
        for name, number in (kept or {}).items():
            if name in self._settable:
                self._settable[name].put(number)
        self._requested: dict[str, float] = {}

    def ask(self, name: str, number: float) -> None:
        """Let steps that have not begun read a number; what other ranks than 0 ask for counts nothing.

        Raises:
            UsageError: no task declares a number of this name that callbacks set, or it is no finite number.
        """
        if name not in self._settable:
            names = ", ".join(self._settable) or "there is none"
            raise UsageError(
                f"set_value: there is no number {shown(name)} for callbacks to set; those declared: {names}",
                hint="Declare it with a number to begin with: Task(..., step_values={'beta': 0.0}), by "
                "'task/beta'.",
            )
        if not is_number(number) or not isfinite(number):
            raise UsageError(f"set_value: {name} is to be {number!r:.80}, expected a finite number")
        if self._rank == 0:
            self._requested[name] = float(number)

    def saved(self) -> dict[str, float]:
        """What a checkpoint keeps: what the next step reads."""
        return {name: self._requested.get(name, value.now) for name, value in self._settable.items()}

    def share(self) -> None:
        """Let every rank have what rank 0 was asked for; collective."""
        if not self._settable:
            return
        told: list[Any] = [self._requested]
        if self._group is not None:
            dist.broadcast_object_list(told, src=0, group=self._group)
        for name, number in told[0].items():
            self._settable[name].put(number)
        self._requested = {}
