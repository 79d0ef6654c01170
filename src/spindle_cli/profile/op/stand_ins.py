"""A workload of which only the ops that are timed have real parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from spindle_cli.analysis.analyse import analyse
from spindle_cli.analysis.at_lengths import LengthTracer
from spindle_cli.profile.numeric_check import NumericCheck
from spindle_cli.profile.op.jobs import OpRef
from spindle_cli.training.data.reading import find_lengths
from spindle_cli.training.precision import convert_module, in_dtype, number_format
from spindle_cli.training.sampling import sets_of, turns_of
from spindle_cli.workload.building.attributes import hold_parameter
from spindle_cli.workload.building.load import LoadedWorkload, load_abstract
from spindle_cli.workload.file import naming_the_file
from spindle_cli.workload.graph import TaskGraph, WorkloadGraph
from spindle_cli.workload.settings.types import Looking, TaskLengths


@dataclass(frozen=True)
class Analysed:
    """A loaded workload with its graph; its parameters are on the meta device.

    `check`: what was checked of it by numbers, where that was asked for. `shortest`: tasks whose batches have
    several lengths as they are at the shortest that was seen, where that was looked for.
    """

    loaded: LoadedWorkload
    graph: WorkloadGraph
    check: NumericCheck | None = None
    shortest: dict[str, TaskGraph] = field(default_factory=dict)


def load_analysed(source: str, folder: Path, lengths: Looking | Mapping[str, TaskLengths]) -> Analysed:
    """Load and analyse a workload without its parameters.

    Args:
        folder: that its source is relative to.
        lengths: of batches whose shapes differ; or how to look for them.

    Raises:
        InputError, WorkloadError: as `load`, `find_lengths` and `analyse` do.
    """
    loaded = load_abstract(source, relative_to=folder)
    looks = isinstance(lengths, Looking)
    if isinstance(lengths, Looking):
        loaded.train.loader.require_known([task.name for task in loaded.workload.tasks], source)
        with naming_the_file(source):
            sets_of(turns_of(loaded.train, loaded.workload.tasks))
        lengths = find_lengths(loaded.workload, loaded.train.seed, lengths)
    graph = analyse(loaded.workload, lengths=lengths)
    shortest: dict[str, TaskGraph] = {}
    if looks and lengths:
        tracer = LengthTracer(loaded.workload, graph)
        for name, of_task in lengths.items():
            shortest[name] = tracer.at(name, of_task.shortest).over(graph.tasks[name])
    dtype = number_format(loaded.train)
    if dtype is not None:
        for task in graph.tasks.values():
            convert_module(task.root, None, dtype)
        graph = in_dtype(graph, dtype)
    return Analysed(loaded, graph, shortest=shortest)


def give_parameters(graph: WorkloadGraph, ops: Iterable[OpRef]) -> None:
    """Make the parameters of the named ops real, and buffers that were made of parameters; all others stay on
    the meta device.

    Their values are random at a scale that keeps activations and gradients of order one: times do not depend
    on values, but on some processors they do on numbers too small for the format.
    """
    wanted: dict[int, Tensor] = {}
    for ref in ops:
        task, op = graph.tasks[ref.task], graph.tasks[ref.task].ops[ref.op]
        held: list[Tensor] = [task.root.get_parameter(name) for name in op.parameters]
        held += [buffer for buffer in map(task.root.get_buffer, op.buffers) if buffer.is_meta]
        wanted.update((id(tensor), tensor) for tensor in held)
    made: dict[int, Tensor] = {}
    for task in graph.tasks.values():
        _materialise(task.root, wanted, made)


def _materialise(root: nn.Module, wanted: dict[int, Tensor], made: dict[int, Tensor]) -> None:
    """Put a real tensor wherever a wanted one is, also where it has several names."""
    for module in root.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is None or id(buffer) not in wanted:
                continue
            if id(buffer) not in made:
                made[id(buffer)] = _buffer_values(buffer)
            module._buffers[name] = made[id(buffer)]
        for name, parameter in list(module._parameters.items()):
            if parameter is None or id(parameter) not in wanted:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(_values(name, parameter), parameter.requires_grad)
            hold_parameter(module, name, made[id(parameter)])


def _values(name: str, like: Tensor) -> Tensor:
    if like.dim() < 2:
        # Scales of norms are near one, biases near zero.
        return torch.full(like.shape, 1.0 if name.endswith("weight") else 0.0, dtype=like.dtype)
    deviation = float(like[0].numel() ** -0.5)
    return torch.randn(like.shape, dtype=like.dtype) * deviation


def _buffer_values(like: Tensor) -> Tensor:
    """Return values that are not zero, as what was made of parameters may be divided by."""
    return _values("weight", like) if like.is_floating_point() else torch.zeros(like.shape, dtype=like.dtype)
