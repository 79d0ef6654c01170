"""Rules of operators that work along some dimensions: sums, means, softmax, sorts; and what follows a sum or
mean over the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from spindle_cli.analysis.rules.tape import Call, Operand, Varying
from spindle_cli.analysis.rules.types import WHOLE, Batch, MixesError, Reduced, State
from spindle_cli.analysis.rules.views import aligned, joined, positive

Rule = Callable[[Call], list[State]]
_OVER = "it works over the batch"
_WITH_STATISTIC = "it computes with a sum or mean over the batch"
# torch's numbers for reduction="none", "mean" and "sum"
_NONE, _MEAN, _SUM = 0, 1, 2


def _dims(call: Call, operand: Operand) -> list[int]:
    """The dimensions that it works along; all of them where none is named."""
    given = call["dim"]
    if given is None or given == []:
        return list(range(operand.ndim))
    return [positive(dim, operand.ndim) for dim in (given if isinstance(given, list) else [given])]


def _along(call: Call) -> list[State]:
    """Softmax, cumulative sums, sorts: along a dimension, which stays."""
    operand: Operand = call["self"]
    state = operand.state
    if not isinstance(state, Batch) or call.varies or state.dim in _dims(call, operand):
        raise MixesError(_OVER)
    return [state] * len(call.results)


def _along_backward(call: Call) -> list[State]:
    """The state of softmax's backward pass: the gradient and what softmax gave lie alike."""
    operand: Operand = call["output"]
    state = joined([operand.state, call["grad_output"].state])
    if not isinstance(state, Batch) or call.varies or state.dim in _dims(call, operand):
        raise MixesError(_OVER)
    return [state]


def _reduction(linear: int | None = None) -> Rule:
    """A reduction; over the batch it is a sum (`linear` 1) or mean (0) over samples, or else mixes them."""

    def rule(call: Call) -> list[State]:
        operand: Operand = call["self"] if call["self"] is not None else call["input"]
        state = operand.state
        if not isinstance(state, Batch) or call.varies:
            raise MixesError(_OVER)
        dims = _dims(call, operand)
        if state.dim in dims:
            if linear is None or operand.dtype is torch.bool:
                raise MixesError(_OVER)
            return [Reduced(linear)] * len(call.results)
        if not call["keepdim"]:
            state = replace(state, dim=state.dim - sum(dim < state.dim for dim in dims))
        return [state] * len(call.results)

    return rule


def _loss(call: Call) -> list[State]:
    """Losses of entries that are lined up: mse_loss and its like."""
    first: Operand = call["self"]
    second = call["target"]
    if call.varies or second.shapes != first.shapes:
        raise MixesError("it compares tensors of different shapes")
    weights = [call[name] for name in ("weight", "pos_weight") if isinstance(call[name], Operand)]
    if any(weight.ndim > first.ndim for weight in weights):
        raise MixesError("it compares tensors of different shapes")
    state = joined([first.state, second.state, *[aligned(weight, first.ndim) for weight in weights]])
    return [_by_reduction(call, state)]


def _by_reduction(call: Call, state: State) -> State:
    if call["reduction"] == _NONE or not isinstance(state, Batch):
        return state
    return Reduced(0 if call["reduction"] == _MEAN else 1)


def _row_loss(call: Call) -> list[State]:
    """Losses of rows of (N, classes), N being the batch's: margin losses."""
    state = joined([call["self"].state, call["target"].state])
    if not isinstance(state, Batch) or state.dim != 0 or call.varies or isinstance(call["weight"], Operand):
        raise MixesError(_OVER)
    if call["self"].ndim != 2 and call["reduction"] == _NONE:
        raise MixesError(_OVER)
    return [_by_reduction(call, state)] * len(call.results)


_IGNORED_BY_DEFAULT = -100


def _nll(call: Call) -> list[State]:
    """nll_loss_forward: of (N, classes) or (N, classes, ...); its second result is what the labels count."""
    state = joined([call["self"].state, call["target"].state])
    whole_weight = call["weight"] is None or call["weight"].state == WHOLE
    if not isinstance(state, Batch) or state.dim == 1 or not whole_weight or call.varies:
        raise MixesError(_OVER)
    if call["self"].ndim == 1:
        raise MixesError(_OVER)
    if call["reduction"] == _NONE:
        return [state, WHOLE]
    if call["reduction"] == _SUM:
        return [Reduced(1), Reduced(1)]
    if call["weight"] is not None or call["ignore_index"] != _IGNORED_BY_DEFAULT:
        raise MixesError(
            "a mean over labels that count, by class weights or ignore_index, inside an operator"
        )
    return [Reduced(0, counted=True), Reduced(1)]


def linear(call: Call) -> list[State]:
    """What comes of sums and means over the batch: again one of them under linear operations only.

    Raises:
        MixesError: it is none.
    """
    if call.name in ("ones_like", "zeros_like", "full_like") and not call.varies:
        return [WHOLE]  # of a sum's shape, which its gradient begins with, and none of its values
    if call.name in _SAME_VALUES:
        return [call.operands[0].state] * len(call.results)
    if call.name in ("sum", "mean") and not call.varies:
        return [call.operands[0].state]
    if call.name in ("add", "sub", "rsub", "stack", "cat", "add_", "sub_"):
        return [_equal(call)]
    if call.name in ("mul", "div", "mul_", "div_", "true_divide"):
        return [_scaled(call)]
    raise MixesError(_WITH_STATISTIC)


def _equal(call: Call) -> State:
    """Sum of values that grow alike with the batch; a constant is a mean of itself."""
    numbers = [value for name, value in call.arguments.items() if name in ("other", "alpha")]
    degrees = {o.state.degree if isinstance(o.state, Reduced) else _constant(o) for o in call.operands}
    counted = any(isinstance(o.state, Reduced) and o.state.counted for o in call.operands)
    if any(isinstance(number, Varying) for number in numbers) or len(degrees) > 1:
        raise MixesError(_WITH_STATISTIC)
    degree = degrees.pop()
    addend = call["other"]
    if degree and isinstance(addend, int | float) and addend != 0:
        raise MixesError(_WITH_STATISTIC)
    return Reduced(degree, counted)


def _constant(operand: Operand) -> int:
    if operand.state != WHOLE:
        raise MixesError(_WITH_STATISTIC)
    return 0


def _scaled(call: Call) -> State:
    left, right = call["self"], call["other"]
    over = call.name.startswith(("div", "true"))
    if call["rounding_mode"] is not None:
        raise MixesError(_WITH_STATISTIC)
    if isinstance(left, Operand) and left.state == WHOLE and not over:
        left, right = right, left
    if not isinstance(left, Operand) or not isinstance(left.state, Reduced):
        raise MixesError(_WITH_STATISTIC)
    if isinstance(right, Varying):
        growth = right.growth(call.sizes)
        if growth is None:
            raise MixesError("it computes with the size of the batch")
        return replace(left.state, degree=left.state.degree + (-growth if over else growth))
    if isinstance(right, Operand) and right.state != WHOLE:
        raise MixesError(_WITH_STATISTIC)
    return left.state


_SAME_VALUES = frozenset(
    {"neg", "clone", "detach", "alias", "_to_copy", "view", "_unsafe_view", "reshape", "squeeze"}
    | {"unsqueeze", "expand", "t", "permute", "transpose", "select", "slice"}
)
_ALONG = (
    "_softmax",
    "_log_softmax",
    "_safe_softmax",
    "cumsum",
    "cumsum_",
    "cumprod",
    "cumprod_",
    "logcumsumexp",
    "cummax",
    "cummin",
)
_REDUCTIONS = frozenset(
    {"amax", "amin", "max", "min", "prod", "logsumexp", "linalg_vector_norm", "norm", "any", "all", "argmax"}
    | {"argmin", "median", "nanmedian", "mode", "count_nonzero", "nansum", "var", "std", "var_mean"}
    | {"std_mean", "aminmax", "kthvalue"}
)
RULES: dict[str, Rule] = {
    **dict.fromkeys((*_ALONG, "logcumsumexp", "sort", "topk", "argsort", "glu"), _along),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _along_backward),
    **dict.fromkeys(_REDUCTIONS, _reduction()),
    "sum": _reduction(1),
    "mean": _reduction(0),
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"), _loss),
    **dict.fromkeys(("binary_cross_entropy_with_logits", "soft_margin_loss", "l1_loss"), _loss),
    **dict.fromkeys(("multi_margin_loss", "multilabel_margin_loss_forward"), _row_loss),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward", "nll_loss_nd"), _nll),
}
