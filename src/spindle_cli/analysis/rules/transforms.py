"""Rules of Fourier transforms, of functions of matrices, and of what puts parts into tensors.

A matrix is the last two dimensions of a tensor; the dimensions before them may be the batch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from spindle_cli.analysis.rules.tape import Call, Operand, Varying
from spindle_cli.analysis.rules.types import UNUSED, WHOLE, Batch, MixesError, State
from spindle_cli.analysis.rules.views import aligned, broadcast, joined, positive

Rule = Callable[[Call], list[State]]
_INSIDE = "it works along the batch"


def _batch(call: Call, operand: Operand, worked_along: Sequence[int]) -> Batch:
    """State of an operand that is worked along some dimensions, none of which is the batch's."""
    state = operand.state
    if not isinstance(state, Batch) or call.varies:
        raise MixesError(_INSIDE)
    if state.dim in [positive(dim, operand.ndim) for dim in worked_along]:
        raise MixesError(_INSIDE)
    return state


def _along(name: str) -> Rule:
    """What works along the dimensions that an argument names, which all stay where they are."""

    def rule(call: Call) -> list[State]:
        dims = call[name] if isinstance(call[name], list) else [call[name]]
        return [_batch(call, call["self"], dims)] * len(call.results)

    return rule


def _of_matrix(name: str) -> Rule:
    """A function of each matrix by itself; whatever it gives has the dimensions before the matrix."""

    def rule(call: Call) -> list[State]:
        if len(call.operands) != 1:
            raise MixesError(_INSIDE)
        return [_batch(call, call[name], (-1, -2))] * len(call.results)

    return rule


def _of_matrices(left: str, right: str) -> Rule:
    """Make the rule for operators on each two matrices that are lined up, as in a system of equations."""

    def rule(call: Call) -> list[State]:
        ndim = max(call[left].ndim, call[right].ndim)
        state = joined([aligned(call[name], ndim) for name in (left, right)])
        fits = call.varies is False and min(call[left].ndim, call[right].ndim) >= 2
        if not fits or not isinstance(state, Batch) or state.dim >= ndim - 2:
            raise MixesError(_INSIDE)
        if any(len(shapes[0]) < ndim - 2 for shapes in call.results) or len(call.results[0][0]) != ndim:
            raise MixesError(_INSIDE)
        return [state] * len(call.results)

    return rule


def _solve(call: Call) -> list[State]:
    """linalg_solve, whose right side may be a vector for each matrix."""
    matrix, right = call["A"], call["B"]
    if right.ndim == matrix.ndim - 1:
        state = _batch(call, matrix, (-1, -2))
        if right.state != state:
            raise MixesError(_INSIDE)
        return [state] * len(call.results)
    return _of_matrices("A", "B")(call)


def _cross(call: Call) -> list[State]:
    state = joined([call["self"].state, call["other"].state])
    ndim = call["self"].ndim
    if call.varies or call["other"].ndim != ndim or not isinstance(state, Batch):
        raise MixesError(_INSIDE)
    if state.dim == positive(call["dim"], ndim):
        raise MixesError(_INSIDE)
    return [state]


def _diagonal_matrix(call: Call) -> list[State]:
    """diag_embed: a matrix of the last dimension."""
    state = _batch(call, call["self"], (-1,))
    if (call["dim1"], call["dim2"]) != (-2, -1):
        raise MixesError(_INSIDE)
    return [state]


def _put_slice(call: Call) -> list[State]:
    """slice_scatter: another part along a dimension."""
    return [joined([_batch(call, call["self"], [call["dim"]]), call["src"].state])]


def _put_one(call: Call) -> list[State]:
    """select_scatter: another entry along a dimension, which what is put there lacks."""
    operand: Operand = call["self"]
    state = _batch(call, operand, [call["dim"]])
    dim = positive(call["dim"], operand.ndim)
    joined([replace(state, dim=state.dim - (dim < state.dim)), call["src"].state])
    return [state]


def _fill(call: Call) -> list[State]:
    """index_fill: one value at places that are the same for every sample."""
    state = _batch(call, call["self"], [call["dim"]])
    if any(operand.state != WHOLE for operand in call.operands if operand is not call["self"]):
        raise MixesError(_INSIDE)
    return [state]


def _search(call: Call) -> list[State]:
    """bucketize, searchsorted: the place of each value in a row, the same for all or one for each sample."""
    row = call["boundaries"] if call["boundaries"] is not None else call["sorted_sequence"]
    values = call["self"]
    sorter = call["sorter"] or row  # the places of a row's entries in order
    if call.varies or not isinstance(values, Operand) or sorter.state != row.state:
        raise MixesError(_INSIDE)
    if row.state == WHOLE and row.ndim == 1:
        return [values.state]
    if row.state != values.state or row.ndim != values.ndim:
        raise MixesError(_INSIDE)
    return [_batch(call, row, (-1,))]


def _log_sigmoid(call: Call) -> list[State]:
    if call.varies:
        raise MixesError("it computes with the size of the batch")
    return [broadcast(call, call.results[0]), *[UNUSED] * (len(call.results) - 1)]


def _unpool(call: Call) -> list[State]:
    """max_unpool: the places of a plane are numbered within it."""
    state = _batch(call, call["self"], ())  # along a plane, its size would depend on the batch's
    if call["indices"].state != state:
        raise MixesError(_INSIDE)
    return [state]


def _affine_grid(call: Call) -> list[State]:
    """A grid for each map; `size` begins with their number, and says how large grids are."""
    return [call["theta"].state]


def _strided(call: Call) -> list[State]:
    """as_strided, as torch.stft takes overlapping parts of each sample or of each of its rows: where these
    lie in memory without gaps, and no entry of the result reaches beyond its own.
    """
    operand: Operand = call["self"]
    state = operand.state
    is_seen = len(operand.strides) == len(call.sizes)
    if not is_seen or not isinstance(state, Batch) or state.outer != 1 or call["storage_offset"] is not None:
        raise MixesError(_INSIDE)
    size, stride = call["size"], call["stride"]
    moved = [dim for dim, count in enumerate(size) if isinstance(count, Varying)]
    if len(moved) != 1 or any(isinstance(step, Varying) for step in stride):
        raise MixesError(_INSIDE)
    (dim,) = moved
    rows = size[dim].values[0] // call.sizes[0]  # of the result, for each sample
    if not rows or state.inner % rows or size[dim].values != tuple(rows * count for count in call.sizes):
        raise MixesError(_INSIDE)
    step, length = _row_in_memory(operand, state, state.inner // rows)
    other_axes = [axis for axis in range(len(size)) if axis != dim]
    reach = sum((size[axis] - 1) * stride[axis] for axis in other_axes)
    if stride[dim] != step or reach >= length:
        raise MixesError("its rows reach into other samples")
    return [Batch(dim, 1, rows)]


def _row_in_memory(operand: Operand, state: Batch, inner: int) -> tuple[int, int]:
    """How far it is in memory from one row to the next, and how many entries a row has, where a row is
    `inner` entries along the batch's dimension with all that belongs to them.

    Raises:
        MixesError: rows have gaps, overlap, or lie in another way for another size of the batch.
    """
    steps_and_lengths = set()
    for shape, strides in zip(operand.shapes, operand.strides, strict=True):
        row = [*shape[: state.dim], inner, *shape[state.dim + 1 :]]
        length = 1
        for stride, count in sorted((s, c) for s, c in zip(strides, row, strict=True) if c != 1):
            if stride != length:
                raise MixesError(_INSIDE)
            length *= count
        steps_and_lengths.add((strides[state.dim] * inner, length))
    if len(steps_and_lengths) != 1:
        raise MixesError(_INSIDE)
    step, length = steps_and_lengths.pop()
    if step < length:
        raise MixesError(_INSIDE)
    return step, length


_OF_SELF = ("linalg_cholesky_ex", "linalg_matrix_exp", "linalg_pinv", "linalg_eig", "cholesky_inverse")
_OF_A = ("linalg_inv_ex", "_linalg_det", "_linalg_slogdet", "_linalg_svd", "_linalg_eigh", "linalg_qr")
RULES: dict[str, Rule] = {
    **dict.fromkeys(("_fft_r2c", "_fft_c2c", "_fft_c2r"), _along("dim")),
    "rot90": _along("dims"),
    **dict.fromkeys(_OF_SELF, _of_matrix("self")),
    **dict.fromkeys((*_OF_A, "linalg_lu_factor_ex", "linalg_lu"), _of_matrix("A")),
    "_linalg_solve_ex": _solve,
    "linalg_solve_triangular": _of_matrices("self", "B"),
    "cholesky_solve": _of_matrices("self", "input2"),
    "_cholesky_solve_helper": _of_matrices("self", "A"),
    "linalg_cross": _cross,
    "diag_embed": _diagonal_matrix,
    "slice_scatter": _put_slice,
    "select_scatter": _put_one,
    "index_fill": _fill,
    "index_fill_": _fill,
    "bucketize": _search,
    "searchsorted": _search,
    "log_sigmoid_forward": _log_sigmoid,
    "max_unpool2d": _unpool,
    "max_unpool3d": _unpool,
    "affine_grid_generator": _affine_grid,
    "as_strided": _strided,
}
