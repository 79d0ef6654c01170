"""Forms of torch's loss functions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, fx

from spindle_cli.analysis.losses.counts import Counts, LossCall, Over
from spindle_cli.analysis.losses.expressions import (
    Call,
    Expression,
    Form,
    Kind,
    NotKnownError,
    Share,
    count_targets,
    over_count,
)
from spindle_cli.analysis.tracing.shapes import Shapes

# What gives labels that are never negative, so that ignore_index=-100 ignores none of them.
_GIVES_INDICES = {
    "argmax",
    "argmin",
    torch.argmax,
    torch.argmin,
    torch.arange,
    "multinomial",
    torch.multinomial,
}


def form_of_loss(
    loss: LossCall, node: fx.Node, form_of: Callable[[Any], Form], shapes: Shapes, counts: Counts
) -> Form:
    """The form of a call of one of torch's losses.

    Args:
        node: the call.
        form_of: gives the forms of its arguments.

    Raises:
        NotKnownError: it is not known to be a sum or mean over what counts.
    """
    return _OneLoss(loss, node, form_of, shapes, counts).form()


class _OneLoss:
    def __init__(
        self, loss: LossCall, node: fx.Node, form_of: Callable[[Any], Form], shapes: Shapes, counts: Counts
    ) -> None:
        self._loss = loss
        self._node = node
        self._shapes = shapes
        self._counts = counts
        self._forms = {name: self._input(form_of(item)) for name, item in loss.arguments.items()}

    def form(self) -> Form:
        reduction = self._loss.reduction
        if all(form.kind is Kind.EQUAL for form in self._forms.values()):
            return Form(Kind.EQUAL, 0, self._call(reduction))
        self._require_rows()
        if reduction == "sum":
            return Form(Kind.PART, 1, self._call("sum"))
        if reduction == "batchmean" and self._loss.function is functional.kl_div:
            if self._dim("input") != 0:
                return Form(Kind.PART, 1, self._call(reduction))
            return Form(Kind.PART, 0, Call(operator.mul, (self._call(reduction), Share())))
        if reduction != "mean":
            raise self._unknown(f"is not reduced to a number (reduction={reduction!r})")
        count = self._count()
        if count is None:
            return Form(Kind.PART, 0, Call(operator.mul, (self._call("mean"), Share())))
        total = self._counts.add(Form(Kind.PART, 1, count), self._node)
        return Form(Kind.PART, 0, Call(over_count, (self._call("sum"), total.expression)))

    def _input(self, form: Form) -> Form:
        if form.kind is Kind.PART:
            raise self._unknown("is taken of what is made of all samples")
        if form.degree != 0:
            raise self._unknown("is taken of what grows with the batch")
        return form

    def _unknown(self, what: str) -> NotKnownError:
        return NotKnownError(f"{self._loss.name} {what}", self._node)

    def _call(self, reduction: str) -> Expression:
        arguments = {name: form.expression for name, form in self._forms.items()}
        return Call(self._loss.function, (), {**arguments, "reduction": reduction})

    def _require_rows(self) -> None:
        """Raise unless the samples lie where the function has them, at the same place in all tensors."""
        arguments = self._loss.arguments
        dims = {name: dim for name in arguments if (dim := self._dim(name)) is not None}
        match self._loss.over:
            case Over.ELEMENTS:
                fits = len({self._from_right(name) for name in dims}) == 1
            case Over.SAMPLES:
                fits = set(dims.values()) == {0} and _ndim(self._shapes, next(iter(arguments.values()))) >= 2
            case Over.SEQUENCES:
                fits = dims == {"log_probs": 1, "targets": 0, "input_lengths": 0, "target_lengths": 0}
            case Over.TARGETS:
                fits = self._targets_fit()
        rows = {self._shapes.batch_dim(arguments[name]).rows for name in dims}
        if not fits or len(rows) != 1:
            raise self._unknown("has the samples of its arguments at different places")

    def _targets_fit(self) -> bool:
        given, target = self._loss.arguments["input"], self._loss.arguments["target"]
        if _ndim(self._shapes, given) < 2 or self._dim("weight") is not None:
            return False
        dim, wanted = self._dim("input"), self._dim("target")
        if _ndim(self._shapes, target) == _ndim(self._shapes, given):  # probabilities of classes
            return dim != 1 and dim == wanted
        return dim == wanted == 0 or (dim is not None and dim >= 2 and wanted == dim - 1)

    def _from_right(self, name: str) -> int:
        """Where an argument has the samples, counted from the last dimension when all are broadcast."""
        node, dim = self._loss.arguments[name], self._dim(name)
        assert dim is not None
        ndim = _ndim(self._shapes, node)
        if name == "var" and ndim == _ndim(self._shapes, self._loss.arguments["input"]) - 1:
            ndim += 1  # one variance for each row
        return dim - ndim

    def _dim(self, name: str) -> int | None:
        """The dimension along which an argument has the samples; None: it has none."""
        node = self._loss.arguments.get(name)
        if not isinstance(node, fx.Node) or not self._shapes.is_tensor(node):
            return None
        return self._shapes.batch_dim(node).dim

    def _count(self) -> Expression | None:
        """What a mean is divided by; None: by the number of elements, the same for each sample."""
        by_weight = self._loss.function in (functional.mse_loss, functional.l1_loss)
        if by_weight and self._loss.arguments.get("weight") is not None:
            return Call(torch.sum, (self._forms["weight"].expression,))
        if self._loss.over is not Over.TARGETS:
            return None
        target, ignored = self._loss.arguments["target"], self._loss.arguments["ignore_index"]
        if self._shapes.values[target].is_floating_point():
            return None
        weight = self._forms["weight"].expression
        indices = isinstance(target, fx.Node) and target.target in _GIVES_INDICES
        if weight is None and indices and isinstance(ignored, int) and ignored < 0:
            return None
        return Call(count_targets, (self._forms["target"].expression, ignored, weight))


def _ndim(shapes: Shapes, node: Any) -> int:
    value = shapes.values[node] if isinstance(node, fx.Node) else None
    return value.dim() if isinstance(value, Tensor) else 0
