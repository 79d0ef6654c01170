"""Optimizers of torch.optim by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.file import TrainSettings

# Why an optimizer of torch.optim cannot be used where parameters are spread over ranks.
_REFUSED = {
    "Optimizer": "it is the base class of optimizers, not one of them",
    "LBFGS": "it evaluates the loss several times in a step and couples all parameters, wherever they are",
    "SparseAdam": "it takes sparse gradients only, and gradients are summed dense",
}

# Why an optimizer cannot work on a part of a parameter.
_WHOLE_ONLY = {
    "Adafactor": "it keeps means over a matrix's rows and columns",
    "Muon": "it orthogonalises whole matrices",
}

# Those with one fused kernel for all parameters, on CPU and CUDA, and the arguments that choose another.
# On 174 parameters of the digits workload AdamW takes 1.6 ms fused and 14 ms by its loop, on one CPU core.
_FUSED = ("Adam", "AdamW", "SGD")
_WAYS = ("fused", "foreach", "differentiable", "capturable")


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of torch.optim with this name.

    Raises:
        WorkloadError: there is none, or it cannot work with parameters spread over ranks.
    """
    found: type[torch.optim.Optimizer] = class_named(
        name, torch.optim, torch.optim.Optimizer, _REFUSED, "train.optimizer", "optimizer"
    )
    return found


def require_elementwise(train: TrainSettings) -> None:
    """Refuse, where parameters are split, an optimizer that does not treat each element by itself.

    Raises:
        WorkloadError: it does not; why.
    """
    reason = _WHOLE_ONLY.get(train.optimizer)
    if reason is not None:
        raise WorkloadError(
            f"train.optimizer: {train.optimizer} cannot train layers split by tensor parallelism: {reason}",
            hint="Use another optimizer, or plan from a profile without tp > 1.",
        )


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
            f"{key}: {name!r} cannot be used: {refused[name]}", hint=f"Known are {', '.join(known)}."
        )
    if name not in known:
        by_lower = {found.lower(): found for found in known}
        close = difflib.get_close_matches(name.lower(), by_lower, n=1)
        hint = f"Did you mean {by_lower[close[0]]}?" if close else f"Known are {', '.join(known)}."
        raise WorkloadError(f"{key}: {module.__name__} has no {what} {name!r}", hint=hint)
    return getattr(module, name)


def make_optimizer(train: TrainSettings, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
    """The optimizer of `train` over these parameters; None where there are none.

    Raises:
        WorkloadError: unknown, refused, or its arguments do not fit.
    """
    chosen = optimizer_class(train.optimizer)
    held = list(parameters)
    if not held:
        return None
    arguments = dict(train.optimizer_args)
    if train.optimizer in _FUSED and not any(way in arguments for way in _WAYS):
        arguments["fused"] = True
    try:
        return chosen(held, lr=train.lr, **arguments)  # type: ignore[call-arg]
    except (TypeError, ValueError) as error:
        raise WorkloadError(
            f"train: torch.optim.{train.optimizer} does not take lr={train.lr:g} and optimizer_args="
            f"{train.optimizer_args!r}: {error}",
            hint="Correct train.optimizer_args in the workload file: keyword arguments of that class.",
        ) from error


def state_keys(train: TrainSettings) -> frozenset[str]:
    """What the optimizer of `train` keeps of each matrix once it has stepped it.

    Raises:
        WorkloadError: as `make_optimizer`.
    """
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.ones_like(parameter)
    optimizer = make_optimizer(train, [parameter])
    assert optimizer is not None, "it has a parameter"
    optimizer.step()
    return frozenset(key for key, value in optimizer.state[parameter].items() if value is not None)
