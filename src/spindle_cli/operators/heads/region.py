"""The part of a loss op in which its widest values live: from what they are made of to one scalar.

Of a language model's last op that is the projection onto the vocabulary, the logits in all their forms and
the cross entropy; the last layer, its norm and the labels' shift come before it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from spindle_cli.analysis.fixed import without_values
from spindle_cli.analysis.own_draws import draws_random_numbers
from spindle_cli.analysis.tracing.faithful import changed_in_place
from spindle_cli.analysis.without_data import Remembering, Unread, fake_mode
from spindle_cli.workload.building.attributes import swapped_tensors
from spindle_cli.workload.graph import ValueSpec, made_of, reached

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class NotInPartsError(Exception):
    """A loss cannot be computed part by part; the message says why, for people."""


@dataclass(frozen=True)
class Region:
    """Part of an op's graph.

    Attributes:
        nodes: in the graph's order.
        inputs: nodes outside of it that it takes, in the graph's order.
        exit: the scalar that it gives.
        widest: the node of the most elements, and their number.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    exit: fx.Node
    widest: tuple[fx.Node, int]


def shapes_of(
    module: fx.GraphModule, specs: Sequence[ValueSpec], rows: int, num_counts: int | None
) -> dict[fx.Node, Any]:
    """What every node of an op's graph gives on so many samples, as tensors without data.

    Floating-point tensors are all float32: of interest are shapes.

    Args:
        module: as `share_module` gives it; it may be on any device.
        specs: of its fields and inputs. `num_counts`: of its loss; None: it is none.
    """
    mode = fake_mode()
    made: dict[int, Tensor] = {}

    def stand_in(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            with mode:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=_dtype(tensor.dtype))
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
        return made[id(tensor)]

    with (
        torch.random.fork_rng(devices=[]),
        mode,
        Remembering(),
        Unread(),
        torch.enable_grad(),  # an op may ask for gradients itself
        swapped_tensors(module, stand_in),
    ):
        arguments: list[Any] = [without_values(spec, rows, _dtype(spec.dtype)) for spec in specs]
        if num_counts is not None:
            arguments += [1.0, *(torch.ones((), dtype=torch.float64) for _ in range(num_counts))]
        run = _Shapes(module)
        run.run(*arguments)
    return run.env


class _Shapes(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)


def _dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else dtype


def widest_value(
    graph: fx.Graph, values: Mapping[fx.Node, Any], target: str | None
) -> tuple[fx.Node, int] | None:
    """The node behind an op's layer that gives the most elements, and their number; None: there is none.

    Args:
        target: the layer.
    """
    before = _up_to(graph, target)
    sizes = [
        (node, values[node].numel())
        for node in graph.nodes
        if node not in before and node.op.startswith("call_") and isinstance(values[node], Tensor)
    ]
    return max(sizes, key=lambda item: item[1], default=None)


def find_region(
    graph: fx.Graph, values: Mapping[fx.Node, Any], target: str | None, root: nn.Module
) -> Region:
    """The part of a loss op from its widest value to a scalar.

    Args:
        values: what the nodes give. `root`: for the modules that they call.

    Raises:
        NotInPartsError: there is none that could be computed by itself, again and again.
    """
    widest = widest_value(graph, values, target)
    if widest is None:
        raise NotInPartsError("it computes nothing behind its layer")
    before = _up_to(graph, target)
    wide = [
        node
        for node in graph.nodes
        if node not in before
        and node.op.startswith("call_")
        and isinstance(values[node], Tensor)
        and 2 * values[node].numel() > widest[1]
    ]
    members = _down_to_scalars(wide, values)
    nodes = tuple(node for node in graph.nodes if node in members)
    exits = [node for node in nodes if any(user not in members for user in node.users)]
    if len(exits) != 1 or not _is_scalar(values[exits[0]]):
        raise NotInPartsError(f"its widest value leads to {len(exits)} results, not to one number")
    inputs = _inputs(graph, members, root)
    behind = reached(exits[0].users, lambda node: node.users)
    if any(node in behind for node in inputs):
        raise NotInPartsError("what comes of its widest value goes into it again")
    for node in nodes:
        _require_repeatable(node, members, root)
    return Region(nodes, inputs, exits[0], widest)


def holds_module(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node stands for a module that is called by others (`WithoutAutocast`)."""
    return node.op == "get_attr" and isinstance(_held(node, root), nn.Module)


def modules_in(nodes: Iterable[fx.Node], root: nn.Module) -> dict[str, nn.Module]:
    """The modules that nodes call, by their dotted names."""
    return {
        str(node.target): root.get_submodule(str(node.target))
        for node in nodes
        if node.op == "call_module" or holds_module(node, root)
    }


def _held(node: fx.Node, root: nn.Module) -> Any:
    owner, _, name = str(node.target).rpartition(".")
    return getattr(root.get_submodule(owner), name)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _up_to(graph: fx.Graph, target: str | None) -> Collection[fx.Node]:
    """The layer's node, and all that it is made of."""
    return made_of(node for node in graph.nodes if node.op == "call_module" and node.target == target)


def _down_to_scalars(wide: Sequence[fx.Node], values: Mapping[fx.Node, Any]) -> set[fx.Node]:
    """These nodes and all that is made of them, as far as the first scalar tensors."""

    def users_but_the_end(node: fx.Node) -> list[fx.Node]:
        return [] if _is_scalar(values[node]) else [user for user in node.users if user.op != "output"]

    return set(reached(wide, users_but_the_end))


def _inputs(graph: fx.Graph, members: Collection[fx.Node], root: nn.Module) -> tuple[fx.Node, ...]:
    taken = {source for node in members for source in node.all_input_nodes if source not in members}
    return tuple(node for node in graph.nodes if node in taken and not holds_module(node, root))


def _require_repeatable(node: fx.Node, members: Collection[fx.Node], root: nn.Module) -> None:
    """Raises NotInPartsError: to run the node in parts is not to run it once."""
    if draws_random_numbers(node, root):
        raise NotInPartsError(f"{node.name!r} draws random numbers")
    changed = changed_in_place(node, root)
    if changed is not None and changed not in members:
        raise NotInPartsError(f"{node.name!r} changes what comes from outside in place")
    for name, module in modules_in([node], root).items():
        for part in module.modules():
            if any(getattr(part, hooks) for hooks in _HOOKS):
                raise NotInPartsError(f"{name} has hooks, which would see parts of its output")


def elements_of(tensors: Iterable[Tensor]) -> int:
    """How many elements all these tensors have together."""
    return sum(math.prod(tensor.shape) for tensor in tensors)
