"""Build a workload without its parameters: they are on the meta device, so that size costs neither memory nor
time.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.building.derived import Derivations
from spindle_cli.workload.building.load import LoadedWorkload, build
from spindle_cli.workload.building.ranged import Ranged
from spindle_cli.workload.building.source import resolve
from spindle_cli.workload.initial.matching import InitialValues, find_initial


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
        found = self._storages.get(tensor.untyped_storage()._cdata)
        return found is not None and not found.expired()


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


def load_abstract(
    source: str, *, relative_to: Path | None = None, reads_initial: bool = True
) -> LoadedWorkload:
    """What `load` gives, with every parameter on the meta device; buffers and datasets are real. Of files of
    initial values only the headers are read; without `reads_initial` they need not be there, unless
    tasks are only evaluated: what these have is in no checkpoint.

    A build that needs its parameters' values (and so cannot do without them) is done for real, and its
    parameters are moved to the meta device afterwards.

    Raises:
        InputError, WorkloadError: as `load` does.
    """
    found = resolve(source, relative_to=relative_to)
    births = Births()
    try:
        with parameters_born(births, keep=lambda _: False):
            workload = build(found)
    except WorkloadError:
        workload = build(found)
        for task in workload.all_tasks:
            for module in _modules(task):
                drop(module.parameters())
    initial = InitialValues()
    if reads_initial or workload.evaluated:
        initial = find_initial(found.init_from, workload)
    return LoadedWorkload(workload, found.train, source, initial=initial)


def _modules(task: Any) -> list[nn.Module]:
    flows = getattr(task, "flows", None)
    if flows is None:
        return [task.module]
    ends = [end for flow in flows for end in (flow.producer, flow.consumer)]
    return [end for end in ends if isinstance(end, nn.Module)]


def drop(parameters: Any) -> None:
    """Move parameters to the meta device in place: they stay the same objects, without their memory."""
    for parameter in list(parameters):
        to_meta(parameter)


def to_meta(parameter: nn.Parameter) -> None:
    """Move one parameter to the meta device in place."""
    if parameter.is_meta or is_lazy(parameter):
        return
    empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    stand_in = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    stand_in.__dict__.update(parameter.__dict__)
    swap(parameter, stand_in)


def swap(first: Tensor, second: Tensor) -> None:
    """Exchange what two tensors are; each stays the same object for all who hold it, with its own hooks.

    torch refuses those that somebody has weak references to, as an nn.GRU has to its weights: these are to
    the objects, so they hold as all others do. It refuses those, too, that autograd has saved, as what
    torch.nn.utils.weight_norm has computed of them does until the next forward pass, which computes it anew.
    """
    sides: tuple[Any, Any] = (first, second)
    if not any(weakref.getweakrefs(side) or side._use_count() > 2 for side in sides):
        torch.utils.swap_tensors(first, second)  # type: ignore[no-untyped-call]  # torch gives it no types
    else:
        first.__class__, second.__class__ = second.__class__, first.__class__
        first.__dict__, second.__dict__ = second.__dict__, first.__dict__
        torch._C._swap_tensor_impl(first, second)
    if any(side._backward_hooks for side in sides):
        # Autograd still calls the other's: torch attaches an object's own when they are set.
        for side in sides:
            side._backward_hooks = side._backward_hooks


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
            known: nn.Parameter = memo[id(self)]
            return known
        copied: nn.Parameter = copy(self, memo)
        note(copied, births.numbers.get(id(self)))
        return copied

    modules.register_parameter, parameters.__deepcopy__ = noted_register, noted_copy
    try:
        yield
    finally:
        modules.register_parameter, parameters.__deepcopy__ = register, copy
