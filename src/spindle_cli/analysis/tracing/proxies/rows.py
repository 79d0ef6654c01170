"""What works through the samples of a batch one after another, and is the same as one operation on all.

`torch.cat(list(x))` takes a batch apart and joins it again; `x.masked_scatter(mask, values)` fills the places
of one sample after those of the one before it. A share of the batch has fewer samples; as one operation on
each sample they are the same for it.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, fx

from spindle_cli.analysis.fixed import FRAMES, ReadsValuesError
from spindle_cli.workload.refuse import refusal

USE = "use"  # key of the meta of a node that selects rows: what is done with them
# What does something to each entry, by the names that operator, torch, its functions and methods have for it.
ENTRY_BY_ENTRY = frozenset(
    {"add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs", "div", "subtract"}
    | {"multiply", "divide", "true_divide", "remainder", "absolute", "negative", "square", "sqrt", "rsqrt"}
    | {"reciprocal", "exp", "expm1", "log", "log1p", "log2", "log10", "sin", "cos", "tan", "atan", "atan2"}
    | {"sinh", "cosh", "tanh", "erf", "sigmoid", "logsigmoid", "softplus", "relu", "relu6", "gelu", "silu"}
    | {"mish", "elu", "selu", "leaky_relu", "hardtanh", "clamp", "clamp_min", "clamp_max", "clip", "sign"}
    | {"maximum", "minimum", "round", "floor", "ceil", "trunc", "hypot", "logaddexp", "xlogy"}
    | {"eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "xor", "invert", "logical_and", "logical_or"}
    | {"logical_not", "logical_xor", "isfinite", "isnan", "isinf", "nan_to_num", "where", "masked_fill"}
    | {"to", "float", "double", "half", "bfloat16", "long", "int", "bool", "detach", "clone", "contiguous"}
)
# What may give memory that it was given.
VIEWS = frozenset(
    {"to", "float", "double", "half", "bfloat16", "long", "int", "bool", "detach", "contiguous"}
    | {"squeeze", "unsqueeze"}
)
# Where a dimension is named, and which one is where none is.
_DIMS: Mapping[str, tuple[int, int | None]] = {
    **dict.fromkeys(("softmax", "log_softmax", "sum", "mean", "amax", "amin", "argmax", "argmin"), (1, None)),
    **dict.fromkeys(("logsumexp", "cumsum", "gather", "unsqueeze", "squeeze"), (1, None)),
    **dict.fromkeys(("norm",), (2, None)),
    **dict.fromkeys(("normalize", "cosine_similarity"), (2, 1)),
}
# What gives the same tensor in another shape.
_SHAPES = frozenset({"view", "reshape", "flatten", "squeeze", "unsqueeze", "size"})
_NAMESPACES = (operator, torch, functional)
# Losses of entries, and those of rows that have a class each.
_ENTRIES: set[Callable[..., Any]] = {
    *(functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss),
    *(functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits, functional.kl_div),
    *(functional.soft_margin_loss, functional.poisson_nll_loss),
}
OF_ROWS = frozenset(_ENTRIES)
_LABELS: set[Callable[..., Any]] = {functional.cross_entropy, functional.nll_loss}
OF_LABELS = frozenset(_LABELS)


def known_name(function: Any) -> str | None:
    """What operator, torch or its functional calls a function; None of any other."""
    name = str(getattr(function, "__name__", ""))
    return name if any(getattr(space, name, None) is function for space in _NAMESPACES) else None


def moved_dims(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], lead: int, rest: int
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a call on rows with `rest` dimensions each, for rows that have `lead` dimensions in
    the place of one; None where the call is not known to work on each row.
    """
    if name not in _DIMS:
        return None
    place, default = _DIMS[name]
    key = next((key for key in ("dim", "axis") if key in kwargs), None)
    given = kwargs[key] if key else args[place] if len(args) > place else default
    dims = given if isinstance(given, tuple | list) else (given,)
    moved = [_moved(dim, lead, rest + (name == "unsqueeze")) for dim in dims]
    if None in moved or not moved:
        return None
    dim = tuple(moved) if isinstance(given, tuple | list) else moved[0]
    if key is None and len(args) > place:
        return (*args[:place], dim, *args[place + 1 :]), dict(kwargs)
    return args, {**kwargs, key or "dim": dim}


def _moved(dim: Any, lead: int, rest: int) -> int | None:
    """A dimension of single rows, where it is then; None where it is that of the rows, or not known."""
    if not isinstance(dim, int) or isinstance(dim, bool) or not (-rest <= dim < 0 or 1 <= dim <= rest):
        return None
    return dim if dim < 0 else dim + lead - 1


def bound_loss(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], str] | None:
    """A loss's arguments by name, and its reduction; None where it is called in another way than is known."""
    arguments = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    reduction = arguments.pop("reduction", "mean")
    old = [arguments.pop(name, None) for name in ("size_average", "reduce")]
    by_weight = function in (functional.mse_loss, functional.l1_loss) and arguments.get("weight") is not None
    if old != [None, None] or by_weight or reduction not in ("mean", "sum", "none", "batchmean"):
        return None
    if function in OF_LABELS:
        arguments.setdefault("ignore_index", -100)
    if reduction == "batchmean" and function is not functional.kl_div:
        return None
    return arguments, reduction


def is_same(first: Any, second: Any) -> bool:
    """Whether two nodes of a trace give the same: one node, or the same call of the same."""
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return False
    if first is second:
        return True
    if first.op not in ("call_function", "call_method") or (first.op, first.target) != (
        second.op,
        second.target,
    ):
        return False
    pairs = list(zip(first.args, second.args, strict=False))
    if len(first.args) != len(second.args) or first.kwargs or second.kwargs:
        return False
    if first.op == "call_function" and known_name(first.target) not in ENTRY_BY_ENTRY | {"getitem"}:
        return False
    if first.op == "call_method" and first.target not in ENTRY_BY_ENTRY | _SHAPES:
        return False
    return all(
        is_same(mine, theirs) if isinstance(mine, fx.Node) else type(mine) is type(theirs) and mine == theirs
        for mine, theirs in pairs
    )


_ROW = "row"  # key of a node's meta: which sample's part of which node it is


def rows_of(batch: fx.Proxy, samples: int) -> Iterator[fx.Proxy]:
    """The parts of a traced batch, one for each sample."""
    parts: Any = batch
    for position in range(samples):
        row = parts[position]
        row.node.meta[_ROW] = (batch.node, position, samples)
        yield row


def joined_again(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[fx.Node, bool] | None:
    """The batch whose parts are joined, all of them in their order, and whether by torch.stack; None where
    something else is called.
    """
    if target not in (torch.cat, torch.stack, torch.concat, torch.concatenate) or not args:
        return None
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    parts = args[0]
    if dim != 0 or not isinstance(parts, list | tuple) or not parts:
        return None
    rows = [part.meta.get(_ROW) if isinstance(part, fx.Node) else None for part in parts]
    batch: fx.Node | None = rows[0][0] if rows[0] is not None else None
    if batch is None or rows != [(batch, position, len(parts)) for position in range(len(parts))]:
        return None
    return batch, target is torch.stack


def divided_and_joined(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> fx.Node | None:
    """What is split along a dimension and joined again along it, whatever the sizes of its parts; None where
    something else is called.
    """
    if target not in (torch.cat, torch.concat, torch.concatenate) or not args:
        return None
    parts = args[0]
    if not isinstance(parts, fx.Node) or parts.target not in (torch.split, "split"):
        return None
    dims = [
        given[place] if len(given) > place else named.get("dim", 0)
        for given, named, place in ((parts.args, parts.kwargs, 2), (args, kwargs, 1))
    ]
    whole = parts.args[0] if parts.args else None
    return whole if dims[0] == dims[1] and isinstance(whole, fx.Node) else None


def check_rows(task: str, graph: fx.Graph) -> None:
    """Refuse samples that are worked through one after another otherwise.

    Args:
        graph: without dead code.

    Raises:
        WorkloadError: with the place in the user's code.
    """
    for node in graph.nodes:
        if _ROW in node.meta:
            made = refusal(
                task,
                "forward decides by the size of the batch, which a share of the batch does not have: it "
                "works through the samples one after another",
                node.meta.get("place"),
                "Compute with all samples at once.",
            )
            raise ReadsValuesError.at(made, frames=node.meta.get(FRAMES, ()))


def filled_by_sample(tensor: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """`tensor.masked_scatter(mask, values)` where each sample has as many places as values.

    Args:
        tensor: of shape (samples, ...).
        mask: broadcast to it; where it is true, values are put.
        values: of shape (samples * rows, ...), each sample's rows together.

    Raises:
        RuntimeError: a sample has more or fewer places than values (on a GPU, an assertion of the device).
    """
    samples = tensor.shape[0]
    places = mask.expand_as(tensor).reshape(samples, -1)
    given = values.reshape(samples, -1)
    fits = (places.sum(1) == given.shape[1]).all()
    torch._assert_async(  # type: ignore[no-untyped-call,unused-ignore]  # torch: untyped
        fits, "masked_scatter: a sample has more or fewer places than values, so that others would get them"
    )
    order = (places.long().cumsum(1) - 1).clamp(min=0, max=given.shape[1] - 1)
    return torch.where(places, given.to(tensor.dtype).gather(1, order), tensor.reshape(samples, -1)).view_as(
        tensor
    )
