"""The parameters of a build in the order in which they come to be, and which were computed from which others.

torch.nn.utils.weight_norm, its parametrization, and code like theirs take a layer's weight, compute from it
what takes its place, and register that. A build in which such a parameter is to be real needs the first one
real, too, though no op uses it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from spindle_cli.workload.building.memory import to_meta
from spindle_cli.workload.building.ranged import Ranged


class Derivations(TorchDispatchMode):
    """Inside, follows what is computed from parameters, by storages, which views share."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        # By storage, with a weak reference (another storage may come to be in its place), the numbers.
        self._sources: dict[int, tuple[Any, frozenset[int]]] = {}

    def of(self, tensor: Tensor) -> frozenset[int]:
        """Numbers of the parameters that a tensor was computed from."""
        reference, numbers = self._sources.get(tensor.untyped_storage()._cdata, (None, frozenset()))
        return frozenset() if reference is None or reference.expired() else numbers

    def note(self, tensor: Tensor, numbers: Iterable[int]) -> None:
        """A tensor has been computed from these parameters, and from what it was before."""
        reference: Any = StorageWeakRef  # torch gives it no types
        storage = reference(tensor.untyped_storage())
        self._sources[storage.cdata] = (storage, self.of(tensor) | frozenset(numbers))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        numbers = frozenset[int]().union(*map(self.of, _strided((args, kwargs))))
        if numbers:
            for tensor in _strided(result):
                self.note(tensor, numbers)
        return result


def _strided(tree: Any) -> list[Tensor]:
    return [
        item for item in pytree.tree_leaves(tree) if isinstance(item, Tensor) and item.layout == torch.strided
    ]


class Dropped:
    """The tensors that are on the meta device only because we have moved them there, or what they were made
    of; by their storages, which views share.

    A build may have tensors on the meta device of its own accord, as `from_pretrained` has before it loads.
    """

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}  # StorageWeakRefs

    def add(self, tensor: Tensor) -> None:
        """Note a tensor that is on the meta device now."""
        reference: Any = StorageWeakRef  # torch gives it no types
        storage = reference(tensor.untyped_storage())
        self._storages[storage.cdata] = storage

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor would be real in a full build."""
        if not tensor.is_meta:
            return False
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        return storage is not None and not storage.expired()


@dataclass
class Births:
    """The parameters of a build in the order in which they came to be: registered with a module, or
    deep-copied.

    `sources`: for a copy, the number of the parameter that it was copied from. `dropped`: what was moved to
    the meta device. `ranged`: those of which ranges are kept. `derived`: of those that were computed from
    others, the numbers of these; known where `derivations` follow the build.
    """

    parameters: list[nn.Parameter] = field(default_factory=list)
    sources: dict[int, int] = field(default_factory=dict)
    numbers: dict[int, int] = field(
        default_factory=dict
    )  # by id; `parameters` keeps them alive, so ids stay unique
    dropped: Dropped = field(default_factory=lambda: Dropped())
    ranged: Ranged = field(default_factory=lambda: Ranged())
    derivations: Derivations | None = None
    derived: dict[int, frozenset[int]] = field(default_factory=dict)

    def add(self, parameter: nn.Parameter, source: int | None = None) -> int:
        """Number of a new parameter."""
        number = len(self.parameters)
        self.parameters.append(parameter)
        self.numbers[id(parameter)] = number
        if source is not None:
            self.sources[number] = source
        if self.derivations is not None and not is_lazy(parameter):
            self.derived[number] = self.derivations.of(parameter)
        return number

    def drop(self, parameter: nn.Parameter) -> None:
        """Move a parameter to the meta device, in place, if it is not there by itself."""
        parts = self.ranged.wanted.get(self.numbers[id(parameter)])
        if parts is not None and not is_lazy(parameter):
            whole = parameter.detach()
            to_meta(parameter)
            self.ranged.take(parts, whole, parameter)
        elif not parameter.is_meta and not is_lazy(parameter):
            to_meta(parameter)
            self.dropped.add(parameter)

    def describe(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each, to compare two builds by."""
        return [(tuple(parameter.shape), parameter.dtype) for parameter in self.parameters]


@contextlib.contextmanager
def parameters_born(births: Births, keep: Callable[[int], bool]) -> Iterator[None]:
    """Note each parameter as it comes to be, and move it to the meta device at once unless `keep(number)`.

    Moving a parameter before it is initialised makes its initialisation free.
    """
    modules: Any = nn.Module
    parameters: Any = nn.Parameter
    register, copy = modules.register_parameter, parameters.__deepcopy__

    def note(parameter: nn.Parameter, source: int | None = None) -> None:
        number = births.add(parameter, source)
        if not keep(number):
            births.drop(parameter)
        if births.derivations is not None and not is_lazy(parameter):
            births.derivations.note(parameter, [number])

    def noted_register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and id(param) not in births.numbers:
            note(param)

    def noted_copy(self: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) in memo:
            copied_before: nn.Parameter = memo[id(self)]
            return copied_before
        copied: nn.Parameter = copy(self, memo)
        note(copied, births.numbers.get(id(self)))
        return copied

    modules.register_parameter, parameters.__deepcopy__ = noted_register, noted_copy
    try:
        yield
    finally:
        modules.register_parameter, parameters.__deepcopy__ = register, copy
