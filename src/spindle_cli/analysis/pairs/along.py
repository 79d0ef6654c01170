"""Rules of operators that work along rows or columns of pairs, or over all of them: softmax, sums, losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from spindle_cli.analysis.pairs.op_split import BOTH_WAYS, NO_SUM, Along, OpSplit, broadcast, joined
from spindle_cli.analysis.rules.tape import Call, Operand
from spindle_cli.analysis.rules.types import UNUSED, Batch, MixesError, Pairs, Part
from spindle_cli.analysis.rules.views import positive

_SOME = "it takes some of the pairs alone"
Rule = Callable[[Call], OpSplit]


def _dims(call: Call, operand: Operand) -> list[int]:
    given = call["dim"]
    if given is None or given == []:
        return list(range(operand.ndim))
    return [positive(dim, operand.ndim) for dim in (given if isinstance(given, list) else [given])]


def _softmax(call: Call) -> OpSplit:
    """Along a dimension, which stays and is whole from then on."""
    operand: Operand = call["self"]
    state = operand.state
    assert isinstance(state, Pairs)
    cuts = tuple(dim for dim in state.cuts if dim not in _dims(call, operand))
    if call.varies or not cuts:
        raise MixesError(BOTH_WAYS)
    along = tuple((dim, dim) for dim in state.dims)
    return OpSplit((replace(state, cuts=cuts),) * len(call.results), (along,))


def _reduction(linear: int | None) -> Rule:
    """A reduction along rows or columns; over both it has to be a sum (`linear` 1) or a mean (0)."""

    def rule(call: Call) -> OpSplit:
        operand: Operand = call["self"]
        state = operand.state
        assert isinstance(state, Pairs)
        dims = _dims(call, operand)
        if call.varies or (linear is not None and operand.dtype is torch.bool):
            raise MixesError(NO_SUM)
        kept = [dim for dim in state.dims if dim not in dims]
        if not kept:
            if linear is None:
                raise MixesError(NO_SUM)
            return OpSplit((Part(),) * len(call.results), ((),), linear == 0, state.cuts[0])
        if not set(kept) & set(state.cuts):
            raise MixesError(BOTH_WAYS)
        gone = [] if call["keepdim"] else dims
        along = tuple((dim, dim - sum(removed < dim for removed in gone)) for dim in kept)
        made = joined(call, [along])
        return OpSplit((made,) * len(call.results), (along,))

    return rule


def _entry_loss(call: Call) -> OpSplit:
    """Losses of entries that are lined up, reduced or not: binary_cross_entropy_with_logits, mse_loss."""
    along = tuple(broadcast(operand, call["self"].ndim) for operand in call.operands)
    state = joined(call, along)
    if call.varies or not isinstance(state, Pairs) or call["target"].shapes != call["self"].shapes:
        raise MixesError("it compares tensors of different shapes")
    if call["reduction"] == 0:
        return OpSplit((state,), along)
    return OpSplit((Part(),), along, call["reduction"] == 1, state.cuts[0])


def _nll(call: Call) -> OpSplit:
    """nll_loss_forward: of each row the entry of its own number."""
    given, target = call["self"], call["target"]
    state = given.state
    if not isinstance(state, Pairs) or state.dims != (0, 1) or 0 not in state.cuts:
        raise MixesError(BOTH_WAYS)
    numbered = isinstance(target.state, Batch) and target.state.numbered == 1
    if not numbered or call["weight"] is not None or call["ignore_index"] >= 0 or call.varies:
        raise MixesError("its labels are not the numbers of the samples")
    along: tuple[Along, ...] = (((0, 0),), ((0, 0),))
    if call["reduction"] == 0:
        return OpSplit((Batch(0), UNUSED), along)
    return OpSplit((Part(), UNUSED), along, call["reduction"] == 1, 0)


def _own_entry(call: Call) -> OpSplit:
    """self[i, i] by the samples' own numbers: of each sample the pair with itself."""
    operand: Operand = call["self"]
    state, indices = operand.state, call["indices"]
    assert isinstance(state, Pairs)
    are_own_numbers = [
        isinstance(i, Operand) and i.ndim == 1 and i.state == Batch(0, numbered=1) for i in indices
    ]
    if operand.ndim != 2 or are_own_numbers != [True, True]:
        raise MixesError(_SOME)
    return OpSplit((Batch(0),), (tuple((dim, 0) for dim in state.cuts[:1]), (), ()))


def _set_own(call: Call) -> OpSplit:
    """scatter of a number to the column of each sample's own number (SupCon's mask of others)."""
    operand, index = call["self"], call["index"]
    state = operand.state
    alone = isinstance(index, Operand) and index.ndim == 2 and index.state == Batch(0, numbered=1)
    alone = alone and all(shape[1] == 1 for shape in index.shapes)
    if not alone or operand.ndim != 2 or positive(call["dim"], 2) != 1 or isinstance(call["src"], Operand):
        raise MixesError(_SOME)
    if not isinstance(state, Pairs) or 0 not in state.cuts:
        raise MixesError(BOTH_WAYS)
    return OpSplit((replace(state, cuts=(0,)),), (((0, 0), (1, 1)), ((0, 0),)))


def _log_sigmoid(call: Call) -> OpSplit:
    """Entry by entry; it gives something for its own backward pass as well."""
    state = call["self"].state
    return OpSplit((state, UNUSED), (tuple((dim, dim) for dim in state.dims),))


def _diagonal(call: Call) -> OpSplit:
    """Judge what takes of each sample the pair with itself."""
    operand: Operand = call["self"]
    state = operand.state
    assert isinstance(state, Pairs)
    taken = tuple(sorted(positive(call[name], operand.ndim) for name in ("dim1", "dim2")))
    if taken != state.dims or call["offset"] != 0 or operand.ndim != 2:
        raise MixesError(_SOME)
    return OpSplit((Batch(0),), (tuple((dim, 0) for dim in state.cuts[:1]),))


RULES: dict[str, Rule] = {
    **dict.fromkeys(("_softmax", "_log_softmax", "cumsum"), _softmax),
    **dict.fromkeys(("logsumexp", "amax", "amin", "max", "min"), _reduction(None)),
    "sum": _reduction(1),
    "mean": _reduction(0),
    **dict.fromkeys(("binary_cross_entropy_with_logits", "binary_cross_entropy", "mse_loss"), _entry_loss),
    "nll_loss_forward": _nll,
    "log_sigmoid_forward": _log_sigmoid,
    "index": _own_entry,
    "scatter": _set_own,
    **dict.fromkeys(("diagonal", "diagonal_copy"), _diagonal),
}
