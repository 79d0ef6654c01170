"""What tasks that are only evaluated hold on the devices of a plan, which knows nothing of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from spindle_cli.errors import InputError
from spindle_cli.plan.types import Plan
from spindle_cli.program.evaluated import place_evaluated
from spindle_cli.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from spindle_cli.workload.graph import WorkloadGraph

Held = Mapping[str, tuple[int, ...]]  # bytes on each device, by task


def held_for_evaluations(plan: Plan, graph: WorkloadGraph, bytes_per_float: int | None = None) -> Held:
    """Parameters and buffers of tasks that are only evaluated, which a run keeps from its beginning to its
    end: those that no op of a trained task uses. What several of them share counts for the first.

    Args:
        bytes_per_float: of all floating-point numbers; None: their own.
    """
    from spindle_cli.workload.evaluated.needs import names_of_all, needs_of

    if not graph.workload.evaluated:
        return {}
    table = names_of_all(graph)
    known: set[tuple[int, str]] = set()
    found: dict[str, tuple[int, ...]] = {}
    for task in graph.workload.evaluated:
        needs, own = needs_of(graph, task.name), graph.only_evaluated(task.name)
        trained = frozenset[str]().union(*needs.held.values())
        held = [0] * plan.cluster.num_devices
        for piece in place_evaluated(plan, needs).slices:
            for position in range(*piece.ops):
                op = own.tasks[task.name].ops[own.by_name[piece.metaop].ops[position]]
                names = {*table.of_op(task.name, (*op.parameters, *op.buffers))} - trained
                for device, name in ((device, name) for device in piece.devices for name in sorted(names)):
                    if (device, name) not in known:
                        known.add((device, name))
                        held[device] += _num_bytes(table.tensor(name), bytes_per_float)
        found[task.name] = tuple(held)
    return found


def require_room(plan: Plan, held: Held, where: str) -> tuple[str, ...]:
    """How much that is, as lines for people. `where`: the plan's file.

    Raises:
        InputError: a device has no memory for it beside what the plan predicts.
    """
    own = [each.predicted for each in plan.task_sets] or [plan.predicted]
    sums = [sum(each) for each in zip(*held.values(), strict=True)] if held else []
    for device, more in enumerate(sums):
        planned = max(predicted.peak_memory_bytes[device] for predicted in own)
        capacity = plan.cluster.memory_bytes[device]
        if more and planned + more > capacity:
            tasks = ", ".join(task for task, each in held.items() if each[device])
            raise InputError(
                f"{where}: device {device} needs {format_bytes(planned)} of its {format_bytes(capacity)} for "
                f"training, and {format_bytes(more)} more for parameters that are only evaluated ({tasks})",
                hint="Plan for more devices, or evaluate these tasks apart from the run.",
            )
    return tuple(
        f"task {task!r}, which is only evaluated, holds {format_bytes(max(each))} of its own parameters and "
        "buffers on a device, beside what the plan predicts"
        for task, each in held.items()
        if any(each)
    )


def _num_bytes(tensor: Tensor, bytes_per_float: int | None) -> int:
    if bytes_per_float is None or not tensor.is_floating_point():
        return tensor.numel() * tensor.element_size()
    return tensor.numel() * bytes_per_float
