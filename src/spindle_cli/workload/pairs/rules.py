"""How each of torch's operators treats pairs of samples, and what is made of them.

Beside the rules for samples one by one (`rules/table.py`): a product of every sample with every other, what
acts on its entries one by one, what works along its rows or its columns, and sums and means over all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from spindle_cli.workload.pairs import along, making
from spindle_cli.workload.pairs.judged import (
    NO_ROW,
    NO_SUM,
    SIZED,
    Judged,
    broadcast,
    growing,
    have_all_samples,
    joined,
)
from spindle_cli.workload.rules.states import WHOLE, Mixed, MixesError, Pairs, Part, Reduced, State
from spindle_cli.workload.rules.table import POINTWISE, states_of
from spindle_cli.workload.rules.tape import Call, Operand, Varying
from spindle_cli.workload.rules.views import positive

Rule = Callable[[Call], Judged]
_RANDOM = "it draws random numbers"
_UNKNOWN = "nothing is known of how {name} treats pairs of samples"


def judge(call: Call) -> Judged:
    """What an operator makes of samples, pairs of them, and sums over them.

    Raises:
        MixesError: it cannot be run by shares, or nothing is known of it.
    """
    states = [operand.state for operand in call.operands]
    mixed = next((state for state in states if isinstance(state, Mixed)), None)
    if mixed is not None:
        return Judged((mixed,) * len(call.results))
    if torch.Tag.nondeterministic_seeded in call.func.tags:
        raise MixesError(_RANDOM)
    if any(isinstance(state, Part) for state in states):
        return _of_parts(call)
    if all(state == WHOLE for state in states) and not call.varies:
        return Judged((WHOLE,) * len(call.results))
    if call.name in POINTWISE or torch.Tag.pointwise in call.func.tags:
        return _pointwise(call)
    if any(isinstance(state, Pairs) for state in states):
        rule = RULES.get(call.name)
        if rule is None:
            raise MixesError(_UNKNOWN.format(name=call.name))
        return rule(call)
    makes = making.RULES.get(call.name)
    made = None if makes is None else makes(call)
    return made or _of_samples(call)


def _of_samples(call: Call) -> Judged:
    """By the rules for samples one by one; their sums and means are parts of those of the batch."""
    states = states_of(call)
    reduced = [state for state in states if isinstance(state, Reduced)]
    if not reduced:
        return Judged(tuple(states))
    if any(state.counted for state in reduced):
        raise MixesError("it is a mean over the labels that count")
    degrees = {state.degree for state in reduced}
    if degrees not in ({0}, {1}):
        raise MixesError(NO_SUM)
    parts = tuple(Part() if isinstance(state, Reduced) else state for state in states)
    return Judged(parts, is_mean=degrees == {0})


def _pointwise(call: Call) -> Judged:
    """Entries one by one, all tensors broadcast against each other."""
    if not any(isinstance(operand.state, Pairs) for operand in call.operands):
        with suppress(MixesError):
            return _of_samples(call)
    ndim = len(call.results[0][0])
    along = tuple(broadcast(operand, ndim) for operand in call.operands)
    state = joined(call, along)
    return Judged((state,) * len(call.results), along)


def _moved(call: Call) -> Judged:
    """Views that keep the dimensions of samples, in their order or not."""
    operand: Operand = call["self"]
    state = operand.state
    assert isinstance(state, Pairs)
    result = call.results[0]
    found = growing(result)
    if call.name == "t":
        found = [1 - dim for dim in state.dims]
    elif call.name == "transpose":
        one, two = (positive(call[name], operand.ndim) for name in ("dim0", "dim1"))
        found = [{one: two, two: one}.get(dim, dim) for dim in state.dims]
    elif call.name == "permute":
        order = [positive(dim, operand.ndim) for dim in call["dims"]]
        found = [order.index(dim) for dim in state.dims]
    if len(found) != 2 or not have_all_samples(found, result, call.sizes):
        raise MixesError(NO_ROW)
    along = tuple(zip(state.dims, found, strict=True))
    return Judged((joined(call, [along]),) * len(call.results), (along,))


def _sliced(call: Call) -> Judged:
    """All of it, or a part along another dimension."""
    operand: Operand = call["self"]
    state = operand.state
    assert isinstance(state, Pairs)
    if positive(call["dim"], operand.ndim) in state.dims and not (
        operand.shapes == call.results[0] and call["start"] in (None, 0) and call["step"] == 1
    ):
        raise MixesError("it takes some of the pairs alone")
    return Judged((state,), (tuple((dim, dim) for dim in state.dims),))


def _like(call: Call) -> Judged:
    if call.varies:
        raise MixesError(SIZED)
    state: State = call["self"].state
    assert isinstance(state, Pairs)
    return Judged((state,), (tuple((dim, dim) for dim in state.dims),))


def _of_parts(call: Call) -> Judged:
    """Parts of sums and means: again parts under linear operations only."""
    along = ((),) * len(call.operands)
    parts = [operand for operand in call.operands if isinstance(operand.state, Part)]
    others = [operand for operand in call.operands if not isinstance(operand.state, Part)]
    made = Judged((Part(),) * len(call.results), along)
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


ADDS = frozenset({"add", "sub", "rsub"})
_LINEAR = frozenset(
    {"neg", "clone", "detach", "alias", "_to_copy", "view", "_unsafe_view", "reshape", "squeeze", "sum"}
    | {"unsqueeze", "expand", "t", "permute", "transpose", "select", "slice", "mean", "add", "sub", "rsub"}
    | {"stack", "cat"}
)
RULES: dict[str, Rule] = {
    **along.RULES,
    **dict.fromkeys(("t", "transpose", "permute", "view", "_unsafe_view", "reshape"), _moved),
    **dict.fromkeys(("unsqueeze", "squeeze", "expand"), _moved),
    "slice": _sliced,
    **dict.fromkeys(("zeros_like", "ones_like", "full_like"), _like),
}
