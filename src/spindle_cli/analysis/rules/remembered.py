"""What torch's operators give on tensors without data, remembered by the shapes that they were given.

A layer is run again and again while a workload is looked at: for several sizes of the batch, as another one's
equal part, for its work and for its memory. On the meta device many operators are taken apart in Python, on
fake tensors all are looked up by long keys; a result that is new memory of a known shape, or a view of what
was given, is made at once.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode

# More than any workload has; then all are forgotten.
_MOST = 100_000
_device_of = torch.ops.prim.device.default
# Beside views and what is done element by element.
_OF_THEIR_KERNELS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten.sum.default,
        torch.ops.aten.sum.dim_IntList,
        torch.ops.aten.mean.default,
        torch.ops.aten.mean.dim,
        torch.ops.aten._softmax.default,
        torch.ops.aten._softmax_backward_data.default,
        torch.ops.aten._log_softmax.default,
        torch.ops.aten._log_softmax_backward_data.default,
        torch.ops.aten.cat.default,
        torch.ops.aten.stack.default,
        torch.ops.aten.clone.default,
    }
)


class _NotKnownError(Exception):
    """An argument or result is of a kind that nothing is remembered of."""


@dataclass(frozen=True)
class _Spec:
    """A tensor: its shape, strides, dtype and (of a fake one) device; of a view also where it begins."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int = 0


@dataclass(frozen=True)
class _Result:
    """What a call gives; `kind`: of a tuple or list of tensors; None: one tensor, new or `is_view` of the
    one that is given.
    """

    specs: tuple[_Spec, ...]
    kind: type | None = None
    is_view: bool = False


class Results:
    """By operator and arguments, what is known of calls that give new tensors or a view, and no more."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], _Result] = {}

    def get(self, key: tuple[Any, ...]) -> _Result | None:
        """What such a call gives; None if it is not known."""
        return self._known.get(key)

    def put(self, key: tuple[Any, ...], result: _Result) -> None:
        """Remember what a call gives."""
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[key] = result


@cache
def results() -> Results:
    """The results that this process remembers: they depend on torch alone."""
    return Results()


class Remembering(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Gives what is remembered in the place of running operators, and remembers what others give.

    For tensors on the meta device, or fake ones of one mode, which has to be entered before. All that may
    write to memory that is there already, depends on values or has a result of another kind is run as ever.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._results = results()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _device_of and isinstance(args[0], FakeTensor):
            fake = args[0]
            return torch.device("meta") if fake.fake_mode.in_kernel_invocation else fake.fake_device
        is_view = _is_view(func)
        if not is_view and not _gives_new_tensors(func):
            return func(*args, **kwargs)
        given = _Given()
        try:
            key = given.key(func, args, kwargs, is_view=is_view)
            remembered = self._results.get(key)
        except (_NotKnownError, TypeError):  # TypeError: an argument has no hash
            return func(*args, **kwargs)
        if remembered is not None:
            return _made(remembered, given)
        out = _by_kernel(func, args, kwargs, given)
        if out is None:
            out = func(*args, **kwargs)
        result = _view_of(out, given) if is_view else _result_of(out, given)
        if result is not None:
            self._results.put(key, result)
        return out


class _Given:
    """The arguments of a call: `mode` of the fake tensors among them, `tensors`: all of them."""

    def __init__(self) -> None:
        self.mode: FakeTensorMode | None = None
        self.tensors: list[Tensor] = []

    def key(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_view: bool
    ) -> tuple[Any, ...]:
        """Take the arguments of a call in; what two calls have in common that give the same.

        Raises:
            _NotKnownError: it is not known what the result depends on, or not worth it.
        """
        parts = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        self.describe(args, parts)
        if is_view:
            if self.mode is None:  # quick enough on the meta device
                raise _NotKnownError
            parts.append(self.tensors[0].storage_offset())
        if kwargs:
            self.describe(tuple(kwargs.items()), parts)
        return tuple(parts)

    def describe(self, values: Any, parts: list[Any]) -> None:
        """Add all that a result may depend on to the parts of a key.

        Raises:
            _NotKnownError: it may depend on something else.
        """
        for value in values:
            kind = type(value)
            if isinstance(value, Tensor):
                if value.layout is not torch.strided:
                    raise _NotKnownError
                parts += (value.shape, value.stride(), value.dtype, self._add(value))
            elif kind is list or kind is tuple:
                parts += (kind, len(value))
                self.describe(value, parts)
            else:
                parts += (kind, value)

    def _add(self, tensor: Tensor) -> torch.device:
        """Its device, of a fake one without asking torch, which would call all modes."""
        mode = _mode_of(tensor)
        if self.tensors and mode is not self.mode:
            raise _NotKnownError
        self.mode = mode
        self.tensors.append(tensor)
        return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def _mode_of(tensor: Tensor) -> FakeTensorMode | None:
    """That of a fake tensor; None: it is on the meta device.

    Raises:
        _NotKnownError: it is another kind of tensor.
    """
    if tensor.layout is not torch.strided or tensor.dtype.is_complex:
        raise _NotKnownError
    if isinstance(tensor, FakeTensor):
        if type(tensor) is not FakeTensor or tensor.constant is not None:
            raise _NotKnownError
        return tensor.fake_mode
    if type(tensor) not in (Tensor, torch.nn.Parameter) or not tensor.is_meta:
        raise _NotKnownError
    return None


@cache
def _gives_new_tensors(func: Any) -> bool:
    """Whether an operator of torch's own takes tensors, gives tensors, and is not said to share memory."""
    if getattr(func, "namespace", "") != "aten" or {
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
    } & set(func.tags):
        return False
    schema = func._schema
    return (
        any("Tensor" in str(argument.type) for argument in schema.arguments)
        and bool(schema.returns)
        and all(str(returned.type) in ("Tensor", "List[Tensor]") for returned in schema.returns)
        and not any(declared.alias_info for declared in (*schema.arguments, *schema.returns))
    )


@cache
def _is_view(func: Any) -> bool:
    """Whether an operator of torch's own gives a view of its first argument, the one tensor that it takes."""
    if getattr(func, "namespace", "") != "aten" or func is torch.ops.aten.as_strided.default:
        return False
    schema = func._schema
    tensors = [argument for argument in schema.arguments if "Tensor" in str(argument.type)]
    return (
        (func.is_view or func is torch.ops.aten._unsafe_view.default)
        and len(tensors) == 1
        and tensors[0] is schema.arguments[0]
        and [str(returned.type) for returned in schema.returns] == ["Tensor"]
    )


def _by_kernel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: _Given) -> Any:
    """Ask torch's kernel for tensors without data what a call on fake ones of one device gives.

    The mode of fake tensors would take most operators apart in Python, so that symbols may stand for sizes:
    that takes ten times as long.

    Returns:
        None where that may not be what the mode gives.
    """
    devices = {tensor.fake_device for tensor in given.tensors if isinstance(tensor, FakeTensor)}
    if given.mode is None or len(devices) != 1 or not _is_of_its_kernel(func):
        return None
    (device,) = devices
    with in_kernel_invocation_manager(given.mode):
        out = func(*args, **kwargs)
    made = [
        FakeTensor(given.mode, item, device) if isinstance(item, Tensor) else item  # a gradient may be None
        for item in ([out] if isinstance(out, Tensor) else out)
    ]
    return made[0] if isinstance(out, Tensor) else type(out)(made)


@cache
def _is_of_its_kernel(func: Any) -> bool:
    """Whether an operator gives on fake tensors what its kernel for tensors without data gives; others may
    ask on which device they run, and find the one of tensors without data.
    """
    return _is_view(func) or torch.Tag.pointwise in func.tags or func in _OF_THEIR_KERNELS


def _view_of(out: Any, given: _Given) -> _Result | None:
    """What to remember of a view; None: it is none of what was given."""
    (base,) = given.tensors
    if (
        type(out) is not FakeTensor
        or out.dtype != base.dtype
        or out.constant is not None
        or out.untyped_storage()._cdata != base.untyped_storage()._cdata
    ):
        return None
    spec = _Spec(tuple(out.shape), out.stride(), out.dtype, out.device, int(out.storage_offset()))
    return _Result((spec,), is_view=True)


def _result_of(out: Any, given: _Given) -> _Result | None:
    """What to remember of a result; None: it is not of new tensors alone, as empty_strided gives them."""
    kind = type(out) if type(out) in (tuple, list) else None
    made = [out] if kind is None else list(out)
    if not given.tensors or not made or not _are_new(made, given):
        return None
    specs = tuple(_Spec(tuple(t.shape), t.stride(), t.dtype, t.device) for t in made)
    result = _Result(specs, kind)
    again = _made(result, given)
    for original, remade in zip(made, [again] if kind is None else again, strict=True):
        if (
            original.untyped_storage().nbytes() != remade.untyped_storage().nbytes()
            or original.storage_offset()
            or original.requires_grad
        ):
            return None
    return result


def _are_new(made: list[Any], given: _Given) -> bool:
    """Whether results are tensors of the arguments' kind, in memory of their own."""
    try:
        if not all(isinstance(item, Tensor) and _mode_of(item) is given.mode for item in made):
            return False
    except _NotKnownError:
        return False
    before = {tensor.untyped_storage()._cdata for tensor in given.tensors}
    storages = before.union(tensor.untyped_storage()._cdata for tensor in made)
    return len(storages) == len(made) + len(before)


def _made(result: _Result, given: _Given) -> Any:
    """Make tensors like those of a remembered result."""
    base = given.tensors[0] if result.is_view else None
    with torch._C.DisableTorchFunction():
        made = [_new(spec, given.mode, base) for spec in result.specs]
    return made[0] if result.kind is None else result.kind(made)


class _Modes(threading.local):
    """This thread's mode of fake tensors; None: it has none yet."""

    fake: FakeTensorMode | None = None


_modes = _Modes()


def fake_mode() -> FakeTensorMode:
    """The mode that makes this thread's fake tensors: torch notes the whole stack, with its lines of source,
    whenever one is made.
    """
    if _modes.fake is None:
        _modes.fake = FakeTensorMode(allow_non_fake_inputs=True)
    return _modes.fake


def new_fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    """A fake tensor on a device, with the shape, strides and dtype of another: made without an operator."""
    spec = _Spec(tuple(tensor.shape), tensor.stride(), tensor.dtype, device)
    with torch._C.DisableTorchFunction():
        return _new(spec, mode, None)


def _new(spec: _Spec, mode: FakeTensorMode | None, base: Tensor | None) -> Tensor:
    if mode is None:
        return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="meta")
    storage = None if base is None else base.untyped_storage()
    with torch._C._DisableTorchDispatch():  # nothing may make a fake tensor of this
        empty = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="meta")
        if storage is not None:
            empty.set_(storage, spec.offset, spec.shape, spec.strides)
    return FakeTensor(mode, empty, spec.device)
