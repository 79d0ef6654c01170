"""A student, and a teacher that is a moving average of it; bounds on what is trained."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from spindle_cli import Constraint, Follows, Task, Workload

WIDTH = 6
DECAY = 0.75
LOW, HIGH = -0.05, 0.08


class Block(nn.Module):
    """A residual layer that tensor parallelism can split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Tower(nn.Module):
    """Blocks, a matrix between operators, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.mix = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH))
        self.spare = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x @ self.mix


class Distilled(nn.Module):
    """What the student makes of one view is to be what the teacher makes of the other."""

    def __init__(self, student: Tower, teacher: Tower, *, moves: bool = False) -> None:
        """`moves`: the teacher, at the start of forward."""
        super().__init__()
        self.moves = moves
        self.student, self.teacher = student, teacher
        self.scale = nn.Parameter(torch.tensor(0.1))
        self.prototypes = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: Tensor, view: Tensor) -> Tensor:
        with torch.no_grad():
            if self.moves and self.training:
                for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    slow.data = slow.data * DECAY + fast.data * (1 - DECAY)
            target = self.teacher(x)
        scores = self.student(view) @ self.prototypes.T
        return (
            nn.functional.mse_loss(scores * self.scale, target @ self.prototypes.T) + scores.square().mean()
        )


class Pairs(Dataset):
    """Two views of each sample."""

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randn(24, WIDTH, generator=draw)
        self.view = self.x + 0.1 * torch.randn(24, WIDTH, generator=draw)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "view": self.view[index]}


def grows(step: int) -> float:
    """A decay that changes with the step."""
    return 1 - 0.5 / (step + 2)


def build(when: str = "after_update", schedule: bool = False, written: bool = False) -> Workload:
    """`written`: one task alone, whose forward moves the teacher by itself."""
    student = Tower()
    teacher = copy.deepcopy(student).requires_grad_(False)
    with torch.no_grad():
        teacher.spare.add_(1)
        teacher.blocks[0].up.bias.add_(1)
    for block in student.blocks:
        block.up.bias.requires_grad_(False)
    one, two = (Distilled(student, teacher, moves=written) for _ in range(2))
    decay: float | Callable[[int], float] = grows if schedule else DECAY
    made = [
        Task("one", one, batch_size=8, dataset=Pairs(1), eval_dataset=Pairs(3)),
        Task("two", two, batch_size=4, dataset=Pairs(2)),
    ]
    return Workload(
        name="distilled",
        tasks=made[:1] if written else made,
        operators=(Block,),
        tp_plans={Block: {"up": "colwise", "down": "rowwise"}},
        follows=[] if written else [Follows(teacher, student, decay, when)],
        constraints=[
            Constraint(one.scale, clamp=(LOW, HIGH)),
            Constraint(student.blocks[1].down, clamp=(None, HIGH)),
            Constraint(one.prototypes, unit_norm=1),
        ],
    )
