"""A counter that nobody reads is no matter; one that forward reads is refused, or its operator run whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.types import Task, Workload

WIDTH = 4
Counts = Callable[[Any, Tensor], Tensor]


class Counter(nn.Module):
    """`counts`: what its forward does with its attributes."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.step, self.rate, self.name, self.on = 3, 0.5, "a", True
        self.made: Any = None
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        return self.counts(self, self.linear(x))


class Model(nn.Module):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.first, self.counter = nn.Linear(WIDTH, WIDTH), Counter(counts)

    def forward(self, x: Tensor) -> Tensor:
        return self.counter(self.first(x)).square().mean()


def up(module: Any, x: Tensor) -> Tensor:
    module.step += 1
    return x


def more(module: Any, x: Tensor) -> Tensor:
    """Counted on in several ways, and set anew."""
    module.step = (2 * module.step + 7) % 1000 - module.step // 3
    module.rate = 0.9 * module.rate + 0.1
    module.name, module.on = "b", False
    module.step += 1
    module.rate = -((module.rate / 3) ** 2) + 1 / (abs(module.step) + 1)
    return x


def known_by_then(module: Any, x: Tensor) -> Tensor:
    """What this forward has set, it may read."""
    module.step = 5
    return x * module.step


UNREAD = (up, more, known_by_then)


def scaled(module: Any, x: Tensor) -> Tensor:
    module.step += 1
    return x * module.step


def scaled_from_left(module: Any, x: Tensor) -> Tensor:
    module.step += 1
    return module.step * x


def decides(module: Any, x: Tensor) -> Tensor:
    module.step += 1
    return x * 2 if module.step > 10 else x


def in_turn(module: Any, x: Tensor) -> Tensor:
    module.step += 1
    return x * 2 if module.step % 2 == 0 else x


def caught(module: Any, x: Tensor) -> Tensor:
    try:
        module.step += 1
    except Exception:
        return x * 2
    return x * float(module.step)


def flag(module: Any, x: Tensor) -> Tensor:
    was_on, module.on = module.on, False
    return x * 2 if was_on else x


def said(module: Any, x: Tensor) -> Tensor:
    module.step += 1
    return x * len(f"{module.step}")


def handed(module: Any, x: Tensor) -> Tensor:
    module.step += 1
    return torch.full((1,), module.step) * x


def ramp(module: Any, x: Tensor) -> Tensor:
    """The warm-up of a loss's factor, as people write it."""
    module.step += 1
    return x * min(1.0, module.step / 100)


def bits(module: Any, x: Tensor) -> Tensor:
    module.step += 1
    return x * module.step.bit_length()


def rounded(module: Any, x: Tensor) -> Tensor:
    module.step += 1
    return x * round(module.step / 7)


READ = (ramp, bits, rounded, scaled, scaled_from_left, decides, in_turn, caught, flag, said)


def workload(counts: Counts, operator: type[nn.Module] = nn.Linear) -> Workload:
    items = [{"x": torch.randn(WIDTH)} for _ in range(4)]
    return Workload("counting", [Task("t", Model(counts), 4, items)], (operator,))


@pytest.mark.parametrize("counts", UNREAD)
def test_what_nobody_reads_is_taken_between_operators(counts: Counts) -> None:
    made = workload(counts)
    (task,) = analysed(made).tasks.values()
    assert [op.target for op in task.ops[:2]] == ["first", "counter.linear"]
    counter = made.tasks[0].module.counter
    assert (counter.step, counter.rate, counter.name, counter.on) == (3, 0.5, "a", True)


@pytest.mark.parametrize("counts", UNREAD)
def test_an_operator_that_reads_none_of_it_may_be_split(counts: Counts) -> None:
    (task,) = analysed(workload(counts, Counter)).tasks.values()
    assert not task.ops[0].coupled


def seeded(module: Any, x: Tensor) -> Tensor:
    module.step += 1
    return x + torch.rand(WIDTH, generator=torch.Generator().manual_seed(module.step))


@pytest.mark.parametrize("counts", (*READ, handed, seeded))
def test_what_forward_reads_is_refused_between_operators(counts: Counts) -> None:
    with pytest.raises(WorkloadError) as refused:
        analysed(workload(counts))
    what = refused.value.message
    assert "test_counters.py:" in what and "reads what an earlier one has left there" in what, what
    assert "step_values={'beta': lambda step: min(1.0, (step + 1) / 100)}" in str(refused.value.hint)


@pytest.mark.parametrize("counts", (*READ, handed))
def test_an_operator_that_reads_it_is_not_split(counts: Counts) -> None:
    """As the refusal advises."""
    (task,) = analysed(workload(counts, Counter)).tasks.values()
    assert task.ops[0].coupled


def test_what_training_counts_is_not_known_in_an_evaluation() -> None:
    def run(module: Any, x: Tensor) -> Tensor:
        if not module.training:
            return x * module.step
        module.step += 1
        return x

    made = workload(run)
    assert analysed(made).tasks.keys() == {"t"}
    made.tasks[0].eval_dataset = made.tasks[0].dataset
    with pytest.raises(WorkloadError, match=r"test_counters.py:\d+: .* reads what an earlier one has left"):
        analysed(made, evaluates=True)


def test_what_is_made_once_and_asked_for_by_is_none_is_refused_as_it_was() -> None:
    def once(module: Any, x: Tensor) -> Tensor:
        if module.made is None:
            module.made = 2
            return x * 2
        return x

    with pytest.raises(WorkloadError, match=r"sets self\.made of Counter between operators"):
        analysed(workload(once))


def test_a_counter_of_a_module_of_two_tasks_is_refused() -> None:
    one, other = workload(up).tasks[0], workload(scaled).tasks[0]
    other.name = "other"
    other.module.counter.counts = lambda module, x: x * module.step
    two = Task("two", Model(up), 4, one.dataset)
    two.module.counter = other.module.counter
    two.module.counter.counts = up
    with pytest.raises(WorkloadError, match=r"sets self\.step of Counter between operators"):
        analysed(Workload("shared", [other, two], (nn.Linear,)))
