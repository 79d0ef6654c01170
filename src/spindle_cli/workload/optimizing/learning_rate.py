"""Learning-rate schedules of torch.optim.lr_scheduler by name, stepped once after every update."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.optimizing.contracts import require_contract
from spindle_cli.workload.optimizing.optimizer import class_named, make_optimizer

_TAKES_FUNCTION = "it takes a function, which a workload file cannot hold"
_TAKES_SCHEDULES = "it takes other schedules, which a workload file cannot hold"
# These take no learning rate from the optimizer.
_SETS_ALL_RATES = ("CyclicLR", "OneCycleLR")
_REFUSED = {
    "LRScheduler": "it is the base class of schedules, not one of them",
    "LambdaLR": _TAKES_FUNCTION,
    "MultiplicativeLR": _TAKES_FUNCTION,
    "SequentialLR": _TAKES_SCHEDULES,
    "ChainedScheduler": _TAKES_SCHEDULES,
    "ReduceLROnPlateau": "it asks for a measure of success after each step",
}


def require_trainable(train: TrainSettings) -> None:
    """Refuse train settings whose optimizers or schedule cannot be made, before anything is started.

    Raises:
        WorkloadError: unknown, refused, the arguments do not fit, or an optimizer does not keep its contract.
    """
    _require_own_rates_last(train)
    for choice in train.choices:
        make_schedule(train, make_optimizer(choice, [torch.nn.Parameter(torch.zeros(2, 2))]))
        require_contract(choice)


def _require_own_rates_last(train: TrainSettings) -> None:
    """Refuse learning rates by group that a schedule would write over in silence."""
    if train.schedule is None or train.schedule.name not in _SETS_ALL_RATES:
        return
    for rule in train.groups or ():
        if rule.lr is not None:
            raise WorkloadError(
                f"train.groups: {rule.name}: lr: {rule.lr:g} would never be used: {train.schedule.name} "
                "gives all groups the learning rates that its own arguments say",
                hint="Leave it out, or take a schedule that multiplies the groups' learning rates.",
            )


def make_schedule(
    train: TrainSettings, optimizer: torch.optim.Optimizer | None
) -> lr_scheduler.LRScheduler | None:
    """The schedule of `train` for this rank's optimizer; None without one, or without an optimizer.

    Every rank that trains anything has one of its own, and all have the same learning rate.

    Raises:
        WorkloadError: unknown, refused, or its arguments do not fit.
    """
    if train.schedule is None:
        return None
    name = train.schedule.name
    chosen = class_named(
        name, lr_scheduler, lr_scheduler.LRScheduler, _REFUSED, "train.schedule.name", "schedule"
    )
    if optimizer is None:
        return None
    try:
        made: lr_scheduler.LRScheduler = chosen(optimizer, **train.schedule.arguments)
    except (TypeError, ValueError) as error:
        raise WorkloadError(
            f"train.schedule: torch.optim.lr_scheduler.{name} does not take "
            f"{train.schedule.arguments!r} with torch.optim.{train.optimizer}: {error}",
            hint="Correct train.schedule in the workload file: beside its name, arguments of that class.",
        ) from error
    return made


def resume_schedule(schedule: lr_scheduler.LRScheduler, numbers: Mapping[str, Any], steps: int) -> None:
    """Bring a new schedule to where a saved one was.

    Args:
        numbers: of the saved one.
        steps: that were done; one that is made of others goes through them again, with the same result.
    """
    if isinstance(schedule, lr_scheduler.SequentialLR | lr_scheduler.ChainedScheduler):
        advance(schedule, steps)
    else:
        schedule.load_state_dict({**schedule.state_dict(), **numbers})


def advance(schedule: lr_scheduler.LRScheduler, steps: int) -> None:
    """Bring a schedule to where it is after so many steps.

    Raises:
        WorkloadError: it ends before.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch expects steps of the optimizer before those of the schedule
        try:
            for _ in range(steps):
                schedule.step()
        except ValueError as error:
            raise WorkloadError(
                f"train.schedule: {type(schedule).__name__} does not reach step {steps}: {error}",
                hint="Steps count from the run's beginning: make the schedule as long as the whole run.",
            ) from error
