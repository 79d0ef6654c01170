"""Noise that forward draws by the batch's size: rows of the samples, drawn once for all that use them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.training.batches import Batches
from spindle_cli.training.precision import NoRandomness
from spindle_cli.workload.types import Task, Workload

from .shares import gradients_of, run_cut, run_plain
from .toy import WIDTH, Block, Items

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "numbers from 0 to 1": lambda x: torch.rand(x.shape[0], 1, 1),
    "in a tuple": lambda x: torch.rand((x.size(0), 1, 1), device=x.device),
    "normal ones": lambda x: 1 + torch.randn(len(x), 5, WIDTH),
    "steps of diffusion": lambda x: torch.randint(1, 9, (x.shape[0],), device=x.device)[:, None, None],
    "into new memory": lambda x: x.new_empty(x.shape[0], 1, 1).uniform_(1, 2),
    "a mask in new memory": lambda x: x.new_empty(x.shape[0], 1, 1).bernoulli_(0.9),
}


class Net(nn.Module):
    """What is drawn is used by two operators, and by the loss."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.draw = Block(), Block(), draw

    def forward(self, x: Tensor) -> Tensor:
        t = self.draw(x)
        return (self.second(self.first(x * t) * t) * t).square().mean()


def workload(name: str) -> Workload:
    torch.manual_seed(0)
    return Workload("w", [Task("t", Net(DRAWS[name]), 4, Items(x=(5, WIDTH)))], (Block,))


@pytest.mark.parametrize("name", DRAWS)
def test_operators_that_take_it_are_split_and_give_what_plain_torch_gives(name: str) -> None:
    made = workload(name)
    graph = analysed(workload(name)).tasks["t"]
    assert not any(op.coupled for op in graph.ops)
    batch = Batches(made.tasks[0], seed=1).rows(0, 0, 4)
    with NoRandomness():
        plain = run_plain(made.tasks[0], batch)
        loss = run_cut(graph, [batch], {op.index: [0, 1, 4] for op in graph.ops})
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=0)
    expected = gradients_of(plain, dict(made.tasks[0].module.named_parameters()))
    for key, gradient in gradients_of(loss, dict(graph.root.named_parameters())).items():
        torch.testing.assert_close(gradient, expected[key])


@pytest.mark.parametrize("name", DRAWS)
def test_it_is_drawn_by_one_op_which_hands_it_on(name: str) -> None:
    graph = analysed(workload(name)).tasks["t"]
    names = ("rand", "randn", "randint", "uniform_", "bernoulli_")
    drawing = [
        op.index
        for op in graph.ops
        for node in op.graph.nodes
        if node.op != "placeholder" and str(getattr(node.target, "__name__", node.target)) in names
    ]
    assert len(drawing) == 1


class Picked(Net):
    """Rows by their numbers, of which there are as many as of what dropout has made: no draw by size."""

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.dropout(self.first(x), 0.1)
        return self.second(h[torch.arange(h.shape[0])]).square().mean()


def test_what_a_size_is_asked_of_may_be_drawn() -> None:
    task = Task("t", Picked(DRAWS["in a tuple"]), 4, Items(x=(5, WIDTH)))
    graph = analysed(Workload("w", [task], (Block,))).tasks["t"]
    assert not any(op.coupled for op in graph.ops)


def test_a_generator_of_forwards_own_is_refused_by_its_name() -> None:
    """It would go on where the trace has left it, in every process by itself."""

    def draw(x: Tensor) -> Tensor:
        return torch.rand(x.shape[0], 1, 1, generator=torch.Generator())

    task = Task("t", Net(draw), 4, Items(x=(5, WIDTH)))
    with pytest.raises(WorkloadError, match="forward gives torch a Generator between operators"):
        analysed(Workload("w", [task], (Block,)))


class DropPath(nn.Module):
    """As timm has it: a sample keeps its path with a probability."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.down = rate, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.rate)
        return x + self.down(x) * kept.div_(1 - self.rate)


class DropPaths(nn.Module):
    def __init__(self, rates: list[float]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*map(DropPath, rates))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_operators_that_draw_are_split_however_seldom_it_shows() -> None:
    rates = [0.01 * each for each in range(1, 30)]
    graph = analysed(Workload("w", [Task("t", DropPaths(rates), 8, Items(x=(5, WIDTH)))], (DropPath,)))
    assert [op.index for op in graph.tasks["t"].ops if op.coupled] == []


class DropsForAll(nn.Module):
    """Draws once for the whole batch, and hands on what it has drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = torch.empty(1, 1, WIDTH, device=x.device).bernoulli_(0.5)
        return self.down(x) * kept, kept


class DropsWeights(nn.Module):
    """Draws once for the whole batch, and keeps that to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, functional.dropout(self.down.weight, 0.5))


class SameMask(nn.Module):
    """One mask for both layers and for all samples, as variational dropout has it; or a mix of two losses."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.draw = Block(), Block(), draw

    def forward(self, x: Tensor) -> Tensor:
        kept = self.draw(x)
        return (self.second(self.first(x * kept)) * kept).square().mean()


class AfterDrop(nn.Module):
    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, Block()

    def forward(self, x: Tensor) -> Tensor:
        given = self.first(x)
        x, kept = given if isinstance(given, tuple) else (given, 1.0)
        return (self.second(x) * kept).square().mean()


FOR_ALL: dict[str, Callable[[Tensor], Tensor]] = {
    "in new memory": lambda x: x.new_empty(1, 1, WIDTH).bernoulli_(0.5),
    "one number": lambda x: x.new_empty(1).uniform_(),
    "as a constant's": lambda x: functional.dropout(x.new_ones(WIDTH), 0.5),
}


@pytest.mark.parametrize("name", FOR_ALL)
def test_what_several_ops_take_of_a_draw_for_the_whole_batch_is_drawn_on_one_device(name: str) -> None:
    """Each share would draw its own, and another op takes one of them for all samples."""
    graph = analysed(Workload("w", [Task("t", SameMask(FOR_ALL[name]), 4, Items(x=(5, WIDTH)))], (Block,)))
    assert [op.coupled for op in graph.tasks["t"].ops][:2] == [True, False]


@pytest.mark.parametrize(("layer", "coupled"), [(DropsForAll, True), (DropsWeights, False)])
def test_an_operator_that_hands_on_such_a_draw_is_not_split(layer: type[nn.Module], coupled: bool) -> None:
    net = AfterDrop(layer())
    graph = analysed(Workload("w", [Task("t", net, 4, Items(x=(5, WIDTH)))], (Block, layer)))
    assert [op.coupled for op in graph.tasks["t"].ops][:2] == [coupled, False]
