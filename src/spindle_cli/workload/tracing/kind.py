"""What makes two ops equal: the same kind of layer, with the same glue around it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx, nn

from spindle_cli.workload.building.layer_numbers import is_number
from spindle_cli.workload.building.source import settled_module_name
from spindle_cli.workload.tracing.behaviour import behaviour_of

# Floats (dropout rates, epsilons) change no work; they may differ from layer to layer.
_FLOAT = re.compile(r"\d+\.\d*(e[-+]?\d+)?|\d+e[-+]?\d+")


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
            found = behaviour_of(module, numbered=False), behaviour_of(module)
            self._behaviours[id(module)] = (module, found)
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
