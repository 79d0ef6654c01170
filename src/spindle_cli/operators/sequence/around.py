"""What an op does around the call of its layer, and what it calls it with, without running it: all tensors
are on the meta device.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from spindle_cli.analysis.fixed import without_values
from spindle_cli.analysis.without_data import Unread
from spindle_cli.operators.sequence.recording import NotBySequenceError
from spindle_cli.operators.sequence.region import argument
from spindle_cli.operators.sequence.types import Argument, Result
from spindle_cli.operators.tensor_group import QUESTIONS
from spindle_cli.workload.building.attributes import swapped_tensors
from spindle_cli.workload.graph import Op, TaskGraph, ValueSpec


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


# That a layer is tried on.
_SAMPLES = 2


class _ReachedError(Exception):
    """The layer is called; with what."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__("the layer is called")
        self.args_given, self.kwargs_given = args, kwargs


@contextmanager
def called_on_meta(
    task: TaskGraph, op: Op, samples: int = _SAMPLES
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Everything is on the meta device inside; gives what the op calls its layer with.

    Args:
        task: whose op it is.
        op: that calls it.
        samples: how many its fields and inputs have, at most as many as the batch.

    Raises:
        NotBySequenceError: what comes before the layer does not run there.
    """
    module, samples = task.op_module(op), min(samples, task.task.batch_size)
    made: dict[int, Tensor] = {}

    def stand_in(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return made[id(tensor)]

    with (
        torch.random.fork_rng(devices=[]),
        torch.device("meta"),
        torch.enable_grad(),
        swapped_tensors(module, stand_in),
    ):
        yield _reach(module, task.root.get_submodule(str(op.target)), task.specs_of(op), samples)


def _reach(
    module: fx.GraphModule, layer: nn.Module, specs: Iterable[ValueSpec], samples: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def reached(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _ReachedError(args, kwargs)

    hook = layer.register_forward_pre_hook(reached, with_kwargs=True)
    try:
        with Unread():
            module(*(without_values(spec, samples, device="meta") for spec in specs))
    except _ReachedError as call:
        return call.args_given, call.kwargs_given
    except Exception as error:
        text = str(error).strip().split("\n")[0]
        raise NotBySequenceError(f"what comes before it cannot be followed: {text}") from error
    finally:
        hook.remove()
    raise NotBySequenceError("it is not called")
