"""What makes two ops equal: the same kind of layer, with the same glue around it."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from torch import Tensor, fx, nn

# Floats (dropout rates, epsilons) change no work; they may differ from layer to layer.
_FLOAT = re.compile(r"\d+\.\d*(e[-+]?\d+)?|\d+e[-+]?\d+")
# Attributes that only say which layer it is.
_POSITION = re.compile(r"(^|_)(idx|index|id|number)$")


def layer_kind(module: nn.Module | None) -> str:
    """A digest of a layer's class, its structure, its whole-number settings, and the shapes of what it holds."""
    if module is None:
        return "none"
    parts = [_FLOAT.sub("*", repr(module))]
    for name, part in module.named_modules():
        parts.append(
            f"{name}:{type(part).__module__}.{type(part).__qualname__}:{part.training}:{_settings(part)}"
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
        if isinstance(value, int | str | bool) and not name.startswith("_") and not _POSITION.search(name)
    }
    return repr(settings)


def graph_signature(graph: fx.Graph, root: nn.Module, operator: str | None) -> str:
    """A text that is the same for two ops with the same glue, whatever their nodes and layers are called."""
    return nodes_signature(list(graph.nodes), root, operator)


def nodes_signature(nodes: list[fx.Node], root: nn.Module, operator: str | None) -> str:
    """The same for some of a graph's nodes; what they take from the other nodes counts as one thing."""
    numbers = {node: position for position, node in enumerate(nodes)}

    def name(item: Any) -> Any:
        return f"%{numbers.get(item, 'x')}" if isinstance(item, fx.Node) else item

    lines = []
    for node in nodes:
        arguments = repr(fx.node.map_aggregate((node.args, node.kwargs), name))
        lines.append(f"{node.op} {_target(node, root, operator)} {arguments}")
    return "\n".join(lines)


def _target(node: fx.Node, root: nn.Module, operator: str | None) -> str:
    if node.op == "call_module":
        return "operator" if node.target == operator else layer_kind(root.get_submodule(str(node.target)))
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        value = getattr(root.get_submodule(owner), name)
        return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)
    if node.op == "call_function":
        return f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__qualname__', node.target)}"
    return str(node.target) if node.op == "call_method" else ""
