"""Which tasks run at which step, as a workload file says it. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from spindle_cli.files.artifact import Model, require_known_keys
from spindle_cli.files.parsing import shown

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Every(Model):
    """A task that runs at some steps; a number alone is its `every`.

    Attributes:
        every: The task runs at every so many steps, counted from 0.
        offset: The first of them; less than `every`.
    """

    every: Annotated[int, Field(ge=1, le=10_000)]
    offset: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="before")
    @classmethod
    def _a_number_alone(cls, data: Any) -> Any:
        if isinstance(data, int) and not isinstance(data, bool):
            return {"every": data}
        if not isinstance(data, Mapping | Every):
            raise ValueError("expected a whole number of steps, or {every: ..., offset: ...}")
        require_known_keys(data, cls.model_fields)
        return data

    @model_validator(mode="after")
    def _begins_in_its_first_period(self) -> Every:
        if self.offset >= self.every:
            raise ValueError(
                f"offset {self.offset} is not below every: {self.every}; the steps are offset, "
                "offset + every, ... from the first period on"
            )
        return self

    def runs_before(self, step: int) -> int:
        """Count the steps from 0 to `step` - 1 that run the task."""
        return max(0, -(-(step - self.offset) // self.every))


class Draw(Model):
    """One of several tasks that runs at each step, drawn with probabilities in proportion to weight ** (1 /
    temperature).

    Attributes:
        weights: By task (the sizes of the datasets, say).
        temperature: 1 draws by the weights themselves, a large one nearly evenly.
        seed: Seed of the draws; absent: that of `train`.
    """

    weights: Annotated[Mapping[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]], Field(min_length=1)]
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: Any) -> Any:
        require_known_keys(data, cls.model_fields)
        return data

    @property
    def probabilities(self) -> dict[str, float]:
        """The probability of each task, in the order of their names; none is 0."""
        largest = max(self.weights.values())
        power = 1 / self.temperature
        shares = {name: (weight / largest) ** power for name, weight in sorted(self.weights.items())}
        if min(shares.values()) == 0.0:
            raise ValueError("a task's probability is too small for a number; use a larger temperature")
        total = sum(shares.values())
        return {name: share / total for name, share in shares.items()}

    @model_validator(mode="after")
    def _every_task_can_be_drawn(self) -> Draw:
        assert self.probabilities
        return self


class Sampling(Model):
    """Tasks that do not run at every step. Tasks that neither key names run at every step.

    Attributes:
        every: Tasks that run at every so many steps.
        draw: Tasks of which one runs at each step.
    """

    every: Mapping[str, Every] = Field(default_factory=dict)
    draw: Draw | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: Any) -> Any:
        require_known_keys(data, cls.model_fields)
        return data

    @model_validator(mode="after")
    def _says_something_once(self) -> Sampling:
        if not self.every and self.draw is None:
            raise ValueError("expected `every`, or `draw`, or both")
        both = sorted(set(self.every) & set(self.draw.weights if self.draw else ()))
        if both:
            raise ValueError(f"task {both[0]!r} is in `every` and in `draw`; it can be in one of them")
        return self


class TaskShare(Model):
    """A set of tasks that run at the same step.

    Attributes:
        tasks: The tasks, in the workload's order.
        share: Share of all steps that run just these.
    """

    tasks: Annotated[tuple[str, ...], Field(min_length=1)]
    share: Annotated[float, Field(gt=0, le=1 + 1e-9)]

    @field_validator("tasks")
    @classmethod
    def _each_once(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(tasks)) < len(tasks):
            raise ValueError("expected each task once")
        return tasks


# What the shares of all steps may be off by.
SHARES_SLACK = 1e-6


@dataclass(frozen=True)
class SetsFault:
    """What is wrong with some sets of tasks. `tasks`: of the set; none: of all together."""

    tasks: tuple[str, ...]
    value: str
    expected: str


def faults_of_sets(sets: Sequence[TaskShare], tasks: Collection[str]) -> Iterator[SetsFault]:
    """Tasks that are not there, and shares that do not make up all steps. `tasks`: that there are."""
    for task_share in sets:
        unknown = [task for task in task_share.tasks if task not in tasks]
        if unknown:
            names = ", ".join(sorted(tasks))
            yield SetsFault(task_share.tasks, f"{shown(unknown[0])} is no task", f"one of {names}")
    total = sum(task_share.share for task_share in sets)
    if abs(total - 1) > SHARES_SLACK:
        yield SetsFault((), f"the shares add up to {total:.6g}", "1")


def require_sound(sets: Sequence[TaskShare], tasks: Collection[str]) -> None:
    """Refuse sets of which one is there twice, and what `faults_of_sets` finds.

    Raises:
        ValueError: for a validator to hand on.
    """
    require_told_apart(sets)
    for fault in faults_of_sets(sets, tasks):
        raise ValueError(f"task_sets: {fault.value}; expected {fault.expected}")


def require_told_apart(sets: Sequence[TaskShare]) -> None:
    """Refuse two sets of the same tasks.

    Raises:
        ValueError: for a validator to hand on.
    """
    task_sets = [share.tasks for share in sets]
    for tasks in task_sets:
        if task_sets.count(tasks) > 1:
            raise ValueError(f"task_sets: {', '.join(tasks)} is there twice")
