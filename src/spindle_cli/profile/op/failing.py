"""What is said of an op that fails on real samples, as it would in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from spindle_cli.errors import SpindleError, WorkloadError
from spindle_cli.workload.graph import Op, TaskGraph
from spindle_cli.workload.refuse import place_of_error, refusal


def failures_told(task: TaskGraph, op: Op, samples: int) -> AbstractContextManager[None]:
    """Tell of what an op raises that is run on so many samples, unless it finds too little memory.

    Raises:
        WorkloadError: the op fails.
    """

    def told(error: Exception) -> WorkloadError:
        glue = "its loss, with what leads to it," if op.is_loss else "what is between its layers"
        hint = _of_other_numbers(task, op) or (
            "See whether it does so in plain PyTorch, too: run the task's module on a batch of its dataset. "
            "If not, this is a mistake of ours."
        )
        what = f"{op.target or glue} fails on {samples} samples: {_said(error)}"
        return refusal(task.task.name, what, place_of_error(error), hint)

    return _told_by(told)


def split_failures_told(task: TaskGraph, op: Op, degree: int) -> AbstractContextManager[None]:
    """Tell of what a device's part of an op raises that tensor parallelism splits, unless it finds too little
    memory: such a layer runs whole, so that it is the split that it does not stand.

    Raises:
        WorkloadError: the part fails.
    """

    def told(error: Exception) -> WorkloadError:
        kind = "what is split" if op.target is None else type(task.root.get_submodule(op.target)).__name__
        return refusal(
            task.task.name,
            f"{op.target or 'the op'} ({kind}) fails where {degree} devices have a part of it each: "
            f"{_said(error)}",
            place_of_error(error),
            "What the layer is given for each of its heads or channels stays whole, and its own are a part. "
            f"Mend its entry of `tp_plans`, keep the class whole by an empty one ({kind}: {{}}), or profile "
            "without --tp.",
        )

    return _told_by(told)


@contextmanager
def _told_by(told: Callable[[Exception], WorkloadError]) -> Iterator[None]:
    """Raise what is told of an error in its place, unless that is ours or of memory."""
    try:
        yield
    except SpindleError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise told(error) from error


def _said(error: Exception) -> str:
    """Return the class of an error, and the first line of what it says."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a share of these samples does not fit."""
    # On the CPU torch raises a plain RuntimeError from its allocator.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _of_other_numbers(task: TaskGraph, op: Op) -> str | None:
    """Return what to do about fields in other floating-point numbers than the op's parameters."""
    parameter_dtypes = {parameter.dtype for parameter in task.op_module(op).parameters()}
    fields = [task.fields[name] for name in op.fields]
    others = [
        field
        for field in fields
        if parameter_dtypes and field.dtype.is_floating_point and field.dtype not in parameter_dtypes
    ]
    if not others:
        return None
    told = ", ".join(sorted(map(_name, parameter_dtypes)))
    return (
        f"Field {others[0].name!r} is {_name(others[0].dtype)}, and parameters are {told}: let the dataset "
        "give it so, or forward convert it."
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
