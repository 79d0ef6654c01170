"""Copy each op's nodes out of a task's trace, into a graph of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from spindle_cli.analysis.autocast import copy_without_autocast
from spindle_cli.analysis.fixed import is_check
from spindle_cli.analysis.losses.counts import SHARE
from spindle_cli.analysis.losses.expressions import Count, Writer, parts_of
from spindle_cli.analysis.metaops.glue import Homes
from spindle_cli.analysis.rules.batch_norms import shared_norms
from spindle_cli.analysis.splitting.coupling import LISTED, Trace
from spindle_cli.analysis.tracing.behaviour import Kinds, nodes_signature
from spindle_cli.analysis.tracing.faithful import NO_AUTOCAST
from spindle_cli.analysis.tracing.prepare import ask, can_answer, question_of
from spindle_cli.analysis.tracing.regions import Region, names_of
from spindle_cli.workload.graph import LossShares, Op, ValueSpec, reached
from spindle_cli.workload.refuse import refusal


class Cutter:
    """Copies each op's nodes into a graph of its own."""

    def __init__(
        self, trace: Trace, homes: Homes, kinds: Kinds, results: Mapping[str, fx.Node] | None = None
    ) -> None:
        """`results`: what ops give beside what they hand on, by key. What belongs to no op is the last's."""
        self._results: dict[int, dict[str, fx.Node]] = {}
        for key, node in (results or {}).items():
            self._results.setdefault(homes.op.get(node, homes.num_ops - 1), {})[key] = node
        self._trace = trace
        self._homes = homes
        self._kinds = kinds
        self._order = {node: index for index, node in enumerate(trace.graph.nodes)}
        self._handed_on = self._find_handed_on()
        self.values: dict[str, ValueSpec] = {
            node.name: self._spec(node) for nodes in self._handed_on.values() for node in nodes
        }

    def _spec(self, node: fx.Node) -> ValueSpec:
        """Describe a value that one op hands to others.

        Raises:
            WorkloadError: its rows cannot be cut by samples.
        """
        if not self._trace.shapes.is_tensor(node):
            kind = type(self._trace.shapes.values[node]).__name__
            raise refusal(
                self._trace.task.name,
                f"{node.name!r} goes to another op, and is a {kind}",
                node.meta.get("place"),
                "What operators give to others has to be in tensors; their sizes can be asked of them again.",
            )
        return self._trace.shapes.spec(node, self._trace.task.name)

    def _needs(self, op: int) -> tuple[list[fx.Node], list[fx.Node]]:
        """Nodes to copy into an op, and values that it takes from other ops, both in trace order.

        A question (for the batch's size, a dtype, a device) is not followed to the tensor that was asked, if
        the op has
        another tensor to ask: a field or a value is not handed over for that alone.
        """
        inside, taken = self._closure(op, lambda node: question_of(node, self._trace.shapes) is not None)
        unanswered = {
            node
            for node in inside
            if question_of(node, self._trace.shapes) is not None and self._asked(node, inside, taken) is None
        }
        if unanswered:
            inside, taken = self._closure(
                op, lambda node: node not in unanswered and question_of(node, self._trace.shapes) is not None
            )
        key = self._order.__getitem__
        return sorted(inside, key=key), sorted(taken, key=key)

    def _closure(self, op: int, is_leaf: Callable[[fx.Node], bool]) -> tuple[set[fx.Node], set[fx.Node]]:
        first = [node for node, home in self._homes.op.items() if home == op]
        if self._is_loss(op):
            first.append(self._trace.loss)
        first.extend(self._results.get(op, {}).values())
        if op == 0:  # every sample goes through it
            first.extend(node for node in self._order if is_check(node))

        def is_taken(node: fx.Node) -> bool:
            return self._homes.op.get(node, op) != op

        needed = reached(first, lambda node: () if is_taken(node) or is_leaf(node) else node.all_input_nodes)
        return {node for node in needed if not is_taken(node)}, {node for node in needed if is_taken(node)}

    def _asked(
        self, question: fx.Node, inside: Iterable[fx.Node], taken: Iterable[fx.Node]
    ) -> fx.Node | None:
        """A tensor that comes into the op from outside and can answer a question."""
        fields = sorted((node for node in inside if node.op == "placeholder"), key=self._order.__getitem__)
        for node in (*sorted(taken, key=self._order.__getitem__), *fields):
            if can_answer(question, node, self._trace.shapes):
                return node
        return None

    def _is_loss(self, op: int) -> bool:
        return op == self._homes.num_ops - 1

    def _find_handed_on(self) -> dict[int, list[fx.Node]]:
        handed_on: dict[int, set[fx.Node]] = {}
        for op in range(self._homes.num_ops):
            for node in self._needs(op)[1]:
                handed_on.setdefault(self._homes.op[node], set()).add(node)
        return {op: sorted(nodes, key=self._order.__getitem__) for op, nodes in handed_on.items()}

    def op(self, index: int) -> Op:
        """The op with its graph: placeholders are fields then inputs; the output is the tuple of outputs, or
        the loss.
        """
        inside, taken = self._needs(index)
        fields = [node for node in inside if node.op == "placeholder"]
        graph, copies = self._copied(inside, fields, taken)
        outputs = [] if self._is_loss(index) else self._handed_on.get(index, [])
        given = tuple(copies[node] for node in self._results.get(index, {}).values())
        result: Any = tuple(copies[node] for node in outputs) + given
        if self._is_loss(index):
            result = (copies[self._trace.loss], *given) if given else copies[self._trace.loss]
        graph.output(result)
        operators = self._trace.operators
        target = str(operators[index].target) if index < len(operators) else None
        shares = self._loss_shares(index, inside, fields, taken) if self._is_loss(index) else None
        made = self._describe(index, target, graph, fields, taken, outputs, shares)
        samples = self._trace.samples
        return replace(
            made,
            changes=self._of_nodes(inside, samples.changed, (*made.parameters, *made.buffers)),
            reads=self._of_nodes(inside, samples.reads, made.buffers),
            draws_own=any(samples.draws_own(node) for node in inside),
            kept=_named_by(inside, samples.kept),
            left=_named_by(inside, samples.left),
        )

    def _copied(
        self, inside: Sequence[fx.Node], fields: Sequence[fx.Node], taken: Sequence[fx.Node], *more: str
    ) -> tuple[fx.Graph, dict[fx.Node | str, fx.Node]]:
        """A graph with placeholders for fields, values of other ops and `more`, and copies of an op's nodes;
        and what stands for each.
        """
        graph = fx.Graph()
        copies: dict[fx.Node | str, fx.Node] = {
            node: graph.placeholder(node.name) for node in (*fields, *taken)
        }
        copies.update((name, graph.placeholder(name)) for name in more)
        for node in inside:
            if node in copies:
                continue
            answerer = (
                self._asked(node, inside, taken)
                if question_of(node, self._trace.shapes) is not None
                else None
            )
            if answerer is not None:
                copies[node] = ask(graph, node, copies[answerer], answerer, self._trace.shapes)
            elif NO_AUTOCAST in node.meta:
                copies[node] = copy_without_autocast(graph, node, copies.__getitem__, node.meta[NO_AUTOCAST])
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        return graph, copies

    def _loss_shares(
        self, index: int, inside: Sequence[fx.Node], fields: Sequence[fx.Node], taken: Sequence[fx.Node]
    ) -> LossShares:
        """Make the graph by which a share of the batch computes its part of the loss."""
        loss = self._homes.loss
        assert loss is not None, "every loss has a part, if only that of the whole batch"
        used = sorted({part.index for part in parts_of(loss.part) if isinstance(part, Count)})
        names = {index: f"spindle_count_{index}" for index in used}
        graph, copies = self._copied(inside, fields, taken, SHARE, *names.values())
        counts = {index: copies[name] for index, name in names.items()}
        part: Any = Writer(graph, copies.__getitem__, copies[SHARE], counts).write(loss.part)
        given = tuple(copies[node] for node in self._results.get(index, {}).values())
        graph.output((part, *given) if given else part)
        graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or is_check(node))
        trusted = self._labels_inside(inside, fields)
        if not used:
            return LossShares(graph, all_must_count=trusted)
        counting, read = loss.counts.graph(used)
        return LossShares(graph, counting, tuple(str(node.target) for node in read), len(used), trusted)

    def _labels_inside(self, inside: Sequence[fx.Node], fields: Sequence[fx.Node]) -> tuple[str, ...]:
        """The whole-numbered fields of an operator that gives a mean over the labels that count."""
        if not any(self._trace.samples.counts(node) for node in inside if node in self._trace.operators):
            return ()
        values = self._trace.shapes.values
        return tuple(str(node.target) for node in fields if values[node].dtype == torch.int64)

    def _describe(
        self,
        index: int,
        target: str | None,
        graph: fx.Graph,
        fields: list[fx.Node],
        taken: list[fx.Node],
        outputs: list[fx.Node],
        shares: LossShares | None,
    ) -> Op:
        root = self._trace.root
        parameters, buffers = names_used(root, graph)
        layer = None if target is None else root.get_submodule(target)
        in_layer = {id(parameter) for parameter in layer.parameters()} if layer is not None else set()
        reason = self._homes.coupled.get(index)
        glue = nodes_signature(list(graph.nodes), root, target, self._kinds)
        kind = "/".join(("none" if layer is None else self._kinds.of(layer), glue, str(reason is not None)))
        return Op(
            index=index,
            kind=hashlib.sha256(kind.encode()).hexdigest()[:16],
            target=target,
            graph=graph,
            fields=tuple(str(node.target) for node in fields),
            inputs=tuple(node.name for node in taken),
            outputs=tuple(node.name for node in outputs),
            parameters=parameters,
            buffers=buffers,
            layer_parameters=tuple(name for name in parameters if id(root.get_parameter(name)) in in_layer),
            coupled=reason is not None,
            coupled_because=None if reason == LISTED else reason,
            is_loss=self._is_loss(index),
            shares=shares,
            batch_norms=() if reason is not None else norms_used(root, graph),
            results=tuple(self._results.get(index, {})),
        )

    def _of_nodes(
        self, inside: Sequence[fx.Node], of_node: Callable[[fx.Node], Sequence[str]], names: Sequence[str]
    ) -> tuple[str, ...]:
        """Those of an op's parameters and buffers that `of_node` gives for one of its nodes."""
        root = self._trace.root
        tensor_ids = {id(_held(root, name)) for node in inside for name in of_node(node)}
        return tuple(name for name in names if id(_held(root, name)) in tensor_ids)


def _held(root: nn.Module, name: str) -> Tensor:
    owner, _, attribute = name.rpartition(".")
    held: Tensor = getattr(root.get_submodule(owner), attribute)
    return held


def _named_by(nodes: Iterable[fx.Node], names_of: Callable[[fx.Node], Iterable[str]]) -> tuple[str, ...]:
    """The names that `names_of` gives for some nodes, in their order, none twice."""
    return tuple(dict.fromkeys(name for node in nodes for name in names_of(node)))


def norms_used(root: nn.Module, graph: fx.Graph) -> tuple[str, ...]:
    """Dotted names of the batch norms that a graph uses and whose statistics can be summed, each once."""
    norm_names: dict[int, str] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            for name, norm in shared_norms(root.get_submodule(str(node.target))).items():
                norm_names.setdefault(id(norm), f"{node.target}.{name}" if name else str(node.target))
    return tuple(norm_names.values())


def names_used(root: nn.Module, graph: fx.Graph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Dotted names of the parameters and of the buffers that a graph uses, each tensor once."""
    parameters: dict[int, str] = {}
    buffers: dict[int, str] = {}
    for node in graph.nodes:
        if node.op not in ("call_module", "get_attr"):
            continue
        owner, _, name = str(node.target).rpartition(".")
        value, prefix = getattr(root.get_submodule(owner), name), f"{node.target}."
        if isinstance(value, Region):
            region_parameters, region_buffers = names_of(value, root)
            for inside in region_parameters:
                parameters.setdefault(id(root.get_parameter(inside)), inside)
            for inside in region_buffers:
                buffers.setdefault(id(root.get_buffer(inside)), inside)
        elif isinstance(value, nn.Module):
            for inside, parameter in value.named_parameters():
                parameters.setdefault(id(parameter), prefix + inside)
            for inside, buffer in value.named_buffers():
                buffers.setdefault(id(buffer), prefix + inside)
        elif isinstance(value, nn.Parameter):
            parameters.setdefault(id(value), str(node.target))
        elif isinstance(value, Tensor) and name in root.get_submodule(owner)._buffers:
            buffers.setdefault(id(value), str(node.target))
    return tuple(parameters.values()), tuple(buffers.values())
