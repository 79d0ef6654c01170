"""Generalist: five tasks over three encoders and one trunk, which all share and which is heavier than all
encoders together.

Two tasks see, two hear, one reads. As every task uses the trunk, no device can be without it, unless it is
cut between two of its layers: this is the workload of the runtime's benchmark where that pays. Every loss is
a mean over samples, so that plain data parallelism trains exactly the same model. Shapes: B samples, S
tokens, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from spindle_cli.workload.types import Task, Workload
from spindle_cli.zoo.layers import TP_PLANS, EncoderLayer
from spindle_cli.zoo.options import check_option, choose_batch_sizes
from spindle_cli.zoo.senses import CLASSES, HEADS, WIDTH, ClassLoss, SenseEncoder, SenseSpec
from spindle_cli.zoo.synthetic import SyntheticDataset, TokenField

TRUNK_LAYERS = 12

# Tokens: 6 x 6 patches of 8 x 8 pixels x 3; 24 frames of 80 mels; words.
ENCODERS: dict[str, SenseSpec] = {
    "vision": SenseSpec(layers=4, tokens=36, features=192),
    "hearing": SenseSpec(layers=2, tokens=24, features=80),
    "reading": SenseSpec(layers=2, tokens=16, features=None),
}


@dataclass(frozen=True)
class TaskSpec:
    """A task: its encoder and its batch."""

    sense: str
    batch_size: int


TASKS: dict[str, TaskSpec] = {
    "scene": TaskSpec("vision", batch_size=4),
    "speaker": TaskSpec("hearing", batch_size=4),
    "topic": TaskSpec("reading", batch_size=4),
    "object": TaskSpec("vision", batch_size=2),
    "sound": TaskSpec("hearing", batch_size=2),
}


class Trunk(nn.Module):
    """The layers that all tasks share."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(EncoderLayer(WIDTH, HEADS) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, W] -> [B, S, W]."""
        for block in self.blocks:
            x = block(x)
        return x


class GeneralistTask(nn.Module):
    """Name the class of what is sensed."""

    def __init__(self, sense: str, encoder: SenseEncoder, trunk: Trunk) -> None:
        super().__init__()
        self.sense = sense
        self.add_module(sense, encoder)
        self.trunk = trunk
        self.loss = ClassLoss()

    def forward(self, content: Tensor, label: Tensor) -> Tensor:
        """What is sensed, class numbers [B, 1] -> scalar."""
        loss: Tensor = self.loss(self.trunk(self.get_submodule(self.sense)(content)), label)
        return loss


def build(
    tasks: int = 5, layers: int = TRUNK_LAYERS, batch_sizes: Mapping[str, int] | None = None
) -> Workload:
    """The first `tasks` of the five, on synthetic data.

    Args:
        tasks: 1 to 5.
        layers: of the trunk.
        batch_sizes: samples per iteration of some or all tasks; those of TASKS for the others.

    Raises:
        WorkloadError: a number of tasks or layers that there is not, or `batch_sizes` for an unknown task.
    """
    check_option("generalist: tasks", tasks, range(1, len(TASKS) + 1))
    check_option("generalist: layers", layers, range(1, 4 * TRUNK_LAYERS + 1))
    names = list(TASKS)[:tasks]
    sizes = choose_batch_sizes("generalist", {name: TASKS[name].batch_size for name in names}, batch_sizes)
    senses = dict.fromkeys(TASKS[name].sense for name in names)
    encoders = {sense: SenseEncoder(ENCODERS[sense]) for sense in senses}
    trunk = Trunk(layers)
    return Workload(
        name=f"generalist-{tasks}",
        tasks=[
            Task(
                name=name,
                module=GeneralistTask(TASKS[name].sense, encoders[TASKS[name].sense], trunk),
                batch_size=sizes[name],
                dataset=SyntheticDataset(
                    {"content": ENCODERS[TASKS[name].sense].field, "label": TokenField(1, CLASSES)}
                ),
            )
            for name in names
        ],
        operators=(EncoderLayer, ClassLoss),
        tp_plans=TP_PLANS,
    )
