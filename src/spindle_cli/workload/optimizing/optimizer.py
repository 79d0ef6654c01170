"""Optimizers: of torch.optim by name, or any class by import path, as other classes and functions of the
user's that train settings name.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from spindle_cli.errors import WorkloadError
from spindle_cli.files.parsing import shown
from spindle_cli.workload.building.source import Wanted, import_file
from spindle_cli.workload.refuse import place_of_error
from spindle_cli.workload.settings.updates import OptimizerChoice

# Why an optimizer of torch.optim cannot be used where parameters are spread over ranks.
_REFUSED = {
    "Optimizer": "it is the base class of optimizers, not one of them",
    "LBFGS": "it evaluates the loss several times in a step and couples all parameters, wherever they are",
    "SparseAdam": "it takes sparse gradients only, and gradients are summed dense",
}

# Those with one fused kernel for all parameters, on CPU and CUDA, and the arguments that choose another.
# On 174 parameters of the digits workload AdamW takes 1.6 ms fused and 14 ms by its loop, on one CPU core.
_FUSED = ("Adam", "AdamW", "SGD")
# Of these, those that step each parameter by its own count of steps.
_FUSED_BY_ITSELF = ("Adam", "AdamW")
_PROBE = torch.Size((64, 96))
_WAYS = ("fused", "foreach", "differentiable", "capturable")
_CODE = Wanted(
    "a class or function", "what is asked for", "Expected 'package.module:Name' or 'path/to/file.py:Name'."
)


def optimizer_class(choice: OptimizerChoice) -> type[torch.optim.Optimizer]:
    """The class that an optimizer's settings name.

    Raises:
        WorkloadError: there is none, or it cannot work with parameters spread over ranks.
    """
    key = choice.key
    if not choice.is_imported:
        of_torch: type[torch.optim.Optimizer] = class_named(
            choice.optimizer, torch.optim, torch.optim.Optimizer, _REFUSED, key, "optimizer"
        )
        return of_torch
    found = imported(choice.optimizer, key)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise WorkloadError(f"{key}: {choice.optimizer} is not a class derived from torch.optim.Optimizer")
    return found


def class_named(
    name: str, module: ModuleType, base: type, refused: Mapping[str, str], key: str, what: str
) -> Any:
    """The subclass of `base` that a module of torch has under this name.

    Args:
        refused: why some of them cannot be used, by name.
        key: of the workload file, for messages; `what`: the kind of thing.

    Raises:
        WorkloadError: there is none, or it is refused; with the name that was probably meant.
    """
    known = sorted(
        found
        for found, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, base)
        and found not in refused
        and not found.startswith("_")
    )
    if name in refused:
        raise WorkloadError(
            f"{key}: {shown(name)} cannot be used: {refused[name]}", hint=f"Known are {', '.join(known)}."
        )
    if name not in known:
        by_lower = {found.lower(): found for found in known}
        close = difflib.get_close_matches(name.lower(), by_lower, n=1)
        hint = f"Did you mean {by_lower[close[0]]}?" if close else f"Known are {', '.join(known)}."
        raise WorkloadError(f"{key}: {module.__name__} has no {what} {shown(name)}", hint=hint)
    return getattr(module, name)


def make_optimizer(
    choice: OptimizerChoice, parameters: Iterable[nn.Parameter], *, begin_together: bool = True
) -> torch.optim.Optimizer | None:
    """The optimizer of some settings over these parameters; None where there are none.

    `begin_together`: the first step takes all of them. torch's fused SGD fails where some have a momentum and
    others, which are stepped for the first time, have none yet.

    Raises:
        WorkloadError: unknown, refused, or its arguments do not fit.
    """
    chosen = optimizer_class(choice)
    held = list(parameters)
    if not held:
        return None
    arguments = dict(choice.arguments)
    fused = _FUSED if begin_together else _FUSED_BY_ITSELF
    is_real = not any(parameter.is_complex() for parameter in held)  # torch fuses no steps of complex numbers
    if choice.optimizer in fused and is_real and not any(way in arguments for way in _WAYS):
        arguments["fused"] = True
    try:
        return chosen(held, lr=choice.lr, **arguments)  # type: ignore[call-arg]
    except (TypeError, ValueError) as error:
        name = choice.optimizer if choice.is_imported else f"torch.optim.{choice.optimizer}"
        raise WorkloadError(
            f"{choice.place}: {name} does not take lr={choice.lr:g} and optimizer_args="
            f"{choice.arguments!r}: {error}",
            hint="Correct optimizer_args in the workload file: keyword arguments of that class.",
        ) from error


def state_keys(choice: OptimizerChoice) -> frozenset[str]:
    """What an optimizer keeps of each matrix once it has stepped it.

    Raises:
        WorkloadError: as `make_optimizer`.
    """
    return frozenset(key for key, value in _probed(choice).items() if value is not None)


def number_keys(choice: OptimizerChoice) -> dict[str, type]:
    """The plain numbers among what an optimizer keeps of a matrix, and their types; torch's own keep none.

    Raises:
        WorkloadError: as `make_optimizer`.
    """
    if not choice.is_imported:
        return {}
    return {key: type(value) for key, value in _probed(choice).items() if isinstance(value, int | float)}


def state_per_param(choice: OptimizerChoice) -> float:
    """Bytes that an optimizer keeps per byte of what it steps: as its class is known, or else as it is for a
    matrix of 64 times 96.

    Raises:
        WorkloadError: as `make_optimizer`.
    """
    if not choice.is_imported:
        return choice.state_per_param
    state = _probed(choice)
    tensors = [value for value in state.values() if isinstance(value, Tensor) and value.numel() > 1]
    return sum(value.nbytes for value in tensors) / _PROBE.numel() / torch.float32.itemsize


def _probed(choice: OptimizerChoice) -> dict[str, Any]:
    parameter = nn.Parameter(torch.zeros(_PROBE))
    parameter.grad = torch.ones_like(parameter)
    optimizer = make_optimizer(choice, [parameter])
    assert optimizer is not None, "it has a parameter"
    optimizer.step()
    return dict(optimizer.state[parameter])


def imported(path: str, where: str) -> Callable[..., Any]:
    """What 'package.module:Name' or 'path/to/file.py:Name' names. The folder of the workload's file is where
    modules and files are looked for, besides where installed modules are.

    Args:
        where: the key in the workload file, for messages.

    Raises:
        WorkloadError: there is no such module, file or name, it cannot be called, or its module fails.
    """
    module_name, _, name = path.rpartition(":")
    if module_name.endswith(".py"):
        return _called(_module_of(module_name, where), name, module_name, where)
    if not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise WorkloadError(
            f"{where}: {shown(path)} is no import path; expected 'package.module:Name' or "
            "'path/to/file.py:Name'"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise WorkloadError(
                f"{where}: there is no module {shown(module_name)}",
                hint="Install it, or put its file beside the workload file.",
            ) from error
        raise _failed(where, module_name, error) from error
    except Exception as error:
        raise _failed(where, module_name, error) from error
    return _called(module, name, module_name, where)


def _called(module: ModuleType, name: str, module_name: str, where: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if not callable(found):
        raise WorkloadError(f"{where}: {shown(module_name)} has no class or function {shown(name)}")
    return cast("Callable[..., Any]", found)


def _module_of(file: str, where: str) -> ModuleType:
    """The module of a Python file: which of two files of one name is meant, nobody can tell."""
    places = [Path(folder or ".") / file for folder in sys.path]
    found = sorted({place.resolve() for place in places if place.is_file()})
    if not found:
        raise WorkloadError(
            f"{where}: there is no file {shown(file)}",
            hint="Its path starts from the workload file's folder.",
        )
    if len(found) > 1:
        raise WorkloadError(
            f"{where}: {shown(file)} may be {' or '.join(map(str, found))}",
            hint="Give it a name of its own, or its whole path.",
        )
    return import_file(found[0], where, _CODE)


def where_raised(error: Exception) -> str:
    """' (file:line)' of the user's code that an error came from; empty where it is not known."""
    place = place_of_error(error)
    return f" ({place})" if place else ""


def _failed(where: str, module: str, error: Exception) -> WorkloadError:
    return WorkloadError(
        f"{where}: importing {shown(module)} failed: {type(error).__name__}: {error}{where_raised(error)}"
    )
