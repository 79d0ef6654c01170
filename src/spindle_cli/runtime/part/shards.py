"""Which parts of its parameters a rank holds under tensor parallelism, each as a leaf of its own.

A parameter that some slice splits is cut into the finest parts that all its slices have in common, wherever
they run; these are also what the program's groups sum. A rank holds every part that one of its slices needs
once, as one leaf that the optimizer sees; a slice that needs several joins them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm

import torch
from torch import nn

from spindle_cli.account.types import ParameterGroup
from spindle_cli.errors import WorkloadError
from spindle_cli.files.tensors import Fragment, fragment_key
from spindle_cli.operators.tensor_parallel import PlanSplits
from spindle_cli.plan.types import Plan
from spindle_cli.workload.graph import ParameterTable, WorkloadGraph


@dataclass(frozen=True)
class Cut:
    """A parameter's parts: `count` of them along dimension `dim` of `size`, equal but for one entry; one part
    is all of it.
    """

    name: str
    dim: int = 0
    size: int = 0
    count: int = 1

    def key(self, index: int) -> str:
        """The name of a part's leaf."""
        if self.count == 1:
            return self.name
        return fragment_key(self.name, Fragment(self.dim, *self.span(index)))

    def span(self, index: int) -> tuple[int, int]:
        """[first, last) of its dimension that a part has; those of more parts nest in those of fewer."""
        return self.size * index // self.count, self.size * (index + 1) // self.count

    def ranges(self, index: int, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """[first, last) of each dimension that a part has of the parameter; `shape`: the part's."""
        first = [self.span(index)[0] if dim == self.dim else 0 for dim in range(len(shape))]
        return tuple((begin, begin + size) for begin, size in zip(first, shape, strict=True))

    def is_by_words(self, degree: int) -> bool:
        """Whether each of `degree` devices has some rows of it."""
        return self.count > 1 and self.dim == 0 and self.count % degree == 0

    def of_member(self, member: int, degree: int) -> range:
        """The parts that a member of a tensor-parallel group of `degree` devices has; (0, 1): all."""
        width = self.count // degree
        return range(member * width, (member + 1) * width)


@dataclass(frozen=True)
class Cuts:
    """How every parameter of a workload is cut, by canonical name."""

    by_name: Mapping[str, Cut]

    @property
    def keys(self) -> tuple[str, ...]:
        """All leaves of all ranks, in the workload's order."""
        return tuple(cut.key(index) for cut in self.by_name.values() for index in range(cut.count))

    def of_leaves(self, groups: Iterable[ParameterGroup]) -> tuple[ParameterGroup, ...]:
        """The groups with the names of leaves in place of those of parameters."""
        return tuple(replace(group, blocks=self._leaves_of(group)) for group in groups)

    def _leaves_of(self, group: ParameterGroup) -> tuple[tuple[str, int], ...]:
        index, count = group.fragment
        cuts = [(self.by_name[name], block) for name, block in group.blocks]
        assert all(cut.count == count for cut, _ in cuts), "groups and leaves are of the same fragments"
        return tuple((cut.key(index), block) for cut, block in cuts)


def find_cuts(plan: Plan, graph: WorkloadGraph, table: ParameterTable, splits: PlanSplits) -> Cuts:
    """The parts of every parameter that a plan asks for.

    Raises:
        WorkloadError: a parameter is split along two dimensions, or into more parts than it has entries.
    """
    cuts = {name: Cut(name) for name in table.parameters}
    for (index, position), split in splits.by_op.items():
        task = graph.by_name[plan.every_slice[index].metaop].task
        for dotted, dim in split.dims.items():
            name = table.names[task, dotted]
            before = cuts[name]
            if before.count > 1 and before.dim != dim:
                raise WorkloadError(
                    f"tp_plans: {name} is split along its dimension {before.dim} by one layer "
                    f"and along {dim} by another ({plan.every_slice[index].label}, op {position})",
                    hint="Layers that share a parameter have to split it alike.",
                )
            size = table.parameters[name].shape[dim]
            count = lcm(before.count, split.degree)
            if count > size:
                raise WorkloadError(
                    f"{name} has {size} words, too few for the {count} parts that slices of this plan share",
                    hint="Plan with one degree of tensor parallelism, or set tp_vocabulary=None.",
                )
            cuts[name] = Cut(name, dim, size, count)
    return Cuts(cuts)


def take_parts(parameter: nn.Parameter, cut: Cut, held: range | set[int]) -> dict[str, nn.Parameter]:
    """The leaves of the parts `held` of a parameter, whose own memory is given up where it is cut."""
    if cut.count == 1:
        return {cut.name: parameter}
    with torch.no_grad():
        leaves = {
            cut.key(index): nn.Parameter(
                parameter.narrow(cut.dim, first, last - first).clone(memory_format=torch.contiguous_format),
                requires_grad=parameter.requires_grad,
            )
            for index in sorted(held)
            for first, last in (cut.span(index),)
        }
        parameter.data = parameter.new_empty(0)
    return leaves
