"""Parts of a forward that run as they are written, on the whole batch.

Where forward decides by values (`if n == 0: return ...`, `k = int(ratio * len(losses))`, `while`, numpy), or
changes a buffer (`self.centre = 0.9 * self.centre + ...`), a trace knows no way on. The statements around
that place then become a module of their own, a `Region`: a trace has it as one call, and whoever runs that
call runs the user's own Python. It begins with the statement that decides or changes and ends with the first
behind it after which there are tensors alone again; at the latest with the function that it is in.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from spindle_cli.analysis.autograd import ASKS_GRADIENTS
from spindle_cli.analysis.fixed import ReadsValuesError
from spindle_cli.analysis.memo import HERE
from spindle_cli.analysis.tracing.behaviour import REGION, NoTwinError, Twins, behaviour_of, is_filled
from spindle_cli.analysis.tracing.parts import (
    Cut,
    Part,
    body_of,
    first_statement,
    function_of,
    rewritten,
    statement_at,
    tree_of,
    whole_lines,
)
from spindle_cli.analysis.tracing.proxies.selecting import Selected
from spindle_cli.analysis.tracing.shapes import with_items
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.introspection import Reads, fields_of
from spindle_cli.workload.refuse import Frame, frames_of_caller, is_of_the_user, place_of

_CALL = "__spindle_region__"
_BY_PLACE = "here_"  # in the name of a region that has something which is known by its place in memory alone
_ASKING = ("grad", "backward")  # by which names code asks for gradients


class UnfitError(ReadsValuesError):
    """A region cannot be where it is: `starts` and `ends`, whether another beginning or end may do; `tells`,
    whether it says more than what made it a region.
    """

    starts = False
    ends = False
    tells = False

    @classmethod
    def here(cls, what: str, *, starts: bool = False, ends: bool = False) -> UnfitError:
        """Make the error of the region that is being called."""
        made = cls(what)
        made.frames, made.starts, made.ends = frames_of_caller(), starts, ends
        return made

    @classmethod
    def of(cls, error: WorkloadError, frames: tuple[Frame, ...], *, starts: bool, ends: bool) -> UnfitError:
        """Make of a refusal the error of a region that is called in these frames."""
        made = cls(*error.args, hint=error.hint)
        made.frames, made.starts, made.ends, made.tells = frames, starts, ends, True
        return made


@dataclass
class Regions:
    """The regions of one task's forward, by the code of the functions that they are in, in order.

    `unfit`: code in which none can be; `root`: the task's module.
    """

    root: nn.Module | None = None
    cuts: dict[types.CodeType, tuple[Cut, ...]] = field(default_factory=dict)
    unfit: set[types.CodeType] = field(default_factory=set)
    _functions: dict[types.CodeType, types.FunctionType | None] = field(default_factory=dict)
    _before: dict[types.CodeType, types.CodeType] = field(default_factory=dict)  # by what it was rewritten to

    def extended(self, error: ReadsValuesError) -> bool:
        """Whether a region can be put around the place of an error, or made larger, so that it may not come
        again.
        """
        frames = [replace(frame, code=self._before.get(frame.code, frame.code)) for frame in error.frames]
        user_frames = [frame for frame in frames if is_of_the_user(frame.code)]
        if isinstance(error, UnfitError):
            if self._moved(user_frames[-1], starts=error.starts, ends=error.ends):
                return True
            self.unfit.add(user_frames[-1].code)
            self.cuts.pop(user_frames[-1].code, None)
        return any(self._covers(frame) for frame in reversed(user_frames))

    def _moved(self, frame: Frame, *, starts: bool, ends: bool) -> bool:
        """Whether the region that begins in a line can have another end or beginning."""
        body = body_of(frame.code)
        at = statement_at(body, frame.line)
        cut = next(candidate for candidate in self.cuts[frame.code] if at is not None and candidate.has(at))
        if ends and cut.end < len(body):
            self._put(frame.code, replace(cut, end=cut.end + 1))
            return True
        if starts and cut.start > first_statement(body):
            self._put(frame.code, replace(cut, start=cut.start - 1))
            return True
        return False

    def _covers(self, frame: Frame) -> bool:
        """Put a region around a line, unless there is one already."""
        if frame.code in self.unfit or self._function_of(frame.code) is None:
            return False
        at = statement_at(body_of(frame.code), frame.line)
        if at is None or any(cut.has(at) for cut in self.cuts.get(frame.code, ())):
            return False
        self._put(frame.code, Cut(at, at + 1))
        return True

    def _buffers(self) -> frozenset[str]:
        """The names of the attributes that are buffers."""
        modules = () if self.root is None else self.root.modules()
        return frozenset(name for module in modules for name in module._buffers)

    def _function_of(self, code: types.CodeType) -> types.FunctionType | None:
        """The one function of some code that can be written anew, looked for once; None if there is none."""
        function = self._functions.get(code)
        if function is None or function.__code__ is not code:
            function = self._functions[code] = function_of(code, self.root)
        return function

    def _put(self, code: types.CodeType, cut: Cut) -> None:
        """Add a cut, and take those in that it overlaps."""
        cut = whole_lines(body_of(code), cut, self._buffers())
        others = []
        for existing in self.cuts.get(code, ()):
            if existing.start < cut.end and cut.start < existing.end:
                cut = Cut(min(cut.start, existing.start), max(cut.end, existing.end))
            else:
                others.append(existing)
        self.cuts[code] = tuple(sorted([*others, cut], key=lambda existing: existing.start))

    @contextlib.contextmanager
    def called_by(self, call: Callable[[Region, Sequence[Any]], Any]) -> Iterator[None]:
        """Let the functions inside call `call` for their regions, with the traced values that these take."""
        with contextlib.ExitStack() as undo:
            for code, cuts in self.cuts.items():
                function = self._function_of(code)
                if function is None:  # forward has made it, and makes another of the same code
                    continue
                parts = [Part.of(function, cut) for cut in cuts]
                names = [f"{_CALL}{id(code)}_{number}" for number in range(len(parts))]
                for name, part in zip(names, parts, strict=True):
                    function.__globals__[name] = _caller(part, call)
                    undo.callback(function.__globals__.pop, name)
                function.__code__ = rewritten(function, dict(zip(names, parts, strict=True)))
                self._before[function.__code__] = code
                undo.callback(setattr, function, "__code__", code)
            yield


def _caller(part: Part, call: Callable[[Region, Sequence[Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    """What a function calls in the place of its region `part`, with its variables: `call` with the region."""

    def enter(local: dict[str, Any]) -> Any:
        given = {name: local[name] for name in part.takes if name in local}
        _refuse_changes_that_others_see(part, local)
        leaves: list[Any] = []
        values = {name: _taken_apart(value, leaves) for name, value in given.items()}
        function = part.inner(list(given))
        result = call(Region(part, function, values, _held(part, given)), leaves)
        return None if part.gives == () else result

    return enter


def _refuse_changes_that_others_see(part: Part, local: Mapping[str, Any]) -> None:
    """Refuse a region that may change a traced value in place which has another name, too: that would have
    it as it was.

    Args:
        local: the variables of its function, which calls the caller of this one.

    Raises:
        UnfitError: it has another name in this function, or in one that has called it.
    """
    for name in part.changes:
        value = local.get(name)
        if not isinstance(value, fx.Proxy):
            continue
        others = [held for variable, held in local.items() if variable != name]
        if any(leaf is value for leaf in pytree.tree_leaves(others)):
            raise UnfitError.here(f"it changes {name!r} in place, which has another name", starts=True)
        frame = sys._getframe(2).f_back
        while frame is not None:
            if is_of_the_user(frame.f_code) and any(
                leaf is value for leaf in pytree.tree_leaves(list(frame.f_locals.values()))
            ):
                raise UnfitError.here(f"it changes {name!r} in place, which its caller has")
            frame = frame.f_back


@dataclass(frozen=True)
class _Leaf:
    """Stands for a traced value among the leaves of a structure, at `place` in the list of them.

    `mask`: the place of the mask that selects rows of it; `by_entry`: that one selects entries.
    """

    place: int
    mask: int | None = None
    by_entry: bool = False


@dataclass(frozen=True)
class _Object:
    """In the place of an object with traced values in it."""

    like: Any
    attributes: Mapping[str, Any]


def _taken_apart(value: Any, leaves: list[Any]) -> Any:
    """A value with its traced values moved out of it, each once.

    Raises:
        UnfitError: a function takes them along.
    """

    def place(leaf: Any) -> int:
        for number, earlier in enumerate(leaves):
            if earlier is leaf:  # code may ask whether one is the other
                return number
        leaves.append(leaf)
        return len(leaves) - 1

    if type(value) is Selected:
        where = value.__dict__["where"]
        return _Leaf(place(value.__dict__["values"]), place(where.mask), where.repeats != 1)
    if isinstance(value, fx.Proxy):
        return _Leaf(place(value))
    if isinstance(value, dict):
        return {key: _taken_apart(item, leaves) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_taken_apart(item, leaves) for item in value]
        if all(item is original for item, original in zip(items, value, strict=True)):
            return value
        return with_items(value, items)
    if isinstance(value, types.FunctionType | types.MethodType):
        _refuse_traced_inside(value)
        return value
    fields = fields_of(value)
    if fields is None or isinstance(value, nn.Module | type | types.ModuleType):
        return value
    return _object_taken_apart(value, fields, leaves)


def _refuse_traced_inside(function: types.FunctionType | types.MethodType) -> None:
    cells = getattr(function, "__closure__", None) or ()
    if any(_is_traced(cell.cell_contents) for cell in cells if is_filled(cell)):
        raise UnfitError.here("a function that is made before takes traced values along", starts=True)


def _object_taken_apart(value: Any, fields: Mapping[str, Any], leaves: list[Any]) -> Any:
    traced = {name: _taken_apart(item, leaves) for name, item in fields.items() if _is_traced(item)}
    if not traced:
        return value
    bare = copy.copy(value)
    (fields_of(bare) or {}).update(dict.fromkeys(traced))
    return _Object(bare, traced)


def _is_traced(value: Any) -> bool:
    return any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves(value))


def _put_together(value: Any, given: Sequence[Any]) -> Any:
    """Put a value that was taken apart together again, with `given` in the places of its traced values."""
    if isinstance(value, _Leaf):
        tensor = given[value.place]
        if value.mask is None:
            return tensor
        mask = given[value.mask]
        return torch.masked_select(tensor, mask) if value.by_entry else tensor[mask]
    if isinstance(value, _Object):
        made = copy.copy(value.like)
        attributes = {name: _put_together(item, given) for name, item in value.attributes.items()}
        (fields_of(made) or {}).update(attributes)
        return made
    if isinstance(value, dict):
        items = {key: _put_together(item, given) for key, item in value.items()}
        if type(value) is dict:
            return items
        made = copy.copy(value)
        made.update(items)
        return made
    if isinstance(value, tuple | list):
        return with_items(value, [_put_together(item, given) for item in value])
    return value


def _over(value: Any, twins: Twins) -> Any:
    """Return what stands in another build for a value that was taken apart."""
    if isinstance(value, _Leaf):
        return value
    if isinstance(value, _Object):
        attributes = {name: _over(item, twins) for name, item in value.attributes.items()}
        return _Object(twins.of(value.like), attributes)
    if _leaves_in(value):
        if isinstance(value, dict):
            return {key: _over(item, twins) for key, item in value.items()}
        items = [_over(item, twins) for item in value]
        return with_items(value, items)
    return twins.of(value)


def _leaves_in(value: Any) -> list[_Leaf]:
    if isinstance(value, _Object):
        value = value.attributes
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves_in(item)]
    return [value] if isinstance(value, _Leaf) else []


class Region(nn.Module):
    """Some statements of a forward as a module: it has the modules and parameters that they may use."""

    def __init__(
        self, code: Part, function: types.FunctionType, values: Mapping[str, Any], held: _Held
    ) -> None:
        super().__init__()
        self.line = code.line
        self.text = hashlib.sha256(code.text().encode()).hexdigest()[:16]
        self.ends_function = code.gives is None
        self._around = code.names_around()
        self.part_of = code.function.__qualname__
        # Not among the attributes that torch looks through: the module that is `self` in the code has others.
        self._run = function
        self._values = values
        self._changed = frozenset(code.changes)
        self._places: list[tuple[nn.Module, str, str, Tensor]] = []
        self.owners = tuple(held.owners.values())
        for number, module in enumerate(held.modules.values()):
            self.add_module(f"part_{number}", module)
        for number, (owner, name) in enumerate(held.tensors.values()):
            tensor = owner._parameters.get(name, owner._buffers.get(name))  # asked, it would be traced
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"own_{number}", tensor)
            else:
                self.register_buffer(f"own_{number}", tensor)
            assert tensor is not None
            self._places.append((owner, name, f"own_{number}", tensor))

    def over(self, twins: Twins) -> Region:
        """Return the region with the modules, tensors and objects of another build.

        Raises:
            NoTwinError: they use something of which nothing is known there.
        """
        made = Region.__new__(Region)
        nn.Module.__init__(made)
        made.line, made.text, made.ends_function = self.line, self.text, self.ends_function
        made._changed, made._around, made._places = self._changed, self._around, []
        made.part_of = self.part_of
        if twins.of(self._run) is not self._run:
            raise NoTwinError
        made._run = self._run
        made._values = {name: _over(value, twins) for name, value in self._values.items()}
        made.owners = tuple(twins.of(owner) for owner in self.owners)
        for name, module in self._modules.items():
            made.add_module(name, twins.of(module))
        for owner, name, held_name, tensor in self._places:
            twin = twins.of(tensor)
            kind = made.register_parameter if held_name in self._parameters else made.register_buffer
            kind(held_name, twin)
            made._places.append((twins.of(owner), name, held_name, twin))
        return made

    @property
    def place(self) -> str:
        """Where it begins, seen from the present folder: no attribute, which would tell regions apart."""
        return place_of(self._run.__code__.co_filename, self.line)

    def names_around(self) -> frozenset[str]:
        """The names and attributes that the rest of the function uses."""
        return self._around

    def names_gradients(self) -> bool:
        """Whether its code names what asks for gradients (torch.autograd.grad, Tensor.backward, or either by
        another name), also where it does not come to it on the samples that it is traced with.
        """
        reads = Reads()
        for module in self.modules():
            reads.of_class(type(module))
        for owner in self.owners:
            reads.of_class(type(owner))
        for module in self.children():
            reads.of_module(module)
        reads.of_function(self._run)
        reads.finish()
        return not reads.names.isdisjoint(_ASKING) or any(map(reads.comes_to, ASKS_GRADIENTS))

    def tensors(self) -> list[Tensor]:
        """The tensors that the region may use, but for traced ones."""
        return [*self.parameters(), *self.buffers(), *self.tensors_taken()]

    def tensors_taken(self) -> list[Tensor]:
        """The tensors, no traced ones, that the rest of the function hands to it."""
        return [leaf for leaf in pytree.tree_leaves(self._values) if isinstance(leaf, Tensor)]

    @property
    def function(self) -> types.FunctionType:
        """The statements as a function."""
        return self._run

    def changed_places(self) -> list[int]:
        """The places of the values that it may change in place.

        Raises:
            UnfitError: one is a selection, of whose memory nothing is known.
        """
        leaves = [leaf for name in self._changed for leaf in _leaves_in(self._values.get(name))]
        if any(leaf.mask is not None for leaf in leaves):
            raise UnfitError.here("it changes in place what a mask selects", starts=True)
        return [leaf.place for leaf in leaves]

    def forward(self, *given: Any) -> Any:
        """Run the statements on these values and return what they give.

        Raises:
            WorkloadError: they change one of them in place, where that could not be seen before.
        """
        versions = [argument._version if isinstance(argument, Tensor) else 0 for argument in given]
        changed = {leaf.place for name in self._changed for leaf in _leaves_in(self._values.get(name))}
        unshared = [
            argument.clone() if place in changed and isinstance(argument, Tensor) else _by_itself(argument)
            for place, argument in enumerate(given)
        ]
        values = {name: _put_together(item, unshared) for name, item in self._values.items()}
        with self._tensors_held():
            result = self._run(**values)
        for argument, version in zip(given, versions, strict=True):
            if isinstance(argument, Tensor) and argument._version != version:
                raise WorkloadError(
                    f"{self.place}: code that runs whole changes in place what was computed before it",
                    hint="Use what returns a new tensor (add instead of add_, x = x + y instead of x += y).",
                )
        return result

    def place_of(self, owner: nn.Module, name: str) -> tuple[nn.Module, str] | None:
        """Where this one holds a buffer of a module: in which module, by which name; None: it does not."""
        for module, attribute, held_name, _ in self._places:
            if module is owner and attribute == name:
                return self, held_name
        return (owner, name) if any(part is owner for part in self.modules()) else None

    @contextlib.contextmanager
    def _tensors_held(self) -> Iterator[None]:
        """Let the modules that own tensors have those that this one was given in their places. Where it was
        given none, theirs count, whatever they hold at the time: a check in other numbers, say.
        """
        undo: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for owner, name, held_name, before in self._places:
                kind = "_parameters" if held_name in self._parameters else "_buffers"
                theirs, ours = getattr(owner, kind), getattr(self, kind)
                if ours[held_name] is not before:
                    undo.append((theirs, name, theirs[name]))
                    theirs[name] = ours[held_name]
            begun = [owner._buffers.get(name) for owner, name, _, _ in self._places]
            yield
            for number, (owner, name, held_name, before) in enumerate(self._places):
                now = owner._buffers.get(name)
                if now is begun[number] or now is None:
                    continue
                if self._buffers[held_name] is before:
                    self._places[number] = (owner, name, held_name, now)
                self._buffers[held_name] = now
        finally:
            for theirs, name, held in undo:
                theirs[name] = held


def _by_itself(value: Any) -> Any:
    """Return a tensor without gradients as another one over the same memory: code may say of it that it takes
    one, and others use it too.
    """
    return value.detach() if isinstance(value, Tensor) and not value.requires_grad else value


@dataclass
class _Held:
    """Modules and single tensors that some code may use, by their ids; `owners`: modules that it names parts
    of.
    """

    owners: dict[int, nn.Module] = field(default_factory=dict)
    modules: dict[int, nn.Module] = field(default_factory=dict)
    tensors: dict[tuple[int, str], tuple[nn.Module, str]] = field(default_factory=dict)
    seen: set[tuple[int, types.CodeType]] = field(default_factory=set)


def _held(code: Part, given: Mapping[str, Any]) -> _Held:
    """What a region may use of the modules that it is given: the parts that it names, all of those that it
    hands on.
    """
    held = _Held()
    _note(code.tree.body[code.cut.start : code.cut.end], given, held)
    closure = inspect.getclosurevars(code.function)
    _note(code.tree.body[code.cut.start : code.cut.end], {**closure.nonlocals, **closure.globals}, held)
    return held


def _note(nodes: Sequence[ast.AST], given: Mapping[str, Any], held: _Held) -> None:
    parents = {
        child: node for root in nodes for node in ast.walk(root) for child in ast.iter_child_nodes(node)
    }
    for node in (inner for root in nodes for inner in ast.walk(root)):
        if not isinstance(node, ast.Name) or node.id not in given:
            continue
        value, parent = given[node.id], parents.get(node)
        if isinstance(value, nn.Module) and isinstance(parent, ast.Attribute):
            held.owners[id(value)] = value
            _note_attribute(value, parent.attr, held)
        else:
            for leaf in pytree.tree_leaves(value):
                _note_value(leaf, held)


def _note_value(value: Any, held: _Held) -> None:
    if isinstance(value, nn.Module):
        held.modules[id(value)] = value
    elif isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
        _note_method(value.__self__, value.__func__, held)


def _note_attribute(module: nn.Module, name: str, held: _Held) -> None:
    """Note what `module.name` may use."""
    static = inspect.getattr_static(type(module), name, None)
    if isinstance(static, property) and static.fget is not None:
        _note_method(module, static.fget, held)
    elif isinstance(static, classmethod | functools.cached_property | functools.partialmethod):
        _note_method(module, getattr(static, "func", getattr(static, "__func__", None)), held)
    elif isinstance(static, types.FunctionType):
        _note_method(module, static, held)
    elif name in module._parameters or name in module._buffers:
        if module._parameters.get(name, module._buffers.get(name)) is not None:
            held.tensors[id(module), name] = (module, name)
    else:
        # Without asking the module: who asks is written down while a forward is traced.
        for leaf in pytree.tree_leaves(module._modules.get(name, module.__dict__.get(name))):
            _note_value(leaf, held)


def _note_method(module: nn.Module, function: Any, held: _Held) -> None:
    try:
        code = inspect.unwrap(function).__code__  # of what a decorator was given, as torch.no_grad() is
        if (id(module), code) in held.seen:
            return
        held.seen.add((id(module), code))
        tree = tree_of(code)
    except (AttributeError, OSError, SyntaxError, TypeError, IndexError, ValueError):
        held.modules[id(module)] = module  # all of it, as nothing is known of its code
        return
    if tree.args.args or tree.args.posonlyargs:
        first = [*tree.args.posonlyargs, *tree.args.args][0].arg
        _note(tree.body, {first: module}, held)


def name_in_any_trace(name: str) -> str:
    """Return what another trace of the same forward has in the place of an operator's or a region's name, of
    which it gives those another that have something which is known by its place in memory alone.
    """
    by_place = name.startswith(REGION + _BY_PLACE)
    return f"{REGION}{_BY_PLACE}{name.rpartition('_')[2]}" if by_place else name


class HeldRegions:
    """The regions of one trace, which the task's module has under names that say what they do: another trace
    of it, in another mode or at another length, may have others. They are none of its parts, and in no state.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self.names: list[str] = []
        self.held: dict[str, Region] = {}

    def add(self, region: Region) -> str:
        """Add a region and return its name."""
        behaviour = behaviour_of(region)
        digest = hashlib.sha256(behaviour.encode()).hexdigest()[:12]
        name = f"{REGION}{_BY_PLACE if behaviour.startswith(HERE) else ''}{digest}_{len(self.names)}"
        self.names.append(name)
        self.held[name] = region
        self.hold()
        return name

    def hold(self) -> None:
        """Let the module have them, also after its attributes were put back."""
        self._root.__dict__.update(self.held)


def names_of(region: Region, root: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The parameters and the buffers that a region may use, by their names in the task's module."""
    parameter_ids = {id(parameter) for parameter in region.parameters()}
    parameters = tuple(name for name, parameter in root.named_parameters() if id(parameter) in parameter_ids)
    buffer_ids = {id(buffer) for buffer in region.buffers()}
    return parameters, tuple(name for name, buffer in root.named_buffers() if id(buffer) in buffer_ids)
