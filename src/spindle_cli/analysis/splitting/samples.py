"""Which nodes of a task's trace act on samples one by one, and where each one's rows of a sample are.

Every node is examined by itself: its inputs are taken to have one row, or some rows, per sample wherever
their shapes allow it, as if another op had handed them on. What hangs together is decided in glue.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from spindle_cli.analysis.fixed import describe, is_fixed, rows_for
from spindle_cli.analysis.layer_numbers import Findings as OfCalls
from spindle_cli.analysis.memo import FindingsRecord, key_of, portable
from spindle_cli.analysis.rules.types import WHOLE, Batch, Mixed, Reduced, State
from spindle_cli.analysis.splitting.examine import Findings, Inputs, empty_like, examine
from spindle_cli.analysis.tracing.behaviour import Kinds, name_of
from spindle_cli.analysis.tracing.observe import Observer, again
from spindle_cli.analysis.tracing.shapes import Shapes, growth, leaves_of

# Sizes of the batch to run with: without a common divisor, and none that models have for widths.
_TRIED = (3, 5)
_ONE = 1


class Verdicts:
    """Findings of one workload's modules, equal ones found once."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.kinds: Kinds = observer.kinds
        self._calls: OfCalls[Findings] = OfCalls(self._told)

    def of_module(
        self, module: nn.Module, inputs: Sequence[Inputs], states: Sequence[State], sizes: Sequence[int]
    ) -> Findings:
        """Return the findings of a call of a module."""
        return self._find(self.kinds.behaviours(module), module, inputs, states, sizes, module)

    def of_call(
        self,
        target: Any,
        run: Callable[..., Any],
        inputs: Sequence[Inputs],
        states: Sequence[State],
        sizes: Sequence[int],
        held: Sequence[int],
    ) -> Findings:
        """Findings of a call of a function or method in glue; `held`: see `examine`."""
        name = f"{name_of(target)} {held}"
        return self._find((name, name), run, inputs, states, sizes, None, held)

    def _find(
        self,
        codes: tuple[str, str],
        run: Callable[..., Any],
        inputs: Sequence[Inputs],
        states: Sequence[State],
        sizes: Sequence[int],
        module: nn.Module | None,
        held: Sequence[int] = (),
    ) -> Findings:
        described = pytree.tree_map(_describe, (inputs[0], inputs[-2]))
        unnumbered, numbered = (f"{code} {described} {states} {sizes}" for code in codes)
        findings = self._calls.of(
            (unnumbered, numbered),
            module,
            lambda: examine(run, inputs, states, sizes, self.observer, module, held),
            lambda findings: findings.results is not None,
        )
        results = None if findings.results is None else pytree.tree_map(again, findings.results)
        return replace(findings, results=results)

    def findings(self) -> dict[str, FindingsRecord]:
        """Return the records of all findings, for another process (see `AnalysisMemo`)."""
        return portable(self._calls.known, Findings.record)

    def _told(self, call: str) -> Findings | None:
        """What another process has found of a call; None if it says nothing."""
        memo = self.observer.memo
        key = None if memo is None else key_of(call)
        record = None if memo is None or key is None else memo.findings.get(key)
        return None if record is None else Findings.of(record)


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{value.dtype} {tuple(value.shape)} {value.requires_grad}{describe(value)}"


class Samples:
    """The states of all nodes of one trace.

    Args:
        root: module that the trace's names are relative to.
        shapes: of the trace.
        verdicts: of the whole workload.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph, shapes: Shapes, verdicts: Verdicts) -> None:
        self._root = root
        self._shapes = shapes
        self._verdicts = verdicts
        size = shapes.batch_size
        self._sizes = (*_TRIED, size if size > 1 and size not in _TRIED else 7, _ONE)
        self._values: dict[fx.Node, tuple[Any, ...]] = {}
        self._states: dict[fx.Node, tuple[State, ...]] = {}
        self._why_not: dict[fx.Node, Mixed] = {}
        self._changed: dict[fx.Node, tuple[str, ...]] = {}
        self._reads: dict[fx.Node, tuple[str, ...]] = {}
        self._drawing: set[fx.Node] = set()
        self._kept: dict[fx.Node, tuple[str, ...]] = {}
        self._left: dict[fx.Node, tuple[str, ...]] = {}
        for node in graph.nodes:
            if node.op != "output":
                self._visit(node)

    def why_not(self, node: fx.Node) -> Mixed | None:
        """Why a node does not act on samples one by one; None if it does."""
        mixed = self._why_not.get(node)
        if mixed is None:
            mixed = next((state for state in self._states[node] if isinstance(state, Mixed)), None)
        return None if mixed is None else Mixed(mixed.why, mixed.place or node.meta.get("place"))

    def states(self, node: fx.Node) -> tuple[State, ...]:
        """The state of every tensor that a node gives, in order."""
        return self._states[node]

    def is_cut_by_rows(self, node: fx.Node) -> bool:
        """Whether samples [a, b) of what a node gives are rows that lie together."""
        return all(state.is_cut_by_rows for state in self._states[node] if isinstance(state, Batch))

    def degrees(self, node: fx.Node) -> set[int]:
        """What a node gives without a batch: sums (1) and means (0) over the samples."""
        return {state.degree for state in self._states[node] if isinstance(state, Reduced)}

    def counts(self, node: fx.Node) -> bool:
        """Whether a node gives a mean over the labels that count."""
        return any(state.counted for state in self._states[node] if isinstance(state, Reduced))

    def changed(self, node: fx.Node) -> tuple[str, ...]:
        """The parameters and buffers that a node changes."""
        return self._changed.get(node, ())

    def reads(self, node: fx.Node) -> tuple[str, ...]:
        """The buffers whose values from before go into what a node gives."""
        return self._reads.get(node, ())

    def draws_own(self, node: fx.Node) -> bool:
        """Whether a node draws from a generator that somebody holds."""
        return node in self._drawing

    def kept(self, node: fx.Node) -> tuple[str, ...]:
        """What a node leaves for the next batch where no checkpoint has it; see `Op.kept`."""
        return self._kept.get(node, ())

    def left(self, node: fx.Node) -> tuple[str, ...]:
        """What a node leaves for whoever looks; see `Op.left`."""
        return self._left.get(node, ())

    def _visit(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            field = self._shapes.values[node]
            self._values[node] = tuple(
                rows_for(field, size)
                if is_fixed(field)
                else torch.empty((size, *field.shape[1:]), dtype=field.dtype, device="meta")
                for size in self._sizes
            )
            self._states[node] = (Batch(0),)
        elif node.op == "get_attr":
            value = empty_like(self._shapes.values[node], "meta")
            self._values[node] = (value,) * len(self._sizes)
            self._states[node] = (WHOLE,) * len(_tensors(value))
        else:
            self._examine(node)

    def _examine(self, node: fx.Node) -> None:
        """Find out what a call gives for the batch's sizes, and what else it does."""
        inputs = [self._inputs(node, position) for position in range(len(self._sizes))]
        sources = self._input_nodes(node)
        states = [state for source in sources for state in self._assumed(source)]
        examine = self._examine_module if node.op == "call_module" else self._examine_call
        findings = examine(node, inputs, states)
        if any(map(self._grows, sources)):  # of which no other size is known
            why = findings.why_not or Mixed("it takes a list with an entry for each sample")
            findings = replace(findings, results=None, why_not=why)
        self._take(node, findings)

    def _examine_module(self, node: fx.Node, inputs: Sequence[Inputs], states: Sequence[State]) -> Findings:
        module = self._root.get_submodule(str(node.target))
        findings = self._verdicts.of_module(module, inputs, states, self._sizes)
        self._changed[node] = tuple(f"{node.target}.{name}" for name in findings.changed)
        self._reads[node] = tuple(f"{node.target}.{name}" for name in findings.reads)
        # Code that runs as it is written is the task's own: it has these by their names there.
        owner = "" if getattr(module, "owners", ()) else f"{node.target}."
        for names, given in ((findings.kept, self._kept), (findings.left, self._left)):
            given[node] = tuple(re.sub(r"^self\.", owner, name) for name in names)
        return findings

    def _examine_call(self, node: fx.Node, inputs: Sequence[Inputs], states: Sequence[State]) -> Findings:
        held = self._held(inputs[0], node)
        run = _function(node)
        findings = self._verdicts.of_call(node.target, run, inputs, states, self._sizes, tuple(held))
        self._changed[node] = tuple(held[int(place)] for place in findings.changed)
        self._reads[node] = tuple(held[int(place)] for place in findings.reads)
        return findings

    def _grows(self, node: fx.Node) -> bool:
        """Whether it gives more tensors for more samples, as `[latents] * len(x)` does."""
        return len(_tensors(self._shapes.values[node])) != len(_tensors(self._shapes.doubled[node]))

    def _held(self, inputs: Inputs, node: fx.Node) -> dict[int, str]:
        """The parameters and buffers among the tensors that a node is given, by their places."""
        sources = {
            id(self._values[source][0]): source for source in node.all_input_nodes if source.op == "get_attr"
        }
        given = [leaf for leaf in leaves_of(inputs) if isinstance(leaf, Tensor)]
        return {
            place: str(sources[id(leaf)].target) for place, leaf in enumerate(given) if id(leaf) in sources
        }

    def _input_nodes(self, node: fx.Node) -> list[fx.Node]:
        """The nodes among the arguments, once for each time that they occur."""
        nodes: list[fx.Node] = []
        fx.node.map_arg((node.args, node.kwargs), lambda source: nodes.append(source) or source)  # type: ignore[func-returns-value]  # append gives None
        return nodes

    def _inputs(self, node: fx.Node, position: int) -> Inputs:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda s: self._values[s][position])
        return tuple(args), dict(kwargs)

    def _take(self, node: fx.Node, findings: Findings) -> None:
        value = self._shapes.values[node]
        count = len(_tensors(value))
        if findings.why_not is not None:
            self._why_not[node] = findings.why_not
        if findings.draws_own:
            self._drawing.add(node)
        if findings.results is None or len(findings.states) != count or self._grows(node):
            why = findings.why_not or Mixed("it gives other results for another size of the batch")
            self._states[node] = (why,) * count
            self._values[node] = tuple(self._stand_in(node, size) for size in self._sizes)
            return
        self._values[node] = findings.results
        pairs = zip(findings.states, _tensors(value), _tensors(self._shapes.doubled[node]), strict=True)
        self._states[node] = tuple(self._confirmed(*pair) for pair in pairs)

    def _confirmed(self, state: State, value: Tensor, doubled: Tensor) -> State:
        """A state, if the shapes for the task's batch are as it says."""
        seen = self._shapes.batch_of(value, doubled)
        if isinstance(state, Batch):
            fits = (seen.dim, seen.rows) == (state.dim, state.outer * state.inner)
        else:
            fits = isinstance(state, Mixed) or (seen.dim is None and not seen.mixes)
        return state if fits else Mixed("its size is no multiple of the batch's")

    def _assumed(self, node: fx.Node) -> list[State]:
        """States of a node's tensors as another node takes them."""
        values, doubled = _tensors(self._shapes.values[node]), _tensors(self._shapes.doubled[node])
        if self._grows(node):
            return list(self._states[node])
        return [
            self._by_shape(*pair) if isinstance(state, Mixed | Reduced) else state
            for state, *pair in zip(self._states[node], values, doubled, strict=True)
        ]

    def _by_shape(self, value: Tensor, doubled: Tensor) -> State:
        seen = self._shapes.batch_of(value, doubled)
        if seen.mixes:
            return Mixed("it takes what is no row for each sample")
        return WHOLE if seen.dim is None else Batch(seen.dim, 1, seen.rows)

    def _stand_in(self, node: fx.Node, size: int) -> Any:
        """What a node would give for so many samples, where it cannot be run."""
        values, spec = pytree.tree_flatten(self._shapes.values[node])
        doubled = pytree.tree_leaves(self._shapes.doubled[node])
        leaves = [self._resized(*pair, size) for pair in zip(values, doubled, strict=False)]
        return pytree.tree_unflatten(leaves, spec)

    def _resized(self, value: Any, doubled: Any, size: int) -> Any:
        if not isinstance(value, Tensor) or not isinstance(doubled, Tensor):
            degree = growth(value, doubled)
            if not degree:
                return value
            return type(value)(value * (size / self._shapes.batch_size) ** degree)
        seen = self._shapes.batch_of(value, doubled)
        shape = list(value.shape)
        if seen.dim is not None:
            shape[seen.dim] = seen.rows * size
        made = torch.empty(shape, dtype=value.dtype, device="meta")
        return made.requires_grad_().clone() if value.requires_grad else made


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def _function(node: fx.Node) -> Callable[..., Any]:
    if node.op == "call_method":
        return lambda value, *args, **kwargs: getattr(value, str(node.target))(*args, **kwargs)
    assert callable(node.target)
    return node.target
