"""What forward selects by a mask, as `loss[mask].mean()` has it: rows of which only a run knows how many.

A trace has fixed shapes. So what is selected stays where it lies, with a harmless number wherever the mask is
false, and is computed with there; a sum or mean at the end takes the entries alone that the mask has, as
`(loss * mask).sum() / mask.sum()` does, which losses are known by. What stands at the other places comes into
nothing: `torch.where` hands neither it nor a gradient on, NaN or not.

What calls make of a selection is in `selected_calls.py`. Whatever else is done with one is done with the rows
themselves, as the trace would have it without this: they are refused where their number is not known.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from spindle_cli.analysis.tracing.proxies.changes import TracedValue
from spindle_cli.analysis.tracing.proxies.row_by_row import USE, is_same

# What stands where nothing is selected: by turns, so that a difference of two is not zero, and within what
# probabilities and logarithms may be.
_FILLS = (0.5, 0.4375, 0.375, 0.3125)


@dataclass(frozen=True)
class Where:
    """Which entries are selected. `mask`: a traced tensor of booleans over the first `dims` dimensions;
    `repeats`: how many entries one of its booleans stands for, where it is broadcast.
    """

    mask: Any
    dims: int
    repeats: int = 1


class Selected(TracedValue):
    """Rows that a mask selects; of `values`, which has all others as well."""

    tracer: Any

    def __init__(self, tracer: Any, values: Any, where: Where) -> None:
        # No attribute of a tensor: those are asked of the trace.
        self.__dict__.update(tracer=tracer, values=values, where=where, made=None, is_shared=False, use=None)

    @property
    def node(self) -> fx.Node:  # type: ignore[override]  # made where it is asked for
        """The node that gives the selected rows themselves."""
        state = self.__dict__
        if state["made"] is None:
            where: Where = state["where"]
            select = operator.getitem if where.repeats == 1 else torch.masked_select
            made = self.tracer.create_rows(select, state["values"], where.mask).node
            made.meta[USE] = state["use"]
            state["made"] = made
        return state["made"]  # type: ignore[no-any-return]  # put there as a node

    @property
    def shape(self) -> Any:
        """The shape of the rows, of which there are as many as the mask says."""
        return (count_of(self), *rest_of(self))

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device"):
            return getattr(self.__dict__["values"], name)
        return super().__getattr__(name)

    def _becomes(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedValue:
        """A selection is a copy: who changes it in place changes nothing else, but what looks at it."""
        state = self.__dict__
        made = None if state["is_shared"] else self.tracer.create_proxy(kind, target, args, kwargs)
        if type(made) is Selected and made.__dict__["where"] is state["where"] and state["made"] is None:
            state["values"] = made.__dict__["values"]
            return self
        whole = TracedValue(self.node, self.tracer)
        return whole._becomes(
            kind, target, tuple(whole if argument is self else argument for argument in args), kwargs
        )


def select(tracer: Any, values: Any, index: Any) -> Selected | None:
    """What `values[index]` selects by a mask of booleans; None where the index is something else, or its
    values are known before.
    """
    first, *others = index if isinstance(index, tuple) else (index,)
    if type(first) is Selected:
        return None
    mask = _mask(tracer, first)
    dims = _places(tracer, mask, values)
    if dims is None:
        return None
    selected = _kept(tracer, values, Where(mask, dims))
    if not others:
        return selected
    part = part_of(selected, (slice(None), *others))
    return part if type(part) is Selected else None


def select_entries(tracer: Any, values: Any, by: Any) -> Selected | None:
    """What `values.masked_select(by)` selects; None as `select` has it."""
    mask = _mask(tracer, by)
    if mask is None or not isinstance(values, fx.Proxy) or type(values) is Selected:
        return None
    sizes, of_mask, repeats = tracer.known.sizes(values), tracer.known.sizes(mask), 1
    if sizes is None or len(sizes[0]) != len(of_mask[0]):
        return None
    for size, doubled, mask_size, mask_doubled in zip(*sizes, *of_mask, strict=True):
        if (size, doubled) != (mask_size, mask_doubled):
            if (mask_size, mask_doubled) != (1, 1) or size != doubled:
                return None
            repeats *= size
    return _kept(tracer, values, Where(mask, len(sizes[0]), repeats))


def put(tensor: TracedValue, index: Any, value: Any) -> tuple[Any, Any, Any] | None:
    """The arguments of the torch.where that `tensor[index] = value` is by a mask, where the value is what the
    same mask selects, or the same for each place; None where it is something else.
    """
    tracer: Any = tensor.tracer
    mask = _mask(tracer, index)
    dims = _places(tracer, mask, tensor)
    if dims is None or not isinstance(value, fx.Proxy | Tensor):
        return None
    rest = len(tracer.known.sizes(tensor)[0]) - dims
    if type(value) is Selected:
        where, values = value.__dict__["where"], value.__dict__["values"]
        if where.repeats != 1 or not is_same(where.mask.node, mask.node) or num_rest(value) != rest:
            return None
    else:
        if (dims_of(tracer, value) or 0) > rest:
            return None
        values = value
    if not isinstance(values, fx.Proxy) or dtype_of(tracer, values) != dtype_of(tracer, tensor):
        values = tracer.create_proxy("call_method", "to", (values, tensor.dtype), {})
    return _over(mask, rest), values, tensor


def seen_as(value: Any) -> Any:
    """Give all values of a selection, which have its class and dtype, and a shape that is known; anything
    else as it is.
    """
    return value.__dict__["values"] if type(value) is Selected else value


def _places(tracer: Any, mask: Any, values: Any) -> int | None:
    """Over how many dimensions of a traced tensor a mask says what is selected; None: it does not."""
    if mask is None or not isinstance(values, fx.Proxy) or type(values) is Selected:
        return None
    sizes, of_mask = tracer.known.sizes(values), tracer.known.sizes(mask)
    dims = len(of_mask[0])
    fits = sizes is not None and dims > 0 and tuple(shape[:dims] for shape in sizes) == of_mask
    return dims if fits else None


def dtype_of(tracer: Any, value: Any) -> torch.dtype:
    dtype: torch.dtype = tracer.known.value(value).dtype
    return dtype


def _mask(tracer: Any, index: Any) -> Any:
    """A traced mask as it is now, of which no value is known; None: it is something else."""
    if not isinstance(index, fx.Proxy) or type(index) is Selected or not tracer.is_tensor(index):
        return None
    if dtype_of(tracer, index) is not torch.bool or tracer.known.is_fixed(index):
        return None
    return tracer.proxy(index.node)  # forward may change the other in place


def _kept(tracer: Any, values: Any, where: Where) -> Selected:
    """What is selected, with a harmless number at all other places."""
    dtype = dtype_of(tracer, values)
    number: Any = False if dtype is torch.bool else 0
    if dtype.is_floating_point:
        tracer.selections += 1
        number = _FILLS[tracer.selections % len(_FILLS)]
    rest = len(tracer.known.sizes(values)[0]) - where.dims
    chosen = choose(tracer, _over(where.mask, rest), values, number)
    return Selected(tracer, chosen, where)


def choose(tracer: Any, mask: Any, values: Any, number: float) -> Any:
    return tracer.create_proxy("call_function", torch.where, (mask, values, number), {})


def part_of(selected: Selected, index: Any) -> Any:
    """`selected[:, index]`, or what a mask of the same rows selects further."""
    state, tracer = selected.__dict__, selected.tracer
    where: Where = state["where"]
    if type(index) is Selected:
        index_where = index.__dict__["where"]
        is_mask = dtype_of(tracer, index) is torch.bool and num_rest(index) == 0
        if not is_mask or where.repeats != 1 or not is_same(index_where.mask.node, where.mask.node):
            return NotImplemented
        return _kept(tracer, state["values"], Where(where.mask & index.__dict__["values"], where.dims))
    if not isinstance(index, tuple) or not index:
        return NotImplemented
    first, *others = index
    plain = [item for item in others if isinstance(item, int | slice) or item is None]
    is_whole = first == slice(None) if isinstance(first, slice) else first is Ellipsis
    taken = sum(item is not None for item in others)
    if not is_whole or len(plain) < len(others) or taken > num_rest(selected):
        return NotImplemented
    before = (Ellipsis,) if first is Ellipsis else (slice(None),) * where.dims
    values = tracer.create_proxy("call_function", operator.getitem, (state["values"], (*before, *others)), {})
    part = Selected(tracer, values, where)
    state["is_shared"] = part.__dict__["is_shared"] = True
    return part


def sum_of(selected: Selected, dims: tuple[int, ...] | None = None) -> Any:
    """The sum of a selection over all its entries, or over these dimensions."""
    where: Where = selected.__dict__["where"]
    mask = _over(where.mask, num_rest(selected))
    kept = choose(selected.tracer, mask, selected.__dict__["values"], 0)
    return selected.tracer.create_proxy("call_method", "sum", (kept,) if dims is None else (kept, dims), {})


def mean_of(selected: Selected) -> Any:
    return sum_of(selected) / (count_of(selected) * math.prod(rest_of(selected)))


def count_of(selected: Selected) -> Any:
    """How many rows a selection has."""
    where: Where = selected.__dict__["where"]
    count = selected.tracer.create_proxy("call_method", "sum", (where.mask,), {})
    return count if where.repeats == 1 else count * where.repeats


def _over(mask: Any, rest: int) -> Any:
    """The mask for entries of rows with so many dimensions."""
    for _ in range(rest):
        mask = mask.unsqueeze(-1)
    return mask


def num_rest(selected: Selected) -> int:
    """How many dimensions a row of a selection has."""
    values, where = selected.__dict__["values"], selected.__dict__["where"]
    return len(selected.tracer.known.sizes(values)[0]) - int(where.dims)


def rest_of(selected: Selected) -> list[Any]:
    """The sizes of a row of a selection."""
    values, dims = selected.__dict__["values"], selected.__dict__["where"].dims
    one, doubled = selected.tracer.known.sizes(values)
    return [one[dim] if one[dim] == doubled[dim] else values.size(dim) for dim in range(dims, len(one))]


def dims_of(tracer: Any, value: Any) -> int | None:
    """The number of dimensions of a tensor that is not selected; None of anything else."""
    if isinstance(value, Tensor):
        return value.dim()
    if not isinstance(value, fx.Proxy) or type(value) is Selected:
        return None
    sizes = tracer.known.sizes(value)
    return None if sizes is None else len(sizes[0])
