"""Follows a head's logits through an op's graph, as far as the losses that they go into."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from spindle_cli.analysis.losses.counts import LossCall, loss_call
from spindle_cli.operators.heads.projections import Projection
from spindle_cli.operators.heads.vocabulary_part import VocabularyPart

Copies = dict[fx.Node, fx.Node]
# Makes a node's counterpart in another graph.
Edit = Callable[[fx.Graph, fx.Node, Copies], fx.Node]
Edits = Mapping[fx.Node, Edit]

_ONE_BY_ONE = {
    *("float", "double", "half", "bfloat16", "to", "contiguous", "clone", "neg", "tanh", "mul", "div"),
    *("add", "sub", "truediv", "multiply", "divide"),
}
_FUNCTIONS = {
    operator.getitem: "getitem",
    operator.mul: "mul",
    operator.truediv: "div",
    operator.add: "add",
    operator.sub: "sub",
    operator.neg: "neg",
    **{
        getattr(torch, name): name
        for name in (
            *("tanh", "mul", "div", "add", "sub", "neg", "clone", "flatten", "reshape", "transpose"),
            *("permute", "logsumexp"),
        )
    },
}


class NotByWordsError(Exception):
    """Logits cannot be computed word by word; the message says why, for people."""


class LogitsWalk:
    """Follows the logits of heads over the same words through a graph.

    Attributes:
        dims: of every node that has an entry for each word, along which dimension.
        edits: of the nodes that have to be made anew where a device has some words alone.
    """

    def __init__(
        self,
        graph: fx.Graph,
        root: nn.Module,
        values: Mapping[fx.Node, Any],
        heads: Iterable[Projection],
        part: VocabularyPart,
    ) -> None:
        """Follow them.

        Args:
            values: what the nodes give, as tensors without data.
            part: of the device that the edits are for.

        Raises:
            NotByWordsError: something needs the logits of several words at once.
        """
        self._root, self._values, self._part = root, values, part
        self.dims: dict[fx.Node, int] = {}
        self.edits: dict[fx.Node, Edit] = {}
        self._shapes: dict[fx.Node, tuple[int, int]] = {}  # the words' dimension, of how many
        self._losses = 0
        heads_by_node = {head.node: head for head in heads}
        self._words = next(iter(heads_by_node.values())).words
        for node in graph.nodes:
            if node in heads_by_node:
                self.dims[node] = _ndim(values[node]) - 1
                self.edits[node] = _with_entered([heads_by_node[node].hidden], self._part)
            elif any(source in self.dims or source in self._shapes for source in node.all_input_nodes):
                self._follow(node)
        if self._losses == 0:
            raise NotByWordsError("its logits go into no cross entropy")

    def _follow(self, node: fx.Node) -> None:
        if node.op == "output":
            raise NotByWordsError("its logits are handed on")
        if self._asks(node):
            return
        loss = loss_call(node, self._root)
        if loss is not None:
            self._into_loss(node, loss)
            return
        target: Any = node.target
        name = target if node.op == "call_method" else _FUNCTIONS.get(target, "")
        source = node.args[0] if node.args else None
        rule = _RULES.get(str(name), _one_by_one if name in _ONE_BY_ONE else None)
        if name == "logsumexp" and isinstance(source, fx.Node):
            self._into_logsumexp(node, source)
        elif rule is None or node.op == "call_module":
            raise NotByWordsError(f"{_called(node, self._root)} takes its logits, not word by word")
        else:
            rule(self, node)

    def _asks(self, node: fx.Node) -> bool:
        """Whether it asks for a size, but not for the number of words, or for the kind of numbers."""
        arguments: tuple[Any, ...] = node.args or (None,)
        source, *more = arguments
        if not isinstance(source, fx.Node):
            return False
        place = self._shapes.get(source) or (self.dims.get(source, 0), _ndim(self._values[source]))
        if source not in self._shapes:
            if node.target is getattr and more[0] in ("dtype", "device", "ndim"):
                return True
            if (node.target is getattr and more == ["shape"]) or (node.target == "size" and not more):
                self._shapes[node] = place
                return True
            if node.target != "size":
                return False
        elif node.target is not operator.getitem:
            raise NotByWordsError(f"{node.name!r} takes the shape of its logits")
        if not isinstance(more[0], int) or more[0] % place[1] == place[0]:
            raise NotByWordsError(f"{node.name!r} takes the number of its words")
        return True

    def _into_loss(self, node: fx.Node, loss: LossCall) -> None:
        given = dict(loss.arguments)
        logits, target = given.pop("input"), given.pop("target", None)
        if loss.function is not functional.cross_entropy:
            raise NotByWordsError(f"{loss.name} takes its logits; only cross_entropy is split")
        if given.get("weight") is not None:
            raise NotByWordsError("its cross entropy has weights of classes")
        if not isinstance(target, fx.Node) or target in self.dims:
            raise NotByWordsError("its labels are computed from its logits")
        if self._values[target].is_floating_point():
            raise NotByWordsError("its labels are probabilities")
        if self.dims[logits] != min(1, _ndim(self._values[logits]) - 1):
            raise NotByWordsError("its words do not lie where the cross entropy has classes")
        part, words, reduction = self._part, self._words, loss.reduction
        kept = (given["ignore_index"], given["label_smoothing"])
        if not all(isinstance(item, int | float) for item in kept):
            raise NotByWordsError("a setting of its cross entropy is computed")

        def edit(graph: fx.Graph, _: fx.Node, copies: Copies) -> fx.Node:
            return graph.call_function(
                part.cross_entropy, (copies[logits], copies[target], words, *kept, reduction)
            )

        self.edits[node] = edit
        self._losses += 1

    def _into_logsumexp(self, node: fx.Node, source: fx.Node) -> None:
        given: dict[str, Any] = {
            **dict(zip(("input", "dim", "keepdim"), node.args, strict=False)),
            **node.kwargs,
        }
        dim, keepdim, part = given.get("dim"), bool(given.get("keepdim", False)), self._part
        ndim = _ndim(self._values[source])
        if not isinstance(dim, int) or dim % ndim != self.dims.get(source):
            raise NotByWordsError("a logsumexp of its logits is not over the words alone")

        def edit(graph: fx.Graph, _: fx.Node, copies: Copies) -> fx.Node:
            return graph.call_function(part.logsumexp, (copies[source], dim, keepdim))

        self.edits[node] = edit

    def _source(self, node: fx.Node) -> fx.Node:
        """The logits among the arguments of a call."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or source not in self.dims:
            raise NotByWordsError(f"{node.name!r} takes its logits beside something else")
        return source

    # What follows: one rule for each kind of call that logits may pass through.

    def one_by_one(self, node: fx.Node) -> None:
        """Follow a call on single entries: other tensors have the same words, or one entry for all."""
        shape, word_dims = self._values[node].shape, set()
        scalars: list[fx.Node] = []
        for source in node.all_input_nodes:
            value = self._values[source]
            if source in self.dims and value.shape == shape:
                word_dims.add(self.dims[source])
            elif isinstance(value, Tensor):
                scalars.append(source)
        if len(word_dims) != 1 or any(_ndim(self._values[source]) for source in scalars):
            raise NotByWordsError(f"{node.name!r} joins its logits with something of another shape")
        self.dims[node] = word_dims.pop()
        if scalars:
            self.edits[node] = _with_entered(scalars, self._part)

    def viewed(self, node: fx.Node) -> None:
        """Other rows; the words stay last."""
        source = self._source(node)
        shape = self._values[node].shape
        last: Any = node.args[-1]
        if isinstance(last, list | tuple):
            last = last[-1]
        if self.dims[source] != _ndim(self._values[source]) - 1 or shape[-1] != self._words:
            raise NotByWordsError(f"{node.name!r} takes its words apart or puts them together")
        if node.kwargs or len(node.args) < 2:
            raise NotByWordsError(f"{node.name!r} does not say in what shape")
        self.dims[node] = len(shape) - 1
        if last == -1:  # follows from how many there are
            return

        def edit(graph: fx.Graph, old: fx.Node, copies: Copies) -> fx.Node:
            new = graph.node_copy(old, copies.__getitem__)
            with graph.inserting_before(new):
                size = graph.call_method("size", (copies[source], -1))
            sizes: tuple[Any, ...] = new.args[1:]
            if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
                new.args = (new.args[0], (*sizes[0][:-1], size))
            else:
                new.args = (*new.args[:-1], size)
            return new

        self.edits[node] = edit

    def flattened(self, node: fx.Node) -> None:
        """Other rows; the words stay last."""
        source = self._source(node)
        ndim = _ndim(self._values[source])
        given: dict[str, Any] = {
            **dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)),
            **node.kwargs,
        }
        if self.dims[source] != ndim - 1 or given.get("end_dim", -1) % ndim == ndim - 1:
            raise NotByWordsError(f"{node.name!r} puts its words together with rows")
        self.dims[node] = _ndim(self._values[node]) - 1

    def moved(self, node: fx.Node) -> None:
        """Follow a call that puts dimensions in another order."""
        source = self._source(node)
        ndim = _ndim(self._values[source])
        order = list(range(ndim))
        given: list[Any] = [*node.args[1:], *node.kwargs.values()]
        dims: list[Any] = list(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else given
        if not all(isinstance(dim, int) for dim in dims):
            raise NotByWordsError(f"{node.name!r} moves dimensions that are computed")
        if node.target in ("transpose", torch.transpose):
            first, second = (dim % ndim for dim in dims)
            order[first], order[second] = order[second], order[first]
        else:
            order = [dim % ndim for dim in dims]
        self.dims[node] = order.index(self.dims[source])

    def picked(self, node: fx.Node) -> None:
        """Follow a call that picks some rows, by integers and slices."""
        source, index = self._source(node), node.args[1]
        items = _spread(index, _ndim(self._values[source]))
        dim = self.dims[source]
        if items is None or items[dim] != slice(None):
            raise NotByWordsError(f"{node.name!r} picks of its logits, not by whole rows")
        self.dims[node] = dim - sum(isinstance(item, int) for item in items[:dim])


_one_by_one = LogitsWalk.one_by_one
_RULES: Mapping[str, Callable[[LogitsWalk, fx.Node], None]] = {
    "view": LogitsWalk.viewed,
    "reshape": LogitsWalk.viewed,
    "flatten": LogitsWalk.flattened,
    "transpose": LogitsWalk.moved,
    "permute": LogitsWalk.moved,
    "getitem": LogitsWalk.picked,
}


def _with_entered(sources: Sequence[fx.Node], part: VocabularyPart) -> Edit:
    """Make a call anew that takes its part of the gradient of what all devices have alike."""

    def edit(graph: fx.Graph, node: fx.Node, copies: Copies) -> fx.Node:
        entered = {source: graph.call_function(part.enter, (copies[source],)) for source in sources}
        return graph.node_copy(node, lambda source: entered.get(source) or copies[source])

    return edit


def _spread(index: Any, ndim: int) -> list[Any] | None:
    """One integer or slice for each dimension; None: something else picks."""
    items = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in items:
        place = items.index(Ellipsis)
        items[place : place + 1] = [slice(None)] * (ndim - len(items) + 1)
    items += [slice(None)] * (ndim - len(items))
    plain = all(
        isinstance(item, int)
        or (isinstance(item, slice) and all(not isinstance(end, fx.Node) for end in (item.start, item.stop)))
        for item in items
    )
    return items if plain and len(items) == ndim else None


def _ndim(value: Any) -> int:
    return value.dim() if isinstance(value, Tensor) else 0


def _called(node: fx.Node, root: nn.Module) -> str:
    if node.op == "call_module":
        return f"{node.target} ({type(root.get_submodule(str(node.target))).__name__})"
    return repr(node.name)
