"""What a trace would drop or freeze is kept, or refused with its place."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.training.batches import Batches
from spindle_cli.workload.types import Task, Workload

from .shares import gradients_of, run_plain, run_shares
from .toy import WIDTH, Block, Items

OWN = {"one": random.Random(1)}


class Net(nn.Module):
    """Two blocks, a buffer and a counter, with a forward of the test's."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.teacher = Block(), Block(), Block()
        self.register_buffer("average", torch.zeros(WIDTH))
        self.step, self.mask, self.run = 0, None, run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def workload(run: Callable[..., Tensor]) -> Workload:
    torch.manual_seed(0)
    return Workload("w", [Task("t", Net(run).double(), 4, Doubles(x=(4, WIDTH)))], (Block,))


class Doubles(Items):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value.double() for name, value in super().__getitem__(index).items()}


def distilled(self: Net, x: Tensor) -> Tensor:
    y = self.second(self.first(x))
    with torch.no_grad():
        target = self.teacher(self.first(x)) * 2
    return (y - target).pow(2).mean()


@torch.no_grad()
def _target(self: Net, x: Tensor) -> Tensor:
    return self.teacher(x) * 2


def decorated(self: Net, x: Tensor) -> Tensor:
    return (self.second(self.first(x)) - _target(self, x)).pow(2).mean()


@torch.inference_mode()
def _inferred(self: Net, x: Tensor) -> Tensor:
    return self.teacher(self.first(x)) * 2


def inferred(self: Net, x: Tensor) -> Tensor:
    """Nothing of it is a tensor of inference where it is traced, and layers behind it have gradients."""
    target = _inferred(self, x).clone()
    return (self.second(self.first(x)) - self.second(target)).pow(2).mean()


@pytest.mark.parametrize("run", [distilled, decorated, inferred])
@pytest.mark.parametrize("dp", [1, 2])
def test_what_is_made_without_gradients_gets_none(run: Callable[..., Tensor], dp: int) -> None:
    made = workload(run)
    task = made.tasks[0]
    parameters = dict(task.module.named_parameters())
    batch = Batches(task, seed=1).rows(0, 0, 4)
    expected = gradients_of(run_plain(task, batch), parameters)
    traced = analysed(made).tasks["t"]
    found = gradients_of(run_shares(traced, batch, dict.fromkeys(range(9), dp)), parameters)
    assert expected["teacher.linear.weight"] is None
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def _sets(name: str, value: Callable[[Net], Any]) -> Callable[..., Tensor]:
    def run(self: Net, x: Tensor) -> Tensor:
        x = self.first(x)
        setattr(self, name, value(self))
        return self.second(x).mean()

    return run


def _does(action: Callable[[Net, Tensor], Any]) -> Callable[..., Tensor]:
    def run(self: Net, x: Tensor) -> Tensor:
        x = self.first(x)
        action(self, x)
        return self.second(x).mean()

    return run


def _moving_average(self: Net, x: Tensor) -> None:
    with torch.no_grad():
        for student, teacher in zip(self.first.parameters(), self.teacher.parameters(), strict=True):
            teacher.mul_(0.9).add_(student, alpha=0.1)


def _moving_average_by_lists(self: Net, x: Tensor) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(self.teacher.parameters()), 0.9)
        torch._foreach_add_(list(self.teacher.parameters()), list(self.first.parameters()), alpha=0.1)


def _moving_average_in_new_memory(self: Net, x: Tensor) -> None:
    for student, teacher in zip(self.first.parameters(), self.teacher.parameters(), strict=True):
        teacher.data = teacher.data * 0.9 + student.data * 0.1


def _moving_average_by_out(self: Net, x: Tensor) -> None:
    with torch.no_grad():
        for student, teacher in zip(self.first.parameters(), self.teacher.parameters(), strict=True):
            torch.lerp(teacher, student, 0.1, out=teacher)


def _autocast(self: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x.transpose(1, 2)


def _frozen_in_turn(self: Net, x: Tensor) -> None:
    for parameter in self.teacher.parameters():
        parameter.requires_grad = parameter.requires_grad  # as it was
    parameter.requires_grad = False


@torch.autocast("cpu", torch.bfloat16)
def _decorated_autocast(self: Net, x: Tensor) -> Tensor:
    return x @ x.transpose(1, 2)


def _asks_for_autocast(self: Net, x: Tensor) -> Tensor:
    return self.first(x).mean() * (2.0 if torch.is_autocast_enabled("cpu") else 1.0)


def _operator_without_autocast(self: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return self.first(x).mean()


REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "a counter that is read": (
        lambda self, x: (setattr(self, "step", self.step + 1), self.first(x * self.step).mean())[1],
        "sets self.step of Net between operators and reads what an earlier one has left there",
    ),
    "a value for later": (
        lambda self, x: (
            setattr(self, "mask", self.first(x if self.mask is None else self.mask)),
            self.second(self.mask).mean(),
        )[1],
        "what an earlier forward has left in self.mask",
    ),
    "a moving average": (_does(_moving_average), "depends on 't.teacher.norm.weight'"),
    "a moving average by lists": (_does(_moving_average_by_lists), "depends on 't.teacher.norm.weight'"),
    "a moving average in new memory": (
        _does(_moving_average_in_new_memory),
        "depends on 't.teacher.norm.weight'",
    ),
    "a moving average by out": (_does(_moving_average_by_out), "depends on 't.teacher.norm.weight'"),
    "noise": (lambda self, x: self.second(self.first(x) + torch.randn(4, WIDTH)).mean(), "draws random"),
    "Python's noise": (lambda self, x: self.first(x).mean() * random.random(), "draws random"),
    "noise of its own": (
        lambda self, x: self.first(x).mean() * OWN["one"].random(),
        "draws random numbers by OWN (Random)",
    ),
    "numpy's noise": (lambda self, x: self.first(x).mean() * float(np.random.rand()), "draws random"),
    "autocast": (lambda self, x: self.second(_autocast(self, self.first(x)).sum(-1)).mean(), "autocast on"),
    "frozen parameters": (
        _does(lambda self, x: self.first.requires_grad_(False)),
        "forward says whether 'first.norm.weight' takes a gradient",
    ),
    "the last of several": (
        _does(_frozen_in_turn),
        "forward says whether 'teacher.linear.bias' takes a gradient",
    ),
    "one that is frozen by name": (
        _does(lambda self, x: self.first.norm.weight.requires_grad_(False)),
        "forward calls requires_grad_ of a Parameter",
    ),
    "one whose attribute is set": (
        _does(lambda self, x: setattr(self.first.norm.weight, "requires_grad", False)),
        "forward calls setattr('requires_grad') of a Parameter",
    ),
    "a decorator's autocast": (
        lambda self, x: self.second(_decorated_autocast(self, self.first(x)).sum(-1)).mean(),
        "autocast on",
    ),
    "an operator without autocast": (_operator_without_autocast, "autocast off around an operator"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_trace_would_freeze_is_refused(name: str) -> None:
    run, found = REFUSED[name]
    made = workload(run)
    net = made.tasks[0].module
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with pytest.raises(WorkloadError) as caught:
        analysed(made)
    assert found in str(caught.value)
    assert "noise" in name[-5:] or Path(__file__).name in str(caught.value)
    assert net.step == 0 and net.mask is None
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def _by_loops(module: nn.Module, trains: bool) -> None:
    for parameter in module.parameters():
        parameter.requires_grad = trains


def _by_name(module: Block, trains: bool) -> None:
    module.norm.weight.requires_grad_(trains)


@pytest.mark.parametrize("freeze", [nn.Module.requires_grad_, _by_loops, _by_name])
def test_what_is_frozen_for_a_part_of_forward_alone_has_no_gradient(freeze: Callable[..., Any]) -> None:
    """As a generator's loss does it with its discriminator."""

    def run(self: Net, x: Tensor) -> Tensor:
        fake = self.first(x)
        freeze(self.second, False)
        score = self.second(fake).tanh().mean()
        freeze(self.second, True)
        return self.second(fake.detach()).mean() - self.second(x).sigmoid().mean() - score

    made = workload(run)
    task = made.tasks[0]
    parameters = dict(task.module.named_parameters())
    batch = Batches(task, seed=1).rows(0, 0, 4)
    expected = gradients_of(run_plain(task, batch), parameters)
    traced = analysed(made).tasks["t"]
    if freeze is nn.Module.requires_grad_:
        assert [op.target for op in traced.ops] == ["first", "second", "second", None]
    found = gradients_of(run_shares(traced, batch, dict.fromkeys(range(9), 2)), parameters)
    torch.testing.assert_close(found, expected)
    assert all(parameter.requires_grad for parameter in parameters.values())


class Freezing(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.norm.weight.requires_grad = False
        return super().forward(x)


def test_an_operator_that_freezes_its_parameter_is_refused() -> None:
    def run(self: Net, x: Tensor) -> Tensor:
        return self.extra(self.first(x)).mean()  # type: ignore[no-any-return, operator]

    made = workload(run)
    net = made.tasks[0].module
    net.extra = Freezing()
    with pytest.raises(WorkloadError) as caught:
        analysed(made)
    assert "'extra' (Freezing) says in its forward whether its parameter 'norm.weight'" in str(caught.value)
    assert "test_faithful.py" in str(caught.value)
    assert net.extra.norm.weight.requires_grad


def test_a_tensor_that_is_kept_to_save_work_is_no_state() -> None:
    def run(self: Net, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(4, 1).triu()
        return self.first(x * self.mask).mean()

    made = workload(run)
    assert not analysed(made).tasks["t"].ops[0].coupled
    assert made.tasks[0].module.mask is None


def test_switching_gradients_off_and_on_leaves_them_on() -> None:
    def run(self: Net, x: Tensor) -> Tensor:
        with contextlib.suppress(ValueError), torch.no_grad():
            raise ValueError
        return self.first(x).mean()

    assert analysed(workload(run)).tasks["t"].ops[0].is_loss


def _rounds_off_in(make: Callable[[Tensor], Any]) -> Callable[..., Tensor]:
    def run(self: Net, x: Tensor) -> Tensor:
        x = self.first(x).float()
        with make(x):
            x = x @ x.transpose(1, 2) @ x
            y = self.teacher.linear(x)
            loss = torch.nn.functional.mse_loss(x @ y.transpose(1, 2), x @ x.transpose(1, 2)) / x.shape[0]
        return loss * 4 + self.first(x @ self.average.unsqueeze(1).expand(-1, WIDTH)).mean()

    return run


def maybe_autocast(device_type: str) -> Any:
    """As in transformers."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


@pytest.mark.parametrize("enabled", [False, True])
def test_a_question_for_autocast_is_answered_as_forward_runs(enabled: bool) -> None:
    task = workload(_asks_for_autocast).tasks[0]
    traced = analysed(workload(_asks_for_autocast)).tasks["t"]
    batch = Batches(task, seed=1).rows(0, 0, task.batch_size)
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        expected = run_plain(traced.task, batch)
        torch.testing.assert_close(run_shares(traced, batch, {}), expected, rtol=1e-6, atol=0)


DECORATES = torch.autocast("cpu", enabled=False)  # is made before anything is traced
OFF: dict[str, Callable[[Tensor], Any]] = {
    "by a decorator": lambda x: DECORATES,
    "by name": lambda x: torch.autocast("cpu", enabled=False),
    "of the tensor": lambda x: torch.autocast(x.device.type, enabled=False),
    "if it is on": lambda x: maybe_autocast("cpu"),
    "elsewhere": lambda x: torch.autocast("cuda", enabled=False),
}


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
@pytest.mark.parametrize(
    ("name", "is_split"), [*((name, False) for name in OFF), ("by name", True), ("if it is on", True)]
)
def test_autocast_is_switched_off_where_forward_switches_it_off(name: str, is_split: bool) -> None:
    torch.manual_seed(0)
    task = Task("t", Net(_rounds_off_in(OFF[name])), 4, Items(x=(4, WIDTH)))
    traced = analysed(Workload("w", [task], (Block,))).tasks["t"]
    batch = Batches(task, seed=1).rows(0, 0, 4)
    parameters = dict(task.module.named_parameters())
    with torch.autocast("cpu", torch.bfloat16):
        plain = run_plain(task, batch)
        loss = run_shares(traced, batch, dict.fromkeys(range(9), 2 if is_split else 1))
        assert torch.is_autocast_enabled("cpu")
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    expected = gradients_of(plain, parameters)["teacher.linear.weight"]
    found = gradients_of(loss, parameters)["teacher.linear.weight"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
