"""One rank's optimizers: one for each optimizer group of which it steps anything, each with its schedule.

Each rank applies constraints on trained parameters to what its optimizers step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from spindle_cli.files.tensors import parse_key
from spindle_cli.runtime.update.average import WeightAverage
from spindle_cli.runtime.update.owned_ranges import OwnedRange
from spindle_cli.training.optimizing.groups import OptimizerGroups
from spindle_cli.training.optimizing.optimizer import make_optimizer
from spindle_cli.training.optimizing.schedules import make_schedule
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import Constrained
from spindle_cli.workload.settings.updates import OptimizerChoice


class Constraints:
    """Applies the constraints of a workload to some owned ranges."""

    def __init__(self, constraints: Sequence[Constrained], owned_ranges: Sequence[OwnedRange]) -> None:
        self._applied: list[tuple[Constrained, OwnedRange]] = []
        for constraint in constraints:
            for owned in owned_ranges:
                if constraint.name in (owned.name, parse_key(owned.name)[0]):
                    assert owned.part is None or constraint.treats_elements_alone, "it is stepped whole"
                    self._applied.append((constraint, owned))

    def apply(self, names: frozenset[str] | None = None) -> None:
        """An update has been made; `names`: of these parameters alone, of all if None."""
        for constraint, owned in self._applied:
            if names is None or owned.name in names:
                constraint.apply(owned.tensor.detach())


@dataclass(frozen=True)
class GroupOptimizer:
    """An optimizer group on one rank. `owned_ranges`: what `optimizer` steps, in its order."""

    choice: OptimizerChoice
    owned_ranges: tuple[OwnedRange, ...]
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler | None
    _tensors_by_names: dict[frozenset[str], list[nn.Parameter]] = field(
        default_factory=dict, compare=False
    )  # by names

    def step(self, names: frozenset[str] | None = None) -> None:
        """Step what has gradients; with `names`, of these parameters alone, if there are any of them.

        torch's own optimizers keep everything of a parameter with it, so that several such steps over
        different ones are what one over all is.
        """
        if names is None:
            self.optimizer.step()
            return
        if names not in self._tensors_by_names:
            self._tensors_by_names[names] = [
                owned.tensor for owned in self.owned_ranges if owned.name in names
            ]
        numbers, chosen = self.numbers, self._tensors_by_names[names]
        if not chosen:
            return
        whole, numbers["params"] = numbers["params"], chosen
        try:
            self.optimizer.step()
        finally:
            numbers["params"] = whole

    @property
    def numbers(self) -> dict[str, Any]:
        """The optimizer's numbers as they are now: learning rate, momentum and such."""
        return self.optimizer.param_groups[0]


@dataclass(frozen=True)
class Optimizers:
    """All of a rank's. `average`: of what they step, if the train settings ask for one; `constraints`: on
    that.
    """

    groups: tuple[GroupOptimizer, ...]
    average: WeightAverage | None = None
    constraints: Constraints | None = None

    @classmethod
    def of(
        cls,
        train: TrainSettings,
        groups: OptimizerGroups,
        owned_ranges: Sequence[OwnedRange],
        constraints: Sequence[Constrained] = (),
    ) -> Optimizers:
        """Make them.

        Args:
            owned_ranges: all that this rank steps.
            constraints: of the workload.

        Raises:
            WorkloadError: an optimizer or the schedule is unknown, refused, or its arguments do not fit.
        """
        made: list[GroupOptimizer] = []
        for index, choice in enumerate(groups.choices):
            ranges = tuple(owned for owned in owned_ranges if groups.of_key(owned.name) == index)
            optimizer = make_optimizer(
                choice, (owned.tensor for owned in ranges), begin_together=train.sampling is None
            )
            if optimizer is not None:
                schedule = make_schedule(train, optimizer, choice.name)
                made.append(GroupOptimizer(choice, ranges, optimizer, schedule))
        average = None if train.ema is None else WeightAverage(train.ema, owned_ranges)
        return cls(tuple(made), average, Constraints(constraints, owned_ranges) if constraints else None)

    def step_part(self, names: frozenset[str]) -> None:
        """Update those of these parameters that have gradients; `step` comes behind it."""
        for group in self.groups:
            group.step(names)
        self._constrain(names)

    def _constrain(self, names: frozenset[str] | None) -> None:
        if self.constraints is not None:
            self.constraints.apply(names)

    def step(self, skips: Tensor | None = None, names: frozenset[str] | None = None) -> None:
        """Update the parameters that have gradients, apply constraints, update the average of all, then move
        every learning rate to the next step.

        Args:
            names: of the parameters that are not updated yet; None: of all.
            skips: a scalar on the device, where losses are scaled: where it is 1 the optimizers leave
                everything as it is. Those that do not look at it themselves let the host wait for it, as
                `torch.amp.GradScaler` does.
        """
        stepped = [group.optimizer for group in self.groups]
        if skips is None or all(map(skips_by_itself, stepped)) or not is_left_out(skips):
            for group in self.groups:
                group.step(names)
        self._constrain(names)
        if self.average is not None:
            self.average.update()
        for group in self.groups:
            if group.schedule is not None:
                # A schedule counts steps, also one that was left out, of which torch would warn.
                group.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch reads it so
                group.schedule.step()

    @property
    def learning_rates(self) -> dict[str, float]:
        """The learning rates of the next step, by optimizer group; that of the only one under 'all'. Groups
        of which this rank steps nothing are left out.
        """
        return {group.choice.name or "all": float(group.numbers["lr"]) for group in self.groups}


def skips_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's next update leaves everything as it is where `UpdateGuard` says so.

    The first one of torch's fused SGD makes momenta, to which a kernel that leaves everything as it is gives
    no values.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    has_momentum = isinstance(optimizer, torch.optim.SGD) and optimizer.param_groups[0]["momentum"] != 0
    return not has_momentum or any(
        state.get("momentum_buffer") is not None for state in optimizer.state.values()
    )


def is_left_out(skips: Tensor) -> bool:
    """Whether an update is left out; the host waits for the device."""
    return bool(skips.item())
