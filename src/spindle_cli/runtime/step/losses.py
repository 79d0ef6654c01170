"""Losses of tasks whose batch is spread over devices: what each share counts, and their totals.

Each rank's gradient is its share of the total loss's gradient, so that gradient sums are exactly those of one
process.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from spindle_cli.account.step_end import NUMBERS_OF_A_RANK
from spindle_cli.analysis.losses.counts import share_of_samples
from spindle_cli.errors import RunFailedError
from spindle_cli.runtime.backends.host_group import host_group
from spindle_cli.runtime.communication.rows import Samples
from spindle_cli.runtime.communication.transfers import wait_for
from spindle_cli.training.optimizing.schedules import TaskWeights
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import LossShares
from spindle_cli.workload.types import FlowTask, Task

if TYPE_CHECKING:
    from torch import Tensor


# Skipped steps in a row behind which a run ends: the usual loss scale is a tenth of a billionth then.
MOST_SKIPPED = 50


@dataclass(frozen=True)
class StepLosses:
    """What a step's sum says.

    Attributes:
        losses: of the tasks, unweighted.
        stops: a rank was asked to stop, so that all are to.
        uncounted_next: tasks of which something counts nothing in the step after.
        memory_bytes, data_waits_s: what each rank says of itself (`LossAccumulator.tell`), by rank.
    """

    losses: dict[str, float]
    stops: bool
    uncounted_next: tuple[str, ...] = ()
    memory_bytes: tuple[float, ...] = ()
    data_waits_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class CountLayout:
    """Which rows of one vector are what each task's loss counts."""

    rows: Mapping[str, slice]
    size: int

    @classmethod
    def of(cls, shares: Mapping[str, LossShares]) -> CountLayout:
        """Lay the counts of all tasks out one behind the other."""
        rows: dict[str, slice] = {}
        size = 0
        for task, share in shares.items():
            begin, size = size, size + share.num_counts
            rows[task] = slice(begin, size)
        return cls(rows, size)

    def uncounted(self, counts: Sequence[float]) -> tuple[str, ...]:
        """The tasks of which something counts nothing."""
        return tuple(task for task, rows in self.rows.items() if 0.0 in counts[rows])


class LossAccumulator:
    """Every task's loss of one step, summed over its shares on all ranks and over the step's batches; with it
    what the losses of the next step count, what each rank says of itself, and whether one of them was asked
    to stop, so that all stop after the same step.
    """

    def __init__(
        self,
        tasks: Sequence[Task | FlowTask],
        device: torch.device,
        batches_per_step: int,
        shares: Mapping[str, LossShares],
        rank: int = 0,
        num_ranks: int = 1,
        weights: TaskWeights | None = None,
    ) -> None:
        """`shares`: by task, how its loss is computed by shares. `weights`: where they are not always those
        of the tasks.
        """
        self._weights = weights or TaskWeights(TrainSettings(), tasks)
        self._seeds = self._weights.at(0)
        self._rank = rank
        self._batches_per_step = batches_per_step
        self._tasks = {task.name: task for task in tasks}
        self._row = {name: row for row, name in enumerate(self._tasks)}
        self.layout = CountLayout.of({name: shares[name] for name in self._tasks})
        # Each rank has rows of its own for what it says of itself: a sum then tells of all of them.
        self._told = NUMBERS_OF_A_RANK * num_ranks
        # The tasks' losses, the next step's counts, what ranks tell, whether to stop.
        rows = len(self._tasks) + self.layout.size + self._told + 1
        self._sums = torch.zeros(rows, dtype=torch.float64, device=device)
        self._counts = torch.zeros(self.layout.size, dtype=torch.float64, device=device)  # of this step
        self._work: dist.Work | None = None

    def begin(self, counts: Tensor) -> tuple[str, ...]:
        """Take what this rank counts of the first step's batches; collective, before the first step.

        Returns:
            The tasks of which something counts nothing.
        """
        total = counts.clone()
        dist.all_reduce(total, group=host_group())
        self._counts.copy_(total)
        return self.layout.uncounted(total.tolist())

    def count_next(self, counts: Tensor) -> None:
        """Take what this rank counts of the next step's batches; before this step's sum is started."""
        self._sums[self._count_rows].copy_(counts, non_blocking=True)

    @property
    def _count_rows(self) -> slice:
        return slice(len(self._tasks), len(self._tasks) + self.layout.size)

    def tell(self, memory_bytes: float, data_wait_s: float) -> None:
        """Say of this rank how much memory it has taken, and how long it has waited for this step's data;
        before the sum is started.
        """
        row = self._count_rows.stop + NUMBERS_OF_A_RANK * self._rank
        self._sums[row] = memory_bytes
        self._sums[row + 1] = data_wait_s

    def ask_to_stop(self) -> None:
        """All ranks are to stop after this step; before its sum was started."""
        self._sums[-1] = 1

    @property
    def device(self) -> torch.device:
        """The device of the collectives that every rank takes part in."""
        return self._sums.device

    def weights_at(self, step: int) -> dict[str, float]:
        """The weights of the tasks' losses in the total of a step, counted from 0.

        Raises:
            WorkloadError: a function of the user's gives none.
        """
        return self._weights.at(step)

    def weigh_for(self, step: int) -> None:
        """From here on backward passes are those of this step; raises what `weights_at` raises."""
        self._seeds = self._weights.at(step)

    def add(self, task: str, loss: Tensor) -> None:
        """Add what a share of one of a task's batches has of the loss."""
        self._sums[self._row[task]] += loss.detach().to(torch.float64).reshape(())

    def seed(self, task: str) -> float:
        """d(total loss) / d(what a share has of the task's): where its backward pass starts."""
        return self._seeds[task]

    def arguments(self, task: str, samples: Samples) -> tuple[Any, ...]:
        """What a loss takes that is computed by shares: the share of the samples, and this step's counts,
        each a float64 scalar on the device.
        """
        entry = self._tasks[task]
        share = share_of_samples(samples[1] - samples[0], entry.batch_size, self._batches_per_step)
        return (share, *self._counts[self.layout.rows[task]].unbind())

    def start_sum(self) -> None:
        """Start summing over all ranks: once in a step, on every rank, in the program's order."""
        assert self._work is None, "losses are summed once in a step"
        self._work = dist.all_reduce(self._sums, async_op=True)

    def take(self) -> Tensor:
        """The sums over all ranks, on the device, for `read`; the next step starts from zero, with the counts
        that came with them.
        """
        assert self._work is not None, "losses are taken after their sum was started"
        wait_for(self._work)
        self._work = None
        taken, self._sums = self._sums, torch.zeros_like(self._sums)
        self._counts = taken[self._count_rows]
        return taken

    def read(self, taken: Tensor, due: Collection[str] | None = None) -> StepLosses:
        """What `take` has given, once it is on the host; the same on every rank. `due`: the tasks that the
        step has run; None: all.
        """
        *values, stops = taken.tolist()
        rows = self._count_rows
        losses, counts, told = values[: rows.start], values[rows], values[rows.stop :]
        return StepLosses(
            {
                name: loss
                for name, loss in zip(self._tasks, losses, strict=True)
                if due is None or name in due
            },
            stops > 0,
            self.layout.uncounted(counts),
            tuple(told[::NUMBERS_OF_A_RANK]),
            tuple(told[1::NUMBERS_OF_A_RANK]),
        )

    def of_islands(self, told: Tensor) -> Tensor:
        """What `take` and the norm of all islands say together: [islands, numbers] to [numbers].

        Losses are means over the islands, and so is nothing else: a task counts nothing where it does so on
        one of them, and one that is asked to stop stops all; of ranks in the same place, and of norms, the
        largest.
        """
        merged = told.amax(dim=0)
        tasks = slice(0, len(self._tasks))
        merged[tasks] = told[:, tasks].sum(dim=0) / told.shape[0]
        merged[self._count_rows] = told[:, self._count_rows].amin(dim=0)
        return merged

    def total(self, losses: dict[str, float], step: int) -> float:
        """The weighted total of a step, counted from 0."""
        weights = self._weights.at(step)
        return sum(weights[name] * loss for name, loss in losses.items())


def step_failure(
    losses: dict[str, float], norm: float | None, step: int, skipped: int = 0
) -> RunFailedError | None:
    """Why training cannot go on after a step (counted from 1), naming it and the tasks; None: it can.

    Every rank sees the same losses and the same norm of all gradients, so all stop with the same update.

    Args:
        skipped: steps in a row, this one the last of them, that have left everything as it was, as gradients
            overflowed. Such a step may be any batch's; where it goes on so, nothing is trained.
    """
    broken = [f"{name} is {loss}" for name, loss in losses.items() if not math.isfinite(loss)]
    if 0 < skipped < MOST_SKIPPED:
        return None
    if skipped:
        also = f", and the loss of {', of '.join(broken)}" if broken else ""
        return RunFailedError(
            f"step {step}: gradients have overflowed in {skipped} steps in a row: nothing is trained{also}",
            hint="Set a smaller train.loss_scale if it is fixed. If it falls and falls by itself, float16 is "
            "too narrow for this model: use train.precision bf16-autocast or full.",
        )
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
