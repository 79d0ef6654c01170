"""What each task's loss counts in the total of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import Any

from spindle_cli.errors import WorkloadError
from spindle_cli.files.parsing import shown
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.optimizing.optimizer import imported, where_raised
from spindle_cli.workload.settings.updates import between
from spindle_cli.workload.types import FlowTask, Task

_KEY = "train.task_weights"


class TaskWeights:
    """The weights of some tasks at any step: as the train settings say, else `Task.weight`."""

    def __init__(self, train: TrainSettings, tasks: Iterable[Task | FlowTask]) -> None:
        """Raises WorkloadError: the settings name a task that is not there, or a function that is not."""
        self._own = {task.name: float(task.weight) for task in tasks}
        self._asked = train.task_weights
        self._function: Callable[..., Any] | None = None
        if isinstance(self._asked, str):
            self._function = imported(self._asked, _KEY)
        else:
            for name in self._asked or ():
                self._require_known(name)

    def at(self, step: int) -> dict[str, float]:
        """By task, of a step counted from 0.

        Raises:
            WorkloadError: the user's function fails, or gives something else than finite numbers by task.
        """
        if self._function is not None:
            return self._own | self._of_function(self._function, step)
        assert not isinstance(self._asked, str), "a function is imported"
        points = (self._asked or {}).items()
        return self._own | {name: between(given, step) for name, given in points}

    def _of_function(self, function: Callable[..., Any], step: int) -> dict[str, float]:
        try:
            found = function(step)
        except Exception as error:
            raise WorkloadError(
                f"{_KEY}: {self._asked} failed for step {step}: {type(error).__name__}: {error}"
                f"{where_raised(error)}"
            ) from error
        if not isinstance(found, Mapping):
            raise WorkloadError(
                f"{_KEY}: {self._asked} gave {found!r:.80} for step {step}; expected weights by task"
            )
        for name, weight in found.items():
            self._require_known(name)
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight):
                raise WorkloadError(
                    f"{_KEY}: {self._asked} gave {weight!r:.80} for task {name!r} at step {step}; expected "
                    "a finite number"
                )
        return {name: float(weight) for name, weight in found.items()}

    def _require_known(self, name: str) -> None:
        if name not in self._own:
            raise WorkloadError(
                f"{_KEY}: there is no task {shown(name)}; the tasks are {', '.join(self._own)}"
            )
