"""What an op does around the call of its layer."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx, nn

from spindle_cli.operators.sequence.exchange import QUESTIONS
from spindle_cli.operators.sequence.region import argument
from spindle_cli.operators.sequence.types import Argument, Result
from spindle_cli.workload.graph import Op, TaskGraph


def parameters_beside(task: TaskGraph, op: Op, layer_call: fx.Node) -> set[str]:
    """The parameters that the op uses beside its layer."""
    names: set[str] = set()
    for node in op.graph.nodes:
        if node is layer_call or node.op not in ("get_attr", "call_module"):
            continue
        name = str(node.target)
        owner, _, last = name.rpartition(".")
        held = getattr(task.root.get_submodule(owner), last)
        if isinstance(held, nn.Module):
            names.update(
                parameter for parameter, _ in held.named_parameters(prefix=name, remove_duplicate=False)
            )
        else:
            names.add(name)
    return names


def as_they_are(
    op: Op, layer_call: fx.Node, trunk: Argument, results: Sequence[Result]
) -> tuple[int | None, frozenset[Result]]:
    """Whether the op takes the trunk, and hands on the results, as they are: which of its arguments the trunk
    is, None if none, and those of the results.
    """
    source = argument(trunk, layer_call.args, layer_call.kwargs)
    placeholders = [node for node in op.graph.nodes if node.op == "placeholder"]
    is_alone = (
        isinstance(source, fx.Node)
        and source.op == "placeholder"
        and all(user is layer_call or _only_asks(user) for user in source.users)
    )
    uses = [*layer_call.args, *layer_call.kwargs.values()].count(source)
    taken = placeholders.index(source) if is_alone and uses == 1 else None
    if op.is_loss:
        return taken, frozenset()
    return taken, frozenset(place for place in results if _is_handed_on(layer_call, place))


def _is_handed_on(layer_call: fx.Node, place: Result) -> bool:
    if place is None:
        return all(user.op == "output" for user in layer_call.users)
    if any(user.target is not operator.getitem for user in layer_call.users):
        return False
    picks = [user for user in layer_call.users if user.args[1] == place]
    return all(user.op == "output" for pick in picks for user in pick.users)


def _only_asks(node: fx.Node) -> bool:
    """Whether a node asks a tensor for what a part of it knows of the whole."""
    attributes, methods = QUESTIONS
    if node.op == "call_method":
        return node.target in methods
    return node.target is getattr and node.args[1] in attributes
