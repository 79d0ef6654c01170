"""Which ops, of whatever task, use the same parameters: the key and the block of each op of a MetaOp; and
which tensors each op of a task uses, so that its devices have them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx, nn

from spindle_cli.analysis.metaops.contract import _unique
from spindle_cli.workload.graph import Op, TaskGraph

Block = frozenset[int]  # ids of the parameters that one op's layer holds


@dataclass(frozen=True)
class SharedBlocks:
    """A MetaOp's `parameters` key and `parameter_blocks` (None: op k uses block k)."""

    key: str | None
    blocks: tuple[int, ...] | None


def find_sharing(runs: Sequence[tuple[TaskGraph, Sequence[int], str]]) -> list[SharedBlocks]:
    """Find which runs of a workload share parameters: the key and the blocks of each.

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
        block_numbers = numbers[group]
        numbered = tuple(block_numbers.setdefault(block, len(block_numbers)) for block in used)
        result.append(
            SharedBlocks(keys[group], None if numbered == tuple(range(len(numbered))) else numbered)
        )
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


@dataclass(frozen=True)
class AtHand:
    """What the devices of each of a task's ops have of what training may change, as training needs it.

    Attributes:
        root: module that the trace's names are relative to.
        held: by op, the ids of the parameters and buffers that it takes.
        still: of buffers that no device changes, so that all have them as they are built.
        ends: the loss, and what is returned beside it: computed with the last op, if they belong to none.
    """

    root: nn.Module
    held: tuple[frozenset[int], ...]
    still: frozenset[int]
    ends: tuple[fx.Node, ...]

    @classmethod
    def of(cls, trained: TaskGraph, root: nn.Module, ends: Iterable[fx.Node]) -> AtHand:
        """Find what ops have at hand in a trace over the modules of `root`; `trained`: the same task as it is
        trained, maybe of another build.
        """
        held = tuple(frozenset(id(tensor) for _, tensor in tensors_of(root, op)) for op in trained.ops)
        return cls(root, held, still_buffers(trained, root), tuple(ends))

    def moved(
        self, graph: fx.Graph, homes: Mapping[fx.Node, int], reached: Mapping[fx.Node, set[int]]
    ) -> dict[fx.Node, int]:
        """Find nodes that are computed wherever they are used, and for which some of these ops lack tensors,
        with the op that is to compute each for all: the first of them that has all, or else (training may
        draw there, and so compute its users there) of those whose operators it reaches.

        `homes`: the ops of the other nodes, glue included, as a node is used where its users are.
        """
        used: dict[fx.Node, set[int]] = {node: {len(self.held) - 1} for node in self.ends}
        moved: dict[fx.Node, int] = {}
        for node in reversed(graph.nodes):
            if node in homes or node.op in ("placeholder", "get_attr", "output"):
                continue
            ops = used.setdefault(node, set())
            for user in node.users:
                ops |= {homes[user]} if user in homes else used.get(user, set())
            taken = frozenset(map(id, self._taken(node))) - self.still
            having, further = (
                [op for op in some if op >= len(self.held) or taken <= self.held[op]]
                for some in (ops, reached[node])
            )
            if len(having) < len(ops):
                moved[node] = min(having or further or ops)
        return moved

    def _taken(self, node: fx.Node) -> Iterable[Tensor]:
        if node.op == "call_module":
            module = self.root.get_submodule(str(node.target))
            yield from module.parameters()
            yield from module.buffers()
        for candidate in (node, *node.all_input_nodes):
            if candidate.op == "get_attr":
                value, owner = (
                    _tensor(self.root, str(candidate.target)),
                    str(candidate.target).rpartition(".")[0],
                )
                buffers = self.root.get_submodule(owner)._buffers.values()
                # Tensors that forward has made of numbers are wherever they are needed.
                if isinstance(value, nn.Parameter) or any(value is buffer for buffer in buffers):
                    yield value


def still_buffers(trained: TaskGraph, root: nn.Module) -> frozenset[int]:
    """The ids of the buffers of `root` that no forward pass in training changes: those of no module that ops
    call as it is. Between such modules none can be changed.
    """
    called = {
        str(node.target)
        for op in trained.ops
        for graph in op.graphs
        for node in graph.nodes
        if node.op == "call_module"
    }
    changed = {id(buffer) for name in called for buffer in root.get_submodule(name).buffers()}
    return frozenset(id(buffer) for buffer in root.buffers() if id(buffer) not in changed)


def tensors_of(root: nn.Module, op: Op) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of an op, of this build or of another one, in the modules of `root`."""
    for name in (*op.parameters, *op.buffers):
        yield name, _tensor(root, name)


def _tensor(root: nn.Module, name: str) -> Tensor:
    owner, _, attribute = name.rpartition(".")
    tensor: Tensor = getattr(root.get_submodule(owner), attribute)
    return tensor
