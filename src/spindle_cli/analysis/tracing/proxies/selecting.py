"""What forward selects by a mask, as `loss[mask].mean()` has it: rows of which only a run knows how many,
and what calls make of them where that is known without the rows.

A trace has fixed shapes. So what is selected stays where it lies, with a harmless number wherever the mask is
false, and is computed with there; a sum or mean at the end takes the entries alone that the mask has, as
`(loss * mask).sum() / mask.sum()` does, which losses are known by. What stands at the other places comes into
nothing: `torch.where` hands neither it nor a gradient on, NaN or not.

Whatever other calls do with a selection is done with the rows themselves, as the trace would have it without
this: they are refused where their number is not known.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from spindle_cli.analysis.tracing.proxies.changes import TracedValue
from spindle_cli.analysis.tracing.proxies.rows import (
    ENTRY_BY_ENTRY,
    OF_LABELS,
    OF_ROWS,
    USE,
    VIEWS,
    bound_loss,
    is_same,
    known_name,
    moved_dims,
)

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


_OVER_ALL: tuple[Any, ...] = (((), {}),)
_OVER_ROWS: tuple[Any, ...] = (((0,), {}), ((), {"dim": 0}), ((), {"axis": 0}))


def made_of(kind: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call makes of a selection among its arguments, as a traced value; `NotImplemented` where it
    needs the rows themselves.
    """
    name = str(target) if kind == "call_method" else known_name(target)
    selected = next(argument for argument in (*args, *kwargs.values()) if type(argument) is Selected)
    made: Any = NotImplemented
    if name is not None:
        made = _Call(selected, kind, target, name, tuple(args), dict(kwargs)).made()
    if made is NotImplemented:
        for argument in (*args, *kwargs.values()):
            if type(argument) is Selected:
                argument.__dict__["use"] = name or getattr(target, "__name__", str(target))
    return made


@dataclass
class _Call:
    """One call with a selection among its arguments."""

    of: Selected
    kind: str
    target: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        self.where: Where = self.of.__dict__["where"]

    def made(self) -> Any:
        """The traced value; `NotImplemented` where nothing is known."""
        args, kwargs = self.args, self.kwargs
        if self.name == "getitem" and args[0] is self.of and not kwargs:
            return part_of(self.of, args[1])
        if self.name in ("size", "numel", "dim") and not kwargs:
            return self._size(*args[1:])
        if self.kind == "call_function" and self.target in OF_ROWS | OF_LABELS:
            return self._loss()
        if not self._fits():
            return NotImplemented
        is_linear = self.name == "linear" and args[0] is self.of and num_rest(self.of) > 0
        if self.name in ENTRY_BY_ENTRY or is_linear:
            return self._on_values(args, kwargs)
        if self.name in ("sum", "mean") and args[0] is self.of and (args[1:], kwargs) in _OVER_ALL:
            return sum_of(self.of) if self.name == "sum" else mean_of(self.of)
        if self.name in ("sum", "mean") and args[0] is self.of and (args[1:], kwargs) in _OVER_ROWS:
            total = sum_of(self.of, tuple(range(self.where.dims)))
            return total if self.name == "sum" else total / count_of(self.of)
        moved = moved_dims(self.name, args, kwargs, self.where.dims, num_rest(self.of))
        return NotImplemented if moved is None else self._on_values(*moved)

    def _fits(self) -> bool:
        """Whether all tensors are selected by the same mask, with as many dimensions of a row, or are
        broadcast to single rows.
        """
        rest = num_rest(self.of)
        if self.name == "linear":
            return all(type(argument) is not Selected for argument in (*self.args[1:], *self.kwargs.values()))
        for argument in (*self.args, *self.kwargs.values()):
            if type(argument) is Selected:
                if not self._is_like(argument) or num_rest(argument) != rest:
                    return False
            elif (
                isinstance(argument, tuple | list) and any(isinstance(item, fx.Proxy) for item in argument)
            ) or ((dims := dims_of(self.of.tracer, argument)) is not None and dims > rest):
                return False
        return True

    def _is_like(self, selected: Selected) -> bool:
        where: Where = selected.__dict__["where"]
        is_alike = (where.dims, where.repeats) == (self.where.dims, self.where.repeats)
        return is_alike and is_same(where.mask.node, self.where.mask.node)

    def _on_values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Selected:
        args = tuple(map(seen_as, args))
        kwargs = {name: seen_as(value) for name, value in kwargs.items()}
        values = self.of.tracer.create_proxy(self.kind, self.target, args, kwargs)
        made = Selected(self.of.tracer, values, self.where)
        if self.name in VIEWS:
            self.of.__dict__["is_shared"] = made.__dict__["is_shared"] = True
        return made

    def _size(self, dim: Any = None) -> Any:
        rest = rest_of(self.of)
        if self.name == "dim":
            return 1 + len(rest)
        if self.name == "numel":
            return count_of(self.of) * math.prod(rest)
        sizes = (count_of(self.of), *rest)
        return sizes if dim is None else sizes[dim] if isinstance(dim, int) else NotImplemented

    def _loss(self) -> Any:
        bound = bound_loss(self.target, self.args, self.kwargs)
        if bound is None:
            return NotImplemented
        arguments, reduction = bound
        if self.target in OF_LABELS:
            return self._loss_of_labels(arguments, reduction)
        self.args, self.kwargs = tuple(arguments.values()), {}
        if not self._fits() or type(arguments["input"]) is not Selected:
            return NotImplemented
        given = {name: seen_as(value) for name, value in arguments.items()}
        made = self.of.tracer.create_proxy("call_function", self.target, (), {**given, "reduction": "none"})
        losses = Selected(self.of.tracer, made, self.where)
        if reduction == "batchmean":
            return sum_of(losses) / count_of(losses)
        if reduction == "none":
            return losses
        return sum_of(losses) if reduction == "sum" else mean_of(losses)

    def _loss_of_labels(self, arguments: dict[str, Any], reduction: str) -> Any:
        """Give the loss of rows of one class each: what is not selected is ignored, as its labels say
        then.
        """
        logits, labels = arguments["input"], arguments["target"]
        if type(logits) is not Selected or type(labels) is not Selected or not self._is_like(labels):
            return NotImplemented
        is_of_chances = dtype_of(self.of.tracer, labels).is_floating_point
        if (num_rest(logits), num_rest(labels)) != (1, 0) or is_of_chances:
            return NotImplemented
        dims, by_row = self.where.dims, seen_as(logits)
        if dims > 1:
            order = (0, dims, *range(1, dims))
            by_row = self.of.tracer.create_proxy("call_method", "permute", (by_row, *order), {})
        kept = choose(self.of.tracer, self.where.mask, seen_as(labels), arguments["ignore_index"])
        given = {**arguments, "input": by_row, "target": kept, "reduction": reduction}
        made = self.of.tracer.create_proxy("call_function", self.target, (), given)
        return Selected(self.of.tracer, made, self.where) if reduction == "none" else made
