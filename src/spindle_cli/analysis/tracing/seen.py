"""What code gives that cannot be followed on fake tensors: seen on real samples.

Packed sequences, numpy, what torch.jit has compiled and whatever else decides by values have no shapes
without them. Such code is run as it is, on samples of the dataset and with stand-ins for what the model
computes; what it gives must have one shape, whichever samples the batch has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from spindle_cli.analysis.fixed import is_fixed
from spindle_cli.analysis.tracing.shapes import leaves_of, records_kept, show_records
from spindle_cli.workload.building.attributes import Before, Changes, swapped_tensors
from spindle_cli.workload.building.contents import all_hooks_put_back
from spindle_cli.workload.building.memory import NotingWrites

# Batches that are tried: of other samples each, in another order.
_TRIED = 3
_SCALE = 0.5

Samples = Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True)
class LeftBehind:
    """What a module was seen to leave for its next call.

    Attributes:
        changed: its parameters and buffers that it changes.
        kept: what it keeps where no checkpoint has it.
        left: what it leaves for whoever looks.
    """

    changed: tuple[str, ...]
    kept: tuple[str, ...]
    left: tuple[str, ...]


class OtherShapesError(Exception):
    """What code gives has other shapes, or is of another structure, for other samples."""


@dataclass(frozen=True)
class Seen:
    """What a module gives, of which nothing but shapes has a meaning, and what it leaves.

    Attributes:
        changes: all of that but what `left.changed` says.
        written: what it writes into, of each memory one tensor.
    """

    result: Any
    left: LeftBehind
    changes: Changes
    written: list[Tensor]


def seen_result(
    node: fx.Node,
    module: nn.Module,
    samples: Samples,
    count: int,
    values: Mapping[fx.Node, Any],
    guard: AbstractContextManager[object],
) -> Seen:
    """Run a module that a node calls on real samples.

    Args:
        samples: gives some of the dataset, any number.
        count: how many of them the module is to be given; they are taken again where there are too few.
        values: fake ones of the nodes before.
        guard: what it runs in, each time.

    Raises:
        OtherShapesError: it differs from samples to samples.
        Exception: the module fails on real samples, too.
    """
    merged: Any = None
    with plainly(), all_hooks_put_back(), held_for_real(module) as held:
        few, before, changes, writes = samples(), Before(module), Changes(), NotingWrites()
        for shift in range(_TRIED):
            real = _Real({name: _taken(field, count, shift) for name, field in few.items()}, values)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), real.value)
            with records_kept((args, kwargs)), guard, writes:
                result = module(*args, **kwargs)
            show_records(result)
            odd = next((leaf for leaf in leaves_of(result) if not isinstance(leaf, Tensor | None)), None)
            if odd is not None:
                raise OtherShapesError(f"it gives {odd!r}, which may be another one for other samples")
            merged = result if shift == 0 else _alike(merged, result)
        changed = [n for n, tensor in _named(module) if held.get(n) is not tensor or writes.has(tensor)]
        before.compare(changes)
        changes.within += before.written(writes.has)
    return Seen(merged, LeftBehind(tuple(changed), changes.kept, changes.left), changes, writes.tensors)


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _taken(field: Tensor, count: int, shift: int) -> Tensor:
    """Take `count` samples, the first of which is moved on by `shift`."""
    if is_fixed(field):
        return field[:1].expand(count, *field.shape[1:]).clone()
    rows = torch.arange(count).add(shift * (len(field) // _TRIED)).remainder(len(field))
    return field.index_select(0, rows)


def _alike(first: Any, second: Any) -> Any:
    """The first of two results, which differ in nothing but the values of tensors; a gradient that either has
    it has.
    """
    leaves, structure = pytree.tree_flatten(first)
    second_leaves, second_structure = pytree.tree_flatten(second)
    if structure != second_structure:
        raise OtherShapesError("it gives other things for other samples")
    return pytree.tree_unflatten(
        [_leaf(*pair) for pair in zip(leaves, second_leaves, strict=True)], structure
    )


def _leaf(first: Any, second: Any) -> Any:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            shapes = " and ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (first, second))
            raise OtherShapesError(f"for as many other samples it gives another shape: {shapes}")
        return second if second.requires_grad else first
    if first is None and second is None:
        return None
    raise OtherShapesError("it gives a tensor for some samples and none for others")


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Compute with real tensors whatever analysis is going on; generators go on as if nothing was drawn."""
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
    ):
        torch.default_generator.manual_seed(0)
        yield


@contextlib.contextmanager
def held_for_real(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Let a module have real parameters and buffers inside, by name, which nobody else sees changed."""
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def real(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            values = _drawn(tensor) if tensor.is_meta else tensor.detach().clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = (
                tensor,
                nn.Parameter(values, tensor.requires_grad) if is_parameter else values,
            )
        return made[id(tensor)][1]

    with swapped_tensors(module, real):
        yield dict(_named(module))


def _drawn(like: Tensor, *, gradient: bool = False) -> Tensor:
    """Some values; small ones, and zero for whole numbers."""
    if not (like.is_floating_point() or like.is_complex()):
        return torch.zeros(like.shape, dtype=like.dtype)
    made = torch.randn(tuple(like.shape), dtype=like.dtype) * _SCALE
    return made.requires_grad_() * 1 if gradient else made


class _Real:
    """Values of a trace's nodes for real samples: glue computes them, and what layers give is drawn."""

    def __init__(self, fields: Mapping[str, Tensor], fakes: Mapping[fx.Node, Any]) -> None:
        self._fields = fields
        self._fakes = fakes
        self._values_by_node: dict[fx.Node, Any] = {}

    def value(self, node: fx.Node) -> Any:
        """Return a real value for one node."""
        if node not in self._values_by_node:
            self._values_by_node[node] = self._find(node)
        return self._values_by_node[node]

    def _find(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._fields[str(node.target)]
        if node.op not in ("call_function", "call_method"):
            return pytree.tree_map(self._stand_in, self._fakes[node])
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.value)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _stand_in(self, fake: Any) -> Any:
        return _drawn(fake, gradient=fake.requires_grad) if isinstance(fake, Tensor) else fake
