"""Tensors whose values are known before training: what is computed from nothing but fields that are the same
in every sample (an image's grid) and the number of samples.

Analyses run forwards on tensors without values. A *fixed* tensor has its values there too, so that code may
read them (`tolist`, lengths to split by). Together with a tensor without values a stand-in takes its place,
which remembers the values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from spindle_cli.analysis.rules.tape import tensors_in
from spindle_cli.analysis.rules.types import WHOLE, Batch, Mixed, State

if TYPE_CHECKING:
    from spindle_cli.workload.graph import ValueSpec

T = TypeVar("T")
_FIXED = "_spindle_fixed"
_VALUES = "_spindle_values"
_BY_COUNT = Mixed("its values depend on how many samples the batch has")


class ChangedInPlaceError(Exception):
    """A fixed tensor is changed in place by one without values."""

    def __init__(self) -> None:
        super().__init__("what comes from a field that is the same in every sample is changed in place")


def fix(tensor: T) -> T:
    """Mark a tensor as one whose values are known; anything else is left alone."""
    if isinstance(tensor, Tensor):
        setattr(tensor, _FIXED, True)
    return tensor


def is_fixed(value: Any) -> bool:
    """Whether a value is a tensor whose values are known."""
    return isinstance(value, Tensor) and hasattr(value, _FIXED)


def values_of(tensor: Tensor) -> Tensor | None:
    """The values of a fixed tensor, or of one for which this stands in; None if they are not known."""
    if is_fixed(tensor):
        return tensor
    values: Tensor | None = getattr(tensor, _VALUES, None)
    return values


def rows_for(tensor: Tensor, samples: int) -> Tensor:
    """A field that is the same in every sample, for so many samples; `tensor` has at least one."""
    with _plainly():
        return fix(tensor[:1].expand(samples, *tensor.shape[1:]).clone())


def one_row(tensor: Tensor) -> tuple[int, ...] | None:
    """A sample's entries of a fixed field; None of any other."""
    if not is_fixed(tensor):
        return None
    with _plainly():
        return tuple(tensor[0].flatten().tolist())


def rows_of(row: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The field that `one_row` was asked of, of such a shape."""
    with _plainly():
        sample = torch.tensor(row, dtype=dtype).reshape(1, *shape[1:])
        return fix(sample.expand(*shape).clone())


def without_values(
    spec: ValueSpec, samples: int, dtype: torch.dtype | None = None, device: str | None = None
) -> Tensor:
    """A tensor like a value or field for so many samples, without values but for a fixed field."""
    shape = spec.shape_of(samples)
    if spec.row is not None:
        return rows_of(spec.row, shape, spec.dtype)
    return torch.empty(shape, dtype=dtype or spec.dtype, device=device).requires_grad_(spec.requires_grad)


def describe(tensor: Tensor) -> str:
    """The values of a fixed tensor as a text; nothing for any other."""
    return f" = {tensor.tolist()}" if is_fixed(tensor) else ""


def call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch: with values where all tensors are fixed, with stand-ins where others are not.

    Raises:
        ChangedInPlaceError: it writes what has no values into a fixed tensor.
    """
    if not (_has_fixed(args) or (kwargs and _has_fixed(kwargs.values()))):
        return func(*args, **kwargs)
    if all(map(is_fixed, tensors_in((args, kwargs)))):
        with _plainly():
            before = torch.get_rng_state()
            result = func(*args, **kwargs)
            draws = not torch.equal(before, torch.get_rng_state())
        if not draws:
            return _mapped(fix, result)
    name = getattr(func, "__name__", "")
    if (
        (name.endswith("_") and not name.endswith("__"))
        or name == "__setitem__"
        or is_fixed(kwargs.get("out"))
    ):
        raise ChangedInPlaceError
    given, named = _mapped(_stand_in, (args, kwargs))
    return func(*given, **named)


def computed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call code that reads values: of fixed tensors with all that it does, of others as it is."""
    tensors = tensors_in((args, kwargs))
    if not tensors or not all(map(is_fixed, tensors)):
        return func(*args, **kwargs)
    with _plainly():
        return _mapped(fix, func(*args, **kwargs))


def state_of_values(values: Sequence[Tensor], sizes: Sequence[int]) -> State:
    """What a fixed tensor is, from its values for each of several sizes of the batch."""
    first = values[0]
    if all(_is_same(value, first) for value in values):
        return WHOLE
    dim = _grown(values, sizes)
    if dim is None:
        return _BY_COUNT
    inner = first.shape[dim] // sizes[0]
    one = first.narrow(dim, 0, inner)
    if all(_is_same(value, torch.cat([one] * size, dim)) for value, size in zip(values, sizes, strict=True)):
        return Batch(dim, 1, inner)
    return _BY_COUNT


def rows_within(values: Sequence[Tensor], sizes: Sequence[int]) -> int:
    """Among how many rows of its own each sample picks, in the same way, where a fixed tensor of shape
    (samples * picked,) holds the numbers of rows; 0 if it is nothing of that kind.
    """
    first = values[0]
    if first.dim() != 1 or first.dtype not in (torch.int32, torch.int64) or _grown(values, sizes) is None:
        return 0
    picked = first.shape[0] // sizes[0]
    one = first[:picked]
    rows = int(first[picked] - first[0]) if sizes[0] > 1 and picked else 0
    if rows <= 0 or int(one.min()) < 0 or int(one.max()) >= rows:
        return 0
    for value, size in zip(values, sizes, strict=True):
        if not _is_same(value, torch.cat([one + rows * sample for sample in range(size)])):
            return 0
    return rows


def _grown(values: Sequence[Tensor], sizes: Sequence[int]) -> int | None:
    """The one dimension that has as many times more entries as there are samples."""
    first = values[0]
    if any(value.dim() != first.dim() for value in values):
        return None
    grown = {dim for value in values for dim in range(first.dim()) if value.shape[dim] != first.shape[dim]}
    if len(grown) != 1:
        return None
    dim = grown.pop()
    fits = all(
        value.shape[dim] * sizes[0] == first.shape[dim] * size
        for value, size in zip(values, sizes, strict=True)
    )
    return dim if fits and first.shape[dim] % sizes[0] == 0 else None


def _is_same(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)


def _stand_in(value: Any) -> Any:
    if not is_fixed(value):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    setattr(made, _VALUES, value)
    return made


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Compute with values, whatever is being recorded or left out."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _has_fixed(values: Iterable[Any]) -> bool:
    """Whether a fixed tensor is among arguments: asked before every call of an analysis."""
    for value in values:
        if isinstance(value, Tensor):
            if hasattr(value, _FIXED):
                return True
        elif isinstance(value, list | tuple):
            if _has_fixed(value):
                return True
        elif isinstance(value, dict) and _has_fixed(value.values()):
            return True
    return False


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_mapped(function, item) for item in value]
        if all(item is original for item, original in zip(items, value, strict=True)):
            return value  # it may be of a class of torch's own
        return items if isinstance(value, list) else tuple(items)
    return function(value)
