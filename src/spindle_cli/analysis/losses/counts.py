"""What a loss counts: sums over the batch that follow from its fields alone, what means of torch's loss
functions are taken over, which entries are missing (NaN) and left out of them, and what each share adds.

The model's own values are taken to be numbers. Where one is not, the loss that comes of it is NaN, which ends
the run, while plain PyTorch would leave that entry out as well.

A call of `torch.nn.functional` or of one of `torch.nn`'s loss modules is brought into one form: the function,
its arguments by name, and its reduction.
"""

from __future__ import annotations

import inspect
import math
import operator
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as functional
from torch import Tensor, fx, nn

from spindle_cli.analysis.losses.expressions import (
    ADDITIONS,
    MEANS,
    NUMBERS_OF,
    PRODUCTS,
    QUOTIENTS,
    SUMS,
    Attribute,
    Call,
    Copy,
    Count,
    Expression,
    Form,
    Kind,
    NotKnownError,
    Writer,
    parts_of,
)
from spindle_cli.analysis.own_draws import draws_random_numbers
from spindle_cli.analysis.tracing.faithful import changed_in_place
from spindle_cli.analysis.tracing.prepare import ask, can_answer, question_of
from spindle_cli.analysis.tracing.shapes import Shapes
from spindle_cli.workload.graph import LossShares, reached

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn


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


SHARE = "spindle_share"  # the placeholder of graphs that are told which share of the samples they compute


class Counts:
    """The counts of one loss. `expressions`: each one number, of which the shares' values add up."""

    def __init__(self, shapes: Shapes, root: nn.Module, operators: Collection[fx.Node]) -> None:
        self.expressions: list[Expression] = []
        self._shapes = shapes
        self._root = root
        self._operators = operators
        self._added: dict[int, int] = {}  # by the expressions' ids
        self._of_fields: dict[fx.Node, bool] = {}

    def add(self, form: Form, node: fx.Node) -> Form:
        """A part as what all shares' parts add up to; `node`: what needs it, for the message.

        Raises:
            NotKnownError: it does not follow from the batch's fields.
        """
        if not self.is_of_fields(form.expression):
            raise NotKnownError(
                f"{node.name!r} needs what the whole batch gives of the model's own values", node
            )
        if id(form.expression) not in self._added:
            self._added[id(form.expression)] = len(self.expressions)
            self.expressions.append(form.expression)
        return Form(Kind.EQUAL, form.degree, Count(self._added[id(form.expression)]))

    def are_in(self, expression: Any) -> bool:
        """Whether a count takes part in an expression."""
        return any(isinstance(part, Count) for part in parts_of(expression))

    def is_of_fields(self, expression: Any) -> bool:
        """Whether an expression needs nothing but a share's fields, and constants."""
        return all(self._is_known(part) for part in parts_of(expression))

    def is_operator(self, node: fx.Node) -> bool:
        """Whether a node is one of the model's operators."""
        return node in self._operators

    def _is_known(self, part: Expression) -> bool:
        match part:
            case Copy(node):
                return self._node_is_of_fields(node)
            case Attribute(name):
                return _is_constant(self._root, name)
            case Count():
                return False
        return True

    def _node_is_of_fields(self, node: fx.Node) -> bool:
        if node not in self._of_fields:
            self._of_fields[node] = self._find(node)
        return self._of_fields[node]

    def _find(self, node: fx.Node) -> bool:
        if node.op == "placeholder" or self._answer(node) is not None:
            return True
        if node.op == "get_attr":
            return _is_constant(self._root, str(node.target))
        if node in self._operators or draws_random_numbers(node, self._root):
            return False
        if changed_in_place(node, self._root) is not None:
            return False  # the op would see it changed twice
        if node.op == "call_module":
            module = self._root.get_submodule(str(node.target))
            if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
                return False
        return all(self._node_is_of_fields(source) for source in node.all_input_nodes)

    def _answer(self, node: fx.Node) -> fx.Node | None:
        """A field that can answer, where a node asks a tensor for its size or dtype."""
        if question_of(node, self._shapes) is None:
            return None
        fields = (field for field in node.graph.nodes if field.op == "placeholder")
        return next((field for field in fields if can_answer(node, field, self._shapes)), None)

    def graph(self, used: Sequence[int]) -> tuple[fx.Graph, list[fx.Node]]:
        """A graph that gives the tuple of the used counts, and the fields that it reads, in order; after
        these it takes the share of the samples.
        """
        nodes = self._closure([self.expressions[index] for index in used])
        graph = fx.Graph()
        read = [node for node in nodes if node.op == "placeholder"]
        copies = {node: graph.placeholder(node.name) for node in read}
        share = graph.placeholder(SHARE)
        for node in nodes:
            if node in copies:
                continue
            answer = self._answer(node)
            if answer is not None:
                copies[node] = ask(graph, node, copies[answer], answer, self._shapes)
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        writer = Writer(graph, copies.__getitem__, share, {})
        graph.output(writer.write(tuple(self.expressions[index] for index in used)))
        return graph, read

    def _closure(self, expressions: Sequence[Expression]) -> list[fx.Node]:
        """The nodes that expressions need, in the trace's order."""

        def needs(node: fx.Node) -> list[fx.Node]:
            answer = self._answer(node)
            return node.all_input_nodes if answer is None else [answer]

        copied = (part.node for part in parts_of(list(expressions)) if isinstance(part, Copy))
        needed = reached(copied, needs)
        return [node for node in next(iter(needed)).graph.nodes if node in needed] if needed else []


def _is_constant(root: nn.Module, name: str) -> bool:
    """Whether a name stands for something that training does not change."""
    owner, _, last = name.rpartition(".")
    value = getattr(root.get_submodule(owner), last)
    return not (isinstance(value, Tensor) and value.requires_grad) and not isinstance(value, nn.Parameter)


def share_of_samples(num_samples: int, batch_size: int, batches: int) -> float:
    """What a share of `num_samples` samples has of a step's batches together."""
    return num_samples / (batch_size * batches)


class LossCounter:
    """Counts for one task's loss, on copies of the tensors that the workload's modules hold."""

    def __init__(self, root: nn.Module, shares: LossShares) -> None:
        assert shares.counts is not None, "there is nothing to count"
        self.fields = shares.count_fields
        self._module = fx.GraphModule(root, shares.counts)
        self._held = {
            name: _exact(tensor.detach().to("cpu", copy=True))
            for name, tensor in self._module.named_buffers()
        }

    def count(self, fields: Mapping[str, Tensor], share: float) -> Tensor:
        """What a share counts: float64 of shape (num_counts,), on the CPU.

        Args:
            fields: the share's rows of (at least) `self.fields`, on the CPU.
            share: of the samples.
        """
        given = [_exact(fields[name]) for name in self.fields]
        with torch.no_grad():
            counts = torch.func.functional_call(self._module, self._held, (*given, share))
        return torch.stack([torch.as_tensor(count, dtype=torch.float64) for count in counts])


def _exact(tensor: Tensor) -> Tensor:
    """A tensor in which sums are exact, as far as can be."""
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


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
