"""The MetaGraph as a graph: its validity and order."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Protocol, TypeVar

Node = TypeVar("Node", bound=Hashable)


class GraphNode(Protocol):
    """Anything with a unique name and the names of what it consumes."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...


def check_metagraph(metaops: Sequence[GraphNode]) -> None:
    """Refuse what is not a DAG over uniquely named MetaOps.

    Raises:
        ValueError: a name twice, an unknown or repeated input, or a cycle; names the MetaOps.
    """
    names = [metaop.name for metaop in metaops]
    known = set(names)
    if len(known) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"metaops: the name {twice!r} occurs {names.count(twice)} times; names must be unique"
        )
    for metaop in metaops:
        for name in metaop.inputs:
            if name not in known:
                raise ValueError(
                    f"metaops: {metaop.name!r} consumes {name!r}, which is not a MetaOp of this profile"
                )
        if len(set(metaop.inputs)) < len(metaop.inputs):
            raise ValueError(f"metaops: {metaop.name!r} lists an input twice")
    topological_order(metaops)


def topological_order(metaops: Sequence[GraphNode]) -> tuple[str, ...]:
    """Names of the MetaOps, producers first, otherwise in the given order.

    Raises:
        ValueError: a cycle; names its MetaOps.
    """
    try:
        return producers_first({metaop.name: metaop.inputs for metaop in metaops})
    except CycleError as error:
        cycle: list[str] = error.args[1]
        raise ValueError("metaops: the inputs form a cycle: " + " -> ".join(cycle)) from error


def producers_first(inputs: Mapping[Node, Iterable[Node]]) -> tuple[Node, ...]:
    """Nodes with all their inputs before them; of those that are ready together, in the mapping's order.

    Raises:
        CycleError: there is a cycle, which is the error's second argument.
    """
    sorter: TopologicalSorter[Node] = TopologicalSorter(inputs)
    sorter.prepare()
    place = {node: index for index, node in enumerate(inputs)}
    order: list[Node] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=place.__getitem__)
        order.extend(ready)
        sorter.done(*ready)
    return tuple(order)
