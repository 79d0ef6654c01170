"""What calls make of what a mask selects (`selecting.py`), where that is known without the rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from spindle_cli.analysis.tracing.proxies.row_by_row import (
    ENTRY_BY_ENTRY,
    OF_LABELS,
    OF_ROWS,
    VIEWS,
    bound_loss,
    is_same,
    known_name,
    moved_dims,
)
from spindle_cli.analysis.tracing.proxies.selecting import (
    Selected,
    Where,
    choose,
    count_of,
    dims_of,
    dtype_of,
    mean_of,
    num_rest,
    part_of,
    rest_of,
    seen_as,
    sum_of,
)

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
