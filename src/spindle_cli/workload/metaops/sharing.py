"""Which ops, of whatever task, use the same parameters: the key and the block of each op of a MetaOp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spindle_cli.workload.graph import Op, TaskGraph
from spindle_cli.workload.metaops.naming import _unique

Block = frozenset[int]  # ids of the parameters that one op's layer holds


@dataclass(frozen=True)
class SharedBlocks:
    """A MetaOp's `parameters` key and `parameter_blocks` (None: op k uses block k)."""

    key: str | None
    blocks: tuple[int, ...] | None


def find_sharing(runs: Sequence[tuple[TaskGraph, Sequence[int], str]]) -> list[SharedBlocks]:
    """Keys and blocks of all runs of a workload.

    Args:
        runs: (task, its ops' indices, component path) in the workload's order.

    Runs that have a block in common get one key, named after the first of them; its blocks are numbered as
    they first occur.
    """
    blocks = [[_block(task, task.ops[op]) for op in ops] for task, ops, _ in runs]
    groups = _connected(blocks)
    first_of: dict[int, int] = {}
    for position, group in enumerate(groups):
        if group is not None:
            first_of.setdefault(group, position)
    names = _unique([runs[position][2] for position in first_of.values()])
    keys = dict(zip(first_of, names, strict=True))
    numbers: dict[int, dict[Block, int]] = {group: {} for group in first_of}
    result: list[SharedBlocks] = []
    for group, used in zip(groups, blocks, strict=True):
        if group is None:
            result.append(SharedBlocks(None, None))
            continue
        known = numbers[group]
        found = tuple(known.setdefault(block, len(known)) for block in used)
        result.append(SharedBlocks(keys[group], None if found == tuple(range(len(found))) else found))
    return result


def _block(task: TaskGraph, op: Op) -> Block:
    """The layer's parameters; of an op whose layer has none, those of its glue."""
    names = op.layer_parameters or op.parameters
    return frozenset(id(task.root.get_parameter(name)) for name in names)


def _connected(blocks: list[list[Block]]) -> list[int | None]:
    """Number of the group that each run belongs to: runs with a block in common, if only through others."""
    parent = list(range(len(blocks)))

    def find(item: int) -> int:
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    holder: dict[Block, int] = {}
    for position, used in enumerate(blocks):
        for block in used:
            if block:
                parent[find(position)] = find(holder.setdefault(block, position))
    return [find(position) if any(used) else None for position, used in enumerate(blocks)]
