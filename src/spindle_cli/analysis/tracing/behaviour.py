"""What makes two layers alike: in what they do, and in the work that it is; and what stands in another
build of a workload for something in the first.

They behave alike where all is equal that their forward could read but the values of parameters. Two ops are
of one kind where they have the same kind of layer with the same glue around it: that is about work alone.
Block(alpha=0.0) works as Block(alpha=0.5) does, but does something else.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
import types
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from spindle_cli.analysis.layer_numbers import is_number
from spindle_cli.analysis.memo import HERE
from spindle_cli.analysis.tracing.shapes import with_items
from spindle_cli.workload.building.attributes import is_of_users_code
from spindle_cli.workload.building.load import settled_module_name
from spindle_cli.workload.graph import CONSTANT
from spindle_cli.workload.introspection import fields_of

_SHARED = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    slice,
)
_OF_PYTHON = (types.BuiltinFunctionType, types.ModuleType, type(torch.Tensor.add))
_TWIN_DEPTH = 6  # of containers and objects that a forward has made itself
_MOST = 10_000  # entries of a container


class NoTwinError(Exception):
    """Nothing in the other build is known to stand for a value."""


class Twins:
    """What stands for what: all that is come to from two modules by the same names."""

    def __init__(self, root: nn.Module, other_root: nn.Module) -> None:
        """`root`: of one build; `other_root`: of another build of the same workload."""
        self._of: dict[int, tuple[Any, Any]] = {}
        waiting: deque[tuple[Any, Any]] = deque([(root, other_root)])
        while waiting:
            original, twin = waiting.popleft()
            if original is twin or type(original) is not type(twin) or isinstance(original, (*_SHARED, type)):
                continue
            if id(original) in self._of:
                continue
            self._of[id(original)] = original, twin
            if isinstance(original, dict):
                waiting.extend((original[key], twin[key]) for key in original if key in twin)
            elif isinstance(original, list | tuple) and len(original) == len(twin) <= _MOST:
                waiting.extend(zip(original, twin, strict=True))
            fields, twin_fields = fields_of(original), fields_of(twin)
            if fields is not None and twin_fields is not None and not isinstance(original, Tensor):
                waiting.extend(
                    (fields[name], twin_fields[name]) for name in list(fields) if name in twin_fields
                )

    def of(self, value: Any, depth: int = _TWIN_DEPTH) -> Any:
        """What stands for a value: itself, where no build has a part in it.

        Raises:
            NoTwinError: it is of the first build, or may be, and nothing is known to stand for it.
        """
        if id(value) in self._of:
            return self._of[id(value)][1]
        if isinstance(value, (*_SHARED, *_OF_PYTHON)) or (isinstance(value, type) and _is_found_again(value)):
            return value
        if depth == 0:
            raise NoTwinError
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_meta:
            return value  # of numbers
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.of(value.__self__, depth - 1))
        if type(value) is dict:
            return _same_or({key: self.of(item, depth - 1) for key, item in value.items()}, value)
        if isinstance(value, tuple | list) and (type(value) in (tuple, list) or hasattr(value, "_fields")):
            items = [self.of(item, depth - 1) for item in value]
            return _same_or(with_items(value, items), value)
        return self._unless_built(value, depth)

    def _unless_built(self, value: Any, depth: int) -> Any:
        """A function or an object that holds nothing of a build."""
        held: list[Any] = []
        if isinstance(value, types.FunctionType):
            held = [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)]
            held += (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        elif isinstance(value, nn.Module | type | Tensor) or not _shows_what_it_holds(value):
            raise NoTwinError
        held += (fields_of(value) or {}).values()
        if any(self.of(item, depth - 1) is not item for item in held):
            raise NoTwinError
        return value


def _shows_what_it_holds(value: Any) -> bool:
    """Whether an object's fields are all that it holds: not of functools.partial, say, or of a list."""
    cls = type(value)
    return _is_found_again(cls) and is_of_users_code(cls) and not isinstance(value, list | dict | set | deque)


def _is_found_again(cls: type) -> bool:
    """Whether every build has this same class: none is made in a function."""
    return "<locals>" not in cls.__qualname__


def _same_or(made: Any, value: Any) -> Any:
    """The value itself, where what was made of it holds the same."""
    inside = (made.values(), value.values()) if isinstance(value, dict) else (made, value)
    return value if all(item is original for item, original in zip(*inside, strict=True)) else made


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)
_MAX_ELEMENTS = 2**16  # larger buffers are told apart by being others
_DEPTH = 6
# Begins the text of what is known by its place in memory alone. Texts are quoted in others, which leaves it
# as it is; an attribute that has it only makes its module one that is of this process alone.
_PLACE = "<at a place in memory> "
# How the attributes of a task's module begin that hold parts of its forward; traces leave them.
REGION = "spindle_region_"
_HELD_ELSEWHERE = frozenset({"_parameters", "_buffers", "_modules", "training"})
# Floats (dropout rates, epsilons) change no work; they may differ from layer to layer.
_FLOAT = re.compile(r"\d+\.\d*(e[-+]?\d+)?|\d+e[-+]?\d+")


def behaviour_of(module: nn.Module, *, numbered: bool = True) -> str:
    """A digest that two modules share if their forwards do the same; it begins with `memo.HERE` where it says
    so in this process alone. `numbered`: attributes that only say which layer it is count, too.
    """
    parts: list[str] = []
    for name, part in module.named_modules():
        parts.append(f"{name}: {type(part).__module__}.{type(part).__qualname__} {part.training}")
        parts += [
            f"{name}.{key} = {_text(value, _DEPTH)}"
            if numbered or type(value) is not int or not is_number(key)
            else f"{name}.{key} is a number"
            for key, value in sorted(part.__dict__.items())
            if key not in _HELD_ELSEWHERE and not key.startswith((CONSTANT, REGION))
        ]
    for name, parameter in module.named_parameters(remove_duplicate=False):
        parts.append(f"{name}:{tuple(parameter.shape)}:{parameter.dtype}:{parameter.requires_grad}")
    parts += [
        f"{name}:{text_of_numbers(buffer)}" for name, buffer in module.named_buffers(remove_duplicate=False)
    ]
    text = "\n".join(parts)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return HERE + digest if _PLACE in text else digest


def name_of(target: Any) -> str:
    """What glue calls, as a text: a function's name where that finds it in every process, else as Python
    shows it.
    """
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    resolved: Any = sys.modules.get(module) if isinstance(module, str) else None
    for part in name.split(".") if isinstance(name, str) else ():
        resolved = getattr(resolved, part, None)
    if resolved is not None and resolved is target:
        return f"{module}.{name}"
    short_name = getattr(target, "__name__", "")  # torch.arange and its like name no module
    return f"torch.{short_name}" if getattr(torch, str(short_name), None) is target else repr(target)


def _text(value: Any, depth: int) -> str:
    """A text that equal values share; what cannot be looked into has its own."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, nn.Parameter):
        return f"parameter {tuple(value.shape)}"
    if isinstance(value, Tensor):
        return text_of_numbers(value)
    if isinstance(value, nn.Module):
        return "module"  # it is one of the named modules, or of another's
    if depth == 0:
        return _itself(value)
    if isinstance(value, list | tuple | set | frozenset):
        items = [_text(item, depth - 1) for item in value]
        return f"{type(value).__name__}{sorted(items) if isinstance(value, set | frozenset) else items}"
    if isinstance(value, Mapping):
        return repr([(_text(key, depth - 1), _text(item, depth - 1)) for key, item in value.items()])
    return _callable_or_object(value, depth)


def _callable_or_object(value: Any, depth: int) -> str:
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)]
        inside = [cells, value.__defaults__, value.__kwdefaults__]
        digest = hashlib.sha256(repr(_of_code(value.__code__)).encode()).hexdigest()[:16]
        return f"{value.__module__}.{value.__qualname__} {digest} {_text(inside, depth - 1)}"
    if isinstance(value, types.MethodType):
        return f"{_text(value.__func__, depth - 1)} of {_text(value.__self__, depth - 1)}"
    if isinstance(value, functools.partial):
        return _text([value.func, value.args, value.keywords], depth - 1)
    if isinstance(value, types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    held = fields_of(value)
    if held is None:
        return _itself(value)
    return f"{type(value).__module__}.{type(value).__qualname__} {_text(held, depth - 1)}"


def _of_code(code: types.CodeType) -> tuple[Any, ...]:
    """Return what tells code from other code: not where it lies, as what compiles it anew would differ in."""
    constants = [_of_code(held) if isinstance(held, types.CodeType) else held for held in code.co_consts]
    return code.co_code, code.co_names, constants


def is_filled(cell: types.CellType) -> bool:
    """Whether a variable that functions share has a value by now."""
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True


def text_of_numbers(value: Tensor) -> str:
    """Return a text that tensors share which are equal, bit by bit; large ones and those without numbers have
    their own.
    """
    shape = f"{tuple(value.shape)} {value.dtype}"
    if value.is_meta or value.numel() > _MAX_ELEMENTS or type(value) is not Tensor:
        return f"{shape} {_itself(value)}"
    with unset_fake_temporarily():
        array = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return f"{shape} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"


def _itself(value: Any) -> str:
    return f"{_PLACE}{type(value).__qualname__} at {id(value)}"


class Kinds:
    """Kinds of the layers of one workload, each found once."""

    def __init__(self) -> None:
        self._known: dict[
            int, tuple[nn.Module, str]
        ] = {}  # by id; holds the module, so that its id stays its own
        self._behaviours: dict[int, tuple[nn.Module, tuple[str, str]]] = {}

    def of(self, module: nn.Module) -> str:
        """A text that two layers share if they do the same work: see `layer_kind`."""
        if id(module) not in self._known:
            self._known[id(module)] = (module, layer_kind(module))
        return self._known[id(module)][1]

    def behaviour(self, module: nn.Module) -> str:
        """A text that two layers share if they do the same: see `behaviour_of`."""
        return self.behaviours(module)[1]

    def behaviours(self, module: nn.Module) -> tuple[str, str]:
        """Describe how a module behaves, without the numbers of layers and with them."""
        if id(module) not in self._behaviours:
            described = behaviour_of(module, numbered=False), behaviour_of(module)
            self._behaviours[id(module)] = (module, described)
        return self._behaviours[id(module)][1]


def layer_kind(module: nn.Module) -> str:
    """A digest of a layer's class, structure and whole-number settings, and the shapes of what it holds."""
    parts = [_FLOAT.sub("*", repr(module))]
    for name, part in module.named_modules():
        parts.append(
            f"{name}:{settled_module_name(type(part).__module__)}.{type(part).__qualname__}:{part.training}:{_settings(part)}"
        )
    for name, parameter in module.named_parameters(remove_duplicate=False):
        parts.append(f"{name}:{tuple(parameter.shape)}:{parameter.dtype}:{parameter.requires_grad}")
    for name, buffer in module.named_buffers(remove_duplicate=False):
        parts.append(f"{name}:{tuple(buffer.shape)}:{buffer.dtype}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _settings(module: nn.Module) -> str:
    settings = {
        name: value
        for name, value in sorted(module.__dict__.items())
        if isinstance(value, int | str | bool) and not name.startswith("_") and not is_number(name)
    }
    return repr(settings)


def nodes_signature(nodes: Sequence[fx.Node], root: nn.Module, operator: str | None, kinds: Kinds) -> str:
    """A text that is the same for equal glue, whatever its nodes and layers are called.

    What the nodes take from others that are not among them counts as one thing; so does the operator.
    """
    numbers = {node: position for position, node in enumerate(nodes)}

    def name(item: Any) -> Any:
        return f"%{numbers.get(item, 'x')}" if isinstance(item, fx.Node) else item

    lines = []
    for node in nodes:
        arguments = repr(fx.node.map_aggregate((node.args, node.kwargs), name))
        lines.append(f"{node.op} {_target(node, root, operator, kinds)} {arguments}")
    return "\n".join(lines)


def _target(node: fx.Node, root: nn.Module, operator: str | None, kinds: Kinds) -> str:
    if node.op == "call_module":
        return "operator" if node.target == operator else kinds.of(root.get_submodule(str(node.target)))
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        value = getattr(root.get_submodule(owner), name)
        if isinstance(value, nn.Module):
            return kinds.of(value)
        return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)
    if node.op == "call_function":
        module = settled_module_name(getattr(node.target, "__module__", None) or "")
        return f"{module}.{getattr(node.target, '__qualname__', node.target)}"
    return str(node.target) if node.op == "call_method" else ""
