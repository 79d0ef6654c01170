"""Another build takes a graph over: with what a trace has left on the first build, over its own modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from spindle_cli.analysis import localise
from spindle_cli.analysis.analyse import analyse
from spindle_cli.analysis.localise import place_of_buffer, rebind
from spindle_cli.analysis.tracing.behaviour import REGION
from spindle_cli.workload.graph import CONSTANT, WorkloadGraph
from spindle_cli.workload.types import Task, Workload

from .toy import WIDTH, Block, Items


@dataclass(slots=True)
class Settings:
    floor: float = 0.25


class Kept(NamedTuple):
    losses: Tensor
    most: int


OF_THE_FILE = Settings(0.125)


class Net(nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run, self.settings = run, Settings()
        self.first, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 4)
        self.a, self.b = Block(), Block()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("shift", torch.tensor(0.5))

    def forward(self, x: Tensor, label: Tensor) -> Any:
        return self.run(self, x, label)

    def losses(self, x: Tensor, label: Tensor) -> Tensor:
        logits = self.head(self.b(self.a(self.first(x))))
        return functional.cross_entropy(logits, label, reduction="none")

    def scaled(self, losses: Tensor) -> Tensor:
        return self.scale * losses + self.shift


def by_its_parts(net: Net, x: Tensor, label: Tensor) -> Tensor:
    losses = net.losses(x, label)
    if (label > 1).sum() > 2:
        return net.scaled(losses).mean()
    return losses.mean()


def by_a_layer(net: Net, x: Tensor, label: Tensor) -> Tensor:
    h = net.a(net.first(x))
    if (label > 1).sum() > 2:
        h = net.b(h)
    return functional.cross_entropy(net.head(h), label)


def by_an_object(net: Net, x: Tensor, label: Tensor) -> Tensor:
    settings, kept = net.settings, Kept(net.losses(x, label), 3)
    if (kept.losses > settings.floor).sum() > kept.most:
        return kept.losses.clamp(min=settings.floor).mean()
    return kept.losses.mean()


def by_an_object_of_the_file(net: Net, x: Tensor, label: Tensor) -> Tensor:
    settings, losses = OF_THE_FILE, net.losses(x, label)
    if (losses > settings.floor).sum() > 3:
        return losses.clamp(min=settings.floor).mean() * settings.floor
    return losses.mean()


def by_a_method(net: Net, x: Tensor, label: Tensor) -> Tensor:
    scaled, losses = net.scaled, net.losses(x, label)
    if (losses > 0.1).sum() > 3:
        losses = scaled(losses)
    return losses.mean()


def by_numbers(net: Net, x: Tensor, label: Tensor) -> Tensor:
    weight = torch.tensor([0.5, 1.0, 2.0, 0.25])
    return (net.losses(x, label) * weight[label]).mean()


def by_both(net: Net, x: Tensor, label: Tensor) -> Tensor:
    weight = torch.tensor([0.5, 1.0, 2.0, 0.25])
    losses = net.losses(x, label) * weight[label]
    most = int(0.5 * (losses > 0).sum()) + 1
    return losses.topk(most).values.mean()


def _with_a_layer_around(run: Callable[..., Any]) -> nn.Module:
    around = nn.Linear(4, 4)

    def own(net: Net, x: Tensor, label: Tensor) -> Tensor:
        losses = net.losses(x, label)
        if (losses > 0).any():
            return losses.mean() * around.weight.sum()
        return losses.mean()

    made = Net(own)
    made.around = around
    return made


def net_of(run: Callable[..., Any]) -> Net:
    return Net(run)


def workload_of(run: Callable[..., Any], make: Callable[..., nn.Module] = net_of, seed: int = 0) -> Workload:
    torch.manual_seed(seed)
    data = Items(16, x=(3,), label=((), 4))
    return Workload("w", [Task("t", make(run), 8, data)], operators=(Block,))


def losses_of(graph: WorkloadGraph, x: Tensor, label: Tensor) -> Tensor:
    task = graph.tasks["t"]
    known: dict[str, Any] = {"x": x, "label": label}
    for op in task.ops:
        given = [known[name] for name in (*op.fields, *op.inputs)]
        found = task.op_module(op)(*given)
        known.update(zip(op.outputs, found, strict=True) if op.outputs else {"loss": found}.items())
    loss: Tensor = known["loss"]
    return loss


def of_a_trace(graph: WorkloadGraph) -> set[str]:
    names = {str(node.target) for op in graph.tasks["t"].ops for node in op.graph.nodes}
    return {
        "region" if name.startswith(REGION) else "constant"
        for name in names
        if name.startswith((REGION, CONSTANT))
    }


def by_a_partial(net: Net, x: Tensor, label: Tensor) -> Tensor:
    """Nothing is known of what it holds."""
    scaled, losses = partial(net.scaled), net.losses(x, label)
    if (losses > 0.1).sum() > 3:
        losses = scaled(losses)
    return losses.mean()


def test_what_hides_a_layer_of_a_build_is_traced_anew() -> None:
    graph = analyse(workload_of(by_a_partial))
    assert of_a_trace(graph) == {"region"}
    assert rebind(graph, workload_of(by_a_partial, seed=1)) is None


CASES = {
    by_its_parts: {"region"},
    by_a_layer: {"region"},
    by_an_object: {"region"},
    by_an_object_of_the_file: {"region"},
    by_a_method: {"region"},
    by_numbers: {"constant"},
    by_both: {"region", "constant"},
}


@pytest.mark.parametrize(
    ("run", "make"),
    [*((run, net_of) for run in CASES), (by_its_parts, _with_a_layer_around)],
    ids=lambda each: each.__name__,
)
def test_another_build_runs_what_was_traced_with_its_own_modules(
    run: Callable[..., Any], make: Callable[..., nn.Module]
) -> None:
    graph = analyse(workload_of(run, make))
    assert of_a_trace(graph) == CASES[run]
    other = workload_of(run, make, seed=1)
    net = other.tasks[0].module  # type: ignore[union-attr]
    net.settings.floor = 0.75
    bound = rebind(graph, other)
    assert bound is not None
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(3))
    label = torch.arange(8) % 4
    loss, right = losses_of(bound, x, label), net(x, label)
    torch.testing.assert_close(loss, right, rtol=0, atol=1e-6)
    assert not torch.isclose(losses_of(graph, x, label), right), "the builds have other values"
    wanted = torch.autograd.grad(right, list(net.parameters()), allow_unused=True)
    loss.backward()
    for parameter, gradient in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-6)


def test_a_region_writes_into_the_buffers_of_its_own_build() -> None:
    graph = analyse(workload_of(_counting))
    other = workload_of(_counting, seed=1)
    bound = rebind(graph, other)
    assert bound is not None
    losses_of(bound, torch.randn(8, 3), torch.arange(8) % 4)
    first, second = (each.tasks[0].module for each in (graph.workload, other))  # type: ignore[union-attr]
    assert (first.shift.item(), second.shift.item()) == (0.5, 1.5)
    task = bound.tasks["t"]
    holder, name = place_of_buffer(task.op_module(task.ops[-1]), task.root, "shift")
    assert holder._buffers[name] is second.shift


def _counting(net: Net, x: Tensor, label: Tensor) -> Tensor:
    losses = net.losses(x, label)
    if (label >= 0).any():
        net.shift += 1
        return losses.mean() * 2
    return losses.sum()


def _made_in_a_function(run: Callable[..., Any]) -> nn.Module:
    class Local(Net):
        def losses(self, x: Tensor, label: Tensor) -> Tensor:
            return super().losses(x, label)

    return Local(run)


def test_code_that_a_build_makes_anew_is_traced_anew() -> None:
    graph = analyse(workload_of(by_its_parts, _made_in_a_function))
    assert rebind(graph, workload_of(by_its_parts, _made_in_a_function, seed=1)) is None


SOURCE = """
import torch
from torch import nn
from torch.nn import functional
from spindle_cli import Task, Workload

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return x + self.linear(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = Block(), Block(), nn.Linear(4, 3)
    def forward(self, x, label):
        logits = self.head(self.b(self.a(x))) * torch.tensor([1.0, 2.0, 0.5])
        if (label > 0).sum() == 0:
            return 0 * logits.sum()
        return functional.cross_entropy(logits, label)

class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return {"x": torch.ones(4) * i, "label": torch.tensor(i % 3)}

def build():
    return Workload("w", [Task("t", Net(), 8, Items())], (Block,))
"""


def test_a_worker_analyses_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "with_region.py").write_text(SOURCE)
    analysed: list[Workload] = []

    def counted(workload: Workload, *args: Any, **kwargs: Any) -> WorkloadGraph:
        analysed.append(workload)
        return analyse(workload, *args, **kwargs)

    monkeypatch.setattr(localise, "analyse", partial(counted))
    local = localise.load_local(f"{tmp_path}/with_region.py:build", {"t": [0, 1]})
    assert len(analysed) == 1 and local.workload is not analysed[0]
    assert of_a_trace(local.graph) == {"region", "constant"}
