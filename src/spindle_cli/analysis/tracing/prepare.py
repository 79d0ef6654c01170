"""Prepare a trace for cutting: one scalar loss, tensors instead of containers between ops, constants as
constants; and tell nodes that only ask a tensor for something that others can tell as well: the batch's
size, a dtype, a device.
"""

from __future__ import annotations

import builtins
import dataclasses
import operator
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from spindle_cli.analysis.tracing.faithful import NO_GRAD
from spindle_cli.analysis.tracing.shapes import BatchDim, Shapes, entries_of, is_record, with_items
from spindle_cli.workload.refuse import refusal
from spindle_cli.workload.step_values import depends_on_step, reads_step_values_in
from spindle_cli.workload.types import FlowTask, Task

Question = Literal["size", "dtype", "device"]


def question_of(node: fx.Node, shapes: Shapes) -> Question | None:
    """What a node asks for; None if it is no question."""
    if node.op not in ("call_function", "call_method"):
        return None
    value, doubled = shapes.values[node], shapes.doubled[node]
    if isinstance(value, torch.dtype):
        return "dtype"
    if isinstance(value, torch.device):
        return "device"
    is_size = type(value) is int and (value, doubled) == (shapes.batch_size, 2 * shapes.batch_size)
    return "size" if is_size else None


def can_answer(question: fx.Node, tensor: fx.Node, shapes: Shapes) -> bool:
    """Whether a tensor has the answer to a question."""
    if not isinstance(shapes.values[tensor], Tensor):
        return False
    kind = question_of(question, shapes)
    if kind == "size":
        batch = shapes.batch_dim(tensor)
        return batch.dim is not None and batch.rows == 1
    return kind == "device" or shapes.values[tensor].dtype == shapes.values[question]


def ask(graph: fx.Graph, question: fx.Node, copy: fx.Node, tensor: fx.Node, shapes: Shapes) -> fx.Node:
    """Put the question into a graph that holds a copy of `tensor`, which can answer it."""
    kind = question_of(question, shapes)
    if kind == "size":
        return graph.call_method("size", (copy, shapes.batch_dim(tensor).dim))
    return graph.call_function(builtins.getattr, (copy, kind))


# Methods that take a tensor's dtype and device, as the functions that are told them.
_MADE_LIKE: dict[Any, Any] = {
    "new_tensor": torch.tensor,
    "new_zeros": torch.zeros,
    "new_ones": torch.ones,
    "new_full": torch.full,
    "new_empty": torch.empty,
    "new": torch.empty,
}
# Functions that take a tensor's shape as well.
_SHAPED_LIKE: dict[Any, Any] = {
    torch.zeros_like: torch.zeros,
    torch.ones_like: torch.ones,
    torch.full_like: torch.full,
}
_BY_MEMORY = frozenset({"as_strided", torch.as_strided})


def inline_constants(graph: fx.Graph, shapes: Shapes) -> None:
    """Write sizes that do not depend on the batch into the nodes that use them.

    So that a layer that needs only the length of a sequence does not depend on the tensor that was asked for
    it.
    """
    varies = reads_step_values_in(graph)
    for node in graph.nodes:
        value = shapes.values.get(node)
        if (
            node.op not in ("call_function", "call_method")
            or not _is_plain(value)
            or value != shapes.doubled[node]
            or (varies and depends_on_step(node))
        ):
            continue
        for user in list(node.users):
            if user.op != "output":
                user.args = _replaced(user.args, node, shapes.values[node])
                user.kwargs = _replaced(user.kwargs, node, shapes.values[node])


def name_squeezed_dims(graph: fx.Graph, shapes: Shapes) -> None:
    """Let x.squeeze() say which dimensions it takes away: in a share of one sample, the batch's has one entry
    too.
    """
    for node in graph.nodes:
        if node.target not in ("squeeze", torch.squeeze) or len(node.args) != 1 or node.kwargs:
            continue
        value, doubled = (seen[node.args[0]].shape for seen in (shapes.values, shapes.doubled))
        dims = tuple(dim for dim, sizes in enumerate(zip(value, doubled, strict=True)) if sizes == (1, 1))
        if shapes.values[node].dim() == len(value) - len(dims):
            node.args = (node.args[0], dims)


def ask_for_types(graph: fx.Graph, shapes: Shapes) -> None:
    """Write what takes a tensor for its dtype and device alone as the questions for them: `x.type_as(y)`,
    `x.to(y)`, `y.new_zeros(...)` and the like do not depend on y's samples. Nor does `ones_like(y[0])`.
    """
    for node in list(graph.nodes):
        if node.target in _SHAPED_LIKE and node.args and isinstance(node.args[0], fx.Node):
            _ask_for_shape(graph, node, node.args[0], shapes)
        if node.op != "call_method" or not isinstance(node.args[0], fx.Node):
            continue
        if node.target in ("type_as", "to") and len(node.args) == 2 and not node.kwargs:
            source, like = node.args
            if isinstance(like, fx.Node) and shapes.is_tensor(like):
                kinds = _asked_kinds(graph, node, like, shapes)
                node.target, node.args = "to", (source, kinds["device"], kinds["dtype"])
        elif _makes_alone(node, shapes):
            kinds = _asked_kinds(graph, node, node.args[0], shapes)
            node.op, node.target, node.args = "call_function", _MADE_LIKE[node.target], node.args[1:]
            node.kwargs = {**kinds, **node.kwargs}


def _makes_alone(node: fx.Node, shapes: Shapes) -> bool:
    """Whether a method makes a new tensor and takes nothing but the dtype and device of its own; of the old
    `x.new(...)`, which also copies others, where it is told a size.
    """
    if node.target not in _MADE_LIKE or not isinstance(node.args[0], fx.Node):
        return False
    given = [
        shapes.values[argument] if isinstance(argument, fx.Node) else argument for argument in node.args[1:]
    ]
    is_size = all(isinstance(argument, int) for argument in given) or [
        type(argument) for argument in given
    ] == [torch.Size]
    return shapes.is_tensor(node.args[0]) and (node.target != "new" or is_size)


def _ask_for_shape(graph: fx.Graph, node: fx.Node, like: fx.Node, shapes: Shapes) -> None:
    """Let what is as large as some of a batch's samples take that size as it is: it is the same for all."""
    if _picked_from(like, shapes) is like or "memory_format" in node.kwargs:
        return
    kinds = _asked_kinds(graph, node, like, shapes)
    node.target = _SHAPED_LIKE[node.target]
    node.args = (tuple(shapes.values[like].shape), *node.args[1:])
    node.kwargs = {**kinds, **{name: value for name, value in node.kwargs.items() if value is not None}}


def _picked_from(node: fx.Node, shapes: Shapes) -> fx.Node:
    """The batch that some samples are taken out of by number; of anything else the node itself."""
    if not shapes.is_tensor(node):
        return node
    batch = node
    while batch.target is operator.getitem:
        source = batch.args[0]
        if not isinstance(source, fx.Node) or not shapes.is_tensor(source):
            break
        batch = source
    has_samples = shapes.batch_dim(batch).dim is not None
    is_one = shapes.batch_dim(node) == BatchDim(None)
    return batch if has_samples and is_one else node


def _asked_kinds(graph: fx.Graph, node: fx.Node, like: fx.Node, shapes: Shapes) -> dict[str, fx.Node]:
    """A tensor's dtype and device, asked for in front of a node; of samples that are taken out of a batch,
    those of the batch.
    """
    like = _picked_from(like, shapes)
    kinds: dict[str, fx.Node] = {}
    with graph.inserting_before(node):
        for kind in ("dtype", "device"):
            kinds[kind] = graph.call_function(builtins.getattr, (like, kind))
            kinds[kind].meta = dict(node.meta)
            shapes.values[kinds[kind]] = getattr(shapes.values[like], kind)
            shapes.doubled[kinds[kind]] = getattr(shapes.doubled[like], kind)
    return kinds


def cut_gradients(graph: fx.Graph, shapes: Shapes) -> bool:
    """Detach what was made where gradients are switched off (torch.no_grad); whether there was any.

    The shapes are then to be observed again.
    """
    has_cut = False
    for node in list(graph.nodes):
        if not node.meta.get(NO_GRAD):
            continue
        value = shapes.values[node]
        if not isinstance(value, Tensor):
            for user in node.users:
                if user.target in (operator.getitem, builtins.getattr):
                    user.meta[NO_GRAD] = True
        elif value.requires_grad and node.op not in ("placeholder", "get_attr"):
            _detach(graph, node)
            has_cut = True
    return has_cut


def _detach(graph: fx.Graph, node: fx.Node) -> None:
    users = list(node.users)
    with graph.inserting_after(node):
        detached = graph.call_method("detach", (node,))
    detached.meta["place"] = node.meta.get("place")
    for user in users:
        user.replace_input_with(node, detached)


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Size):
        return True
    return isinstance(value, bool | int | float | str)


def _replaced(arguments: Any, node: fx.Node, value: Any) -> Any:
    return fx.node.map_aggregate(arguments, lambda item: value if item is node else item)


@dataclass(frozen=True)
class Results:
    """What forward returns beside the loss: nodes with a row for each sample, by key; and the keys of what
    has none.
    """

    nodes: dict[str, fx.Node]
    left_out: tuple[str, ...] = ()


NO_RESULTS = Results({})


def find_results(graph: fx.Graph, shapes: Shapes) -> Results:
    """What forward returns in its dict beside the loss, before all but the loss is dropped."""
    result = next(node for node in graph.nodes if node.op == "output").args[0]
    results: dict[str, Any] = {}
    if isinstance(result, fx.Node) and isinstance(shapes.values[result], Mapping):
        tensors = {key: value for key, value in shapes.values[result].items() if isinstance(value, Tensor)}
        results = {
            str(key): _project(graph, result, operator.getitem, key, shapes)
            for key in tensors
            if key != "loss"
        }
    elif isinstance(result, Mapping):
        results = {str(key): node for key, node in result.items() if key != "loss"}
    nodes = {key: node for key, node in results.items() if _has_rows(node, shapes)}
    return Results(nodes, tuple(key for key in results if key not in nodes))


def _has_rows(node: Any, shapes: Shapes) -> bool:
    if not isinstance(node, fx.Node) or not shapes.is_tensor(node):
        return False
    batch = shapes.batch_dim(node)
    return batch.dim == 0 and batch.rows == 1 and not batch.mixes


def find_loss(
    task: Task | FlowTask, graph: fx.Graph, shapes: Shapes, results: Results = NO_RESULTS
) -> fx.Node:
    """Make the scalar loss the graph's only output (beside `results`)."""
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
            f"forward returns {_describe(result, shapes)}, "
            "expected a scalar loss or a dict with one under 'loss'",
            place,
            "End forward with the mean of the samples' losses; what stands beside it goes into a dict: "
            "return {'loss': loss, 'logits': logits}.",
        )
    value = shapes.values[result]
    place = result.meta.get("place")
    if value.dim() > 0:
        hint = "Take its mean (or its sum, with reduction='sum' in the task)."
        raise refusal(task.name, f"the loss has shape {tuple(value.shape)}, expected a scalar", place, hint)
    if not value.requires_grad:
        hint = "Let some parameter on its path require a gradient, or leave the task out."
        raise refusal(task.name, "the loss depends on no parameter that is trained", place, hint)
    output.args = ((result, *results.nodes.values()),) if results.nodes else (result,)
    return result


def drop_unused(graph: fx.Graph) -> None:
    """Drop the nodes that no output is made of."""
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))


def unused_in(graph: fx.Graph, shapes: Shapes) -> list[fx.Node]:
    """The calls that no output is made of, in order: nothing of theirs is used but a shape, which another
    value has too.
    """
    needed: set[fx.Node] = set()
    waiting = [node for node in graph.nodes if node.op == "output"]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += [] if question_of(node, shapes) is not None else node.all_input_nodes
    return [node for node in graph.nodes if node.op.startswith("call_") and node not in needed]


def _describe(result: Any, shapes: Shapes) -> str:
    if isinstance(result, fx.Node):
        return f"a {type(shapes.values[result]).__name__}"
    if isinstance(result, Mapping):
        return f"a dict with {', '.join(map(repr, result)) or 'nothing'}"
    return "nothing" if result is None else f"a {type(result).__name__}"


def split_container(graph: fx.Graph, node: fx.Node, shapes: Shapes) -> None:
    """Where an operator's tuple or dict is handed on whole, hand on its tensors one by one."""
    if shapes.is_tensor(node):
        return
    users = [user for user in node.users if user.target not in (operator.getitem, builtins.getattr)]
    if not users:
        return
    parts = _take_apart(graph, node, shapes)
    for user in users:
        rebuilt = _put_together(graph, user, shapes.values[node], parts, shapes)
        user.args = _replaced(user.args, node, rebuilt)
        user.kwargs = _replaced(user.kwargs, node, rebuilt)


def _put_together(graph: fx.Graph, user: fx.Node, value: Any, parts: Any, shapes: Shapes) -> Any:
    """Parts as what takes them expects them: of a dataclass, and of a dict of another class that is made of
    them by their names as the model outputs of transformers are, that class in front of it.
    """
    if isinstance(value, tuple | list):
        items = [_put_together(graph, user, *pair, shapes) for pair in zip(value, parts, strict=True)]
        return with_items(parts, items)
    entries = entries_of(value) if is_record(value) else value
    if not isinstance(entries, dict) or not isinstance(parts, dict):
        return parts
    rebuilt = {key: _put_together(graph, user, entry, parts[key], shapes) for key, entry in entries.items()}
    if entries is value and not _is_made_by_names(value):
        return rebuilt
    with graph.inserting_before(user):
        made = graph.call_function(type(value), (), rebuilt)
    made.meta = {"place": user.meta.get("place")}
    for seen in (shapes.values, shapes.doubled):
        seen[made] = type(value)(**fx.node.map_arg(rebuilt, seen.__getitem__))
    return made


def is_put_together(node: fx.Node) -> bool:
    """Whether a node makes a dataclass, or a dict of another class, of tensors, for an operator."""
    made: Any = node.target
    is_class = node.op == "call_function" and isinstance(made, type)
    return is_class and (issubclass(made, dict) or dataclasses.is_dataclass(made))


def _is_made_by_names(value: dict[Any, Any]) -> bool:
    if type(value) in (dict, OrderedDict) or not all(isinstance(key, str) for key in value):
        return False
    try:
        again = type(value)(**value)
    except TypeError:  # it is made otherwise, and what takes it gets a dict
        return False
    return list(again) == list(value)


def check_memory(task: str, graph: fx.Graph, shapes: Shapes) -> None:
    """Refuse what takes entries by where they lie in memory, unless they lie one behind the other there, as
    they do once an op has handed them on.

    Raises:
        WorkloadError: with the place in the user's code.
    """
    for node in graph.nodes:
        if node.target not in _BY_MEMORY or not isinstance(node.args[0], fx.Node):
            continue
        value = shapes.values[node.args[0]]
        has_all = value.numel() * value.itemsize == value.untyped_storage().nbytes()
        is_offset = len(node.args) > 3 or node.kwargs.get("storage_offset") is not None
        if not value.is_contiguous() or (is_offset and not has_all):
            raise refusal(
                task,
                f"{node.name!r} takes entries of {node.args[0].name!r} by where they lie in memory, which is "
                "elsewhere once an op has handed them on",
                node.meta.get("place"),
                "Call contiguous() before, or use unfold, view and transpose.",
            )


def check_keys(task: str, node: fx.Node) -> None:
    """Refuse dicts that an operator is given by keys that no code of an op can be written with.

    Raises:
        WorkloadError: with the place in the user's code.
    """
    for argument in (*node.args, *node.kwargs.values()):
        odd = next((key for key in _keys_in(argument) if not _is_written(key)), None)
        if odd is not None:
            raise refusal(
                task,
                f"{node.target!r} is given a dict with the key {odd!r}, a {type(odd).__name__}",
                node.meta.get("place"),
                "Let the keys of dicts that go from operator to operator be texts or numbers.",
            )


def _keys_in(argument: Any) -> Iterator[Any]:
    if isinstance(argument, dict):
        yield from argument
    if isinstance(argument, dict | tuple | list):
        for inner in argument.values() if isinstance(argument, dict) else argument:
            yield from _keys_in(inner)


def _is_written(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_written, key))
    return type(key) in (str, bytes, int, float, bool, type(None))


def _take_apart(graph: fx.Graph, node: fx.Node, shapes: Shapes) -> Any:
    value = shapes.values[node]
    if isinstance(value, Tensor):
        return node
    if isinstance(value, tuple | list):
        keys: list[Any] = list(range(len(value)))
        parts = tuple(_part(graph, node, key, shapes) for key in keys)
        return type(value)(*parts) if hasattr(value, "_fields") else parts  # a named tuple stays one
    if isinstance(value, dict):
        return {key: _part(graph, node, key, shapes) for key in value}
    if is_record(value):
        return {name: _part(graph, node, name, shapes, builtins.getattr) for name in entries_of(value)}
    return value


def _part(graph: fx.Graph, node: fx.Node, key: Any, shapes: Shapes, take: Any = operator.getitem) -> Any:
    value = take(shapes.values[node], key)
    if not isinstance(value, Tensor | tuple | list | dict) and not is_record(value):
        return value
    return _take_apart(graph, _project(graph, node, take, key, shapes), shapes)


def _project(graph: fx.Graph, node: fx.Node, take: Any, key: Any, shapes: Shapes) -> fx.Node:
    with graph.inserting_after(node):
        part = graph.call_function(take, (node, key))
    part.meta["place"] = node.meta.get("place")
    shapes.values[part] = take(shapes.values[node], key)
    shapes.doubled[part] = take(shapes.doubled[node], key)
    return part
