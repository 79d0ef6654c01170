"""Tensors whose values are known before training: what is computed from nothing but fields that are the
same in every sample (an image's grid) and the number of samples; and what is said of code that reads the
values of other fields.

Which fields may be is seen on the dataset's first samples; each step checks it of its own.

Analyses run forwards on tensors without values. A *fixed* tensor has its values there too, so that code may
read them (`tolist`, lengths to split by). Together with a tensor without values a stand-in takes its place,
which remembers the values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import _disable_current_modes

from spindle_cli.analysis.rules.tape import tensors_in
from spindle_cli.analysis.rules.types import WHOLE, Batch, Mixed, State
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.refuse import Frame

if TYPE_CHECKING:
    from spindle_cli.workload.graph import ValueSpec


SEEN = 16  # samples that are looked at: labels of two samples may well be the same
_MOST_ENTRIES = 64  # of a sample: a grid, a few lengths; a text that happens to be the same is none


def with_fixed(
    samples: Mapping[str, Tensor], read: Collection[str], more: Callable[[], Mapping[str, Tensor]]
) -> dict[str, Tensor] | None:
    """The samples, with those fixed of the fields whose values are read that can be; None if none can be that
    is not.

    Args:
        samples: the first of a dataset, collated.
        read: names of fields that values come from.
        more: reads more of them.
    """
    if not any(name in samples and _may_be_fixed(samples[name]) for name in read):
        return None
    try:
        seen = more()
    except WorkloadError:  # samples of several lengths, which make no batch
        return None
    fixable = {
        name
        for name in read
        if name in samples and not is_fixed(samples[name]) and name in seen and _may_be_fixed(seen[name])
    }
    if not fixable:
        return None
    return {name: fix(value.clone()) if name in fixable else value for name, value in samples.items()}


def _may_be_fixed(field: Tensor) -> bool:
    if is_fixed(field) or field.is_floating_point() or field.is_complex() or field.dim() == 0:
        return False
    is_small = 0 < field[0].numel() <= _MOST_ENTRIES
    return is_small and torch.equal(field, field[:1].expand_as(field))


def same_in_every_sample(field: Tensor, name: str, shape: tuple[int, ...], row: tuple[int, ...]) -> None:
    """Check a field that is taken as the same in every sample.

    Args:
        field: of shape (samples, *shape).
        row: the entries of one, in order.

    Raises:
        WorkloadError: a sample has other values.
    """
    if is_fixed(field) or field.is_meta or isinstance(field, FakeTensor):
        return
    expected = torch.tensor(row, dtype=field.dtype, device=field.device).reshape(1, *shape)
    differs = (field != expected).reshape(field.shape[0], len(row)).any(1)  # there may be no sample
    if bool(differs.any()):
        raise unlike(name, field[int(differs.int().argmax())], row)


def unlike(name: str, sample: Tensor, row: tuple[int, ...]) -> WorkloadError:
    """What is said of a sample that has other values of a fixed field."""
    shown = _shown(sample.flatten().tolist())
    return WorkloadError(
        f"field {name!r} is {shown} in a sample, and {_shown(row)} in the dataset's first ones: its "
        "values are read by forward, so that it is taken as the same in every sample",
        hint="Give every sample the same (images of one size), a task for each kind of sample, or compute "
        "what depends on it in the dataset.",
    )


def _shown(row: Collection[int]) -> str:
    return f"[{', '.join(map(str, row))}]"


def add_checks(graph: fx.Graph, samples: Mapping[str, Tensor]) -> list[fx.Node]:
    """Let a trace check the fields that are fixed, by nodes that give None."""
    made: list[fx.Node] = []
    for node in list(graph.nodes):
        field = samples.get(str(node.target)) if node.op == "placeholder" else None
        row = None if field is None else one_row(field)
        if field is None or row is None:
            continue
        last = [placeholder for placeholder in graph.nodes if placeholder.op == "placeholder"][-1]
        with graph.inserting_after(last):
            arguments = (node, str(node.target), tuple(field.shape[1:]), row)
            check = graph.call_function(same_in_every_sample, arguments)
        check.meta["place"] = node.meta.get("place")
        made.append(check)
    return made


def is_check(node: fx.Node) -> bool:
    """Whether a node checks a fixed field."""
    return node.op == "call_function" and node.target is same_in_every_sample


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


# Key of a node's meta: the frames that it was made in.
FRAMES = "frames"
# What torch says where a tensor without values becomes an array of numpy (by itself, or in a call of scipy).
_NO_ARRAY = ".numpy() is not supported for tensor subclasses"
# What it says of code that torch.jit has compiled, which runs on tensors with values.
_SCRIPTED = "failed in the TorchScript interpreter"
_FIXED_SHAPES = (
    "Compute with tensors of fixed shapes (torch.where instead of `if`, a mask instead of a selection), or "
    "move it into the dataset."
)
_OPERATION = (
    "What has one shape for all values can be an operation of your own (torch.library.custom_op, with "
    "register_fake for its shape)."
)


class ReadsValuesError(WorkloadError):
    """Values are read before there are any.

    `fields`: of the batch, those that they come from; `frames`: where, the innermost last.
    """

    fields: frozenset[str] = frozenset()
    frames: tuple[Frame, ...] = ()

    @classmethod
    def at(
        cls, error: WorkloadError, fields: frozenset[str] = frozenset(), frames: tuple[Frame, ...] = ()
    ) -> ReadsValuesError:
        """Make of an error one that knows the fields and the frames."""
        made = cls(*error.args, hint=error.hint)
        made.fields, made.frames = fields, frames
        return made


def fields_behind(node: fx.Node) -> frozenset[str]:
    """Names of the fields that a node's arguments come from."""
    seen, left = {node}, [node]
    while left:
        for source in left.pop().all_input_nodes:
            if source not in seen:
                seen.add(source)
                left.append(source)
    return frozenset(str(ancestor.target) for ancestor in seen if ancestor.op == "placeholder")


def reads_values(error: Exception) -> bool:
    """Whether an error says that code cannot do without the values of tensors."""
    reads = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
    return isinstance(error, reads) or leaves_torch(error) or _SCRIPTED in str(error)


def leaves_torch(error: Exception) -> bool:
    """Whether an error says that values go into other code than torch's."""
    return _NO_ARRAY in str(error)


def reading(what: str, error: Exception, *, is_operator: bool) -> tuple[str, str]:
    """What is said of code that reads values, and what to do.

    Args:
        what: the code.
        error: what torch says.
        is_operator: whether it is an operator's, which nothing more can be listed for.
    """
    if leaves_torch(error):
        said = f"{what} takes the values of a tensor out of torch (.numpy()), which has none before it runs"
        return said, f"{_OPERATION} Or move it into the dataset."
    said = f"{what} reads the values of a tensor ({error}), so its shapes cannot be known beforehand"
    return said, f"{_FIXED_SHAPES} {_OPERATION}" if is_operator else _FIXED_SHAPES


def after_selection(use: str) -> tuple[str, str]:
    """What to say of code that is given rows that a mask selects, and what to do; `use`: that code."""
    said = (
        f"{use!r} is given what a mask selects (x[mask]), and how many rows these are "
        "cannot be known beforehand"
    )
    hint = (
        "Of what a mask selects, sums, means, torch's losses and what works on each entry or row are "
        "known. Do the rest for all rows, with torch.where or a mask at the end, or move it into the "
        "dataset."
    )
    return said, hint
