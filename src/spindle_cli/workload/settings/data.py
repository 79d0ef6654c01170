"""Settings of a task's data: by how many processes it is loaded, and which lengths are planned for.

How the samples of a task are loaded: by how many processes, and how far ahead.

Batches whose shapes differ from step to step, as those that are padded to the longest of their samples.

A profile says what was seen of them and which lengths it was measured at; plans take it over, and launches
trace the workload at these lengths. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import Model, require_known_keys
from spindle_cli.files.parsing import shown

Workers = Annotated[int, Field(ge=0, le=1024)]
Prefetch = Annotated[int, Field(ge=1, le=1024)]


class _OnlyKnown(Model):
    """A mapping below `train`, where a key that is passed over would be a setting that is lost."""

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: Any) -> Any:
        require_known_keys(data, cls.model_fields)
        return data


class TaskLoader(_OnlyKnown):
    """What one task has otherwise than all others.

    Attributes:
        workers: As in `loader`; absent: the same as there.
        prefetch: As in `loader`; absent: the same as there.
    """

    workers: Workers | None = None
    prefetch: Prefetch | None = None


class LoaderSettings(_OnlyKnown):
    """How samples are loaded, on each node.

    Attributes:
        workers: Processes that load a task's batches; with 0 each device's own process loads what it needs of
            a map-style dataset, in a thread, and a stream is read by one process.
        prefetch: Batches that each of them has ready.
        tasks: What single tasks have otherwise.
    """

    workers: Workers = 0
    prefetch: Prefetch = 2
    tasks: dict[str, TaskLoader] = Field(default_factory=dict)

    def of(self, task: str) -> Loading:
        """Return how a task's data are loaded."""
        of_task = self.tasks.get(task, TaskLoader())
        return Loading(
            self.workers if of_task.workers is None else of_task.workers,
            self.prefetch if of_task.prefetch is None else of_task.prefetch,
        )

    def require_known(self, tasks: Iterable[str], where: str) -> None:
        """Refuse settings of a task that is not there.

        Raises:
            InputError: naming it.
        """
        task_names = tuple(tasks)
        for name in self.tasks:
            if name not in task_names:
                raise InputError(
                    f"{where}: train.loader.tasks has {shown(name)}, and the workload has no such task",
                    hint=f"Its tasks are {', '.join(task_names)}.",
                )


@dataclass(frozen=True)
class Loading:
    """One task's settings, as in `LoaderSettings`."""

    workers: int
    prefetch: int


Size = Annotated[int, Field(ge=0, le=2**40)]
Shape = tuple[Size, ...]  # of one sample
LONGEST = 100.0  # the percentile of the longest
LOOKED_AT = 64


@dataclass(frozen=True)
class Looking:
    """How many batches of each task are looked at (fewer where reading takes long), and which percentile of
    the sizes that are seen is planned for.
    """

    batches: int = LOOKED_AT
    percentile: float = LONGEST


class FieldLengths(Model):
    """Shapes of one sample of a field.

    Attributes:
        planned: The shape that is planned for.
        shortest: By dimension the least that was seen.
        longest: By dimension the most that was seen.
    """

    planned: Shape
    shortest: Shape
    longest: Shape

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        shapes = zip(self.shortest, self.planned, self.longest, strict=False)
        if not len(self.planned) == len(self.shortest) == len(self.longest):
            raise ValueError("expected planned, shortest and longest with equally many dimensions")
        if any(not least <= size <= most for least, size, most in shapes):
            raise ValueError(
                f"planned {list(self.planned)} is not between shortest {list(self.shortest)} and "
                f"longest {list(self.longest)}"
            )
        if self.shortest == self.longest:
            raise ValueError("shortest and longest are the same: only what differs is listed")
        return self

    @property
    def varies(self) -> tuple[bool, ...]:
        """Which dimensions differ from batch to batch."""
        return tuple(least != most for least, most in zip(self.shortest, self.longest, strict=True))


class TaskLengths(Model):
    """What was seen of a task's batches, as training takes them.

    Attributes:
        batches: that were looked at.
        percentile: of the sizes that were seen, what is planned for; 100: the longest.
        fields: those that differ from batch to batch.
    """

    batches: Annotated[int, Field(ge=1)]
    percentile: Annotated[float, Field(gt=0, le=100)] = LONGEST
    fields: Annotated[dict[str, FieldLengths], Field(min_length=1)]

    @property
    def planned(self) -> dict[str, Shape]:
        """The shape of one sample of each field that is planned for."""
        return {name: field.planned for name, field in self.fields.items()}

    @property
    def shortest(self) -> dict[str, Shape]:
        """The least shape of one sample of each field that was seen."""
        return {name: field.shortest for name, field in self.fields.items()}

    def line(self, task: str) -> str:
        """Say for people which lengths a task is planned for."""
        sizes = {name: _sizes(field.planned, field.varies) for name, field in self.fields.items()}
        shown = " and ".join(
            f"{size} ({', '.join(name for name, field_size in sizes.items() if field_size == size)})"
            for size in dict.fromkeys(sizes.values())
        )
        which = "the longest" if self.percentile == LONGEST else f"percentile {self.percentile:g}"
        return (
            f"{task}: planned for lengths of {shown}, {which} of {self.batches} batches; "
            "others run as they are"
        )


Lengths = Mapping[str, TaskLengths]


def _sizes(shape: Shape, varies: tuple[bool, ...]) -> str:
    return " x ".join(str(size) for size, differs in zip(shape, varies, strict=True) if differs)
