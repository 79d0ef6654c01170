"""What a loss counts: sums over the batch that follow from its fields alone, and what each share adds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from spindle_cli.analysis.losses.expressions import Attribute, Copy, Count, Expression, Writer, parts_of
from spindle_cli.analysis.losses.forms import Form, Kind, NotKnownError
from spindle_cli.analysis.own_draws import draws_random_numbers
from spindle_cli.analysis.tracing.inplace import changed_in_place
from spindle_cli.analysis.tracing.questions import ask, can_answer, question_of
from spindle_cli.analysis.tracing.shapes import Shapes
from spindle_cli.workload.graph import LossShares, reached

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

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
