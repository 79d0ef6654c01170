"""Rules of operators that make tensors: of the batch's size, like another, or drawn at random.

What is drawn for each sample is as good when a share draws it. A draw for the whole batch is drawn by each
share, as dropout of a weight is.
"""

from __future__ import annotations

from collections.abc import Callable

from spindle_cli.analysis.rules.tape import Call, Varying
from spindle_cli.analysis.rules.types import Batch, MixesError, State

Rule = Callable[[Call], list[State]]
_NO_MULTIPLE = "it makes a tensor by the batch's size that is no row for each sample"


def _of_size(call: Call) -> list[State]:
    """zeros, full, rand and their like, with the batch's size along one dimension."""
    if any(isinstance(value, Varying) for name, value in call.arguments.items() if name != "size"):
        raise MixesError("it writes the size of the batch into a tensor")
    return [_rows(call)]


def _rows(call: Call) -> Batch:
    shapes = call.results[0]
    moved = [dim for dim in range(len(shapes[0])) if len({shape[dim] for shape in shapes}) > 1]
    if len(moved) != 1 or shapes[0][moved[0]] % call.sizes[0]:
        raise MixesError(_NO_MULTIPLE)
    return Batch(moved[0], 1, shapes[0][moved[0]] // call.sizes[0])


def _arange(call: Call) -> list[State]:
    """The samples' own numbers, or every sample's first row: 0, step, ... up to step * samples."""
    end, step = call["end"], call["step"] or 1
    fits = isinstance(end, Varying) and isinstance(step, int) and call["start"] in (None, 0)
    if not fits or end.values != tuple(step * size for size in call.sizes):
        raise MixesError(_NO_MULTIPLE)
    return [Batch(0, numbered=step)]


def _like(call: Call) -> list[State]:
    if call.varies:
        raise MixesError("it writes the size of the batch into a tensor")
    return [call["self"].state]


def _dropout(call: Call) -> list[State]:
    return [call["input"].state] * len(call.results)


def _multinomial(call: Call) -> list[State]:
    state = call["self"].state
    if not isinstance(state, Batch) or state.dim != 0 or call["self"].ndim != 2 or call.varies:
        raise MixesError("it draws over the batch")
    return [state]


_SIZES = ("zeros", "ones", "full", "empty", "rand", "randn", "randint", "new_zeros", "new_ones", "new_full")
_LIKE = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like")
_DRAWN = (
    "bernoulli",
    "bernoulli_",
    "uniform_",
    "normal_",
    "exponential_",
    "random_",
    "geometric_",
    "cauchy_",
)
RULES: dict[str, Rule] = {
    **dict.fromkeys((*_SIZES, "new_empty", "empty_strided", "new_empty_strided"), _of_size),
    **dict.fromkeys((*_LIKE, *_DRAWN, "log_normal_", "cauchy_"), _like),
    "arange": _arange,
    "native_dropout": _dropout,
    "multinomial": _multinomial,
}
