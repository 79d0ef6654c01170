"""What changes from step to step: learning rates, and the weights of tasks.

Learning-rate schedules of torch.optim.lr_scheduler by name, stepped once after every update.

What each task's loss counts in the total of a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from math import inf, isfinite
from typing import Any

import torch
from torch.optim import lr_scheduler

from spindle_cli.errors import WorkloadError
from spindle_cli.files.artifact import shown
from spindle_cli.training.optimizing.optimizer import (
    class_named,
    imported,
    make_optimizer,
    require_contract,
    where_raised,
)
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.settings.updates import Schedule, between
from spindle_cli.workload.types import FlowTask, Task

# These take no learning rate from the optimizer.
_SETS_ALL_RATES = ("CyclicLR", "OneCycleLR")
# These take a function of the number of updates.
_OF_FUNCTIONS = ("LambdaLR", "MultiplicativeLR")
# These are made of others.
_OF_SCHEDULES = ("SequentialLR", "ChainedScheduler")
_REFUSED = {
    "LRScheduler": "it is the base class of schedules, not one of them",
    "ReduceLROnPlateau": "it asks for a measure of success after each step",
}


def require_trainable(train: TrainSettings) -> None:
    """Refuse train settings whose optimizers or schedule cannot be made, before anything is started.

    Raises:
        WorkloadError: unknown, refused, the arguments do not fit, or an optimizer does not keep its contract.
    """
    _require_own_rates_last(train)
    for choice in train.choices:
        make_schedule(train, make_optimizer(choice, [torch.nn.Parameter(torch.zeros(2, 2))]), choice.name)
        require_contract(choice)


def _require_own_rates_last(train: TrainSettings) -> None:
    """Refuse learning rates by group that a schedule would write over in silence."""
    setting = [name for name in _names(train.schedule) if name in _SETS_ALL_RATES]
    for rule in train.groups or () if setting else ():
        if rule.lr is not None:
            raise WorkloadError(
                f"train.groups: {rule.name}: lr: {rule.lr:g} would never be used: {setting[0]} "
                "gives all groups the learning rates that its own arguments say",
                hint="Leave it out, or take a schedule that multiplies the groups' learning rates.",
            )


def _names(schedule: Schedule | None) -> list[str]:
    """Return the names of a schedule and of all that it is made of."""
    if schedule is None:
        return []
    parts = schedule.arguments.get("schedulers", ()) if schedule.name in _OF_SCHEDULES else ()
    inner = [Schedule.model_validate(part) for part in parts if isinstance(part, dict) and "name" in part]
    return [schedule.name, *(name for part in inner for name in _names(part))]


def make_schedule(
    train: TrainSettings, optimizer: torch.optim.Optimizer | None, group: str | None
) -> lr_scheduler.LRScheduler | None:
    """Return the schedule of `train` for the optimizer of a group; None without one, or without an optimizer.

    Every rank that steps anything of an optimizer group has one of its own, and all have the same rate.

    Raises:
        WorkloadError: unknown, refused, or its arguments do not fit.
    """
    ramp = train.ramp
    if optimizer is not None and ramp is not None:
        lr = float(optimizer.param_groups[0]["lr"])
        return lr_scheduler.LambdaLR(optimizer, lambda update: ramp.factor(update, lr))
    schedule = train.schedule_of(group)
    if schedule is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one that is made of others steps them before the optimizer steps
        return _made(schedule, optimizer, "train.schedule")


def _made(
    schedule: Schedule, optimizer: torch.optim.Optimizer | None, place: str
) -> lr_scheduler.LRScheduler | None:
    name, arguments = schedule.name, schedule.arguments
    chosen = class_named(name, lr_scheduler, lr_scheduler.LRScheduler, _REFUSED, f"{place}.name", "schedule")
    if optimizer is None:
        return None
    if name in _OF_FUNCTIONS:
        arguments["lr_lambda"] = _checked_function(arguments.get("lr_lambda"), place)
    if name in _OF_SCHEDULES:
        arguments["schedulers"] = _parts(arguments.get("schedulers"), optimizer, place)
    try:
        made: lr_scheduler.LRScheduler = (
            chosen(arguments.pop("schedulers"), optimizer=optimizer, **arguments)
            if name == "ChainedScheduler"
            else chosen(optimizer, **arguments)
        )
    except WorkloadError:
        raise
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise WorkloadError(
            f"{place}: torch.optim.lr_scheduler.{name} does not take {schedule.arguments!r} with "
            f"{type(optimizer).__name__}: {error}",
            hint="Correct train.schedule in the workload file: beside its name, arguments of that class.",
        ) from error
    return made


def _parts(given: Any, optimizer: torch.optim.Optimizer, place: str) -> list[lr_scheduler.LRScheduler | None]:
    """Return the schedules that one is made of."""
    if not isinstance(given, list | tuple) or not given or not all(isinstance(part, dict) for part in given):
        raise WorkloadError(
            f"{place}.schedulers: found {given!r:.80}, expected a list of schedules",
            hint="Each is a dict like train.schedule itself: name, and arguments of that class.",
        )
    made = []
    for number, part in enumerate(given):
        if not isinstance(part.get("name"), str):
            raise WorkloadError(f"{place}.schedulers[{number}]: found {part!r:.80}, expected a `name` in it")
        made.append(_made(Schedule.model_validate(part), optimizer, f"{place}.schedulers[{number}]"))
    return made


def _checked_function(path: Any, place: str) -> Callable[[int], float]:
    """Return a function of the user's, whose results are looked at."""
    place = f"{place}.lr_lambda"
    if not isinstance(path, str):
        raise WorkloadError(
            f"{place}: found {path!r:.80}, expected the import path of a function, "
            "'package.module:function', or a list of them, one for each optimizer group"
        )
    function = imported(path, place)

    def factor(update: int) -> float:
        try:
            value = function(update)
        except Exception as error:
            raise WorkloadError(
                f"{place}: {path} failed for update {update}: {type(error).__name__}: {error}"
                f"{where_raised(error)}"
            ) from error
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
            raise WorkloadError(
                f"{place}: {path} gave {value!r:.80} for update {update}; expected a number, 0 or more"
            )
        return float(value)

    return factor


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


_KEY = "train.task_weights"


class TaskWeights:
    """The weights of some tasks at any step: as the train settings say, else `Task.weight`."""

    def __init__(self, train: TrainSettings, tasks: Iterable[Task | FlowTask]) -> None:
        """Raises WorkloadError: the settings name a task that is not there, or a function that is not."""
        self._task_weights = {task.name: float(task.weight) for task in tasks}
        self._setting = train.task_weights
        self._function: Callable[..., Any] | None = None
        if isinstance(self._setting, str):
            self._function = imported(self._setting, _KEY)
        else:
            for name in self._setting or ():
                self._require_known(name)

    def at(self, step: int) -> dict[str, float]:
        """Return the weight of each task in a step counted from 0.

        Raises:
            WorkloadError: the user's function fails, or gives something else than finite numbers by task.
        """
        if self._function is not None:
            return self._task_weights | self._of_function(self._function, step)
        assert not isinstance(self._setting, str), "a function is imported"
        points = (self._setting or {}).items()
        return self._task_weights | {name: between(given, step) for name, given in points}

    def _of_function(self, function: Callable[..., Any], step: int) -> dict[str, float]:
        try:
            weights = function(step)
        except Exception as error:
            raise WorkloadError(
                f"{_KEY}: {self._setting} failed for step {step}: {type(error).__name__}: {error}"
                f"{where_raised(error)}"
            ) from error
        if not isinstance(weights, Mapping):
            raise WorkloadError(
                f"{_KEY}: {self._setting} gave {weights!r:.80} for step {step}; expected weights by task"
            )
        for name, weight in weights.items():
            self._require_known(name)
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight):
                raise WorkloadError(
                    f"{_KEY}: {self._setting} gave {weight!r:.80} for task {name!r} at step {step}; expected "
                    "a finite number"
                )
        return {name: float(weight) for name, weight in weights.items()}

    def _require_known(self, name: str) -> None:
        if name not in self._task_weights:
            raise WorkloadError(
                f"{_KEY}: there is no task {shown(name)}; the tasks are {', '.join(self._task_weights)}"
            )
