"""A layer recorded as one device runs it on its part of the sequence, with nothing exchanged: what the others
would give is made up, on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from spindle_cli.analysis.rules.tape import Tape, tensors_in
from spindle_cli.analysis.without_data import Unread
from spindle_cli.operators.sequence.region import with_argument
from spindle_cli.operators.sequence.types import Argument, Result
from spindle_cli.operators.tensor_group import applied


class NotBySequenceError(Exception):
    """A layer's sequence cannot be shared out; the message says why, for people."""


@dataclass(frozen=True)
class Maps:
    """A layer's split parts. Names are those in the layer.

    Attributes:
        entries: modules before which what they take a part of is gathered.
        colwise, rowwise: the maps.
    """

    entries: frozenset[str]
    colwise: frozenset[str]
    rowwise: frozenset[str]


class Recording(Tape):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """What a layer does with one device's part of its trunk.

    Attributes:
        entered: by module, for each call the arguments that are gathered.
        alike: by colwise map, for each call whether it takes what no device has a part of.
        gathered: storages of what was gathered, and what is made of it. `gathered_first`: of the former.
        taken_alike: the tensors that such colwise maps take, and what stands for them inside.
        joined: the parts that were gathered.
        result: what the layer gives.
    """

    def __init__(self, size: int, part_size: int, dim: int) -> None:
        """For a trunk of `size` positions along `dim`, of which the device has `part_size`."""
        super().__init__()
        self.entered: dict[str, list[tuple[Argument, ...]]] = {}
        self.alike: dict[str, list[bool]] = {}
        self.gathered: set[int] = set()
        self.gathered_first: set[int] = set()
        self.taken_alike: list[tuple[Tensor, Tensor]] = []
        self.joined: list[Tensor] = []
        self.left: set[str] = set()
        self.result: Any = None
        self._parts: set[int] = set()
        self._wholes: list[tuple[Tensor, Tensor]] = []
        self._size, self._own, self._dim = size, part_size, dim

    def begin(self, trunk: Tensor) -> None:
        """Note that the layer is given this part of its trunk."""
        self._parts.add(storage(trunk))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        given = tensors_in([args, list((kwargs or {}).values())])
        changed = tensors_in(result)
        if any(
            argument.alias_info is not None and argument.alias_info.is_write
            for argument in func._schema.arguments
        ):
            changed += given
        for marks in (self._parts, self.gathered):
            if any(storage(tensor) in marks for tensor in given):
                marks.update(storage(tensor) for tensor in changed)
        return result

    def enter(
        self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before a split part."""
        places: list[Argument] = []
        given: list[tuple[Argument, Any]] = [*enumerate(args), *kwargs.items()]
        for place, value in given:
            if isinstance(value, Tensor) and storage(value) in self._parts:
                places.append(place)
                args, kwargs = with_argument(place, self._gather(name, value), args, kwargs)
            elif any(storage(leaf) in self._parts for leaf in _tensors(value)):
                raise NotBySequenceError(f"{name} takes a part of the sequence inside of a list")
        self.entered.setdefault(name, []).append(tuple(places))
        return args, kwargs

    def enter_map(
        self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before a colwise map: what is not gathered has its gradients summed there."""
        place: Argument = 0 if args else next(iter(kwargs))
        given = args[0] if args else kwargs[str(place)]
        if storage(given) in self._parts:
            raise NotBySequenceError(f"{name} is given a part of the sequence that nothing has gathered")
        is_alike = storage(given) not in self.gathered
        self.alike.setdefault(name, []).append(is_alike)
        if not is_alike:
            return args, kwargs
        inside = applied(_StandIn, given, tuple(given.shape))
        self.taken_alike.append((given, inside))
        return with_argument(place, inside, args, kwargs)

    def leave(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Tensor) -> Tensor:
        """Puts this device's part in the place of what a rowwise map gives."""
        self.left.add(name)
        if any(storage(given) in self._parts for given in _tensors((args, kwargs))):
            raise NotBySequenceError(f"{name} takes what is made of a part of the sequence")
        if output.dim() <= self._dim or output.shape[self._dim] != self._size:
            raise NotBySequenceError(
                f"{name} gives {tuple(output.shape)}, not {self._size} positions along dimension {self._dim}"
            )
        part = applied(_StandIn, output, self._with_positions(output, self._own))
        self._parts.add(storage(part))
        return part

    def _gather(self, name: str, part: Tensor) -> Tensor:
        for gathered_part, whole in self._wholes:
            if gathered_part is part:
                return whole
        if part.dim() <= self._dim or part.shape[self._dim] != self._own:
            raise NotBySequenceError(f"{name} takes positions along another dimension than {self._dim}")
        whole = applied(_StandIn, part, self._with_positions(part, self._size))
        self.gathered.add(storage(whole))
        self.gathered_first.add(storage(whole))
        self._wholes.append((part, whole))
        self.joined.append(part)
        return whole

    def _with_positions(self, like: Tensor, size: int) -> tuple[int, ...]:
        return (*like.shape[: self._dim], size, *like.shape[self._dim + 1 :])


@dataclass
class Call:
    """A layer with the arguments that its op calls it with, on the meta device."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    maps: Maps
    _hooks: list[Any] = field(default_factory=list)

    def record(self, trunk: Argument, dim: int, part_size: int) -> tuple[Recording, Tensor, list[Tensor]]:
        """Run the layer with a trunk of `part_size` positions; return the recording, that trunk and
        the layer's other tensors.

        Raises:
            NotBySequenceError: its split parts cannot be told from the rest, or it fails.
        """
        args, kwargs = pytree.tree_map(_anew, (self.args, self.kwargs))
        whole = args[trunk] if isinstance(trunk, int) else kwargs[trunk]
        part = torch.empty(
            (*whole.shape[:dim], part_size, *whole.shape[dim + 1 :]), dtype=whole.dtype, device="meta"
        ).requires_grad_(whole.requires_grad)
        others = [leaf for leaf in _tensors((args, kwargs)) if leaf is not whole]
        args, kwargs = with_argument(trunk, part, args, kwargs)
        recording = Recording(whole.shape[dim], part_size, dim)
        recording.begin(part)
        try:
            with self._hooked(recording), recording, Unread():
                recording.result = self.layer(*args, **kwargs)
        except NotBySequenceError:
            raise
        except Exception as error:  # whatever code that takes its sizes from the trunk does with a part of it
            text = str(error).strip().split("\n")[0]
            raise NotBySequenceError(
                f"it fails on {part_size} of {whole.shape[dim]} positions: {type(error).__name__}: {text}"
            ) from error
        for name in sorted(self.maps.rowwise - recording.left):
            raise NotBySequenceError(f"it does not call {name}")
        return recording, part, others

    @contextmanager
    def _hooked(self, recording: Recording) -> Iterator[None]:
        modules: Mapping[str, nn.Module] = dict(self.layer.named_modules())
        with ExitStack() as stack:
            for names, hook in (
                (self.maps.entries, recording.enter),
                (self.maps.colwise, recording.enter_map),
            ):
                for name in sorted(names):
                    handle = modules[name].register_forward_pre_hook(partial(hook, name), with_kwargs=True)
                    stack.callback(handle.remove)
            for name in sorted(self.maps.rowwise):
                handle = modules[name].register_forward_hook(partial(recording.leave, name), with_kwargs=True)
                stack.callback(handle.remove)
            yield


def storage(tensor: Tensor) -> int:
    """A number that names the memory of a tensor."""
    return int(tensor.untyped_storage()._cdata)


def results_of(recording: Recording) -> list[tuple[Result, Tensor]]:
    """The tensors that a layer gives, with their places.

    Raises:
        NotBySequenceError: they are neither one nor a tuple of them.
    """
    if isinstance(recording.result, Tensor):
        return [(None, recording.result)]
    if type(recording.result) not in (tuple, list):
        raise NotBySequenceError(f"it gives a {type(recording.result).__name__}")
    results: list[tuple[Result, Tensor]] = [
        (place, value) for place, value in enumerate(recording.result) if isinstance(value, Tensor)
    ]
    if len(results) < len(_tensors(recording.result)):
        raise NotBySequenceError("it gives tensors inside of a list")
    return results


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _anew(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return made.requires_grad_(value.requires_grad)


class _StandIn(torch.autograd.Function):
    """Another tensor that has a gradient if the first has one; recorded as made of nothing."""

    @staticmethod
    def forward(_: Any, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    @staticmethod
    def backward(_: Any, *__: Tensor) -> tuple[None, None]:
        return None, None
