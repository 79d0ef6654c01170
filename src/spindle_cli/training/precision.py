"""In which floating-point numbers a workload is computed, as its train settings say; and computing it without
chance: dropout keeps everything, and whatever else is drawn is the same in every run.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from types import FunctionType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from spindle_cli.errors import WorkloadError
from spindle_cli.training.mode_in_backward import ModeInBackward
from spindle_cli.training.wide import WideCasts, constants_of_modules, handed_on, twin_of
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


# Arguments of torch's operations that are a probability to drop something; `p` where the name says dropout.
_RATES = ("dropout_p", "dropout")
_MASKS = frozenset({"bernoulli", "bernoulli_"})  # a call of dropout divides them by their mean
_ORDERS = frozenset({"randperm"})
_WHOLE_NUMBERS = frozenset({"randint", "randint_like", "random", "random_"})
_HALF = 0.5
# Of as many functions of torch it is remembered how they name what chance depends on.
_REMEMBERED = 4096


class NoRandomness:
    """Inside, torch's operations draw nothing.

    Dropout drops nothing. In the place of numbers is the mean of what they are drawn from (0 for randn, 0.5
    for rand), whole numbers are the smallest, and orders stay as they are. So results depend on the samples
    alone, and not on how they are split or in which order things are run.

    The modules themselves are not changed, and neither is the workload's fingerprint.

    Attributes:
        replaced: whether anything would have been drawn.
    """

    def __init__(self) -> None:
        self.replaced = False
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        self._entered.enter_context(_Draws(self))
        self._entered.enter_context(_Rates(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()


class _Rates(ModeInBackward):
    """Rates are 0 where torch's functions are called, so that autograd records none either: a kernel that
    drops and scales at once (`native_dropout`, flash attention) has its rate in its backward pass, too.
    """

    def __init__(self, inside: NoRandomness) -> None:
        super().__init__()
        self._inside = inside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = handed_on(func, kwargs)
        for lists, places in _forms(func):
            if _is_called_as(lists, args):
                changed = list(args)
                for name, (position, without) in places.items():
                    if position < len(changed):
                        self._inside.replaced |= changed[position] != without
                        changed[position] = without
                    else:
                        self._inside.replaced |= kwargs.get(name, _UNSAID) != without
                        kwargs = {**kwargs, name: without}
                return self.call(func, changed, kwargs)
        return self.call(func, args, kwargs)


_UNSAID = object()
# Of one form of a function: which of its arguments are lists, and, by name, where it takes what chance
# depends on and what that is without it.
_Form = tuple[tuple[bool, ...], Mapping[str, tuple[int, float | bool]]]


@lru_cache(_REMEMBERED)
def _forms(func: Any) -> tuple[_Form, ...]:
    """Return the forms of a function that take what chance depends on."""
    name = getattr(func, "__name__", "")
    forms: list[_Form] = []
    if isinstance(func, FunctionType):
        names: list[str] = []
        with contextlib.suppress(ValueError):  # it is around a function of C, as x ** y is
            names = list(inspect.signature(func).parameters)
        forms.append(((), _places(name, names)))
    else:
        for schema in _schemas(func, name):
            names = [argument.name for argument in schema.arguments]
            lists = tuple(isinstance(argument.type, torch.ListType) for argument in schema.arguments)
            forms.append((lists, _places(schema.name, names)))
    return tuple(form for form in forms if form[1])


def _schemas(func: Any, name: str) -> list[Any]:
    """torch's own description of each form of an operation, or of the function that calls it."""
    if isinstance(func, torch._ops.OpOverload):
        return [func._schema]
    packet = func if isinstance(func, torch._ops.OpOverloadPacket) else getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return []
    forms: list[str] = packet.overloads()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return [getattr(packet, form)._schema for form in forms]


def _places(function: str, names: list[str]) -> dict[str, tuple[int, float | bool]]:
    """Return the places of the arguments that chance depends on, and their values without chance."""
    without: dict[str, float | bool] = dict.fromkeys(_RATES, 0.0)
    if "dropout" in function:
        without["p"] = 1.0 if "_fused_dropout" in function else 0.0  # of that it is how much it keeps
    if "rrelu" in function:
        without["training"] = False
    return {name: (place, without[name]) for place, name in enumerate(names) if name in without}


def _is_called_as(lists: tuple[bool, ...], args: Any) -> bool:
    pairs = zip(lists, args, strict=False)
    return all(is_list == isinstance(given, list | tuple) for is_list, given in pairs)


class _Draws(TorchDispatchMode):
    """What operations draw is replaced where they are computed; and rates that no function was called with,
    as a compiled library sets them.
    """

    def __init__(self, inside: NoRandomness) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self._inside = inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        arguments = func._schema.arguments
        names = [argument.name for argument in arguments]
        # Torch leaves out what is as by default.
        defaults = {formal.name: formal.default_value for formal in arguments if formal.has_default_value()}
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        name = func._schema.name.removeprefix("aten::")
        places = _places(name, names)
        if places:
            without = {rate: value for rate, (_, value) in places.items()}
            self._inside.replaced |= any(given[rate] != value for rate, value in without.items())
            return func(**{**given, **without})
        self._inside.replaced = True
        result = func(*args, **kwargs)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                _settle(name, tensor, given)
        return result


@contextmanager
def computing_as_asked(dtype: torch.dtype | None, *, no_randomness: bool) -> Iterator[None]:
    """Train inside as a request says: constants that code makes have `dtype`, if given, and no chance takes
    part.
    """
    constants = nullcontext() if dtype is None else constants_in(dtype)
    with constants, NoRandomness() if no_randomness else nullcontext():
        yield


def _settle(name: str, tensor: Tensor, given: dict[str, Any]) -> None:
    """Put in the place of drawn values what they are without chance."""
    if name in _MASKS:
        mean = given.get("p", given["self"])
        tensor.copy_(mean) if isinstance(mean, Tensor) else tensor.fill_(mean)
    elif name in _ORDERS:
        tensor.copy_(torch.arange(tensor.numel(), device=tensor.device).to(tensor.dtype))
    elif name in _WHOLE_NUMBERS:
        low = given.get("low", given.get("from"))
        tensor.fill_(0 if low is None else low)
    elif name.startswith(("normal", "randn")):
        mean = given.get("mean", 0.0)
        tensor.copy_(mean) if isinstance(mean, Tensor) else tensor.fill_(mean)
    elif name == "uniform_":
        tensor.fill_((given.get("from", 0.0) + given.get("to", 1.0)) * _HALF)
    elif tensor.is_floating_point():
        tensor.fill_(_HALF)
    else:
        tensor.fill_(0)
