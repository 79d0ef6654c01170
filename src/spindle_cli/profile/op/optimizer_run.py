"""Step a workload's optimizer on parameters like the workload's own, and time it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spindle_cli.profile.op.op_run import Clock
from spindle_cli.profile.op.timings import Limits, Sample, runs_per_repeat
from spindle_cli.training.optimizing.groups import groups_of_graph
from spindle_cli.training.optimizing.optimizer import make_optimizer
from spindle_cli.units import MIB
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import ParameterTable, WorkloadGraph
from spindle_cli.workload.settings.updates import OptimizerChoice

# More than fits any cache; with gradients and state several times that.
_ENOUGH_BYTES = 64 * MIB


class Stepped(NamedTuple):
    """A trained parameter: its shape and type, and with which optimizer settings it is stepped."""

    shape: torch.Size
    dtype: torch.dtype
    choice: OptimizerChoice


def trained_shapes(graph: WorkloadGraph, train: TrainSettings) -> tuple[Stepped, ...]:
    """Return every trained parameter that an op of a workload uses, shared ones once.

    Raises:
        WorkloadError: parameters do not fit the optimizer groups.
    """
    table, groups = ParameterTable.of(graph), groups_of_graph(train, graph)
    return tuple(
        Stepped(parameter.shape, parameter.dtype, groups.choice_of(name))
        for name, parameter in table.parameters.items()
        if parameter.requires_grad and table.users[name]
    )


def _optimizers(
    settings: Iterable[OptimizerChoice],
    parameters: Sequence[nn.Parameter],
    choices: Sequence[OptimizerChoice],
) -> Iterator[torch.optim.Optimizer]:
    """Make the optimizer of each of some settings, over the parameters whose choice these are.

    Args:
        choices: of each parameter, with which settings it is stepped.
    """
    for setting in settings:
        chosen = (
            parameter for parameter, choice in zip(parameters, choices, strict=True) if choice == setting
        )
        optimizer = make_optimizer(setting, chosen)
        if optimizer is not None:
            yield optimizer


class OptimizerRun:
    """The optimizer of some train settings over parameters of given shapes, with gradients.

    As many of the shapes are taken, evenly over the sequence, as stay below a size that no cache holds: what
    is small and what is large then have their share. `num_bytes`: of the parameters taken.
    """

    def __init__(
        self,
        train: TrainSettings,
        shapes: Sequence[Stepped],
        device: torch.device,
        clock: Clock,
    ) -> None:
        """Raises WorkloadError: the settings' optimizer is unknown or its arguments do not fit."""
        total = sum(shape.numel() * dtype.itemsize for shape, dtype, _ in shapes)
        stride = max(1, round(total / _ENOUGH_BYTES))
        taken = shapes[::stride]
        self._parameters = [
            # In bf16 the optimizer steps float32 masters.
            nn.Parameter(torch.randn(shape, device=device).to(None if train.precision == "bf16" else dtype))
            for shape, dtype, _ in taken
        ]
        self.num_bytes = sum(shape.numel() * dtype.itemsize for shape, dtype, _ in taken)
        self._gradients: list[Tensor] = [torch.randn_like(parameter) for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        choices = [stepped.choice for stepped in taken]
        self._optimizers = list(_optimizers(train.choices, self._parameters, choices))
        self._weights = [parameter.detach() for parameter in self._parameters]
        self._averages = [] if train.ema is None else [weight.clone() for weight in self._weights]
        self._clock = clock

    def warm_up(self, limits: Limits) -> int:
        """Step until the optimizer has its state and is warm; how many steps make a repeat."""
        started = time.perf_counter()
        self.repeat(1)
        while True:
            sample = self.repeat(1)
            if time.perf_counter() - started >= limits.warm_up_s:
                return runs_per_repeat(sample.total_s, limits)

    def repeat(self, runs: int) -> Sample:
        """Mean seconds of one step with its gradients set to zero, over `runs`; all of it as `forward_s`."""
        before = self._clock.mark()
        for _ in range(runs):
            for optimizer in self._optimizers:
                optimizer.step()
            if self._averages:
                torch._foreach_lerp_(self._averages, self._weights, 0.5)
            torch._foreach_zero_(self._gradients)
        after = self._clock.mark()
        self._clock.wait()
        return Sample(self._clock.between_s(before, after) / runs, 0.0)
