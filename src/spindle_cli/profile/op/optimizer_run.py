"""Step a workload's optimizer on parameters like the workload's own, and time it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spindle_cli.profile.op.op_run import Clock
from spindle_cli.profile.op.timings import Limits, Sample, runs_per_repeat
from spindle_cli.units import MIB
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.training.optimizer import make_optimizer

# More than fits any cache; with gradients and state several times that.
_ENOUGH_BYTES = 64 * MIB


def trained_shapes(graph: WorkloadGraph) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    """Shape and type of every trained parameter of a workload, shared ones once."""
    seen: dict[int, tuple[torch.Size, torch.dtype]] = {}
    for task in graph.tasks.values():
        for op in task.ops:
            for name in op.parameters:
                parameter = task.root.get_parameter(name)
                if parameter.requires_grad:
                    seen[id(parameter)] = (parameter.shape, parameter.dtype)
    return tuple(seen.values())


class OptimizerRun:
    """The optimizer of some train settings over parameters of given shapes, with gradients.

    As many of the shapes are taken, evenly over the sequence, as stay below a size that no cache holds: what
    is small and what is large then have their share. `num_bytes`: of the parameters taken.
    """

    def __init__(
        self,
        train: TrainSettings,
        shapes: Sequence[tuple[torch.Size, torch.dtype]],
        device: torch.device,
        clock: Clock,
    ) -> None:
        """Raises WorkloadError: the settings' optimizer is unknown or its arguments do not fit."""
        total = sum(shape.numel() * dtype.itemsize for shape, dtype in shapes)
        stride = max(1, round(total / _ENOUGH_BYTES))
        self._parameters = [
            # In bf16 the optimizer steps float32 masters.
            nn.Parameter(torch.randn(shape, device=device).to(None if train.precision == "bf16" else dtype))
            for shape, dtype in shapes[::stride]
        ]
        self.num_bytes = sum(shape.numel() * dtype.itemsize for shape, dtype in shapes[::stride])
        self._gradients: list[Tensor] = [torch.randn_like(parameter) for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._optimizer = make_optimizer(train, self._parameters)
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
        assert self._optimizer is not None, "asked to step without parameters"
        before = self._clock.mark()
        for _ in range(runs):
            self._optimizer.step()
            torch._foreach_zero_(self._gradients)
        after = self._clock.mark()
        self._clock.wait()
        return Sample(self._clock.between_s(before, after) / runs, 0.0)
