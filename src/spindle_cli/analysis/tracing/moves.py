"""Moving averages that a forward makes between operators: a teacher that follows its student, as BYOL, DINO
and MoCo have it.

    with torch.no_grad():
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters()):
            slow.mul_(0.99).add_(fast, alpha=0.01)

While a forward is traced, nothing of it is done. What it would make of each parameter is kept as a sum of
parameters, each times a number; what that comes to is done by whoever has them, as if it were declared
(`Workload.follows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from spindle_cli.workload.building.memory import is_by_shape, written_by
from spindle_cli.workload.graph import DECLARE, Move
from spindle_cli.workload.refuse import place_of_caller, refusal

# By how much the numbers of an average may miss 1 together: 0.999 and 0.001 as they are rounded.
_ROUNDING = 1e-6

# A sum of parameters by their dotted names, each times a number.
Sum = Mapping[str, float]


class Moves:
    """What a forward that is traced would make of the parameters of its task."""

    def __init__(self, task: str, root: nn.Module, nodes: Callable[[], fx.Graph]) -> None:
        """`nodes`: gives the trace so far."""
        self._task = task
        self._root = root
        self._graph = nodes
        self._parameters = dict(root.named_parameters())
        self._names = {
            parameter.untyped_storage()._cdata: name for name, parameter in self._parameters.items()
        }
        self._now: dict[str, Sum] = {}  # of those that are changed
        self._places: dict[str, str | None] = {}
        self._made: dict[int, tuple[Tensor, Sum]] = {}  # by storage, with the tensor, so that it stays
        self._copied: dict[int, tuple[Tensor, str]] = {}  # likewise, with the name of what it was made of

    def source_of(self, tensor: Tensor) -> str | None:
        """The name of a trained parameter whose values a tensor has, or was made of by calls that are done
        while forward is traced: in a later step it has others. None: of none; or it is one itself.
        """
        storage = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
        name = self._names.get(storage)
        if name is not None:
            parameter = self._parameters[name]
            return name if parameter.requires_grad and tensor is not parameter else None
        return self._copied[storage][1] if storage in self._copied else None

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, or another name of all of it."""
        name = self._names.get(tensor.untyped_storage()._cdata)
        return name is not None and _is_all_of(tensor, self._parameters[name])

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Do a call of torch's, but write nothing into parameters.

        Raises:
            WorkloadError: it writes something into one that is no sum of parameters.
        """
        written = written_by(func, args, kwargs)
        read = next(filter(None, map(self._values_of, _tensors((*args, *kwargs.values())))), None)
        result = self._run(func, args, kwargs, written)
        if read is not None and not is_by_shape(func):
            for tensor in _tensors(result):
                if tensor.layout is torch.strided:
                    self._copied.setdefault(tensor.untyped_storage()._cdata, (tensor, read))
        return result

    def _values_of(self, tensor: Tensor) -> str | None:
        """The name of a trained parameter whose values a tensor has, or that it is."""
        name = self._names.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
        is_trained = name is not None and self._parameters[name].requires_grad
        return name if is_trained else self.source_of(tensor)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], written: list[Tensor]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        sums = self._sums(name.removesuffix("_"), args, kwargs) if self._takes_known(args) else None
        if not any(self.holds(tensor) for tensor in written):
            result = func(*args, **kwargs)
            self._note(written or result, sums)
            return result
        for number, tensor in enumerate(written):
            self._write(tensor, None if sums is None else sums[number])
        return None if name.startswith("_foreach") else args[0]

    def assign(self, name: str, value: Any) -> bool:
        """Forward gives a parameter other memory (`slow.data = value`). Whether that is a sum of parameters,
        which is then noted.
        """
        sum_ = self._sum_of(value) if isinstance(value, Tensor) and name in self._parameters else None
        if sum_ is None:
            return False
        self._set(name, sum_)
        return True

    @property
    def averages(self) -> tuple[Move, ...]:
        """The moving averages that forward makes, in the order of the parameters.

        Raises:
            WorkloadError: one is no moving average of another parameter.
        """
        return tuple(self._move(name) for name in self._parameters if name in self._now)

    def _move(self, slow: str) -> Move:
        sum_ = {name: factor for name, factor in self._now[slow].items() if factor != 0}
        others = [name for name in sum_ if name != slow]
        if len(others) != 1 or abs(sum(sum_.values()) - 1) > _ROUNDING:
            terms = " + ".join(f"{factor:.6g} {name}" for name, factor in sum_.items()) or "0"
            raise refusal(
                self._task,
                f"forward makes of {slow!r} between operators {terms}, which is no moving average of another "
                "parameter",
                self._places[slow],
                "Let the factors of the two be 1 together. Or compute with what it would become, without "
                "writing it.",
            )
        return Move(slow, others[0], sum_.get(slow, 0.0), self._places[slow])

    def _write(self, tensor: Tensor, sum_: Sum | None) -> None:
        name = self._names.get(tensor.untyped_storage()._cdata)
        if name is None:
            return
        if sum_ is None or not _is_all_of(tensor, self._parameters[name]) or self._would_be_trained(name):
            raise refusal(
                self._task,
                f"forward changes {name!r} between operators, which a trace does once and for all",
                place_of_caller(),
                DECLARE,
            )
        self._set(name, sum_)

    def _would_be_trained(self, name: str) -> bool:
        """Whether autograd would see what is written."""
        return torch.is_grad_enabled() and self._parameters[name].requires_grad

    def _set(self, name: str, sum_: Sum) -> None:
        if self._is_used(name):
            raise refusal(
                self._task,
                f"forward changes {name!r} between operators after it has computed with it",
                place_of_caller(),
                "Change it at the start of forward. " + DECLARE,
            )
        self._now[name] = sum_
        self._places[name] = place_of_caller()

    def _is_used(self, name: str) -> bool:
        parameter = self._parameters[name]
        for node in self._graph().nodes:
            if node.op == "call_module":
                if any(held is parameter for held in self._root.get_submodule(str(node.target)).parameters()):
                    return True
            elif node.op == "get_attr" and self._parameters.get(str(node.target)) is parameter:
                return True
        return False

    def _takes_known(self, args: tuple[Any, ...]) -> bool:
        return any(self._sum_of(tensor) is not None for tensor in _tensors(args))

    def _sum_of(self, tensor: Any) -> Sum | None:
        """What a tensor has; None: something else than a sum of parameters."""
        if not isinstance(tensor, Tensor):
            return None
        storage = tensor.untyped_storage()._cdata
        name = self._names.get(storage)
        if name is not None:
            is_all = _is_all_of(tensor, self._parameters[name])
            return self._now.get(name, {name: 1.0}) if is_all else None
        made = self._made.get(storage)
        return made[1] if made is not None and _is_all_of(tensor, made[0]) else None

    def _note(self, given: Any, sums: list[Sum | None] | None) -> None:
        for number, tensor in enumerate(_tensors(given)):
            storage = tensor.untyped_storage()._cdata
            if storage in self._names:
                continue
            sum_ = None if sums is None or number >= len(sums) else sums[number]
            if sum_ is None:
                self._made.pop(storage, None)
            else:
                self._made[storage] = tensor, sum_

    def _sums(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Sum | None] | None:
        """What a call gives, of each tensor; None: nothing is known of such calls."""
        if name.startswith("_foreach_"):
            lists = [argument for argument in args if isinstance(argument, list | tuple)]
            if any(len(items) != len(lists[0]) for items in lists):
                return None
            single = name.removeprefix("_foreach_")
            calls = (
                tuple(arg[number] if isinstance(arg, list | tuple) else arg for arg in args)
                for number in range(len(lists[0]))
            )
            return [self._sum(single, item_args, kwargs) for item_args in calls]
        return [self._sum(name, args, kwargs)]

    def _sum(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sum | None:
        """What a call gives that has one tensor for a result; None: no sum of parameters."""
        factors = _factors(name, args, kwargs)
        if factors is None:
            return None
        total: dict[str, float] = {}
        for position, factor in factors.items():
            term = self._sum_of(args[position])
            if term is None:
                return None
            for parameter, coefficient in term.items():
                total[parameter] = total.get(parameter, 0.0) + factor * coefficient
        return total


def _is_all_of(tensor: Tensor, whole: Tensor) -> bool:
    """Whether a tensor in the memory of another has its elements in the same order, and no others."""
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype) == (
        whole.shape,
        whole.stride(),
        whole.storage_offset(),
        whole.dtype,
    )


def _factors(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[int, float] | None:
    """What a call multiplies its arguments by, by their positions, before it adds them up; None: it does
    something else.
    """
    match name, args:
        case (("detach" | "clone" | "alias" | "view_as" | "lift_fresh"), _):
            return {0: 1.0}
        case "neg", (_,):
            return {0: -1.0}
        case "copy", (_, _) | (_, _, _):
            return {1: 1.0}
        case "mul", (Tensor(), int() | float() as factor):
            return {0: factor}
        case "mul", (int() | float() as factor, Tensor()):
            return {1: factor}
        case "div", (Tensor(), int() | float() as divisor) if divisor and not kwargs:
            return {0: 1 / divisor}
        case (("add" | "sub"), (Tensor(), Tensor(), *more)):
            alpha = kwargs.get("alpha", more[0] if more else 1)
            return {0: 1.0, 1: alpha if name == "add" else -alpha}
        case "lerp", (Tensor(), Tensor(), int() | float() as weight):
            return {0: 1 - weight, 1: weight}
    return None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
