"""Changes in place, as a trace has them: a new value, which the changed one stands for from then on.

`x[:, 0] = y`, `x.masked_fill_(m, 0)` and `x += y` change a tensor that others may look at through views. A
trace that is cut into ops has no shared memory to show the change to them; so it has the changed tensor as
another value, and refuses where someone looks at the old one later.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, fx, nn

from spindle_cli.workload.refuse import refusal
from spindle_cli.workload.tracing.faithful import NO_GRAD
from spindle_cli.workload.tracing.inplace import HINT, is_in_place_name
from spindle_cli.workload.tracing.observe import Observer
from spindle_cli.workload.tracing.shapes import Shapes, leaves_of

_CHANGED = "changed"  # key of a node's meta: the node whose value it has put another in the place of
# Methods that do something else than their namesakes without the underscore.
_UNLIKE = frozenset({"bernoulli_", "resize_", "resize_as_", "set_"})
# What gives the same as x[...] = value.
_FILLING: Mapping[str, Callable[..., Any]] = {
    "copy_": lambda value, non_blocking=False: value,  # noqa: ARG005 - torch's argument, which changes no value
    "fill_": lambda value: value,
    "zero_": lambda: 0,
}


def assigned(tensor: Tensor, index: Any, value: Any) -> Tensor:
    """What `tensor[index] = value` makes of a tensor, which itself stays."""
    made = tensor.clone()
    made[index] = value
    return made


class TracedValue(fx.Proxy):
    """A traced value that forward may change in place."""

    __array_priority__ = 1000  # numbers of numpy leave operators to it, as they leave them to tensors

    def __setitem__(self, index: Any, value: Any) -> None:
        if type(value) is TracedValue:
            self._take_over(index, value.node)
        self._becomes("call_function", assigned, (self, index, value), {})

    def _take_over(self, index: Any, made: fx.Node) -> None:
        """Where `x[i] += y` puts a changed part back, let x be what has changed: nobody has looked at it
        since the part did.
        """
        part = made.meta.get(_CHANGED)
        is_latest = made.next.op == "root"
        if is_latest and isinstance(part, fx.Node) and part.target is operator.getitem:
            of, at = part.args
            if of is self.node and at == self.tracer.create_arg(index):
                del made.meta[_CHANGED]

    def __array__(self, *_: Any, **__: Any) -> Any:
        """What numpy's functions take: a number that is known."""
        return np.asarray(self.tracer.known.number(self))  # type: ignore[attr-defined]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Nobody calls a tensor but who has asked callable(x), which is true of every traced value."""
        return self if self.tracer.is_tensor(self) else super().__call__(*args, **kwargs)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        # What forward asks for by hasattr(), and numpy and torch by names of protocols.
        is_protocol = name.startswith("__") and name.endswith("__")
        if is_protocol or not (hasattr(Tensor, name) or self.tracer.has_attribute(self, name)):  # type: ignore[attr-defined]
            raise AttributeError(f"'Tensor' object has no attribute {name!r}")
        if not is_in_place_name(name):
            return super().__getattr__(name)

        def change(*args: Any, **kwargs: Any) -> TracedValue:
            return self._change(name, args, kwargs)

        return change

    def _change(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedValue:
        namesake = name.removesuffix("_")
        if name in _FILLING:
            return self._becomes("call_function", assigned, (self, ..., _FILLING[name](*args, **kwargs)), {})
        if hasattr(Tensor, namesake) and name not in _UNLIKE:
            return self._becomes("call_method", namesake, (self, *args), kwargs)
        copy = self.tracer.create_proxy("call_method", "clone", (self,), {})
        return self._becomes("call_method", name, (copy, *args), kwargs)

    def _becomes(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedValue:
        made = self.tracer.create_proxy(kind, target, args, kwargs).node
        made.meta[_CHANGED] = self.node
        self.node = made
        return self


def _augmented(function: Callable[..., Any]) -> Callable[..., Any]:
    """`x += y` and its like: of a tensor a change in place, of a size a new one."""

    def change(self: TracedValue, other: Any) -> Any:
        if not self.tracer.is_tensor(self):  # type: ignore[attr-defined]  # the tracer is ours
            return function(self, other)
        return self._becomes("call_function", function, (self, other), {})

    return change


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor"):
    setattr(TracedValue, f"__i{_name.rstrip('_')}__", _augmented(getattr(operator, _name)))


@dataclass(frozen=True)
class _Change:
    old: fx.Node
    new: fx.Node
    at: int  # in the order of the trace


class Changes:
    """The changes in place that a trace has; made before anything is dropped from it."""

    def __init__(self, graph: fx.Graph) -> None:
        # What is dropped loses its arguments.
        self._inputs = {node: list(node.all_input_nodes) for node in graph.nodes}
        self._arguments = {node: (node.args, node.kwargs) for node in graph.nodes}
        self._nodes = list(graph.nodes)
        self._found = [
            _Change(node.meta[_CHANGED], node, position)
            for position, node in enumerate(self._nodes)
            if _CHANGED in node.meta
        ]

    def check(self, task: str, root: nn.Module, loss: fx.Node, shapes: Shapes, observer: Observer) -> None:
        """Refuse what a trace cannot show: to others that look at the changed tensor, to the task's own
        parameters and buffers, or to the gradient.

        Args:
            loss: of a graph without dead code.

        Raises:
            WorkloadError: with the place in the user's code.
        """
        alive = set(loss.graph.nodes)
        for change in self._found:
            sharing = _Memory(self._arguments, self._inputs, root, shapes, observer).shared_with(change.old)
            later = [node for node in self._nodes[change.at + 1 :] if node in alive]
            seen = [
                node
                for node in later
                if node.op != "output" and shapes.gives_tensors(node) and sharing & set(self._inputs[node])
            ]
            if seen or loss in sharing or any(node.op == "get_attr" for node in sharing):
                raise _refusal(
                    task, change, f"changes {change.old.name!r} in place, which other operators or glue use"
                )
            if change.new in alive:
                _check_kept(task, change, shapes)


def _check_kept(task: str, change: _Change, shapes: Shapes) -> None:
    """Refuse a change that a tensor cannot go through in place, or that gradients do not see."""
    old, new = shapes.values[change.old], shapes.values[change.new]
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        raise _refusal(task, change, f"changes {change.old.name!r} in place, which is no tensor")
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        before, after = f"{tuple(old.shape)} ({old.dtype})", f"{tuple(new.shape)} ({new.dtype})"
        raise _refusal(task, change, f"changes {change.old.name!r} of {before} in place into {after}")
    if change.new.meta.get(NO_GRAD) and old.requires_grad:
        raise _refusal(task, change, f"changes {change.old.name!r} in place where gradients are switched off")


def _refusal(task: str, change: _Change, what: str) -> Exception:
    return refusal(task, f"{change.new.name!r} {what}", change.new.meta.get("place"), HINT)


class _Memory:
    """Which nodes of a trace give tensors that lie in the same memory."""

    def __init__(
        self,
        arguments: Mapping[fx.Node, Any],
        inputs: Mapping[fx.Node, Sequence[fx.Node]],
        root: nn.Module,
        shapes: Shapes,
        observer: Observer,
    ) -> None:
        self._arguments = arguments
        self._inputs = inputs
        self._root = root
        self._shapes = shapes
        self._observer = observer
        self._storages = {
            node: {_storage(leaf) for leaf in leaves_of(shapes.values.get(node)) if isinstance(leaf, Tensor)}
            for node in inputs
        }

    def shared_with(self, node: fx.Node) -> set[fx.Node]:
        """One node and all that share memory with it."""
        found = set(self._storages[node])
        tried: set[fx.Node] = set()
        while True:
            sharing = {other for other, storages in self._storages.items() if storages & found}
            calls = {
                call
                for call in self._storages
                if call.op == "call_module" and (call in sharing or sharing & set(self._inputs[call]))
            } - tried
            if not calls:
                return sharing
            tried |= calls
            for call in calls:
                if self._hands_through(call):
                    found |= self._storages[call].union(*map(self._storages.__getitem__, self._inputs[call]))

    def _hands_through(self, call: fx.Node) -> bool:
        """Whether a module gives a view of what it is given (what it gives is remembered elsewhere)."""
        args, kwargs = fx.node.map_arg(self._arguments[call], self._shapes.values.__getitem__)
        return self._observer.hands_through(self._root.get_submodule(str(call.target)), args, kwargs)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
