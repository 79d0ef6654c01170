"""What a user writes: tasks over plain `nn.Module`s, gathered in a `Workload`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

Reduction = Literal["mean", "sum"]
Metric = Callable[[dict[str, Tensor]], float]
# A function of the step; [[step, number], ...], linear between two; or what it is until a callback sets it.
StepSchedule = Callable[[int], float] | Sequence[tuple[int, float]] | float


@dataclass(eq=False)
class Task:
    """A path through components that ends in a loss.

    Attributes:
        name: unique among the tasks.
        module: `forward(**batch)` returns a scalar loss, or a dict with the scalar under "loss".
        batch_size: samples per iteration, over all devices.
        dataset: map-style or iterable torch Dataset; an item is a dict of tensors (or numbers) named like
            forward's arguments, a tuple in their order, or has such inside (docs/data.md). None: of a task
            that is only evaluated (`Workload.evaluated`).
        weight: of this task's loss in the total.
        reduction: whether the loss is the mean or the sum over the batch's samples.
        collate: turns a list of items into a batch; torch's default_collate if None. The batch's first
            dimension is the sample.
        absent: by field, what stands in its place in items that lack it (an image that is not there). Every
            item then has a field `has_<field>` as well, a bool, which forward has to take.
        eval_dataset: what the task is evaluated on while it is trained (`train.eval_every`) and at the end;
            None: it is not.
        metrics: by name, functions for that: each is given what forward returns in its dict beside the loss,
            {key: tensor of all samples, in the dataset's order}, and gives a number.
        step_values: numbers that forward reads and that change from step to step, by the attribute that holds
            them ('beta', 'decoder.temperature'; '*.dropout.p' for several; 'package.module:NAME'): a
            function of the step, counted from 0; [[step, number], ...]; or a number that callbacks set.
    """

    name: str
    module: nn.Module
    batch_size: int
    dataset: Any = None
    weight: float = 1.0
    reduction: Reduction = "mean"
    collate: Callable[[list[Any]], dict[str, Any]] | None = None
    absent: Mapping[str, Tensor] = field(default_factory=dict)
    eval_dataset: Any = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    step_values: Mapping[str, StepSchedule] = field(default_factory=dict)


@dataclass(eq=False)
class Flow:
    """One edge of a `FlowTask`: the output of `producer` (a module, or a batch field's name) is an argument
    of `consumer`.
    """

    producer: nn.Module | str
    consumer: nn.Module
    argument: (
        str | None
    )  # the consumer's keyword; None: its next positional argument, in the order of the add_flow calls


@dataclass(eq=False)
class FlowTask:
    """A task given as an explicit graph of modules, for what cannot be traced; the paper's `add_flow` form.

    Every module is run as one operator, but an `nn.Sequential` is run as the chain of its children. The one
    module whose output no other consumes returns the loss (or a dict with "loss").

        task = FlowTask(name="caption", batch_size=8, dataset=pairs)
        task.add_flow("image", vision)
        task.add_flow(vision, decoder, argument="context")
        task.add_flow("tokens", decoder, argument="tokens")
        task.add_flow(decoder, loss)
    """

    name: str
    batch_size: int
    dataset: Any = None
    weight: float = 1.0
    reduction: Reduction = "mean"
    collate: Callable[[list[Any]], dict[str, Any]] | None = None
    flows: list[Flow] = field(default_factory=list)
    absent: Mapping[str, Tensor] = field(default_factory=dict)
    eval_dataset: Any = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    step_values: Mapping[str, StepSchedule] = field(default_factory=dict)

    def add_flow(
        self, producer: nn.Module | str, consumer: nn.Module, argument: str | None = None
    ) -> FlowTask:
        """Let `consumer` take `producer`'s output (or the batch field of that name); returns self, so that
        calls chain.
        """
        self.flows.append(Flow(producer, consumer, argument))
        return self


@dataclass(eq=False)
class Constraint:
    """What is done to a parameter after every update of the optimizer, under no_grad.

    Attributes:
        of: a trained parameter, or a module, of which it is all trained parameters.
        clamp: (low, high), either of them None: as `parameter.clamp_(low, high)`.
        unit_norm: a dimension, along which vectors get length 1:
            `parameter.copy_(functional.normalize(parameter, dim=unit_norm))`. It needs whole vectors, so
            every device with the parameter keeps its optimizer state and steps all of it.
    """

    of: nn.Parameter | nn.Module
    clamp: tuple[float | None, float | None] | None = None
    unit_norm: int | None = None


Moment = Literal["after_update", "before_forward"]


@dataclass(eq=False)
class Follows:
    """Parameters that are a moving average of trained ones, as a teacher is of its student:
    `slow.mul_(decay).add_(fast, alpha=1 - decay)`, once a step, under no_grad.

    Attributes:
        slow: a parameter that takes no gradient, or a module of such ones.
        fast: the trained parameter, or the module, that it follows; of modules, what has the same name.
        decay: a number, or a function that is given the step's number, counted from 0.
        when: "after_update": behind the optimizer's update of every step; "before_forward": ahead of the
            first forward of every step, so of the first step too, and not behind the last.
    """

    slow: nn.Parameter | nn.Module
    fast: nn.Parameter | nn.Module
    decay: float | Callable[[int], float]
    when: Moment = "after_update"


@dataclass(eq=False)
class Workload:
    """Several tasks that train one model together.

    Attributes:
        name: of the workload.
        tasks: at least one; parameters are shared by using the same module object.
        operators: classes run as one operator each; what is between them is traced.
        coupled: operators whose samples depend on each other: never split over the batch.
        contrastive: operators that compare every sample with every other and give a loss of that (CLIP's,
            SigLIP's); split over the batch, with what is compared gathered. Losses of this kind are found
            without being named too.
        tp_plans: how a layer class is split for tensor parallelism: {class: {submodule: "colwise" | "rowwise"
            | ...}}.
        evaluated: tasks that are never trained, only evaluated: each has an `eval_dataset` and no `dataset`.
            What they share with `tasks` they take as it is trained so far; parameters of their own stay as
            they are initialised.
        tp_vocabulary: tensor parallelism also splits heads over at least so many words (classes), and
            embeddings over the same ones; None: none.
        tp_sequence: between the parts of a layer that tensor parallelism splits, its devices have a part of
            the sequence each, where nothing there looks at several positions.
        constraints: on trained parameters, applied after every update, in their order.
        follows: parameters that are moving averages of trained ones.
        uncompiled: classes and functions that were given to torch.compile, and run without it.
    """

    name: str
    tasks: Sequence[Task | FlowTask]
    operators: tuple[type[nn.Module], ...] = ()
    coupled: tuple[type[nn.Module], ...] = ()
    contrastive: tuple[type[nn.Module], ...] = ()
    tp_plans: Mapping[type[nn.Module], Mapping[str, Any]] = field(default_factory=dict)
    tp_vocabulary: int | None = 1024
    tp_sequence: bool = False
    evaluated: Sequence[Task | FlowTask] = ()
    constraints: Sequence[Constraint] = ()
    follows: Sequence[Follows] = ()
    uncompiled: tuple[str, ...] = field(default=(), init=False)

    @property
    def all_tasks(self) -> tuple[Task | FlowTask, ...]:
        """The tasks that are trained, then those that are only evaluated."""
        return (*self.tasks, *self.evaluated)

    @property
    def operator_classes(self) -> tuple[type[nn.Module], ...]:
        """All classes that are run as one operator each."""
        return (*self.operators, *self.coupled, *self.contrastive)
