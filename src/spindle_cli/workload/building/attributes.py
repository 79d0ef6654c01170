"""What a module's forward changes in the module itself, and undoing it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn
from torch.jit import ScriptModule

_PLAIN = (bool, int, float, complex, str, bytes)


@dataclass
class Changes:
    """What was changed while looking, as 'self.name' below the module.

    Attributes:
        counted: plain values that are now others, and containers that grew or shrank.
        buffers: buffers that another tensor was put in the place of.
        tensors: attributes that hold other tensors than before.
    """

    counted: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Before:
    module: nn.Module
    name: str
    values: dict[str, Any]
    buffers: dict[str, Any]
    containers: dict[str, Any]
    hooks: dict[str, dict[int, Any]]


def hold_parameter(module: nn.Module, name: str, parameter: Tensor) -> None:
    """Let a module have another parameter by a name.

    torch's own recurrent layers keep a second list of theirs, which setting the attribute keeps right. A
    class of the user's may do anything with it: write the values into the parameter that was there.
    """
    if type(module).__setattr__ in (nn.Module.__setattr__, nn.RNNBase.__setattr__):
        setattr(module, name, parameter)
    else:
        module._parameters[name] = cast("nn.Parameter", parameter)


@contextlib.contextmanager
def watching(root: nn.Module) -> Iterator[Changes]:
    """Note what is changed in a module's attributes inside, and undo it at the end."""
    # What torch.jit has compiled keeps no attributes that Python sees.
    parts = [(name, part) for name, part in root.named_modules() if not isinstance(part, ScriptModule)]
    before = [_look(name, module) for name, module in parts]
    # Of a part of forward that runs whole: the modules whose methods it was taken from.
    before += [_look("", module) for module in getattr(root, "owners", ())]
    changes = Changes()
    try:
        yield changes
    finally:
        for seen in before:
            _compare(seen, changes)
            _undo(seen)


def _look(name: str, module: nn.Module) -> _Before:
    values = dict(module.__dict__)
    own = {key: value for key, value in values.items() if isinstance(value, list | dict) and key[0] != "_"}
    return _Before(
        module,
        name,
        values,
        dict(module._buffers),
        {key: type(item)(item) for key, item in own.items()},
        hooks_of(module),
    )


def hooks_of(module: nn.Module) -> dict[str, dict[int, Any]]:
    """The hooks that a module has, by the attributes that hold them."""
    return {key: dict(held) for key, held in module.__dict__.items() if _holds_hooks(key, held)}


def give_hooks(module: nn.Module, hooks: dict[str, dict[int, Any]]) -> None:
    """Let a module have no hooks but these."""
    for key, held in module.__dict__.items():
        if _holds_hooks(key, held):
            held.clear()
            held.update(hooks.get(key, {}))


def _holds_hooks(attribute: str, held: Any) -> bool:
    return isinstance(held, dict) and attribute.startswith("_") and "_hooks" in attribute


def _compare(before: _Before, changes: Changes) -> None:
    prefix = f"{before.name}." if before.name else ""
    for key, value in before.module._buffers.items():
        if value is not before.buffers.get(key):
            changes.buffers.append(prefix + key)
    for key, value in before.module.__dict__.items():
        old = before.values.get(key)
        if value is old and key in before.containers:
            if len(before.values[key]) != len(before.containers[key]):
                changes.counted.append(prefix + key)
        elif value is old:
            continue
        elif isinstance(value, Tensor):
            changes.tensors[prefix + key] = value
        elif isinstance(value, _PLAIN) and not (type(value) is type(old) and value == old):
            changes.counted.append(prefix + key)


def _undo(before: _Before) -> None:
    module = before.module
    for key, kept in before.containers.items():
        held = before.values[key]
        held.clear()
        if isinstance(held, list):
            held.extend(kept)
        else:
            held.update(kept)
    module._buffers.clear()
    module._buffers.update(before.buffers)
    module.__dict__.clear()
    module.__dict__.update(before.values)
    give_hooks(module, before.hooks)


@contextlib.contextmanager
def swapped_tensors(root: nn.Module, stand_in: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Put other tensors in the place of a module's parameters and buffers, and its own ones back."""
    undo: list[tuple[dict[str, Any], str, Any]] = []

    def replace(holder: dict[str, Any], name: str, value: Any) -> None:
        undo.append((holder, name, holder[name]))
        holder[name] = value

    try:
        for module in root.modules():
            for holder in (module._parameters, module._buffers):
                for name, tensor in holder.items():
                    if tensor is not None:
                        replace(holder, name, stand_in(tensor))
            for name, value in module.__dict__.items():
                # nn.LSTM and its like keep a second list of their parameters
                if (
                    isinstance(value, list)
                    and value
                    and all(isinstance(item, nn.Parameter) for item in value)
                ):
                    replace(module.__dict__, name, [stand_in(item) for item in value])
        yield
    finally:
        for holder, name, value in reversed(undo):
            holder[name] = value
