"""Losses and distributions of torch's that look at values, as they are run on tensors that have none.

`gaussian_nll_loss` asks whether a variance is negative, `ctc_loss` reads the lengths, and torch.distributions
check what they are given; what shapes they give, and how they treat samples, is known all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch.nn.functional as functional
from torch import Tensor
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode

from spindle_cli.workload.fixed import marks


class Unread(TorchFunctionMode):
    """Inside, these losses read no value: they treat samples as they do, and give other numbers.

    What is fixed (fixed/marks.py) has its values. Distributions check none.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left = ExitStack()

    def __enter__(self) -> Self:
        self._left.enter_context(not_validated())
        super().__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._left.close()

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        run = _UNREAD.get(func) if callable(func) else None
        return marks.call(run or func, args, kwargs or {})


@contextmanager
def not_validated() -> Iterator[None]:
    """Let torch.distributions check neither parameters nor values, unless one is told to: they would raise,
    and do nothing else.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """The same, without a look at the variance's sign."""
    if not isinstance(var, Tensor):
        return functional.gaussian_nll_loss(input, target, var, full, eps, reduction)
    if var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    unlike = [own for size, own in zip(input.shape, var.shape, strict=True) if size != own]
    if unlike not in ([], [1]):
        raise ValueError("var is of incorrect size")
    variance = var.clamp(min=eps)
    each = 0.5 * (variance.log() + (input - target) ** 2 / variance)
    if full:
        each = each + 0.5 * math.log(2 * math.pi)
    return _reduced(each, reduction)


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """One value for each sample, of its own row of each argument; as torch has it where targets are joined
    or lengths are no tensors.
    """
    lengths = (input_lengths, target_lengths)
    if log_probs.dim() != 3 or targets.dim() != 2 or not all(_is_row(length) for length in lengths):
        return functional.ctc_loss(
            log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity
        )
    rows = targets.sum(1) + input_lengths + target_lengths
    return _reduced(log_probs.sum((0, 2)) + rows.to(log_probs.dtype), reduction)


def _is_row(lengths: Any) -> bool:
    return isinstance(lengths, Tensor) and lengths.dim() == 1


def _reduced(each: Tensor, reduction: str) -> Tensor:
    if reduction == "mean":
        return each.mean()
    return each.sum() if reduction == "sum" else each


_UNREAD: Mapping[Any, Callable[..., Tensor]] = {
    functional.gaussian_nll_loss: _gaussian_nll_loss,
    functional.ctc_loss: _ctc_loss,
}
