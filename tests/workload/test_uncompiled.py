"""Parts of a model that users give to torch.compile run as they are, and it is said once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.analysis.analyse import analyse
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.building.checks import uncompile
from spindle_cli.workload.building.load import load
from spindle_cli.workload.types import Follows, Task, Workload

FILE = """
import torch
from torch import nn
from spindle_cli import Constraint, Task, Workload

@torch.compile(mode="reduce-overhead")
def doubled(x):
    return 2 * x

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return x + torch.tanh(self.linear(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Layer(), torch.compile(Layer())
        self.head = nn.Linear(4, 4)
        self.head.compile()
    @torch.compile
    def loss(self, x):
        return x.pow(2).mean()
    def forward(self, x):
        return self.loss(doubled(self.head(self.second(self.first(x)))))

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return {"x": torch.randn(4, generator=torch.Generator().manual_seed(index))}

def build():
    net = torch.compile(Net())
    of = net.head.weight
    return Workload("w", [Task("t", net, 4, Rows())], (Layer,), constraints=[Constraint(of, clamp=(-1, 1))])
"""


def test_what_was_compiled_runs_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "compiled_parts.py").write_text(FILE)
    workload = load(f"{tmp_path / 'compiled_parts.py'}:build").workload
    net = workload.tasks[0].module  # type: ignore[union-attr]
    assert [type(part).__name__ for part in (net, net.second)] == ["Net", "Layer"]  # type: ignore[union-attr]
    assert [name for name, _ in net.named_parameters()][2] == "second.linear.weight"
    graph = analysed(workload)
    assert [op.target for op in graph.tasks["t"].ops] == ["first", "second"]
    (said,) = (note for note in graph.notes if "torch.compile" in note)
    assert "left out of Layer, Linear, Net, doubled, loss:" in said and "compile: inductor" in said
    assert torch.compile.__module__ == "torch"
    given = torch.ones(2, 4)
    by_hand = (2 * net.head(net.second(net.first(given)))).pow(2).mean()  # type: ignore[operator, union-attr]
    torch.testing.assert_close(net(given), by_hand)
    del sys.modules["compiled_parts"]


def test_teachers_and_students_that_were_compiled_are_the_originals() -> None:
    teacher, student = nn.Linear(4, 4), nn.Linear(4, 4)
    slow, fast = torch.compile(teacher), torch.compile(nn.Sequential(torch.compile(student)))
    follows = Follows(slow, fast, 0.9)  # type: ignore[arg-type]
    workload = Workload("w", [], follows=[follows])
    assert uncompile(workload) == ("Linear", "Sequential")
    assert follows.slow is teacher
    assert isinstance(follows.fast, nn.Sequential) and follows.fast[0] is student


compiled = torch.compile(torch.tanh)


@pytest.mark.parametrize("is_operator", [False, True])
def test_what_was_compiled_elsewhere_is_refused_with_a_way_out(is_operator: bool) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return compiled(self.linear(x)) if is_operator else self.linear(x)

    class Net(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return (y if is_operator else compiled(y)).mean()

    class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {"x": torch.ones(4)}

    with pytest.raises(WorkloadError, match=r"test_uncompiled\.py:\d+: .* torch\.compile has made") as said:
        analyse(Workload("w", [Task("t", Net(), 4, Rows())], (Layer,)))
    assert "Call the function itself" in str(said.value)
