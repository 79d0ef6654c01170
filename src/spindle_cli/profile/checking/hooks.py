"""Hooks on parameters' gradients, tried by numbers: they are called for each part of a gradient by itself.

Where a batch is split, or several ops use a parameter, its gradient is a sum of parts that different backward
passes and devices compute. Plain PyTorch calls the hooks once, for the sum; it is the same where a hook of a
sum gives the sum of what it gives for the parts (a mask of zeros and ones), and another model where it does
not (clipping, dividing by a norm).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.graph import TaskGraph

# Sizes of gradients: a hook may clip large ones, or leave out small ones.
_SCALES = (1e-8, 1.0, 1e6)
_TOLERANCE = 1e-4  # of the largest entry that it gives, for rounding in float32

_HINT = (
    "Clip by `clip_norm` or `clip_value` in the workload file, and set other steps for some parameters by "
    "`groups`; a hook that multiplies (a mask, say) is fine."
)


def try_hooks(task: TaskGraph) -> dict[str, str]:
    """Why hooks of trained parameters could not be tried, by the parameter's name.

    Raises:
        WorkloadError: one gives for a sum of gradients another than the sum of what it gives for each, or
            waits for the accumulated gradient.
    """
    untried: dict[str, str] = {}
    for name, parameter in task.root.named_parameters():
        if not parameter.requires_grad:
            continue
        hooks: Any = parameter
        if hooks._post_accumulate_grad_hooks:
            raise WorkloadError(
                f"task {task.task.name!r}: the parameter {name!r} has a hook that is called when its "
                "gradient is accumulated, and each device would call it for what it has of it",
                hint=_HINT,
            )
        if not hooks._backward_hooks:
            continue
        try:
            is_additive = _is_additive(hooks._backward_hooks, parameter)
        except Exception as error:  # the user's code, on parameters that may be on the meta device
            untried[name] = f"a hook on the gradient of {name!r} was not tried: {type(error).__name__}"
            continue
        if not is_additive:
            raise WorkloadError(
                f"task {task.task.name!r}: a hook on the gradient of the parameter {name!r} gives another "
                "result for a sum of gradients than the sum of its results, and devices call it for parts of "
                "the gradient",
                hint=_HINT,
            )
    return untried


def _is_additive(hooks: Mapping[int, Callable[..., Any]], parameter: nn.Parameter) -> bool:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    one, other = (torch.randn(parameter.shape, dtype=dtype, generator=generator) for _ in range(2))
    return all(_adds_up(hooks.values(), one * scale, other * scale) for scale in _SCALES)


def _adds_up(hooks: Iterable[Callable[..., Any]], one: Tensor, other: Tensor) -> bool:
    found = [_hooked(hooks, gradient) for gradient in (one + other, one, other)]
    largest = max((float(each.abs().max()) for each in found if each.numel()), default=0.0)
    return torch.allclose(found[0], found[1] + found[2], rtol=0.0, atol=_TOLERANCE * largest)


def _hooked(hooks: Iterable[Callable[..., Any]], gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    with torch.no_grad():
        for hook in hooks:
            found = hook(gradient)
            gradient = gradient if found is None else found
    return gradient
