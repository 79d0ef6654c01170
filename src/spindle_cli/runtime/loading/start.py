"""Start the loading processes of a run: of each task that has any one on every node that takes of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from spindle_cli.errors import InputError
from spindle_cli.runtime.backends.host_group import host_group
from spindle_cli.runtime.loading.client import NodeBatches
from spindle_cli.runtime.loading.passes import NodePasses
from spindle_cli.runtime.loading.reader import Order, Reader, Source
from spindle_cli.training.batches import SampleShape
from spindle_cli.training.data.streams import is_stream
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.types import FlowTask, Task, Workload

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


class Readers:
    """The loading processes of a node, which its first rank forks before any of its ranks takes its device:
    one of each task that is loaded apart, and of each that is evaluated on such data.
    """

    def __init__(
        self,
        workload: Workload,
        train: TrainSettings,
        *,
        is_first: bool,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        """`is_first`: whether this rank is its node's first. `forget`: see `Reader`.

        Raises:
            WorkloadError: a task has no dataset that can be read.
        """
        self.trained = [task for task in workload.tasks if loads_apart(task, train)]
        evaluated = [
            replace(task, dataset=task.eval_dataset)
            for task in workload.all_tasks
            if task.eval_dataset is not None
        ]
        self.evaluated = [task for task in evaluated if loads_apart(task, train)]
        self._waiting: dict[tuple[str, bool], Reader] = {}

        def forget_all() -> None:
            for reader in self._waiting.values():
                reader.forget()
            forget()

        for evaluates, tasks in ((False, self.trained), (True, self.evaluated)):
            for task in tasks if is_first else ():
                source = Source(task, train.seed, train.loader.of(task.name), evaluates)
                self._waiting[task.name, evaluates] = Reader(source, forget_all)

    def begin(self, name: str, order: Order | None, *, evaluates: bool) -> tuple[str, int] | None:
        """Have a task's reader load, where this rank has it, and give its address and its process; end it if
        there is nothing for it.
        """
        reader = self._waiting.pop((name, evaluates), None)
        if reader is None:
            return None
        if order is None:
            reader.dismiss()
            return None
        reader.begin(order)
        return reader.address, reader.process


def start_loaders(
    readers: Readers,
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
        readers: of its node.
        wanted: of all tasks, those that this rank takes samples of.
        numbers: by task, of its batches that the run takes.
        states: of streams, to go on from.
        shapes: by task, those of one sample of each field (`SampleShapes`).
        evaluates: see `Source`.

    Raises:
        InputError: a stream was read by another number of workers.
    """
    tasks = readers.evaluated if evaluates else readers.trained
    if not tasks:
        return {}
    read = {task.name for task in tasks if numbers[task.name]}
    takers = _takers(read & set(wanted), place)
    addresses: dict[str, str] = {}
    children: dict[str, int] = {}
    for task in tasks:
        loading = train.loader.of(task.name)
        order: Order | None = None
        if ranks := takers.get(task.name, ()):
            order = Order(
                numbers=numbers[task.name],
                takers=len(ranks),
                # Ranks are a few batches apart, and a step's at most.
                room=max(1, loading.workers) * loading.prefetch + 2 * train.accumulate + 4,
                state=_state_of(task, states, loading.workers),
            )
        begun = readers.begin(task.name, order, evaluates=evaluates)
        if begun is not None:
            addresses[task.name], children[task.name] = begun
    told = _gathered((place.first_of_node, addresses))
    return {
        name: NodeBatches(name, address, children.get(name), shapes.get(name))
        for node, node_addresses in told
        if node == place.first_of_node
        for name, address in node_addresses.items()
        if name in wanted
    }


def start_evaluation_loaders(readers: Readers, train: TrainSettings, place: Place) -> dict[str, NodePasses]:
    """Where this rank gets the data of the tasks' evaluations that are read apart; every rank takes all of
    them, to know where they end. Collective.
    """
    wanted = {task.name for task in readers.evaluated}
    loaders = start_loaders(
        readers, train, wanted, dict.fromkeys(wanted, range(_ENDLESS)), place, {}, {}, evaluates=True
    )
    return {name: NodePasses(batches) for name, batches in loaders.items()}


def _takers(wanted: set[str], place: Place) -> dict[str, tuple[int, ...]]:
    """By task, the ranks of this node that take samples of it, in order."""
    told = _gathered((place.first_of_node, sorted(wanted)))
    ranks_by_task: dict[str, tuple[int, ...]] = {}
    for rank, (node, names) in enumerate(told):
        for name in names if node == place.first_of_node else ():
            ranks_by_task[name] = (*ranks_by_task.get(name, ()), rank)
    return ranks_by_task


def _state_of(task: Task | FlowTask, states: Mapping[str, Any], workers: int) -> dict[str, Any] | None:
    state: dict[str, Any] | None = states.get(task.name)
    if state is not None and state["workers"] != workers:
        raise InputError(
            f"task {task.name!r}: its stream was read by {state['workers']} loader workers when the "
            f"checkpoint was saved, and train.loader now says {workers}: samples would come in another order",
            hint=f"Set `workers: {state['workers']}` for this task to go on.",
        )
    return state


def _gathered(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value, group=host_group())
    return gathered
