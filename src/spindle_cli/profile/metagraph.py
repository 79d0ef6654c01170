"""The MetaGraph as a graph: its validity, order and levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import networkx as nx


class GraphNode(Protocol):
    """Anything with a unique name and the names of what it consumes."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...


def metagraph(metaops: Sequence[GraphNode]) -> nx.DiGraph[str]:
    """A directed graph from producers to consumers; nodes in the given order."""
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
    graph = metagraph(metaops)
    if not nx.is_directed_acyclic_graph(graph):
        cycle = [edge[0] for edge in nx.find_cycle(graph)]
        raise ValueError("metaops: the inputs form a cycle: " + " -> ".join([*cycle, cycle[0]]))


def metalevels(metaops: Sequence[GraphNode]) -> dict[str, int]:
    """MetaLevel of each MetaOp: the length of the longest path from a source."""
    graph = metagraph(metaops)
    levels: dict[str, int] = {}
    for name in nx.lexicographical_topological_sort(graph):
        levels[name] = max((levels[producer] + 1 for producer in graph.predecessors(name)), default=0)
    return levels
