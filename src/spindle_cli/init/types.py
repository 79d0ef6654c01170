"""What `spindle init` has found of a model, and what it says it has written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from spindle_cli.files.artifact import Artifact, Model

LossName = Literal[
    "cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss", "smooth_l1_loss"
]


@dataclass(frozen=True)
class FieldSpec:
    """One field of a batch, of one sample.

    Attributes:
        name: of forward's argument.
        shape: of one sample, without the batch's dimension.
        below: whole numbers from 0 to below this; None: floats from a normal distribution.
        is_binary: floats that are 0 or 1.
    """

    name: str
    shape: tuple[int, ...]
    below: int | None = None
    is_binary: bool = False


@dataclass(frozen=True)
class ModelSource:
    """What a model was named by, as the stub writes it.

    Attributes:
        module, name: `from module import name`.
        config: the class of its configuration, if it is made from one (Hugging Face).
        has_cache: that configuration has `use_cache`, which training has no use for.
        arguments: of the function, or of the configuration.
    """

    module: str
    name: str
    config: type | None
    has_cache: bool
    arguments: dict[str, Any]


@dataclass(frozen=True)
class StubLoss:
    """How a task's loss comes about.

    Attributes:
        function: of torch.nn.functional, applied to what the model returns; None where it returns the loss.
        output: the attribute of what it returns that holds the scores; None: all of it.
        asks_for_loss: the model returns its loss if called with return_loss=True.
        target: the field that `function` compares with.
    """

    function: LossName | None = None
    output: str | None = None
    asks_for_loss: bool = False
    target: FieldSpec | None = None

    @property
    def is_the_models(self) -> bool:
        """Whether the model can be a task's module as it is."""
        return self.function is None and not self.asks_for_loss


@dataclass(frozen=True)
class TaskStub:
    """One task: which fields its model takes, and how its loss comes about."""

    name: str
    fields: tuple[FieldSpec, ...]
    loss: StubLoss


class Block(Model):
    """A class of which a model repeats equal modules: a candidate for `operators`.

    Attributes:
        module: Module that the class is imported from.
        name: Its name there.
        count: Modules of it.
        equal: Of these, the most that are equal in all shapes.
        first: The first one's dotted name, behind the task's.
        parameters: Parameters of all of them, each counted once.
    """

    module: str
    name: str
    count: int
    equal: int
    first: str
    parameters: int


class InitTask(Model):
    """A task of the workload that was written.

    Attributes:
        name: Its name.
        fields: Its batch's fields, with the shape of one sample of each.
        loss: Its loss, as the stub says it.
    """

    name: str
    fields: dict[str, tuple[int, ...]]
    loss: str


class CoupledOp(Model):
    """An op whose samples depend on each other.

    Attributes:
        task: Its task.
        op: Its name.
        because: Why.
    """

    task: str
    op: str
    because: str


class InitReport(Artifact):
    """What `spindle init --json` prints.

    Attributes:
        workload: The workload file.
        stub: The Python file with the function that it names.
        cluster: The cluster file.
        has_measured: Whether the cluster file is new; else it was there, and is as it was.
        tasks: The tasks.
        operators: Classes of which the model repeats equal modules, which the workload names as operators.
        coupled: Ops that run whole.
        metaops: By MetaOp of the workload as written, how many ops it has.
    """

    KIND: ClassVar[str] = "init"

    schema_: Annotated[Literal["spindle.init/1"], Field(alias="schema")] = "spindle.init/1"
    workload: str
    stub: str
    cluster: str
    has_measured: bool
    tasks: list[InitTask]
    operators: list[Block]
    coupled: list[CoupledOp]
    metaops: dict[str, int]
