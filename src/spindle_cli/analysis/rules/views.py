"""Rules of operators that only move entries: views, joins, parts of tensors, and tensors lined up with
others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from spindle_cli.analysis.rules.tape import Call, Operand, Varying
from spindle_cli.analysis.rules.types import WHOLE, Batch, MixesError, Reduced, State

Shapes = tuple[tuple[int, ...], ...]
DIFFERENT = "it puts together entries of different samples"


def joined(states: Sequence[State]) -> State:
    """The one state that tensors agree on which are lined up entry by entry.

    Raises:
        MixesError: they lie in different ways along the batch.
    """
    batches = {state for state in states if isinstance(state, Batch)}
    if len(batches) > 1:
        raise MixesError(DIFFERENT)
    return batches.pop() if batches else WHOLE


def aligned(operand: Operand, ndim: int) -> State:
    """State of a tensor that is broadcast to `ndim` dimensions."""
    state = operand.state
    if isinstance(state, Batch):
        return replace(state, dim=state.dim + ndim - operand.ndim)
    return WHOLE


def broadcast(call: Call, shapes: Shapes) -> State:
    """The state of a result for which all tensors are broadcast against each other."""
    ndim = len(shapes[0])
    return joined([aligned(operand, ndim) for operand in call.operands])


def labelled(inputs: Sequence[tuple[Operand, str]], result: str, *, may_sum: bool = False) -> State:
    """The state of a product of tensors whose dimensions have letters, as in torch.einsum; a letter that the
    result lacks is summed over.

    Args:
        may_sum: it may do so over samples, too.

    Raises:
        MixesError: it sums over samples, or puts different samples together.
    """
    batch_letters: set[tuple[str, int, int]] = set()
    for operand, letters in inputs:
        if isinstance(operand.state, Batch):
            state = operand.state
            batch_letters.add((letters[state.dim], state.outer, state.inner))
    if not batch_letters:
        return WHOLE
    if len(batch_letters) > 1:
        raise MixesError(DIFFERENT)
    letter, outer, inner = batch_letters.pop()
    if letter not in result and may_sum:
        return Reduced(1)
    if letter not in result:
        raise MixesError("it sums over the batch")
    return Batch(result.index(letter), outer, inner)


Rule = Callable[[Call], list[State]]
_OTHER_ROWS = "it takes some of the batch's samples, or puts them into another order"
_NO_PLACE = "its rows of one sample do not lie in one dimension"


def _batch(call: Call, name: str = "self") -> tuple[Operand, Batch]:
    operand: Operand = call[name]
    if not isinstance(operand.state, Batch):
        raise MixesError("it makes a tensor of the batch's size")
    return operand, operand.state


def positive(dim: int, ndim: int) -> int:
    """A dimension counted from the front."""
    return dim + ndim if dim < 0 else dim


def reshaped(state: Batch, shape: Sequence[int], sizes: Sequence[int], result: Sequence[Any]) -> Batch:
    """State after entries were laid out in another shape, in the same order.

    Args:
        shape: before, for the first size of the batch.
        result: the shape after, for each of `sizes`.

    Raises:
        MixesError: the batch is then not one dimension's outer, sample and inner entries.
    """
    inner = state.inner * prod(shape[state.dim + 1 :])
    outer = state.outer * prod(shape[: state.dim])
    moved = [dim for dim in range(len(result[0])) if len({shape_at[dim] for shape_at in result}) > 1]
    if len(moved) != 1:
        raise MixesError(_NO_PLACE)
    dim = moved[0]
    behind, before = prod(result[0][dim + 1 :]), prod(result[0][:dim])
    if not behind or not before or inner % behind or outer % before:
        raise MixesError(_NO_PLACE)
    laid_out = replace(state, dim=dim, outer=outer // before, inner=inner // behind)
    if result[0][dim] != laid_out.outer * laid_out.inner * sizes[0]:
        raise MixesError(_NO_PLACE)
    return laid_out


def _view(call: Call) -> list[State]:
    operand, state = _batch(call)
    return [reshaped(state, operand.shapes[0], call.sizes, call.results[0])]


def _permute(call: Call) -> list[State]:
    operand, state = _batch(call)
    dims = [positive(dim, operand.ndim) for dim in call["dims"]]
    return [replace(state, dim=dims.index(state.dim))]


def _transpose(call: Call) -> list[State]:
    operand, state = _batch(call)
    one, two = (positive(call[name], operand.ndim) for name in ("dim0", "dim1"))
    return [replace(state, dim={one: two, two: one}.get(state.dim, state.dim))]


def _t(call: Call) -> list[State]:
    operand, state = _batch(call)
    return [state if operand.ndim < 2 else replace(state, dim=1 - state.dim)]


def _expand(call: Call) -> list[State]:
    operand: Operand = call["self"]
    result = call.results[0]
    if isinstance(operand.state, Batch):
        return [replace(operand.state, dim=operand.state.dim + len(result[0]) - operand.ndim)]
    return [_spread(result, call.sizes)]


def _spread(result: Any, sizes: tuple[int, ...]) -> State:
    """The state of entries that are the same for every sample, by which dimension of the result is the
    batch's.
    """
    moved = [dim for dim in range(len(result[0])) if len({one[dim] for one in result}) > 1]
    if len(moved) != 1 or result[0][moved[0]] % sizes[0]:
        raise MixesError(_NO_PLACE if moved else "its size depends on the batch's")
    return Batch(moved[0], 1, result[0][moved[0]] // sizes[0])


def _repeat(call: Call) -> list[State]:
    operand: Operand = call["self"]
    repeats = call["repeats"]
    if not isinstance(operand.state, Batch):
        return [_spread(call.results[0], call.sizes)]
    if any(isinstance(count, Varying) for count in repeats):
        raise MixesError("it makes batch x batch entries")
    state = operand.state
    dim = state.dim + len(repeats) - operand.ndim
    if state.numbered and repeats[dim] != 1:
        raise MixesError("it repeats the numbers of samples in the batch")
    return [replace(state, dim=dim, outer=state.outer * repeats[dim])]


def _select(call: Call) -> list[State]:
    operand, state = _batch(call)
    dim = positive(call["dim"], operand.ndim)
    if dim == state.dim or isinstance(call["index"], Varying):
        raise MixesError(_OTHER_ROWS)
    return [replace(state, dim=state.dim - (dim < state.dim))]


def _slice(call: Call) -> list[State]:
    operand, state = _batch(call)
    dim = positive(call["dim"], operand.ndim)
    if dim == state.dim:
        whole = operand.shapes == call.results[0] and call["start"] in (None, 0) and call["step"] == 1
        if not whole:
            raise MixesError(_OTHER_ROWS)
    elif any(isinstance(call[name], Varying) for name in ("start", "end", "step")):
        raise MixesError("it cuts by the size of the batch")
    return [state]


def _parts(call: Call) -> list[State]:
    """split, chunk: parts along a dimension that is not the batch's."""
    operand, state = _batch(call)
    if call.varies or positive(call["dim"], operand.ndim) == state.dim:
        raise MixesError(_OTHER_ROWS)
    return [state] * len(call.results)


def _unbind(call: Call) -> list[State]:
    operand, state = _batch(call)
    dim = positive(call["dim"], operand.ndim)
    if dim == state.dim:
        raise MixesError(_OTHER_ROWS)
    return [replace(state, dim=state.dim - (dim < state.dim))] * len(call.results)


def _cat(call: Call) -> list[State]:
    operands: list[Operand] = [item for item in call["tensors"] if item.shapes[0] != (0,)]
    dim = positive(call["dim"], len(call.results[0][0]))
    batches = [item.state for item in operands if isinstance(item.state, Batch)]
    if not any(state.dim == dim for state in batches):
        return [joined([item.state for item in operands])]
    if len(batches) < len(operands) or {(state.dim, state.inner) for state in batches} != {
        (dim, batches[0].inner)
    }:
        raise MixesError("it puts rows of other kinds among the batch's")
    return [Batch(dim, sum(state.outer for state in batches), batches[0].inner)]


def _stack(call: Call) -> list[State]:
    dim = positive(call["dim"], len(call.results[0][0]))
    state = joined([item.state for item in call["tensors"]])
    if isinstance(state, Batch):
        return [replace(state, dim=state.dim + (dim <= state.dim))]
    return [WHOLE]


def _order(call: Call) -> list[State]:
    """roll, flip: another order along dimensions that are not the batch's."""
    operand, state = _batch(call)
    dims = call["dims"] if isinstance(call["dims"], list) else [call["dims"]]
    if call.varies or not dims or state.dim in [positive(dim, operand.ndim) for dim in dims]:
        raise MixesError(_OTHER_ROWS)
    return [state]


def _pad(call: Call) -> list[State]:
    operand, state = _batch(call)
    pad = call["pad"] if call["pad"] is not None else call["padding"]
    first = 2 * (operand.ndim - 1 - state.dim)  # pads are in pairs, those of the last dimension first
    if call.varies or any(pad[first : first + 2]):
        raise MixesError("it pads the batch")
    return [state]


def _last_two(call: Call) -> list[State]:
    """tril, triu: of the last two dimensions."""
    operand, state = _batch(call)
    if call.varies or state.dim >= operand.ndim - 2:
        raise MixesError(_OTHER_ROWS)
    return [state]


def _diagonal(call: Call) -> list[State]:
    operand, state = _batch(call)
    taken = [positive(call[name], operand.ndim) for name in ("dim1", "dim2")]
    if call.varies or state.dim in taken:
        raise MixesError(_OTHER_ROWS)
    return [replace(state, dim=state.dim - sum(dim < state.dim for dim in taken))]


def _unfold(call: Call) -> list[State]:
    operand, state = _batch(call)
    if call.varies or positive(call["dimension"], operand.ndim) == state.dim:
        raise MixesError(_OTHER_ROWS)
    return [state]


def _same_place(call: Call) -> list[State]:
    _, state = _batch(call)
    return [state]


_VIEWS = (
    "view",
    "_unsafe_view",
    "reshape",
    "_reshape_alias",
    "squeeze",
    "unsqueeze",
    "squeeze_",
    "unsqueeze_",
)
MOVES = frozenset(_VIEWS) | {"unsqueeze_", "permute", "transpose", "t", "expand", "repeat"}
RULES: dict[str, Rule] = {
    **dict.fromkeys((*_VIEWS, "unsqueeze_"), _view),
    "permute": _permute,
    "transpose": _transpose,
    "transpose_": _transpose,
    "t": _t,
    "t_": _t,
    "expand": _expand,
    "repeat": _repeat,
    "select": _select,
    "slice": _slice,
    "unbind": _unbind,
    "cat": _cat,
    "stack": _stack,
    "roll": _order,
    "flip": _order,
    **dict.fromkeys(("tril", "triu", "tril_", "triu_"), _last_two),
    "diagonal": _diagonal,
    "unfold": _unfold,
    "view_as_real": _same_place,
    "view_as_complex": _same_place,
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "unsafe_chunk", "chunk"), _parts),
    **dict.fromkeys(("constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad1d"), _pad),
    **dict.fromkeys(("replication_pad2d", "reflection_pad3d", "replication_pad3d"), _pad),
}
