"""Run a trace without computing it: on fake tensors, which have shapes and dtypes but no memory.

It is run with the task's batch size and with twice that, so that the dimension that doubles can be told to be
the batch's. A model of any size takes the same time.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from spindle_cli.analysis.fixed import (
    FRAMES,
    ReadsValuesError,
    after_selection,
    describe,
    fields_behind,
    is_fixed,
    reading,
    reads_values,
    rows_for,
)
from spindle_cli.analysis.layer_numbers import Findings
from spindle_cli.analysis.memo import AnalysisMemo, key_of, packed, portable, unpacked
from spindle_cli.analysis.outside import CHANCE, noting_outside_reads
from spindle_cli.analysis.own_draws import DRAW_WITH_TORCH, PythonDraws
from spindle_cli.analysis.rules.batch_norms import by_fixed_statistics
from spindle_cli.analysis.tracing.behaviour import Kinds
from spindle_cli.analysis.tracing.modes import SeenModes
from spindle_cli.analysis.tracing.proxies.attributes import SeenAttributes, Unknown
from spindle_cli.analysis.tracing.proxies.rows import USE
from spindle_cli.analysis.tracing.seen import LeftBehind, OtherShapesError, Samples, seen_result
from spindle_cli.analysis.tracing.shapes import (
    ChangesRecordError,
    Shapes,
    is_more_than_its_fields,
    leaves_of,
    records_kept,
    show_records,
)
from spindle_cli.analysis.without_data import Remembering, Unread, new_fake
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.building.attributes import (
    Changes,
    noted_by_hooks_of_forward_replaced,
    swapped_tensors,
    watching,
)
from spindle_cli.workload.building.contents import Leftover
from spindle_cli.workload.building.memory import NotingWrites, RefusingWrites, handed_out
from spindle_cli.workload.graph import DECLARE
from spindle_cli.workload.introspection import fields_of
from spindle_cli.workload.one_process import collective_of_error, refuse_call
from spindle_cli.workload.refuse import place_inside, place_of_error, refusal, refuse_compiled

# What torch.fx says of the lists and dicts among a node's arguments.
_IMMUTABLE = re.compile("immutable_(list|dict)'? object does not support mutation")


class _ChangesItsInputError(Exception):
    """A module has changed a tensor that it was given."""


FREEZE_WHERE_BUILT = (
    "Say so where the model is built (requires_grad_(False)); in forward, take x.detach() or torch.no_grad() "
    "around what is not to be trained by this."
)


# In what torch says of it: what an operator does not hold stays on the meta device.
_NOT_HELD = re.compile(r"\bmeta\b")
_FOLLOWED = (
    "Give and take tensors, or tuples, named tuples, dicts or dataclasses of them that are their fields "
    "alone (no __post_init__, field(init=False) or further attributes)."
)


class _ReplacesParameterError(Exception):
    """A module has put another parameter in the place of the one that is named."""


class _FreezesParameterError(Exception):
    """A module has said of the parameter that is named whether it takes a gradient."""


class _DrawsElsewhereError(Exception):
    """A module has drawn from something else than torch; the message says from what."""


class Observer:
    """Runs the traces of one workload on fake tensors, each kind of layer once for each kind of input.

    `memo`: what another process has found of the same workload.
    `attributes`: what forwards have asked modules for, and set on them; `modes`: which modes they set.
    """

    def __init__(self, memo: AnalysisMemo | None = None) -> None:
        self.memo = memo if memo is not None and memo.is_of_this_torch() else None
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self.mode:
            self._device = torch.empty(0).device  # the default one
        self.kinds = Kinds()
        self.attributes = SeenAttributes()
        # by task, samples of its dataset to see what gives no shapes without values; of others it fails
        self.samples: dict[str, Samples] = {}
        # by the behaviour of modules that were seen on these, what they were seen to leave
        self.left: dict[str, LeftBehind] = {}
        self.modes = SeenModes()
        self.is_tracing = False  # a forward goes on with what hooks have noted
        # by id, with the tensor itself, so that its id stays its own
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}
        self._calls: Findings[Any] = Findings(self._told)

    def observe(
        self, task: str, root: nn.Module, graph: fx.Graph, samples: Mapping[str, Tensor], batch_size: int
    ) -> Shapes:
        """Run a trace on fake tensors for `batch_size` samples and for twice as many.

        Args:
            task: name, for messages.
            root: module that the trace's names are relative to; its parameters may be on the meta device.
            samples: a collated batch of any number of samples, for the shapes and dtypes of the fields.

        Raises:
            WorkloadError: an operator or glue fails on such shapes, or reads values; with its place in the
                user's code.
        """
        runs = self.runs(task, root, graph, samples, batch_size)
        for run in runs:
            run.advance()
        return Shapes(batch_size, *(run.env for run in runs))

    def runs(
        self, task: str, root: nn.Module, graph: fx.Graph, samples: Mapping[str, Tensor], batch_size: int
    ) -> tuple[Run, Run]:
        """Runs of a trace that have not begun, for the batch and for twice the batch. Arguments as of
        `observe`.
        """
        return (
            Run(self, root, graph, task, samples, batch_size, doubled=False),
            Run(self, root, graph, task, samples, 2 * batch_size, doubled=True),
        )

    def call(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        otherwise: Callable[[Exception], tuple[Any, LeftBehind]] | None = None,
        of: tuple[str, nn.Module] | None = None,
    ) -> Any:
        """What a module gives, from memory if an equal one was given equal inputs.

        Args:
            of: the task and its module, which may read what this one leaves.
            otherwise: finds it where the module fails on fake tensors, with what the module was seen to
                leave; or raises what it is given.
        """

        def find() -> tuple[Any, tuple[tuple[str, ...], ...] | None]:
            try:
                result, left = self._run(module, args, kwargs, *(of or ("", module)))
                return result, None if left is None else (left.changed, left.kept, left.left)
            except (
                _ChangesItsInputError,
                _ReplacesParameterError,
                _FreezesParameterError,
                ChangesRecordError,
            ):
                raise
            except Exception as error:
                if otherwise is None:
                    raise
                result, left = otherwise(error)
                return pytree.tree_map(self._like, result), (left.changed, left.kept, left.left)

        described = pytree.tree_map(_describe, (args, kwargs))
        unnumbered, numbered = (f"{text} {described}" for text in self.kinds.behaviours(module))
        with noting_outside_reads():  # no question of forward's own
            output, left = self._calls.of((unnumbered, numbered), module, find)
        if left is not None:
            self.left[self.kinds.behaviour(module)] = LeftBehind(*left)
        return pytree.tree_map(again, output)

    def _like(self, value: Any) -> Any:
        """A fake tensor like a real one that was computed."""
        if not isinstance(value, Tensor):
            return value
        with self.mode:
            made = torch.empty(tuple(value.shape), dtype=value.dtype)
        return made.requires_grad_().clone() if value.requires_grad else made

    def _run(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], task: str, root: nn.Module
    ) -> tuple[Any, LeftBehind | None]:
        """What a module gives; and what it leaves, of a part of forward that runs as it is written."""
        try:
            return self._run_once(module, args, kwargs, task, root)
        except _DrawsElsewhereError as error:
            if str(error) != CHANCE:
                raise
        # A library may do so once, for names in code that it makes and keeps (einx).
        return self._run_once(module, args, kwargs, task, root)

    def _run_once(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], task: str, root: nn.Module
    ) -> tuple[Any, LeftBehind | None]:
        given = [item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        versions = [tensor._version for tensor in given]
        trains = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        unknown = partial(Unknown, task, is_of_operator=True)
        norms = by_fixed_statistics(module, is_whole=True)  # momentum=None reads a value
        with (
            norms,
            watching(root) as around,
            swapped_tensors(module, self.fake) as changes,
            noted_by_hooks_of_forward_replaced(module, root, unknown) as noted,
            self.guarding(task, root, module),
            NotingWrites() as writes,
            failures_unlogged(),
            records_kept((args, kwargs)),
        ):
            held = dict(module.named_parameters())
            buffers, around_it = list(module.named_buffers()), list(_buffers_around(root, module))
            draws = PythonDraws(module)
            result = module(*args, **kwargs)
            show_records(result)
            if (what := draws.what()) is not None:
                raise _DrawsElsewhereError(what)
            _require_same_parameters(module, held, trains)
            now = dict(module.named_buffers())
            others = [name for owner, name, buffer in around_it if owner._buffers.get(name) is not buffer]
            written = [n for n, buffer in buffers if writes.has(buffer) or now.get(n) is not buffer]
            changes.note_written(writes.has)
        if others:
            raise _writes_elsewhere(task, others[0])
        left = None
        if hasattr(module, "owners"):  # a part of forward that runs as it is written
            self.attributes.note(module, changes)
            left = LeftBehind(tuple(written), changes.kept, changes.left)
        else:
            self.note(module, changes, [*changes.leftovers, *around.leftovers], writes.tensors)
            self.attributes.noted.extend(noted)
        if not getattr(module, "inplace", False) and versions != [tensor._version for tensor in given]:
            raise _ChangesItsInputError
        return result, left

    @staticmethod
    def guarding(task: str, root: nn.Module, module: nn.Module) -> RefusingWrites:
        """Inside, a module may not write into parameters and buffers of its task's that it does not hold."""
        return RefusingWrites(partial(_others, root, module), partial(_writes_elsewhere, task))

    def note(
        self, module: nn.Module, changes: Changes, leftovers: Sequence[Leftover], written: Sequence[Tensor]
    ) -> None:
        """Note what an operator leaves, and what it writes into. What its hooks have seen is there for the
        rest of a forward that is traced, which is to meet the stand-ins.
        """
        self.attributes.note(module, changes)
        self.attributes.written.extend(written)
        self.attributes.leftovers.extend(leftovers)
        for leftover in leftovers if self.is_tracing else ():
            if leftover.is_noted_by_hook:
                leftover.put()

    def memory_of(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[list[int], list[int], set[int]]:
        """Say in which memory each tensor lies that a module gives, and each that it is given, and which
        memory its parameters and buffers have.
        """
        with torch.random.fork_rng(devices=[]), self.mode, torch.enable_grad():
            given, more = pytree.tree_map(again, (args, kwargs))
            with swapped_tensors(module, self.fake):
                result = module(*given, **more)
        held = {storage_of(self.fake(tensor)) for tensor in (*module.parameters(), *module.buffers())}
        gives, takes = (
            [storage_of(leaf) for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]
            for tree in (result, [given, more])
        )
        return gives, takes, held

    def observed(self) -> dict[str, JsonValue]:
        """Return what modules were observed to give, for another process (see `AnalysisMemo`)."""
        return portable(self._calls.known, packed)

    def _told(self, call: str) -> Any:
        """What another process says that a call gives; None if it says nothing."""
        key = None if self.memo is None else key_of(call)
        record = None if self.memo is None or key is None else self.memo.observed.get(key)
        if record is None:
            return None
        with self.mode:
            return unpacked(
                record, lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)
            )

    def fake(self, tensor: Tensor) -> Tensor:
        """A fake tensor like a real or meta one; the same for the same."""
        if id(tensor) not in self._fakes:
            made = new_fake(tensor, self.mode, self._device)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, tensor.requires_grad)
            self._fakes[id(tensor)] = (tensor, made)
        return self._fakes[id(tensor)][1]


def _require_same_parameters(
    module: nn.Module, held: Mapping[str, nn.Parameter], trains: Mapping[str, bool]
) -> None:
    """Refuse that a forward has replaced parameters of its module, or set whether they take gradients.

    Args:
        held, trains: by name, the parameters before, and whether they took gradients.
    """
    for name, parameter in module.named_parameters():
        if held.get(name, parameter) is not parameter:
            raise _ReplacesParameterError(name)
        if parameter.requires_grad is not trains.get(name, parameter.requires_grad):
            parameter.requires_grad_(trains[name])  # as others are to see it
            raise _FreezesParameterError(name)


def _others(root: nn.Module, module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of a task's module that another one of it does not hold."""
    held_ids = set(map(id, (*module.parameters(), *module.buffers())))
    named = [*root.named_parameters(), *root.named_buffers()]
    return [(name, tensor) for name, tensor in named if id(tensor) not in held_ids]


def _buffers_around(root: nn.Module, module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor | None]]:
    """The buffers of a task's module that another one of it does not hold, with who holds them. (Those that a
    part of forward has which runs as it is written are put back when it has run.)
    """
    inside = set(module.modules())
    for part in root.modules():
        if part not in inside and not isinstance(part, torch.jit.ScriptModule):
            yield from ((part, name, buffer) for name, buffer in part._buffers.items())


def _writes_elsewhere(task: str, name: str) -> WorkloadError:
    return refusal(
        task,
        f"an operator, or a hook of one, changes {name!r}, which the operator does not hold: another device "
        "has it, where it stays what it was",
        place_inside(),
        "Let the operator hold it (self.register_buffer in its class) and do all that is done with it; or "
        "let forward change it, by what the operator returns.",
    )


def storage_of(tensor: Tensor) -> int:
    """A number for the memory that a tensor lies in."""
    return int(tensor.untyped_storage()._cdata)


def again(value: Any) -> Any:
    """A tensor like one seen before, and a new object; no leaf if it has a gradient."""
    if not isinstance(value, Tensor) or is_fixed(value):
        return value
    with torch._C.DisableTorchFunction():  # modes need not see it
        return value.detach().requires_grad_().clone() if value.requires_grad else value.detach()


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    gradient = " with gradient" if value.requires_grad else ""
    return f"{value.dtype} {tuple(value.shape)}{gradient}{describe(value)}"


def _hides_tensors(leaf: Any) -> bool:
    """Whether it is an object, a dataclass say, with tensors in it: no walk through containers comes to
    them.
    """
    if isinstance(leaf, Tensor | type):
        return False
    inside = leaf.values() if isinstance(leaf, Mapping) else leaf if isinstance(leaf, Set) else ()
    if any(isinstance(value, Tensor) for value in inside):
        return True
    return any(isinstance(value, Tensor) for value in (fields_of(leaf) or {}).values())


@contextlib.contextmanager
def failures_unlogged() -> Iterator[None]:
    """Keep torch from printing a traceback for an operation that fails on fake tensors: the error says it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


class Run(fx.Interpreter):
    """Runs a graph on fake tensors for `count` samples; `env`: what each node gives. Failures refuse."""

    def __init__(
        self,
        observer: Observer,
        root: nn.Module,
        graph: fx.Graph,
        task: str,
        samples: Mapping[str, Tensor],
        count: int,
        *,
        doubled: bool,
    ) -> None:
        super().__init__(root, garbage_collect_values=False, graph=graph)
        self._root = root
        self._observer = observer
        self._task = task
        self._samples = samples
        self._count = count
        self._doubled = doubled
        self._node: Any = None  # that is being run

    def advance(self) -> None:
        """Run all nodes of the graph that have not run yet.

        Raises:
            WorkloadError: one of them fails.
        """
        fakes = torch.random.fork_rng(devices=[]), self._observer.mode, Remembering(), Unread()
        with contextlib.ExitStack() as stack:
            for context in (*fakes, torch.enable_grad(), failures_unlogged()):
                stack.enter_context(context)
            for node in self.graph.nodes:
                if node not in self.env and node.op != "output":
                    self.env[node] = self.run_node(node)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        self._node = n
        try:
            value = super().run_node(n)
        except WorkloadError:
            raise
        except Exception as error:
            raise self._refusal(n, error) from error
        show_records(value)
        if n.op.startswith("call_"):
            self._refuse_hidden(n, value)
        return value

    def _refuse_hidden(self, node: fx.Node, value: Any) -> None:
        for leaf in pytree.tree_leaves(value):
            if _hides_tensors(leaf):
                raise refusal(
                    self._task,
                    f"{self._called(node)} gives a {type(leaf).__name__}, an object with tensors in it that "
                    "cannot be followed from operator to operator",
                    node.meta.get("place"),
                    _FOLLOWED,
                )

    def _called(self, node: fx.Node) -> str:
        """A node as messages name it."""
        if node.op != "call_module":
            return f"{node.name!r}"
        return f"{node.target!r} ({type(self.fetch_attr(str(node.target))).__name__})"

    def placeholder(self, target: Any, *_: Any) -> Any:
        """A field of the batch."""
        sample = self._samples[str(target)]
        if is_fixed(sample):
            return rows_for(sample, self._count)
        return torch.empty((self._count, *sample.shape[1:]), dtype=sample.dtype)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module with fake parameters; one that cannot do without values, with real ones."""
        module = self.fetch_attr(str(target))
        seen = partial(self._seen, self._node, module)
        return self._observer.call(module, args, kwargs, seen, (self._task, self._root))

    def _more_samples(self) -> Mapping[str, Tensor]:
        return {**self._samples, **self._observer.samples[self._task]()}

    def _seen(self, node: fx.Node, module: nn.Module, error: Exception) -> tuple[Any, LeftBehind]:
        """What a module gives that fails on fake tensors, and what it leaves.

        Raises:
            WorkloadError: another thing for other samples.
            Exception: what it was given, as the module fails on real ones too.
        """
        if self._task not in self._observer.samples:
            raise error
        guard = self._observer.guarding(self._task, self._root, module)
        try:
            seen = seen_result(node, module, self._more_samples, self._count, self.env, guard)
        except WorkloadError:
            raise
        except OtherShapesError as differs:
            made = refusal(
                self._task,
                f"{self._called(node)} decides by the values of its batch, so that it runs whole and as it "
                f"is written; but {differs}",
                node.meta.get("place"),
                "What goes on to other operators has one shape, whichever samples a batch has: give packed "
                "sequences total_length, pad to a fixed length, and return tensors alone.",
            )
            raise ReadsValuesError.at(made, frames=node.meta.get(FRAMES, ())) from error
        except Exception:  # it fails on real samples, too: what was said first says why
            raise error from None
        if not hasattr(module, "owners"):
            # What hooks have seen here are real tensors, of which only shapes have a meaning.
            leftovers = [leftover for leftover in seen.changes.leftovers if not leftover.is_noted_by_hook]
            self._observer.note(module, seen.changes, leftovers, seen.written)
        return seen.result, seen.left

    def get_attr(self, target: Any, *_: Any) -> Any:
        """A parameter, buffer or other attribute; fake if it is a tensor."""
        value = self.fetch_attr(str(target))
        return self._observer.fake(value) if isinstance(value, Tensor) else value

    def _refusal_of_deed(self, what: str, node: fx.Node, error: Exception) -> WorkloadError | None:
        """The refusal of what a module, `what`, did and must not do; None: it failed for another reason."""
        match error:
            case _ChangesItsInputError():
                said = "changes its input in place, which the op before it has handed on"
                hint = "Let it make a new tensor (x = x + y instead of x += y, inplace=False)."
            case _ReplacesParameterError():
                said = (
                    f"puts another parameter in the place of {str(error)!r}, which optimizers, checkpoints "
                    "and exports would not see"
                )
                hint = (
                    "Write into the one that is there (self.weight.data.copy_(...), requires_grad=False), or "
                    "keep it in a buffer."
                )
            case _FreezesParameterError():
                said = (
                    f"says in its forward whether its parameter {str(error)!r} takes a gradient, which is "
                    "decided once for a run"
                )
                hint = FREEZE_WHERE_BUILT
            case ChangesRecordError():
                said = f"sets fields of a {error} that it was given"
                hint = "Let it make a new one (dataclasses.replace(state, h=h)) and return that."
            case _DrawsElsewhereError():
                said = (
                    f"draws random numbers by {error}, which every share of a batch would draw alike, and "
                    "otherwise when it is recomputed"
                )
                hint = DRAW_WITH_TORCH
            case _:
                return None
        return refusal(self._task, f"{what} {said}", node.meta.get("place"), hint)

    def _reading(self, what: str, node: fx.Node, place: str | None, error: Exception) -> WorkloadError:
        """The refusal of what has other shapes for other values, or hands them to other code than torch's."""
        use = node.meta.get(USE)
        if use is not None:
            said, hint = after_selection(use)
        else:
            said, hint = reading(what, error, is_operator=node.op == "call_module")
        made = refusal(self._task, said, place, hint)
        return ReadsValuesError.at(made, fields_behind(node), node.meta.get(FRAMES, ()))

    def _refusal(self, node: fx.Node, error: Exception) -> WorkloadError:
        what = self._called(node)
        if (collective := collective_of_error(error)) is not None:
            refuse_call(collective, place_of_error(error))
        if (of_compiled := refuse_compiled(self._task, error)) is not None:
            return of_compiled
        if (refused := self._refusal_of_deed(what, node, error)) is not None:
            return refused
        place = place_of_error(error) or node.meta.get("place")
        if isinstance(node.target, type) and is_more_than_its_fields(node.target):
            return refusal(
                self._task,
                f"forward makes a {node.target.__name__}, a dataclass that is more than its fields, between "
                "operators",
                place,
                _FOLLOWED,
            )
        if isinstance(error, TypeError) and _IMMUTABLE.search(str(error)):
            return refusal(
                self._task,
                f"{what} changes a list or dict that it was given",
                place,
                "Let it make a new one ({**state, 'h': h}) and return that.",
            )
        if reads_values(error):
            return self._reading(what, node, place, error)
        if (names := handed_out().refused_by_array(error)) is not None:
            return refusal(self._task, f"{what} writes by an array of numpy's into {names}", place, DECLARE)
        return self._failing(what, node, place, error)

    def _failing(self, what: str, node: fx.Node, place: str | None, error: Exception) -> WorkloadError:
        """The refusal of what fails for a batch; it says whether to try the call on real tensors."""
        shapes = ", ".join(
            _describe(value) for value in pytree.tree_leaves(self.fetch_args_kwargs_from_env(node))
        )
        text = str(error).strip().split("\n")[0]
        made = refusal(
            self._task,
            f"{what} fails for a batch of {self._count} samples: {type(error).__name__}: {text} "
            f"(given {shapes or 'nothing'})",
            place,
            self._hint_at(text),
        )
        # An operator may fail on fake tensors alone (sparse or nested ones): then it is run on real ones. Not
        # so one that computes with parameters that it does not hold: devices that run it do not have them.
        is_tried = node.op == "call_module" and not _NOT_HELD.search(text)
        return ReadsValuesError.at(made) if is_tried else made

    def _hint_at(self, text: str) -> str:
        """What to do about an error of torch's that says something, of a call that fails with this batch."""
        if _NOT_HELD.search(text):
            return (
                "Does it compute with a parameter of another layer's, which it has in a list, an object or "
                "from a function around it? Let that layer be a part of it: self.tied = other. Copies of "
                "parameters are buffers: self.register_buffer."
            )
        if self._doubled:
            return (
                "It works with the task's batch size but not with twice that: "
                "is the batch size written into the model?"
            )
        return "Do the shapes of the items fit the model, and is the batch large enough for its layers?"
