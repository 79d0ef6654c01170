"""torch's loss functions: what their means are taken over.

A call of `torch.nn.functional` or of one of `torch.nn`'s loss modules is brought into one form: the function,
its arguments by name, and its reduction.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch.nn.functional as functional
from torch import fx, nn

from spindle_cli.analysis.losses.expressions import Attribute


class Over(Enum):
    """What the losses of one call stand for, of which there are as many for each sample."""

    ELEMENTS = "elements of tensors that are broadcast against each other"
    SAMPLES = "rows along the first dimension"
    TARGETS = "targets that are not ignored, by their classes' weights; the classes lie along dimension 1"
    SEQUENCES = "rows along the second dimension of the first argument, the first of the others"


_FUNCTIONS: dict[Callable[..., Any], Over] = {
    functional.cross_entropy: Over.TARGETS,
    functional.nll_loss: Over.TARGETS,
    functional.mse_loss: Over.ELEMENTS,
    functional.l1_loss: Over.ELEMENTS,
    functional.smooth_l1_loss: Over.ELEMENTS,
    functional.huber_loss: Over.ELEMENTS,
    functional.binary_cross_entropy: Over.ELEMENTS,
    functional.binary_cross_entropy_with_logits: Over.ELEMENTS,
    functional.kl_div: Over.ELEMENTS,
    functional.margin_ranking_loss: Over.ELEMENTS,
    functional.hinge_embedding_loss: Over.ELEMENTS,
    functional.soft_margin_loss: Over.ELEMENTS,
    functional.poisson_nll_loss: Over.ELEMENTS,
    functional.gaussian_nll_loss: Over.ELEMENTS,
    functional.cosine_embedding_loss: Over.SAMPLES,
    functional.multilabel_soft_margin_loss: Over.SAMPLES,
    functional.multilabel_margin_loss: Over.SAMPLES,
    functional.multi_margin_loss: Over.SAMPLES,
    functional.triplet_margin_loss: Over.SAMPLES,
    functional.triplet_margin_with_distance_loss: Over.SAMPLES,
    functional.ctc_loss: Over.SEQUENCES,
}
# The function that a module of torch's calls, and which of its arguments are attributes of the module.
_MODULES: dict[type[nn.Module], tuple[Callable[..., Any], tuple[str, ...]]] = {
    nn.CrossEntropyLoss: (functional.cross_entropy, ("weight", "ignore_index", "label_smoothing")),
    nn.NLLLoss: (functional.nll_loss, ("weight", "ignore_index")),
    nn.MSELoss: (functional.mse_loss, ()),
    nn.L1Loss: (functional.l1_loss, ()),
    nn.SmoothL1Loss: (functional.smooth_l1_loss, ("beta",)),
    nn.HuberLoss: (functional.huber_loss, ("delta",)),
    nn.BCELoss: (functional.binary_cross_entropy, ("weight",)),
    nn.BCEWithLogitsLoss: (functional.binary_cross_entropy_with_logits, ("weight", "pos_weight")),
    nn.KLDivLoss: (functional.kl_div, ("log_target",)),
    nn.MarginRankingLoss: (functional.margin_ranking_loss, ("margin",)),
    nn.HingeEmbeddingLoss: (functional.hinge_embedding_loss, ("margin",)),
    nn.SoftMarginLoss: (functional.soft_margin_loss, ()),
    nn.PoissonNLLLoss: (functional.poisson_nll_loss, ("log_input", "full", "eps")),
    nn.GaussianNLLLoss: (functional.gaussian_nll_loss, ("full", "eps")),
    nn.CosineEmbeddingLoss: (functional.cosine_embedding_loss, ("margin",)),
    nn.MultiLabelSoftMarginLoss: (functional.multilabel_soft_margin_loss, ("weight",)),
    nn.MultiLabelMarginLoss: (functional.multilabel_margin_loss, ()),
    nn.MultiMarginLoss: (functional.multi_margin_loss, ("p", "margin", "weight")),
    nn.TripletMarginLoss: (functional.triplet_margin_loss, ("margin", "p", "eps", "swap")),
    nn.TripletMarginWithDistanceLoss: (
        functional.triplet_margin_with_distance_loss,
        ("distance_function", "margin", "swap"),
    ),
    nn.CTCLoss: (functional.ctc_loss, ("blank", "zero_infinity")),
}


@dataclass(frozen=True)
class LossCall:
    """A call of one of torch's losses.

    Attributes:
        arguments: by the function's own names, without the reduction; nodes of the trace, constants, and
            tensors of a module as `Attribute`.
        reduction: as torch names it.
    """

    function: Callable[..., Any]
    over: Over
    arguments: dict[str, Any]
    reduction: str

    @property
    def name(self) -> str:
        """The name of the function."""
        return str(getattr(self.function, "__name__", self.function))


def loss_call(node: fx.Node, root: nn.Module) -> LossCall | None:
    """What a node calls, if that is one of torch's losses."""
    if node.op == "call_module":
        return _of_module(node, root.get_submodule(str(node.target)))
    if node.op == "call_function" and callable(node.target) and node.target in _FUNCTIONS:
        return _bound(node.target, node.args, dict(node.kwargs))
    return None


def _of_module(node: fx.Node, module: nn.Module) -> LossCall | None:
    if type(module) not in _MODULES:  # a subclass may do anything
        return None
    function, attributes = _MODULES[type(module)]
    given = {name: getattr(module, name) for name in (*attributes, "reduction")}
    tensors = {name for name, _ in module.named_buffers()} | {name for name, _ in module.named_parameters()}
    held: dict[str, Any] = {name: Attribute(f"{node.target}.{name}") for name in tensors if name in given}
    takes = list(inspect.signature(type(module).forward).parameters)[1:]
    inputs = dict(zip(takes, node.args, strict=False)) | dict(node.kwargs)
    # Inputs come in the function's order, if not by its names.
    names = dict(zip(takes, inspect.signature(function).parameters, strict=False))
    return _bound(function, (), {names[name]: value for name, value in inputs.items()} | given | held)


def _bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> LossCall | None:
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    reduction = arguments.pop("reduction")
    size_average, reduce = arguments.pop("size_average", None), arguments.pop("reduce", None)
    if size_average is not None or reduce is not None:
        with warnings.catch_warnings(action="ignore"):
            reduction = nn._reduction.legacy_get_string(size_average, reduce)
    if not isinstance(reduction, str):
        return None
    return LossCall(function, _FUNCTIONS[function], arguments, reduction)
