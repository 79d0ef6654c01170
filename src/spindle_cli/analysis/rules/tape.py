"""Record what a piece of code does to tensors: its operators in order, with their arguments and results."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spindle_cli.analysis.rules.types import WHOLE, State
from spindle_cli.workload.refuse import place_inside


@dataclass(frozen=True)
class Entry:
    """One operator that was run.

    Attributes:
        given, made: shapes of the tensors in its arguments before, and in its result after: later operators
            may turn a tensor in place.
        strides: of those in its arguments, in entries.
        place: 'file:line' in the user's code.
        grad: whether gradients are on.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    given: dict[int, tuple[int, ...]]
    strides: dict[int, tuple[int, ...]]
    made: tuple[tuple[int, ...], ...]
    place: str | None
    grad: bool


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Records all that is run inside; keeps the tensors alive, so that their ids stay their own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch: untyped
        self.entries: list[Entry] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in {"prim", "profiler"}:  # questions for a device, and marks of what is measured
            return func(*args, **kwargs)
        tensors = tensors_in([args, list(kwargs.values())])
        given = {id(tensor): tuple(tensor.shape) for tensor in tensors}
        strides = {id(tensor): tuple(tensor.stride()) for tensor in tensors}
        result = func(*args, **kwargs)
        made = tuple(tuple(tensor.shape) for tensor in tensors_in(result))
        grad = torch.is_grad_enabled()
        place = place_inside()
        self.entries.append(Entry(func, args, kwargs, result, given, strides, made, place, grad))
        return result


@dataclass(frozen=True)
class Operand:
    """A tensor among an operator's arguments: its state, and its shape for each size of the batch.

    Attributes:
        strides: in memory, in entries, for each size of the batch; empty where they are not looked at.
        rows_within: it holds numbers of rows, each sample's among so many of its own, the same ones for every
            sample; 0: something else.
    """

    state: State
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    rows_within: int = 0
    strides: tuple[tuple[int, ...], ...] = ()

    @property
    def ndim(self) -> int:
        """Number of dimensions, the same for every size."""
        return len(self.shapes[0])

    def is_one(self) -> bool:
        """Whether it has one element, whatever the batch's size."""
        return all(torch.Size(shape).numel() == 1 for shape in self.shapes)


@dataclass(frozen=True)
class Varying:
    """A number that is another for each size of the batch."""

    values: tuple[Any, ...]

    def growth(self, sizes: tuple[int, ...]) -> int | None:
        """How it grows with the batch: 1 like its size, -1 like 1 / its size; None: otherwise."""
        for power in (1, -1, 2, -2):
            first = self.values[0] / sizes[0] ** power if isinstance(self.values[0], int | float) else 0
            if first and all(
                isinstance(value, int | float) and abs(value / size**power / first - 1) < 1e-9
                for value, size in zip(self.values, sizes, strict=True)
            ):
                return power
        return None


@dataclass(frozen=True)
class Call:
    """A call of one operator, as it is for all sizes of the batch.

    Attributes:
        sizes: of the batch.
        arguments: by the schema's names: operands, lists of them, numbers, `Varying` numbers.
        results: of each tensor that it gives, its shape for each size.
    """

    func: Any
    sizes: tuple[int, ...]
    arguments: dict[str, Any]
    results: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def name(self) -> str:
        """The operator's name in torch.ops.aten."""
        return str(self.func.overloadpacket.__name__)

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    @property
    def operands(self) -> list[Operand]:
        """All tensors among the arguments, in order."""
        return [item for item in _leaves(list(self.arguments.values())) if isinstance(item, Operand)]

    @cached_property
    def states(self) -> list[State]:
        """The states of all tensors among the arguments, in order."""
        return [operand.state for operand in self.operands]

    def has(self, kind: type[State]) -> bool:
        """Whether the state of a tensor among the arguments is of a kind."""
        return any(isinstance(state, kind) for state in self.states)

    @property
    def is_whole(self) -> bool:
        """Whether neither samples nor the size of their batch have a part in the arguments."""
        return all(state == WHOLE for state in self.states) and not self.varies

    @property
    def varies(self) -> bool:
        """Whether a number among the arguments depends on the batch's size."""
        return any(isinstance(item, Varying) for item in _leaves(list(self.arguments.values())))


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors among arguments or results, in order: themselves, or in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []
