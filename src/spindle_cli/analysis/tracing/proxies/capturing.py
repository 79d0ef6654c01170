"""transformers hands hidden states on by forward hooks of its layers, which see what a trace has of a
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn

_MODULE = "transformers.utils.output_capturing"
# What it sets on a model once its hooks are there.
MARKS = frozenset({"_output_capturing_hooks_installed"})


def is_recorded(module: nn.Module) -> bool:
    """Whether hooks of transformers look at what a module gives."""
    return bool(_hooks(module))


def record(module: nn.Module, args: Sequence[Any], output: fx.Proxy | tuple[fx.Proxy, ...]) -> None:
    """Show a traced output to the hooks, which keep it if forward has asked for it.

    When an op runs the layer, nobody asks, and they keep nothing.
    """
    for hook in _hooks(module):
        hook(module, tuple(args), output)


def _hooks(module: nn.Module) -> list[Callable[..., Any]]:
    return [hook for hook in module._forward_hooks.values() if getattr(hook, "__module__", "") == _MODULE]
