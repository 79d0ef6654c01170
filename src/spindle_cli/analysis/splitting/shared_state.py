"""What an operator changes in its forward and others use: parameters (a teacher, a codebook), buffers that it
computes with (a spectral norm's), what it counts or keeps in attributes.

In one process whoever comes next goes on from what the one before has left. Here each device has a copy, and
an operator changes that of its own device alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache

from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from spindle_cli.analysis.outside import Reader, kept_in
from spindle_cli.analysis.splitting.carried import SOMETHING
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.building.contents import last_name
from spindle_cli.workload.graph import Op, ParameterTable, TaskGraph
from spindle_cli.workload.refuse import refusal

_OF_ITS_OWN = (
    "Give each task one of its own; of several calls in one task, let one operator, called once, make all."
)
_UNREAD = (
    "Leave it out where nothing needs it; a number that follows the steps is declared (Task.step_values)."
)
_NO_SPECTRAL_NORM = (
    "Or divide by the norm itself, which keeps nothing: torch.nn.utils.parametrize.register_parametrization("
    "layer, 'weight', Spectral()) where forward(self, w) gives w / torch.linalg.matrix_norm(w.flatten(1), 2)."
)


def refuse_shared_state(tasks: Mapping[str, TaskGraph]) -> None:
    """Refuse an operator that changes what another op, or another call of it, computes with.

    Raises:
        WorkloadError: with the operator and the other user.
    """
    table = ParameterTable.of_tasks(tasks)
    keepers: dict[object, tuple[TaskGraph, Op]] = {}
    leavers: list[tuple[TaskGraph, Op, str]] = []
    for task in tasks.values():
        for op in task.ops:
            for name in op.changes:
                _refuse_changed(tasks, table, task, op, name)
            for name in op.kept:
                if name == SOMETHING:
                    continue
                first_keeper = keepers.setdefault(kept_in(task.root, name), (task, op))
                if first_keeper[1] is not op:
                    raise _goes_on(task, op, f"keeps {name}", first_keeper, f"{_OF_ITS_OWN} {_UNREAD}")
            leavers += [(task, op, name) for name in op.left]
    if leavers:
        _refuse_readers(tasks, leavers)


def refuse_left_for_others(
    tasks: Mapping[str, TaskGraph], left_between: Mapping[str, Mapping[object, str]]
) -> None:
    """Refuse a task whose forward leaves something between operators, in an object, a class or a file, that
    another task's reads and leaves nothing in: that one finds what was there when it was traced.

    Args:
        left_between: by task, what it leaves: places (`kept_in`) with their names.

    Raises:
        WorkloadError: with both tasks, and what to do.
    """
    readers = cache(lambda name: Reader([tasks[name].root]))
    for leaver, places in left_between.items():
        for (place, dotted), reader in itertools.product(places.items(), tasks):
            leaves_too = place in left_between.get(reader, {})
            if not leaves_too and readers(reader).reads(dotted, place, readers(leaver)):
                raise refusal(
                    leaver,
                    f"forward sets {dotted} between operators, which that of task {reader!r} reads, maybe on "
                    "another device, where it stays what it was",
                    readers(leaver).place_of(last_name(dotted)),
                    f"Let one task compute both losses, with the number in a variable. {_UNREAD}",
                )


def _refuse_changed(
    tasks: Mapping[str, TaskGraph], table: ParameterTable, task: TaskGraph, op: Op, local_name: str
) -> None:
    name = table.names[task.task.name, local_name]
    users = [(tasks[user], tasks[user].ops[index]) for user, index in table.users[name]]
    others = [user for user in users if user[1] is not op]
    if not others:
        return
    if name in table.parameters:
        raise _moves_parameter(task, op, name, table.is_trainable(name), others[0])
    readers = [
        user
        for user in users
        if any(table.names[user[0].task.name, read_name] == name for read_name in user[1].reads)
    ]
    if readers:
        hint = (
            f"{_OF_ITS_OWN} {_NO_SPECTRAL_NORM}"
            if _is_of_spectral_norm(task.root, local_name)
            else _OF_ITS_OWN
        )
        peer = next((user for user in others if user[1] in [reader for _, reader in readers]), others[0])
        raise _goes_on(task, op, f"changes the buffer {name!r}", peer, hint)


def _refuse_readers(tasks: Mapping[str, TaskGraph], leavers: Sequence[tuple[TaskGraph, Op, str]]) -> None:
    """Refuse an operator that reads what another leaves in an object, a file or a module that both know."""

    @cache
    def reader_of(task: str, op: int) -> Reader:
        graph = tasks[task]
        calls = graph.ops[op].graph.find_nodes(op="call_module")
        return Reader(graph.root.get_submodule(str(call.target)) for call in calls)

    by_place: dict[object, list[tuple[TaskGraph, Op, str]]] = {}
    for task, op, name in leavers:
        by_place.setdefault(kept_in(task.root, name), []).append((task, op, name))
    for task in tasks.values():
        for op in task.ops:
            for place, left in by_place.items():
                if any(leftover[1] is op for leftover in left):
                    continue  # what it leaves itself and reads is known to come before it, or kept
                for leaver, leaving_op, name in left:
                    reader = reader_of(task.task.name, op.index)
                    if reader.reads(name, place, reader_of(leaver.task.name, leaving_op.index)):
                        raise refusal(
                            leaver.task.name,
                            f"the forward of {leaving_op.target or 'glue'!r} leaves {name}, which "
                            f"{op.target or 'glue'!r} of task {task.task.name!r} reads, maybe on another "
                            "device, where that is not",
                            leaving_op.place,
                            "Let the operator return it, and give it to the other as an argument; or let one "
                            "operator do both.",
                        )


def _moves_parameter(
    task: TaskGraph, op: Op, name: str, is_trained: bool, peer: tuple[TaskGraph, Op]
) -> WorkloadError:
    which = "are trained" if is_trained else "are not trained"
    return refusal(
        task.task.name,
        f"the forward of {op.target or 'glue'!r} changes parameters that {which}, {name!r} among them, "
        f"and {peer[1].target or 'glue'!r} of task {peer[0].task.name!r} uses it too, maybe on another "
        "device, which would not see it changed",
        op.place,
        "Let one operator, called once, do both: change them and compute with them."
        + (
            " Or compute with what it would become, without writing it: "
            "functional.linear(x, functional.normalize(self.weight))."
            if is_trained
            else ""
        ),
    )


def _goes_on(task: TaskGraph, op: Op, does: str, peer: tuple[TaskGraph, Op], hint: str) -> WorkloadError:
    """The refusal of what goes on from what another op has left."""
    return refusal(
        task.task.name,
        f"the forward of {op.target or 'glue'!r} {does}, from which {_who(task, op, peer)} on, maybe on "
        "another device, which would not see it changed",
        op.place,
        hint,
    )


def _who(task: TaskGraph, op: Op, peer: tuple[TaskGraph, Op]) -> str:
    if peer[0] is task and peer[1].target == op.target:
        return "another call of it goes"
    return f"{peer[1].target or 'glue'!r} of task {peer[0].task.name!r} goes"


def _is_of_spectral_norm(root: nn.Module, buffer: str) -> bool:
    owner = root.get_submodule(buffer.rpartition(".")[0])
    hooks = owner._forward_pre_hooks.values()
    is_old = any(isinstance(hook, SpectralNorm) for hook in hooks)
    return is_old or isinstance(owner, _SpectralNorm)
