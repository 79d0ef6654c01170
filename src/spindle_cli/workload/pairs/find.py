"""Which losses that couple the samples of a batch can be split all the same: contrastive ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from spindle_cli.workload.graph import Op, TaskGraph, ValueSpec
from spindle_cli.workload.pairs.follow import Argument
from spindle_cli.workload.pairs.recipe import make_recipe
from spindle_cli.workload.pairs.record import record
from spindle_cli.workload.pairs.steps import Gather
from spindle_cli.workload.rules.states import MixesError
from spindle_cli.workload.types import Workload

NAMED = "it is named as contrastive, but it cannot be split: {why}"
_COUNTS = "its loss is also a mean over what counts"
_WHOLE = "it takes a value that is not one per sample from another operator"
_NO_PAIRS = "it compares no samples with each other"


def split_pairs(task: TaskGraph, workload: Workload) -> TaskGraph:
    """A task with its loss as one that is split, where that is contrastive. Where the workload names it as
    that and it cannot be split, its reason says why.
    """
    loss = task.ops[-1]
    if not loss.coupled or loss.coupled_because is None or task.task.batch_size < 2:
        return task
    try:
        _check(task, loss)
    except MixesError as error:
        if loss.target is None or not isinstance(task.root.get_submodule(loss.target), workload.contrastive):
            return task
        found = replace(loss, coupled_because=NAMED.format(why=error))
    else:
        found = replace(loss, coupled=False, coupled_because=None, contrasts=True)
    return replace(task, ops=(*task.ops[:-1], found))


def _check(task: TaskGraph, loss: Op) -> None:
    """Raise MixesError unless a share of a loss can be computed, with what is compared gathered."""
    assert loss.shares is not None, "the last op holds the loss"
    if loss.shares.num_counts or loss.shares.all_must_count:
        raise MixesError(_COUNTS)
    if not loss.inputs or any(task.values[name].batch_dim is None for name in loss.inputs):
        raise MixesError(_WHOLE)
    module = fx.GraphModule(task.root, loss.graph)
    recording = record(module, module, arguments_of(task, loss), task.task.batch_size)
    if not any(isinstance(action, Gather) for action in make_recipe(recording).actions):
        raise MixesError(_NO_PAIRS)


def arguments_of(task: TaskGraph, op: Op, tensors: Sequence[Tensor] = ()) -> list[Argument]:
    """What an op is given; `tensors`: a share of it, for their dtypes and devices."""
    specs = [*(task.fields[name] for name in op.fields), *(task.values[name] for name in op.inputs)]
    cpu = torch.device("cpu")
    if not tensors:
        return [_argument(spec, spec.dtype, cpu) for spec in specs]
    return [_argument(spec, t.dtype, t.device) for spec, t in zip(specs, tensors, strict=True)]


def _argument(spec: ValueSpec, dtype: torch.dtype, device: torch.device) -> Argument:
    return Argument(spec.shape, dtype, device, spec.batch_dim, spec.rows_per_sample)
