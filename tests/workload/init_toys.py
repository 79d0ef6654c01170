"""Two tasks that share an encoder; one has a head of its own and a batch norm with running statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spindle_cli.workload.types import FlowTask, Task, Workload

WIDTH = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Read(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.encoder(x)) * self.scale).square().mean()


class Judge(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)).square().mean()


class Alone(nn.Module):
    """A task whose layers are all that it has."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer()).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def items(count: int = 24, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(WIDTH, generator=drawn).to(dtype)} for _ in range(count)]


def build() -> Workload:
    encoder = nn.Sequential(Layer(), Layer())
    tasks = [Task("read", Read(encoder), 4, items()), Task("judge", Judge(encoder), 4, items())]
    return Workload("init", tasks, (Layer,))


def build_evaluated() -> Workload:
    """One more task over the encoder, with a head of its own, that is only evaluated."""
    workload = build()
    first, _ = workload.tasks
    assert isinstance(first, Task)
    encoder = first.module.get_submodule("encoder")
    workload.evaluated = [Task("probe", Judge(encoder), 4, eval_dataset=items())]
    return workload


def build_split(dtype: str = "float32") -> Workload:
    """Layers that tensor parallelism splits: `up` by its outputs, `down` by its inputs."""
    numbers = getattr(torch, dtype)
    task = Task("alone", Alone(numbers), 4, items(dtype=numbers))
    plan = {Layer: {"up": "colwise", "down": "rowwise"}}
    return Workload("split", [task], (Layer,), tp_plans=plan)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def build_flow() -> Workload:
    first, second, mean = Layer(), Layer(), Mean()
    task = FlowTask("flow", 4, items())
    task.add_flow("x", first).add_flow(first, second).add_flow(second, mean)
    return Workload("flow", [task])
