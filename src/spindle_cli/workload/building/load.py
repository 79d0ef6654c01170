"""From what a user names a workload by to the workload: with the initial values that its seed gives, or
without its parameters, which are then on the meta device, so that size costs neither memory nor time.

With several islands (`train.local_sgd`) it is built as each of them trains it: on its part of every batch.

torch.nn.utils.weight_norm, its parametrization, and code like theirs take a layer's weight, compute from it
what takes its place, and register that. A build in which such a parameter is to be real needs the first one
real, too, though no op uses it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import random
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import IterableDataset

from spindle_cli.errors import InputError, WorkloadError
from spindle_cli.files.artifact import shown
from spindle_cli.workload.building.checks import check_workload, functions_uncompiled
from spindle_cli.workload.building.memory import drop, handed_out, noting_arrays, to_meta
from spindle_cli.workload.building.ranged import Ranged
from spindle_cli.workload.file import TrainSettings, WorkloadFile
from spindle_cli.workload.graph import flow_modules
from spindle_cli.workload.init_from import InitFrom
from spindle_cli.workload.initial.matching import fill_whole, find_initial
from spindle_cli.workload.initial.types import InitialValues
from spindle_cli.workload.one_process import show_one_process
from spindle_cli.workload.refuse import place_of_error
from spindle_cli.workload.step_values import StepValues
from spindle_cli.workload.types import FlowTask, Task, Workload

_NUMPY_SEEDS = 2**32


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


_FILE_MODULE = "spindle_workload_"


@dataclass(frozen=True)
class Wanted:
    """What a name is to name, for messages."""

    what: str
    returns: str
    expected: str


_WORKLOAD = Wanted(
    "a workload",
    "a spindle_cli.Workload",
    "Expected a workload YAML file, 'package.module:function' or 'path/to/file.py:function'.",
)


@dataclass(frozen=True)
class Source:
    """A function that builds a workload, its arguments, and the training settings and the files of initial
    values that go with it.
    """

    text: str
    build: Callable[..., Any]
    args: dict[str, Any] = field(default_factory=dict)
    train: TrainSettings = field(default_factory=TrainSettings)
    init_from: InitFrom = field(default_factory=InitFrom)


def resolve(source: str, *, relative_to: Path | None = None) -> Source:
    """Find a workload's function: of a YAML file, or 'package.module:function' / 'path/to/file.py:function'.

    Args:
        source: as the user gave it.
        relative_to: folder that relative paths start from; the current one if None.

    Raises:
        InputError: no such file, module or function, or a malformed YAML file.
        WorkloadError: the user's file fails while being imported.
    """
    folder = relative_to or Path.cwd()
    if source.endswith((".yaml", ".yml", ".json")):
        path = folder / source
        file = WorkloadFile.read(path)
        _make_importable(path.parent)
        function = named_function(file.model, path.parent, where=f"{path}: model")
        init_from = InitFrom(str(path), path.parent, file.init_from)
        return Source(source, function, file.args, file.train, init_from)
    return Source(source, named_function(source, folder, where="workload"))


def locate(source: str, other_folders: tuple[Path, ...] = ()) -> str:
    """Return a workload's source with its path made absolute: looked for in the current folder, then in the
    others.

    What is not a file, 'package.module:function', is left as it is.

    Raises:
        InputError: the file is in none of the folders.
    """
    name, colon, function = source.rpartition(":")
    path, suffix = (Path(name), colon + function) if name.endswith(".py") else (Path(source), "")
    if path.suffix not in (".py", ".yaml", ".yml", ".json"):
        return source
    folders = (Path.cwd(), *other_folders)
    for folder in folders:
        if (folder / path).is_file():
            return str(folder / path) + suffix
    looked = " or ".join(str(folder) for folder in dict.fromkeys(folders))
    raise InputError(
        f"the workload {source!r} is not there (looked in {looked})",
        hint="Say where it is now with --workload.",
    )


def named_function(name: str, folder: Path, *, where: str, wanted: Wanted = _WORKLOAD) -> Callable[..., Any]:
    """Return what 'package.module:function' or 'path/to/file.py:function' names; relative paths start from
    `folder`.

    Raises:
        InputError: no such file, module or function.
        WorkloadError: the user's file fails while being imported.
    """
    show_one_process()
    with noting_arrays(), functions_uncompiled():
        return _named_function(name, folder, where, wanted)


def _named_function(name: str, folder: Path, where: str, wanted: Wanted) -> Callable[..., Any]:
    module_name, colon, function_name = name.rpartition(":")
    if not colon or not module_name or not function_name:
        raise InputError(f"{where}: {name!r} is not {wanted.what}", hint=wanted.expected)
    if module_name.endswith(".py"):
        module = import_file(folder / module_name, where, wanted)
    elif not all(part.isidentifier() for part in module_name.split(".")):
        raise InputError(
            f"{where}: {shown(module_name)} is neither a module's name nor that of a file that ends in .py",
            hint=wanted.expected,
        )
    else:
        module = _import_module(module_name, folder, where, wanted)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InputError(
            f"{where}: {module_name!r} has no function {function_name!r}",
            hint=f"Name a function that returns {wanted.returns}.",
        )
    return cast("Callable[..., Any]", function)  # whoever calls it checks what it returns


def settled_module_name(name: str) -> str:
    """Return a module's name without what we put before that of a workload file, which depends on its folder.

    'layers' for layers.py, wherever it is: a copied workload is the same workload.
    """
    return re.sub(rf"^{_FILE_MODULE}[0-9a-f]{{12}}_", "", name)


def _import_module(name: str, folder: Path, where: str, wanted: Wanted) -> ModuleType:
    _make_importable(folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise InputError(f"{where}: there is no module {name!r}", hint=wanted.expected) from error
        raise _import_failed(name, error) from error
    except Exception as error:
        raise _import_failed(name, error) from error


def import_file(path: Path, where: str, wanted: Wanted) -> ModuleType:
    """Import a Python file as a module of its own; the files beside it can be imported by it.

    Raises:
        InputError: there is no such file.
        WorkloadError: it fails while being imported.
    """
    if not path.is_file():
        raise InputError(f"{where}: {path}: no such file", hint=wanted.expected)
    path = path.resolve()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    name = f"{_FILE_MODULE}{digest}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    _make_importable(path.parent)
    if _is_imported_as(path.stem) == path:  # what others import by its name is the same module
        sys.modules[name] = sys.modules[path.stem]
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    is_named = path.stem not in sys.modules and _found_as(path.stem) == path
    if is_named:
        sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        if is_named:
            del sys.modules[path.stem]
        raise _import_failed(str(path), error) from error
    return module


def _is_imported_as(name: str) -> Path | None:
    """Return the file of a module that is imported by a name."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return None if file is None else Path(file).resolve()


def _found_as(name: str) -> Path | None:
    """Return the file that would be imported by a name."""
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve()


def _make_importable(folder: Path) -> None:
    text = str(folder.resolve())
    if text not in sys.path:
        sys.path.append(text)


def _import_failed(name: str, error: Exception) -> WorkloadError:
    place = place_of_error(error)
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}"
    where = f"{place}: " if place else ""
    return WorkloadError(f"{where}importing {name!r} failed: {type(error).__name__}: {error}")


@dataclass(frozen=True)
class LoadedWorkload:
    """A built workload, how it is trained, and where it came from.

    `initial`: which of its values are not those of the build, but in files.
    """

    workload: Workload
    train: TrainSettings
    source: str
    initial: InitialValues = field(default_factory=InitialValues, kw_only=True)


def load(source: str, *, relative_to: Path | None = None) -> LoadedWorkload:
    """Build a workload: torch is seeded with the training seed first, so every process gets the same initial
    values. What the workload file takes from files (`init_from`) is then read.

    Args:
        source: a workload YAML file, 'package.module:function' or 'path/to/file.py:function'.
        relative_to: folder that relative paths start from; the current one if None.

    Raises:
        InputError: no such file, module or function, or a malformed YAML file; or a file of initial values
            that cannot be read or does not fit.
        WorkloadError: the function fails, or what it returns is not a valid workload.
    """
    resolved = resolve(source, relative_to=relative_to)
    workload = build(resolved)
    initial = read_initial(resolved, workload, where=lambda _: True)
    return LoadedWorkload(workload, resolved.train, source, initial=initial)


def read_initial(
    source: Source, workload: Workload, *, where: Callable[[Tensor], bool], needed: bool = True
) -> InitialValues:
    """Find which values of a workload are in files, and put them into those parameters and buffers that
    `where` chooses. Without `needed` the files need not be there, unless tasks are only evaluated: what these
    have is in no checkpoint.

    Raises:
        InputError: a file cannot be read, or does not fit.
    """
    if not needed and not workload.evaluated:
        return InitialValues()
    initial = find_initial(source.init_from, workload)
    fill_whole(initial, workload, where=where)
    return initial


def build(source: Source) -> Workload:
    """Seed torch, numpy and Python's random numbers, and call the function; with `train.local_sgd`, the
    workload as each island trains it.

    Raises:
        WorkloadError: the function fails, or what it returns is not a valid workload.
    """
    torch.manual_seed(source.train.seed)
    np.random.seed(source.train.seed % _NUMPY_SEEDS)
    random.seed(source.train.seed)
    try:
        with noting_arrays(), functions_uncompiled():
            workload = source.build(**source.args)
    except InputError as error:
        error.message = f"{source.text}: {error.message}"
        raise
    except Exception as error:
        place = place_of_error(error)
        where = f"{place}: " if place else ""
        raise WorkloadError(
            f"{where}building the workload {source.text!r} failed: {type(error).__name__}: {error}"
        ) from error
    checked = check_workload(workload, source.text)
    built = as_on_an_island(checked, source.train, source.text)
    built.uncompiled = checked.uncompiled
    StepValues.of(built).reset()
    _remember(built, source.text)
    return built


_built: list[tuple[str, str, str, weakref.ref[nn.Module]]] = []


def _remember(workload: Workload, source: str) -> None:
    _built[:] = [built for built in _built if built[-1]() is not None]
    for task, name, module in modules_of(workload):
        _built.append((source, task, name, weakref.ref(module)))
        handed_out().end_of_build(task, name, module)


def modules_of(workload: Workload) -> list[tuple[str, str, nn.Module]]:
    """By their tasks' names, with their own names in the task ('': it is the task's own)."""
    return [
        (task.name, name, module)
        for task in workload.all_tasks
        for module, name in (
            flow_modules(task).items() if isinstance(task, FlowTask) else [(task.module, "")]
        )
    ]


def built_modules(source: str) -> list[tuple[str, str, nn.Module]]:
    """Return the modules of all builds of a workload in this process that somebody still holds, with their
    tasks and names.
    """
    modules = [(task, name, module()) for text, task, name, module in _built if text == source]
    return [(task, name, module) for task, name, module in modules if module is not None]


def as_on_an_island(workload: Workload, train: TrainSettings, where: str) -> Workload:
    """Give a workload's modules in tasks with an island's part of their batches; without islands, the
    workload itself.

    An island's part of a batch is a batch by itself: of the batches of this size, in their order, the islands
    take one each. So a loss is the mean over an island's part.

    Raises:
        WorkloadError: a batch cannot be divided, or a task cannot be trained so.
    """
    local_sgd = train.local_sgd
    if local_sgd is None:
        return workload
    tasks = []
    for task in workload.tasks:
        _require_divisible(task, train, local_sgd.islands, where)
        tasks.append(replace(task, batch_size=task.batch_size // local_sgd.islands))
    return replace(workload, tasks=tasks)


def _require_divisible(task: Task | FlowTask, train: TrainSettings, islands: int, where: str) -> None:
    named = f"{where}: task {task.name!r}"
    if task.batch_size % islands:
        raise WorkloadError(
            f"{named}: its batch of {task.batch_size} samples cannot be divided between {islands} islands "
            "(train.local_sgd)",
            hint=f"Make batch_size a multiple of {islands}: islands take equal parts.",
        )
    if task.reduction == "sum":
        raise WorkloadError(
            f"{named}: its loss is a sum over the batch (reduction='sum'), which does not go with "
            "train.local_sgd: an island's part of the batch has a smaller one",
            hint="Let the task give the mean over its samples.",
        )
    is_stream = isinstance(task.dataset, IterableDataset) or not hasattr(task.dataset, "__getitem__")
    if is_stream or train.loader.of(task.name).workers:
        what = "its dataset is iterable" if is_stream else "it has loader workers (train.loader)"
        raise WorkloadError(
            f"{named}: {what}, which does not go with train.local_sgd: islands take every so many-th batch",
            hint="Give it a map-style dataset, and workers: 0.",
        )


def load_abstract(
    source: str, *, relative_to: Path | None = None, reads_initial: bool = True
) -> LoadedWorkload:
    """Return what `load` gives, with every parameter on the meta device; buffers and datasets are real. Of
    files of initial values only the headers are read; without `reads_initial` they need not be there, unless
    tasks are only evaluated: what these have is in no checkpoint.

    A build that needs its parameters' values (and so cannot do without them) is done for real, and its
    parameters are moved to the meta device afterwards.

    Raises:
        InputError, WorkloadError: as `load` does.
    """
    resolved = resolve(source, relative_to=relative_to)
    try:
        with without_parameters():
            workload = build(resolved)
    except WorkloadError:
        workload = build(resolved)
        for task in workload.all_tasks:
            for module in _modules(task):
                drop(module.parameters())
    initial = read_initial(resolved, workload, where=lambda _: False, needed=reads_initial)
    return LoadedWorkload(workload, resolved.train, source, initial=initial)


def without_parameters() -> AbstractContextManager[None]:
    """Inside, parameters are on the meta device from when they come to be."""
    return parameters_born(Births(), keep=lambda _: False)


def _modules(task: Any) -> list[nn.Module]:
    flows = getattr(task, "flows", None)
    if flows is None:
        return [task.module]
    ends = [end for flow in flows for end in (flow.producer, flow.consumer)]
    return [end for end in ends if isinstance(end, nn.Module)]
