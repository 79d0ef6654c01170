"""All ops of a task together against its own `forward`: what is traced must be what was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from spindle_cli.analysis.outside import Reader, kept_in
from spindle_cli.errors import WorkloadError
from spindle_cli.profile.checking.compare import Watch, first_line, relative_difference, require_dense
from spindle_cli.profile.checking.values import Values
from spindle_cli.training.precision import NoRandomness
from spindle_cli.workload.arguments import call_forward
from spindle_cli.workload.building.attributes import watching
from spindle_cli.workload.building.contents import last_name
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.refuse import refusal
from spindle_cli.workload.types import Task


def compare_with_forward(task: TaskGraph, batch: Mapping[str, Tensor], values: Values) -> str | None:
    """None: loss and gradients agree on a whole batch, and what forward makes of parameters at its start;
    else why that cannot be told.

    Raises:
        WorkloadError: they differ.
    """
    with values.held() as parameters:
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        try:
            with watching(task.root) as of_forward, NoRandomness(), Watch() as watch:
                plain = _loss_of(task, batch)
            versions = {name: buffer._version for name, buffer in task.root.named_buffers()}
            with watching(task.root) as left, NoRandomness():  # a layer may run again in its backward pass
                expected = _gradients(plain, trained)
                written = [n for n, b in task.root.named_buffers() if b._version != versions.get(n)]
            moved = _moved(task)
            values.start_anew()
            values.give_parameters_anew(parameters)  # an operator may move a teacher
            with watching(task.root), NoRandomness():
                task.move_as_forward()
                averages = _moved(task)
                loss = _run_ops(task, batch)
                gradients = _gradients(loss, trained)
        except Exception as error:  # the user's code, on parameters and numbers that are not its own
            return f"it does not run in float64: {first_line(error)}"
    refuse_read_of_backward(
        task, [buffer for buffer in (*left.left, *written) if buffer not in of_forward.left]
    )
    require_dense(task.task.name, trained, expected)
    if not plain.isfinite() or watch.tolerance is None:
        return "its loss is not finite in float64, or computed in few bits"
    what, relative = _largest(plain, loss, (*expected, *moved), (*gradients, *averages))
    if relative > watch.tolerance:
        raise WorkloadError(
            f"task {task.task.name!r}: what was traced of it is not what its forward computes: on "
            f"{len(next(iter(batch.values())))} samples {what} differs by {relative:.1e} "
            f"(loss {loss.item():.9g} by its operators, {plain.item():.9g} by forward)",
            hint="Something that forward does between operators is not seen by a trace: attributes that it "
            "changes, Python's own random numbers, torch.no_grad or autocast. Put it into an operator. "
            "--no-check goes on without this check.",
        )
    return None


def refuse_read_of_backward(task: TaskGraph, names: Sequence[str]) -> None:
    """Refuse a forward that reads what a backward pass moves: how often that runs, and where, is the plan's.

    Args:
        names: of what one was seen to move, below the task's module.

    Raises:
        WorkloadError: with the first that forward reads.
    """
    if not names:
        return
    reader = Reader([task.root], backward=False)
    for name in names:
        if reader.reads(name, kept_in(task.root, name), reader):
            raise refusal(
                task.task.name,
                f"a backward pass moves {name}, which forward reads: under a plan each device, share and "
                "micro-batch has a backward pass of its own",
                reader.place_of(last_name(name)),
                "Declare a number that follows from the step: Task(..., step_values={'beta': lambda step: "
                "min(1.0, (step + 1) / 100)}). Or move it in an operator's own forward (self.calls += 1), "
                "which then runs whole.",
            )


def _loss_of(task: TaskGraph, batch: Mapping[str, Tensor]) -> Tensor:
    assert isinstance(task.task, Task)
    result = call_forward(task.task, {name: value.clone() for name, value in batch.items()})
    loss: Tensor = result["loss"] if isinstance(result, Mapping) else result
    return loss


def _run_ops(task: TaskGraph, batch: Mapping[str, Tensor]) -> Tensor:
    values = {name: value.clone() for name, value in batch.items()}
    for op in task.ops[:-1]:
        outputs = task.op_module(op)(*(values[name] for name in (*op.fields, *op.inputs)))
        values.update(zip(op.outputs, outputs, strict=True))
    last = task.ops[-1]
    loss: Tensor = task.op_module(last)(*(values[name] for name in (*last.fields, *last.inputs)))
    return loss


def _moved(task: TaskGraph) -> list[Tensor]:
    """Copies of the parameters that forward moves, as they are now."""
    return [task.root.get_parameter(move.slow).detach().clone() for move in task.moves]


def _gradients(loss: Tensor, parameters: Mapping[str, nn.Parameter]) -> Sequence[Tensor | None]:
    return torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)


def _largest(
    plain: Tensor, loss: Tensor, expected: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
) -> tuple[str, float]:
    sizes = [
        float(gradient.abs().max()) for gradient in expected if gradient is not None and gradient.numel()
    ]
    smallest = 1e-3 * max(sizes, default=0.0)
    differences = [(relative_difference(loss, plain, 0.0), "the loss")]
    for gradient, wanted in zip(gradients, expected, strict=True):
        either = gradient if gradient is not None else wanted
        if either is None:
            continue
        ours, reference = (
            torch.zeros_like(either) if grad_or_none is None else grad_or_none
            for grad_or_none in (gradient, wanted)
        )
        differences.append((relative_difference(ours, reference, smallest), "a gradient"))
    relative, what = max(differences)
    return what, relative
