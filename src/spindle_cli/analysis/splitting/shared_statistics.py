"""Buffers that several ops change, such as the running statistics of one batch norm in two tasks.

Every device that runs such an op keeps its own, which sees the batches of that op alone; in one process each
sees all. A batch norm trains the same all the same, but in eval mode the model gives something else. What
computes with such a buffer in training is refused (shared_state.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from spindle_cli.analysis.rules.batch_norms import is_statistic
from spindle_cli.workload.graph import Op, TaskGraph, WorkloadGraph
from spindle_cli.workload.parameters import ParameterTable


def shared_statistics(graph: WorkloadGraph) -> tuple[str, ...]:
    """What becomes of buffers that several ops change, as lines for people; one for each set of ops."""
    table = ParameterTable.of(graph)
    names_by_users: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for name in table.buffers:
        users = table.users[name]
        if len(users) > 1 and any(_changes(graph, table, (task, op), name) for task, op in users):
            names_by_users.setdefault(users, []).append(name)
    return tuple(
        f"{', '.join(names)}: changed by the forward passes of {_who(users)}, of which each device keeps its "
        "own: where several devices run these, they will not be those of one process, nor what a model gives "
        f"by them (of a batch norm, in eval mode); {_advice(users)}"
        for users, names in names_by_users.items()
    )


def changes_buffers(task: TaskGraph, op: Op) -> bool:
    """Whether an op's forward pass changes any buffer, or a parameter itself, as far as is known."""
    return bool(op.changes) or _changes_any(task, op, op.buffers)


def changed_buffers(graph: WorkloadGraph, table: ParameterTable) -> frozenset[str]:
    """Canonical names of the buffers that the forward pass of some op is known to change."""
    return frozenset(
        name
        for name in table.buffers
        if any(_changes(graph, table, user, name) for user in table.users[name])
    )


def _changes(graph: WorkloadGraph, table: ParameterTable, user: tuple[str, int], canonical: str) -> bool:
    """Whether an op's forward changes a buffer: a batch norm's statistics, or what the analysis has seen."""
    task, index = user
    op = graph.tasks[task].ops[index]
    names = [name for name in op.buffers if table.names[task, name] == canonical]
    return _changes_any(graph.tasks[task], op, names)


def _changes_any(task: TaskGraph, op: Op, names: Iterable[str]) -> bool:
    return any(is_statistic(task.root, name) or name in op.changes for name in names)


def _advice(users: tuple[tuple[str, int], ...]) -> str:
    if len({task for task, _ in users}) == 1:
        return "let one operator make all the calls (two views of a sample, say)"
    return "give each task a module of its own for them"


def _who(users: tuple[tuple[str, int], ...]) -> str:
    tasks = list(dict.fromkeys(task for task, _ in users))
    if len(tasks) == 1:
        return f"{len(users)} ops of task {tasks[0]}"
    return f"tasks {' and '.join(tasks)}"
