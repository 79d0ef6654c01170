"""What an evaluation leaves behind: nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import eval_toys
import numpy as np
import pytest
import torch
from alone import ALONE, run_case, world_of_one
from case_runs import ADAMW, Case, captured, prepare
from torch import Tensor, nn

from spindle_cli.errors import RunFailedError, WorkloadError
from spindle_cli.runtime.evaluating.evaluator import untouched
from spindle_cli.runtime.trainer import Trainer
from spindle_cli.workload.types import Workload

CPU = torch.device("cpu")
TRAIN = {**ADAMW, "seed": 3}
UNWATCHED = Case("unwatched", (0,), "eval_toys", args={"evaluates": False}, train=TRAIN, steps=3)


@pytest.fixture
def world() -> Iterator[None]:
    with world_of_one():
        yield


def draws() -> tuple[object, ...]:
    return torch.rand(1).item(), np.random.rand(), random.random()


@pytest.mark.parametrize("fails", [False, True])
def test_modes_attributes_buffers_and_generators_are_those_of_before(fails: bool) -> None:
    """Also of what was in eval mode by itself, and where something is raised inside."""
    one, other = eval_toys.Counting(), nn.Sequential(eval_toys.Counting())
    other.append(one)  # in both
    one.norm.eval()
    modes = {module: module.training for root in (one, other) for module in root.modules()}
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(5)
    expected = draws()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(5)
    try:
        with untouched([one, other], CPU):
            assert not any(module.training for module in modes)
            draws()
            torch.manual_seed(7)
            one.calls.add_(3)
            one.norm.momentum = 0.5
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    assert {module: module.training for module in modes} == modes
    assert not one.norm.training
    assert (one.calls.item(), one.norm.momentum) == (0, 0.1)
    assert draws() == expected


class Merging(nn.Module):
    """Puts an adapter into its weight when it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def train(self, mode: bool = True) -> Merging:
        with torch.no_grad():
            self.weight.add_(-1.0 if mode else 1.0)
        return super().train(mode)


class MergingData(Merging):
    """As loralib does it, which leaves the parameter's version as it was."""

    def train(self, mode: bool = True) -> Merging:
        self.weight.data += -1.0 if mode else 1.0
        return nn.Module.train(self, mode)


class MergingInNewMemory(Merging):
    def train(self, mode: bool = True) -> Merging:
        self.weight.data = self.weight.data + (-1.0 if mode else 1.0)
        return nn.Module.train(self, mode)


@pytest.mark.parametrize("kind", [Merging, MergingData, MergingInNewMemory])
def test_a_module_whose_parameters_change_with_its_mode_is_refused(kind: type[Merging]) -> None:
    module = kind()
    with (
        pytest.raises(WorkloadError, match="eval mode changes parameter 'weight'"),
        untouched([nn.Sequential(module)[0]], CPU),
    ):
        raise AssertionError
    assert kind is MergingInNewMemory or torch.equal(module.weight, torch.ones(2))


class MergingHead(eval_toys.Head):
    def train(self, mode: bool = True) -> MergingHead:
        self.linear.weight.data += -1.0 if mode else 1.0
        return super().train(mode)


def build_merging(evaluates: bool) -> Workload:
    workload = eval_toys.build(evaluates=evaluates)
    workload.tasks[0].module.head.__class__ = MergingHead
    workload.operators = (*workload.operators, MergingHead)
    return workload


@pytest.mark.parametrize("evaluates", [False, True])
def test_what_may_not_be_evaluated_is_trained_where_nothing_is(
    world: None, tmp_path: Path, evaluates: bool
) -> None:
    case = Case(
        "merging",
        (0,),
        "test_untouched",
        "build_merging",
        args={"evaluates": evaluates},
        train=TRAIN,
        steps=1,
    )
    if evaluates:
        with pytest.raises(WorkloadError, match="eval mode changes parameter"):
            run_case(case, tmp_path / "run")
    else:
        run_case(case, tmp_path / "run")


class Noisy(eval_toys.Items):
    """Every sample is drawn from all of a process's generators."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = torch.randn(()) + np.random.randn() + random.gauss(0, 1)
        item = super().__getitem__(index)
        return {**item, "x": item["x"] + noise}


class Drawing(eval_toys.Head):
    """Draws in eval mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * torch.rand(())


def build_drawing(evaluates: bool = True, fails: bool = False) -> Workload:
    """Whatever may draw does: layers, samples that are trained on and evaluated on, and metrics.

    `fails`: the metric does, the first time that it is called.
    """
    workload = eval_toys.build(evaluates=evaluates)
    classify, pairs = workload.tasks
    classify.dataset = Noisy(16, 1)
    calls: list[int] = []

    def drawn(out: dict[str, Tensor]) -> float:
        draws()
        calls.append(1)
        return out["nothing"].sum().item() if fails and len(calls) == 1 else 0.0

    if evaluates:
        classify.eval_dataset = Noisy(11, 7)
        classify.metrics = pairs.metrics = {"drawn": drawn}
    workload.operators = (*workload.operators, Drawing)
    for task in workload.tasks:
        for name in ("head", "other"):
            head = getattr(task.module, name, None)
            if head is not None:
                head.__class__ = Drawing
    workload.operators = (eval_toys.Layer, eval_toys.Counting, Drawing)
    return workload


def drawing(name: str, **args: bool) -> Case:
    return Case(name, (0,), "test_untouched", "build_drawing", args=args, train=TRAIN, steps=3)


def same_end(one: Path, other: Path) -> None:
    for stage in ("final", "final-buffers"):
        first, second = (captured(folder, stage, 1)[0] for folder in (one, other))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first), stage


class Shrinking(eval_toys.Head):
    """Changes what is trained, and what is not, whatever the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.mul_(0.9)
        with torch.no_grad():
            self.linear.weight.mul_(0.9)
        return super().forward(x) * self.scale


def build_shrinking(evaluates: bool = True) -> Workload:
    workload = eval_toys.build(evaluates=evaluates)
    workload.tasks[0].module.head = Shrinking()
    workload.operators = (*workload.operators, Shrinking)
    return workload


def test_parameters_that_forward_changes_are_after_an_evaluation_as_before(
    world: None, tmp_path: Path
) -> None:
    for name, evaluates in (("every", True), ("none", False)):
        train = {**TRAIN, "eval_every": 1} if evaluates else TRAIN
        args = {"evaluates": evaluates}
        run_case(
            Case(name, (0,), "test_untouched", "build_shrinking", args=args, train=train, steps=2),
            tmp_path / name,
        )
    same_end(tmp_path / "every", tmp_path / "none")


def test_a_run_with_evaluations_that_draw_trains_bit_for_bit_as_one_without(
    world: None, tmp_path: Path
) -> None:
    every = Case("every", (0,), "test_untouched", "build_drawing", train={**TRAIN, "eval_every": 1}, steps=3)
    run_case(every, tmp_path / "every")
    run_case(drawing("none", evaluates=False), tmp_path / "none")
    same_end(tmp_path / "every", tmp_path / "none")


def test_after_a_metric_that_fails_a_script_trains_on_as_if_it_had_not_asked(
    world: None, tmp_path: Path
) -> None:
    request = prepare(drawing("failing", fails=True), 1, tmp_path / "failing")
    with Trainer.of_connected(request, ALONE, CPU) as trainer:
        for step in trainer:
            if step.number == 1:
                with pytest.raises(RunFailedError, match="the metric 'drawn' of task 'classify' failed"):
                    trainer.evaluate("classify")
    run_case(drawing("none", evaluates=False), tmp_path / "none")
    same_end(tmp_path / "failing", tmp_path / "none")
