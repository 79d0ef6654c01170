"""Whether a loss may be computed share by share, and how: is it a sum or a mean over what counts?

It is *known* to be if every operation after the batch dimension is gone is linear in what the samples add up
to. Then each share computes its part, and the parts add up to the loss of the whole batch:

* a mean over samples is the share's mean times the share's size over the batch's;
* a mean over what counts (targets that are not ignored, a mask) is the share's sum over what the whole batch
  counts. A *count* follows from the batch's fields alone, so that it is known before the loss is computed;
* numbers that grow with the batch (`x.shape[0]`) are those of the whole batch.

Everything else can only be computed for the whole batch, and it is said where and why.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from spindle_cli.analysis.losses.calls import form_of_loss
from spindle_cli.analysis.losses.counts import (
    NANMEANS,
    Counts,
    Missing,
    count_present,
    loss_call,
    sum_present,
)
from spindle_cli.analysis.losses.expressions import (
    ADDITIONS,
    ARITHMETIC,
    GUARDS,
    JOINS,
    LINEAR,
    MEANS,
    NUMBERS_OF,
    PRODUCTS,
    QUOTIENTS,
    RECIPROCALS,
    ROW_BY_ROW,
    SUMS,
    Call,
    Copy,
    Expression,
    Form,
    Kind,
    NotKnownError,
    Share,
    highest,
    is_zero,
    most,
    over_count,
    plus,
    whole_number,
    without_autocast,
)
from spindle_cli.analysis.splitting.coupling import Trace
from spindle_cli.analysis.tracing.faithful import NO_AUTOCAST
from spindle_cli.analysis.tracing.regions import Region
from spindle_cli.analysis.tracing.shapes import Shapes, growth


class LossForms:
    """Forms of the values of one loss op.

    Args:
        shapes: of the task's trace.
        root: for the modules it calls.
        mixed: nodes whose value, computed on a share, is not its rows or the whole of what the whole batch
            gives.
        reordering: of those, the ones whose rows depend on other samples' in a way that nothing is known of.
        own_losses: operators that give a loss of their own, as which they are taken.
        counts: of the loss; those that it needs are added.
        is_whole: the loss is computed for the whole batch anyway; what is not known of it counts batch by
            batch where a step has several.
    """

    def __init__(
        self,
        shapes: Shapes,
        root: nn.Module,
        mixed: Collection[fx.Node],
        reordering: Collection[fx.Node],
        own_losses: Collection[fx.Node],
        own_degree: int,
        counts: Counts,
        *,
        is_whole: bool = False,
    ) -> None:
        self._shapes = shapes
        self._root = root
        self._mixed = mixed
        self._reordering = reordering
        self._own_losses = own_losses
        self._own_degree = own_degree
        self._counts = counts
        self._is_whole = is_whole
        self._known: dict[fx.Node, Form] = {}
        self._missing = Missing(shapes, counts)

    def part(self, node: fx.Node, degree: int) -> Form:
        """The form of a loss that the shares' parts add up to, where it grows with the batch to `degree`.

        Raises:
            NotKnownError: it is not known to be such a loss.
        """
        form = self._as_part(self.of(node), node)
        if form.degree != degree and self._is_whole:
            return self._of_own_loss(node)
        if form.degree != degree:
            grows = {0: "a mean", 1: "a sum"}.get(-1 if form.degree is None else form.degree)
            raise NotKnownError(f"it is {grows or 'neither a sum nor a mean'} over the batch", node)
        return form

    def of(self, value: Any) -> Form:
        """The form of a node's value, or of a constant.

        Raises:
            NotKnownError: it has none.
        """
        if not isinstance(value, fx.Node):
            return Form(Kind.EQUAL, 0, value)
        if value not in self._known:
            form = self._find_or_whole(value)
            if NO_AUTOCAST in value.meta:
                made_before = [earlier.expression for earlier in self._known.values()]
                expression = without_autocast(form.expression, value.meta[NO_AUTOCAST], made_before)
                form = replace(form, expression=expression)
            self._known[value] = form
        return self._known[value]

    def _find_or_whole(self, node: fx.Node) -> Form:
        try:
            return self._find(node)
        except NotKnownError:
            if not self._is_whole or not self._shapes.is_tensor(node):
                raise
        return Form(Kind.ROWS, 0, Copy(node)) if self._has_batch(node) else self._of_own_loss(node)

    def _find(self, node: fx.Node) -> Form:
        if node.op == "call_module" and isinstance(self._root.get_submodule(str(node.target)), Region):
            raise NotKnownError(
                "what forward does there is decided by values, or changes a buffer, so that it runs as it is "
                "written",
                node,
            )
        if not self._shapes.is_tensor(node):
            return self._of_number(node)
        if node not in self._mixed:
            return Form(Kind.ROWS if self._has_batch(node) else Kind.EQUAL, 0, Copy(node))
        if node in self._reordering:
            raise NotKnownError(f"{node.name!r} may depend on the order or number of the samples", node)
        if self._shapes.batch_dim(node).mixes:
            raise NotKnownError(f"{node.name!r} grows with the batch in more than one dimension", node)
        if node in self._own_losses:
            return self._of_own_loss(node)
        loss = loss_call(node, self._root)
        if loss is not None:
            return form_of_loss(loss, node, self.of, self._shapes, self._counts)
        return self._of_operation(node)

    def _of_number(self, node: fx.Node) -> Form:
        degree = growth(self._shapes.values[node], self._shapes.doubled[node])
        if self._shapes.holds_tensors(node) or degree is None:
            raise NotKnownError(f"nothing is known of {node.name!r} over the batch", node)
        if degree == 0:
            return Form(Kind.EQUAL, 0, Copy(node))
        return Form(Kind.EQUAL, degree, Call(whole_number, (Copy(node), Share(), degree)))

    def _of_own_loss(self, node: fx.Node) -> Form:
        copy = Copy(node)
        mean = Call(operator.mul, (copy, Share()))
        return Form(Kind.PART, self._own_degree, copy if self._own_degree else mean)

    def _of_operation(self, node: fx.Node) -> Form:
        target: Any = node.target
        if node.op == "call_module":
            rule: Callable[[fx.Node], Form] = self._of_other
        elif target in MEANS | SUMS and len(node.all_input_nodes) == 1:
            rule = self._of_reduction
        elif target in NANMEANS and len(node.args) == 1 and not node.kwargs:
            rule = self._of_mean_of_present
        elif target is builtins.sum:
            rule = self._of_python_sum
        elif target in ADDITIONS:
            rule = self._of_addition
        elif target in PRODUCTS | QUOTIENTS and len(node.args) == 2 and not node.kwargs:
            rule = self._of_product
        elif target in RECIPROCALS:
            rule = self._of_reciprocal
        elif target in JOINS:
            rule = self._of_join
        elif target is torch.where or target == "where":
            rule = self._of_choice
        elif target in LINEAR:
            rule = self._of_linear
        else:
            rule = self._of_other
        return rule(node)

    def _has_batch(self, node: fx.Node) -> bool:
        return self._shapes.is_tensor(node) and self._shapes.batch_dim(node).dim is not None

    def _of_reduction(self, node: fx.Node) -> Form:
        """Find how a sum or mean over some dimensions grows with the batch."""
        (source,) = node.all_input_nodes
        form = self.of(source)
        if node.target in NUMBERS_OF and (form.kind is not Kind.ROWS or form.degree != 0):
            return self._of_other(node)
        reduced = Call(_target(node), *self._arguments(node, {source: form}))
        if form.kind is not Kind.ROWS or self._has_batch(node):
            return Form(form.kind, form.degree, reduced)
        if node.target in SUMS:
            return Form(Kind.PART, plus(form.degree, 1), reduced)
        return Form(Kind.PART, form.degree, Call(operator.mul, (reduced, Share())))

    def _of_mean_of_present(self, node: fx.Node) -> Form:
        """Find how a mean over all entries that are not NaN grows with the batch."""
        (source,) = node.all_input_nodes
        form = self.of(source)
        if form.kind is not Kind.ROWS or form.degree != 0:
            return self._of_other(node)
        missing = self._missing.everywhere(source)
        if missing is None:
            mean = Call("mean", (form.expression,))
            return Form(Kind.PART, 0, Call(operator.mul, (mean, Share())))
        count = Form(Kind.PART, 1, Call(count_present, (missing,)))
        total = Call(sum_present, (form.expression, missing))
        return Form(Kind.PART, 0, Call(over_count, (total, self._counts.add(count, node).expression)))

    def _of_linear(self, node: fx.Node) -> Form:
        """Find how the result of an operation grows that changes no value; picking rows out of the batch is
        not one.
        """
        source = node.args[0]
        if not isinstance(source, fx.Node):
            return self._of_other(node)
        others = {operand: self.of(operand) for operand in node.all_input_nodes if operand is not source}
        form = self.of(source)
        if any(
            operand_form.kind is not Kind.EQUAL or operand_form.degree != 0
            for operand_form in others.values()
        ) or (form.kind is Kind.ROWS and not self._keeps_rows(node)):
            return self._of_other(node)
        return Form(form.kind, form.degree, Call(_target(node), *self._arguments(node, {source: form})))

    def _keeps_rows(self, node: fx.Node) -> bool:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        dims = [self._shapes.batch_dim(tensor).dim for tensor in (source, node)]
        return dims == [0, 0] and node.target in ROW_BY_ROW

    def _of_python_sum(self, node: fx.Node) -> Form:
        items = list(node.args[0]) if isinstance(node.args[0], list | tuple) else [node.args[0]]
        return self._joined(node, [*items, *node.args[1:]], lambda forms: Call(builtins.sum, (forms,)))

    def _of_join(self, node: fx.Node) -> Form:
        if not isinstance(node.args[0], list | tuple):
            return self._of_other(node)
        target = _target(node)
        return self._joined(
            node, node.args[0], lambda made: Call(target, (made, *node.args[1:]), node.kwargs)
        )

    def _of_addition(self, node: fx.Node) -> Form:
        scaled = node.kwargs.get("alpha", 1)
        if not set(node.kwargs) <= {"alpha"} or len(node.args) != 2 or not isinstance(scaled, int | float):
            return self._of_other(node)
        return self._joined(node, node.args, lambda made: Call(_target(node), tuple(made), node.kwargs))

    def _joined(self, node: fx.Node, items: Any, join: Callable[[list[Any]], Call]) -> Form:
        """Find how the result grows of what adds values up or puts them side by side: all grow alike, and a
        zero in any way.
        """
        forms = [self.of(item) for item in items]
        kinds = {form.kind for form in forms}
        if Kind.PART in kinds:
            if Kind.ROWS in kinds:
                raise NotKnownError(f"{node.name!r} joins samples with what is made of all of them", node)
            forms = self._alike(forms, node)
            kinds = {form.kind for form in forms}
        elif Kind.ROWS in kinds and not self._aligned(node):
            raise NotKnownError(f"{node.name!r} joins samples with other samples", node)
        degrees = {form.degree for form in forms if not is_zero(form)}
        if kinds == {Kind.EQUAL}:
            degrees = {highest(degrees)}  # a count + 1e-6 grows as the count
        if len(degrees) > 1:
            raise NotKnownError(f"{node.name!r} adds values that grow with the batch in different ways", node)
        expression = join([form.expression for form in forms])
        return Form(most(kinds), next(iter(degrees), 0), expression)

    def _alike(self, forms: list[Form], node: fx.Node) -> list[Form]:
        """Values that are added up, as parts; counts and what is constant, as what they are."""
        parts = [self._as_part(form, node) for form in forms]
        if len({part.degree for part in parts if not is_zero(part)}) == 1:
            return parts
        equal = [self._equal_or_none(form, node) for form in forms]
        known_forms = [form for form in equal if form is not None]
        return known_forms if len(known_forms) == len(forms) else parts

    def _of_product(self, node: fx.Node) -> Form:
        left, right = (self.of(item) for item in node.args)
        return self._multiplied(node, left, right, is_quotient=node.target in QUOTIENTS)

    def _of_reciprocal(self, node: fx.Node) -> Form:
        return self._multiplied(node, self.of(1), self.of(node.args[0]), is_quotient=True)

    def _multiplied(self, node: fx.Node, left: Form, right: Form, *, is_quotient: bool) -> Form:
        if is_quotient:
            right = self._as_equal(right, node) if right.kind is Kind.PART else right
        elif left.kind is right.kind is Kind.PART:
            left, right = self._one_as_equal(left, right, node)
        kinds = {left.kind, right.kind}
        if kinds == {Kind.PART, Kind.ROWS} or (kinds == {Kind.ROWS} and not self._aligned(node)):
            raise NotKnownError(f"{node.name!r} joins samples with what is made of all of them", node)
        if is_quotient and right.kind is Kind.ROWS and right.degree != 0:
            raise NotKnownError(f"{node.name!r} divides by what depends on the whole batch", node)
        degree = plus(left.degree, right.degree, -1 if is_quotient else 1)
        guarded = is_quotient and right.kind is Kind.EQUAL and self._counts.are_in(right.expression)
        target = over_count if guarded else operator.truediv if is_quotient else operator.mul
        return Form(most(kinds), degree, Call(target, (left.expression, right.expression)))

    def _one_as_equal(self, left: Form, right: Form, node: fx.Node) -> tuple[Form, Form]:
        try:
            return left, self._as_equal(right, node)
        except NotKnownError:
            return self._as_equal(left, node), right

    def _of_choice(self, node: fx.Node) -> Form:
        """Find how the result of torch.where grows whose condition is the same for all shares."""
        if len(node.args) != 3 or node.target == "where":
            return self._of_other(node)
        condition = self._equal_or_none(self.of(node.args[0]), node)
        if condition is None or condition.kind is not Kind.EQUAL:
            return self._of_other(node)
        return self._joined(
            node, node.args[1:], lambda made: Call(torch.where, (condition.expression, *made))
        )

    def _of_other(self, node: fx.Node) -> Form:
        """Find how the result of any operation grows: what all shares give it alike, they get back alike."""
        forms = {source: self.of(source) for source in node.all_input_nodes}
        if any(form.kind is Kind.ROWS for form in forms.values()):
            raise NotKnownError(f"nothing is known of {_name(node, self._root)!r} over the batch", node)
        equal_or_none = {source: self._equal_or_none(form, node) for source, form in forms.items()}
        if None in equal_or_none.values() or node.op == "call_module":
            raise NotKnownError(
                f"{_name(node, self._root)!r} is applied to what is made of all samples, and is not linear",
                node,
            )
        equal = {source: form for source, form in equal_or_none.items() if form is not None}
        degrees = {form.degree for form in equal.values()} - {0}
        degree = None
        if not degrees:
            degree = 0
        elif node.target in GUARDS and len(degrees) == 1:
            (degree,) = degrees
        return Form(Kind.EQUAL, degree, Call(_target(node), *self._arguments(node, equal)))

    def _equal_or_none(self, form: Form, node: fx.Node) -> Form | None:
        try:
            return self._as_equal(form, node)
        except NotKnownError:
            return None

    def _as_equal(self, form: Form, node: fx.Node) -> Form:
        """A count: what the shares add up to, which follows from the batch's fields."""
        if form.kind is not Kind.PART:
            return form
        made = (source for source in node.all_input_nodes if self._known.get(source) is form)
        if any(self._shapes.values[source].numel() != 1 for source in made if self._shapes.is_tensor(source)):
            raise NotKnownError(f"{node.name!r} needs several numbers that the whole batch counts", node)
        return self._counts.add(form, node)

    def _as_part(self, form: Form, node: fx.Node) -> Form:
        """Turn a value that all shares know into one of which each share has a part."""
        if form.kind is Kind.ROWS:
            raise NotKnownError(f"{node.name!r} is one value for each sample", node)
        if form.kind is Kind.PART or is_zero(form):
            return form
        return Form(Kind.PART, form.degree, Call(operator.mul, (form.expression, Share())))

    def _aligned(self, node: fx.Node) -> bool:
        """Whether a node's tensors have their samples at the same place when they are broadcast."""
        sources = [source for source in node.all_input_nodes if self._has_batch(source)]
        return len({self._shapes.from_right(source) for source in sources}) <= 1 and self._has_batch(node)

    def _arguments(self, node: fx.Node, forms: dict[fx.Node, Form]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A node's arguments with expressions in place of nodes."""

        def expression(source: fx.Node) -> Any:
            return (forms[source] if source in forms else self.of(source)).expression

        args, kwargs = fx.node.map_aggregate(
            (node.args, node.kwargs), lambda item: expression(item) if isinstance(item, fx.Node) else item
        )
        return args, dict(kwargs)


def _target(node: fx.Node) -> Any:
    return node.target


def _name(node: fx.Node, root: nn.Module) -> str:
    if node.op == "call_module":
        return type(root.get_submodule(str(node.target))).__name__
    return str(getattr(node.target, "__name__", node.target))


@dataclass(frozen=True)
class LossPart:
    """A share's part of a loss, and the counts that it needs."""

    part: Expression | Any
    counts: Counts


def find_part(
    trace: Trace, mixed: Collection[fx.Node], reordering: Collection[fx.Node], own_losses: Collection[fx.Node]
) -> LossPart:
    """The part of a loss that each share computes; see `LossForms` for the arguments.

    Raises:
        NotKnownError: the loss is not known to be what the task says, a sum or a mean.
    """
    return _find(trace, mixed, reordering, own_losses, is_whole=False)


def find_part_of_whole(trace: Trace, members: Collection[fx.Node]) -> LossPart:
    """The part that one of a step's batches has of a loss that is computed for the whole batch.

    Args:
        members: nodes of the op that computes it.
    """
    mixed: set[fx.Node] = set()
    for node in trace.graph.nodes:
        if node in members and _is_made_of_all(node, trace, mixed):
            mixed.add(node)
    return _find(trace, mixed, (), (), is_whole=True)


def _is_made_of_all(node: fx.Node, trace: Trace, mixed: Collection[fx.Node]) -> bool:
    """Whether a node's value is made of all samples of the batch."""
    shapes = trace.shapes
    if not shapes.is_tensor(node):
        return False
    inputs = node.all_input_nodes
    if any(source in mixed for source in inputs):
        return True
    tensors = [source for source in inputs if shapes.is_tensor(source)]
    if shapes.batch_dim(node).dim is None:
        return any(shapes.batch_dim(source).dim is not None for source in tensors)
    grows = any(
        not shapes.is_tensor(source)
        and not shapes.holds_tensors(source)
        and shapes.values[source] != shapes.doubled[source]
        for source in inputs
    )
    return grows and node.target in ARITHMETIC


def _find(
    trace: Trace,
    mixed: Collection[fx.Node],
    reordering: Collection[fx.Node],
    own_losses: Collection[fx.Node],
    *,
    is_whole: bool,
) -> LossPart:
    degree = 1 if trace.task.reduction == "sum" else 0
    counts = Counts(trace.shapes, trace.root, trace.operators)
    forms = LossForms(
        trace.shapes, trace.root, mixed, reordering, own_losses, degree, counts, is_whole=is_whole
    )
    return LossPart(forms.part(trace.loss, degree).expression, counts)
