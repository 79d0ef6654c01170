"""In which floating-point numbers a workload is computed, as its train settings say; and computing it without
chance: dropout keeps everything, and whatever else is drawn is the same in every run.

Torch puts a mode away while one of its functions runs, and the walk back through a graph is one: modes are
put on again for that.

In a comparison in float64 the user's code is computed in that as well: its constants, and its casts. A trace
holds `torch.tensor([0.1, 0.3])` as it was made: rounded to float32. Plain PyTorch makes it anew in every
step, in a comparison in float64 without that rounding. So each such tensor has a twin, made by the same calls
in float64, which stands in its place wherever a task is computed in that. Losses and norms are often written
with `.float()` or `dtype=torch.float32`, for what is trained in fewer bits. In a comparison in float64 they
would round to 1e-7, and shares of a mean otherwise than the whole. So such casts are to float64 then.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from types import FrameType, FunctionType
from typing import Any, Self

import torch
import torch.nn.functional as functional
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import CONSTANT, TaskGraph, ValueSpec, WorkloadGraph

_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
# What all three of them call in the end: it asks no mode any more.
_ENGINE = "_engine_run_backward"
_RUN_ENGINE: Callable[..., Any] = getattr(torch.autograd, _ENGINE)


class ModeInBackward(TorchFunctionMode):
    """A mode whose `__torch_function__` hands calls on by `call`."""

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function of torch; while one walks back through a graph, the mode is on again."""
        if func not in _BACKWARD:
            return func(*args, **kwargs)
        with _put_on_again(self):
            return func(*args, **kwargs)


class _PutAway(threading.local):
    """The modes that this thread has put away for a backward pass about to begin, the inmost first."""

    def __init__(self) -> None:
        self.modes: list[TorchFunctionMode] = []


_put_away = _PutAway()
_lock = threading.Lock()
_in_use = 0


@contextmanager
def _put_on_again(mode: TorchFunctionMode) -> Iterator[None]:
    """Threads may come and go in any order: torch's own function is back when the last has gone."""
    global _in_use
    with _lock:
        _in_use += 1
        setattr(torch.autograd, _ENGINE, _run_engine)
    _put_away.modes.append(mode)
    try:
        yield
    finally:
        _put_away.modes.pop()
        with _lock:
            _in_use -= 1
            if _in_use == 0:
                setattr(torch.autograd, _ENGINE, _RUN_ENGINE)


def _run_engine(*args: Any, **kwargs: Any) -> Any:
    modes, _put_away.modes = _put_away.modes, []  # a backward pass inside of this one has its own
    try:
        with ExitStack() as on:
            for mode in reversed(modes):
                on.enter_context(mode)
            return _RUN_ENGINE(*args, **kwargs)
    finally:
        _put_away.modes = modes


_TWIN = "_made_in_float64"
_NOT_MADE = object()
_IN_PLACE = frozenset(
    {"__setitem__", "__set__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv"))}
    | {f"__i{name}__" for name in ("mod", "pow", "and", "or", "xor", "lshift", "rshift", "div")}
)
_FLOAT: Callable[..., Any] = Tensor.float
_COMPLEX: Callable[..., Any] = Tensor.cfloat  # type: ignore[attr-defined]  # torch gives it no type
_TYPE: Callable[..., Any] = Tensor.type
_TYPE_NAMES = ("torch.FloatTensor", "torch.cuda.FloatTensor")


class MadeInFloat64(TorchFunctionMode):
    """Inside, what is computed of numbers is computed in float64 as well, beside what the caller gets.

    Both ways have tensors of their own, so that what one of them changes in place the other does not see.
    """

    def __init__(self, is_looking: Callable[[], bool]) -> None:
        """`is_looking`: whether calls only find out what is known, and nothing of them stays."""
        super().__init__()
        self._is_looking = is_looking

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = handed_on(func, kwargs)
        if self._is_looking():
            return func(*args, **kwargs)
        given = _leaves((args, kwargs))
        result = func(*args, **kwargs)
        if any(isinstance(leaf, fx.Proxy) for leaf in given):
            return result
        written = kwargs.get("out", args[0] if args else None) if _writes(func, kwargs) else None
        if written is None:
            has_twin = bool(_tensors(result))
        else:
            has_twin = isinstance(written, Tensor) and twin_of(written) is not None
        if has_twin:
            wide = _in_float64(func, args, kwargs)
            if wide is not _NOT_MADE:
                _give_twins(result, wide, given)
            elif written is not None:
                delattr(written, _TWIN)
        return result


def _give_twins(result: Any, wide: Any, given: Sequence[Any]) -> None:
    """Let the tensors of a result that were not `given` have those of the same call in float64 as twins."""
    before = set(map(id, given))
    for narrow, twin in zip(_tensors(result), _tensors(wide), strict=True):
        # What lives on might be another by the time that it is asked for; a view of a parameter is none.
        if id(narrow) not in before and not _lie_in_one_memory(narrow, twin):
            setattr(narrow, _TWIN, twin)


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors of an argument or a result."""
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]


def twin_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor as it is made in float64, where that is known."""
    twin: Tensor | None = getattr(tensor, _TWIN, None)
    return twin


def constants_of_modules(root: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield the tensors that modules hold and are neither parameters nor buffers, each with the attributes
    that it is among and its name there: those that a trace has left on its root, and the modules' own.
    """
    for module in root.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield vars(module), name, value


def forget_equal_twins(root: nn.Module) -> None:
    """Keep the twins of what float32 has rounded alone."""
    for _, name, constant in constants_of_modules(root):
        twin = twin_of(constant) if name.startswith(CONSTANT) else None
        if twin is not None and not constant.is_meta and torch.equal(constant.to(twin.dtype), twin):
            delattr(constant, _TWIN)


def _in_float64(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return what a call gives of the twins; `_NOT_MADE` where torch has it not in float64: then plain
    PyTorch would fail there, too, and says so.
    """
    wide_args, wide_kwargs = fx.node.map_aggregate((args, kwargs), _wide)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with WideCasts():
            return func(*wide_args, **wide_kwargs)
    except (RuntimeError, TypeError, ValueError):
        return _NOT_MADE
    finally:
        torch.set_default_dtype(before)


def _lie_in_one_memory(first: Tensor, second: Tensor) -> bool:
    if first.layout is not torch.strided or second.layout is not torch.strided:
        return False
    return bool(first.untyped_storage()._cdata == second.untyped_storage()._cdata)


def _wide(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    twin = twin_of(value)
    return value if twin is None else twin


def _leaves(value: Any) -> list[Any]:
    return list(_entries(value))


def _entries(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for entry in value:
            yield from _entries(entry)
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _entries(entry)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def _writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    name: str = getattr(func, "__name__", "")
    return "out" in kwargs or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


class WideCasts(ModeInBackward):
    """Inside, float64 stands wherever code says float32, and complex128 where it says complex64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = handed_on(func, kwargs)
        if func is _FLOAT:
            return args[0].double(**kwargs)
        if func is _COMPLEX:
            return args[0].cdouble(**kwargs)
        if func is _TYPE and len(args) > 1 and args[1] in _TYPE_NAMES:
            return args[0].double()
        for arg in args:  # this is asked of every call: a loop takes half as long as any()
            if arg is torch.float32 or arg is torch.complex64:
                args = tuple(map(_widened, args))
                break
        if kwargs:
            kwargs = {name: _widened(arg) for name, arg in kwargs.items()}
        return self.call(func, args, kwargs)


def handed_on(func: Callable[..., Any], kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Return the keywords of a call that a mode has got, with the weight of `l1_loss`, which torch 2.13 hands
    on to no mode or tracer.
    """
    given = kwargs or {}
    return {**l1_loss_weight(), **given} if func is functional.l1_loss else given


def l1_loss_weight() -> dict[str, Any]:
    """Return the weight of the call of l1_loss that is under way."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        weight = frame.f_locals.get("weight") if frame.f_code is functional.l1_loss.__code__ else None
        if weight is not None:
            return {"weight": weight}
        frame = frame.f_back
    return {}


def _widened(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    return torch.complex128 if value is torch.complex64 else value


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
