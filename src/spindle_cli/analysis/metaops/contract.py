"""Contract chains of equal ops into MetaOps, under short, unique, stable names.

Ops i and j of a task belong together when i's only consumer is j, j takes nothing from other ops but i's
outputs and the values that every op of the run takes alike (a decoder's encoder output), and both are the
same kind of layer on the same input shapes. The first op of a run may carry glue in front of its layer (an
embedding) and the last one glue behind it (a head); the glue between the layers must be the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spindle_cli.analysis.tracing.behaviour import Kinds, nodes_signature
from spindle_cli.workload.graph import Op, TaskGraph, made_of


def component_path(targets: Sequence[str | None]) -> str:
    """The common dotted path of a run of operators, without their numbers: 'vision.blocks' for
    'vision.blocks.3', ...
    """
    if targets[0] is None:
        return "loss"
    paths = [str(target).split(".") for target in targets]
    common = _common_prefix(paths)
    while len(common) > 1 and common[-1].isdigit():
        common = common[:-1]
    return ".".join(common) or paths[0][0]


def _common_prefix(paths: list[list[str]]) -> list[str]:
    prefix: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        prefix.append(parts[0])
    return prefix


def short_names(paths: Sequence[str]) -> list[str]:
    """A short name for each component path: the fewest leading parts that tell it from the others.

    'model.vision.blocks' and 'model.text.blocks' become 'vision' and 'text'. Equal paths get '-2', '-3', ...
    in order.
    """
    split = [path.split(".") for path in paths]
    shared = 0
    distinct = {tuple(parts) for parts in split}
    if len(distinct) > 1:
        longest = min(len(parts) for parts in distinct) - 1
        while shared < longest and len({parts[shared] for parts in distinct}) == 1:
            shared += 1
    short = {parts: _shortest(parts, distinct, shared) for parts in distinct}
    names: list[str] = []
    for parts in split:
        name = short[tuple(parts)]
        count = sum(earlier == parts for earlier in split[: len(names)])
        names.append(name if count == 0 else f"{name}-{count + 1}")
    return _unique(names)


def _shortest(parts: tuple[str, ...], others: set[tuple[str, ...]], shared: int) -> str:
    for length in range(shared + 1, len(parts)):
        head = parts[:length]
        if all(peer == parts or peer[:length] != head for peer in others):
            return ".".join(parts[shared:length])
    return ".".join(parts[shared:])


def _unique(names: list[str]) -> list[str]:
    """Put a number behind names that are taken already."""
    seen: set[str] = set()
    result = []
    for name in names:
        candidate, count = name, 2
        while candidate in seen:
            candidate, count = f"{name}-{count}", count + 1
        seen.add(candidate)
        result.append(candidate)
    return result


@dataclass(frozen=True)
class Run:
    """Consecutive equal ops of a task; `common`: values from outside that every op of it takes."""

    ops: tuple[int, ...]
    common: tuple[str, ...]


@dataclass(frozen=True)
class _Link:
    """Two ops that may belong together; links with equal signatures may follow one another."""

    first: int
    second: int
    signature: tuple[str, ...]
    common: tuple[str, ...]


def find_runs(task: TaskGraph, kinds: Kinds) -> tuple[Run, ...]:
    """The task's ops as runs, every op in one, ordered by first op."""
    links = _links(task, kinds)
    taken: set[int] = set()
    runs: list[Run] = []
    for chain in sorted(_chains(links), key=lambda chain: (-len(chain), chain[0].first)):
        # where two chains share an op, the longer one has it
        ops = [op for op in (chain[0].first, *(link.second for link in chain)) if op not in taken]
        if len(ops) > 1:
            taken.update(ops)
            runs.append(Run(tuple(ops), chain[0].common))
    runs += [Run((op.index,), ()) for op in task.ops if op.index not in taken]
    return tuple(sorted(runs, key=lambda run: run.ops))


def _links(task: TaskGraph, kinds: Kinds) -> dict[int, _Link]:
    """Link of each op to the next of its kind, by first op."""
    consumers: dict[int, set[int]] = {op.index: set() for op in task.ops}
    for op in task.ops:
        for value in op.inputs:
            consumers[task.producer[value]].add(op.index)
    glue = {op.index: _Glue.of(task, op, kinds) for op in task.ops}
    links: dict[int, _Link] = {}
    for op in task.ops:
        if len(consumers[op.index]) == 1:
            link = _link(task, op, task.ops[next(iter(consumers[op.index]))], glue)
            if link is not None:
                links[op.index] = link
    return links


def _link(task: TaskGraph, first: Op, second: Op, glue: dict[int, _Glue]) -> _Link | None:
    before, after = glue[first.index], glue[second.index]
    if (
        before.layer is None
        or (before.layer, before.arguments) != (after.layer, after.arguments)
        or first.coupled != second.coupled
    ):
        return None
    chained = [value for value in second.inputs if task.producer[value] == first.index]
    common = tuple(value for value in second.inputs if value not in chained)
    if not set(common) <= set(first.inputs):
        return None
    shapes = repr([(task.values[v].shape, task.values[v].dtype, task.values[v].batch_dim) for v in chained])
    return _Link(first.index, second.index, (before.post, after.pre, shapes, ",".join(common)), common)


@dataclass(frozen=True)
class _Glue:
    """What surrounds an op's layer. `arguments`: specs of the tensors that the layer itself is given, where
    known.
    """

    layer: str | None
    pre: str
    post: str
    arguments: tuple[object, ...]

    @classmethod
    def of(cls, task: TaskGraph, op: Op, kinds: Kinds) -> _Glue:
        if op.target is None:
            return cls(None, "", "", ())
        nodes = list(op.graph.nodes)
        layer = next(node for node in nodes if node.op == "call_module" and node.target == op.target)
        needed = made_of(layer.all_input_nodes)
        pre = [node for node in nodes if node in needed and node.op != "placeholder"]
        post = [
            node
            for node in nodes
            if node not in needed and node is not layer and node.op not in ("placeholder",)
        ]
        fields = [name for name, node in zip(op.fields, nodes, strict=False) if node in needed]
        return cls(
            kinds.of(task.root.get_submodule(op.target)),
            nodes_signature(pre, task.root, op.target, kinds) + repr(fields),
            nodes_signature(post, task.root, op.target, kinds),
            tuple(layer.meta.get("arguments", ())),
        )


def _chains(links: dict[int, _Link]) -> list[Sequence[_Link]]:
    """Maximal sequences of links that follow one another with equal signatures."""
    continues = {
        link.second: link.first
        for link in links.values()
        if link.second in links and links[link.second].signature == link.signature
    }
    chains: list[Sequence[_Link]] = []
    for op, link in links.items():
        if op in continues:
            continue
        chain: list[_Link] = [link]
        while chain[-1].second in continues:
            chain.append(links[chain[-1].second])
        chains.append(chain)
    return chains
