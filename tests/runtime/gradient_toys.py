"""Workloads with all ways to give a parameter no gradient, and with operators that ask for gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from helpers.layers import Stop, TanhLayer
from spindle_cli.workload.types import Task, Workload

WIDTH, BATCH, SAMPLES = 6, 8, 64


class Two(nn.Module):
    """Gives two values, each by a map of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.one(x), x + self.other(x)


class Beside(nn.Module):
    """Takes a second value of which no gradient goes back."""

    def __init__(self, stops: bool) -> None:
        super().__init__()
        self.stops, self.own, self.second = stops, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.stops:
            beside: Tensor = Stop.apply(self.second(y))  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                beside = self.second(y)
        return x + torch.tanh(self.own(x)) + beside


class Cut(nn.Module):
    """Its first layers get no gradient, each for another reason."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.two, self.behind = first, Two(), TanhLayer(WIDTH)
        self.source, self.quiet = TanhLayer(WIDTH), nn.Sequential(TanhLayer(WIDTH), TanhLayer(WIDTH))
        self.no_grad, self.stopped, self.last = Beside(stops=False), Beside(stops=True), TanhLayer(WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        with torch.no_grad():
            h = h * self.scale + self.first(y)
        one, other = self.two(h)
        with torch.no_grad():
            target = self.behind(other)
        one = self.no_grad(one, self.source(y))
        one = self.stopped(one, self.quiet(y).detach() + self.quiet(x))
        return mse_loss(self.last(one), target)


class Other(nn.Module):
    """Trains what `Cut` does not, in the steps that have both."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.head = first, TanhLayer(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x)).square().mean()


def _items(*names: str) -> list[dict[str, Tensor]]:
    drawn = torch.randn(len(names), SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    return [{name: drawn[place, row] for place, name in enumerate(names)} for row in range(SAMPLES)]


def build(with_other: bool = False) -> Workload:
    torch.manual_seed(0)
    first = TanhLayer(WIDTH)
    tasks = [Task("cut", Cut(first), BATCH, _items("x", "y"))]
    if with_other:
        tasks.append(Task("other", Other(first), BATCH, _items("x")))
    return Workload("no-gradients", tasks, (TanhLayer, Two, Beside))


class Flow(nn.Module):
    """Follows the slope of an energy, as it asks for it itself; its second derivatives train it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.requires_grad_()
        energy = self.outer(torch.tanh(self.inner(x))).square().sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return x - 0.1 * slope


class Learned(nn.Module):
    """One inner step on each sample's own parameters, as in meta-learning."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight = self.start.weight.expand(len(x), WIDTH, WIDTH)
        error = (torch.einsum("nij,nj->ni", weight, x) - y).square().sum()
        (slope,) = torch.autograd.grad(error, weight, create_graph=True)
        return torch.einsum("nij,nj->ni", weight - 0.01 * slope, x) + self.start.bias


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flows = nn.Sequential(Flow(), Flow(), Flow())
        self.learned, self.last = Learned(), TanhLayer(WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(self.last(self.learned(self.flows(x), y)), y)


def build_asking(batch: int = BATCH) -> Workload:
    torch.manual_seed(0)
    data = _items("x", "y")
    task = Task("ask", Asking(), batch, data, eval_dataset=data[: batch + 3])
    return Workload("asking", [task], (Flow, Learned, TanhLayer))


class Noise(nn.Module):
    """Its output is `scale` times the noise of a generator of its own, for items of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.randn(x.shape, generator=self.generator, dtype=x.dtype)


class Repeats(nn.Module):
    """How many samples are as another one is."""

    def forward(self, noisy: Tensor) -> Tensor:
        distance = torch.cdist(noisy, noisy) + torch.eye(len(noisy), dtype=noisy.dtype)
        return (distance < 1e-6).to(noisy.dtype).sum()


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.noise, self.repeats = Noise(), Repeats()

    def forward(self, x: Tensor) -> Tensor:
        noisy = self.noise(x)
        return noisy.square().mean() + 1000.0 * self.repeats(noisy.detach())


def build_noisy() -> Workload:
    data = [{"x": torch.zeros(WIDTH)} for _ in range(SAMPLES)]
    return Workload("noisy", [Task("noisy", Noisy(), BATCH, data)], (Noise, Repeats), coupled=(Repeats,))
