"""Where the batch lies in the result of operators that line up the dimensions of several tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spindle_cli.analysis.rules.tape import Call, Operand
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
