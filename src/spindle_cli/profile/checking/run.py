"""Check every task's ops by numbers: computed whole and in shares of 1 and n - 1 samples, they must agree.

Each op runs in float64 on what the ops before it make of real samples, with parameters and gradients drawn at
random, one op at a time. Where it is small enough, all of a task's ops are also compared with its `forward`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic

import psutil
import torch

from spindle_cli.operators.tensor_parallel import LayerSplit, layer_split
from spindle_cli.profile.checking.task import CheckLimits, TaskChecker
from spindle_cli.profile.numeric_check import NumericCheck, TaskCheck
from spindle_cli.workload.graph import Op, TaskGraph, WorkloadGraph

# For all tasks together.
MAX_S = 60.0
# Of the memory that is free when the check begins.
MEMORY_SHARE = 0.5
# That share out a vocabulary.
_DEVICES = 2


@dataclass(frozen=True)
class CheckSettings:
    """How much a check may take, and of what.

    Attributes:
        max_s: seconds for all tasks together; an op that has begun is finished.
        max_bytes: for one op; None: half of the memory that is free.
        threads: of torch; None: as many as it has.
        losses_only: each loss by itself, on stand-ins for what the ops before it give.
        by_words: also what devices of a tensor-parallel group compute of heads and embeddings.
    """

    max_s: float = MAX_S
    max_bytes: int | None = None
    threads: int | None = None
    losses_only: bool = False
    by_words: bool = False

    def limits(self) -> CheckLimits:
        """Gives the limits of a check that begins now."""
        free = int(psutil.virtual_memory().available * MEMORY_SHARE)
        return CheckLimits(monotonic() + self.max_s, self.max_s, self.max_bytes or free)


def check_numbers(
    graph: WorkloadGraph, seed: int, settings: CheckSettings, shortest: Mapping[str, TaskGraph] | None = None
) -> NumericCheck:
    """Check every task of a workload whose parameters may be on the meta device.

    Args:
        seed: of its samples.
        shortest: tasks whose batches have several lengths, as they are at the shortest; checked there too.

    Raises:
        WorkloadError: a task's ops compute something else than its `forward`, or than the whole where their
            vocabulary is split.
    """
    limits = settings.limits()
    tasks = []
    with torch.random.fork_rng(devices=()), _threads(settings.threads):
        for task in graph.tasks.values():
            names = {
                op: metaop.name
                for metaop in graph.metaops
                if metaop.task == task.task.name
                for op in metaop.ops
            }

            def split_of(op: Op, task: TaskGraph = task) -> LayerSplit | None:
                return layer_split(graph.workload, task, op, _DEVICES) if settings.by_words else None

            checker = TaskChecker(task, names, seed, limits, split_of)
            check = checker.check_loss() if settings.losses_only else checker.check()
            short = (shortest or {}).get(task.task.name)
            if short is not None and not settings.losses_only:
                of_short = partial(split_of, task=short)
                check = _with_shortest(check, TaskChecker(short, names, seed, limits, of_short).check())
            tasks.append(check)
    return NumericCheck(tasks=tuple(tasks))


def _with_shortest(planned: TaskCheck, short: TaskCheck) -> TaskCheck:
    """Return what was found at the planned length and at the shortest."""
    whole = {name: f"for the shortest batches: {why}" for name, why in short.whole.items()} | planned.whole
    return planned.model_copy(
        update={
            "whole": whole,
            "checked": tuple(name for name in planned.checked if name not in whole),
            "unchecked": {name: why for name, why in planned.unchecked.items() if name not in whole},
            "largest_difference": max(planned.largest_difference, short.largest_difference),
        }
    )


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def with_whole(graph: WorkloadGraph, check: NumericCheck) -> WorkloadGraph:
    """Return the graph with all MetaOps that the check has found to differ coupled; its fingerprint stays."""
    whole = {name for task in check.tasks for name in task.whole}
    metaops = tuple(
        replace(metaop, coupled=True) if metaop.name in whole else metaop for metaop in graph.metaops
    )
    return replace(graph, metaops=metaops)
