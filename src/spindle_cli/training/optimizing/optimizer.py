"""Optimizers: of torch.optim by name, or any class by import path, as other classes and functions of the
user's that train settings name.

Try an optimizer class of the user's: does it treat parameters as the train settings say?

Where parameters are spread over ranks, an optimizer sees some of them, or parts of them. One that looks at
more than its contract says would train another model, and nothing would show it.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from spindle_cli.errors import WorkloadError
from spindle_cli.files.artifact import shown
from spindle_cli.workload.building.load import Wanted, import_file
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
    """Return the class that an optimizer's settings name.

    Raises:
        WorkloadError: there is none, or it cannot work with parameters spread over ranks.
    """
    key = choice.key
    if not choice.is_imported:
        of_torch: type[torch.optim.Optimizer] = class_named(
            choice.optimizer, torch.optim, torch.optim.Optimizer, _REFUSED, key, "optimizer"
        )
        return of_torch
    cls = imported(choice.optimizer, key)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise WorkloadError(f"{key}: {choice.optimizer} is not a class derived from torch.optim.Optimizer")
    return cls


def class_named(
    name: str, module: ModuleType, base: type, refused: Mapping[str, str], key: str, what: str
) -> Any:
    """Return the subclass of `base` that a module of torch has under this name.

    Args:
        refused: why some of them cannot be used, by name.
        key: of the workload file, for messages; `what`: the kind of thing.

    Raises:
        WorkloadError: there is none, or it is refused; with the name that was probably meant.
    """
    names = sorted(
        attribute
        for attribute, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, base)
        and attribute not in refused
        and not attribute.startswith("_")
    )
    if name in refused:
        raise WorkloadError(
            f"{key}: {shown(name)} cannot be used: {refused[name]}", hint=f"Known are {', '.join(names)}."
        )
    if name not in names:
        by_lower = {class_name.lower(): class_name for class_name in names}
        close = difflib.get_close_matches(name.lower(), by_lower, n=1)
        hint = f"Did you mean {by_lower[close[0]]}?" if close else f"Known are {', '.join(names)}."
        raise WorkloadError(f"{key}: {module.__name__} has no {what} {shown(name)}", hint=hint)
    return getattr(module, name)


def make_optimizer(
    choice: OptimizerChoice, parameters: Iterable[nn.Parameter], *, begin_together: bool = True
) -> torch.optim.Optimizer | None:
    """Return the optimizer of some settings over these parameters; None where there are none.

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
        return chosen(held, lr=choice.lr, **arguments)  # type: ignore[call-arg]  # an optimizer class
    except (TypeError, ValueError) as error:
        name = choice.optimizer if choice.is_imported else f"torch.optim.{choice.optimizer}"
        raise WorkloadError(
            f"{choice.place}: {name} does not take lr={choice.lr:g} and optimizer_args="
            f"{choice.arguments!r}: {error}",
            hint="Correct optimizer_args in the workload file: keyword arguments of that class.",
        ) from error


def state_keys(choice: OptimizerChoice) -> frozenset[str]:
    """Return what an optimizer keeps of each matrix once it has stepped it.

    Raises:
        WorkloadError: as `make_optimizer`.
    """
    return frozenset(key for key, value in _probed(choice).items() if value is not None)


def number_keys(choice: OptimizerChoice) -> dict[str, type]:
    """Return the plain numbers among what an optimizer keeps of a matrix, and their types; torch's own keep
    none.

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
    """Return what 'package.module:Name' or 'path/to/file.py:Name' names. The folder of the workload's file is
    where modules and files are looked for, besides where installed modules are.

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
    function = getattr(module, name, None)
    if not callable(function):
        raise WorkloadError(f"{where}: {shown(module_name)} has no class or function {shown(name)}")
    return cast("Callable[..., Any]", function)


def _module_of(file: str, where: str) -> ModuleType:
    """Return the module of a Python file: which of two files of one name is meant, nobody can tell."""
    places = [Path(folder or ".") / file for folder in sys.path]
    paths = sorted({place.resolve() for place in places if place.is_file()})
    if not paths:
        raise WorkloadError(
            f"{where}: there is no file {shown(file)}",
            hint="Its path starts from the workload file's folder.",
        )
    if len(paths) > 1:
        raise WorkloadError(
            f"{where}: {shown(file)} may be {' or '.join(map(str, paths))}",
            hint="Give it a name of its own, or its whole path.",
        )
    return import_file(paths[0], where, _CODE)


def where_raised(error: Exception) -> str:
    """' (file:line)' of the user's code that an error came from; empty where it is not known."""
    place = place_of_error(error)
    return f" ({place})" if place else ""


def _failed(where: str, module: str, error: Exception) -> WorkloadError:
    return WorkloadError(
        f"{where}: importing {shown(module)} failed: {type(error).__name__}: {error}{where_raised(error)}"
    )


# What checkpoints keep of a parameter under keys of their own, beside an optimizer's.
RESERVED_KEYS = ("master", "ema", "common", "outer_momentum")
_STEPS = 3
_SHAPE = (6, 4)


def require_contract(choice: OptimizerChoice) -> None:
    """Refuse a class that steps two parameters together otherwise than each by itself, or, if it is to be
    element-wise, a parameter otherwise than its parts; and one that a checkpoint would not bring back.

    Raises:
        WorkloadError: it does, it fails, or it keeps what checkpoints cannot hold.
    """
    if not choice.is_imported:
        return
    values = _numbers(0, _SHAPE), _numbers(1, _SHAPE)
    gradients = [tuple(_numbers(10 * step + which, _SHAPE) for which in (2, 3)) for step in range(_STEPS)]
    together = _stepped(choice, values, gradients)
    alone = [
        _stepped(choice, [values[which]], [(of_step[which],) for of_step in gradients])[0] for which in (0, 1)
    ]
    if not all(map(torch.equal, together, alone)):
        raise WorkloadError(
            f"{choice.place}: {choice.optimizer} steps two parameters together otherwise than each by "
            "itself; devices hold different ones",
            hint="Use an optimizer that looks at one parameter at a time.",
        )
    reloaded = _stepped(choice, values, gradients, begins_anew=True)
    if not all(map(torch.equal, together, reloaded)):
        raise WorkloadError(
            f"{choice.place}: {choice.optimizer} steps otherwise once its state is loaded again; what it "
            "keeps outside of `state` and `param_groups` is in no checkpoint",
            hint="Keep it in `self.state[parameter]`.",
        )
    if choice.treats_elements_alone:
        _require_element_wise(choice, values[0], [of_step[0] for of_step in gradients], together[0])


def _require_element_wise(
    choice: OptimizerChoice, value: Tensor, gradients: Sequence[Tensor], stepped: Tensor
) -> None:
    """Refuse a class that steps the parts of a parameter to something else than `stepped`, the whole."""
    cut = _SHAPE[0] * _SHAPE[1] // 3
    parts = (value.reshape(-1)[:cut], value.reshape(-1)[cut:])
    of_parts = [(of_step.reshape(-1)[:cut], of_step.reshape(-1)[cut:]) for of_step in gradients]
    if not torch.equal(torch.cat(_stepped(choice, parts, of_parts)), stepped.reshape(-1)):
        raise WorkloadError(
            f"{choice.place}: {choice.optimizer} steps a parameter otherwise than its parts, so that it "
            "is not element-wise",
            hint="Say `contract: whole`, or leave it out.",
        )


def _numbers(seed: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _stepped(
    choice: OptimizerChoice,
    values: Sequence[Tensor],
    gradients: Sequence[tuple[Tensor, ...]],
    *,
    begins_anew: bool = False,
) -> list[Tensor]:
    """Return the values after some steps with these gradients; with `begins_anew` the last is that of a new
    optimizer, which is given the state of the first.
    """
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = _made(choice, parameters)
    try:
        for number, given in enumerate(gradients, start=1):
            for parameter, gradient in zip(parameters, given, strict=True):
                parameter.grad = gradient.clone()
            if begins_anew and number == len(gradients):
                content = optimizer.state_dict()
                optimizer = _made(choice, parameters)
                optimizer.load_state_dict(content)
            optimizer.step()
    except Exception as error:
        raise WorkloadError(
            f"{choice.place}: {choice.optimizer} failed in a step on parameters of shape "
            f"{tuple(values[0].shape)}: {type(error).__name__}: {error}{where_raised(error)}",
            hint="It has to step matrices, and where it is element-wise vectors too.",
        ) from error
    _require_savable(choice, optimizer)
    return [parameter.detach() for parameter in parameters]


def _made(choice: OptimizerChoice, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    made = make_optimizer(choice, parameters)
    assert made is not None, "it has parameters"
    return made


def _require_savable(choice: OptimizerChoice, optimizer: torch.optim.Optimizer) -> None:
    """Refuse state that a checkpoint cannot hold."""
    items = {key: value for state in optimizer.state.values() for key, value in state.items()}
    for key, value in items.items():
        if key in RESERVED_KEYS:
            raise WorkloadError(
                f"{choice.place}: {choice.optimizer} keeps state named {key!r}, which checkpoints use "
                "themselves",
                hint="Give it another name in the class.",
            )
        if not isinstance(key, str) or "." in key:
            raise WorkloadError(
                f"{choice.place}: {choice.optimizer} keeps state named {key!r}; expected a text without dots"
            )
        if value is not None and not isinstance(value, Tensor | int | float):
            raise WorkloadError(
                f"{choice.place}: {choice.optimizer} keeps {key!r} as a {type(value).__name__}; expected "
                "tensors and numbers, which checkpoints hold"
            )
