"""The fingerprint of a workload: what a profile and a plan were made for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spindle_cli.files.artifact import sha256_of
from spindle_cli.workload.graph import MetaOp, Op, TaskGraph, ValueSpec


def fingerprint(
    tasks: dict[str, TaskGraph], metaops: tuple[MetaOp, ...], declared: Sequence[object] = ()
) -> str:
    """'sha256:...' of the MetaGraph, the ops' structure, every shape, who shares parameters with whom, and
    what else is done to them (`after_update.described`).

    It does not depend on parameter values, on the dataset's contents, or on how the workload is trained.
    """
    data: dict[str, Any] = {
        "metaops": [_metaop(metaop) for metaop in metaops],
        "tasks": {name: _task(task) for name, task in tasks.items()},
    }
    if declared:
        data["declared"] = list(declared)
    return sha256_of(data)


def _metaop(metaop: MetaOp) -> dict[str, Any]:
    return {
        "name": metaop.name,
        "task": metaop.task,
        "ops": list(metaop.ops),
        "inputs": list(metaop.inputs),
        "inputs_of_every_op": list(metaop.inputs_of_every_op),
        "parameters": metaop.parameters,
        "parameter_blocks": None if metaop.parameter_blocks is None else list(metaop.parameter_blocks),
        "coupled": metaop.coupled,
    }


def _task(task: TaskGraph) -> dict[str, Any]:
    return {
        "batch_size": task.task.batch_size,
        "weight": float(task.task.weight),
        "reduction": task.task.reduction,
        "fields": [_value(value) for value in task.fields.values()],
        "values": [_value(value) for value in task.values.values()],
        "ops": [_op(task, op) for op in task.ops],
    }


def _op(task: TaskGraph, op: Op) -> dict[str, Any]:
    parameters = [task.root.get_parameter(name) for name in op.parameters]
    return {
        "kind": op.kind,
        "target": op.target,
        "inputs": list(op.inputs),
        "outputs": list(op.outputs),
        "parameters": [
            [name, list(parameter.shape), str(parameter.dtype), parameter.requires_grad]
            for name, parameter in zip(op.parameters, parameters, strict=True)
        ],
    }


def _value(value: ValueSpec) -> list[Any]:
    return [value.name, list(value.shape), str(value.dtype), value.batch_dim, value.requires_grad]
