"""How devices share out the experts of an op's layer: what of its arguments and results has an entry for each
sample, found by running it for two numbers of samples on the meta device.

That its samples do not depend on each other is known already: the op's batch may be split.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from spindle_cli.analysis.tracing.behaviour import behaviour_of
from spindle_cli.analysis.without_data import Unread
from spindle_cli.operators.experts.region import EXPERTS_DIM, SAMPLES_DIM
from spindle_cli.operators.experts.types import ExpertSplit
from spindle_cli.operators.sequence.around import as_they_are, called_on_meta, parameters_beside
from spindle_cli.operators.sequence.recording import NotBySequenceError
from spindle_cli.operators.sequence.region import argument
from spindle_cli.operators.sequence.types import Argument, Result
from spindle_cli.workload.graph import Op, TaskGraph

# Numbers of samples that a layer is tried on; one alone would be broadcast.
_SAMPLES = (2, 3)


class NotByExpertsError(Exception):
    """A layer's experts cannot be shared out; the message says why, for people."""


@dataclass(frozen=True)
class _InLayer:
    """The attributes of an `ExpertSplit` that depend on the layer alone, not on the op around it."""

    arguments: Mapping[Argument, int]
    shared: tuple[Argument, ...]
    results: Mapping[Result, int]


def find_experts(task: TaskGraph, op: Op, modules: Mapping[str, int]) -> ExpertSplit:
    """How devices share out the experts of an op's layer.

    Args:
        modules: dotted names inside the task's module, with the number of experts that each holds.

    Raises:
        NotByExpertsError: they cannot.
    """
    calls = [node for node in op.graph.nodes if node.op == "call_module" and node.target == op.target]
    if len(calls) != 1:
        raise NotByExpertsError("it is called more than once")
    layer = task.root.get_submodule(str(op.target))
    if any(spec.batch_dim is not None and spec.rows_per_sample > 1 for spec in task.specs_of(op)):
        raise NotByExpertsError("it takes several rows of each sample")
    if task.task.batch_size < max(_SAMPLES):
        raise NotByExpertsError(f"its batch has {task.task.batch_size} samples, too few to share out")
    for name in modules:
        for buffer, _ in task.root.get_submodule(name).named_buffers():
            raise NotByExpertsError(f"{name} has a buffer, {buffer}, which is not cut with its parameters")
    inside = {name.removeprefix(f"{op.target}."): count for name, count in modules.items()}
    in_layer = _find_in_layer(task, op, layer, inside)
    if outside := sorted(_parameters_of(layer, str(op.target)) & parameters_beside(task, op, calls[0])):
        raise NotByExpertsError(f"{outside[0]} is used outside of it, too")
    taken, kept = _handed_over(op, calls[0], in_layer)
    return ExpertSplit(
        layer=str(op.target),
        modules=dict(modules),
        arguments=in_layer.arguments,
        shared=in_layer.shared,
        results=in_layer.results,
        taken=taken,
        kept=kept,
    )


def _parameters_of(layer: nn.Module, name: str) -> set[str]:
    return {parameter for parameter, _ in layer.named_parameters(prefix=name, remove_duplicate=False)}


def _find_in_layer(task: TaskGraph, op: Op, layer: nn.Module, inside: Mapping[str, int]) -> _InLayer:
    """Look for experts in a layer; in equal layers once.

    Raises:
        NotByExpertsError: as `find_experts`.
    """
    key: Hashable = (
        "experts",
        behaviour_of(layer),
        repr(task.specs_of(op)),
        str(op.graph),
        tuple(sorted(inside.items())),
    )
    if key not in task.findings:
        try:
            runs = [_run(task, op, layer, inside, samples) for samples in _SAMPLES]
            task.findings[key] = _compared(*runs)
        except (NotByExpertsError, NotBySequenceError) as error:
            task.findings[key] = str(error)
    finding = task.findings[key]
    if isinstance(finding, str):
        raise NotByExpertsError(finding)
    assert isinstance(finding, _InLayer)
    return finding


@dataclass(frozen=True)
class _Run:
    """What a layer was given for so many samples, and what it gave: tensors without data."""

    samples: int
    given: dict[Argument, Tensor]
    results: dict[Result, Tensor]


def _run(task: TaskGraph, op: Op, layer: nn.Module, inside: Mapping[str, int], samples: int) -> _Run:
    called: set[str] = set()
    hooks = [
        layer.get_submodule(name).register_forward_hook(partial(_check_call, name, count, samples, called))
        for name, count in inside.items()
    ]
    try:
        with called_on_meta(task, op, samples) as (args, kwargs), Unread():
            result = layer(*args, **kwargs)
    except (NotByExpertsError, NotBySequenceError):
        raise
    except Exception as error:  # whatever a layer's own code does
        text = str(error).strip().split("\n")[0]
        raise NotByExpertsError(f"it fails on {samples} samples: {type(error).__name__}: {text}") from error
    finally:
        for hook in hooks:
            hook.remove()
    for name in sorted(inside.keys() - called):
        raise NotByExpertsError(f"it does not call {name}")
    given = {place: value for place, value in _listed(args, kwargs) if isinstance(value, Tensor)}
    if any(isinstance(leaf, Tensor) for leaf in _inner(args, kwargs)):
        raise NotByExpertsError("it takes tensors inside of a list")
    return _Run(samples, given, dict(_results(result)))


def _listed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Argument, Any]]:
    yield from enumerate(args)
    yield from kwargs.items()


def _inner(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What lies inside of arguments that are no tensors."""
    return [
        leaf
        for _, value in _listed(args, kwargs)
        if not isinstance(value, Tensor)
        for leaf in pytree.tree_leaves(value)
    ]


def _results(result: Any) -> Iterator[tuple[Result, Tensor]]:
    if isinstance(result, Tensor):
        yield None, result
        return
    if type(result) not in (tuple, list) or not all(isinstance(item, Tensor) for item in result):
        raise NotByExpertsError("it gives something else than tensors")
    yield from enumerate(result)


def _check_call(
    name: str,
    count: int,
    samples: int,
    called: set[str],
    _: nn.Module,
    args: tuple[Any, ...],
    output: Any,
) -> None:
    """Raises NotByExpertsError: the experts take or give something else than [samples, experts, ...]."""
    called.add(name)
    first = args[0] if args else None
    for what, value in (("takes", first), ("gives", output)):
        shape = tuple(value.shape) if isinstance(value, Tensor) else None
        if shape is None or len(shape) <= EXPERTS_DIM or shape[SAMPLES_DIM] != samples or shape[1] != count:
            shown = "no tensor" if shape is None else f"{shape} for {samples} samples"
            raise NotByExpertsError(f"{name} {what} {shown}, not [samples, {count} experts, ...]")
    if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(args[1:])):
        raise NotByExpertsError(f"{name} takes several tensors")


def _compared(few: _Run, many: _Run) -> _InLayer:
    """Which dimensions grow with the samples.

    Raises:
        NotByExpertsError: several do, or none of what the layer gives.
    """
    samples = few.samples, many.samples
    arguments: dict[Argument, int] = {}
    shared: list[Argument] = []
    for place, tensor in few.given.items():
        dim = _samples_dim("takes", tensor, many.given[place], *samples)
        if dim is not None:
            arguments[place] = dim
        elif tensor.requires_grad:
            shared.append(place)
    results: dict[Result, int] = {}
    for result, tensor in few.results.items():
        dim = _samples_dim("gives", tensor, many.results[result], *samples)
        if dim is None:
            raise NotByExpertsError("it gives something that is no sample's")
        results[result] = dim
    if not arguments:
        raise NotByExpertsError("it takes nothing that is a sample's")
    return _InLayer(arguments, tuple(shared), results)


def _samples_dim(what: str, small: Tensor, large: Tensor, few: int, many: int) -> int | None:
    """The dimension that grows with the samples; None: none does."""
    if small.dim() != large.dim():
        raise NotByExpertsError(f"it {what} another number of dimensions for more samples")
    grown = [dim for dim in range(small.dim()) if small.shape[dim] != large.shape[dim]]
    if not grown:
        return None
    if len(grown) > 1 or (small.shape[grown[0]], large.shape[grown[0]]) != (few, many):
        raise NotByExpertsError(f"it {what} {tuple(small.shape)} for {few} samples: not one row for each")
    return grown[0]


def _handed_over(op: Op, call: fx.Node, in_layer: _InLayer) -> tuple[dict[int, int], frozenset[Result]]:
    """Find the arguments of the op that its layer takes, and the results that it hands on, unchanged."""
    taken: dict[int, int] = {}
    kept: frozenset[Result] = frozenset()
    for place, dim in in_layer.arguments.items():
        if isinstance(argument(place, call.args, call.kwargs), fx.Node):
            number, kept = as_they_are(op, call, place, tuple(in_layer.results))
            # Fields come whole to every device.
            if number is not None and number >= len(op.fields):
                taken[number] = dim
    return taken, kept
