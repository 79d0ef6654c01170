"""Trace a task's `forward` with torch.fx: operators are leaves, everything between them is glue."""

from __future__ import annotations

import contextlib
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import CheckpointFunction

from spindle_cli.analysis.autocast import AutocastSeen
from spindle_cli.analysis.fixed.refusal import FRAMES, ReadsValuesError
from spindle_cli.analysis.tracing.earlier import (
    GIVE_AS_ARGUMENT,
    refuse_earlier,
    refuse_outside,
    says_what_operators_leave,
)
from spindle_cli.analysis.tracing.faithful import (
    inference_is_without_gradients,
    note_contexts,
    nothing_is_frozen,
    refuse_question,
    refuse_seeding,
)
from spindle_cli.analysis.tracing.inplace import is_in_place_name
from spindle_cli.analysis.tracing.modes import Modes, give_modes
from spindle_cli.analysis.tracing.moves import Moves
from spindle_cli.analysis.tracing.observe import Observer
from spindle_cli.analysis.tracing.proxies import selecting
from spindle_cli.analysis.tracing.proxies.capturing import is_recorded, record
from spindle_cli.analysis.tracing.proxies.changes import TracedValue
from spindle_cli.analysis.tracing.proxies.counters import (
    DECLARED,
    ReadsUnknownError,
    SetsPlainError,
    Unknown,
    unknown_inside,
)
from spindle_cli.analysis.tracing.proxies.functions import classes_are_known, creators_traced, draws_are_sized
from spindle_cli.analysis.tracing.proxies.grids import grids_are_calls
from spindle_cli.analysis.tracing.proxies.known import Known, UnknownError, numbers_are_known
from spindle_cli.analysis.tracing.proxies.rows import (
    divided_and_joined,
    filled_by_sample,
    joined_again,
    rows_of,
)
from spindle_cli.analysis.tracing.proxies.scratch import Scratch
from spindle_cli.analysis.tracing.proxies.selected_calls import made_of
from spindle_cli.analysis.tracing.proxies.selecting import Selected
from spindle_cli.analysis.tracing.regions import HeldRegions, Region, Regions, UnfitError
from spindle_cli.analysis.tracing.shapes import leaves_of
from spindle_cli.analysis.tracing.signature import check_signature, place_of_function
from spindle_cli.analysis.unread import not_validated
from spindle_cli.errors import WorkloadError
from spindle_cli.training.wide import MadeInFloat64, forget_equal_twins, l1_loss_weight
from spindle_cli.workload.arguments import arguments_of, call_forward
from spindle_cli.workload.building.attributes import Changes, Memories
from spindle_cli.workload.building.contents import last_name
from spindle_cli.workload.building.hooks import hooks_of_forward_left_alone
from spindle_cli.workload.building.uncompiled import CALLS_COMPILED, LEAVE_OUT, is_of_compiled
from spindle_cli.workload.graph import made_of as nodes_behind
from spindle_cli.workload.graph import reached
from spindle_cli.workload.moving import DECLARE, Move
from spindle_cli.workload.one_process import collective_of_error, is_of_distributed, refuse_call
from spindle_cli.workload.outside import noting_outside_reads
from spindle_cli.workload.own_draws import unseeded
from spindle_cli.workload.parameters import root_of
from spindle_cli.workload.reads import Reads
from spindle_cli.workload.refuse import (
    frames_of_caller,
    frames_of_error,
    place_of_caller,
    place_of_error,
    refusal,
)
from spindle_cli.workload.step_values import StepValues, TracedValues
from spindle_cli.workload.types import Task, Workload

_IN_OPERATOR = (
    "Call it in an nn.Module of its own and list its class in the workload's `operators` (it is then run as "
    "it is)."
)
# By which torch.utils.checkpoint keeps what it recomputes from, before torch 2.12.
_SAVES_INPUTS = getattr(torch.utils.checkpoint, "_NoopSaveInputs", None)
_CHECKPOINT = (
    "Leave torch.utils.checkpoint to plans, which recompute where memory is short, or call it with "
    "use_reentrant=False."
)
_WRAP_HINT = (
    "Put this part into an nn.Module of its own and list its class in the workload's `operators` (it is then "
    "run as it is), or give the task as a FlowTask."
)
# What torch has of layers one behind the other, which are worth more apart.
_STACKS = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)


# What numpy asks of what it is given no array of (`np.prod(x.shape)`), and how.
_OF_SHAPES: Mapping[str, Callable[..., Any]] = {"prod": math.prod, "sum": sum, "max": max, "min": min}
_NUMPYS = {"axis": None, "out": None}


PART_HINT = (
    "Let it be a part: an attribute of its own, nn.ModuleList or nn.ModuleDict; with requires_grad_(False) "
    "if it is not to be trained."
)


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
        self._refuse_writing(kind, target, args)
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
            what = f"{str(written.dtype).removeprefix('torch.')} of shape {tuple(written.shape)}"
            raise refusal(
                self._task.name,
                f"forward writes by {target} into a tensor that it has made of numbers ({what}), which a "
                "trace has as it was made",
                place_of_caller(),
                "Make it of the batch's, so that it is made anew in every step: x.new_zeros(...), "
                "torch.zeros_like(x), torch.zeros(..., device=x.device).",
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
        try:
            name = f"region_{len(self.regions.names)}"
            made = super().create_proxy("call_module", target, tuple(given), {}, name)
            outputs = self.known.unpacked(made)
        except WorkloadError as error:
            raise UnfitError.here(str(error), starts=True, ends=True) from error
        plain = [leaf for leaf in leaves_of(outputs) if leaf is not None and not self._is_traced_tensor(leaf)]
        if plain:
            raise UnfitError.here(f"it gives {plain[0]!r}, which is no tensor", ends=True)
        return outputs

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
                f"Draw without a generator of your own, which follows the run's seed. Or: {_IN_OPERATOR}",
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
        if any(tensor.is_meta and id(tensor) not in held_ids for tensor in tensors):
            raise UnfitError.here("it computes with a layer that is no part of the model")
        changed = [given[place] for place in region.changed_places()]
        if any(map(self.known.shares_memory, changed)):
            raise UnfitError.here("it changes in place what lies in the memory of others", starts=True)
        if any(value.node.op == "get_attr" for value in changed):
            raise UnfitError.here("it changes in place what a module holds", starts=True)

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
        given = super().call_module(m, forward, args, kwargs)
        if not self.is_leaf_module(m, self.path_of_module(m)):
            return given
        # Forward may ask what it is, loop over it or put something into it, which a proxy would not stand.
        given = self.known.unpacked(given)
        self.scratch.hide(m)
        if is_recorded(m):
            record(m, args, given)
        return given

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


def _flattened(batch: fx.Node) -> tuple[str, str, tuple[Any, ...], dict[str, Any]]:
    return "call_method", "flatten", (batch, 0, 1), {}


@dataclass(frozen=True)
class Traced:
    """A task's forward as a graph.

    `decided`: where it has decided by the size of the batch; `moves`: moving averages that it makes. `modes`:
    see `TaskGraph`.
    """

    graph: fx.Graph
    decided: tuple[str, ...]
    moves: tuple[Move, ...]
    modes: Mapping[str, bool]


def trace_task(
    task: Task,
    workload: Workload,
    samples: Mapping[str, Tensor],
    observer: Observer,
    opened: tuple[str, ...] = (),
    regions: Regions | None = None,
) -> Traced:
    """The task's forward as a graph of operators and glue.

    Args:
        samples: a small collated batch, for the names and shapes of the fields.
        observer: of the whole workload.
        opened: dotted names of operators that are traced into.
        regions: parts of forward that are not traced.

    Raises:
        WorkloadError: the fields are not forward's arguments, or forward cannot be traced; with the place and
            what to do.
    """
    check_signature(task, arguments_of(task))
    while True:
        try:
            return _traced(task, workload, samples, observer, opened, regions or Regions())
        except SetsPlainError as error:
            observer.attributes.counted.append(error.key)


def _traced(
    task: Task,
    workload: Workload,
    samples: Mapping[str, Tensor],
    observer: Observer,
    opened: tuple[str, ...],
    regions: Regions,
) -> Traced:
    """Trace a task with what earlier forwards have left in counters unknown.

    Raises:
        SetsPlainError: there is another one than is known.
    """
    trace = partial(_graph_of, task, workload, samples, observer, opened, regions)
    memories, left = Memories.of(task.module), Changes()
    observer.is_tracing = True
    try:
        with noting_outside_reads() as questions:
            with says_what_operators_leave(task.module, observer.attributes, lambda: trace()):
                tracer, moves, graph = trace()
            memories.compare(left)
            refuse_earlier(task, graph, left, tracer.scratch.kept, observer.attributes, lambda: trace()[2])
            refuse_outside(task, graph, questions, lambda: trace()[2])
    finally:
        observer.is_tracing = False
        memories.restore()
    forget_equal_twins(task.module)
    tracer.regions.hold()
    _refuse_writes_apart(task, graph, observer)
    end = next(node for node in graph.nodes if node.op == "output")
    end.meta["place"] = place_of_function(type(task.module).forward)
    give_modes(task.module, tracer.modes.by_name)
    return Traced(graph, tuple(tracer.known.decided), moves.averages, tracer.modes.by_name)


def _graph_of(
    task: Task,
    workload: Workload,
    samples: Mapping[str, Tensor],
    observer: Observer,
    opened: tuple[str, ...],
    regions: Regions,
) -> tuple[OperatorTracer, Moves, fx.Graph]:
    """One trace, which leaves objects that forward keeps as forward does."""
    inside = tuple(task.module.get_submodule(name) for name in opened)
    tracer = OperatorTracer(task, workload, samples, observer, inside)
    tracer.moves = moves = Moves(task.name, task.module, lambda: tracer.graph)
    try:
        with (
            regions.called_by(tracer.run_region),
            unknown_inside(task.name, observer.attributes.counted),
            creators_traced(tracer),
            _own_gradients_refused(task.name),
            numbers_are_known(tracer),
            classes_are_known(tracer),
            draws_are_sized(),
            grids_are_calls(task.module, tracer),
            torch.enable_grad(),
            inference_is_without_gradients(),
            unseeded(),
            not_validated(),
            hooks_of_forward_left_alone(task.module),
            nothing_is_frozen(task.name, task.module, tracer.scratch, tracer.is_looking, moves),
            tracer.autocast.seeing(tracer.refuse_question),
            MadeInFloat64(tracer.is_looking),
        ):
            graph = tracer.trace(task.module)
            refuse_seeding(task.name)
            _drop_numbers_beside_loss(graph)
    except (WorkloadError, SetsPlainError):
        raise
    except Exception as error:
        raise _untraceable(task.name, error) from error
    return tracer, moves, graph


def _drop_numbers_beside_loss(graph: fx.Graph) -> None:
    """Let forward return no numbers that it has read of values (`acc.item()`) beside the loss: they are for
    whoever looks at it, and nobody does.
    """
    output = next(node for node in graph.nodes if node.op == "output")
    returned = output.args[0]
    if not isinstance(returned, Mapping) or "loss" not in returned:
        return
    read: Any = reached([node for node in graph.nodes if node.target == "item"], lambda node: node.users)
    of_loss = nodes_behind([node for node in [returned["loss"]] if isinstance(node, fx.Node)])
    if read.keys().isdisjoint(output.all_input_nodes):
        return
    output.args = (
        {
            key: value
            if key == "loss"
            else fx.node.map_arg(value, lambda node: None if node in read else node)
            for key, value in returned.items()
        },
    )
    for node in reversed(graph.nodes):
        if node in read and node is not output and node not in of_loss and not node.users:
            graph.erase_node(node)


def _refuse_kept_apart(task: Task, node: fx.Node, region: Region, observer: Observer) -> None:
    """Refuse a region that keeps something for the next forward which what is around it names: a trace has
    what was there when it was made.

    Raises:
        UnfitError: there is one; it may fit where it has in it what is around it.
        WorkloadError: another function names it.
    """
    left = observer.left.get(observer.kinds.behaviour(region))
    for name in () if left is None else left.kept:
        attribute = last_name(name)
        is_around = attribute in region.names_around()
        if is_around or attribute in _names_elsewhere(task.module, region):
            made = refusal(
                task.name,
                f"forward keeps {name} for the next one in what runs as it is written, where it decides by "
                "values, and uses it elsewhere too, where a trace has what was there when it was made",
                region.place,
                "Put what reads it and what changes it into one nn.Module, whose result the loss is made of, "
                "and list its class in the workload's `operators`: it runs whole, on one device.",
            )
            raise UnfitError.of(made, node.meta[FRAMES], starts=True, ends=True) if is_around else made


def _names_elsewhere(root: nn.Module, region: Region) -> set[str]:
    """What functions name that forward may call, other than that with the region and those that it calls."""
    all_, inside = Reads(), Reads()
    for module in root.modules():
        all_.of_module(module)
        inside.of_class(type(module))
    for module in region.children():
        inside.of_module(module)
    inside.of_function(region.function)
    all_.finish()
    inside.finish()
    region_code = {code.co_qualname for code in inside.codes} | {region.part_of}
    return {name for code in all_.codes if code.co_qualname not in region_code for name in code.co_names}


def _refuse_writes_apart(task: Task, graph: fx.Graph, observer: Observer) -> None:
    """Refuse regions that write into parameters or buffers which others read, each of its own copy, or that
    do nothing else, as nobody would run them. Raises what `_refuse_write_apart` raises.
    """
    root = task.module
    names = {id(tensor): name for name, tensor in [*root.named_parameters(), *root.named_buffers()]}
    read = _names_read(graph, root, names)
    for node in graph.find_nodes(op="call_module"):
        region = root.get_submodule(node.target)
        if not isinstance(region, Region):
            continue
        _refuse_kept_apart(task, node, region, observer)
        left = observer.left.get(observer.kinds.behaviour(region))
        held = dict([*region.named_parameters(), *region.named_buffers()])
        changed = [] if left is None else [id(held[name]) for name in left.changed]
        written = {names[key] for key in changed if key in names}
        if written:
            _refuse_write_apart(task, node, region, written, read)


def _names_read(graph: fx.Graph, root: nn.Module, names: Mapping[int, str]) -> dict[fx.Node, set[str]]:
    """The parameters and buffers that a graph's nodes may read, by their names; `names`: by their ids."""
    read: dict[fx.Node, set[str]] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            read[node] = {str(node.target)}
        elif node.op == "call_module":
            module = root.get_submodule(str(node.target))
            held = [*module.parameters(), *module.buffers()]
            read[node] = {names[id(tensor)] for tensor in held if id(tensor) in names}
    return read


def _refuse_write_apart(
    task: Task, node: fx.Node, region: Region, written: set[str], read: Mapping[fx.Node, set[str]]
) -> None:
    """Refuse a region that writes into parameters or buffers, where another node reads them too, or where
    nobody takes what the region gives.

    Raises:
        UnfitError: it may fit where it has in it what reads the same between operators, or what is behind it.
        WorkloadError: an operator reads the same.
    """
    readers = [reader for reader, names in read.items() if reader is not node and names & written]
    shared = sorted(written & {name for reader in readers for name in read[reader]})
    if not shared and any(user.users for user in (node, *node.users)):
        return
    first = (shared or sorted(written))[0]
    apart = "it also reads it elsewhere" if shared else "the loss is made of nothing there"
    made = refusal(
        task.name,
        f"forward writes into {first!r} in what runs as it is written; {apart}",
        region.place,
        _way_out(task.module, first),
    )
    if any(reader.op != "get_attr" for reader in readers):
        raise made
    order = list(node.graph.nodes)
    behind = [order.index(reader) > order.index(node) for reader in readers]
    raise UnfitError.of(made, node.meta[FRAMES], starts=not all(behind), ends=not shared or any(behind))


def _way_out(root: nn.Module, written: str) -> str:
    """Say what to do instead of writing between operators."""
    apart = (
        "Put what reads it and what writes into it into one nn.Module, whose result the loss is made of, and "
        "list its class in the workload's `operators`: it runs whole."
    )
    is_parameter = written in dict(root.named_parameters(remove_duplicate=False))
    return f"{DECLARE} Or: {apart}" if is_parameter else apart


def _lies_in(parameter: nn.Parameter, storage: int) -> bool:
    return bool(parameter.untyped_storage()._cdata == storage)


@contextlib.contextmanager
def _own_gradients_refused(task: str) -> Iterator[None]:
    """Refuse torch.autograd.Function between operators: a trace would go through its forward, and lose its
    backward.
    """
    function: Any = torch.autograd.Function
    original = vars(function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        proxies: list[fx.Proxy] = []
        fx.node.map_aggregate(
            (args, kwargs), lambda item: proxies.append(item) if isinstance(item, fx.Proxy) else None
        )
        if proxies and is_of_distributed(cls):
            refuse_call(cls.__name__, place_of_caller())
        if proxies and cls is _SAVES_INPUTS:
            return torch.empty(0)  # without a graph, which torch takes for: nothing to recompute
        if proxies:
            hint = _CHECKPOINT if issubclass(cls, CheckpointFunction) else _IN_OPERATOR
            raise refusal(
                task,
                f"forward calls {cls.__name__}, a torch.autograd.Function with a backward of its own, "
                "between operators, and a trace would keep its forward alone",
                place_of_caller(),
                hint,
            )
        return original.__get__(None, cls)(*args, **kwargs)

    try:
        function.apply = classmethod(apply)
        yield
    finally:
        function.apply = original


def _untraceable(task: str, error: Exception) -> WorkloadError:
    collective = collective_of_error(error)
    if collective is not None:
        refuse_call(collective, place_of_error(error))
    text = str(error).strip().split("\n")[0]
    if "cache_utils" in text:
        what = "forward makes a cache of keys and values, which layers hand on and change"
        return refusal(task, what, place_of_error(error), "Set use_cache=False in the model's configuration.")
    if re.search(rf"\b(not|got) {Unknown.__name__}\b", text):  # torch looks at its class, and asks it nothing
        what = "forward sets an attribute between operators and reads what an earlier one has left there"
        return refusal(task, what, place_of_error(error), DECLARED)
    if is_of_compiled(error):
        return refusal(task, CALLS_COMPILED, place_of_error(error), LEAVE_OUT)
    if isinstance(error, NameError) and "parameter is not a member" in text:
        what = (
            "forward computes with a parameter of a layer that is no part of the model (in an object, a "
            "list, a variable): it is neither trained nor saved"
        )
        made = refusal(task, what, place_of_error(error), PART_HINT)
        return ReadsValuesError.at(made, frames=frames_of_error(error))
    if isinstance(error, UnknownError | fx.proxy.TraceError) or "Proxy" in text or "symbolic" in text:
        what = "forward depends on values that are known only when it runs, so it cannot be traced"
        what += f": {text}" if text else ""
        made = refusal(task, what, place_of_error(error), _WRAP_HINT)
        fields = error.fields if isinstance(error, UnknownError) else frozenset[str]()
        return ReadsValuesError.at(made, fields, frames_of_error(error))
    made = refusal(
        task,
        f"forward failed while being traced: {type(error).__name__}{': ' if text else ''}{text}",
        place_of_error(error),
        _WRAP_HINT,
    )
    return ReadsValuesError.at(made, frames=frames_of_error(error))
