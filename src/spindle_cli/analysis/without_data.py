"""torch's operators on tensors that have shapes and no data: results remembered by the shapes that they
were given, and functions that look at values.

A layer is run again and again while a workload is looked at, and operators take long on such tensors; a
result that is new memory of a known shape, or a view of what was given, is made at once. What
`gaussian_nll_loss`, `ctc_loss`, torch.distributions and packed sequences look at values for is left out: what
shapes they give, and how they treat samples, is known all the same.
"""

from __future__ import annotations

import math
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.distributions import Distribution
from torch.nn.utils import rnn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from spindle_cli.analysis import fixed
from spindle_cli.workload.refuse import stand_in

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
        """Add all that a result may depend on to the parts of a key; raises where that is not known."""
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
    """That of a fake tensor; None: it is on the meta device. Raises for tensors of other kinds."""
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


class Unread(TorchFunctionMode):
    """Inside, these functions read no value: they treat samples as they do, and give other numbers.

    What is fixed (fixed.py) has its values. Distributions check none.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left = ExitStack()

    def __enter__(self) -> Self:
        self._left.enter_context(not_validated())
        self._left.enter_context(_packed_unread())
        super().__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]  # torch: untyped
        self._left.close()

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        run = _UNREAD.get(func) if callable(func) else None
        return fixed.call(run or func, args, kwargs or {})


@contextmanager
def not_validated() -> Iterator[None]:
    """Let torch.distributions check neither parameters nor values, unless one is told to: they would raise,
    and do nothing else.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Give the loss as torch does, without a look at the variance's sign."""
    if not isinstance(var, Tensor):
        return functional.gaussian_nll_loss(input, target, var, full, eps, reduction)
    if var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    unlike = [var_size for size, var_size in zip(input.shape, var.shape, strict=True) if size != var_size]
    if unlike not in ([], [1]):
        raise ValueError("var is of incorrect size")
    variance = var.clamp(min=eps)
    losses = 0.5 * (variance.log() + (input - target) ** 2 / variance)
    if full:
        losses = losses + 0.5 * math.log(2 * math.pi)
    return _reduced(losses, reduction)


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """One value for each sample, of its own row of each argument; as torch has it where targets are joined
    or lengths are no tensors.
    """
    lengths = (input_lengths, target_lengths)
    if log_probs.dim() != 3 or targets.dim() != 2 or not all(_is_row(length) for length in lengths):
        return functional.ctc_loss(
            log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity
        )
    rows = targets.sum(1) + input_lengths + target_lengths
    return _reduced(log_probs.sum((0, 2)) + rows.to(log_probs.dtype), reduction)


def _is_row(lengths: Any) -> bool:
    return isinstance(lengths, Tensor) and lengths.dim() == 1


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "mean":
        return losses.mean()
    return losses.sum() if reduction == "sum" else losses


_UNREAD: Mapping[Any, Callable[..., Tensor]] = {
    functional.gaussian_nll_loss: _gaussian_nll_loss,
    functional.ctc_loss: _ctc_loss,
}


class _Unpacked:
    """Sequences as a packed sequence has them, padded as before: (samples, positions, ...). A recurrent layer
    of torch's may take them, and `pad_packed_sequence` with its `total_length`; nothing else is known of them
    without their lengths.
    """

    def __init__(self, padded: Tensor, lengths: Tensor) -> None:
        self.padded, self.lengths = padded, lengths
        self.device, self.dtype = padded.device, padded.dtype

    def dim(self) -> int:
        """As of packed data, which have samples and positions in one dimension."""
        return self.padded.dim() - 1

    def size(self, dim: int) -> int:
        """The size of a dimension that is neither samples nor positions."""
        if dim % self.dim() == 0:
            raise _reads_lengths()
        return self.padded.size(dim % self.dim() + 1)

    def __getattr__(self, name: str) -> Any:
        """Refuse to give any other attribute of a tensor."""
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        raise _reads_lengths()

    def recurrent(
        self, run: Callable[..., tuple[Tensor, ...]], args: Sequence[Any]
    ) -> tuple[_Unpacked | Tensor, ...]:
        """What a recurrent layer gives: from (data, batch sizes, hidden, ...) of packed sequences."""
        with _without_mkldnn():  # of whose kernels nothing is known
            output, *hidden = run(self.padded, *args[2:], True)
        return _Unpacked(output, self.lengths), *hidden

    def pad(self, batch_first: bool, padding: float, total: int) -> tuple[Tensor, Tensor]:
        """The samples, with padding behind their lengths, and these lengths."""
        if total == 0:  # see `_Sizes`
            raise _reads_lengths()
        made = self.padded[:, :total]
        missing = total - made.shape[1]
        made = functional.pad(made, [0, 0] * (made.dim() - 2) + [0, missing])
        lengths = self.lengths.to(made.device)
        behind = torch.arange(total, device=made.device) >= lengths[:, None]
        made = made.masked_fill(behind.reshape(*behind.shape, *(1 for _ in made.shape[2:])), padding)
        return made if batch_first else made.transpose(0, 1), lengths

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, packed = getattr(func, "__name__", ""), args[0] if len(args) > 2 else None
        if isinstance(packed, _Unpacked) and isinstance(args[1], _Sizes) and not kwargs:
            if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
                return packed.recurrent(func, args)
            if name == "_pad_packed_sequence":
                return packed.pad(*args[2:])
        raise _reads_lengths()


@contextmanager
def _without_mkldnn() -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


class _Sizes:
    """How many of the samples have a position, of sequences whose lengths are not known."""

    device = torch.device("cpu")

    def __init__(self, count: int) -> None:
        self._count = count

    def __getitem__(self, position: Any) -> int:
        if position != 0:
            raise _reads_lengths()
        return self._count

    def size(self, dim: int) -> int:
        """The longest's length: 0, which says that it is not known."""
        return 0 * dim

    def __getattr__(self, name: str) -> Any:
        """Refuse to give any other attribute of a tensor."""
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        raise _reads_lengths()

    __torch_function__ = _Unpacked.__torch_function__


def _reads_lengths() -> Exception:
    """What is raised of those who need the lengths themselves."""
    return DataDependentOutputException(torch.ops.aten._pack_padded_sequence.default)


def _pack_unread(input: Any, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Any:
    """Stands in the place of `pack_padded_sequence`, whose code others may hold by name."""
    from spindle_cli.analysis.without_data import pack

    return pack(input, lengths, batch_first, enforce_sorted)


# Each is a step of its own here: of longer sequences all that is asked of a layer would take minutes.
_MOST_POSITIONS = 16
_PACK = rnn.pack_padded_sequence
_AS_IT_IS = types.FunctionType(_PACK.__code__, _PACK.__globals__, _PACK.__name__, _PACK.__defaults__)


def pack(input: Tensor, lengths: Any, batch_first: bool, enforce_sorted: bool) -> Any:
    """A packed sequence; without values, one that stands for it."""
    if not (input.is_meta or isinstance(input, FakeTensor)):
        return _AS_IT_IS(input, lengths, batch_first, enforce_sorted)
    if not isinstance(lengths, Tensor):
        lengths = torch.as_tensor(lengths, dtype=torch.int64)
    padded = input if batch_first else input.transpose(0, 1)
    if padded.shape[1] > _MOST_POSITIONS:
        raise _reads_lengths()
    data: Any = _Unpacked(padded, lengths)
    sizes: Any = _Sizes(padded.shape[0])
    return rnn.PackedSequence(data, sizes)


@contextmanager
def _packed_unread() -> Iterator[None]:
    before = _PACK.__code__
    _PACK.__code__ = stand_in(_pack_unread.__code__)
    try:
        yield
    finally:
        _PACK.__code__ = before
