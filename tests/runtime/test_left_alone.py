"""A script leaves what is trained as it is between the steps of its loop; what it changes ends the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from alone import ALONE, world_of_one
from case_runs import ADAMW, SGD, Case, prepare
from torch import nn
from value_toys import BUILT, Net

from spindle_cli.errors import UsageError, WorkloadError
from spindle_cli.files.run_files import read_metrics
from spindle_cli.runtime.following.callback import Callback
from spindle_cli.runtime.results import Step
from spindle_cli.runtime.trainer import Trainer
from spindle_cli.workload.building.load import load

CASE = Case("run", (0,), "value_toys", args={"declared": False}, train=ADAMW, steps=4)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


def trainer_of(folder: Path, callbacks: Any = (), case: Case = CASE) -> Trainer:
    request = prepare(case, 1, folder).model_copy(update={"capture_dir": None})
    return Trainer.of_connected(request, ALONE, torch.device("cpu"), callbacks=callbacks)


def losses(folder: Path) -> list[float | None]:
    return [line.loss for line in read_metrics(folder)]


def weight_of(net: Net) -> nn.Parameter:
    return net.layers[1].linear.weight


def by_numpy(net: Net) -> None:
    weight_of(net).detach().numpy()[2, 3] += 1e-3


@torch.no_grad()
def turned(net: Net) -> None:
    """The same elements in another order."""
    weight_of(net).copy_(weight_of(net).flip(0, 1).clone())


@torch.no_grad()
def negated(net: Net) -> None:
    weight_of(net).neg_()


def replaced(net: Net) -> None:
    net.layers[1].linear.weight = nn.Parameter(torch.zeros(6, 6))


WEIGHT = r"the parameter 'net\.layers\.1\.linear\.weight' between steps"
OF_TASK = r"the parameter 'layers\.1\.linear\.weight' of task 'net' between steps"
CHANGES: Mapping[str, tuple[Callable[[Net], object], str]] = {
    "data": (lambda net: weight_of(net).data.clamp_(-0.1, 0.1), WEIGHT),
    "an array": (by_numpy, WEIGHT),
    "the order": (turned, WEIGHT),
    "the sign": (negated, WEIGHT),
    "several": (lambda net: torch._foreach_mul_([weight_of(net).data], 0.9), WEIGHT),
    "other memory": (lambda net: setattr(weight_of(net), "data", torch.zeros(6, 6)), OF_TASK),
    "another": (
        lambda net: setattr(net.layers[1].linear, "weight", nn.Parameter(torch.zeros(6, 6))),
        OF_TASK,
    ),
    "a buffer": (lambda net: net.shift.data.fill_(1.0), r"the buffer 'shift' of task 'net' between steps"),
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("number", [0, 2])
def test_a_change_between_steps_ends_the_run_with_its_name(kind: str, number: int, tmp_path: Path) -> None:
    does, said = CHANGES[kind]
    when = f"after step {number}" if number else "before the first step"
    with (
        pytest.raises(WorkloadError, match=f"test_left_alone.*: the script changes {said} .{when}") as caught,
        trainer_of(tmp_path / "run") as trainer,
    ):
        if number == 0:
            does(BUILT[-1])
        for step in trainer:
            if step.number == number:
                does(BUILT[-1])
    assert ("step_values" if kind == "a buffer" else "Constraint") in str(caught.value.hint)
    assert list((tmp_path / "run" / "checkpoints").glob("step-*")) == []


@pytest.mark.parametrize("call", ["save", "evaluate", "close"])
def test_a_change_is_noticed_before_whatever_is_called_next(call: str, tmp_path: Path) -> None:
    calls: Mapping[str, Callable[[Trainer], object]] = {
        "save": lambda trainer: trainer.save(),
        "evaluate": lambda trainer: trainer.evaluate("net"),
        "close": lambda trainer: trainer.close(),
    }
    case = replace(CASE, args={"evaluated": True, "declared": False})
    with pytest.raises(WorkloadError, match=WEIGHT), trainer_of(tmp_path / "run", case=case) as trainer:
        next(iter(trainer))
        by_numpy(BUILT[-1])
        calls[call](trainer)


def test_a_build_that_nobody_trains_is_left_alone_too(tmp_path: Path) -> None:
    """What a script does to it would be done to nothing."""
    request = prepare(CASE, 1, tmp_path / "run").model_copy(update={"capture_dir": None})
    load(request.workload)
    other = BUILT[-1]
    with (
        pytest.raises(WorkloadError, match=OF_TASK),
        Trainer.of_connected(request, ALONE, torch.device("cpu")) as trainer,
    ):
        assert BUILT[-1] is not other
        for _ in trainer:
            by_numpy(other)


def test_a_call_that_is_refused_changes_nothing_of_that(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=WEIGHT), trainer_of(tmp_path / "run") as trainer:
        steps = iter(trainer)
        next(steps)
        with pytest.raises(UsageError):
            trainer.evaluate("net")
        by_numpy(BUILT[-1])
        next(steps)


class Saves(Callback):
    """Saves by its script's trainer, in the middle of what this was asked for."""

    trainer: Trainer

    def after_step(self, step: Step) -> None:
        if step.number > 1:
            self.trainer.save()


def test_what_steps_change_between_a_callbacks_calls_is_no_change_of_the_scripts(tmp_path: Path) -> None:
    """It saves twice while its script waits in one call, between which the script does nothing."""
    saves = Saves()
    with trainer_of(tmp_path / "run", [saves]) as trainer:
        saves.trainer = trainer
        trainer.train()
    folders = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert [int(each.name.removeprefix("step-")) for each in sorted(folders)] == [3, 4]


@torch.no_grad()
def looked_at(net: Net) -> None:
    copied = {name: value.clone().mul_(0.5) for name, value in net.state_dict().items()}
    assert len(copied) == len(net.state_dict())


def gradients_of(net: Net) -> list[torch.Tensor]:
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


LEFT: Mapping[str, Callable[[Net], object]] = {
    "read": looked_at,
    "no gradients": lambda net: net.zero_grad(),
    "other gradients": lambda net: setattr(weight_of(net), "grad", torch.ones(6, 6, dtype=torch.float64)),
    "a gradient in place": lambda net: [
        each.grad.add_(1.0) for each in net.parameters() if each.grad is not None
    ],
}


@pytest.mark.parametrize("train", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("kind", LEFT)
def test_what_a_script_reads_and_does_to_gradients_is_no_matter(
    kind: str, train: Mapping[str, object], tmp_path: Path
) -> None:
    """As in a loop that begins each step with zero_grad()."""
    case = replace(CASE, train=train)
    with trainer_of(tmp_path / "plain", case=case) as trainer:
        trainer.train()
    saves = Saves()
    with trainer_of(tmp_path / "run", [saves], case) as trainer:
        saves.trainer = trainer
        for _ in trainer:
            LEFT[kind](BUILT[-1])
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    assert len(losses(tmp_path / "run")) == 4
