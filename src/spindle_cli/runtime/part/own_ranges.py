"""Which ranges of shared-out parameters a rank keeps, known before any of them is there.

Such a leaf has its shape and no memory; what the rank has of it is beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from spindle_cli.account.types import ParameterGroup
from spindle_cli.runtime.memory.given_up import give_up_memory, take_back_memory
from spindle_cli.runtime.part.shards import Cut, Cuts
from spindle_cli.runtime.update.owned_ranges import FlatLayout
from spindle_cli.training.precision import dtype_in
from spindle_cli.workload.building.memory import swap
from spindle_cli.workload.graph import ParameterTable
from spindle_cli.workload.initial.types import OwnPart


@dataclass(frozen=True)
class _Leaf:
    """A part of a parameter, as a rank that holds it will have it."""

    cut: Cut
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()

    def part(self, elements: tuple[int, int] | None) -> OwnPart:
        """Return the part of the parameter that these elements of the leaf are."""
        ranges = None if self.cut.count == 1 else self.cut.ranges(self.index, self.shape)
        return OwnPart(self.cut.key(self.index), ranges, elements)


def own_parts(
    groups: Collection[ParameterGroup],
    table: ParameterTable,
    cuts: Cuts,
    rank: int,
    stepped_whole: Collection[str],
    dtype: torch.dtype | None,
) -> dict[int, tuple[OwnPart, ...]]:
    """By id, what a rank keeps of each parameter of which it keeps less than it holds.

    Args:
        groups: of all programs.
        stepped_whole: canonical names of what every rank that holds it steps.
        dtype: that floating-point parameters will have; None: their own.
    """
    leaves = {leaf.cut.key(leaf.index): leaf for leaf in _leaves(table, cuts, dtype)}
    held: dict[str, dict[str, tuple[int, int] | None]] = {}
    shared: set[str] = set()
    for group in cuts.of_leaves(groups):
        if rank not in group.devices:
            continue
        keys = [key for key, _ in group.blocks]
        is_shared = len(group.devices) > 1 and group.sharding.is_fetched
        ranged = [key for key in keys if is_shared and leaves[key].cut.name not in stepped_whole]
        elements = _owned({key: leaves[key] for key in ranged}, group, rank)
        shared.update(leaves[key].cut.name for key in ranged)
        for key in keys:
            held.setdefault(leaves[key].cut.name, {})[key] = elements.get(key)
    return {
        id(table.parameters[name]): tuple(
            leaves[key].part(held[name][key]) for key in sorted(held[name], key=lambda key: leaves[key].index)
        )
        for name in sorted(shared)
    }


def _leaves(table: ParameterTable, cuts: Cuts, dtype: torch.dtype | None) -> Iterator[_Leaf]:
    for name, cut in cuts.by_name.items():
        parameter = table.parameters[name]
        for index in range(cut.count):
            shape = list(parameter.shape)
            if cut.count > 1:
                first, last = cut.span(index)
                shape[cut.dim] = last - first
            yield _Leaf(cut, index, tuple(shape), dtype_in(parameter.dtype, dtype))


def _owned(leaves: Mapping[str, _Leaf], group: ParameterGroup, rank: int) -> dict[str, tuple[int, int]]:
    """By key, the elements that a rank keeps of leaves that lie in buckets together, one of each dtype."""
    replica_group = group.in_replica_group(rank)
    elements = dict.fromkeys(leaves, (0, 0))
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves.values()):
        sizes = {key: leaf.num_elements for key, leaf in leaves.items() if leaf.dtype == dtype}
        layout = FlatLayout.of(sizes, dtype.itemsize, len(replica_group.devices), replica_group.weights)
        for key, first, last in layout.owned(replica_group.devices.index(rank)):
            elements[key] = first, last
    return elements


def leaf_without_memory(parameter: nn.Parameter, part: OwnPart, place: torch.Tensor) -> nn.Parameter:
    """The leaf of a part: the parameter itself, where the part is of all of it, else one beside it.

    Args:
        parameter: on the meta device.
        place: any tensor on the leaf's device with its dtype.
    """
    shape = part.box_in(parameter.detach()).shape
    empty = torch.empty(shape, dtype=place.dtype, device=place.device)
    give_up_memory(empty)
    leaf = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    if part.ranges is None:
        leaf.__dict__.update(parameter.__dict__)
        swap(parameter, leaf)
        return parameter
    return leaf


@contextmanager
def with_memory(leaves: Collection[nn.Parameter]) -> Iterator[None]:
    """Inside, leaves without memory have some, with zeros."""
    for leaf in leaves:
        take_back_memory(leaf.detach())
        leaf.detach().zero_()
    try:
        yield
    finally:
        for leaf in leaves:
            give_up_memory(leaf.detach())
