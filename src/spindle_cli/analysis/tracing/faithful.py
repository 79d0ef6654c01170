"""Refuse what a trace would drop or freeze: contexts, Python state, draws and changes while tracing, and
changes of a tensor in place that would be lost, or seen by others, once the trace is cut into ops.

A trace keeps calls on tensors, and nothing else that `forward` does. What is done only once, while tracing,
would never be done again.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from spindle_cli.analysis.autocast import AutocastSeen
from spindle_cli.analysis.fixed import FRAMES, ReadsValuesError
from spindle_cli.analysis.outside import Reader, place_of_chance
from spindle_cli.analysis.own_draws import DRAW_WITH_TORCH, PythonDraws, is_seeded
from spindle_cli.analysis.tracing.behaviour import REGION, text_of_numbers
from spindle_cli.analysis.tracing.modes import MODE
from spindle_cli.analysis.tracing.moves import Moves
from spindle_cli.analysis.tracing.observe import FREEZE_WHERE_BUILT
from spindle_cli.analysis.tracing.proxies.attributes import PLAIN, Scratch, SetsPlainError, Unknown
from spindle_cli.analysis.tracing.proxies.functions import MARKS
from spindle_cli.analysis.tracing.proxies.grids import keeps_for_generating
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.building.contents import MISSING, Leftover, give_hooks, hooks_of
from spindle_cli.workload.building.memory import is_new, written_by
from spindle_cli.workload.graph import CONSTANT, DECLARE
from spindle_cli.workload.introspection import OF_TORCH
from spindle_cli.workload.refuse import frames_of_caller, place_of_caller, refusal

# Of Python's operators, those that change their first argument; `and_` and its like are only called so as
# `and` is a keyword.
_PYTHONS = frozenset(
    {
        *(operator.setitem, operator.delitem, operator.iadd, operator.isub, operator.imul, operator.itruediv),
        *(operator.ifloordiv, operator.imod, operator.ipow, operator.imatmul, operator.iand, operator.ior),
        *(operator.ixor, operator.ilshift, operator.irshift),
    }
)
APART = (
    "Put what moves parameters or buffers into an nn.Module of its own and list its class in the workload's "
    "`operators`: it is then run as it is."
)
HINT = "Use what returns a new tensor (add instead of add_, inplace=False, x = x + y instead of x += y)."


def way_out(root: nn.Module, held: fx.Node) -> str:
    """What to do instead of changing what a module holds."""
    return f"{DECLARE} Or: {APART}" if _is_parameter(root, held) else APART


def refusal_of_state(
    root: nn.Module, held: fx.Node, refused: WorkloadError, change: fx.Node
) -> WorkloadError:
    """The refusal of a change of what a module holds: of a buffer, the statements around it may run as they
    are written instead.
    """
    if _is_parameter(root, held):
        return refused
    return ReadsValuesError.at(refused, frames=change.meta.get(FRAMES, ()))


def _is_parameter(root: nn.Module, held: fx.Node) -> bool:
    """Whether what a module holds is a parameter."""
    owner, _, name = str(held.target).rpartition(".")
    return isinstance(getattr(root.get_submodule(owner), name, None), nn.Parameter)


def check_in_place(task: str, root: nn.Module, graph: fx.Graph) -> None:
    """Refuse glue that changes a tensor in place and is not its only user.

    Raises:
        WorkloadError: with the place in the user's code.
    """
    for node in graph.nodes:
        if _writes_elsewhere(node):
            raise _refusal_of_out(task, node)
        changed = changed_in_place(node, root)
        if changed is None:
            continue
        state = _state(changed, root)
        if state is not None:
            what = f"{node.name!r} changes {str(state.target)!r} in place, which a trace would lose"
            refused = refusal(task, what, node.meta.get("place"), way_out(root, state))
            raise refusal_of_state(root, state, refused, node)
        if not node.users or len(changed.users) > 1:
            raise _refusal(task, node, changed)


def check_homes(task: str, root: nn.Module, graph: fx.Graph, homes: Mapping[fx.Node, int]) -> None:
    """Refuse glue that changes in place what another op hands on.

    Raises:
        WorkloadError: with the place in the user's code.
    """
    for node in graph.nodes:
        changed = changed_in_place(node, root)
        # A copy that has no home is made where it is changed.
        is_copied_there = changed is not None and changed.target == "clone" and changed not in homes
        if changed is not None and not is_copied_there and homes.get(changed) != homes.get(node):
            raise _refusal(task, node, changed)


def changed_in_place(node: fx.Node, root: nn.Module) -> fx.Node | None:
    """The tensor that a node of glue changes, by torch's conventions: add_, inplace=True."""
    if node.op == "call_method":
        in_place = is_in_place_name(str(node.target))
    elif node.op == "call_function":
        in_place = _is_in_place_function(node.target) or node.kwargs.get("inplace") is True
    elif node.op == "call_module":
        in_place = getattr(root.get_submodule(str(node.target)), "inplace", False) is True
    else:
        return None
    changed = node.args[0] if node.args else None
    return changed if in_place and isinstance(changed, fx.Node) else None


def _writes_elsewhere(node: fx.Node) -> bool:
    """Whether a call writes into tensors by other ways than a trace follows: into those of out=, of a list
    (torch._foreach_mul_), or by an operation that is called by its overload (torch.ops.aten.add_.Tensor).
    """
    if node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    if node.kwargs.get("out") is not None or (schema is not None and schema.is_mutable):
        return True
    listed = bool(node.args) and isinstance(node.args[0], list | tuple)
    return listed and _is_in_place_function(node.target)


def _refusal_of_out(task: str, node: fx.Node) -> Exception:
    name = getattr(node.target, "__name__", str(node.target))
    return refusal(
        task,
        f"forward calls {name} between operators, which writes into tensors that it is given (by out=, in a "
        "list), and a trace would not keep that",
        node.meta.get("place"),
        "Take what it gives (z = torch.add(x, y)). Or put this into an nn.Module of its own and list its "
        "class in the workload's `operators`: it is then run as it is.",
    )


def _state(node: fx.Node, root: nn.Module) -> fx.Node | None:
    """The parameter or buffer that a node is, or was before it was changed in place."""
    source: Any = changed_in_place(node, root)
    if node.target is getattr and node.args[1] == "data":
        source = node.args[0]
    if isinstance(source, fx.Node):
        return _state(source, root)
    return node if node.op == "get_attr" else None


def _is_in_place_function(function: Any) -> bool:
    if getattr(function, "__module__", None) == operator.add.__module__:
        return function in _PYTHONS
    return is_in_place_name(getattr(function, "__name__", ""))


def is_in_place_name(name: str) -> bool:
    """Whether a method or function of torch changes its tensor, by its name."""
    return name.endswith("_") and not name.endswith("__") and not name.startswith("requires_grad")


def _refusal(task: str, node: fx.Node, changed: fx.Node) -> Exception:
    what = f"{node.name!r} changes {changed.name!r} in place, which other operators or glue use"
    return refusal(task, what, node.meta.get("place"), HINT)


NO_GRAD = "no_grad"  # key of a node's meta: it was made where gradients are switched off
NO_AUTOCAST = "no_autocast"  # key of a node's meta: the device types for which it switches autocast off
_OF_BUFFERS = (
    "Put what changes it, and the calls of all that use it, into one nn.Module and list its class in the "
    "workload's `operators`: it is then run as it is, on one device. Of a teacher, parameters alone may be "
    "moved between operators (teacher.parameters()): its batch norms then keep statistics of their own."
)
_KEPT_IN_BUFFER = (
    'Keep it in a buffer, self.register_buffer("mean", ...): what reads it and what changes it then runs as '
    "it is written, and checkpoints have it."
)
_BECOMES_A_PART = (
    "Keep it in a buffer (self.register_buffer): what reads it and what changes it then runs as it is "
    "written, and checkpoints have it. A module that has it, a teacher say, is an attribute of the model."
)
_IN_OPERATOR = (
    "Put this part into an nn.Module of its own and list its class in the workload's `operators`: it is then "
    "run as it is."
)

# What a forward may keep for itself, if the next one computes the same with it.
_OF_ONE_FORWARD = (fx.Proxy, list, tuple, dict, set, type(None))
_IN_INIT = (
    "A table or mask that the first forward makes and keeps: make it in __init__ for the longest input "
    '(self.register_buffer("table", ..., persistent=False)), or in every forward, without keeping it. '
    f"Or: {_IN_OPERATOR}"
)


def note_contexts(task: str, node: fx.Node, autocast: AutocastSeen, *, is_operator: bool) -> None:
    """Note on a new node that gradients or autocast are switched off where it is made.

    Raises:
        WorkloadError: it is made where autocast is switched on; or it is an operator, and it is off.
    """
    if not torch.is_grad_enabled():
        node.meta[NO_GRAD] = True
    if autocast.is_switched_on():
        what = "forward switches torch.autocast on between operators, which a trace does not keep"
        hint = f"Train in another precision by `precision` in the workload file, or: {_IN_OPERATOR}"
        raise refusal(task, what, place_of_caller(), hint)
    switched_off = autocast.switched_off()
    if is_operator and autocast.is_switched_off():
        what = "forward switches torch.autocast off around an operator, which a trace does not keep"
        raise refusal(task, what, place_of_caller(), "Switch it off inside the operator's own forward.")
    if switched_off and not is_operator:
        node.meta[NO_AUTOCAST] = switched_off


@contextlib.contextmanager
def inference_is_without_gradients() -> Iterator[None]:
    """Let `torch.inference_mode` switch gradients off inside and do nothing else: what is looked at while a
    forward is traced goes on, to layers that are trained too, where tensors of that mode could not.
    """
    mode: Any = torch.inference_mode
    enter, leave = mode.__enter__, mode.__exit__

    def entered(context: Any) -> None:
        context.was = torch.is_grad_enabled()
        torch.set_grad_enabled(not context.mode)

    def left(context: Any, *_: Any) -> None:
        torch.set_grad_enabled(context.was)

    mode.__enter__, mode.__exit__ = entered, left
    try:
        yield
    finally:
        mode.__enter__, mode.__exit__ = enter, leave


def refuse_question(task: str, name: str) -> None:
    """Refuse a forward that asks by torch's function `name` how autocast is set, where the statements around
    cannot run as they are written.
    """
    what = f"forward asks for torch.{name} between operators, which a trace answers once and for all"
    refused = refusal(task, what, place_of_caller(), _IN_OPERATOR)
    raise ReadsValuesError.at(refused, frames=frames_of_caller())


@contextlib.contextmanager
def nothing_is_frozen(
    task: str, root: nn.Module, scratch: Scratch, is_looking: Callable[[], bool], moves: Moves
) -> Iterator[None]:
    """Refuse, inside, what `forward` would do only while it is traced; leave the modules as they were.

    Args:
        scratch: which attributes may be set to traced values.
        moves: takes what it writes into parameters.
        is_looking: whether modules are being run to find out what is known, which changes nothing.

    Raises:
        WorkloadError: it sets an attribute, changes a parameter or buffer, or draws random numbers.
    """
    before = [
        (module, dict(module.__dict__), dict(module._buffers), hooks_of(module))
        for module in root.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    draws = PythonDraws(root)
    try:
        with (
            _attributes_kept(task, root, scratch, is_looking) as assigned,
            _memory_kept(task, root, is_looking, moves),
            _numbers_kept(task, root),
            _training_kept(task, root, is_looking),
            _NothingDone(task, root, is_looking, moves),
        ):
            yield
        for module, values, _, _ in before:
            for name in _set_past(module, values):
                if (id(module), name) not in assigned:
                    _check_set_past(task, root, module, name, values.get(name), scratch)
    finally:
        for module, values, buffers, hooks in before:
            constants = {key: value for key, value in module.__dict__.items() if key.startswith(CONSTANT)}
            module.__dict__.clear()
            module.__dict__.update(values | constants)
            module._buffers.clear()
            module._buffers.update(buffers)
            give_hooks(module, hooks)
    if (drawn := draws.what()) is not None:
        what = f"forward draws random numbers by {drawn} between operators"
        name_in_code = re.findall(r"\w+", drawn.partition(" (")[0])[-1]  # how code names it
        raise _frozen(task, what, Reader([root]).place_of(name_in_code) or place_of_chance(), DRAW_WITH_TORCH)


def refuse_seeding(task: str) -> None:
    """Refuse a forward that has seeded torch's generator by now."""
    if is_seeded():
        raise _frozen(task, "forward seeds torch's random numbers between operators", place_of_caller())


def _runs_as_written(refused: WorkloadError) -> ReadsValuesError:
    """What is refused where the statements around the place cannot run as they are written."""
    return ReadsValuesError.at(refused, frames=frames_of_caller())


def _frozen(task: str, what: str, place: str | None, hint: str = _IN_OPERATOR) -> WorkloadError:
    return refusal(task, f"{what}, which a trace does once and for all", place, hint)


@contextlib.contextmanager
def _attributes_kept(
    task: str, root: nn.Module, scratch: Scratch, is_looking: Callable[[], bool]
) -> Iterator[set[tuple[int, str]]]:
    """Refuse assignments to modules' attributes, except of tensors that are kept to save work, and of traced
    values that no other forward sees. Gives the modules' ids and the names that are assigned to.
    """
    module_class: Any = nn.Module
    original = module_class.__setattr__
    module_ids = {id(module) for module in root.modules()}
    assigned: set[tuple[int, str]] = set()

    def assign(module: nn.Module, name: str, value: Any) -> None:
        if id(module) in module_ids and not is_looking():
            _check_assignment(task, module, name, value, scratch)
        original(module, name, value)
        assigned.add((id(module), name))

    module_class.__setattr__ = assign
    try:
        yield assigned
    finally:
        module_class.__setattr__ = original


def _check_assignment(task: str, module: nn.Module, name: str, value: Any, scratch: Scratch) -> None:
    """Refuse that forward sets an attribute of a module which the next forward would find.

    Raises:
        WorkloadError: with the place where it is set.
        SetsPlainError: it sets a plain value, which may do where something unknown stands for it.
    """
    if name in MARKS or name == MODE or keeps_for_generating(module, name):
        return
    if isinstance(value, fx.Proxy) and _is_normed(module, name):
        return
    is_state = name in module._buffers or name in module._parameters
    if not is_state and _may_set(module, name, value, scratch):
        return
    what = f"forward sets self.{name} of {type(module).__name__} between operators"
    was_there = any(
        held.get(name) is not None for held in (module.__dict__, module._buffers, module._parameters)
    )
    refused = _frozen(task, what, place_of_caller(), _IN_OPERATOR if was_there else _IN_INIT)
    is_size = isinstance(value, fx.Proxy) and not value.tracer.is_tensor(value)  # type: ignore[attr-defined]  # a tracer of ours
    raise _runs_as_written(refused) if was_there and (name in module._buffers or is_size) else refused


def _set_past(module: nn.Module, before: dict[str, Any]) -> list[str]:
    """Return the names of attributes that are others than before; assigned to or not."""
    return [
        name
        for name, value in module.__dict__.items()
        if value is not before.get(name, MISSING)
        and name not in OF_TORCH
        and name not in MARKS
        and name != MODE
        and not name.startswith((CONSTANT, REGION))
    ]


def _check_set_past(
    task: str, root: nn.Module, module: nn.Module, name: str, old: Any, scratch: Scratch
) -> None:
    """Refuse an attribute that forward has set past `nn.Module.__setattr__` (`vars(self)["n"] += 1`, a
    `functools.cached_property`), which the next forward would find.

    Raises:
        WorkloadError: with the place in the user's code.
        SetsPlainError: it is a plain value, which may do where something unknown stands for it.
    """
    value = module.__dict__[name]
    is_plain = isinstance(value, (*PLAIN, Unknown))
    if isinstance(inspect.getattr_static(type(module), name, None), functools.cached_property):
        is_table = isinstance(value, Tensor) and not isinstance(value, fx.Proxy) and value._version == 0
        if not is_plain and not is_table:  # the next forward has to compute the same with it
            scratch.kept.append(Leftover.of_attribute(module, name, value))
        return
    if is_plain and type(value) is type(old) and not isinstance(value, Unknown) and value == old:
        return
    if is_plain and scratch.may_be_unknown(module, name, old, value):
        if isinstance(old, Unknown) or scratch.is_unknown(module, name):
            return
        raise SetsPlainError(module, name)
    what = f"forward sets {name} of {type(module).__name__} between operators, past its attributes"
    raise _frozen(task, what, Reader([root]).place_of(name), _IN_INIT if old is None else _IN_OPERATOR)


def _may_set(module: nn.Module, name: str, value: Any, scratch: Scratch) -> bool:
    """Whether forward may set an attribute, no parameter or buffer, to a value: no other forward sees it, it
    is what was there, or it is noted as kept to save work.
    """
    old = module.__dict__.get(name)
    if isinstance(value, _OF_ONE_FORWARD):
        if scratch.takes(module, name):
            return True
        if isinstance(old, _OF_ONE_FORWARD) and scratch.keeps(module, name, value):
            return True
    if isinstance(value, fx.Proxy):
        return False
    if value is old or (type(value) is type(old) and not isinstance(value, Tensor) and value == old):
        return True
    if isinstance(value, Tensor) and (old is None or isinstance(old, Tensor)):
        scratch.keep(module, name, value)
        return True
    if not scratch.may_be_unknown(module, name, old, value):
        return False
    if isinstance(old, Unknown) or scratch.is_unknown(module, name):
        return True
    raise SetsPlainError(module, name)


def _is_normed(module: nn.Module, name: str) -> bool:
    """Whether torch.nn.utils.weight_norm sets this attribute ahead of each call, so that none sees an older
    one's.
    """
    hooks = module._forward_pre_hooks.values()
    return any(isinstance(hook, WeightNorm) and hook.name == name for hook in hooks)


@contextlib.contextmanager
def _memory_kept(task: str, root: nn.Module, is_looking: Callable[[], bool], moves: Moves) -> Iterator[None]:
    """Refuse other memory for a parameter or buffer, no operation of torch: `teacher.data = ...`; but for a
    moving average.
    """
    names = {id(tensor): name for name, tensor in [*root.named_parameters(), *root.named_buffers()]}
    tensor_class: Any = Tensor
    original: Any = tensor_class.__base__.data

    def give(tensor: Tensor, value: Any) -> None:
        name = names.get(id(tensor))
        if name is not None and not is_looking():
            if moves.assign(name, value):
                return
            what = f"forward changes {name!r} between operators"
            raise _frozen(task, what, place_of_caller(), f"{DECLARE} Or: {_IN_OPERATOR}")
        original.__set__(tensor, value)

    tensor_class.data = property(original.__get__, give)
    try:
        yield
    finally:
        del tensor_class.data


@contextlib.contextmanager
def _numbers_kept(task: str, root: nn.Module) -> Iterator[None]:
    """Refuse that numpy writes into a buffer or a tensor of a module, whose memory it may share: torch does
    not see that: `self.steps.numpy()[:] += 1`.
    """
    before = [
        (name, tensor, tensor._version, text_of_numbers(tensor))
        for module in root.modules()
        for name, tensor in [*module._buffers.items(), *module.__dict__.items()]
        if type(tensor) is Tensor and not tensor.is_inference() and tensor.layout is torch.strided
    ]
    yield
    for name, tensor, version, text in before:
        if tensor._version == version and text_of_numbers(tensor) != text:
            raise _frozen(
                task,
                f"forward writes into the tensor {name!r} past torch (through numpy, say) between operators",
                Reader([root]).place_of(name),
                "Write into it with torch (self.steps.add_(1)): such statements run as they are written.",
            )


@contextlib.contextmanager
def _training_kept(task: str, root: nn.Module, is_looking: Callable[[], bool]) -> Iterator[None]:
    """Refuse that a parameter which is trained becomes one that is not, or the other way round, which is no
    operation of torch either: `weight.requires_grad = False`.
    """
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    tensor_class: Any = Tensor
    original: Any = tensor_class.__base__.requires_grad
    method: Any = tensor_class.__base__.requires_grad_

    def give(tensor: Tensor, value: bool) -> None:
        if id(tensor) in names and not is_looking() and original.__get__(tensor) is not value:
            raise _runs_as_written(
                _frozen(
                    task,
                    f"forward says whether {names[id(tensor)]!r} takes a gradient",
                    place_of_caller(),
                    FREEZE_WHERE_BUILT,
                )
            )
        original.__set__(tensor, value)

    def give_by_call(tensor: Tensor, requires_grad: bool = True) -> Tensor:
        if id(tensor) in names:
            give(tensor, requires_grad)
        made: Tensor = method(tensor, requires_grad)
        return made

    tensor_class.requires_grad = property(original.__get__, give)
    tensor_class.requires_grad_ = give_by_call
    try:
        yield
    finally:
        del tensor_class.requires_grad
        del tensor_class.requires_grad_


class _NothingDone(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Refuses operators that draw, or change a buffer or parameter, while `forward` is traced; but moving
    averages of parameters are noted.
    """

    def __init__(self, task: str, root: nn.Module, is_looking: Callable[[], bool], moves: Moves) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch: untyped
        self._task = task
        self._moves = moves
        self._is_looking = is_looking
        buffers = [name for name, _ in root.named_buffers()]
        self._buffers = frozenset(buffers)
        tensors = [*root.named_parameters(), *root.named_buffers(), *_in_attributes(root)]
        self._held = {tensor.untyped_storage()._cdata: name for name, tensor in tensors}
        self._made: set[int] = set()  # memory of what operations have made by now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._is_looking():
            return func(*args, **(kwargs or {}))
        self._check(func, args, kwargs or {})
        result = self._moves.run(func, args, kwargs or {})
        if is_new(func):
            self._made |= {
                leaf.untyped_storage()._cdata
                for leaf in pytree.tree_leaves(result)
                if isinstance(leaf, Tensor) and leaf.layout is torch.strided
            }
        return result

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _frozen(self._task, "forward draws random numbers between operators", place_of_caller())
        for tensor in written_by(func, args, kwargs):
            if tensor.layout is not torch.strided or self._moves.holds(tensor):
                continue
            memory = tensor.untyped_storage()._cdata
            name = self._held.get(memory)
            if name is None and memory not in self._made:
                what = "forward changes a tensor between operators that is in no part of the model"
                raise _frozen(self._task, what, place_of_caller(), _BECOMES_A_PART)
            if name is not None:
                what = f"forward changes {name!r} between operators"
                hint = _KEPT_IN_BUFFER if name.startswith("self.") else _OF_BUFFERS
                refused = _frozen(self._task, what, place_of_caller(), hint)
                raise _runs_as_written(refused) if name in self._buffers else refused


def changed_attribute(task: str, root: nn.Module, tensor: Tensor) -> WorkloadError | None:
    """The refusal of a change to a tensor in an attribute that is no buffer; None: it lies in none."""
    memory = tensor.untyped_storage()._cdata
    for name, attribute in _in_attributes(root):
        if attribute.untyped_storage()._cdata == memory:
            what = f"forward changes {name!r} between operators"
            return _frozen(task, what, place_of_caller(), _KEPT_IN_BUFFER)
    return None


def _in_attributes(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that modules have in attributes, lists and dicts, and not as parameters or buffers."""
    for prefix, module in root.named_modules():
        for name, value in vars(module).items():
            if name in OF_TORCH or name.startswith(CONSTANT):
                continue
            for leaf in pytree.tree_leaves(value) if isinstance(value, Tensor | list | tuple | dict) else ():
                if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                    yield (f"self.{prefix}.{name}" if prefix else f"self.{name}"), leaf
