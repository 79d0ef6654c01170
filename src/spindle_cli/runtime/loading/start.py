"""Start the loading processes of a run: of each task that has any one on every node that takes of it."""

from __future__ import annotations

import secrets
import socket
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from spindle_cli.errors import InputError
from spindle_cli.runtime.backends.host_group import host_group
from spindle_cli.runtime.loading.client import NodeBatches
from spindle_cli.runtime.loading.passes import NodePasses
from spindle_cli.runtime.loading.reader import Reading, start_reader
from spindle_cli.workload.data.kind import is_stream
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.training.batches import SampleShape
from spindle_cli.workload.types import FlowTask, Task

_BACKLOG = 1024
_ENDLESS = 2**62  # batches


@dataclass(frozen=True)
class Place:
    """A rank, and the first rank of its node."""

    rank: int
    first_of_node: int


def loads_apart(task: Task | FlowTask, train: TrainSettings) -> bool:
    """Whether a process of its own loads a task's batches for a node: those of every stream, which is read
    once there.

    Raises:
        WorkloadError: it has no dataset that can be read.
    """
    return is_stream(task) or train.loader.of(task.name).workers > 0


def start_loaders(
    tasks: Collection[Task | FlowTask],
    train: TrainSettings,
    wanted: Collection[str],
    numbers: Mapping[str, range],
    place: Place,
    states: Mapping[str, Any],
    shapes: Mapping[str, Mapping[str, SampleShape]],
    *,
    evaluates: bool = False,
) -> dict[str, NodeBatches]:
    """Where this rank gets the batches of the tasks that it takes samples of; collective.

    Args:
        tasks: whose batches are loaded apart.
        wanted: of all tasks, those that this rank takes samples of.
        numbers: by task, of its batches that the run takes.
        states: of streams, to go on from.
        shapes: by task, those of one sample of each field (`SampleShapes`).
        evaluates: see `Reading`.

    Raises:
        InputError: a stream was read by another number of workers.
    """
    tasks = [task for task in tasks if numbers[task.name]]
    if not tasks:
        return {}
    takers = _takers({task.name for task in tasks} & set(wanted), place)
    addresses: dict[str, str] = {}
    children: dict[str, int] = {}
    for task in tasks:
        ranks = takers.get(task.name, ())
        if ranks and ranks[0] == place.rank:
            loading = train.loader.of(task.name)
            reading = Reading(
                task=task,
                seed=train.seed,
                loading=loading,
                numbers=numbers[task.name],
                takers=len(ranks),
                # Ranks are a few batches apart, and a step's at most.
                room=max(1, loading.workers) * loading.prefetch + 2 * train.accumulate + 4,
                state=_state_of(task, states, loading.workers),
                evaluates=evaluates,
            )
            listener, addresses[task.name] = _listen()
            children[task.name] = start_reader(reading, listener)
            listener.close()
    told = _gathered((place.first_of_node, addresses))
    return {
        name: NodeBatches(name, address, children.get(name), shapes.get(name))
        for node, found in told
        if node == place.first_of_node
        for name, address in found.items()
        if name in wanted
    }


def start_evaluation_loaders(
    tasks: Collection[Task | FlowTask], train: TrainSettings, place: Place
) -> dict[str, NodePasses]:
    """Where this rank gets the data of the tasks' evaluations that are read apart; every rank takes all of
    them, to know where they end. Collective.

    Raises:
        WorkloadError: a task has no dataset that can be read.
    """
    given = [replace(task, dataset=task.eval_dataset) for task in tasks if task.eval_dataset is not None]
    apart = [task for task in given if loads_apart(task, train)]
    wanted = {task.name for task in apart}
    found = start_loaders(
        apart, train, wanted, dict.fromkeys(wanted, range(_ENDLESS)), place, {}, {}, evaluates=True
    )
    return {name: NodePasses(batches) for name, batches in found.items()}


def _takers(wanted: set[str], place: Place) -> dict[str, tuple[int, ...]]:
    """By task, the ranks of this node that take samples of it, in order."""
    told = _gathered((place.first_of_node, sorted(wanted)))
    found: dict[str, tuple[int, ...]] = {}
    for rank, (node, names) in enumerate(told):
        for name in names if node == place.first_of_node else ():
            found[name] = (*found.get(name, ()), rank)
    return found


def _state_of(task: Task | FlowTask, states: Mapping[str, Any], workers: int) -> dict[str, Any] | None:
    state: dict[str, Any] | None = states.get(task.name)
    if state is not None and state["workers"] != workers:
        raise InputError(
            f"task {task.name!r}: its stream was read by {state['workers']} loader workers when the "
            f"checkpoint was saved, and train.loader now says {workers}: samples would come in another order",
            hint=f"Set `workers: {state['workers']}` for this task to go on.",
        )
    return state


def _listen() -> tuple[socket.socket, str]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"spindle-{secrets.token_hex(16)}"
    if sys.platform == "linux":  # a name without a file, which goes with the process
        address = f"\0{name}"
    else:
        address = str(Path(tempfile.mkdtemp(prefix="spindle-")) / "loader")
    listener.bind(address)
    listener.listen(_BACKLOG)
    return listener, address


def _gathered(own: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own, group=host_group())
    return gathered
