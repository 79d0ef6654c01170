"""Batch norms whose statistics can be summed over the shares of a batch, as SyncBatchNorm's are.

Their sums, squared sums and counts add up, and so do the two sums of their backward pass: an op that couples
its samples by them alone may be split (`operators/batch_dependent.py` runs it). What is asked here is which
those are, and what such an op does apart from them.

Running statistics are buffers, which several ops may change, such as those of one batch norm in two tasks.
Every device that runs such an op keeps its own, which sees the batches of that op alone; in one process each
sees all. A batch norm trains the same all the same, but in eval mode the model gives something else. What
computes with such a buffer in training is refused (splitting/shared_state.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from spindle_cli.workload.graph import Op, ParameterTable, TaskGraph, WorkloadGraph

# Exactly these: what a class made from them does in its own forward is not known.
_KNOWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def normalises(part: nn.Module) -> bool:
    """Whether a module is a batch norm that takes its statistics from the batch."""
    if not isinstance(part, _BatchNorm):
        return False
    return part.training or (part.running_mean is None and part.running_var is None)


def shared_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """The batch norms of a module whose statistics can be summed over shares, by dotted name, each once."""
    return {name: part for name, part in module.named_modules() if _is_shared(part)}


def has_other_norms(module: nn.Module) -> bool:
    """Whether a module has a batch norm of which that is not known."""
    return any(normalises(part) and not _is_shared(part) for part in module.modules())


def _is_shared(part: nn.Module) -> bool:
    return type(part) in _KNOWN and "forward" not in part.__dict__ and normalises(part)


def is_statistic(root: nn.Module, name: str) -> bool:
    """Whether a buffer is a running statistic that its norm's forward changes, and computes nothing with."""
    owner = root.get_submodule(name.rpartition(".")[0])
    norm = nn.modules.batchnorm._NormBase  # of batches, and of instances
    return isinstance(owner, norm) and owner.training and owner.track_running_stats


def statistics_of(module: nn.Module) -> list[str]:
    """The running statistics that a module's forward changes."""
    return [name for name, _ in module.named_buffers() if is_statistic(module, name)]


@contextmanager
def with_forward(
    norms: Iterable[_BatchNorm], forward: Callable[[_BatchNorm, Tensor], Tensor]
) -> Iterator[None]:
    """Let batch norms compute `forward(norm, input)` inside."""
    held = tuple(norms)
    try:
        for norm in held:
            norm.__dict__["forward"] = partial(forward, norm)
        yield
    finally:
        for norm in held:
            norm.__dict__.pop("forward", None)


@contextmanager
def by_fixed_statistics(module: nn.Module | None, *, is_whole: bool = False) -> Iterator[list[Tensor]]:
    """Let a module's batch norms that can be shared act on samples one by one inside, and leave their buffers
    alone: what is left is what the module does apart from them. Gives what they were given, in order.

    `is_whole`: what they are given comes from the whole batch, and must be enough of it.
    """
    given: list[Tensor] = []

    def forward(norm: _BatchNorm, tensor: Tensor) -> Tensor:
        norm._check_input_dim(tensor)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if is_whole and tensor.numel() == norm.num_features:
            raise ValueError(  # as torch says it
                f"Expected more than 1 value per channel when training, got input size {tensor.size()}"
            )
        given.append(tensor)
        mean = torch.zeros(norm.num_features, dtype=tensor.dtype, device=tensor.device)
        return functional.batch_norm(
            tensor, mean, torch.ones_like(mean), norm.weight, norm.bias, training=False, eps=norm.eps
        )

    with with_forward(() if module is None else shared_norms(module).values(), forward):
        yield given


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
