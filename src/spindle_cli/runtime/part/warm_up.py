"""Compile a rank's layers before training, while no rank waits for another.

Compiling takes seconds for each kind of layer and shape. In the first step other ranks would wait for it with
the run's timeout, and take this one to hang. So every slice runs once, forward and backward, on zeros, and on
the values of fields that are the same in every sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spindle_cli.analysis.fixed import rows_of
from spindle_cli.errors import SpindleError, WorkloadError
from spindle_cli.operators.tensor_group import RandomState
from spindle_cli.runtime.part.localise import LocalModel
from spindle_cli.runtime.part.own_ranges import with_memory
from spindle_cli.runtime.step.compute import LocalSlice, run_backward, run_forward
from spindle_cli.runtime.step.held_state import HeldState
from spindle_cli.training.precision import computing
from spindle_cli.workload.graph import LossShares, ValueSpec

# As long as this a rank waits for others that compile.
COMPILE_S = 3600


def compile_layers(model: LocalModel, device: torch.device) -> None:
    """Compile what this rank runs, and wait until every rank has; collective. Nothing is changed by it.

    Slices inside of which devices sum something (tensor parallelism, batch norms) are not compiled, and not
    run.

    Raises:
        WorkloadError: a layer cannot be compiled.
    """
    if model.train.compile is None:
        return
    waiting = dist.new_group(backend="gloo", timeout=timedelta(seconds=COMPILE_S))
    with _unchanged(model, device):
        for local in model.slices.values():
            if local.group is None and local.shares is None:
                with with_memory(_shared_out_of(local, model)):
                    _run(local, model, device)
    dist.barrier(group=waiting)
    dist.destroy_process_group(waiting)


def _shared_out_of(local: LocalSlice, model: LocalModel) -> list[nn.Parameter]:
    """The parameters without memory that a slice uses."""
    task = local.wired.task.task.name
    cuts = {
        model.cuts.by_name[model.table.names[task, dotted]]
        for op in local.wired.ops
        for dotted in op.parameters
    }
    used = {cut.key(index) for cut in cuts for index in range(cut.count)}
    return [model.parameters[key] for key in model.shards if key in used]


def _run(local: LocalSlice, model: LocalModel, device: torch.device) -> None:
    wired = local.wired

    def zeros(spec: ValueSpec) -> torch.Tensor:
        shape = spec.shape_of(local.samples[1] - local.samples[0])
        if spec.row is not None:  # whose values are read
            return rows_of(spec.row, shape, spec.dtype).to(device)
        return torch.zeros(shape, dtype=spec.dtype, device=device)

    try:
        with computing(model.train, device.type):
            run = run_forward(
                local,
                {name: zeros(wired.task.fields[name]) for name in wired.fields},
                {spec.name: zeros(spec) for spec in wired.inputs},
                {},
                lambda _: None,
                _loss_arguments(wired.loss_shares, device),
            )
        run_backward(run, {name: torch.zeros_like(value) for name, value in run.outputs.items()}, 1.0)
    except SpindleError:
        raise
    except Exception as error:
        # torch's compiler raises errors of many kinds, which say where in the layer they come from.
        raise WorkloadError(
            f"train.compile: a layer of {wired.slice.label} cannot be compiled: {type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0]}",
            hint="The worker's log has all of it. Put @torch.compiler.disable on the layer's forward, or "
            "leave train.compile out of the workload file.",
        ) from error


def _loss_arguments(shares: LossShares | None, device: torch.device) -> list[Any]:
    count = 0 if shares is None else shares.num_counts
    return [1.0, *torch.ones(count, dtype=torch.float64, device=device)]


@contextmanager
def _unchanged(model: LocalModel, device: torch.device) -> Iterator[None]:
    """Buffers, attributes, gradients and random state are afterwards what they were."""
    random = RandomState.now(device)
    held = [HeldState(module) for local in model.slices.values() for module in local.modules]
    try:
        yield
    finally:
        random.restore()
        for state in held:
            state.restore()
        for parameter in model.parameters.values():
            parameter.grad = None
