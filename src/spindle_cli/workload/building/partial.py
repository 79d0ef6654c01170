"""Build a workload with some of its parameters real, or ranges of them, and the others on the meta device.

The real ones get what they have in a build where all are real: parameters on the meta device are initialised
as if they were real, with as many random numbers drawn, and thrown away, so that the random generator is at
the same place for those that follow.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from spindle_cli.errors import SpindleError
from spindle_cli.workload.building.load import Births, Derivations, Source, build, parameters_born
from spindle_cli.workload.building.memory import drop, swap
from spindle_cli.workload.building.ranged import Ranged
from spindle_cli.workload.initial.types import OwnPart
from spindle_cli.workload.types import Workload


class NotInPartError(Exception):
    """The build cannot be done in part; it must be done in full."""


def build_kept(
    source: Source, first: Births, kept: set[int], parts: Mapping[int, tuple[OwnPart, ...]]
) -> tuple[Births, Workload]:
    """Build the workload of which `first` is an abstract build with its kept parameters real, of those with
    `parts` no more than these where that can be.

    Raises:
        NotInPartError: other parameters come to be, or kept ones depend on others in an unknown way.
    """
    needed = _with_sources(kept, first)
    # Whole as long as there may be copies of them, or others are computed from them.
    copied = set(first.sources.values()).union(*first.derived.values())
    ranged = {number: own_parts for number, own_parts in parts.items() if number not in copied}
    second, workload = _build_once_more(source, needed, ranged)
    if second is None and ranged:  # more of them is looked at than ranges
        second, workload = _build_once_more(source, needed, {})
    if second is None or workload is None or second.describe() != first.describe():
        raise NotInPartError
    if any(second.parameters[number].is_meta for number in kept - second.ranged.wanted.keys()):
        raise NotInPartError
    drop(second.parameters[number] for number in needed - kept)
    return second, workload


def _build_once_more(
    source: Source, needed: set[int], ranged: Mapping[int, tuple[OwnPart, ...]]
) -> tuple[Births | None, Workload | None]:
    """With the needed parameters real, but those of which only parts are wanted; None if that cannot be."""
    births = Births(ranged=Ranged(ranged))
    try:
        with parameters_born(births, keep=(needed - ranged.keys()).__contains__), drawing_as_if_real(births):
            workload = build(source)
    except SpindleError as error:
        if not ranged:
            raise NotInPartError from error
        return None, None
    whole = any(
        number >= len(births.parameters) or not births.ranged.has(births.parameters[number])
        for number in ranged
    )
    return (None, None) if whole or births.ranged.failed else (births, workload)


def build_abstract(source: Source) -> tuple[Births, Workload]:
    """Build a workload of whose parameters none is real, and tell how they came to be.

    Raises:
        NotInPartError: it cannot be built so.
    """
    derivations = Derivations()
    births = Births(derivations=derivations)
    try:
        with parameters_born(births, keep=lambda _: False), derivations:
            return births, build(source)
    except SpindleError as error:
        raise NotInPartError from error


def _with_sources(kept: set[int], births: Births) -> set[int]:
    """The kept parameters and all that they were copied or computed from."""
    needed: set[int] = set()
    frontier = set(kept)
    while frontier:
        needed |= frontier
        copied = {births.sources[number] for number in frontier if number in births.sources}
        frontier = copied.union(*(births.derived.get(number, ()) for number in frontier)) - needed
    return needed


@contextlib.contextmanager
def drawing_as_if_real(births: Births) -> Iterator[None]:
    """Draw what real parameters would draw, whether by a random operation or in one of torch.nn.init's
    functions.
    """
    stand_ins = _RealWhileInitialised(births)
    throw_away: Any = _DrawAndThrowAway
    with stand_ins, throw_away(births):
        yield
    stand_ins.give_back()


_tensor_type: Any = Tensor
_IS_META = _tensor_type.is_meta.__get__
_SET = _tensor_type.__setitem__
# What a parameter says of which ranges are kept, as it does in a plain build.
_AS_REAL = {_IS_META: False, _tensor_type.device.__get__: torch.device("cpu")}


class _DrawAndThrowAway(TorchDispatchMode):
    """A random operation on tensors that we have moved to the meta device, or on what was made of them, is
    first run on real ones of the same shapes. Those of which ranges are kept are operated on one at a time.
    """

    def __init__(self, births: Births) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self._dropped = births.dropped
        self._ranged = births.ranged

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors(args) + _tensors(kwargs)
        if any(map(self._ranged.has, given)):
            return self._ranged.run(func, args, kwargs)
        if not any(map(self._dropped.has, given)):
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            func(*pytree.tree_map(_scratch, args), **pytree.tree_map(_scratch, kwargs))
        result = func(*args, **kwargs)  # the meta kernel itself draws nothing
        for tensor in _tensors(result):
            if tensor.is_meta:
                self._dropped.add(tensor)
        return result


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors among an operator's arguments or results: themselves, or in tuples, lists and dicts,
    faster than torch's trees.
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in _tensors(item)]


def _scratch(item: Any) -> Any:
    """Return a real tensor in the place of a meta one; of halves, which are valid as probabilities, means and
    deviations.
    """
    if not isinstance(item, Tensor) or not item.is_meta:
        return item
    scratch = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="cpu")
    return scratch.fill_(0.5) if item.is_floating_point() else scratch.fill_(1)


class _RealWhileInitialised(TorchFunctionMode):
    """Some of torch.nn.init's functions draw nothing for a tensor that says it is meta: make it real when
    they ask.

    It goes back to the meta device when the next one asks, so that one at a time takes memory.
    """

    def __init__(self, births: Births) -> None:
        super().__init__()
        self._births = births
        self._lent: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _AS_REAL and self._births.ranged.has(args[0]):
            return _AS_REAL[func]
        if func == _SET and isinstance(args[2], int | float) and self._births.ranged.has(args[0]):
            # Its number would be on the meta device, too.
            return func(args[0], args[1], torch.tensor(args[2], dtype=args[0].dtype, device="cpu"))
        asks_is_meta = func == _IS_META and func(args[0]) and _called_by_init()
        if not asks_is_meta or not self._births.dropped.has(args[0]):
            return func(*args, **(kwargs or {}))
        self.give_back()
        tensor = args[0]
        real = torch.zeros_like(tensor, device="cpu", requires_grad=tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            real = torch.nn.Parameter(real.detach(), requires_grad=tensor.requires_grad)
            real.__dict__.update(tensor.__dict__)
        swap(tensor, real)
        self._lent = tensor
        return False

    def give_back(self) -> None:
        """Move what was made real last back to the meta device."""
        if isinstance(self._lent, torch.nn.Parameter) and id(self._lent) in self._births.numbers:
            self._births.drop(self._lent)
        self._lent = None


def _called_by_init() -> bool:
    frame = sys._getframe(2)
    return frame.f_code.co_filename == torch.nn.init.__file__
