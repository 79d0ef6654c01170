"""What a forward finds of an earlier one between operators: in a list, an object, a class or a file.

A trace would have what was there when it was made. So where a trace has left something, forward is traced
once more, and finds it: it has to compute the same. What that has changed again goes on changing, and may
count up to something: so it is traced a third time, where nobody may look at such numbers and lists are long.
What is kept of sizes and numbers alone, a table of angles say, is no matter: it is made anew in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx

from spindle_cli.workload.building.attributes import Changes, Memories
from spindle_cli.workload.graph import CONSTANT
from spindle_cli.workload.own_draws import draws_by_itself
from spindle_cli.workload.refuse import refusal
from spindle_cli.workload.step_values import asks_no_values
from spindle_cli.workload.tracing.proxies.counters import SetsPlainError, Unknown
from spindle_cli.workload.tracing.signature import place_of_function
from spindle_cli.workload.types import Task


def refuse_earlier(task: Task, first: fx.Graph, left: Changes, again: Callable[[], fx.Graph]) -> None:
    """Refuse a forward that computes with what an earlier one has left, or decides by it.

    Args:
        left: what the first has left.
        again: traces the next one, which finds it.

    Raises:
        WorkloadError: with what is kept, and what to do.
    """
    try:
        memories = Memories.of(task.module)
        is_same = _work(again()) == _work(first)
        if is_same:
            with memories.changed_replaced(partial(Unknown, task.name)) as is_some:
                is_same = not is_some or _work(again()) == _work(first)
    except SetsPlainError:
        raise
    except Exception:  # of what it finds there
        is_same = False
    for node in first.nodes:  # which what was found there has got nodes of the other as users of
        for user in [each for each in node.users if each.graph is not first]:
            del node.users[user]
    if is_same:
        return
    names = [*left.elsewhere, *left.held, *(f"self.{name}" for name in left.counted)]
    raise refusal(
        task.name,
        f"forward computes between operators with what an earlier forward has left in {names[0]}, of which a "
        "trace knows nothing",
        place_of_function(type(task.module).forward),
        "Put what reads it and what changes it into one nn.Module and list its class in the workload's "
        "`operators`: it runs whole, on one device. Where it has to be in checkpoints, keep it in a buffer.",
    )


def _work(graph: fx.Graph) -> list[Any]:
    """What is computed of fields, parameters and chance, in order."""
    known: dict[fx.Node, bool] = {}

    def as_text(value: fx.Node) -> str:
        if not _is_of_step(value, known):
            return "numbers"
        return "of this step" if value.graph is graph else "of an earlier step"

    return [
        (
            node.op,
            getattr(node.target, "__name__", node.target),
            _texts(node.args, as_text),
            _texts(node.kwargs, as_text),
        )
        for node in graph.nodes
        if _is_of_step(node, known)
    ]


def _texts(arguments: Any, as_text: Callable[[fx.Node], str]) -> str:
    return repr(fx.node.map_arg(arguments, as_text))


def _is_of_step(node: fx.Node, known: dict[fx.Node, bool]) -> bool:
    """Whether something that steps differ in has a part in a node."""
    if node not in known:
        is_constant = node.op == "get_attr" and str(node.target).startswith(CONSTANT)
        of_itself = node.op in ("placeholder", "call_module", "get_attr") and not is_constant
        known[node] = (
            of_itself
            or draws_by_itself(node)
            or (
                not asks_no_values(node)
                and any(_is_of_step(source, known) for source in node.all_input_nodes)
            )
        )
    return known[node]
