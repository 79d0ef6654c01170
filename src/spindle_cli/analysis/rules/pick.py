"""Rules of operators that pick entries by number: index, gather, scatter, embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from spindle_cli.analysis.rules.tape import Call, Operand
from spindle_cli.analysis.rules.types import UNUSED, WHOLE, Batch, MixesError, State
from spindle_cli.analysis.rules.views import aligned, joined, positive

Rule = Callable[[Call], list[State]]
_OTHER_SAMPLES = "it picks from other samples of the batch"


def _embedding(call: Call) -> list[State]:
    if call["weight"].state != WHOLE or call.varies:
        raise MixesError("its table depends on the batch")
    if call["scale_grad_by_freq"]:
        raise MixesError("its gradient is divided by how often the batch has each number")
    return [call["indices"].state]


def _embedding_bag(call: Call) -> list[State]:
    """The state of bags of flat numbers, each sample's from its own offset on, and a weight for each of them
    or none.
    """
    numbers, offsets = call["indices"].state, call["offsets"].state
    if call["weight"].state != WHOLE or call.varies:
        raise MixesError("its table depends on the batch")
    if call["scale_grad_by_freq"]:
        raise MixesError("its gradient is divided by how often the batch has each number")
    if not isinstance(numbers, Batch) or numbers.outer != 1 or offsets != Batch(0, numbered=numbers.inner):
        raise MixesError(_OTHER_SAMPLES)
    weights = call["per_sample_weights"]
    if isinstance(weights, Operand) and weights.state != numbers:
        raise MixesError(_OTHER_SAMPLES)
    return [Batch(0), *[UNUSED] * (len(call.results) - 1)]


def _gather(call: Call) -> list[State]:
    operand, index = call["self"], call["index"]
    dim = positive(call["dim"], operand.ndim)
    if operand.state == WHOLE:
        # each entry of the result reads its own position along the other dimensions
        if isinstance(index.state, Batch) and index.state.dim == dim and index.ndim == operand.ndim:
            return [index.state]
        raise MixesError(_OTHER_SAMPLES)
    if operand.state.dim == dim or index.state != operand.state:
        raise MixesError(_OTHER_SAMPLES)
    return [operand.state]


def _scatter(call: Call) -> list[State]:
    operand: Operand = call["self"]
    state = operand.state
    if not isinstance(state, Batch) or state.dim == positive(call["dim"], operand.ndim):
        raise MixesError(_OTHER_SAMPLES)
    if call["index"].state != state or call.varies:
        raise MixesError(_OTHER_SAMPLES)
    source = call["src"]
    if isinstance(source, Operand) and source.state != state and not source.is_one():
        raise MixesError(_OTHER_SAMPLES)
    return [state]


def _index_select(call: Call) -> list[State]:
    operand, index = call["self"], call["index"]
    dim = positive(call["dim"], operand.ndim)
    if operand.state == WHOLE and isinstance(index.state, Batch):
        return [replace(index.state, dim=dim)]
    if not isinstance(operand.state, Batch) or operand.state.dim == dim or index.state != WHOLE:
        raise MixesError(_OTHER_SAMPLES)
    return [operand.state]


def _index_add(call: Call) -> list[State]:
    operand: Operand = call["self"]
    state = operand.state
    if not isinstance(state, Batch) or state.dim == positive(call["dim"], operand.ndim):
        raise MixesError(_OTHER_SAMPLES)
    if call["source"].state != state or call["index"].state != WHOLE:
        raise MixesError(_OTHER_SAMPLES)
    return [state]


def _index(call: Call) -> list[State]:
    """self[i, :, j, ...] with tensors and full slices."""
    operand: Operand = call["self"]
    given = [item for item in call["indices"] if item is not None]
    ndim = max(item.ndim for item in given)
    picked = _picked(operand, call["indices"], ndim)
    places = [position for position, item in enumerate(call["indices"]) if item is not None]
    together = places == list(range(places[0], places[-1] + 1))
    front = places[0] if together else 0
    if isinstance(picked, Batch):
        return [replace(picked, dim=picked.dim + front)]
    assert isinstance(operand.state, Batch)
    dim = operand.state.dim
    put_before = 0 if together and places[0] > dim else ndim
    return [replace(operand.state, dim=dim - sum(place < dim for place in places) + put_before)]


def _picked(operand: Operand, indices: Sequence[Operand | None], ndim: int) -> State:
    """State of what the index tensors pick, along the dimensions that they are broadcast to; WHOLE where the
    batch lies along a dimension that is sliced.
    """
    state = operand.state
    numbers = [item for item in indices if item is not None]
    if state == WHOLE or not isinstance(state, Batch):
        return _own_values(numbers, ndim)
    at_batch = indices[state.dim] if state.dim < len(indices) else None
    if at_batch is None:
        if any(item.state != WHOLE for item in numbers):
            raise MixesError(_OTHER_SAMPLES)
        return WHOLE
    others = [item for item in numbers if item is not at_batch]
    if any(isinstance(item.state, Batch) and item.state.numbered for item in others):
        raise MixesError(_OTHER_SAMPLES)
    return joined([_own_rows(state, at_batch, ndim), *[aligned(item, ndim) for item in others]])


def _own_rows(state: Batch, index: Operand, ndim: int) -> Batch:
    """State of what an index along the batch picks that is broadcast to `ndim` dimensions: the row of each
    sample by its own number.

    Raises:
        MixesError: it may pick from other samples.
    """
    plain = (state.outer, state.inner, state.numbered) == (1, 1, 0)
    if not plain or not isinstance(index.state, Batch) or index.state.numbered != 1:
        raise MixesError(_OTHER_SAMPLES)
    return replace(index.state, dim=index.state.dim + ndim - index.ndim, numbered=0)


def _own_values(numbers: Sequence[Operand], ndim: int) -> State:
    if any(isinstance(item.state, Batch) and item.state.numbered for item in numbers):
        raise MixesError("it picks by the numbers of samples in the batch")
    return joined([aligned(item, ndim) for item in numbers])


def _index_put(call: Call) -> list[State]:
    """self[indices] = values."""
    operand: Operand = call["self"]
    if not isinstance(operand.state, Batch):
        raise MixesError(_OTHER_SAMPLES)
    given = [item for item in call["indices"] if item is not None]
    if any(item.dtype in (torch.bool, torch.uint8) for item in given):
        _put_by_mask(operand, given, call["values"])
        return [operand.state]
    ndim = max(item.ndim for item in given)
    picked = _picked(operand, call["indices"], ndim)
    if isinstance(picked, Batch):
        if any(item is None for item in call["indices"]):
            raise MixesError(_OTHER_SAMPLES)
        joined([picked, aligned(call["values"], ndim + operand.ndim - len(given))])
    elif call["values"].state != WHOLE:
        raise MixesError(_OTHER_SAMPLES)
    return [operand.state]


def _put_by_mask(operand: Operand, given: Sequence[Operand], values: Operand) -> None:
    """One value for all entries that a mask of each sample leaves."""
    mask = given[0]
    if len(given) > 1 or mask.state != operand.state or values.state != WHOLE or not values.is_one():
        raise MixesError(_OTHER_SAMPLES)


def within_samples(call: Call) -> State | None:
    """The state of self[index] and index_select, where each sample picks among its own rows by an index that
    is known; None where it is something else.
    """
    operand: Operand = call["self"]
    dim = 0 if call.name != "index_select" else positive(call["dim"], operand.ndim)
    index = call["index"] if call.name == "index_select" else call["indices"][0]
    alone = call.name == "index_select" or not any(call["indices"][1:])
    if not alone or not isinstance(index, Operand) or not index.rows_within:
        return None
    state = operand.state
    if not isinstance(state, Batch) or (state.dim, state.outer, state.inner) != (dim, 1, index.rows_within):
        return None
    return Batch(dim, 1, index.shapes[0][0] // call.sizes[0])


BY_ROW = frozenset({"index", "index_select"})
# May be given the samples' own numbers.
BY_NUMBER = frozenset({"index", "index_put", "index_put_", "_embedding_bag", "_embedding_bag_forward_only"})
RULES: dict[str, Rule] = {
    "embedding": _embedding,
    "_embedding_bag": _embedding_bag,
    "_embedding_bag_forward_only": _embedding_bag,
    "gather": _gather,
    "index_select": _index_select,
    "index": _index,
    "_unsafe_index": _index,
    **dict.fromkeys(("index_put", "index_put_", "_unsafe_index_put"), _index_put),
    **dict.fromkeys(("index_add", "index_add_", "index_copy", "index_copy_"), _index_add),
    **dict.fromkeys(("index_reduce", "index_reduce_"), _index_add),
    **dict.fromkeys(
        ("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"), _scatter
    ),
}
