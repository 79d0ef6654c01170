"""In which floating-point numbers a workload is trained, as its train settings say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from spindle_cli.errors import WorkloadError
from spindle_cli.training.wide import WideCasts, constants_of_modules, twin_of
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import TaskGraph, ValueSpec, WorkloadGraph


def number_format(train: TrainSettings) -> torch.dtype | None:
    """Return what parameters, buffers, activations and batch fields are converted to; None: nothing is."""
    return torch.bfloat16 if train.precision == "bf16" else None


def dtype_in(kind: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Return what numbers of a kind are converted to where floating-point ones become `dtype`; None: nothing
    is.

    A complex number stays one: as wide, where torch can compute with such.
    """
    if dtype is None:
        return kind
    if kind.is_complex:
        return {torch.float64: torch.complex128, torch.float32: torch.complex64}.get(dtype, kind)
    return dtype if kind.is_floating_point else kind


def in_numbers(tensor: Tensor, device: torch.device | None, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor on a device, where floating-point numbers become `dtype`; a constant of a trace in
    float64 as it is made in that.
    """
    twin = twin_of(tensor) if dtype is torch.float64 else None
    source = tensor if twin is None else twin
    return source.to(device=device, dtype=dtype_in(source.dtype, dtype))


def convert_module(module: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> None:
    """Move and convert a module's parameters and buffers, in place; where that is to float64, other tensors
    that it holds are converted, too.
    """
    apply: Any = module._apply
    apply(lambda tensor: in_numbers(tensor, device, dtype))
    convert_constants(module, dtype)


def convert_constants(root: nn.Module, dtype: torch.dtype | None) -> None:
    """Convert the tensors that modules hold as mere attributes, the constants of a trace among them, to
    float64, where that is computed in: much of torch takes no numbers of two kinds.
    """
    if dtype is not torch.float64:
        return
    made: dict[int, Tensor] = {}
    for held, name, tensor in list(constants_of_modules(root)):
        if id(tensor) not in made:
            made[id(tensor)] = in_numbers(tensor, None, dtype)
        held[name] = made[id(tensor)]


def computing(train: TrainSettings, device_type: str) -> AbstractContextManager[object]:
    """Return what forward passes run in."""
    if train.autocast is not None:
        return torch.autocast(device_type, getattr(torch, train.autocast))
    return nullcontext()


def set_matmul_precision(train: TrainSettings) -> None:
    """Multiply float32 matrices in this process as the train settings ask."""
    if train.float32_matmul is not None:
        torch.set_float32_matmul_precision(train.float32_matmul)


def compute_convolutions_in_float32() -> None:
    """Let cuDNN take whole float32 numbers for convolutions and recurrent layers, in this process: by itself
    it rounds them to TF32, of 10 bits behind the point, which differ by the algorithm that it picks for a
    share of a batch. What is compared must not.
    """
    torch.backends.cudnn.allow_tf32 = False


def widen_gradients(parameters: Iterable[Tensor], train: TrainSettings) -> None:
    """Have the gradients of these parameters added up in float32, where the train settings ask for it.

    Autograd then casts each gradient before it adds it to `.grad`.

    Raises:
        WorkloadError: torch is too old for gradients of another dtype than their parameter's.
    """
    if not train.widens_gradients:
        return
    if not hasattr(Tensor, "grad_dtype"):
        raise WorkloadError(
            f"train.precision: bf16 adds gradients up in float32, which torch {torch.__version__} cannot",
            hint="Install torch 2.10 or newer, or set train.reduce to 'parameters' in the workload file.",
        )
    for parameter in parameters:
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.grad_dtype = torch.float32


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the type of a parameter's `.grad`."""
    chosen: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return chosen or parameter.dtype


@contextmanager
def constants_in(dtype: torch.dtype) -> Iterator[None]:
    """Constants that code makes have this type, unless it says otherwise; in float64, what code casts to
    float32 stays float64.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with WideCasts() if dtype is torch.float64 else nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


class Computing(nn.Module):
    """A module whose forward pass runs as the train settings say."""

    def __init__(self, module: nn.Module, train: TrainSettings, device_type: str) -> None:
        super().__init__()
        self.module = module
        self._train = train
        self._device_type = device_type

    def forward(self, *inputs: Tensor) -> object:
        """Return what the module makes of its inputs."""
        with computing(self._train, self._device_type):
            return self.module(*inputs)


def in_dtype(graph: WorkloadGraph, dtype: torch.dtype) -> WorkloadGraph:
    """Give a graph with its fields and values of real or complex numbers in another dtype; parameters stay,
    and constants are held as `convert_constants` has it.
    """
    tasks = {name: _task_in_dtype(task, dtype) for name, task in graph.tasks.items()}
    return replace(graph, tasks=tasks)


def _task_in_dtype(task: TaskGraph, dtype: torch.dtype) -> TaskGraph:
    def converted(specs: dict[str, ValueSpec]) -> dict[str, ValueSpec]:
        return {name: replace(spec, dtype=dtype_in(spec.dtype, dtype)) for name, spec in specs.items()}

    convert_constants(task.root, dtype)
    return replace(task, fields=converted(task.fields), values=converted(task.values))
