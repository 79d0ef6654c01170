"""How each of torch's operators treats pairs of samples, and what is made of them: what makes pairs, acts
on their entries one by one, or works along rows or columns of them (softmax, sums, losses).

Beside the rules for samples one by one (`rules/table.py`): a product of every sample with every other and
tensors by the batch's size, which make pairs; what acts on their entries one by one, what works along their
rows or their columns, and sums and means over all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch

from spindle_cli.analysis.pairs.op_split import (
    BOTH_WAYS,
    NO_ROW,
    NO_SUM,
    SIZED,
    Along,
    OpSplit,
    broadcast,
    growing,
    have_all_samples,
    joined,
    sample_dims,
)
from spindle_cli.analysis.rules.table import is_pointwise, states_of
from spindle_cli.analysis.rules.tape import Call, Operand, Varying
from spindle_cli.analysis.rules.types import (
    UNUSED,
    WHOLE,
    Batch,
    Mixed,
    MixesError,
    Pairs,
    Part,
    Reduced,
    State,
)
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


_ALONG: dict[str, Rule] = {
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


_RANDOM = "it draws random numbers"
_UNKNOWN = "nothing is known of how {name} treats pairs of samples"
ADDS = frozenset({"add", "sub", "rsub"})
_LINEAR = frozenset(
    {"neg", "clone", "detach", "alias", "_to_copy", "view", "_unsafe_view", "reshape", "squeeze", "sum"}
    | {"unsqueeze", "expand", "t", "permute", "transpose", "select", "slice", "mean", "add", "sub", "rsub"}
    | {"stack", "cat"}
)


def split_of(call: Call) -> OpSplit:
    """How an operator treats samples, pairs of them, and sums over them.

    Raises:
        MixesError: it cannot be run by shares, or nothing is known of it.
    """
    mixed = next((state for state in call.states if isinstance(state, Mixed)), None)
    if mixed is not None:
        return OpSplit((mixed,) * len(call.results))
    if torch.Tag.nondeterministic_seeded in call.func.tags:
        raise MixesError(_RANDOM)
    if call.has(Part):
        return _of_parts(call)
    if call.is_whole:
        return OpSplit((WHOLE,) * len(call.results))
    if is_pointwise(call):
        return _pointwise(call)
    if call.has(Pairs):
        if call.name not in RULES:
            raise MixesError(_UNKNOWN.format(name=call.name))
        return RULES[call.name](call)
    made = MAKING[call.name](call) if call.name in MAKING else None
    return made or _of_samples(call)


def _of_samples(call: Call) -> OpSplit:
    """By the rules for samples one by one; their sums and means are parts of those of the batch."""
    states = states_of(call)
    reduced = [state for state in states if isinstance(state, Reduced)]
    if not reduced:
        return OpSplit(tuple(states))
    if any(state.counted for state in reduced):
        raise MixesError("it is a mean over the labels that count")
    degrees = {state.degree for state in reduced}
    if degrees not in ({0}, {1}):
        raise MixesError(NO_SUM)
    parts = tuple(Part() if isinstance(state, Reduced) else state for state in states)
    return OpSplit(parts, is_mean=degrees == {0})


def _pointwise(call: Call) -> OpSplit:
    """Entries one by one, all tensors broadcast against each other."""
    if not call.has(Pairs):
        with suppress(MixesError):
            return _of_samples(call)
    ndim = len(call.results[0][0])
    along = tuple(broadcast(operand, ndim) for operand in call.operands)
    state = joined(call, along)
    return OpSplit((state,) * len(call.results), along)


def _moved(call: Call) -> OpSplit:
    """Views that keep the dimensions of samples, in their order or not."""
    operand: Operand = call["self"]
    state = operand.state
    assert isinstance(state, Pairs)
    result = call.results[0]
    result_dims = growing(result)
    if call.name == "t":
        result_dims = [1 - dim for dim in state.dims]
    elif call.name == "transpose":
        one, two = (positive(call[name], operand.ndim) for name in ("dim0", "dim1"))
        result_dims = [{one: two, two: one}.get(dim, dim) for dim in state.dims]
    elif call.name == "permute":
        order = [positive(dim, operand.ndim) for dim in call["dims"]]
        result_dims = [order.index(dim) for dim in state.dims]
    if len(result_dims) != 2 or not have_all_samples(result_dims, result, call.sizes):
        raise MixesError(NO_ROW)
    along = tuple(zip(state.dims, result_dims, strict=True))
    return OpSplit((joined(call, [along]),) * len(call.results), (along,))


def _sliced(call: Call) -> OpSplit:
    """All of it, or a part along another dimension."""
    operand: Operand = call["self"]
    state = operand.state
    assert isinstance(state, Pairs)
    if positive(call["dim"], operand.ndim) in state.dims and not (
        operand.shapes == call.results[0] and call["start"] in (None, 0) and call["step"] == 1
    ):
        raise MixesError("it takes some of the pairs alone")
    return OpSplit((state,), (tuple((dim, dim) for dim in state.dims),))


def _like(call: Call) -> OpSplit:
    if call.varies:
        raise MixesError(SIZED)
    state: State = call["self"].state
    assert isinstance(state, Pairs)
    return OpSplit((state,), (tuple((dim, dim) for dim in state.dims),))


def _of_parts(call: Call) -> OpSplit:
    """Parts of sums and means: again parts under linear operations only."""
    along = ((),) * len(call.operands)
    parts = [operand for operand in call.operands if isinstance(operand.state, Part)]
    others = [operand for operand in call.operands if not isinstance(operand.state, Part)]
    made = OpSplit((Part(),) * len(call.results), along)
    if any(operand.state != WHOLE for operand in others):
        raise MixesError(NO_SUM)
    if call.name in _LINEAR and (not others or call.name in ADDS):
        number = call["other"]
        if isinstance(number, int | float | Varying) and number != 0:
            raise MixesError(NO_SUM)
        return made
    scaled = call.name in ("mul", "div", "true_divide") and call["rounding_mode"] is None
    if scaled and len(parts) == 1 and parts[0] is (call["self"] if call.name != "mul" else parts[0]):
        return made
    raise MixesError(NO_SUM)


RULES: dict[str, Rule] = {
    **_ALONG,
    **dict.fromkeys(("t", "transpose", "permute", "view", "_unsafe_view", "reshape"), _moved),
    **dict.fromkeys(("unsqueeze", "squeeze", "expand"), _moved),
    "slice": _sliced,
    **dict.fromkeys(("zeros_like", "ones_like", "full_like"), _like),
}


MakingRule = Callable[[Call], OpSplit | None]  # None: it makes no pairs


def _product(**letters: str) -> MakingRule:
    """A product by the letters of its arguments' dimensions, `out` being the result's; of samples with
    samples where two letters are theirs.
    """
    out = letters.pop("out")
    names = {name.rstrip("_"): dims for name, dims in letters.items()}

    def rule(call: Call) -> OpSplit | None:
        if sum(state != WHOLE for state in call.states) < 2:
            return None
        along = tuple(
            _by_letters(value, names[name], out) if name in names else broadcast(value, len(out))
            for name, value in call.arguments.items()
            if isinstance(value, Operand)
        )
        state = joined(call, along)
        return OpSplit((state,), along) if isinstance(state, Pairs) else None

    return rule


def _by_letters(operand: Operand, letters: str, out: str) -> Along:
    """Which dimensions of a product `out` the samples of an operand lie along, by its dimensions' letters."""
    lettered = [(dim, letters[dim]) for dim in sample_dims(operand.state)]
    if any(letter not in out for _, letter in lettered):
        raise MixesError("it sums over the batch")
    return tuple((dim, out.index(letter)) for dim, letter in lettered)


def _sized(call: Call) -> OpSplit | None:
    """Entries for all pairs, by the batch's size: full and its like, eye, expanded numbers."""
    shapes = call.results[0]
    dims = growing(shapes)
    if len(dims) != 2:
        return None
    if not have_all_samples(dims, shapes, call.sizes):
        raise MixesError(NO_ROW)
    others = [value for name, value in call.arguments.items() if name not in ("size", "n", "m")]
    if any(isinstance(value, Varying) for value in others):
        raise MixesError(SIZED)
    along = tuple(broadcast(operand, len(shapes[0])) for operand in call.operands)
    return OpSplit((Pairs.of(*dims),), along)


MAKING: dict[str, MakingRule] = {
    "mm": _product(self="ij", mat2="jk", out="ik"),
    "bmm": _product(self="bij", mat2="bjk", out="bik"),
    "addmm": _product(mat1="ij", mat2="jk", out="ik"),
    "baddbmm": _product(batch1="bij", batch2="bjk", out="bik"),
    "outer": _product(self="i", vec2="j", out="ij"),
    **dict.fromkeys(("zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "eye", "expand"), _sized),
}
