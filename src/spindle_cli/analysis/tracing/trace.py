"""Trace a task's `forward` with torch.fx: operators are leaves, everything between them is glue."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointFunction

from spindle_cli.analysis.fixed import FRAMES, ReadsValuesError
from spindle_cli.analysis.outside import is_table_of_library, kept_in, noting_outside_reads
from spindle_cli.analysis.own_draws import unseeded
from spindle_cli.analysis.tracing.earlier import (
    refuse_earlier,
    refuse_outside,
    says_what_operators_leave,
)
from spindle_cli.analysis.tracing.faithful import (
    inference_is_without_gradients,
    nothing_is_frozen,
    refuse_seeding,
)
from spindle_cli.analysis.tracing.modes import give_modes
from spindle_cli.analysis.tracing.moves import Moves
from spindle_cli.analysis.tracing.observe import Observer
from spindle_cli.analysis.tracing.proxies.attributes import (
    DECLARED,
    Scratch,
    SetsPlainError,
    Unknown,
    unknown_inside,
)
from spindle_cli.analysis.tracing.proxies.functions import classes_are_known, creators_traced, draws_are_sized
from spindle_cli.analysis.tracing.proxies.grids import grids_are_calls
from spindle_cli.analysis.tracing.proxies.known import UnknownError, numbers_are_known
from spindle_cli.analysis.tracing.regions import HeldRegions, Region, Regions, UnfitError
from spindle_cli.analysis.tracing.signature import check_signature, place_of_function
from spindle_cli.analysis.tracing.tracer import IN_OPERATOR, OperatorTracer
from spindle_cli.analysis.without_data import not_validated
from spindle_cli.errors import WorkloadError
from spindle_cli.training.precision import MadeInFloat64, forget_equal_twins
from spindle_cli.workload.arguments import arguments_of
from spindle_cli.workload.building.attributes import Changes, Memories
from spindle_cli.workload.building.contents import hooks_of_forward_left_alone, last_name
from spindle_cli.workload.graph import DECLARE, Move, reached
from spindle_cli.workload.graph import made_of as nodes_behind
from spindle_cli.workload.introspection import Reads
from spindle_cli.workload.one_process import collective_of_error, is_of_distributed, refuse_call
from spindle_cli.workload.refuse import (
    frames_of_caller,
    frames_of_error,
    place_of_caller,
    place_of_error,
    refusal,
    refuse_compiled,
)
from spindle_cli.workload.types import Task, Workload

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


PART_HINT = (
    "Let it be a part: an attribute of its own, nn.ModuleList or nn.ModuleDict; with requires_grad_(False) "
    "if it is not to be trained."
)


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
    _refuse_hooks(task)
    while True:
        try:
            return _traced(task, workload, samples, observer, opened, regions or Regions())
        except SetsPlainError as error:
            observer.attributes.counted.append(error.key)


def _refuse_hooks(task: Task) -> None:
    """Refuse hooks of the task's own module: its forward is traced, around which they would run."""
    module = task.module
    hooks = {
        "register_forward_pre_hook": module._forward_pre_hooks,
        "register_forward_hook": module._forward_hooks,
        "register_full_backward_hook": module._backward_hooks,
        "register_full_backward_pre_hook": module._backward_pre_hooks,
    }
    for name, registered in hooks.items():
        if registered:
            raise refusal(
                task.name,
                f"the task's module, {type(module).__name__}, has hooks ({name}), which no plan runs",
                place_of_function(type(module).forward),
                "Let forward do what they do; or let a module around it call it, as a part may have "
                "hooks of their forward pass: class Whole(nn.Module) whose forward returns self.model(x).",
            )


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

    def scratch_and_graph() -> tuple[Scratch, fx.Graph]:
        tracer, _, graph = trace()
        return tracer.scratch, graph

    memories, left = Memories.of(task.module), Changes()
    observer.is_tracing = True
    try:
        with noting_outside_reads() as questions:
            with says_what_operators_leave(task.module, observer.attributes, lambda: trace()):
                tracer, moves, graph = trace()
            memories.compare(left)
            observer.attributes.left_between[task.name] = {
                kept_in(task.module, name): name
                for name in (*left.within, *_left_by_regions(tracer.regions, observer))
                if not is_table_of_library(name)
            }
            refuse_earlier(
                task,
                graph,
                left,
                tracer.scratch,
                observer.attributes,
                scratch_and_graph,
                tracer.regions.held,
                asks_outside=bool(questions.places),
            )
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


def _left_by_regions(regions: HeldRegions, observer: Observer) -> Iterator[str]:
    """Yield the names of what regions leave in objects, classes and files."""
    for region in regions.held.values():
        left = observer.left.get(observer.kinds.behaviour(region))
        if left is not None:
            yield from (*left.kept, *left.left)


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
            is_checkpoint = issubclass(cls, CheckpointFunction)
            refused = refusal(
                task,
                f"forward calls {cls.__name__}, a torch.autograd.Function with a backward of its own, "
                "between operators, and a trace would keep its forward alone",
                place_of_caller(),
                _CHECKPOINT if is_checkpoint else IN_OPERATOR,
            )
            raise refused if is_checkpoint else ReadsValuesError.at(refused, frames=frames_of_caller())
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
    # A trace that has ended says nothing of what it has traced.
    error.args = fx.node.map_aggregate(
        error.args, lambda said: "a Proxy" if isinstance(said, fx.Proxy) else said
    )
    text = str(error).strip().split("\n")[0]
    if "cache_utils" in text:
        what = "forward makes a cache of keys and values, which layers hand on and change"
        return refusal(task, what, place_of_error(error), "Set use_cache=False in the model's configuration.")
    if re.search(rf"\b(not|got) {Unknown.__name__}\b", text):  # torch looks at its class, and asks it nothing
        what = "forward sets an attribute between operators and reads what an earlier one has left there"
        return refusal(task, what, place_of_error(error), DECLARED)
    if (of_compiled := refuse_compiled(task, error)) is not None:
        return of_compiled
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
