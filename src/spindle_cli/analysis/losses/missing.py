"""Which entries of a value are missing (NaN) because the batch's fields say so: what `nanmean` leaves out.

The model's own values are taken to be numbers. Where one is not, the loss that comes of it is NaN, which ends
the run, while plain PyTorch would leave that entry out as well.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import fx

from spindle_cli.analysis.losses.counts import Counts
from spindle_cli.analysis.losses.expressions import Call, Copy, Expression
from spindle_cli.analysis.losses.forms import NotKnownError
from spindle_cli.analysis.losses.operations import (
    ADDITIONS,
    MEANS,
    NUMBERS_OF,
    PRODUCTS,
    QUOTIENTS,
    SUMS,
)
from spindle_cli.analysis.tracing.shapes import Shapes

NANMEANS = {"nanmean", torch.nanmean}
_NEVER_MISSING = NUMBERS_OF | {"nan_to_num", torch.nan_to_num}
_CHOICES = {"where", torch.where}
_FILLS = {"masked_fill", torch.masked_fill}
# What gives NaN for an entry where one of its inputs is NaN.
_ENTRY_BY_ENTRY = (
    ADDITIONS
    | PRODUCTS
    | QUOTIENTS
    | {operator.neg, torch.neg, torch.abs, torch.square, torch.exp, torch.log, torch.log1p, torch.sigmoid}
    | {"neg", "abs", "square", "exp", "log", "log1p", "sigmoid", "float", "double", "contiguous", "clone"}
    | {functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss}
)


@dataclass(frozen=True, eq=False)
class Absence:
    """Where a value's entries are missing. `expression`: over the fields, True where one is, of a shape that
    can be expanded to the value's; `by_sample`: it has the samples.
    """

    expression: Expression
    by_sample: bool


class Missing:
    """What is missing in the values of one loss; `counts`: of the loss, which know what fields tell."""

    def __init__(self, shapes: Shapes, counts: Counts) -> None:
        self._shapes = shapes
        self._counts = counts
        self._known: dict[fx.Node, Absence | None] = {}

    def everywhere(self, node: fx.Node) -> Expression | None:
        """Where a tensor with samples lacks entries, of its own shape; None: nowhere.

        Raises:
            NotKnownError: nothing is known of what becomes of missing entries on the way to it, or it lacks
                the same for all samples.
        """
        absence = self._in_value(node)
        return None if absence is None else self._expanded(absence, node)

    def _expanded(self, missing: Absence, node: fx.Node) -> Expression:
        dim = self._shapes.batch_dim(node).dim
        if dim is None or not missing.by_sample:
            raise NotKnownError(f"{node.name!r} lacks the same entries for all samples", node)
        shape = list(self._shapes.values[node].shape)
        shape[dim] = -1
        return Call("expand", (missing.expression, tuple(shape)))

    def _in_value(self, node: fx.Node) -> Absence | None:
        if node not in self._known:
            self._known[node] = self._find(node)
        return self._known[node]

    def _find(self, node: fx.Node) -> Absence | None:
        if not self._shapes.is_tensor(node):
            return None
        if self._counts.is_of_fields(Copy(node)):
            is_real = self._shapes.values[node].is_floating_point()
            return Absence(Call(torch.isnan, (Copy(node),)), self._has_samples(node)) if is_real else None
        if self._counts.is_operator(node) or node.target in _NEVER_MISSING:
            return None
        if node.target in _CHOICES and len(node.args) == 3 and isinstance(node.args[0], fx.Node):
            return self._in_choice(node, *node.args)
        if node.target in _FILLS and len(node.args) == 3 and isinstance(node.args[1], fx.Node):
            source, mask, value = node.args
            return self._in_choice(node, mask, value, source)
        absences = [item for item in map(self._in_value, node.all_input_nodes) if item is not None]
        if not absences or node.target in _ENTRY_BY_ENTRY:
            return _any_of(absences)
        if node.target in MEANS | SUMS and len(node.all_input_nodes) == 1 and self._has_samples(node):
            rows = self._expanded(absences[0], node.all_input_nodes[0])
            return Absence(Call(missing_in_sum, (rows, *node.args[1:]), dict(node.kwargs)), True)
        raise NotKnownError(f"{node.name!r} may be made of entries that are missing", node)

    def _has_samples(self, node: fx.Node) -> bool:
        return self._shapes.batch_dim(node).dim is not None

    def _in_choice(self, node: fx.Node, condition: Any, if_true: Any, if_false: Any) -> Absence | None:
        """Find what may be missing in torch.where(condition, if_true, if_false)."""
        chosen = [self._in_item(if_true), self._in_item(if_false)]
        if chosen == [False, False]:
            return None
        if not self._counts.is_of_fields(Copy(condition)):
            raise NotKnownError(f"{node.name!r} leaves out what the model itself selects", node)
        by_sample = self._has_samples(condition) or any(getattr(item, "by_sample", False) for item in chosen)
        parts = [item.expression if isinstance(item, Absence) else item for item in chosen]
        return Absence(Call(torch.where, (Copy(condition), *parts)), by_sample)

    def _in_item(self, item: Any) -> Absence | bool:
        if isinstance(item, fx.Node):
            return self._in_value(item) or False
        return isinstance(item, float) and math.isnan(item)


def _any_of(absences: list[Absence]) -> Absence | None:
    if not absences:
        return None
    joined = absences[0].expression
    for absence in absences[1:]:
        joined = Call(torch.logical_or, (joined, absence.expression))
    return Absence(joined, any(absence.by_sample for absence in absences))


def sum_present(value: torch.Tensor, missing: torch.Tensor) -> torch.Tensor:
    """The sum of the entries that are not missing; NaN where others than the missing ones are NaN."""
    total = value.masked_fill(missing, 0).sum()
    agrees = (value.isnan() == missing).all()
    return torch.where(agrees, total, math.nan)


def count_present(missing: torch.Tensor) -> torch.Tensor:
    """How many entries are not missing."""
    return (~missing).sum()


def missing_in_sum(missing: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Where a sum or mean of entries of which some are missing is missing, too; its arguments."""
    return torch.sum(missing, *args, **kwargs) > 0
