"""Heads over a large vocabulary, and the embeddings over the same words, that the devices of a
tensor-parallel group share out: found in an op's graph by what is computed, whatever it is called.

A head is a projection onto the words whose logits go into cross entropies (and sums of exponentials, as for
z-losses) alone. What lies between may change their numbers one by one, and the order and number of rows,
but nothing may look at several words at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import fx, nn

from spindle_cli.operators.heads.logits_walk import Copies, Edit, Edits, LogitsWalk, NotByWordsError
from spindle_cli.operators.heads.projections import Lookup, Projection, Use, uses_of_words
from spindle_cli.operators.heads.region import shapes_of
from spindle_cli.operators.heads.vocabulary_part import VocabularyPart
from spindle_cli.operators.tensor_group import TensorGroup
from spindle_cli.workload.graph import Op, TaskGraph


@dataclass(frozen=True)
class VocabularyShard:
    """The part of an op's vocabulary that one device of a group has.

    Attributes:
        names: dotted, of the parameters that are cut by words.
        part: which words are its own.
    """

    names: frozenset[str]
    part: VocabularyPart

    def edits(self, module: fx.GraphModule, values: Mapping[fx.Node, Any], *, gathers: bool = False) -> Edits:
        """What is made anew of an op's graph for this device.

        Args:
            values: what its nodes give for the whole vocabulary, as tensors without data.
            gathers: logits that are used as a whole are gathered, for who needs no gradients.

        Raises:
            NotByWordsError: without `gathers`: logits are used as a whole.
        """
        held = {id(parameter) for name, parameter in _parameters(module) if name in self.names}
        uses = [use for use in uses_of_words(module.graph, module) if _is_held(use, module, held)]
        edits: dict[fx.Node, Edit] = {
            use.node: _lookup_edit(use, self.part) for use in uses if isinstance(use, Lookup)
        }
        for heads in _by_words(uses):
            try:
                edits.update(LogitsWalk(module.graph, module, values, heads, self.part).edits)
            except NotByWordsError:
                if not gathers:
                    raise
                edits.update({head.node: _gathering_edit(head, self.part) for head in heads})
        return edits

    def edits_for_evaluation(self, task: TaskGraph, op: Op, module: fx.GraphModule, rows: int) -> Edits:
        """Return the edits of an op that runs on `rows` samples without gradients: logits that are used as a
        whole are gathered.

        Args:
            module: as `share_module` gives it, with its parameters as they are when nothing is cut.
        """
        return self.edits(module, values_of(task, op, module, rows), gathers=True)


@dataclass(frozen=True)
class VocabularySplit:
    """The parameters of an op that can be split by words.

    Attributes:
        names: dotted, of each parameter all that it has.
        fewest: words of the smallest vocabulary among them.
        why_not: of the heads that are large enough but cannot be cut, why.
    """

    names: frozenset[str] = frozenset()
    fewest: int = 0
    why_not: tuple[str, ...] = ()


def find_vocabulary_split(task: TaskGraph, op: Op, smallest: int) -> VocabularySplit:
    """What of an op can be cut by words: heads over `smallest` of them or more, and embeddings over the same
    vocabulary as the heads of the task.
    """
    module = task.share_module(op)
    uses = list(uses_of_words(module.graph, module))
    if not any(use.words >= smallest for use in uses):
        return VocabularySplit()
    heads, why_not = _find_heads(task, smallest)
    reported = why_not if op.is_loss else ()
    lookups = _lookups_like(heads, uses, task.root)
    split_uses = used_alone([*heads, *lookups] if op.is_loss else lookups, module)
    if not split_uses:
        return VocabularySplit(why_not=reported)
    held = {id(module.get_parameter(name)) for use in split_uses for name in use.parameters}
    names = frozenset(name for name, parameter in _parameters(task.root) if id(parameter) in held)
    return VocabularySplit(names, min(use.words for use in split_uses), reported)


def _lookups_like(heads: Sequence[Projection], uses: Iterable[Use], root: nn.Module) -> list[Lookup]:
    """The lookups in a vocabulary as large as that of a head, or in a head's own weight."""
    sizes = {head.words for head in heads}
    weights = {id(root.get_parameter(head.weight)) for head in heads}
    lookups = [use for use in uses if isinstance(use, Lookup)]
    return [use for use in lookups if use.words in sizes or id(root.get_parameter(use.weight)) in weights]


_Heads = tuple[tuple[Projection, ...], tuple[str, ...]]


def _find_heads(task: TaskGraph, smallest: int) -> _Heads:
    """A task's heads that can be cut, and of the others why they cannot; looked for once."""
    key = "heads", task.ops[-1].graph, task.task.batch_size, smallest
    if key not in task.findings:
        task.findings[key] = _heads_of(task, smallest)
    heads: _Heads = task.findings[key]
    return heads


def _heads_of(task: TaskGraph, smallest: int) -> _Heads:
    op = task.ops[-1]
    module = task.share_module(op)
    wide = [
        use
        for use in uses_of_words(module.graph, module)
        if isinstance(use, Projection) and use.words >= smallest
    ]
    if not wide or op.coupled or op.talks:
        return (), ()
    values = values_of(task, op, module, task.task.batch_size)
    nobody = VocabularyPart(1, TensorGroup((0,), 0, torch.device("cpu")))
    split_heads: list[Projection] = []
    why_not: list[str] = []
    for heads in _by_words(wide):
        try:
            LogitsWalk(module.graph, module, values, heads, nobody)
            split_heads += heads
        except NotByWordsError as error:
            why_not.append(f"{heads[0].weight} over {heads[0].words:,} words: {error}")
    return tuple(split_heads), tuple(why_not)


def values_of(task: TaskGraph, op: Op, module: fx.GraphModule, rows: int) -> dict[fx.Node, Any]:
    """What the nodes of an op's graph give for `rows` samples, as tensors without data.

    Args:
        module: as `share_module` gives it.
    """
    counts = None if op.shares is None else op.shares.num_counts
    return shapes_of(module, task.specs_of(op), rows, counts)


def with_edits(module: fx.GraphModule, edits: Edits) -> fx.GraphModule:
    """Copy an op with some of its nodes made anew."""
    if not edits:
        return module
    graph = fx.Graph()
    copies: Copies = {}
    for node in module.graph.nodes:
        copies[node] = copied(graph, node, copies, edits)
    return fx.GraphModule(module, graph)


def copied(graph: fx.Graph, node: fx.Node, copies: Copies, edits: Edits) -> fx.Node:
    """A node's counterpart in another graph."""
    if node in edits:
        return edits[node](graph, node, copies)
    return graph.node_copy(node, copies.__getitem__)


def used_by_words(module: fx.GraphModule) -> Iterator[str]:
    """Yield the dotted names of the parameters that an op uses by words, and in no other way."""
    for use in used_alone(uses_of_words(module.graph, module), module):
        yield from use.parameters


def used_alone(uses: Iterable[Use], module: fx.GraphModule) -> list[Use]:
    """Keep the uses whose parameters the op uses in no other way."""
    alone = list(uses)
    while True:
        use_nodes = {use.node for use in alone}
        others = _held_by_others(module, use_nodes)
        left = [
            use
            for use in alone
            if not any(id(module.get_parameter(name)) in others for name in use.parameters)
        ]
        if len(left) == len(alone):
            return alone
        alone = left


def _held_by_others(module: fx.GraphModule, use_nodes: Collection[fx.Node]) -> set[int]:
    """The ids of parameters used by nodes other than `use_nodes` and those that are made for these alone."""
    held_ids: set[int] = set()
    for node in module.graph.nodes:
        if node in use_nodes or node.op not in ("call_module", "get_attr") or _is_for(node, use_nodes):
            continue
        owner, _, last = str(node.target).rpartition(".")
        held = getattr(module.get_submodule(owner), last)
        parameters: Iterable[Any] = held.parameters() if isinstance(held, nn.Module) else (held,)
        held_ids.update(id(parameter) for parameter in parameters)
    return held_ids


def _is_for(node: fx.Node, use_nodes: Collection[fx.Node]) -> bool:
    """Whether all that takes a parameter is known; a transpose of it may lie between."""
    if node.op == "call_module":
        return False
    return all(
        user in use_nodes or (user.users and user.users.keys() <= set(use_nodes)) for user in node.users
    )


def _parameters(root: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return root.named_parameters(remove_duplicate=False)


def _is_held(use: Use, module: nn.Module, held: Collection[int]) -> bool:
    return id(module.get_parameter(use.weight)) in held


def _by_words(uses: Iterable[Use]) -> list[list[Projection]]:
    heads = [use for use in uses if isinstance(use, Projection)]
    return [list(alike) for _, alike in groupby(sorted(heads, key=_words), _words)]


def _words(head: Projection) -> int:
    return head.words


def _lookup_edit(lookup: Lookup, part: VocabularyPart) -> Edit:
    """Make an embedding's call anew, so that it takes its rows from the devices that have them."""

    def edit(graph: fx.Graph, _: fx.Node, copies: Copies) -> fx.Node:
        weight = graph.get_attr(lookup.weight)
        return graph.call_function(part.lookup, (copies[lookup.ids], weight, lookup.words, lookup.padding))

    return edit


def _gathering_edit(head: Projection, part: VocabularyPart) -> Edit:
    """Make a projection anew that gives the logits of all devices, without gradients."""

    def edit(graph: fx.Graph, node: fx.Node, copies: Copies) -> fx.Node:
        logits = graph.node_copy(node, copies.__getitem__)
        return graph.call_function(part.whole, (logits, head.words))

    return edit
