"""Which parameters ops use under several keys, or in several blocks: tied embeddings and heads, words that
several encoders look up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spindle_cli.operators.tensor_parallel import LayerSplit
from spindle_cli.profile.parameter_bytes import TiedParameters
from spindle_cli.workload.graph import MetaOp, Op, ParameterTable, TaskGraph, WorkloadGraph

# How tensor parallelism splits an op of a task, in the first way of those that are looked at.
SplitOf = Callable[[TaskGraph, Op], LayerSplit | None]


class _Use(NamedTuple):
    """A use of a parameter: the MetaOp and the position in it of an op that uses it, the key and block that
    the op has, and whether tensor parallelism splits the parameter there.
    """

    metaop: str
    position: int
    key: str
    block: int
    is_split: bool


@dataclass(frozen=True)
class Tying:
    """By MetaOp, what its ops are tied to."""

    by_metaop: Mapping[str, tuple[TiedParameters, ...]]

    @classmethod
    def find(cls, graph: WorkloadGraph, split_of: SplitOf, apart: frozenset[str] = frozenset()) -> Tying:
        """Find which parameters of a workload are tied. Parameters that the same ops use in the same way are
        said together, under the first one's name.

        Args:
            apart: canonical names of parameters that are not said together with others.
        """
        table = ParameterTable.of(graph)
        alike: dict[object, list[str]] = {}
        uses = _uses(graph, table, split_of)
        for name, of_name in uses.items():
            if len({(use.key, use.block) for use in of_name}) > 1:
                alone = name if name in apart else None
                alike.setdefault((of_name, table.is_trainable(name), alone), []).append(name)
        by_metaop: dict[str, list[TiedParameters]] = {}
        for names in alike.values():
            for metaop, tied in _tied(names, uses[names[0]], table):
                by_metaop.setdefault(metaop, []).append(tied)
        return cls({metaop: tuple(sorted(tied, key=_order)) for metaop, tied in by_metaop.items()})

    def of(self, metaop: str) -> tuple[TiedParameters, ...]:
        """Return what the ops of a MetaOp are tied to, by op."""
        return self.by_metaop.get(metaop, ())


def _tied(
    names: Sequence[str], uses: Sequence[_Use], table: ParameterTable
) -> Iterator[tuple[str, TiedParameters]]:
    """Yield what each use of some parameters that are used alike is tied to, with its MetaOp; nothing of
    parameters without elements.
    """
    num_bytes = sum(map(table.num_bytes, names))
    keys = tuple(sorted({use.key for use in uses}))
    is_split_by_any = any(use.is_split for use in uses)
    for use in uses if num_bytes else ():
        yield (
            use.metaop,
            TiedParameters(
                op=use.position,
                parameter=names[0],
                num_bytes=num_bytes,
                keys=keys,
                is_trained=table.is_trainable(names[0]),
                is_split=use.is_split,
                is_split_by_any=is_split_by_any,
            ),
        )


def _uses(graph: WorkloadGraph, table: ParameterTable, split_of: SplitOf) -> dict[str, tuple[_Use, ...]]:
    """Return the uses of each parameter, by canonical name: every op that uses it once."""
    uses_by_name: dict[str, dict[_Use, None]] = {}
    for metaop in graph.metaops:
        task = graph.tasks[metaop.task]
        for position, index in enumerate(metaop.ops):
            op = task.ops[index]
            names = {dotted: table.names[metaop.task, dotted] for dotted in op.parameters}
            shared = {dotted: name for dotted, name in names.items() if len(table.users[name]) > 1}
            split = split_of(task, op) if shared else None
            for dotted, name in shared.items():
                is_split = split is not None and dotted in split.dims
                use = _Use(metaop.name, position, *_block(metaop, position), is_split)
                uses_by_name.setdefault(name, {})[use] = None
    return {name: tuple(uses) for name, uses in uses_by_name.items()}


def _block(metaop: MetaOp, position: int) -> tuple[str, int]:
    """Key and number of the block of parameters of one of its ops, as `costs.memory.parameter_block`."""
    key = metaop.name if metaop.parameters is None else metaop.parameters
    number = position if metaop.parameter_blocks is None else metaop.parameter_blocks[position]
    return key, number


def _order(tied: TiedParameters) -> tuple[int, str]:
    return tied.op, tied.parameter
