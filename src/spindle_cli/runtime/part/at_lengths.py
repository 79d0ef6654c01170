"""What a rank runs of tasks whose batches have several lengths: made when a length comes, and kept."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spindle_cli.analysis.at_lengths import LengthTracer, TaskAtLength, module_over
from spindle_cli.analysis.losses.counts import LossCounter
from spindle_cli.runtime.communication.wiring import WiredEdge, Wiring, wire
from spindle_cli.runtime.part.localise import LocalModel
from spindle_cli.runtime.step.compute import LocalSlice
from spindle_cli.runtime.step.counting import speaks_for_loss
from spindle_cli.training.items import generators_kept
from spindle_cli.training.precision import in_dtype, in_numbers
from spindle_cli.units import format_seconds
from spindle_cli.workload.building.load import load_abstract
from spindle_cli.workload.graph import TaskGraph

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]  # of one sample
Shapes = Mapping[str, Shape]  # by field

# Lengths of each task that are kept; of more, those that came last.
_KEPT = 64


@dataclass(frozen=True)
class LocalTask:
    """A task at one length, as one program of this rank runs it.

    Attributes:
        slices: that this rank runs, by index in the program.
        edges: all of the task's, by producer and consumer.
    """

    slices: dict[int, LocalSlice]
    edges: dict[tuple[int, int], WiredEdge]


@dataclass(frozen=True)
class _AtLength:
    """A task at one length, on one rank.

    Attributes:
        parts: for each of the rank's programs.
        counter: of what its loss counts, where this rank holds it.
    """

    parts: tuple[LocalTask, ...]
    counter: LossCounter | None


class TasksAtLengths:
    """A rank's tasks whose batches have several lengths.

    `names`: of those that it runs slices of. `seconds`: what lengths have taken that came for the first time.
    """

    def __init__(self, model: LocalModel, source: str) -> None:
        """`source`: of the workload, which is built once more, without parameters, for the first length that
        is not the planned one.
        """
        self._model = model
        self._source = source
        self._made: dict[str, OrderedDict[tuple[tuple[str, Shape], ...], _AtLength]] = {}
        self._tracer: LengthTracer | None = None
        self.seconds = 0.0
        running = {local.wired.task.task.name for local in model.slices.values()}
        self.names = tuple(
            name for name, task in model.graph.tasks.items() if task.varying and name in running
        )

    def of(self, part: int, name: str, shapes: Shapes) -> LocalTask:
        """A task for batches with these shapes of one sample, by field, in one of the rank's programs.

        Raises:
            WorkloadError: it cannot be run at this length.
        """
        return self._at_lengths_of(name, shapes).parts[part]

    def _at_lengths_of(self, name: str, shapes: Shapes) -> _AtLength:
        task = self._model.graph.tasks[name]
        varying = {field: tuple(shapes[field]) for field in task.varying}
        key = tuple(varying.items())
        kept = self._made.setdefault(name, OrderedDict())
        if key not in kept:
            planned = all(task.fields[field].shape[1:] == shape for field, shape in key)
            began = time.monotonic()
            kept[key] = self._planned(name) if planned else self._at(name, varying)
            self.seconds += (took_s := time.monotonic() - began)
            shown = ", ".join(f"{field} of {shape}" for field, shape in key)
            print(f"task {name!r}: ready for samples with {shown}: {format_seconds(took_s)}", flush=True)
            if len(kept) > _KEPT:
                kept.popitem(last=False)
        kept.move_to_end(key)
        return kept[key]

    def counters(self, shapes: Mapping[str, Shapes]) -> dict[str, LossCounter | None]:
        """What counts for the losses of a batch, by task; raises what `of` raises."""
        return {name: self._at_lengths_of(name, task_shapes).counter for name, task_shapes in shapes.items()}

    def _planned(self, name: str) -> _AtLength:
        parts = tuple(
            LocalTask(_slices_of(part.slices, name), _edges(part.wiring, name)) for part in self._model.steps
        )
        return _AtLength(parts, self._counter(self._model.graph.tasks[name], {}, name))

    def _at(self, name: str, shapes: Shapes) -> _AtLength:
        model = self._model
        with generators_kept():
            if self._tracer is None:
                workload = load_abstract(self._source, reads_initial=False).workload
                self._tracer = LengthTracer(workload, model.graph, model.memo)
            traced = self._tracer.at(name, shapes)
        constants = self._constants(traced)
        task = traced.over(model.graph.tasks[name])
        graph = replace(model.graph, tasks={**model.graph.tasks, name: task})
        graph = graph if model.dtype is None else in_dtype(graph, model.dtype)
        made: dict[int, LocalSlice] = {}  # by index in `plan.every_slice`, as programs share them
        parts = []
        for part in model.steps:
            wiring = wire(graph, part.program)
            slices = {}
            for index in _slices_of(part.slices, name):
                wired, place = wiring.slices[index], part.places[index]
                if place not in made:
                    there = replace(wired, index=place)
                    made[place] = model.ops.at_length(model.slices[place], there, traced.abstract, constants)
                slices[index] = replace(made[place], wired=wired)
            parts.append(LocalTask(slices, _edges(wiring, name)))
        counter = self._counter(task, constants, name)
        traced.forget()
        return _AtLength(tuple(parts), counter)

    def _constants(self, traced: TaskAtLength) -> dict[str, Tensor]:
        """Gives the constants of a length on the device, in the numbers of the run."""
        device, dtype = self._model.ops.device, self._model.dtype
        return {name: in_numbers(constant, device, dtype) for name, constant in traced.constants.items()}

    def _counter(self, task: TaskGraph, constants: Mapping[str, Tensor], name: str) -> LossCounter | None:
        shares = task.loss_shares
        local_slices = _slices_of(self._model.slices, name).values()
        if shares.counts is None or not any(speaks_for_loss(local) for local in local_slices):
            return None
        return LossCounter(module_over(shares.counts, constants, task.root), shares)


def _slices_of(slices: Mapping[int, LocalSlice], name: str) -> dict[int, LocalSlice]:
    return {index: local for index, local in slices.items() if local.wired.task.task.name == name}


def _edges(wiring: Wiring, name: str) -> dict[tuple[int, int], WiredEdge]:
    return {key: edge for key, edge in wiring.edges.items() if wiring.slices[key[0]].task.task.name == name}
