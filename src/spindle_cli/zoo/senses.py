"""Senses: six tasks over four encoders, a shared writer and heads of their own.

Two tasks see, two hear; one of each also writes, with the same decoder. A motion task and a reading task have
all their parameters to themselves. Every loss is a mean over samples or tokens, so that plain data
parallelism trains exactly the same model: this is the workload of the runtime's benchmark. Shapes: B samples,
S tokens, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from spindle_cli.workload.types import Task, Workload
from spindle_cli.zoo.layers import TP_PLANS, DecoderLayer, EncoderLayer, TokenLoss
from spindle_cli.zoo.options import check_option, choose_batch_sizes
from spindle_cli.zoo.synthetic import Field, FloatField, SyntheticDataset, TokenField

WIDTH, HEADS = 256, 4
WRITER_LAYERS, ANSWER_TOKENS, VOCABULARY = 2, 12, 512
CLASSES = 32


@dataclass(frozen=True)
class SenseSpec:
    """An encoder. `features`: numbers per token; None for token numbers below the vocabulary."""

    layers: int
    tokens: int
    features: int | None

    @property
    def field(self) -> Field:
        """One sample."""
        if self.features is None:
            return TokenField(self.tokens, VOCABULARY)
        return FloatField((self.tokens, self.features))


# Tokens: 5 x 5 patches of 8 x 8 pixels x 3; 24 frames of 80 mels; 20 windows of 8 samples of 6 sensors;
# words.
SENSES: dict[str, SenseSpec] = {
    "vision": SenseSpec(layers=6, tokens=25, features=192),
    "hearing": SenseSpec(layers=4, tokens=24, features=80),
    "motion": SenseSpec(layers=3, tokens=20, features=48),
    "reading": SenseSpec(layers=4, tokens=16, features=None),
}


@dataclass(frozen=True)
class TaskSpec:
    """A task: what it senses, whether it writes an answer or names a class, and its batch."""

    sense: str
    writes: bool
    batch_size: int


TASKS: dict[str, TaskSpec] = {
    "captioning": TaskSpec("vision", writes=True, batch_size=12),
    "transcription": TaskSpec("hearing", writes=True, batch_size=16),
    "object_class": TaskSpec("vision", writes=False, batch_size=8),
    "sound_class": TaskSpec("hearing", writes=False, batch_size=8),
    "activity": TaskSpec("motion", writes=False, batch_size=16),
    "topic": TaskSpec("reading", writes=False, batch_size=8),
}


class SenseEncoder(nn.Module):
    """Tokens of one sense through its layers."""

    def __init__(self, spec: SenseSpec) -> None:
        super().__init__()
        self.embed = (
            nn.Embedding(VOCABULARY, WIDTH) if spec.features is None else nn.Linear(spec.features, WIDTH)
        )
        self.position = nn.Parameter(0.02 * torch.randn(spec.tokens, WIDTH))
        self.blocks = nn.ModuleList(EncoderLayer(WIDTH, HEADS) for _ in range(spec.layers))

    def forward(self, content: Tensor) -> Tensor:
        """[B, S, features], or token numbers [B, S] -> [B, S, W]."""
        x = self.embed(content) + self.position
        for block in self.blocks:
            x = block(x)
        out: Tensor = x
        return out


class Writer(nn.Module):
    """A decoder that writes about what it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(ANSWER_TOKENS, WIDTH))
        self.blocks = nn.ModuleList(DecoderLayer(WIDTH, HEADS) for _ in range(WRITER_LAYERS))

    def forward(self, answer: Tensor, context: Tensor) -> Tensor:
        """Token numbers so far [B, U], [B, S, W] -> [B, U, W]."""
        x = self.words(answer) + self.position
        for block in self.blocks:
            x = block(x, context)
        out: Tensor = x
        return out


class ClassLoss(nn.Module):
    """Mean over the tokens, norm, projection to the classes, mean cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        """[B, S, W] and class numbers [B, 1] -> scalar."""
        return functional.cross_entropy(self.head(self.norm(x.mean(dim=1))), label[:, 0])


class WritingTask(nn.Module):
    """Write an answer about what is sensed."""

    def __init__(self, sense: str, encoder: SenseEncoder, writer: Writer, loss: TokenLoss) -> None:
        super().__init__()
        self.sense = sense
        self.add_module(sense, encoder)
        self.writer = writer
        self.loss = loss

    def forward(self, content: Tensor, answer: Tensor) -> Tensor:
        """What is sensed, token numbers [B, U + 1] -> scalar."""
        context = self.get_submodule(self.sense)(content)
        loss: Tensor = self.loss(self.writer(answer[:, :-1], context), answer[:, 1:])
        return loss


class NamingTask(nn.Module):
    """Name the class of what is sensed."""

    def __init__(self, sense: str, encoder: SenseEncoder) -> None:
        super().__init__()
        self.sense = sense
        self.add_module(sense, encoder)
        self.loss = ClassLoss()

    def forward(self, content: Tensor, label: Tensor) -> Tensor:
        """What is sensed, class numbers [B, 1] -> scalar."""
        loss: Tensor = self.loss(self.get_submodule(self.sense)(content), label)
        return loss


def build(tasks: int = 6, batch_sizes: Mapping[str, int] | None = None) -> Workload:
    """The first `tasks` of the six, on synthetic data.

    Args:
        tasks: 1 to 6.
        batch_sizes: samples per iteration of some or all tasks; those of TASKS for the others.

    Raises:
        WorkloadError: a number of tasks that there is not, or `batch_sizes` for an unknown task.
    """
    check_option("senses: tasks", tasks, range(1, len(TASKS) + 1))
    names = list(TASKS)[:tasks]
    sizes = choose_batch_sizes("senses", {name: TASKS[name].batch_size for name in names}, batch_sizes)
    encoders = {sense: SenseEncoder(SENSES[sense]) for sense in dict.fromkeys(TASKS[n].sense for n in names)}
    writer, words = Writer(), TokenLoss(WIDTH, VOCABULARY)
    operators: list[type[nn.Module]] = [EncoderLayer]
    if any(TASKS[name].writes for name in names):
        operators += [DecoderLayer, TokenLoss]
    if not all(TASKS[name].writes for name in names):
        operators.append(ClassLoss)
    return Workload(
        name=f"senses-{tasks}",
        tasks=[
            Task(
                name=name,
                module=WritingTask(spec.sense, encoders[spec.sense], writer, words)
                if spec.writes
                else NamingTask(spec.sense, encoders[spec.sense]),
                batch_size=sizes[name],
                dataset=make_dataset(spec),
            )
            for name, spec in ((name, TASKS[name]) for name in names)
        ],
        operators=tuple(operators),
        tp_plans=TP_PLANS,
    )


def make_dataset(spec: TaskSpec) -> SyntheticDataset:
    """What is sensed, with an answer or a class."""
    target: dict[str, Field] = (
        {"answer": TokenField(ANSWER_TOKENS + 1, VOCABULARY)}
        if spec.writes
        else {"label": TokenField(1, CLASSES)}
    )
    return SyntheticDataset({"content": SENSES[spec.sense].field, **target})
