"""What a forward finds of an earlier one between operators: in a list, an object, a class or a file.

A trace would have what was there when it was made. So forward is traced once more, and finds what a trace
has left, wherever that is: it has to compute the same. What that has changed again goes on changing, and may
count up to something: so it is traced a third time, where nobody may look at such numbers and lists are long.
What is kept of sizes and numbers alone, a table of angles say, is no matter: it is made anew in every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import is_fake

from spindle_cli.analysis.fixed import ReadsValuesError
from spindle_cli.analysis.outside import OutsideReads, Reader, kept_in
from spindle_cli.analysis.own_draws import draws_by_itself
from spindle_cli.analysis.tracing.proxies.attributes import (
    OF_OPERATOR,
    PLAIN,
    KeptValue,
    ReadsUnknownError,
    Scratch,
    SeenAttributes,
    SetsPlainError,
    Unknown,
    of_operator,
)
from spindle_cli.analysis.tracing.regions import name_in_any_trace
from spindle_cli.analysis.tracing.signature import place_of_function
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.building.attributes import Changes, Memories
from spindle_cli.workload.building.contents import Leftover, last_name
from spindle_cli.workload.graph import CONSTANT, reached
from spindle_cli.workload.refuse import refusal
from spindle_cli.workload.step_values import asks_no_values
from spindle_cli.workload.types import Task

GIVE_AS_ARGUMENT = "Give it to the operator as an argument."
_OUTSIDE = (
    "A number that follows from the step is declared: Task(..., step_values={'beta': lambda step: min(1.0, "
    "(step + 1) / 100)}); one for each sample is a field of the dataset's items. Or put this part into an "
    "nn.Module of its own and list its class in the workload's `operators`: it is then run as it is."
)


@contextlib.contextmanager
def says_what_operators_leave(
    root: nn.Module, operators: SeenAttributes, again: Callable[[], object]
) -> Iterator[None]:
    """Where a trace fails that does not find what operators and their hooks leave, let it say so if it is
    that which it lacks. `again`: traces once more.
    """
    try:
        yield
    except WorkloadError as error:
        if not operators.leftovers:
            raise
        reported: WorkloadError = error
        with _there_once_more(root, operators.leftovers):
            try:
                again()
            except ReadsUnknownError as read:
                reported = read
            except (WorkloadError, SetsPlainError):  # which has been said
                pass
        raise reported from None


def refuse_earlier(
    task: Task,
    first: fx.Graph,
    left: Changes,
    scratch: Scratch,
    operators: SeenAttributes,
    trace: Callable[[], tuple[Scratch, fx.Graph]],
    regions: Mapping[str, nn.Module],
    *,
    asks_outside: bool,
) -> None:
    """Refuse a forward that computes with what an earlier one has left, or decides by it; and with what
    operators and their hooks have left.

    Args:
        left: what the first has left in objects, containers, classes and files; `scratch`: in attributes.
        operators: what they leave.
        trace: traces the next one, which finds it.
        regions: of the first, by name.
        asks_outside: whether it asks the world around it: `refuse_outside` traces the next one then.

    Raises:
        WorkloadError: with what is kept, and what to do.
        ReadsValuesError: it is made of sizes and numbers alone, and the next forward leaves it as it is (a
            table that grows), so that the statements around may run as they are written: a run that goes on
            makes it anew.
    """
    _refuse_written(task, first, operators)
    leftovers = [*operators.leftovers, *scratch.kept]
    if asks_outside and not (left or leftovers or operators.noted):
        return
    # Before another trace is given values of this one, and before they are put there once more.
    after = Memories.of(task.module)
    tables = [(kept, _as_table(kept, task.module)) for kept in scratch.kept_values]
    with _there_once_more(task.module, leftovers):
        is_same, read = _next_is_same(task, first, after, operators, regions, lambda: trace()[1])
    _forget_others(first)
    if not is_same:
        names = [*left.elsewhere, *left.held, *(f"self.{name}" for name in left.counted)]
        names += [leftover.name for leftover in scratch.kept]
        refused = _refusal(task, names, operators, read)
        if tables and not left and _are_left_alone(tables, trace):
            raise ReadsValuesError.at(refused, frames=scratch.kept_values[0].frames)
        raise refused


def _next_is_same(
    task: Task,
    first: fx.Graph,
    after: Memories,
    operators: SeenAttributes,
    regions: Mapping[str, nn.Module],
    again: Callable[[], fx.Graph],
) -> tuple[bool, ReadsUnknownError | None]:
    """Say whether a forward that finds what the first has left computes the same, and so does one that finds
    something unknown in the place of what goes on changing; and where the latter is looked at, if it is.

    Args:
        after: what objects, containers and classes held after the first.
        again: traces the next one.
    """
    memories, moved = Memories.of(task.module), Changes()
    is_same = _is_same(task.module, first, again)
    memories.compare(moved)
    _refuse_read_by_operators(task, first, moved, operators.leftovers, regions)
    try:
        with _replaced(task, operators.leftovers, after) as is_some:
            is_same_unknown = not is_some or _work(again()) == _work(first)
        return is_same and is_same_unknown, None
    except SetsPlainError:
        raise
    except ReadsUnknownError as error:
        return False, error
    except Exception:  # of what it finds there
        return False, None


def refuse_outside(task: Task, first: fx.Graph, queries: OutsideReads, again: Callable[[], fx.Graph]) -> None:
    """Refuse a forward that computes between operators with what it has asked the world around it: a clock,
    the number of its process, a file.

    Args:
        queries: what it has asked while it was traced.
        again: traces it once more.

    Raises:
        WorkloadError: with the place where it asks, and what to do.
    """
    for file, place in queries.files.items():
        what = f"forward reads the file {file!r} between operators, of which a trace has what was in it then"
        raise refusal(task.name, what, place, f"Read it where the model is built. {_OUTSIDE}")
    with queries.moved(1) if queries.places else contextlib.nullcontext():
        is_same = not queries.places or _is_same(task.module, first, again)
    _forget_others(first)
    if not is_same:
        name, place = next(iter(queries.places.items()))
        what = (
            f"forward asks {name} between operators and computes with the answer, which a trace has once and "
            "for all"
        )
        raise refusal(task.name, what, place, _OUTSIDE)


def _forget_others(graph: fx.Graph) -> None:
    """Let no nodes of another graph be users of this one's, as those are which compute with what was left."""
    for node in graph.nodes:
        for user in [user for user in node.users if user.graph is not graph]:
            del node.users[user]


def _refuse_written(task: Task, graph: fx.Graph, operators: SeenAttributes) -> None:
    """Refuse a forward that reads a tensor, no parameter or buffer, which an operator writes into.

    Raises:
        WorkloadError: with the place where it is read.
    """
    root = task.module
    written = {tensor.untyped_storage()._cdata for tensor in operators.written}
    named = (*root.named_parameters(), *root.named_buffers()) if written else ()
    held = {name for name, _ in named if not name.startswith(CONSTANT)}
    for node in graph.find_nodes(op="get_attr") if written else ():
        owner, _, name = str(node.target).rpartition(".")
        value = None if node.target in held else getattr(root.get_submodule(owner), name, None)
        if isinstance(value, Tensor) and value.untyped_storage()._cdata in written:
            raise refusal(
                task.name,
                of_operator("a tensor").replace("sets", "writes into"),
                next((user.meta.get("place") for user in node.users), None),
                OF_OPERATOR,
            )


def _refuse_read_by_operators(
    task: Task,
    graph: fx.Graph,
    left: Changes,
    leftovers: Sequence[Leftover],
    regions: Mapping[str, nn.Module],
) -> None:
    """Refuse a forward that moves something between operators which an operator reads: on that one's device
    it stays what it was.

    Args:
        left: what the next forward has left, and operators.
        leftovers: what operators leave: what they leave and read themselves is looked at elsewhere.

    Raises:
        WorkloadError: with what it leaves, and what to do.
    """
    root = task.module
    holders, names = (
        {id(leftover.holder) for leftover in leftovers},
        {leftover.name for leftover in leftovers},
    )
    all_places = {name: kept_in(root, name) for name in left.within if name not in names}
    places = {name: place for name, place in all_places.items() if _holder(place) not in holders}
    if not places:
        return
    forward = Reader([root])
    for target in dict.fromkeys(str(node.target) for node in graph.find_nodes(op="call_module")):
        region = regions.get(target)
        reader = Reader([region or root.get_submodule(target)])
        what_reads = repr(target) if region is None else "a part that runs as it is written"
        for name, place in places.items():
            if reader.reads(name, place, forward):
                raise refusal(
                    task.name,
                    f"forward sets {name} between operators, and {what_reads} reads it, maybe on another "
                    "device, where it stays what it was",
                    forward.place_of(last_name(name)) or place_of_function(type(root).forward),
                    f"{GIVE_AS_ARGUMENT} A number that follows from the step is declared: "
                    "Task(..., step_values={'beta': lambda step: min(1.0, (step + 1) / 100)}).",
                )


def _refusal(
    task: Task, names: Sequence[str], operators: SeenAttributes, read: ReadsUnknownError | None
) -> WorkloadError:
    """The refusal of what is read, which `read` tells if it was noticed; `names`: what forward leaves."""
    if read is not None and read.is_of_operator:
        return read
    place = read.place if read is not None else None
    place = place or place_of_function(type(task.module).forward)
    if not names:
        of_operators = [*operators.noted, *(leftover.name for leftover in operators.leftovers)]
        if of_operators:
            return refusal(task.name, of_operator(last_name(of_operators[0])), place, OF_OPERATOR)
        names = [
            "something that nobody sees change (what functools.lru_cache returns, an object of a library)"
        ]
    return refusal(
        task.name,
        f"forward computes between operators with what an earlier forward has left in {names[0]}, of which a "
        "trace knows nothing",
        place,
        "Where it is a tensor or a number, keep it in a buffer (self.register_buffer): what reads it and "
        "what changes it then runs as it is written, and checkpoints have it. Or put both into one nn.Module "
        "and list its class in the workload's `operators`: it runs whole, on one device.",
    )


def _holder(place: object) -> object:
    return place[0] if isinstance(place, tuple) else place


def _is_same(root: nn.Module, first: fx.Graph, again: Callable[[], fx.Graph]) -> bool:
    """Whether the next forward computes the same, with the same numbers."""
    try:
        second = again()
        return _work(second) == _work(first) and all(
            torch.equal(before, after)
            for before, after in zip(_numbers(first, root), _numbers(second, root), strict=True)
            if before is not None and after is not None and before.shape == after.shape
        )
    except Exception:  # of what it finds there
        return False


def _numbers(graph: fx.Graph, root: nn.Module) -> list[Tensor | None]:
    """The tensors of numbers that are computed with; None in the place of what is no such tensor."""
    of_step: dict[fx.Node, bool] = {}
    used = [source for node in graph.nodes if _is_of_step(node, of_step) for source in node.all_input_nodes]
    constants = [getattr(root, str(node.target), None) if _is_constant(node) else None for node in used]
    return [
        constant if isinstance(constant, Tensor) and not is_fake(constant) and not constant.is_meta else None
        for constant in constants
    ]


def _is_constant(node: fx.Node) -> bool:
    """Whether it is a tensor that forward has made of numbers while it was traced."""
    return node.op == "get_attr" and str(node.target).startswith(CONSTANT)


@contextlib.contextmanager
def _there_once_more(root: nn.Module, leftovers: Sequence[Leftover]) -> Iterator[None]:
    """Inside is there what operators leave; constants that are made inside go."""
    names_before = set(vars(root))
    try:
        with contextlib.ExitStack() as undo:
            for leftover in leftovers:
                undo.callback(leftover.put())
            yield
    finally:
        for name in [name for name in vars(root) if name.startswith(CONSTANT) and name not in names_before]:
            delattr(root, name)


@contextlib.contextmanager
def _replaced(task: Task, leftovers: Sequence[Leftover], after: Memories) -> Iterator[bool]:
    """Inside, something unknown is in the place of plain values that operators leave, and of those that were
    changed after the first forward, and lists that have grown are long; gives whether there was any.
    """
    holders = {id(leftover.holder) for leftover in leftovers}

    def unknown(holder: object, name: str) -> Unknown:
        return Unknown(task.name, holder, name, is_of_operator=id(holder) in holders)

    with contextlib.ExitStack() as undo:
        is_some = undo.enter_context(after.changed_replaced(unknown)).is_some
        for leftover in leftovers:
            held = vars(leftover.holder) if isinstance(leftover.holder, nn.Module) else {}
            if isinstance(held.get(leftover.attribute), PLAIN):
                undo.callback(held.__setitem__, leftover.attribute, held[leftover.attribute])
                held[leftover.attribute] = unknown(leftover.holder, leftover.attribute)
                is_some = True
        yield is_some


def _work(graph: fx.Graph) -> list[Any]:
    """What is computed of fields, parameters and chance, in order."""
    of_step: dict[fx.Node, bool] = {}

    def as_text(value: fx.Node) -> str:
        if not _is_of_step(value, of_step):
            return "numbers"
        return "of this step" if value.graph is graph else "of an earlier step"

    return [
        (
            node.op,
            getattr(node.target, "__name__", name_in_any_trace(str(node.target))),
            _texts(_outputs(node) if node.op == "output" else node.args, as_text),
            _texts(node.kwargs, as_text),
        )
        for node in graph.nodes
        if _is_of_step(node, of_step)
    ]


def _outputs(node: fx.Node) -> list[fx.Node]:
    """What forward returns, without the numbers and texts that it has beside tensors: nobody takes them."""
    outputs: list[fx.Node] = []
    fx.node.map_arg(node.args, outputs.append)
    return outputs


def _texts(arguments: Any, as_text: Callable[[fx.Node], str]) -> str:
    return repr(fx.node.map_arg(arguments, as_text))


def _are_left_alone(
    tables: Sequence[tuple[KeptValue, Tensor | None]], trace: Callable[[], tuple[Scratch, fx.Graph]]
) -> bool:
    """Whether all that forward keeps are tables, and a forward that finds them sets none: what goes on
    from forward to forward is none.

    Args:
        tables: what is kept, as `_as_table` has it.
        trace: traces a forward.
    """
    with contextlib.ExitStack() as undo:
        for kept, table in tables:
            if table is None:
                return False
            undo.callback(kept.module.__dict__.__setitem__, kept.name, kept.module.__dict__.get(kept.name))
            kept.module.__dict__[kept.name] = table
        try:
            scratch, _ = trace()
        except Exception:  # of what it finds there; it may set others then
            return False
    return not scratch.kept_values


def _as_table(kept: KeptValue, root: nn.Module) -> Tensor | None:
    """Return a tensor as large as what forward keeps, if that is made of sizes, numbers and buffers alone, so
    that it may be made anew; one that no trace has may go on from the old one.
    """
    value = kept.value
    if not isinstance(value, fx.Proxy):
        return value if isinstance(value, Tensor) and kept.old is None else None
    behind = reached([value.node], lambda node: () if _asks_size(node) else node.all_input_nodes)
    buffers = {name for name, _ in root.named_buffers()}
    is_made_of_others = any(
        node.op in ("placeholder", "call_module")
        or draws_by_itself(node)
        or (node.op == "get_attr" and not _is_constant(node) and node.target not in buffers)
        for node in behind
    )
    tracer: Any = value.tracer
    sizes = None if is_made_of_others else tracer.known.sizes(value)
    return None if sizes is None else torch.zeros(sizes[0], dtype=tracer.known.value(value).dtype)


def _asks_size(node: fx.Node) -> bool:
    """Whether a node asks a tensor for its shape, type or device."""
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel")
    return node.target is getattr and node.args[1] in ("shape", "dtype", "device", "ndim")


def _is_of_step(node: fx.Node, of_step: dict[fx.Node, bool]) -> bool:
    """Whether something that steps differ in has a part in a node."""
    if node not in of_step:
        of_itself = node.op in ("placeholder", "call_module", "get_attr") and not _is_constant(node)
        of_step[node] = (
            of_itself
            or draws_by_itself(node)
            or (
                not asks_no_values(node)
                and any(_is_of_step(source, of_step) for source in node.all_input_nodes)
            )
        )
    return of_step[node]
