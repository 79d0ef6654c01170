"""Changes in place, as a trace has them: a new value, which the changed one stands for from then on.

`x[:, 0] = y`, `x.masked_fill_(m, 0)` and `x += y` change a tensor that others may look at through views. A
trace that is cut into ops has no shared memory to show the change to them; so it has the changed tensor as
another value, and refuses where someone looks at the old one later, or where the change reads what it writes:
what torch gives then depends on which entry comes first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from spindle_cli.analysis.fixed import ReadsValuesError
from spindle_cli.analysis.tracing.faithful import HINT, NO_GRAD, is_in_place_name, refusal_of_state, way_out
from spindle_cli.analysis.tracing.observe import FREEZE_WHERE_BUILT, Observer, storage_of
from spindle_cli.analysis.tracing.shapes import Shapes, leaves_of
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.graph import DECLARE
from spindle_cli.workload.refuse import frames_of_caller, place_of_caller, refusal

# Keys of a node's meta: the node whose value it has put another in the place of; of a changed part that was
# put back, what it was of a tensor, and that tensor with it.
_CHANGED, _PUT_BACK = "changed", "put back"
_HELD = 0  # the number of no memory: for that of operators' parameters and buffers
# Methods that do something else than their namesakes without the underscore.
_UNLIKE = frozenset({"bernoulli_", "resize_", "resize_as_", "set_"})
# What gives the same as x[...] = value.
_FILLING: Mapping[str, Callable[..., Any]] = {
    "copy_": lambda value, non_blocking=False: value,  # noqa: ARG005 - torch's argument, which changes no value
    "fill_": lambda value: value,
    "zero_": lambda: 0,
}

_GRADIENTS = frozenset({"grad", "retain_grad"})
_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook"})
# What changes a list, dict or set.
_OF_CONTAINERS = frozenset(
    {"update", "pop", "popitem", "setdefault", "clear", "move_to_end", "append", "extend", "insert", "remove"}
    | {"reverse", "sort", "add", "discard", "appendleft", "popleft"}
)
_FEW = 2  # of many rows: if any of them meet, a row meets the next one


def assigned(tensor: Tensor, index: Any, value: Any) -> Tensor:
    """What `tensor[index] = value` makes of a tensor, which itself stays."""
    made = tensor.clone()
    made[index] = value
    return made


class TracedValue(fx.Proxy):
    """A traced value that forward may change in place."""

    __array_priority__ = 1000  # numbers of numpy leave operators to it, as they leave them to tensors

    def __setitem__(self, index: Any, value: Any) -> None:
        put_back = type(value) is TracedValue and self._is_put_back(index, value.node)
        chosen = self.tracer.put_by_mask(self, index, value)  # type: ignore[attr-defined]  # a tracer of ours
        if chosen is not None:
            self._becomes("call_function", torch.where, chosen, {})
        else:
            self._becomes("call_function", assigned, (self, index, value), {})
        if put_back:
            # x is what has changed, and goes on to share its memory with the part.
            value.node.meta[_PUT_BACK] = value.node.meta.pop(_CHANGED), self.node

    def _is_put_back(self, index: Any, made: fx.Node) -> bool:
        """Whether it is a changed part of x, as in `x[i] += y`, that nobody has looked at since."""
        part = made.meta.get(_CHANGED)
        if made.next.op != "root" or not isinstance(part, fx.Node) or part.target is not operator.getitem:
            return False
        of, at = part.args
        return of is self.node and bool(at == self.tracer.create_arg(index))

    def __array__(self, *_: Any, **__: Any) -> Any:
        """What numpy's functions take: a number that is known."""
        return np.asarray(self.tracer.known.number(self))  # type: ignore[attr-defined]  # a tracer of ours

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Nobody calls a tensor or a number but who has asked callable(x), which is true of every traced
        value.
        """
        return super().__call__(*args, **kwargs) if callable(self.tracer.known.value(self)) else self  # type: ignore[attr-defined]  # a tracer of ours

    def __getattr__(self, name: str) -> Any:
        # What forward asks for by hasattr(), and numpy and torch by names of protocols.
        is_protocol = name.startswith("__") and name.endswith("__")
        if is_protocol or not (hasattr(Tensor, name) or self.tracer.has_attribute(self, name)):  # type: ignore[attr-defined]  # a tracer of ours
            raise AttributeError(f"'Tensor' object has no attribute {name!r}")
        if name in _OF_CONTAINERS and not self.tracer.is_tensor(self):  # type: ignore[attr-defined]  # a tracer of ours
            return lambda *_, **__: self._refuse_change(name)
        if name in _HOOKS:
            return lambda *_, **__: self._refuse_hook(name)
        if name in _GRADIENTS and self.tracer.is_tensor(self):  # type: ignore[attr-defined]  # a tracer of ours
            if name == "grad" and not self.tracer.known.takes_gradient(self):  # type: ignore[attr-defined]  # a tracer of ours
                return None
            self._refuse_gradient(name)
        if name == "ndim" and (sizes := self.tracer.known.sizes(self)) is not None:  # type: ignore[attr-defined]  # a tracer of ours
            return len(sizes[0])  # some code has a recipe for each number of dimensions, in a dict
        if name == "requires_grad_" and self._is_parameter():
            self._refuse_change(name)
        if not is_in_place_name(name):
            return super().__getattr__(name)

        def change(*args: Any, **kwargs: Any) -> TracedValue:
            return self._change(name, args, kwargs)

        return change

    def __setattr__(self, name: str, value: Any) -> None:
        # A mark of forward's own is kept; of an input's gradient nobody asks.
        is_own = name in ("node", "tracer") or (name == "requires_grad" and not self._is_parameter())
        if not is_own and (hasattr(Tensor, name) or not self.tracer.is_tensor(self)):  # type: ignore[attr-defined]  # a tracer of ours
            self._refuse_change(f"setattr({name!r})")
        if name == "requires_grad" and value:
            self.tracer.leaves_of_gradients.add(self.node)  # type: ignore[attr-defined]  # a tracer of ours
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of a tensor, through which no gradient comes back."""
        if not self.tracer.is_tensor(self):  # type: ignore[attr-defined]  # a tracer of ours
            return super().__deepcopy__(memo)
        return self.detach().clone()

    def _is_parameter(self) -> bool:
        return self.node.op == "get_attr" and isinstance(self.tracer.known.value(self), nn.Parameter)  # type: ignore[attr-defined]  # a tracer of ours

    def _refuse_change(self, name: str) -> None:
        kind = type(self.tracer.known.value(self)).__name__  # type: ignore[attr-defined]  # a tracer of ours
        is_parameter = kind == nn.Parameter.__name__
        hint = DECLARE if is_parameter else "Make a new one of it ({**given, 'h': h}, x.detach())."
        refused = refusal(
            self.tracer.task_name,  # type: ignore[attr-defined]  # a tracer of ours
            f"forward calls {name} of a {kind} that it was given, which a trace would not keep",
            place_of_caller(),
            FREEZE_WHERE_BUILT if "requires_grad" in name else hint,
        )
        # It may be that forward undoes it before it ends.
        raise ReadsValuesError.at(refused, frames=frames_of_caller()) if "requires_grad" in name else refused

    def _refuse_hook(self, name: str) -> None:
        raise refusal(
            self.tracer.task_name,  # type: ignore[attr-defined]  # a tracer of ours
            f"forward calls {name} between operators, which a trace would not keep",
            place_of_caller(),
            "Call it in an operator's own forward, on what that computes; or write what it does to the "
            "gradient: c * x + (1 - c) * x.detach() has c times that of x. For parameters: `clip_norm`, "
            "`clip_value` and `groups` of the workload file.",
        )

    def _refuse_gradient(self, name: str) -> None:
        raise refusal(
            self.tracer.task_name,  # type: ignore[attr-defined]  # a tracer of ours
            f"forward reads {name} between operators, which a trace has as it was when it was made",
            place_of_caller(),
            "Gradients are there behind the backward pass alone, and summed over devices. Ask for one where "
            "it is needed (torch.autograd.grad) in an operator's own forward; for parameters there are "
            "`clip_norm`, `clip_value` and `groups` of the workload file.",
        )

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

    def change(self: TracedValue, operand: Any) -> Any:
        if not self.tracer.is_tensor(self):  # type: ignore[attr-defined]  # the tracer is ours
            return function(self, operand)
        return self._becomes("call_function", function, (self, operand), {})

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
        self._in_place = [
            _Change(node.meta[_CHANGED], node, position)
            for position, node in enumerate(self._nodes)
            if _CHANGED in node.meta
        ]
        self._put_back = [
            _Change(node.meta[_PUT_BACK][0], node, position)
            for position, node in enumerate(self._nodes)
            if _PUT_BACK in node.meta
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
        for change in self._in_place:
            memory = _Memory(self._arguments, self._inputs, root, shapes, observer)
            self._check_memory(task, root, loss, change, memory, shapes)
            if change.new in alive and change.new.target != "detach":
                _check_kept(task, change, shapes)
                self._check_order(task, change, shapes)
        for change in self._put_back:
            if change.new in alive:
                _check_gradient(task, change, shapes)
                self._check_order(task, change, shapes)

    def _check_memory(
        self, task: str, root: nn.Module, loss: fx.Node, change: _Change, memory: _Memory, shapes: Shapes
    ) -> None:
        """Refuse a change of a tensor whose memory the task's parameters and buffers, an operator, or a later
        node has.
        """
        sharing, is_held = memory.shared_with(change.old)
        # What changes something counts even where nobody looks at what it gives.
        counting = {*loss.graph.nodes, *(change.new for change in self._in_place)}
        if change.new.target == "detach":
            # It lies in the same memory itself. What did so before may be the same tensor, which in plain
            # PyTorch has no gradient any more.
            sharing &= set(self._nodes[: change.at])
        held = next((node for node in self._nodes if node.op == "get_attr" and node in sharing), None)
        if held is not None:
            what = f"changes {str(held.target)!r} in place, which a trace would lose"
            made = _refusal(task, change, what, way_out(root, held))
            raise refusal_of_state(root, held, made, change.new)
        is_seen = any(
            node.op != "output" and shapes.gives_tensors(node) and sharing & set(self._inputs[node])
            for node in self._nodes[change.at + 1 :]
            if node in counting
        )
        if is_seen or is_held or loss in sharing:
            raise _refusal(
                task, change, f"changes {change.old.name!r} in place, which other operators or glue use"
            )

    def _check_order(self, task: str, change: _Change, shapes: Shapes) -> None:
        """Refuse a change by entries that it changes, too."""
        written: Any = shapes.values[change.old]
        read = self._inputs[change.new]
        if change.new.target is assigned:
            index, value = self._arguments[change.new][0][1:]
            try:
                written = written[fx.node.map_arg(index, shapes.values.__getitem__)]
            except DynamicOutputShapeException:  # a mask, which picks no view
                return
            read = [value] if isinstance(value, fx.Node) else []
        if reads_what_it_writes(written, [leaf for node in read for leaf in _tensors(shapes.values[node])]):
            raise _refusal(
                task,
                change,
                f"changes {change.old.name!r} in place and reads what it may have changed before",
            )


def _check_kept(task: str, change: _Change, shapes: Shapes) -> None:
    """Refuse a change that a tensor cannot go through in place, or that gradients do not see."""
    old, new = shapes.values[change.old], shapes.values[change.new]
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        raise _refusal(task, change, f"changes {change.old.name!r} in place, which is no tensor")
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        before, after = f"{tuple(old.shape)} ({old.dtype})", f"{tuple(new.shape)} ({new.dtype})"
        raise _refusal(task, change, f"changes {change.old.name!r} of {before} in place into {after}")
    _check_gradient(task, change, shapes)


def _check_gradient(task: str, change: _Change, shapes: Shapes) -> None:
    if change.new.meta.get(NO_GRAD) and shapes.values[change.old].requires_grad:
        raise _refusal(task, change, f"changes {change.old.name!r} in place where gradients are switched off")


def _refusal(task: str, change: _Change, what: str, hint: str = HINT) -> WorkloadError:
    return refusal(task, f"{change.new.name!r} {what}", change.new.meta.get("place"), hint)


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
        self._storages = {node: set(map(storage_of, _tensors(shapes.values.get(node)))) for node in inputs}
        for node in inputs:
            part, changed = node.meta.get(_PUT_BACK, (None, None))
            if part is not None and self._storages[part] & self._storages[inputs[part][0]]:
                self._storages[node] |= self._storages[changed]

    def shared_with(self, node: fx.Node) -> tuple[set[fx.Node], bool]:
        """One node and all that share memory with it; and whether an operator holds that, in a buffer say."""
        memory, before = set(self._storages[node]), set[int]()
        groups: dict[fx.Node, list[set[int]]] = {}
        while memory != before:
            before = set(memory)
            sharing = {peer for peer, storages in self._storages.items() if storages & memory}
            for call in self._storages:
                if call.op == "call_module" and (call in sharing or sharing & set(self._inputs[call])):
                    if call not in groups:
                        groups[call] = self._in_one_memory(call)
                    memory |= {storage for group in groups[call] if group & memory for storage in group}
        return sharing, _HELD in memory

    def _in_one_memory(self, call: fx.Node) -> list[set[int]]:
        """Storages that are one inside of a module: what it gives is remembered elsewhere."""
        args, kwargs = fx.node.map_arg(self._arguments[call], self._shapes.values.__getitem__)
        module = self._root.get_submodule(str(call.target))
        gives, takes, held = self._observer.memory_of(module, args, kwargs)
        seen = [*_tensors(self._shapes.values[call]), *_tensors([args, kwargs])]
        groups: dict[int, set[int]] = {}
        for memory, tensor in zip([*gives, *takes], seen, strict=True):
            groups.setdefault(memory, {_HELD} if memory in held else set()).add(storage_of(tensor))
        return list(groups.values())


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class _Place:
    """Where a tensor's entries lie in memory."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    first: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Place:
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    @property
    def end(self) -> int:
        steps = (size - 1 for size in self.sizes)
        return self.first + 1 + sum(step * stride for step, stride in zip(steps, self.strides, strict=True))

    def in_few_rows(self, stride: int) -> _Place:
        pairs = zip(self.sizes, self.strides, strict=True)
        sizes = tuple(min(size, _FEW) if dim_stride == stride else size for size, dim_stride in pairs)
        return replace(self, sizes=sizes)


def reads_what_it_writes(written: Tensor, read: Iterable[Tensor]) -> bool:
    """Whether tensors have entries of another one that is changed, at other places than it has them."""
    storage, place = storage_of(written), _Place.of(written)
    others = [_Place.of(tensor) for tensor in read if storage_of(tensor) == storage]
    return any(peer != place and _meet(place, peer) for peer in others)


def _meet(left: _Place, right: _Place) -> bool:
    if 0 in (*left.sizes, *right.sizes):
        return False
    widest = [max((0, *place.strides)) for place in (left, right)]
    if widest[0] == widest[1] and abs(left.first - right.first) < widest[0]:
        left, right = left.in_few_rows(widest[0]), right.in_few_rows(widest[0])
    first = min(left.first, right.first)
    memory = torch.zeros(max(left.end, right.end) - first, dtype=torch.bool)
    memory.as_strided(left.sizes, left.strides, left.first - first).fill_(True)
    return bool(memory.as_strided(right.sizes, right.strides, right.first - first).any())
