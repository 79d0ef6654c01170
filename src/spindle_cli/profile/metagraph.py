"""The MetaGraph as a graph: its validity, order and levels."""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import networkx as nx


class GraphNode(Protocol):
    """Anything with a unique name and the names of what it consumes."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...


def metagraph(metaops: Sequence[GraphNode]) -> nx.DiGraph[str]:
    """A directed graph from producers to consumers; nodes in the given order."""
    import networkx as nx  # here, as it takes longer to import than most plans to check

    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(metaop.name for metaop in metaops)
    graph.add_edges_from((producer, metaop.name) for metaop in metaops for producer in metaop.inputs)
    return graph


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
    sorter: TopologicalSorter[str] = TopologicalSorter({metaop.name: metaop.inputs for metaop in metaops})
    try:
        sorter.prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        raise ValueError("metaops: the inputs form a cycle: " + " -> ".join(cycle)) from error
    place = {metaop.name: index for index, metaop in enumerate(metaops)}
    order: list[str] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=place.__getitem__)
        order.extend(ready)
        sorter.done(*ready)
    return tuple(order)


def metalevels(metaops: Sequence[GraphNode]) -> dict[str, int]:
    """MetaLevel of each MetaOp: the length of the longest path from a source."""
    inputs = {metaop.name: metaop.inputs for metaop in metaops}
    levels: dict[str, int] = {}
    for name in topological_order(metaops):
        levels[name] = max((levels[producer] + 1 for producer in inputs[name]), default=0)
    return levels
