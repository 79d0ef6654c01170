"""From a traced forward to ops: one graph per operator, with the glue that belongs to it."""

from __future__ import annotations

import builtins
import hashlib
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, fx, nn

from spindle_cli.workload.glue import LISTED, Homes, Trace, find_homes
from spindle_cli.workload.graph import Op, TaskGraph, ValueSpec
from spindle_cli.workload.independence import Independence
from spindle_cli.workload.inplace import check_homes, check_in_place
from spindle_cli.workload.kind import Kinds, nodes_signature
from spindle_cli.workload.refuse import refusal
from spindle_cli.workload.shapes import Observer, Shapes
from spindle_cli.workload.types import FlowTask, Task, Workload


def make_ops(
    task: Task | FlowTask,
    root: nn.Module,
    graph: fx.Graph,
    samples: Mapping[str, Tensor],
    workload: Workload,
    observer: Observer,
    independence: Independence,
) -> TaskGraph:
    """Cut a task's trace into ops.

    Args:
        root: module that the trace's names are relative to.
        samples: a small collated batch, for the shapes of the fields.
        observer, independence: of the whole workload.

    Raises:
        WorkloadError: no scalar loss, or an op that cannot run on the task's batch; with the place in the user's code.
    """
    check_in_place(task.name, root, graph)
    shapes = observer.observe(task.name, root, graph, samples, task.batch_size)
    loss = _find_loss(task, graph, shapes)
    operators = _operators(task, root, graph, workload)
    for node in operators:
        _split_container(graph, node, shapes)
        node.meta["arguments"] = _argument_specs(node, shapes)
    trace = Trace(task, root, graph, shapes, loss, independence, operators)
    homes = find_homes(trace, workload)
    check_homes(task.name, root, graph, homes.op)
    cutter = _Cutter(trace, homes, observer.kinds)
    ops = tuple(cutter.op(index) for index in range(homes.num_ops))
    fields = {str(n.target): shapes.spec(n, task.name) for n in graph.nodes if n.op == "placeholder"}
    return TaskGraph(task, root, ops, cutter.values, fields)


def _operators(task: Task | FlowTask, root: nn.Module, graph: fx.Graph, workload: Workload) -> list[fx.Node]:
    """The nodes that run an operator, in order: in a FlowTask, all that call a module."""
    calls = [node for node in graph.nodes if node.op == "call_module"]
    if isinstance(task, FlowTask):
        return calls
    classes = (*workload.operators, *workload.coupled)
    return [node for node in calls if isinstance(root.get_submodule(str(node.target)), classes)]


def _argument_specs(node: fx.Node, shapes: Shapes) -> list[tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor that an operator is given, in order."""
    values = [shapes.values[source] for source in node.all_input_nodes]
    return [(tuple(value.shape), str(value.dtype)) for value in values if isinstance(value, Tensor)]


def _find_loss(task: Task | FlowTask, graph: fx.Graph, shapes: Shapes) -> fx.Node:
    """Make the scalar loss the graph's only output, and drop what only other outputs needed."""
    output = next(node for node in graph.nodes if node.op == "output")
    result = output.args[0]
    place = output.meta.get("place")
    if (
        isinstance(result, fx.Node)
        and isinstance(shapes.values[result], Mapping)
        and "loss" in shapes.values[result]
    ):
        result = _project(graph, result, operator.getitem, "loss", shapes)
    elif isinstance(result, Mapping) and "loss" in result:
        result = result["loss"]
    if not isinstance(result, fx.Node) or not shapes.is_tensor(result):
        raise refusal(
            task.name,
            f"forward returns {_describe(result, shapes)}, expected a scalar loss or a dict with one under 'loss'",
            place,
            "End forward with the mean of the samples' losses.",
        )
    value = shapes.values[result]
    place = result.meta.get("place")
    if value.dim() > 0:
        hint = "Take its mean (or its sum, with reduction='sum' in the task)."
        raise refusal(task.name, f"the loss has shape {tuple(value.shape)}, expected a scalar", place, hint)
    if not value.requires_grad:
        hint = "Let some parameter on its path require a gradient, or leave the task out."
        raise refusal(task.name, "the loss depends on no parameter that is trained", place, hint)
    output.args = (result,)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    return result


def _describe(result: Any, shapes: Shapes) -> str:
    if isinstance(result, fx.Node):
        return f"a {type(shapes.values[result]).__name__}"
    if isinstance(result, Mapping):
        return f"a dict with {', '.join(map(repr, result)) or 'nothing'}"
    return "nothing" if result is None else f"a {type(result).__name__}"


def _split_container(graph: fx.Graph, node: fx.Node, shapes: Shapes) -> None:
    """Where an operator's tuple or dict is handed on whole, hand on its tensors one by one."""
    if shapes.is_tensor(node):
        return
    users = [user for user in node.users if user.target not in (operator.getitem, builtins.getattr)]
    if not users:
        return
    parts = _take_apart(graph, node, shapes)
    for user in users:
        user.args = fx.node.map_aggregate(user.args, lambda item: parts if item is node else item)
        user.kwargs = fx.node.map_aggregate(user.kwargs, lambda item: parts if item is node else item)


def _take_apart(graph: fx.Graph, node: fx.Node, shapes: Shapes) -> Any:
    value = shapes.values[node]
    if isinstance(value, Tensor):
        return node
    if isinstance(value, tuple | list):
        keys: list[Any] = list(range(len(value)))
        return tuple(_part(graph, node, key, shapes) for key in keys)
    if isinstance(value, dict):
        return {key: _part(graph, node, key, shapes) for key in value}
    return value


def _part(graph: fx.Graph, node: fx.Node, key: Any, shapes: Shapes) -> Any:
    value = shapes.values[node][key]
    if not isinstance(value, Tensor | tuple | list | dict):
        return value
    return _take_apart(graph, _project(graph, node, operator.getitem, key, shapes), shapes)


def _project(graph: fx.Graph, node: fx.Node, take: Any, key: Any, shapes: Shapes) -> fx.Node:
    with graph.inserting_after(node):
        part = graph.call_function(take, (node, key))
    part.meta["place"] = node.meta.get("place")
    shapes.values[part] = take(shapes.values[node], key)
    shapes.doubled[part] = take(shapes.doubled[node], key)
    return part


class _Cutter:
    """Copies each op's nodes into a graph of its own."""

    def __init__(self, trace: Trace, homes: Homes, kinds: Kinds) -> None:
        self._trace = trace
        self._homes = homes
        self._kinds = kinds
        self._order = {node: index for index, node in enumerate(trace.graph.nodes)}
        self._handed_on = self._find_handed_on()
        self.values: dict[str, ValueSpec] = {
            node.name: trace.shapes.spec(node, trace.task.name)
            for nodes in self._handed_on.values()
            for node in nodes
        }

    def _needs(self, op: int) -> tuple[list[fx.Node], list[fx.Node]]:
        """Nodes to copy into an op, and values that it takes from other ops, both in trace order.

        A node that gives the batch's size is not followed to the tensor that it was asked of, if the op has
        another tensor to ask: a whole field or value is not handed over for its size alone.
        """
        own, taken = self._closure(op, self._gives_batch_size)
        if any(map(self._gives_batch_size, own)) and self._asked_for_size(own, taken) is None:
            own, taken = self._closure(op, lambda node: False)
        key = self._order.__getitem__
        return sorted(own, key=key), sorted(taken, key=key)

    def _closure(self, op: int, is_leaf: Callable[[fx.Node], bool]) -> tuple[set[fx.Node], set[fx.Node]]:
        own: set[fx.Node] = set()
        taken: set[fx.Node] = set()
        pending = [node for node, home in self._homes.op.items() if home == op]
        if self._is_loss(op):
            pending.append(self._trace.loss)
        while pending:
            node = pending.pop()
            if node in own or node in taken:
                continue
            if self._homes.op.get(node, op) != op:
                taken.add(node)
            else:
                own.add(node)
                pending.extend([] if is_leaf(node) else node.all_input_nodes)
        return own, taken

    def _gives_batch_size(self, node: fx.Node) -> bool:
        shapes = self._trace.shapes
        value, doubled = shapes.values[node], shapes.doubled[node]
        return type(value) is int and (value, doubled) == (shapes.batch_size, 2 * shapes.batch_size)

    def _asked_for_size(self, own: Iterable[fx.Node], taken: Iterable[fx.Node]) -> fx.Node | None:
        """A tensor that comes into the op from outside with one row per sample."""
        fields = sorted((n for n in own if n.op == "placeholder"), key=self._order.__getitem__)
        for node in (*sorted(taken, key=self._order.__getitem__), *fields):
            batch = self._trace.shapes.batch_dim(node)
            if batch.dim is not None and batch.rows == 1:
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
        """The op with its graph: placeholders are fields then inputs; the output is the tuple of outputs, or the loss."""
        own, taken = self._needs(index)
        fields = [node for node in own if node.op == "placeholder"]
        graph, copies = fx.Graph(), {}
        for node in (*fields, *taken):
            copies[node] = graph.placeholder(node.name)
        asked = self._asked_for_size(own, taken)
        for node in own:
            if node.op == "placeholder":
                continue
            if asked is not None and self._gives_batch_size(node):
                dim = self._trace.shapes.batch_dim(asked).dim
                copies[node] = graph.call_method("size", (copies[asked], dim))
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        outputs = [] if self._is_loss(index) else self._handed_on.get(index, [])
        result: Any = (
            copies[self._trace.loss] if self._is_loss(index) else tuple(copies[node] for node in outputs)
        )
        graph.output(result)
        operators = self._trace.operators
        target = str(operators[index].target) if index < len(operators) else None
        return self._describe(index, target, graph, fields, taken, outputs)

    def _describe(
        self,
        index: int,
        target: str | None,
        graph: fx.Graph,
        fields: list[fx.Node],
        taken: list[fx.Node],
        outputs: list[fx.Node],
    ) -> Op:
        root = self._trace.root
        parameters, buffers = names_used(root, graph)
        layer = None if target is None else root.get_submodule(target)
        own = {id(parameter) for parameter in layer.parameters()} if layer is not None else set()
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
            layer_parameters=tuple(name for name in parameters if id(root.get_parameter(name)) in own),
            coupled=reason is not None,
            coupled_because=None if reason == LISTED else reason,
            is_loss=self._is_loss(index),
        )


def names_used(root: nn.Module, graph: fx.Graph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Dotted names of the parameters and of the buffers that a graph uses, each tensor once."""
    parameters: dict[int, str] = {}
    buffers: dict[int, str] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            module, prefix = root.get_submodule(str(node.target)), f"{node.target}."
            for name, parameter in module.named_parameters():
                parameters.setdefault(id(parameter), prefix + name)
            for name, buffer in module.named_buffers():
                buffers.setdefault(id(buffer), prefix + name)
        elif node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            value = getattr(root.get_submodule(owner), name)
            if isinstance(value, nn.Parameter):
                parameters.setdefault(id(value), str(node.target))
            elif isinstance(value, Tensor) and name in root.get_submodule(owner)._buffers:
                buffers.setdefault(id(value), str(node.target))
    return tuple(parameters.values()), tuple(buffers.values())


def op_module(task_graph: TaskGraph, op: Op) -> fx.GraphModule:
    """An op as a callable module over its task's own parameters (the same objects, not copies).

    Call it with the batch fields named by `op.fields`, then the values named by `op.inputs`, in that order. It returns the
    tuple of the values named by `op.outputs`; the last op of a task returns the scalar loss instead.
    """
    return fx.GraphModule(task_graph.root, op.graph)
