"""Whether a loss may be computed share by share: is it a mean, or a sum, over the batch's samples?

A loss op that is split over the batch is right only if the loss of the whole batch is the mean (or the sum)
of the shares' losses. That is so if, after the batch dimension is gone, only linear operations follow. The
*degree* of a value says how it grows with the batch: 0 for a mean, 1 for a sum, and it adds up under products
with sizes of the batch. None means: not linear, so the loss can only be computed for the whole batch.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as functional
from torch import fx, nn

from spindle_cli.workload.tracing.shapes import Shapes, growth

Degree = int | None

_LOSS_FUNCTIONS = {
    functional.cross_entropy,
    functional.nll_loss,
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.kl_div,
    functional.cosine_embedding_loss,
    functional.margin_ranking_loss,
    functional.hinge_embedding_loss,
    functional.soft_margin_loss,
    functional.multilabel_soft_margin_loss,
    functional.multi_margin_loss,
    functional.triplet_margin_loss,
    functional.poisson_nll_loss,
    functional.gaussian_nll_loss,
}
_MEANS = {"mean", torch.mean}
_SUMS = {"sum", torch.sum}
_SAME = {"to", "float", "double", "contiguous", "clone", "squeeze", "unsqueeze", "view", "reshape", "neg"}
_SAME_FUNCTIONS = {operator.neg, operator.getitem, torch.neg, torch.squeeze, torch.unsqueeze, torch.reshape}
_ADDITIONS = {operator.add, operator.sub, torch.add, torch.sub, "add", "sub"}
_PRODUCTS = {operator.mul, torch.mul, "mul"}
_QUOTIENTS = {operator.truediv, torch.div, torch.true_divide, "div"}
_JOINS = {torch.stack, torch.cat}
# Arithmetic in which a number scales a tensor, unlike sizes given to a reshape.
ARITHMETIC = _ADDITIONS | _PRODUCTS | _QUOTIENTS | {operator.pow, torch.pow, "pow"}


class Degrees:
    """Degrees of the values that mix samples inside one loss op.

    Args:
        shapes: of the task's trace.
        root: for the loss modules it calls.
        mixed: nodes whose value is not one per sample.
        reordering: of those, the ones whose rows depend on other samples' in a way that nothing is known of.
        of_operators: degree to assume for an operator's own loss: what the task says its loss is.
    """

    def __init__(
        self,
        shapes: Shapes,
        root: nn.Module,
        mixed: set[fx.Node],
        reordering: set[fx.Node],
        of_operators: int,
    ) -> None:
        self._shapes = shapes
        self._root = root
        self._mixed = mixed
        self._reordering = reordering
        self._of_operators = of_operators
        self._known: dict[fx.Node, Degree] = {}

    def of(self, value: Any) -> Degree:
        """Degree of a node's value, or of a constant (0)."""
        if not isinstance(value, fx.Node):
            return 0
        if value not in self._known:
            self._known[value] = self._find(value)
        return self._known[value]

    def _find(self, node: fx.Node) -> Degree:
        if not self._shapes.is_tensor(node) and not self._shapes.holds_tensors(node):
            return growth(self._shapes.values[node], self._shapes.doubled[node])
        if node not in self._mixed:
            return 0
        if node in self._reordering:
            return None
        if node.op == "call_module":
            return self._of_module(node)
        inputs = [source for source in node.all_input_nodes if source in self._mixed]
        if any(self.of(source) is None for source in inputs):
            return None
        # a statistic of the batch that goes back into each sample
        if self._has_batch(node) and any(self._is_statistic(source) for source in inputs):
            return None
        return self._of_call(node)

    def _has_batch(self, node: fx.Node) -> bool:
        return self._shapes.is_tensor(node) and self._shapes.batch_dim(node).dim is not None

    def _is_statistic(self, node: fx.Node) -> bool:
        return self._shapes.is_tensor(node) and not self._has_batch(node)

    def _of_module(self, node: fx.Node) -> Degree:
        module = self._root.get_submodule(str(node.target))
        if not isinstance(module, nn.modules.loss._Loss) or not type(module).__module__.startswith(
            "torch.nn"
        ):
            return self._of_operators
        if any(source in self._mixed for source in node.all_input_nodes):
            return None
        weighted = (
            getattr(module, "weight", None) is not None or getattr(module, "ignore_index", -100) != -100
        )
        return None if weighted else _of_reduction(module.reduction)

    def _of_call(self, node: fx.Node) -> Degree:
        target: Any = node.target
        tensors = [source for source in node.all_input_nodes if self._shapes.is_tensor(source)]
        if target in _LOSS_FUNCTIONS:
            return self._of_loss_function(node)
        if target in _MEANS | _SUMS and len(node.all_input_nodes) == 1:
            degree = self.of(tensors[0]) if tensors else 0
            reduces_batch = self._has_batch(tensors[0]) and not self._has_batch(node)
            return degree if degree is None else degree + int(target in _SUMS and reduces_batch)
        if target in _SAME or target in _SAME_FUNCTIONS:
            return self._of_same(node)
        if target in _ADDITIONS and not node.kwargs:
            return self._equal(
                [item for item in node.args if not (isinstance(item, int | float) and item == 0)]
            )
        if target in _JOINS:
            return self._equal(list(node.args[0])) if isinstance(node.args[0], list | tuple) else None
        if target in _PRODUCTS | _QUOTIENTS and not node.kwargs and len(node.args) == 2:
            return self._of_product(node)
        return None

    def _of_same(self, node: fx.Node) -> Degree:
        """Of an operation that changes no value; picking rows out of the batch is not one."""
        source = node.args[0]
        if not isinstance(source, fx.Node) or (self._has_batch(source) and not self._has_batch(node)):
            return None
        return self.of(source)

    def _of_loss_function(self, node: fx.Node) -> Degree:
        given = node.kwargs
        weighted = given.get("weight") is not None or given.get("pos_weight") is not None
        if (
            weighted
            or given.get("ignore_index", -100) != -100
            or len(node.args) > 2
            or any(source in self._mixed for source in node.all_input_nodes)
        ):
            return None
        return _of_reduction(node.kwargs.get("reduction", "mean"))

    def _equal(self, items: list[Any]) -> Degree:
        degrees = {self.of(item) for item in items}
        return degrees.pop() if len(degrees) == 1 else None

    def _of_product(self, node: fx.Node) -> Degree:
        left, right = (self.of(item) for item in node.args)
        mixed = [item in self._mixed for item in node.args]
        is_quotient = node.target in _QUOTIENTS
        if left is None or right is None or all(mixed) or (is_quotient and mixed[1]):
            return None
        return left - right if is_quotient else left + right


def _of_reduction(reduction: Any) -> Degree:
    return {"mean": 0, "batchmean": 0, "sum": 1}.get(reduction) if isinstance(reduction, str) else None
