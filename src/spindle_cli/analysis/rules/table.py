"""How each operator of torch treats samples: a rule for every one that is known to act on them one by one.

A rule takes a `Call` and gives the states of its results, or raises `MixesError`. What has no rule is not
known, and counts as mixing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from spindle_cli.analysis.rules import make, maps, pick, reduce, transforms, views
from spindle_cli.analysis.rules.tape import Call
from spindle_cli.analysis.rules.types import WHOLE, Batch, Mixed, MixesError, Reduced, State
from spindle_cli.analysis.rules.views import broadcast

Rule = Callable[[Call], list[State]]

_RULES: dict[str, Rule] = {
    **views.RULES,
    **maps.RULES,
    **pick.RULES,
    **reduce.RULES,
    **make.RULES,
    **transforms.RULES,
}
# Copies, and what else acts on single entries without being tagged so.
_POINTWISE = frozenset(
    {"clone", "copy_", "detach", "detach_", "alias", "_to_copy", "lift_fresh", "fill_", "zero_", "contiguous"}
    | {"masked_fill", "masked_fill_", "where", "isin", "polar", "complex", "angle", "_conj", "_neg_view"}
    | {"resolve_conj", "resolve_neg", "_conj_physical", "fake_quantize_per_tensor_affine", "rrelu_with_noise"}
    | {"hardswish", "hardswish_", "_prelu_kernel", "normal", "poisson", "binomial", "_standard_gamma"}
    | {"floor_divide", "floor_divide_", "abs_", "copysign_", "eq_", "ne_", "ge_", "gt_", "le_", "lt_", "rsub"}
    | {"gcd_", "lcm_", "gelu_", "mish_", "heaviside_", "threshold_", "xlogy_", "__irshift__"}
    | {"rrelu_with_noise_", "rrelu_with_noise_functional"}
    # Tagged from torch 2.12 or 2.13 on.
    | {"leaky_relu", "leaky_relu_", "celu_", "elu_", "selu_", "hardsigmoid_", "hardtanh_"}
    # Of gradients that forward itself asks for (forces); those of sigmoid, tanh, relu and gelu are tagged.
    | {"softplus_backward", "elu_backward", "leaky_relu_backward", "hardtanh_backward", "hardswish_backward"}
    | {"hardsigmoid_backward", "softshrink_backward", "hardshrink_backward", "_prelu_kernel_backward"}
    | {"rrelu_with_noise_backward"}
)
# A sample's own number survives what only moves it.
_KEEPS_NUMBERS = frozenset({"clone", "detach", "alias", "_to_copy", "lift_fresh"}) | views.MOVES


def states_of(call: Call) -> list[State]:
    """The state of each tensor that an operator gives.

    Raises:
        MixesError: it does not act on samples one by one, or nothing is known of it.
    """
    if call.name in pick.BY_ROW and (within := pick.within_samples(call)) is not None:
        return [within]
    mixed = next((state for state in call.states if isinstance(state, Mixed)), None)
    if mixed is not None:
        return [mixed] * len(call.results)
    if call.is_whole:
        return [WHOLE] * len(call.results)
    if call.has(Reduced):
        return reduce.linear(call)
    numbered = any(isinstance(state, Batch) and state.numbered for state in call.states)
    if numbered and call.name not in _KEEPS_NUMBERS | pick.BY_NUMBER:
        raise MixesError("it computes with the numbers of samples in the batch")
    rule = _RULES.get(call.name)
    if rule is not None:
        return rule(call)
    if is_pointwise(call):
        return _pointwise(call)
    raise MixesError(f"nothing is known of how {call.name} treats samples")


def is_pointwise(call: Call) -> bool:
    """Whether an operator acts on single entries, all tensors broadcast against each other."""
    return call.name in _POINTWISE or torch.Tag.pointwise in call.func.tags


def _pointwise(call: Call) -> list[State]:
    if call.varies:
        raise MixesError("it computes with the size of the batch")
    return [broadcast(call, shapes) for shapes in call.results]
