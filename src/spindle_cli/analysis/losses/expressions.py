"""What a loss is made of, as data: expressions that are written into a graph.

A share of a loss is another computation than the user's: a mean over what counts becomes a sum over this
share divided by what the whole batch counts. Its expression says so over the nodes of the user's trace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from spindle_cli.analysis.autocast import WithoutAutocast


@dataclass(frozen=True, eq=False)
class Copy:
    """The value of a node of the user's trace, computed on the share."""

    node: fx.Node


@dataclass(frozen=True)
class Share:
    """The share's samples over those of the step's batches together: a number."""


@dataclass(frozen=True)
class Count:
    """What the step's batches count together, in float64. `index`: among the counts of the loss."""

    index: int


@dataclass(frozen=True)
class Attribute:
    """A tensor that a module of the user's holds, by its dotted name."""

    name: str


@dataclass(frozen=True, eq=False)
class Call:
    """A function, or by name a method of the first argument; expressions stand anywhere in its arguments."""

    target: Callable[..., Any] | str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


Expression = Copy | Share | Count | Attribute | Call
_EXPRESSIONS = (Copy, Share, Count, Attribute, Call)


def parts_of(item: Any) -> Iterator[Expression]:
    """Every expression in a structure of arguments, and those that it is made of."""
    expressions: list[Expression] = []
    fx.node.map_aggregate(
        item, lambda leaf: expressions.append(leaf) if isinstance(leaf, _EXPRESSIONS) else None
    )
    for expression in expressions:
        yield expression
        if isinstance(expression, Call):
            yield from parts_of((expression.args, expression.kwargs))


def without_autocast(
    expression: Expression | Any, device_types: frozenset[str], made_before: Collection[Expression | Any]
) -> Expression | Any:
    """Switch autocast off in an expression, but for the expressions in it that were `made_before`."""
    made_ids = {id(made) for made in made_before}

    def switched(item: Any) -> Any:
        if not isinstance(item, Call) or id(item) in made_ids:
            return item
        args, kwargs = fx.node.map_aggregate((item.args, item.kwargs), switched)
        return Call(WithoutAutocast(item.target, device_types), args, dict(kwargs))

    return switched(expression)


class Writer:
    """Writes expressions into a graph; what is shared is written once."""

    def __init__(
        self,
        graph: fx.Graph,
        copy: Callable[[fx.Node], fx.Node],
        share: fx.Node,
        counts: Mapping[int, fx.Node],
    ) -> None:
        """`copy`: gives the node of `graph` that stands for one of the user's. `share`, `counts` (by index):
        its placeholders for these.
        """
        self._graph = graph
        self._copy = copy
        self._share = share
        self._counts = counts
        self._calls: dict[int, fx.Node] = {}

    def write(self, item: Any) -> Any:
        """Write a node for every expression in a structure."""
        return fx.node.map_aggregate(item, self._leaf)

    def _leaf(self, item: Any) -> Any:
        match item:
            case Copy(node):
                return self._copy(node)
            case Share():
                return self._share
            case Count(index):
                return self._counts[index]
            case Attribute(name):
                return self._graph.get_attr(name)
            case Call():
                if id(item) not in self._calls:
                    self._calls[id(item)] = self._call(item)
                return self._calls[id(item)]
        return item

    def _call(self, call: Call) -> fx.Node:
        args, kwargs = self.write(call.args), self.write(call.kwargs)
        if isinstance(call.target, str):
            return self._graph.call_method(call.target, args, kwargs)
        return self._graph.call_function(call.target, args, kwargs)


def over_count(value: Tensor | float, count: Tensor) -> Tensor:
    """`value / count`; zero, without a gradient, where nothing counts."""
    counts = count != 0
    factor = torch.where(counts, 1.0 / torch.where(counts, count, 1), 0.0)
    is_real = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return value * (factor.to(value.dtype) if is_real and isinstance(value, Tensor) else factor)


def whole_number(value: float, share: float, growth: int) -> float:
    """What a number that grows with the batch like its size to the power of `growth` is for all of it."""
    whole = value / share**growth
    return round(whole) if isinstance(value, int) else whole


def count_targets(target: Tensor, ignore_index: int, weight: Tensor | None = None) -> Tensor:
    """What `cross_entropy` and `nll_loss` divide a mean by: the targets that are not ignored, each by its
    class's weight. A scalar.
    """
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    return (weight[torch.where(counts, target, 0)].to(torch.float64) * counts).sum()
