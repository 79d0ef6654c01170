"""Real inputs for the ops that are timed: a batch of the task's data, sent through the ops before."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spindle_cli.profile.op.failing import failures_told
from spindle_cli.profile.op.jobs import OpRef
from spindle_cli.training.data.reading import first_batch
from spindle_cli.training.precision import computing
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import Op, TaskGraph, ValueSpec, WorkloadGraph


class ChainInputs:
    """Inputs of any op of a workload, for any share of its batch, on one device.

    The first batch of a task goes once through its ops, each by itself as in training, where an op may ask
    for gradients itself. In the place of each op runs the module of its stand-in, an equal op, so that few
    parameters are needed whatever the model's depth: values differ from training's, shapes do not. Of the
    values between ops only what `wanted` ops take is kept.
    """

    def __init__(
        self,
        graph: WorkloadGraph,
        stand_ins: Mapping[OpRef, OpRef],
        wanted: set[OpRef],
        train: TrainSettings,
        device: torch.device,
    ) -> None:
        self._graph = graph
        self._stand_ins = stand_ins
        self._wanted = wanted
        self._train = train
        self._device = device
        self._task: str | None = None
        self._values: dict[str, Tensor] = {}

    def take(self, ref: OpRef, rows: int) -> tuple[Tensor, ...]:
        """Return the op's inputs, fields first, for the first `rows` samples: storages of their own,
        requiring gradients as in training.

        Raises:
            WorkloadError: the task's dataset is too small or its items cannot be collated.
        """
        task = self._graph.tasks[ref.task]
        if self._task != ref.task:
            self._values = self._run(task)
            self._task = ref.task
        op = task.ops[ref.op]
        specs = [task.fields[name] for name in op.fields] + [task.values[name] for name in op.inputs]
        names = [_field(name) for name in op.fields] + list(op.inputs)
        return tuple(_share(self._values[name], spec, rows) for name, spec in zip(names, specs, strict=True))

    def _run(self, task: TaskGraph) -> dict[str, Tensor]:
        """Return every value that a wanted op of the task takes, whole batch; fields under `_field` names."""
        batch = first_batch(task, self._train.seed, task.task.batch_size)
        values = {
            _field(name): batch[name].to(self._device, spec.dtype if spec.dtype.is_floating_point else None)
            for name, spec in task.fields.items()
        }
        last = max((ref.op for ref in self._wanted if ref.task == task.task.name), default=-1)
        kept = {name for op in task.ops if self._is_wanted(task, op) for name in op.inputs}
        for op in task.ops[:last]:
            self._run_op(task, op, values)
            for name in op.inputs:
                if name not in kept and not _is_used_after(task, name, op.index, last):
                    del values[name]
        return values

    def _run_op(self, task: TaskGraph, op: Op, values: dict[str, Tensor]) -> None:
        stand_in = self._stand_ins[OpRef(task.task.name, op.index)]
        equal_task = self._graph.tasks[stand_in.task]
        module = equal_task.op_module(equal_task.ops[stand_in.op]).to(self._device)
        inputs = [values[_field(name)] for name in op.fields]
        inputs += [values[name].requires_grad_(task.values[name].requires_grad) for name in op.inputs]
        told = failures_told(task, op, task.task.batch_size)
        with told, torch.enable_grad(), computing(self._train, self._device.type):
            outputs = module(*inputs)
        given = outputs if isinstance(outputs, tuple) else (outputs,)
        values.update(zip(op.outputs, (output.detach() for output in given), strict=False))

    def _is_wanted(self, task: TaskGraph, op: Op) -> bool:
        return OpRef(task.task.name, op.index) in self._wanted


def _field(name: str) -> str:
    """Key of a batch field among the values; fields and values have names of their own."""
    return f"field:{name}"


def _is_used_after(task: TaskGraph, name: str, index: int, last: int) -> bool:
    return any(name in op.inputs for op in task.ops[index + 1 : last + 1])


def _share(value: Tensor, spec: ValueSpec, rows: int) -> Tensor:
    if spec.batch_dim is not None:
        value = value.narrow(spec.batch_dim, 0, rows * spec.rows_per_sample)
    return value.detach().clone().requires_grad_(spec.requires_grad)
