"""Layers through torch.compile: the equal layers of a process share one piece of compiled code.

Dynamo takes a layer's parameters as inputs and keeps what it compiles by code object. So each kind of layer
(tracing/behaviour.py) is called through a function with a code object of its own: equal layers find each
other's code, and other layers and shapes count towards no common limit. Shapes are compiled as they are
(`dynamic=False`): a rank knows few, and kernels for one shape are the fastest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from spindle_cli.analysis.tracing.behaviour import Kinds
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.step_values import reads_step_values

# Shares of a batch, with and without gradients, that one kind of layer may meet on a rank; torch's 8 is less
# than what a plan may give it, and what is beyond the limit would not be compiled, only a warning said.
MOST_SHAPES = 256


class LayerCompiler:
    """Compiles the layers of a process's ops."""

    def __init__(self, backend: str) -> None:
        """`backend`: of torch.compile. Lets all of this process's code have as many shapes as it needs."""
        from torch._dynamo import config  # takes a second to import

        config.recompile_limit = MOST_SHAPES
        self._backend = backend
        self._kinds = Kinds()
        self._calls: dict[str, Callable[..., Any]] = {}

    @classmethod
    def of(cls, train: TrainSettings) -> LayerCompiler | None:
        """The one that the train settings ask for; None where they ask for none."""
        return None if train.compile is None else cls(train.compile)

    def compile_layer(self, module: fx.GraphModule, target: str | None) -> fx.GraphModule:
        """Give an op over the same parameters with its layer compiled (when it first runs); the op itself
        where it has no layer, or one that a number changes in between steps: it would be compiled again in
        each of them.

        Args:
            module: an op (`op_module`); it is left as it is.
            target: dotted name of the layer.
        """
        if target is None or reads_step_values(module.get_submodule(target)):
            return module
        graph = copy.deepcopy(module.graph)
        for node in graph.nodes:
            if node.op == "call_module" and node.target == target:
                with graph.inserting_before(node):
                    layer = graph.get_attr(target)
                    call = graph.call_function(
                        self._call_of(module.get_submodule(target)), (layer, *node.args), node.kwargs
                    )
                node.replace_all_uses_with(call)
                graph.erase_node(node)
        return fx.GraphModule(module, graph)

    def _call_of(self, layer: nn.Module) -> Callable[..., Any]:
        kind = self._kinds.of(layer)
        if kind not in self._calls:
            function = FunctionType(_call.__code__.replace(), _call.__globals__, _call.__name__)
            self._calls[kind] = torch.compile(function, backend=self._backend, dynamic=False)
        return self._calls[kind]


def _call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return layer(*args, **kwargs)


def require_compiler(train: TrainSettings, device_type: str) -> None:
    """Refuse to compile where there is nothing to compile with.

    Args:
        device_type: torch's, 'cpu' or 'cuda'.

    Raises:
        WorkloadError: what is missing.
    """
    if train.compile != "inductor":
        return
    missing = _missing_triton() if device_type == "cuda" else _missing_cpp_compiler()
    if missing is not None:
        raise WorkloadError(
            f"train.compile: inductor cannot compile for {device_type} here: {missing}",
            hint="Install it on every node, or leave train.compile out of the workload file.",
        )


def _missing_cpp_compiler() -> str | None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return str(error).partition("\n")[0]
    return None


def _missing_triton() -> str | None:
    from torch.utils._triton import has_triton

    return None if has_triton() else "there is no triton that works with this GPU"
