"""What forward keeps for itself, or returns for whoever looks, is no reason to refuse it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.types import Task, Workload

WIDTH = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Reader(Layer):
    """An operator that reads what is set on it."""

    more: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if self.more else 1.0)


Calls = Callable[["Net", Tensor], Any]


class Net(nn.Module):
    aux: Any

    def __init__(self, calls: Calls, last: nn.Module | None = None, **kept: Any) -> None:
        super().__init__()
        self.first, self.last = Layer(), Layer() if last is None else last
        self.calls = calls
        for name, value in kept.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.calls(self, x)


@dataclass
class Where:
    folder: str = "a"
    number: int = 3


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, **more: Any) -> None:
        self.more = more

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)), **self.more}


def workload(net: Net, **task: Any) -> Workload:
    return Workload("w", [Task("t", net, 4, **{"dataset": Rows(), **task})], (Layer,))


def task_of(net: Net, **task: Any) -> TaskGraph:
    return analysed(workload(net, **task)).tasks["t"]


def added_up(net: Net, x: Tensor) -> Tensor:
    x = net.first(x)
    net.aux.append(x.mean())
    loss = net.last(x).pow(2).mean() + sum(net.aux)
    net.aux = []
    return loss  # type: ignore[no-any-return]


def made_and_emptied(net: Net, x: Tensor) -> Tensor:
    net.aux = []
    return added_up(net, x)


def under_a_key(net: Net, x: Tensor) -> Tensor:
    net.aux["first"] = net.first(x)
    loss = net.last(net.aux["first"]).pow(2).mean()
    net.aux = {}
    return loss  # type: ignore[no-any-return]


def set_and_cleared(net: Net, x: Tensor) -> Tensor:
    net.aux = net.first(x)
    loss = net.last(net.aux).pow(2).mean()
    net.aux = None
    return loss  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("calls", "kept"),
    [
        (made_and_emptied, {}),
        (added_up, {"aux": []}),
        (under_a_key, {"aux": {}}),
        (set_and_cleared, {"aux": None}),
    ],
)
def test_what_is_emptied_at_the_end_is_of_one_forward(calls: Calls, kept: dict[str, Any]) -> None:
    found = task_of(Net(calls, **kept))
    assert [op.target for op in found.ops if op.target] == ["first", "last"]
    assert not any(op.coupled for op in found.ops)


def left_for_the_next(net: Net, x: Tensor) -> Tensor:
    x = net.first(x)
    loss = net.last(x).pow(2).mean() + sum(net.aux)
    net.aux = [x.mean()]
    return loss  # type: ignore[no-any-return]


def grown(net: Net, x: Tensor) -> Tensor:
    net.aux = [*net.aux, 1]
    return net.last(net.first(x)).pow(2).mean() * len(net.aux)  # type: ignore[no-any-return]


def looked_for(net: Net, x: Tensor) -> Tensor:
    x = net.first(x)
    target = x if net.aux is None else net.aux
    net.aux = x.detach()
    return (net.last(x) - target).pow(2).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("calls", "kept"),
    [(left_for_the_next, {"aux": []}), (grown, {"aux": []}), (looked_for, {"aux": None})],
)
def test_what_the_next_forward_reads_is_refused(calls: Calls, kept: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError, match=r"an earlier forward has left in self\.aux"):
        analysed(workload(Net(calls, **kept)))


def test_what_another_task_would_find_is_refused() -> None:
    def leaves(net: Net, x: Tensor) -> Tensor:
        net.last.aux = [x.detach()]  # type: ignore[assignment]
        return plain(net, x)

    def finds(net: Net, x: Tensor) -> Tensor:
        return plain(net, x) * (1 + len(net.last.aux))  # type: ignore[arg-type]

    last = nn.Sequential(Layer())
    last.aux = []  # type: ignore[assignment]
    tasks = [Task(name, Net(run, last), 4, Rows()) for name, run in (("a", leaves), ("b", finds))]
    with pytest.raises(WorkloadError, match=r"task 'a': forward sets self\.aux of Sequential between"):
        analysed(Workload("w", tasks, (Layer,)))


COUNT = torch.zeros(())


def counted_in_file(net: Net, x: Tensor) -> Tensor:
    COUNT.add_(1)
    return plain(net, x)


def counted_in_new_memory(net: Net, x: Tensor) -> Tensor:
    for count in net.buffers():
        count.data = count + 1
    return plain(net, x)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (counted_in_file, "changes a tensor between operators that is in no part of the model"),
        (counted_in_new_memory, "changes 'count' between operators"),
    ],
)
def test_what_a_trace_would_do_once_is_refused(calls: Calls, message: str) -> None:
    net = Net(calls)
    net.register_buffer("count", torch.zeros(()))
    with pytest.raises(WorkloadError, match=message):
        analysed(workload(net))
    assert COUNT == 0 and net.count == 0


def test_what_an_operator_would_see_is_refused() -> None:
    def calls(net: Net, x: Tensor) -> Tensor:
        net.last.more = [1]  # type: ignore[assignment]
        return net.last(net.first(x)).pow(2).mean()  # type: ignore[no-any-return]

    with pytest.raises(WorkloadError, match=r"forward sets self\.more of Reader between operators"):
        analysed(workload(Net(calls, Reader())))


def test_numbers_read_beside_the_loss_are_left_out() -> None:
    def calls(net: Net, x: Tensor) -> dict[str, Any]:
        y = net.last(net.first(x))
        right = (y.argmax(1) == 0).float().mean()
        return {"loss": y.pow(2).mean(), "right": 100 * right.item(), "all": {"r": right.item(), "y": y}}

    found = task_of(Net(calls))
    assert [op.coupled for op in found.ops] == [False, False]


def test_a_number_that_the_loss_is_made_of_is_still_refused() -> None:
    def calls(net: Net, x: Tensor) -> dict[str, Any]:
        loss = net.last(net.first(x)).pow(2).mean()
        number = loss.item()
        return {"loss": loss * number, "number": number}

    with pytest.raises(WorkloadError, match="'item' reads the values of a tensor"):
        analysed(workload(Net(calls)))


@pytest.mark.parametrize("enabled", [False, True])
def test_autocast_for_devices_that_are_not_here_does_nothing(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calls(net: Net, x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=enabled):
            return net.last(net.first(x)).pow(2).mean()  # type: ignore[no-any-return]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [op.coupled for op in task_of(Net(calls)).ops] == [False, False]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(WorkloadError, match=r"forward switches torch\.autocast"):
        analysed(workload(Net(calls)))


def plain(net: Net, x: Tensor) -> Tensor:
    return net.last(net.first(x)).pow(2).mean()  # type: ignore[no-any-return]


def stacked(more: Callable[[int], Any]) -> Callable[[list[Any]], dict[str, Any]]:
    return lambda items: {"x": torch.stack([each["x"] for each in items]), "more": more(len(items))}


@pytest.mark.parametrize(
    "task",
    [
        {"dataset": Rows(more=Where())},
        {"dataset": Rows(more={"where": [Where(), Where()], "name": "a"})},
        {"collate": stacked(lambda count: [Where()] * count)},
        {"collate": stacked(lambda _: Where())},
        {"collate": stacked(lambda count: {"names": ["a"] * count, "where": Where()})},
    ],
)
def test_objects_without_tensors_are_left_out_of_items(task: dict[str, Any]) -> None:
    found = task_of(Net(plain), **task)
    assert found.left_out_of_items == ("more",)
    assert list(found.fields) == ["x"]


def test_a_dataclass_with_a_tensor_in_it_is_data() -> None:
    @dataclass
    class Batch:
        x: Tensor
        where: Where

    def collate(items: list[Any]) -> dict[str, Any]:
        return {"x": Batch(torch.stack([each["x"] for each in items]), Where())}

    found = task_of(Net(lambda net, batch: plain(net, batch.x)), collate=collate)  # type: ignore[attr-defined]
    assert list(found.fields) == ["x_x"] and found.left_out_of_items == ("x_where",)
