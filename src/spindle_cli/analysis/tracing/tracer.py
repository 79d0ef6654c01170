"""A tracer of torch.fx for a task's `forward`, to which operators are leaves: what forward gets for its
values, and what it may do with them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from spindle_cli.analysis.autocast import AutocastSeen
from spindle_cli.analysis.autograd import Asking
from spindle_cli.analysis.fixed import FRAMES, ReadsValuesError
from spindle_cli.analysis.tracing.earlier import (
    GIVE_AS_ARGUMENT,
)
from spindle_cli.analysis.tracing.faithful import (
    changed_attribute,
    is_in_place_name,
    note_contexts,
    refuse_question,
    refuse_seeding,
)
from spindle_cli.analysis.tracing.modes import Modes
from spindle_cli.analysis.tracing.moves import Moves
from spindle_cli.analysis.tracing.observe import Observer
from spindle_cli.analysis.tracing.proxies import selecting
from spindle_cli.analysis.tracing.proxies.attributes import (
    ReadsUnknownError,
    Scratch,
    Unknown,
)
from spindle_cli.analysis.tracing.proxies.changes import TracedValue
from spindle_cli.analysis.tracing.proxies.functions import is_recorded, record
from spindle_cli.analysis.tracing.proxies.known import Known
from spindle_cli.analysis.tracing.proxies.rows import (
    divided_and_joined,
    filled_by_sample,
    joined_again,
    rows_of,
)
from spindle_cli.analysis.tracing.proxies.selecting import Selected, made_of
from spindle_cli.analysis.tracing.regions import HeldRegions, Region, UnfitError
from spindle_cli.analysis.tracing.shapes import leaves_of
from spindle_cli.errors import WorkloadError
from spindle_cli.training.precision import l1_loss_weight
from spindle_cli.workload.arguments import call_forward
from spindle_cli.workload.building.contents import last_name
from spindle_cli.workload.graph import DECLARE, root_of
from spindle_cli.workload.graph import made_of as nodes_behind
from spindle_cli.workload.one_process import is_of_distributed, refuse_call
from spindle_cli.workload.refuse import (
    frames_of_caller,
    place_of_caller,
    refusal,
)
from spindle_cli.workload.step_values import StepValues, TracedValues
from spindle_cli.workload.types import Task, Workload

IN_OPERATOR = (
    "Call it in an nn.Module of its own and list its class in the workload's `operators` (it is then run as "
    "it is)."
)
# What torch has of layers one behind the other, which are worth more apart.
_STACKS = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
# What numpy asks of what it is given no array of (`np.prod(x.shape)`), and how.
_OF_SHAPES: Mapping[str, Callable[..., Any]] = {"prod": math.prod, "sum": sum, "max": max, "min": min}
_NUMPYS = {"axis": None, "out": None}


class OperatorTracer(fx.Tracer):
    """A tracer with the workload's operators as leaves, which notes where in the user's code each node comes
    from.
    """

    proxy_buffer_attributes = True  # a buffer may change, so what is made of it is no constant

    def __init__(
        self,
        task: Task,
        workload: Workload,
        samples: Mapping[str, Tensor],
        observer: Observer,
        opened: tuple[nn.Module, ...] = (),
    ) -> None:
        super().__init__()
        self._opened = opened
        self._leaves = workload.operator_classes
        self._task = task
        self._samples = samples
        self._observer = observer
        self._known: Known | None = None
        self.autocast = AutocastSeen()
        self.selections = 0  # by masks
        self.leaves_of_gradients: set[fx.Node] = set()  # by requires_grad_
        self.regions = HeldRegions(task.module)
        others = [root_of(other_task) for other_task in workload.all_tasks if other_task.name != task.name]
        self.scratch = Scratch(task.name, task.module, self._leaves, observer.attributes, others)
        self.modes = Modes(
            task.name, task.module, observer.modes, self.is_looking, evaluates=not task.module.training
        )
        self._step_values = StepValues.of(workload)
        self._traced_values = TracedValues(self, ())
        self.moves: Moves | None = None
        self._own = {part: _tensors_of(part) for part in task.module.modules()}

    @property
    def task_name(self) -> str:
        """The name of the task that is traced."""
        return self._task.name

    @property
    def known(self) -> Known:
        """What is known of the nodes traced so far."""
        if self._known is None:
            task = self._task
            self._known = Known(
                self._observer,
                task.module,
                self.graph,
                task.name,
                self._samples,
                task.batch_size,
                lambda: self._traced_values.plain(),
            )
        return self._known

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Operators, but for those that are opened, and torch's own layers as usual; not its stacks of layers
        that are operators.
        """
        if any(m is module for module in self._opened):
            return False
        if isinstance(m, self._leaves):
            return True
        if m is self.root:
            return False
        if isinstance(m, torch.jit.ScriptModule):
            return True  # no trace can follow it
        if isinstance(m, _STACKS) and any(isinstance(inner, self._leaves) for inner in m.modules()):
            return False
        return super().is_leaf_module(m, module_qualified_name)

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: dict[str, Any], *more: Any, **named: Any
    ) -> fx.Node:
        """Create a node that knows its place in the user's code."""
        if target is functional.l1_loss:
            kwargs = {**{name: self.create_arg(value) for name, value in l1_loss_weight().items()}, **kwargs}
        kind, target, args, kwargs = self._at_once(kind, target, args, kwargs)
        node = super().create_node(kind, target, args, kwargs, *more, **named)
        node.meta["place"] = place_of_caller()
        node.meta[FRAMES] = frames_of_caller()
        refuse_seeding(self._task.name)
        is_operator = node.op == "call_module" and isinstance(
            self.root.get_submodule(str(node.target)), self._leaves
        )
        note_contexts(self._task.name, node, self.autocast, is_operator=is_operator)
        return node

    def create_proxy(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *more: Any, **named: Any
    ) -> Any:
        """A proxy for a new node, or for what stands for rows that a mask selects."""
        if is_of_distributed(target):
            refuse_call(target.__name__, place_of_caller())
        if self.is_looking():
            raise refusal(
                self._task.name,
                "an operator takes what forward has left somewhere between operators (in an object, a dict, "
                "a list), where other devices do not have it",
                place_of_caller(),
                GIVE_AS_ARGUMENT,
            )
        if target is torch.autograd.grad:
            raise ReadsValuesError.at(_gradients_asked(self._task.name), frames=frames_of_caller())
        if kind == "call_method" and target == "requires_grad_" and isinstance(args[0], fx.Proxy):
            self.leaves_of_gradients.add(args[0].node)
        self._refuse_writing(kind, target, args)
        self._refuse_backward(kind, target)
        selected = None
        if any(type(argument) is Selected for argument in (*args, *kwargs.values())):
            made = made_of(kind, target, args, kwargs)
            if made is not NotImplemented:
                return made
        elif target is operator.getitem and not kwargs:
            selected = selecting.select(self, *args)
        elif target in ("masked_select", torch.masked_select) and len(args) == 2 and not kwargs:
            selected = selecting.select_entries(self, *args)
        if selected is not None:
            return selected
        return super().create_proxy(kind, target, args, kwargs, *more, **named)

    def _refuse_writing(self, kind: str, target: Any, args: tuple[Any, ...]) -> None:
        """Refuse traced values that are written into a tensor which is none: all others would see it as it
        was made.
        """
        written = args[0] if args else None
        if kind != "call_method" or not isinstance(written, Tensor):
            return
        if is_in_place_name(target) and self._is_parameter(written):
            what = (
                f"forward changes a parameter by {target} of a traced value, between operators (a number of "
                "step_values is one)"
            )
            raise refusal(self._task.name, what, place_of_caller(), DECLARE)
        if target == "__setitem__" or is_in_place_name(target):
            refused = changed_attribute(self._task.name, self.root, written)
            if refused is not None:
                raise refused
            what = f"{str(written.dtype).removeprefix('torch.')} of shape {tuple(written.shape)}"
            raise refusal(
                self._task.name,
                f"forward writes by {target} into a tensor that it has made of numbers ({what}), which a "
                "trace has as it was made",
                place_of_caller(),
                "Make it of the batch's, so that it is made anew in every step: x.new_zeros(...), "
                "torch.zeros_like(x), torch.zeros(..., device=x.device).",
            )

    def _refuse_backward(self, kind: str, target: Any) -> None:
        """Refuse a backward pass in the middle of forward: nobody reads what it gives, so a trace would lose
        it.
        """
        is_method = kind == "call_method" and target == "backward"
        if is_method or target in (torch.autograd.backward, Tensor.backward):
            raise refusal(
                self._task.name,
                "forward calls backward between operators, which a trace would lose",
                place_of_caller(),
                "Add what it trains by to the loss that forward returns: loss + aux_loss, of what is "
                "detached where no gradient is to go further.",
            )

    def _is_parameter(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of one of the task's parameters, as its `data` does."""
        storage = tensor.untyped_storage()._cdata
        candidates = (tensor, *self.root.parameters())
        return any(
            isinstance(candidate, nn.Parameter) and _lies_in(candidate, storage) for candidate in candidates
        )

    def run_region(self, region: Region, given: Sequence[Any]) -> Any:
        """Trace a call of a region and return what it gives, as traced values.

        Raises:
            UnfitError: it cannot be where it is; with what may do.
        """
        if self.is_looking():
            return region(*given)
        self._require_fits(region, given)
        target = self.regions.add(region)
        asking = Asking(asks=region.names_gradients())
        try:
            name = f"region_{len(self.regions.names)}"
            made = super().create_proxy("call_module", target, tuple(given), {}, name)
            with asking:
                outputs = self.known.unpacked(made)
        except WorkloadError as error:
            raise UnfitError.here(str(error), starts=True, ends=not asking.asks) from error
        if asking.asks and self._are_connected(region, given):
            raise UnfitError.here("it asks for gradients of what was computed before it", starts=True)
        plain = [leaf for leaf in leaves_of(outputs) if leaf is not None and not self._is_traced_tensor(leaf)]
        if plain:
            raise UnfitError.here(f"it gives {plain[0]!r}, which is no tensor", ends=True)
        if not any(map(self._is_traced_tensor, leaves_of(outputs))) and self._is_read_behind(region):
            raise UnfitError.here("it gives nothing, and changes what is read behind it", ends=True)
        return outputs

    def _is_read_behind(self, region: Region) -> bool:
        """Whether a region changes buffers, or leaves attributes that the rest of its function names. (Moved
        parameters may be declared, which is said where others use them.)
        """
        left = self._observer.left.get(self._observer.kinds.behaviour(region))
        if left is None or not {name for name, _ in region.named_parameters()}.isdisjoint(left.changed):
            return False
        names = map(last_name, (*left.kept, *left.left))
        return bool(left.changed) or not region.names_around().isdisjoint(names)

    def _is_traced_tensor(self, value: Any) -> bool:
        return isinstance(value, fx.Proxy) and self.is_tensor(value)

    def create_rows(self, select: Callable[..., Any], of: Any, by: Any) -> fx.Proxy:
        """A proxy for the rows that a mask selects."""
        return super().create_proxy("call_function", select, (of, by), {})

    def put_by_mask(self, tensor: TracedValue, index: Any, value: Any) -> tuple[Any, Any, Any] | None:
        """See `selecting.put`."""
        return selecting.put(tensor, index, value)

    def _at_once(
        self, kind: str, target: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[str, Any, Any, dict[str, Any]]:
        """A call that works through the samples one after another as one that works on each; and numpy's of a
        shape as Python's.
        """
        is_numpys = kind == "call_method" and target in _OF_SHAPES and kwargs == _NUMPYS
        if is_numpys and self.known.parts(fx.Proxy(args[0], self)) is not None:
            return "call_function", _OF_SHAPES[target], args, {}
        joined = joined_again(target, args, kwargs)
        if joined is not None:
            batch, is_stack = joined
            return ("call_method", "clone", (batch,), {}) if is_stack else _flattened(batch)
        divided = divided_and_joined(target, args, kwargs)
        if divided is not None:
            return "call_method", "clone", (divided,), {}
        if target in ("masked_scatter", torch.masked_scatter) and len(args) == 3 and not kwargs:
            tensor, _, values = args
            if self.known.are_rows(tensor, values):
                return "call_function", filled_by_sample, args, {}
        return kind, target, args, kwargs

    def create_arg(self, a: Any) -> Any:
        """An argument of a node; what was computed of parameters out of its sight would be a constant."""
        if isinstance(a, FakeTensor) and not self.is_looking():
            made = refusal(
                self._task.name,
                "forward takes what a hook has seen of an operator (register_forward_hook), which other "
                "devices may run, and a trace does not",
                place_of_caller(),
                "Let the operator return it beside its output, or call the parts of the model by themselves.",
            )
            raise ReadsUnknownError(*made.args, hint=made.hint)
        if isinstance(a, Tensor) and a.grad_fn is not None and not self.is_looking():
            made = refusal(
                self._task.name,
                "forward computes with parameters that it goes through by .parameters() or the like, which a "
                "trace cannot follow: they would get no gradient from this",
                place_of_caller(),
                "Name them where they are used (self.layer.weight.square().sum()), use the optimizer's "
                "weight_decay for a penalty, or put this into an operator.",
            )
            raise ReadsValuesError.at(made, frames=frames_of_caller())
        if isinstance(a, Tensor) and not self.is_looking() and self.moves is not None:
            self._refuse_copy(a, self.moves)
        if isinstance(a, torch.Generator) and not self.is_looking():
            raise refusal(
                self._task.name,
                "forward gives torch a Generator between operators, which a trace would not move on",
                place_of_caller(),
                f"Draw without a generator of your own, which follows the run's seed. Or: {IN_OPERATOR}",
            )
        if isinstance(a, Unknown):
            a.refuse()
        if isinstance(a, np.generic):
            return a.item()
        if isinstance(a, tuple) and hasattr(a, "_fields"):
            # torch.fx would have it made by a node of its own, which could not go from op to op.
            return type(a)(*map(self.create_arg, a))
        return super().create_arg(a)

    def _refuse_copy(self, tensor: Tensor, moves: Moves) -> None:
        """Refuse what has values of a trained parameter as it is while forward is traced, where the
        statements around cannot run as they are written.
        """
        if isinstance(tensor, fx.Proxy) or (name := moves.source_of(tensor)) is None:
            return
        made = refusal(
            self._task.name,
            f"forward computes with a copy of the values of {name!r} (copy.deepcopy, state_dict(), data), of "
            "which a trace would have those that it was made with",
            place_of_caller(),
            "Compute with the parameter itself, self.layer.weight or self.layer.weight.detach(); or put what "
            "copies it and what computes with the copy into one nn.Module and list its class in the "
            "workload's `operators`: it runs as it is.",
        )
        raise ReadsValuesError.at(made, frames=frames_of_caller())

    def is_looking(self) -> bool:
        """Whether modules are being run only to find out what is known."""
        return self._known is not None and self._known.looking

    def refuse_question(self, name: str) -> None:
        """Refuse a question for autocast's state, unless it comes from a module that is being run."""
        if not self.is_looking():
            refuse_question(self._task.name, name)

    def create_args_for_root(self, *_: Any) -> tuple[Any, list[Any]]:
        """One placeholder per batch field, passed as forward's arguments, so that defaults and **kwargs mean
        what they mean in Python.
        """
        proxies = {name: self.create_proxy("placeholder", name, (), {}) for name in self._samples}
        self._traced_values = self._step_values.traced(self, self._task.module)

        def call() -> Any:
            # Here, as torch.fx has put its own way of asking in place by now.
            with (
                self.scratch.watching(self.is_looking),
                self.modes.watching(),
                self._traced_values.read(),
            ):
                return call_forward(self._task, proxies, self.root.forward)

        return call, []

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Decide an `if` by sizes that are known."""
        return self.known.truth(obj)

    def iter(self, obj: fx.Proxy) -> Iterator[fx.Proxy]:
        """Loop over as many parts as there are for every batch, or over its samples (see rows.py)."""
        parts: Any = obj
        value = self.known.value(obj)
        if isinstance(value, Mapping):
            return iter(list(value))
        if self.known.counts_samples(obj):
            return rows_of(parts, self._task.batch_size)
        return iter([parts[position] for position in range(self.known.length(obj))])

    def _require_fits(self, region: Region, given: Sequence[Any]) -> None:
        """Refuse a region whose code a trace cannot call as a module of its own with these values.

        Raises:
            UnfitError: with what may do.
        """
        tensors = region.tensors()
        if self.moves is not None and any(map(self.moves.source_of, tensors)):
            raise UnfitError.here("it takes a copy of a parameter's values", starts=True)
        held_ids = {id(tensor) for tensor in (*self.root.parameters(), *self.root.buffers())}
        if any(id(tensor) in held_ids for tensor in region.tensors_taken()):
            raise UnfitError.here(
                "it is given parameters or buffers, of which others take their place", starts=True
            )
        if any(tensor.is_meta and id(tensor) not in held_ids for tensor in tensors):
            raise UnfitError.here("it computes with a layer that is no part of the model")
        changed = [given[place] for place in region.changed_places()]
        if any(map(self.known.shares_memory, changed)):
            raise UnfitError.here("it changes in place what lies in the memory of others", starts=True)
        if any(value.node.op == "get_attr" for value in changed):
            raise UnfitError.here("it changes in place what a module holds", starts=True)

    def _are_connected(self, region: Region, given: Sequence[Any]) -> bool:
        """Whether one of the values that a region is given is made of another of them, of a parameter that
        the region has, or of what forward has said to take a gradient, by what comes before it: a gradient
        asked for inside would not come through that.
        """
        if not self.leaves_of_gradients.isdisjoint(nodes_behind(value.node for value in given)):
            return True
        nodes = dict.fromkeys(value.node for value in given if self.known.takes_gradient(value))
        calls = {node: _call_of(node) for node in nodes}
        for node in nodes:
            behind = nodes_behind([node])
            if any(calls[second] in behind for second in nodes if second is not node):
                return True
            if self._have_trained_parameters_of(region, behind):
                return True
        return False

    def _have_trained_parameters_of(self, region: Region, nodes: Iterable[fx.Node]) -> bool:
        """Whether some nodes have a trained parameter that a region has, too."""
        held_ids = {id(parameter) for parameter in region.parameters() if parameter.requires_grad}
        return any(id(parameter) in held_ids for node in nodes for parameter in self._parameters(node))

    def _parameters(self, node: fx.Node) -> Iterator[nn.Parameter]:
        """The parameters that a node's module has, or the one that it is."""
        if node.op == "call_module":
            yield from self.root.get_submodule(str(node.target)).parameters()
        elif node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            parameter = self.root.get_submodule(owner)._parameters.get(name)
            yield from () if parameter is None else (parameter,)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Trace a call, unless it is our own to find out what is known; into a module that forward has just
        made, which is none of the task's.
        """
        if self.is_looking() or m not in (self.submodule_paths or {}):
            return forward(*args, **kwargs)
        if not isinstance(m, self._leaves) and any(type(argument) is Selected for argument in args):
            return forward(*args, **kwargs)  # torch's own, for each row
        if self.is_leaf_module(m, self.path_of_module(m)):
            self._refuse_others_tensors(m)
            self.modes.call(m)
        else:
            self._refuse_backward_hooks(m)
        given = super().call_module(m, forward, args, kwargs)
        if not self.is_leaf_module(m, self.path_of_module(m)):
            return given
        # Forward may ask what it is, loop over it or put something into it, which a proxy would not stand.
        given = self.known.unpacked(given)
        self.scratch.hide(m)
        if is_recorded(m):
            record(m, args, given)
        return given

    def _refuse_backward_hooks(self, module: nn.Module) -> None:
        """Refuse a module that is traced into and has hooks of its backward pass."""
        if module._backward_hooks or module._backward_pre_hooks:
            raise refusal(
                self._task.name,
                f"{self.path_of_module(module)!r}, called between operators, has hooks of its backward pass "
                "(register_full_backward_hook), which a trace would lose",
                place_of_caller(),
                f"List its class, {type(module).__name__}, in the workload's `operators`: it runs with them. "
                "What a hook does to the gradient can be written, too: "
                "c * x + (1 - c) * x.detach() has c times that of x.",
            )

    def _refuse_others_tensors(self, module: nn.Module) -> None:
        """Refuse a call of a module that has other parameters or buffers than it was built with, where the
        statements around cannot run as they are written.
        """
        if all(_tensors_of(part) == self._own.get(part) for part in module.modules()):
            return
        made = refusal(
            self._task.name,
            f"forward calls {self.path_of_module(module)!r} between operators with other parameters or "
            "buffers than its own (torch.func.functional_call), which a trace does not keep",
            place_of_caller(),
            "Put the call, and what it is called with, into an nn.Module of its own and list its class in "
            "the workload's `operators`: it runs as it is.",
        )
        raise ReadsValuesError.at(made, frames=frames_of_caller())

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """What forward sees of a node."""
        return TracedValue(node, self)

    def is_tensor(self, value: fx.Proxy) -> bool:
        """Whether a traced value is a tensor."""
        return self.known.is_tensor(value)

    def has_attribute(self, value: fx.Proxy, name: str) -> bool:
        """Whether a traced value has an attribute that no tensor has."""
        return self.known.has_attribute(value, name)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        """A proxy for a parameter or buffer, unless it is asked for to find out what is known."""
        if self.is_looking():
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


def _tensors_of(module: nn.Module) -> dict[str, int]:
    """By name, the ids of a module's own parameters and buffers."""
    held = {**module._parameters, **module._buffers}
    return {name: id(tensor) for name, tensor in held.items() if tensor is not None}


def _gradients_asked(task: str) -> WorkloadError:
    """Return the refusal of gradients that forward asks for, where the statements around cannot run as they
    are written.
    """
    return refusal(
        task,
        "forward asks for gradients between operators, which a trace cannot follow",
        place_of_caller(),
        "Put what is differentiated and its gradient into one nn.Module and list its class in the workload's "
        "`operators` (it is then run as it is).",
    )


def _call_of(node: fx.Node) -> fx.Node:
    """The call that gives a value, maybe beside others."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _flattened(batch: fx.Node) -> tuple[str, str, tuple[Any, ...], dict[str, Any]]:
    return "call_method", "flatten", (batch, 0, 1), {}


def _lies_in(parameter: nn.Parameter, storage: int) -> bool:
    return bool(parameter.untyped_storage()._cdata == storage)
