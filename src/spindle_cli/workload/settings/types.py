"""What `train:` of a workload file says of data, of which tasks run at which step, and of islands. No torch.

Data: by how many processes the samples of a task are loaded, and how far ahead; and batches whose shapes
differ from step to step, as those that are padded to the longest of their samples. A profile says what was
seen of them and which lengths it was measured at; plans take it over, and launches trace the workload at
these lengths.

Islands of devices average now and then alone. Local SGD (Stich, arXiv 1805.09767) and DiLoCo (Douillard et
al., arXiv 2311.08105): each island trains its own copy of the model on its own part of every batch; after
every so many steps the copies are brought together. It trains another model than plain PyTorch does, so that
nothing but the workload file turns it on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import Model, require_known_keys, shown

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


# Beyond it, what every step tells of each island's losses would be what takes time.
MOST_ISLANDS = 64
_WHOLE_BITS = 32  # of numbers that are sent as they are


class OuterSettings(Model):
    """The outer optimizer, `torch.optim.SGD`, whose gradient is how far the islands have moved, on average,
    from their last common point. With `lr: 1` and `momentum: 0` the new common point is the islands' mean,
    as in local SGD; the defaults are DiLoCo's.

    Attributes:
        lr: Its learning rate.
        momentum: Its momentum.
        nesterov: Whether the momentum is Nesterov's; it goes with a momentum above 0.
    """

    lr: Annotated[float, Field(gt=0)] = 0.7
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = True

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict | OuterSettings):
            raise ValueError("expected a dict, such as {lr: 0.7, momentum: 0.9, nesterov: true}")
        require_known_keys(data, cls.model_fields)
        if isinstance(data, dict) and data.get("momentum") == 0 and "nesterov" not in data:
            return {**data, "nesterov": False}  # which is of the momentum
        return data

    @model_validator(mode="after")
    def _nesterov_is_of_a_momentum(self) -> OuterSettings:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov: goes with a momentum above 0")
        return self


class LocalSgd(Model):
    """Islands of devices that average only now and then.

    Attributes:
        islands: How many copies of the model are trained, each on an equal part of every batch.
        every: After so many steps there is an outer step, which brings the copies together.
        outer: The optimizer of outer steps.
        bits: Bits of each number that an island sends then; 32: as it is, else rounded.
    """

    islands: Annotated[int, Field(ge=2, le=MOST_ISLANDS)]
    every: Annotated[int, Field(ge=1, le=1_000_000)]
    outer: OuterSettings = Field(default_factory=OuterSettings)
    bits: Literal[32, 16, 8] = 32

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict | LocalSgd):
            raise ValueError("expected a dict, such as {islands: 2, every: 500}")
        require_known_keys(data, cls.model_fields)
        return data

    def has_outer_step(self, steps_done: int) -> bool:
        """Whether the islands average after so many steps."""
        return steps_done % self.every == 0

    @property
    def is_rounded(self) -> bool:
        """Whether what is sent has fewer bits."""
        return self.bits < _WHOLE_BITS

    @property
    def sent_share(self) -> float:
        """Bytes that are sent of each byte of a parameter."""
        return self.bits / _WHOLE_BITS

    @property
    def state_per_param(self) -> float:
        """Bytes that are kept for it per byte of trained parameter: the common point, and the momentum."""
        return 2.0 if self.outer.momentum else 1.0


def require_with_islands(local_sgd: LocalSgd, train: dict[str, Any]) -> None:
    """Refuse the train settings, by their keys, that say nothing of islands, or count steps otherwise.

    Raises:
        ValueError: naming the setting.
    """
    every = local_sgd.every
    for key in ("steps", "eval_every"):
        count = train[key]
        if count is not None and count % every:
            raise ValueError(
                f"local_sgd: {key}: {count} is no multiple of local_sgd.every, {every}, and islands have "
                f"different models then; expected one, such as {nearest_multiples(count, every)}"
            )
    for key in ("sampling", "ema"):
        if train[key] is not None:
            raise ValueError(f"local_sgd: does not go with {key}: leave out one of the two")
    if train["precision"] not in ("full", "bf16-autocast"):
        raise ValueError(
            f"local_sgd: does not go with precision: {train['precision']}; expected full or bf16-autocast"
        )


def nearest_multiples(steps: int, every: int) -> str:
    """Return the numbers of steps next to one that islands do not average after, for people."""
    below = steps - steps % every
    return f"{below} or {below + every}" if below else str(below + every)


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
