"""Operations of torch that do to each of several rows what they would do to it alone."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as functional
from torch import fx

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
