"""The MetaGraph as a graph: its validity and order."""

from __future__ import annotations

import graphlib
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import shown
from spindle_cli.profile.points import MAX_OPS

Node = TypeVar("Node", bound=Hashable)


class CycleError(ValueError):
    """A graph that should have none has a cycle; `cycle`: its nodes, the first one again at the end."""

    def __init__(self, cycle: Sequence[Hashable]) -> None:
        super().__init__(" -> ".join(map(str, cycle)))
        self.cycle = tuple(cycle)


class GraphNode(Protocol):
    """Anything with a unique name and the names of what it consumes."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...


class NodeOfOps(GraphNode, Protocol):
    """A node of the graph, with how many ops it stands for."""

    @property
    def num_ops(self) -> int: ...


def check_metagraph(metaops: Sequence[NodeOfOps]) -> None:
    """Refuse what is not a DAG over uniquely named MetaOps, or has more ops than can be planned for.

    Raises:
        ValueError: a name twice, an unknown or repeated input, a cycle, or too many ops; names the MetaOps.
    """
    names = [metaop.name for metaop in metaops]
    unique_names = set(names)
    if len(unique_names) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"metaops: the name {twice!r} occurs {names.count(twice)} times; names must be unique"
        )
    for metaop in metaops:
        for name in metaop.inputs:
            if name not in unique_names:
                raise ValueError(
                    f"metaops: {metaop.name!r} consumes {name!r}, which is not a MetaOp of this profile"
                )
        if len(set(metaop.inputs)) < len(metaop.inputs):
            raise ValueError(f"metaops: {metaop.name!r} lists an input twice")
    count = sum(metaop.num_ops for metaop in metaops)
    if count > MAX_OPS:
        most = max(metaops, key=lambda metaop: metaop.num_ops)
        raise ValueError(
            f"metaops: {count:,} ops together, {most.num_ops:,} of them of {most.name!r}; at most "
            f"{MAX_OPS:,} can be planned for: make operators of larger parts of the model"
        )
    topological_order(metaops)


class BatchedNode(GraphNode, Protocol):
    """A node of the graph, with how many samples it works on."""

    @property
    def batch_size(self) -> int: ...


def require_equal_batches(metaops: Sequence[BatchedNode], where: Path) -> None:
    """Refuse a MetaOp that works on other samples than those that it is handed.

    Args:
        where: the file, for the message.

    Raises:
        InputError: there is one; names it and its input.
    """
    batches = {metaop.name: metaop.batch_size for metaop in metaops}
    for metaop in metaops:
        for name in metaop.inputs:
            if batches[name] != metaop.batch_size:
                raise InputError(
                    f"{where}: metaops: {shown(metaop.name)} has a batch_size of {metaop.batch_size}, and "
                    f"its input {shown(name)} one of {batches[name]}",
                    hint="What consumes another's output works on the same samples: profile again.",
                )


def topological_order(metaops: Collection[GraphNode]) -> tuple[str, ...]:
    """Names of the MetaOps, producers first, otherwise in the given order.

    Raises:
        ValueError: a cycle; names its MetaOps.
    """
    try:
        return producers_first({metaop.name: metaop.inputs for metaop in metaops})
    except CycleError as error:
        raise ValueError(f"metaops: the inputs form a cycle: {error}") from error


def producers_first(inputs: Mapping[Node, Iterable[Node]]) -> tuple[Node, ...]:
    """Nodes with all their inputs before them; of those that are ready together, in the mapping's order.

    Raises:
        CycleError: there is a cycle.
    """
    place = {node: index for index, node in enumerate(inputs)}
    sorter = graphlib.TopologicalSorter(inputs)
    order: list[Node] = []
    try:
        sorter.prepare()
    except graphlib.CycleError:
        cycle = _a_cycle(inputs)
        raise CycleError(cycle) from None
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=place.__getitem__)
        order += ready
        sorter.done(*ready)
    return tuple(order)


def _a_cycle(inputs: Mapping[Node, Iterable[Node]]) -> list[Node]:
    """Return the nodes of a cycle, the first one again at the end."""
    import networkx as nx  # here, as it takes longer to import than most files to read

    graph: nx.DiGraph[Node] = nx.DiGraph()
    graph.add_nodes_from(inputs)
    graph.add_edges_from((producer, node) for node, producers in inputs.items() for producer in producers)
    edges = nx.find_cycle(graph)
    return [*(edge[0] for edge in edges), edges[0][0]]
