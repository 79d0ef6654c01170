"""A task that is one op although it has layers: which class to list is said, and said in no other case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from helpers.analysed import analysed
from helpers.cli import run_spindle
from spindle_cli.analysis.analyse import unlisted_layers
from spindle_cli.workload.types import FlowTask, Task, Workload


class Samples(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((4,), float(index))}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Net(nn.Module):
    """`count` layers and `heads` heads, one after the other."""

    def __init__(self, count: int, heads: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.heads = nn.Sequential(*(Head() for _ in range(heads)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.heads(x).square().mean()


class Whole(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.net(x)
        return loss


def said(*nets: nn.Module, operators: Sequence[type[nn.Module]] = ()) -> list[str]:
    tasks = [Task(name, net, batch_size=4, dataset=Samples()) for name, net in zip("ab", nets, strict=False)]
    return list(unlisted_layers(analysed(Workload("w", tasks, operators=tuple(operators)))))


def test_the_class_with_most_equal_blocks_is_named() -> None:
    (line,) = said(Net(3, heads=2))
    assert line.startswith("a: all of it is one op,")
    assert line.endswith("list Layer, of which it has 3")
    (line,) = said(Net(2, heads=4))
    assert line.endswith("list Head, of which it has 4")


def test_a_task_that_holds_an_operator_or_has_no_two_equal_blocks_is_not_named() -> None:
    assert said(Net(3), operators=[Layer]) == []
    assert said(Net(1)) == []
    assert said(Whole(Net(3)), operators=[Net]) == []  # one op, as its user says


def test_a_layer_that_runs_twice_counts_once() -> None:
    net = Net(3)
    net.heads.append(net.layers[0])
    (line,) = said(net)
    assert line.endswith("list Layer, of which it has 3")


def test_what_is_given_as_a_graph_has_operators_whatever_is_listed() -> None:
    task = FlowTask("a", 4, Samples()).add_flow("x", Net(3))
    graph = analysed(Workload("w", [task]))
    assert len(graph.tasks["a"].ops) == 1
    assert list(unlisted_layers(graph)) == []


def test_each_task_is_asked_by_itself() -> None:
    """What a lists b does not hold."""
    (line,) = said(Net(0, heads=2), Net(3, heads=0), operators=[Head])
    assert line.startswith("b: ") and line.endswith("list Layer, of which it has 3")


def test_profile_says_it(tmp_path: Path) -> None:
    source = Path(__file__)
    (tmp_path / "w.yaml").write_text(f"schema: spindle.workload/1\nmodel: {source}:build_unlisted\n")
    ended = run_spindle(
        *("profile", tmp_path / "w.yaml", "-o", tmp_path / "p.json"),
        *("--estimate", "--device", "cpu", "--nproc", 2),
    )
    assert ended.code == 0, ended.err
    assert "a: all of it is one op" in ended.err and "list Layer, of which it has 3" in ended.err


def build_unlisted() -> Workload:
    return Workload("w", [Task("a", Net(3), batch_size=4, dataset=Samples())])
