"""`self.teacher.eval()` in forward: each module has the mode in which every step calls it, or is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers.analysed import analysed
from spindle_cli.analysis.localise import rebind
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.types import Task, Workload

WIDTH = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.relu(self.linear(x)))


class Pair(nn.Module):
    """`way` says how forward uses a student and a teacher."""

    def __init__(self, way: Callable[[Pair, Tensor], Tensor]) -> None:
        super().__init__()
        self.student, self.teacher = nn.Sequential(Layer(), Layer()), nn.Sequential(Layer(), Layer())
        self.teacher.requires_grad_(False)
        self.calls = 0
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def loss(pair: Pair, x: Tensor) -> Tensor:
    return functional.mse_loss(pair.student(x), pair.teacher(x))


def at_begin(pair: Pair, x: Tensor) -> Tensor:
    pair.teacher.eval()
    return loss(pair, x)


def between(pair: Pair, x: Tensor) -> Tensor:
    pair.teacher.eval()
    made = loss(pair, x)
    pair.teacher.train()
    return made


def one_layer(pair: Pair, x: Tensor) -> Tensor:
    pair.teacher[1].train(False)
    return loss(pair, x)


def read_once_set(pair: Pair, x: Tensor) -> Tensor:
    pair.teacher.eval()
    return loss(pair, functional.dropout(x, 0.5, pair.teacher.training))


def as_it_is(pair: Pair, x: Tensor) -> Tensor:
    pair.teacher.train()
    return loss(pair, x)


def at_end(pair: Pair, x: Tensor) -> Tensor:
    made = loss(pair, x)
    pair.teacher.eval()
    return made


def in_both(pair: Pair, x: Tensor) -> Tensor:
    pair.student.eval()
    target = pair.student(x).detach()
    pair.student.train()
    return functional.mse_loss(pair.student(x), target)


def read_before(pair: Pair, x: Tensor) -> Tensor:
    x = functional.dropout(x, 0.5, pair.teacher.training)
    pair.teacher.eval()
    return loss(pair, x)


def plainly(pair: Pair, x: Tensor) -> Tensor:
    return loss(pair, x)


def task(way: Callable[[Pair, Tensor], Tensor], name: str = "t", module: Pair | None = None) -> Task:
    pair = Pair(way) if module is None else module
    return Task(name, pair, 4, [{"x": torch.randn(WIDTH)} for _ in range(4)])


def workload(*tasks: Task) -> Workload:
    return Workload("pair", list(tasks), (Layer,))


def modes(module: nn.Module) -> dict[str, bool]:
    return {name: part.training for name, part in module.named_modules() if name.endswith("dropout")}


STUDENT = {"student.0.dropout": True, "student.1.dropout": True}


@pytest.mark.parametrize(
    ("way", "teacher"),
    [
        (at_begin, (False, False)),
        (between, (False, False)),
        (one_layer, (True, False)),
        (read_once_set, (False, False)),
        (as_it_is, (True, True)),
        (plainly, (True, True)),
    ],
)
def test_a_module_has_the_mode_in_which_forward_calls_it(
    way: Callable[[Pair, Tensor], Tensor], teacher: tuple[bool, bool]
) -> None:
    """In the build that was traced, and in another one that only takes its graph."""
    expected = STUDENT | {f"teacher.{number}.dropout": mode for number, mode in enumerate(teacher)}
    traced, other = workload(task(way)), workload(task(way))
    graph = analysed(traced)
    assert modes(traced.tasks[0].module) == expected
    assert all(modes(other.tasks[0].module).values())
    assert rebind(graph, other) is not None
    assert modes(other.tasks[0].module) == expected
    assert not [op for op in graph.tasks["t"].ops if op.coupled]


def test_what_torch_jit_has_compiled_has_it_too() -> None:
    def made() -> Workload:
        pair = Pair(at_begin)
        pair.teacher = torch.jit.script(pair.teacher)
        return workload(task(at_begin, module=pair))

    traced, other = made(), made()
    graph = analysed(traced)
    for each in (traced, other):
        assert each.tasks[0].module.teacher.training is (each is other)
    assert rebind(graph, other) is not None
    dropouts = [part for part in other.tasks[0].module.teacher.modules() if not list(part.children())]
    assert len(dropouts) == 4 and not any(part.training for part in dropouts)
    assert other.tasks[0].module.student.training


def test_tracing_again_finds_the_same() -> None:
    made = workload(task(between))
    first = analysed(made)
    again = analysed(made)
    assert first.fingerprint == again.fingerprint
    assert first.tasks["t"].modes == again.tasks["t"].modes
    teacher = {mode for name, mode in first.tasks["t"].modes.items() if name.startswith("teacher.")}
    assert teacher == {False}


@pytest.mark.parametrize(
    ("way", "what"),
    [
        (at_end, "uses 'teacher.0' (Layer) in training mode and leaves it in eval mode"),
        (in_both, "calls 'student.0' (Layer) in training mode and in eval mode"),
        (read_before, "uses 'teacher' (Sequential) in training mode and leaves it in eval mode"),
    ],
)
def test_what_would_be_another_in_other_steps_is_refused(
    way: Callable[[Pair, Tensor], Tensor], what: str
) -> None:
    with pytest.raises(WorkloadError) as refused:
        analysed(workload(task(way)))
    assert what in refused.value.message
    assert "test_modes_set_by_forward.py:" in refused.value.message


@pytest.mark.parametrize("ways", [(at_begin, plainly), (plainly, at_begin)])
def test_a_module_whose_mode_another_task_sets_is_refused(
    ways: tuple[Callable[[Pair, Tensor], Tensor], ...],
) -> None:
    one, other = map(task, ways, ("one", "other"))
    other.module.teacher = one.module.teacher
    with pytest.raises(WorkloadError, match="sets the mode of"):
        analysed(workload(one, other))


def test_two_tasks_that_both_set_it_are_taken() -> None:
    one, other = task(at_begin, "one"), task(between, "other")
    other.module.teacher = one.module.teacher
    analysed(workload(one, other))
    assert modes(one.module)["teacher.0.dropout"] is False


class Both(nn.Module):
    """What the refusal advises: one operator that does both."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        self.inner.eval()
        target = self.inner(x).detach()
        self.inner.train()
        return functional.mse_loss(self.inner(x), target)


class AllInOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.both = Layer(), Both(Layer())

    def forward(self, x: Tensor) -> Tensor:
        return self.both(self.first(x))


def test_one_operator_may_do_both() -> None:
    items = [{"x": torch.randn(WIDTH)} for _ in range(4)]
    graph = analysed(Workload("both", [Task("t", AllInOne(), 4, items)], (Layer, Both)))
    assert [(op.target, op.coupled) for op in graph.tasks["t"].ops] == [("first", False), ("both", False)]


class LeftInEval(nn.Module):
    """An operator that leaves a part of it in eval mode: its next forward is as its first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer()

    def forward(self, x: Tensor) -> Tensor:
        self.inner.eval()
        return self.inner(x)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.left = Layer(), LeftInEval()

    def forward(self, x: Tensor) -> Tensor:
        return self.left(self.first(x)).square().mean()


def test_an_operator_that_leaves_a_mode_behind_may_be_split() -> None:
    items = [{"x": torch.randn(WIDTH)} for _ in range(4)]
    graph = analysed(Workload("left", [Task("t", Holder(), 4, items)], (Layer, LeftInEval)))
    assert [op.coupled for op in graph.tasks["t"].ops[:2]] == [False, False]
