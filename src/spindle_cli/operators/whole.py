"""How an op runs on a device of its own: compiled, or with a part of it computed again.

Compiled: the equal layers of a process share one piece of compiled code. Dynamo takes a layer's parameters as
inputs and keeps what it compiles by code object. So each kind of layer (tracing/behaviour.py) is called
through a function with a code object of its own: equal layers find each other's code, and other layers and
shapes count towards no common limit. Shapes are compiled as they are (`dynamic=False`): a rank knows few, and
kernels for one shape are the fastest.

Selective recomputation: an op keeps what its matrix products, convolutions and attention give, and runs
the rest once more when its backward pass needs it (as Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", section 5, with fused attention, which keeps no scores).

What is kept took nearly all of the forward pass; what is computed again is memory traffic. Torch has this as
`create_selective_checkpoint_contexts`. Here what no gradient asks for is let go besides, such as what the
last map of a transformer layer gives; and the second pass may cast a parameter that autocast had cast for
another op before the first, which torch refuses.

Torch runs an op again whenever a backward pass needs what it did not keep, also a pass that the op itself
asks for: so contexts are entered more than once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

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


_aten = torch.ops.aten
# The CPU's fused attention has no entry in torch's registry of what is counted in operations.
_PRODUCTS = {*flop_registry, _aten._scaled_dot_product_flash_attention_for_cpu}
# Their gradients need nothing of what they take or give.
_SAVES_NOTHING = {
    _aten.add,
    _aten.add_,
    _aten.sub,
    _aten.sub_,
    _aten.neg,
    _aten.clone,
    _aten.detach,
    _aten._unsafe_view,
    _aten._to_copy,
}

Contexts: TypeAlias = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def is_kept(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether what an operation of torch gives is kept from the first forward pass: products of matrices,
    convolutions and attention are, and parameters cast to the type that is computed in, which an op that
    keeps everything keeps too.

    Attention with dropout is not: who leaves it out leaves out the random numbers that it draws, and what
    comes behind it would draw others than in the first pass.
    """
    if func._overloadpacket is _aten._to_copy:
        return _is_parameter(args[0])
    return func._overloadpacket in _PRODUCTS and not _draws(func, args, kwargs)


def _is_parameter(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_leaf and value.requires_grad


def _saves_nothing(func: Any) -> bool:
    is_question = func.namespace == "prim"  # for a device
    return func.is_view or is_question or func._overloadpacket in _SAVES_NOTHING


def _saves_its_result(func: Any) -> bool:
    """Whether the gradient of a product is computed from its result as well, as that of attention is."""
    return any(argument.name == "dropout_p" for argument in func._schema.arguments)


def _draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given)
    return False


def _no_contexts() -> Contexts:
    return nullcontext(), nullcontext()


def selective_checkpoint(
    function: Callable[..., Any], arguments: Sequence[Any], around: Callable[[], Contexts] = _no_contexts
) -> Any:
    """`function(*arguments)`, keeping for the backward pass the arguments and what `is_kept` says.

    Args:
        around: what the first forward pass runs in besides, and what the second one does.

    Raises:
        RuntimeError: something that is kept was changed in place, or the second pass computes something else;
            in the backward pass. Or the function asks for gradients itself, for which it would have to run
            again before it is known what it keeps.
    """

    def contexts() -> Contexts:
        kept = _Kept()
        first, again = around()
        return _within(first, _Keeping(kept)), EnteredAnew(lambda: _within(again, _Taking(kept)))

    return checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts, preserve_rng_state=True)


@contextmanager
def _within(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


@dataclass(frozen=True)
class _Result:
    """What an operation has given, its tensors without history; `versions`: of these, then."""

    value: Any
    shapes: tuple[Any, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, out: Any, args: tuple[Any, ...]) -> _Result:
        value = tree_map_only(Tensor, _without_history, out)
        return cls(value, _shapes(args), tuple(tensor._version for tensor in _tensors(value)))

    def taken(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return the value for the operation that is run once more."""
        if _shapes(args) != self.shapes:
            raise RuntimeError(f"{func} takes other shapes when it is recomputed than it did before")
        if tuple(tensor._version for tensor in _tensors(self.value)) != self.versions:
            raise RuntimeError(f"what {func} gave was changed in place, and would be used for gradients")
        return self.value


def _without_history(tensor: Tensor) -> Tensor:
    """Another tensor over the same memory; that changes in place are seen in both has to be asked for in a
    dispatch mode.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _shapes(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(tuple(arg.shape) for arg in args if isinstance(arg, Tensor))


def _tensors(value: Any) -> list[Tensor]:
    return [
        item for item in (value if isinstance(value, tuple | list) else (value,)) if isinstance(item, Tensor)
    ]


class _Kept:
    """What operations have given, by operation in the order in which they ran; parameters cast by parameter.

    None: not kept after all. `is_whole`: once the first forward pass is through.
    """

    def __init__(self) -> None:
        self.is_whole = False
        self._of: dict[Hashable, list[_Result | None]] = {}

    def put(self, func: Any, args: tuple[Any, ...], out: Any) -> Hashable:
        """Keep a value and return its key."""
        key = _key(func, args)
        self._of.setdefault(key, []).append(_Result.of(out, args))
        return key

    def let_go(self, key: Hashable) -> None:
        """Let go of the last result that was kept for this key."""
        self._of[key][-1] = None

    def take(self, func: Any, args: tuple[Any, ...]) -> _Result | None:
        """The next one, which is then no longer kept; None: there is none."""
        left = self._of.get(_key(func, args))
        return left.pop(0) if left else None


def _key(func: Any, args: tuple[Any, ...]) -> Hashable:
    return (func, id(args[0])) if func._overloadpacket is _aten._to_copy else func


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """The first forward pass. Of a product behind which nothing comes that a gradient is computed from,
    nothing is kept: the second pass ends before it.
    """

    def __init__(self, kept: _Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._kept = kept
        self._last: Hashable | None = None  # a product that nothing has needed yet

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        is_cast = func._overloadpacket is _aten._to_copy
        if is_kept(func, args, kwargs or {}):
            key = self._kept.put(func, args, out)
            if not is_cast:
                self._last = None if _saves_its_result(func) else key
        elif not _saves_nothing(func):
            self._last = None
        return out

    def __exit__(self, *error: Any) -> None:
        if self._last is not None:
            self._kept.let_go(self._last)
        self._kept.is_whole = True
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch leaves it untyped


class _Taking(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """The second forward pass, which computes what is not kept."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if not kept.is_whole:
            raise RuntimeError("it asks for gradients itself, and is recomputed whole or not at all")
        self._kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = self._kept.take(func, args) if is_kept(func, args, kwargs or {}) else None
        return func(*args, **(kwargs or {})) if result is None else result.taken(func, args)


class EnteredAnew(AbstractContextManager[None]):
    """A context that is made whenever it is entered."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._make())
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)
