"""What a step works through: samples, tokens and operations, and how much memory a rank has taken."""

from __future__ import annotations

import resource
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import torch

from spindle_cli.costs.flops import Arithmetic, arithmetic_in, flops_by_metaop, peak_flops_per_s
from spindle_cli.units import KIB
from spindle_cli.workload.graph import TaskGraph, WorkloadGraph

if TYPE_CHECKING:
    from spindle_cli.plan.types import Plan
    from spindle_cli.workload.file import TrainSettings


@dataclass(frozen=True)
class StepWork:
    """What one step works through, all tasks and devices together.

    Attributes:
        tokens: None where no task has any, or batches have several lengths.
        peak_s: seconds that all devices would take at their peak; None where it, or the work, is not known.
    """

    samples: int
    tokens: int | None = None
    peak_s: float | None = None

    @classmethod
    def of(cls, plan: Plan, graph: WorkloadGraph, train: TrainSettings, tasks: Collection[str]) -> StepWork:
        """Count the work of a step of `train.accumulate` batches of some tasks; `plan`: of these, or of
        all.
        """
        batches = train.accumulate
        task_tokens = [tokens_of(task) for name, task in graph.tasks.items() if name in tasks]
        counted = [tokens for tokens in task_tokens if tokens is not None]
        if any(task.varying for task in graph.tasks.values()):
            # What a step works through differs from step to step.
            return cls(samples=batches * sum(task.batch_size for task in graph.workload.tasks))
        return cls(
            samples=batches * sum(task.batch_size for task in graph.workload.tasks if task.name in tasks),
            tokens=batches * sum(counted) if counted else None,
            peak_s=_peak_s(plan, tasks, arithmetic_in(train.precision), batches),
        )

    def on_islands(self, count: int) -> StepWork:
        """The work of so many islands, each with devices of its own."""
        tokens = None if self.tokens is None else self.tokens * count
        return replace(self, samples=self.samples * count, tokens=tokens)


def tokens_of(task: TaskGraph) -> int | None:
    """Tokens of a task's batch: elements of its largest field of whole numbers; None where no such field has
    more than one for a sample.
    """
    whole = (torch.int64, torch.int32, torch.int16)
    counts = [
        prod(spec.shape) for spec in task.fields.values() if spec.dtype in whole and prod(spec.shape[1:]) > 1
    ]
    return max(counts, default=None)


def _peak_s(plan: Plan, tasks: Collection[str], arithmetic: Arithmetic, batches: int) -> float | None:
    peak = peak_flops_per_s(plan.cluster.device_type, arithmetic)
    flops = flops_by_metaop([metaop for metaop in plan.metaops if metaop.task in tasks])
    if peak is None or flops is None:
        return None
    return batches * sum(flops.values()) / (peak * plan.cluster.num_devices)


def highest_memory(device: torch.device) -> int:
    """Bytes that this rank has taken at most so far; nothing is waited for."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KIB
