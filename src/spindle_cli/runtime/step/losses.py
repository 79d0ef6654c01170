"""Losses of tasks whose batch is spread over devices: what each share counts, and their totals.

Each rank's gradient is its share of the total loss's gradient, so that gradient sums are exactly those of one
process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from spindle_cli.errors import RunFailedError
from spindle_cli.runtime.communication.rows import Samples
from spindle_cli.runtime.communication.transfers import wait_for
from spindle_cli.workload.types import FlowTask, Reduction, Task

if TYPE_CHECKING:
    from torch import Tensor


def share_of_loss(reduction: Reduction, samples: Samples, of_samples: int) -> float:
    """What the loss over `samples` alone counts in its task's loss over `of_samples`: their share for a mean,
    1 for a sum.
    """
    return 1.0 if reduction == "sum" else (samples[1] - samples[0]) / of_samples


@dataclass(frozen=True)
class StepLosses:
    """`losses`: of the tasks, unweighted. `stops`: a rank was asked to stop, so that all are to."""

    losses: dict[str, float]
    stops: bool


class LossBoard:
    """Every task's loss of one step, summed over its shares on all ranks and over the step's batches; and
    whether one of the ranks was asked to stop, so that all stop after the same step.
    """

    def __init__(
        self, tasks: Sequence[Task | FlowTask], device: torch.device, batches_per_step: int = 1
    ) -> None:
        self._batches_per_step = batches_per_step
        self._tasks = {task.name: task for task in tasks}
        self._row = {name: row for row, name in enumerate(self._tasks)}
        self._losses = torch.zeros(len(self._tasks) + 1, dtype=torch.float64, device=device)
        self._work: dist.Work | None = None

    def ask_to_stop(self) -> None:
        """All ranks are to stop after this step; before its sum was started."""
        self._losses[-1] = 1

    @property
    def device(self) -> torch.device:
        """Of the collectives that every rank takes part in."""
        return self._losses.device

    def add(self, task: str, loss: Tensor, samples: Samples) -> None:
        """Count the loss over `samples` of one of a task's batches."""
        self._losses[self._row[task]] += loss.detach().to(torch.float64).reshape(()) * self._share(
            task, samples
        )

    def seed(self, task: str, samples: Samples) -> float:
        """d(total loss) / d(loss over `samples`): where this share's backward pass starts."""
        return self._tasks[task].weight * self._share(task, samples)

    def _share(self, task: str, samples: Samples) -> float:
        entry = self._tasks[task]
        return share_of_loss(entry.reduction, samples, entry.batch_size * self._batches_per_step)

    def start_sum(self) -> None:
        """Start summing over all ranks: once in a step, on every rank, before any gradient sum."""
        assert self._work is None, "losses are summed once in a step"
        self._work = dist.all_reduce(self._losses, async_op=True)

    @property
    def is_summing(self) -> bool:
        """Whether this step's sum was started."""
        return self._work is not None

    def take(self) -> Tensor:
        """The sums over all ranks, [tasks + 1] on the device, for `read`; the next step starts from zero."""
        assert self._work is not None, "losses are taken after their sum was started"
        wait_for(self._work)
        self._work = None
        taken, self._losses = self._losses, torch.zeros_like(self._losses)
        return taken

    def read(self, taken: Tensor) -> StepLosses:
        """What `take` has given, once it is on the host; the same on every rank."""
        *values, stops = taken.tolist()
        return StepLosses(dict(zip(self._tasks, values, strict=True)), stops > 0)

    def total(self, losses: dict[str, float]) -> float:
        """The weighted total."""
        return sum(self._tasks[name].weight * loss for name, loss in losses.items())


def step_failure(losses: dict[str, float], norm: float | None, step: int) -> RunFailedError | None:
    """Why training cannot go on after a step (counted from 1), naming it and the tasks; None: it can.

    Every rank sees the same losses and the same norm of all gradients, so all stop with the same update.
    """
    broken = [f"{name} is {loss}" for name, loss in losses.items() if not math.isfinite(loss)]
    if broken:
        return RunFailedError(
            f"step {step}: the loss of {', of '.join(broken)}; training stopped before this step's update",
            hint="Try a smaller learning rate, check this task's data, or use a numerically safer loss.",
        )
    if norm is not None and not math.isfinite(norm):
        return RunFailedError(
            f"step {step}: the norm of the gradients is {norm}, though every loss is finite; training "
            "stopped before this step's update",
            hint="Try a smaller learning rate, or a loss whose gradient is finite for this data too.",
        )
    return None
