"""Workloads in the many shapes that users' models have; each small, deterministic, in double precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from spindle_cli.analysis.analyse import analyse
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.types import Task, Workload

from . import catches, structures, toy

ALL: dict[str, Callable[[], Workload]] = {
    build.__name__: build
    for build in (
        toy.two_tasks,
        structures.coupled_class,
        structures.encoder_decoder,
        structures.two_losses,
        structures.frozen,
        structures.tuples,
        structures.albert,
        structures.residual,
        catches.summed,
        catches.biased,
        catches.convnet,
        catches.masked,
        catches.sum_over_size,
        catches.doubling,
        catches.flows,
        catches.across,
        catches.deciding,
        catches.no_operators,
    )
}


def build(name: str) -> Workload:
    """One of them, in double precision, always with the same values."""
    torch.manual_seed(0)
    workload = ALL[name]()
    for task in workload.tasks:
        modules = [task.module] if isinstance(task, Task) else [f.consumer for f in task.flows]
        for module in modules:
            module.double()
        for key, value in task.dataset.data.items():
            task.dataset.data[key] = value.double() if value.is_floating_point() else value
    return workload


@cache
def analysed(name: str) -> WorkloadGraph:
    """What `analyse` finds of one of them, once for all tests that look at it."""
    return analyse(build(name))
