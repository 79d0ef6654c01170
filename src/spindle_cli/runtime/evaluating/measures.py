"""Call the user's metrics on what was gathered; all ranks get what they give, or why one fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from spindle_cli.errors import RunFailedError
from spindle_cli.runtime.backends.host_group import host_group
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.refuse import place_of_error
from spindle_cli.workload.types import Metric

if TYPE_CHECKING:
    from torch import Tensor


def measured(task: TaskGraph, gathered: dict[str, Tensor] | None) -> dict[str, float]:
    """Each metric of a task; collective. `gathered`: on rank 0.

    Raises:
        RunFailedError: on every rank, where a metric raises something or gives no number.
    """
    metrics = task.task.metrics
    if not metrics:
        return {}
    told: list[Any] = [None if gathered is None else _all(task, metrics, gathered)]
    dist.broadcast_object_list(told, group=host_group())
    (found,) = told
    if isinstance(found, str):
        raise RunFailedError(found, hint="Checkpoints from before are there: go on from one with --resume.")
    return {name: float(value) for name, value in found.items()}


def _all(
    task: TaskGraph, metrics: Mapping[str, Metric], gathered: dict[str, Tensor]
) -> dict[str, float] | str:
    """What all of them give; or what is wrong with the first that fails."""
    found: dict[str, float] = {}
    for name, metric in metrics.items():
        where = f"the metric {name!r} of task {task.task.name!r}"
        try:
            value = metric(dict(gathered))
        except Exception as error:  # code of the user's
            place = place_of_error(error)
            at = f", at {place}" if place else ""
            return f"{where} failed: {type(error).__name__}: {error}{at}{_given(task, gathered)}"
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            return f"{where} gave a {type(value).__name__}, expected one number"
    return found


def _given(task: TaskGraph, gathered: Mapping[str, Tensor]) -> str:
    given = ", ".join(gathered) or "nothing"
    left = f"; left out, as they have no row for each sample: {', '.join(task.left_out)}"
    return f" (forward gives {given} beside its loss{left if task.left_out else ''})"
