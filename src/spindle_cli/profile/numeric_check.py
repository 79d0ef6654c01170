"""What a profile says of the check by numbers (profile/checking/)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from spindle_cli.files.artifact import Model


class TaskCheck(Model):
    """What of a task was checked by numbers: computed whole and in shares of 1 and n - 1 samples.

    Attributes:
        task: Name of the task.
        samples: n.
        checked: MetaOps whose shares give what the whole gives.
        largest_difference: Of those, over the largest element of the output or gradient concerned.
        whole: MetaOps whose shares do not, and why; their curves have one device alone.
        unchecked: MetaOps that may be split and were not checked, and why.
        forward_unchecked: Why the ops together were not compared with the task's own `forward`; absent: they
            were, or the task has none.
    """

    task: str
    samples: Annotated[int, Field(ge=1)]
    checked: tuple[str, ...] = ()
    largest_difference: Annotated[float, Field(ge=0)] = 0.0
    whole: dict[str, str] = Field(default_factory=dict)
    unchecked: dict[str, str] = Field(default_factory=dict)
    forward_unchecked: str | None = None


class NumericCheck(Model):
    """What was checked by numbers before the curves were made.

    Attributes:
        tasks: What was checked of each task.
        skipped: By which option nothing was checked.
    """

    tasks: tuple[TaskCheck, ...] = ()
    skipped: str | None = None

    def unchecked(self, splittable: Iterable[str]) -> dict[str, str]:
        """MetaOps, and tasks as wholes, that were not checked, and why; `splittable`: MetaOps that may be
        split.
        """
        if self.skipped is not None:
            return dict.fromkeys(splittable, self.skipped)
        forward = {t.task: t.forward_unchecked for t in self.tasks if t.forward_unchecked is not None}
        return {**{name: why for task in self.tasks for name, why in task.unchecked.items()}, **forward}
