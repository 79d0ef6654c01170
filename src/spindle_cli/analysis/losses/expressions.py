"""What a loss is made of, as data: expressions that are written into a graph, the operations of torch and
Python that add up, scale, join and reduce, and how the values of a share of a batch stand to those of
the whole batch.

A share of a loss is another computation than the user's: a mean over what counts becomes a sum over this
share divided by what the whole batch counts. Its expression says so over the nodes of the user's trace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx

from spindle_cli.analysis.autocast import WithoutAutocast


class Kind(Enum):
    """How a value in a share stands to the whole batch's.

    ROWS: it has the rows of the share's samples, as they are in the whole batch's.
    EQUAL: it is the whole batch's.
    PART: the shares' values add up to the whole batch's.
    """

    ROWS = "rows"
    EQUAL = "equal"
    PART = "part"


@dataclass(frozen=True, eq=False)
class Form:
    """A value of a share of the loss.

    Attributes:
        degree: how the whole batch's value grows with the number of samples: 0 for a mean, 1 for a sum; None:
            in another way.
        expression: what computes it; constants and structures of them stand for themselves.
    """

    kind: Kind
    degree: int | None
    expression: Expression | Any


class NotKnownError(Exception):
    """A loss is not known to be a sum or mean over what counts."""

    def __init__(self, why: str, node: fx.Node) -> None:
        super().__init__(why)
        place = node.meta.get("place")
        self.reason = why if place is None else f"{why} ({place})"


def plus(first: int | None, second: int | None, sign: int = 1) -> int | None:
    """The degree of a product, or with sign -1 of a quotient."""
    return None if first is None or second is None else first + sign * second


def highest(degrees: set[int | None]) -> int | None:
    """The degree of a sum of values that all shares know."""
    known_degrees = [degree for degree in degrees if degree is not None]
    return max(known_degrees, default=0) if len(known_degrees) == len(degrees) else None


def most(kinds: set[Kind]) -> Kind:
    """The kind of a value that is made of values of these kinds."""
    return next(kind for kind in (Kind.PART, Kind.ROWS, Kind.EQUAL) if kind in kinds)


def is_zero(form: Form) -> bool:
    """Whether it is the constant zero, which grows with the batch in any way."""
    return isinstance(form.expression, int | float) and form.expression == 0


MEANS = {"mean", torch.mean}
SUMS = {"sum", torch.sum, "nansum", torch.nansum, "count_nonzero", torch.count_nonzero}
LINEAR = {
    *("to", "float", "double", "contiguous", "clone", "squeeze", "unsqueeze", "view", "reshape", "neg"),
    *("flatten", "type", "bfloat16", "half"),
    *(operator.neg, operator.getitem, torch.neg, torch.squeeze, torch.unsqueeze, torch.reshape),
    *(torch.flatten, torch.clone),
}
ADDITIONS = {operator.add, operator.sub, operator.iadd, operator.isub, torch.add, torch.sub, "add", "sub"}
PRODUCTS = {operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "multiply"}
QUOTIENTS = {
    operator.truediv,
    operator.itruediv,
    torch.div,
    torch.divide,
    torch.true_divide,
    "div",
    "divide",
}
RECIPROCALS = {"reciprocal", torch.reciprocal}
JOINS = {torch.stack, torch.cat}
# Of the sums, those that are of rows alone: what is NaN in a share, or not zero, may not be so in the whole.
NUMBERS_OF = {"nansum", torch.nansum, "count_nonzero", torch.count_nonzero}
# Of the linear ones, those that keep every sample's rows together where the samples come first.
ROW_BY_ROW = {
    *("to", "float", "double", "contiguous", "clone", "unsqueeze", "view", "reshape", "neg", "type"),
    *(operator.neg, torch.neg, torch.unsqueeze, torch.reshape, torch.clone),
}
# What guards a count against zero leaves it growing as it does.
GUARDS = {"clamp", "clamp_min", "maximum", "max", torch.clamp, torch.clamp_min, torch.maximum, torch.max}
# Arithmetic in which a number scales a tensor, unlike sizes given to a reshape.
ARITHMETIC = ADDITIONS | PRODUCTS | QUOTIENTS | {operator.pow, torch.pow, "pow"}


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
