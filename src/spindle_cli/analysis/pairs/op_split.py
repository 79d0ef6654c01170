"""How one operator of a contrastive loss is split over the samples: what a share of the batch runs of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spindle_cli.analysis.rules.tape import Call, Operand
from spindle_cli.analysis.rules.types import WHOLE, Batch, MixesError, Pairs, State

NO_ROW = "it compares what is no single row for each sample"
BOTH_WAYS = "it works along rows of pairs that are cut along their columns"
NO_SUM = "it computes with a sum or mean over pairs"
SIZED = "it writes the size of the batch into a tensor"
Along = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class OpSplit:
    """How an operator treats samples and pairs of them.

    Attributes:
        states: of each tensor that it gives.
        along: for each tensor among its arguments the pairs (a dimension of it that is of samples, the
            dimension of the result that it becomes); a dimension that is not there is worked along, and has
            to be whole. None: the operator runs on the rows of the share alone, with numbers that are the
            share's own; numbers are else those of the whole batch.
        is_mean: run on a share it gives a mean over the share's samples, not its part of the whole mean.
        cut: where no dimension of samples is left, along which one of its argument a share is cut.
        counts: it gives the number of the batch's samples.
    """

    states: tuple[State, ...]
    along: tuple[Along, ...] | None = None
    is_mean: bool = False
    cut: int | None = None
    counts: bool = False


def sample_dims(state: State) -> tuple[int, ...]:
    """The dimensions along which a tensor has samples, ascending.

    Raises:
        MixesError: a sample has several rows there, or none of its own.
    """
    if isinstance(state, Pairs):
        return state.dims
    if isinstance(state, Batch):
        if (state.outer, state.inner) != (1, 1):
            raise MixesError(NO_ROW)
        return (state.dim,)
    return ()


def joined(call: Call, along: Sequence[Along]) -> State:
    """The state of a result whose dimensions of samples come from those of its arguments.

    Raises:
        MixesError: those are more than two, or neither can be cut.
    """
    dims = sorted({result for dims_map in along for _, result in dims_map})
    if len(dims) > 2:
        raise MixesError("it compares more than two samples at once")
    if not dims:
        return WHOLE
    if len(dims) == 1:
        return Batch(dims[0])
    cuts = set(dims)
    for operand, dims_map in zip(call.operands, along, strict=True):
        if isinstance(operand.state, Pairs):
            cuts &= {result for dim, result in dims_map if dim in operand.state.cuts}
    if not cuts:
        raise MixesError(BOTH_WAYS)
    return Pairs((dims[0], dims[1]), tuple(sorted(cuts)))


def broadcast(operand: Operand, ndim: int) -> Along:
    """Which dimensions a tensor's samples lie along once it is broadcast to `ndim` dimensions. Raises what
    `sample_dims` raises.
    """
    return tuple((dim, dim + ndim - operand.ndim) for dim in sample_dims(operand.state))


def have_all_samples(dims: Sequence[int], shapes: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> bool:
    """Whether each of these dimensions is as long as the batch is large, for every size of it."""
    return all(shape[dim] == size for shape, size in zip(shapes, sizes, strict=True) for dim in dims)


def growing(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """The dimensions whose length depends on the batch's size."""
    return [dim for dim in range(len(shapes[0])) if len({shape[dim] for shape in shapes}) > 1]
