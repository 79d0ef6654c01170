"""Within a step the host never waits for the device; it looks at a step's losses while the next one runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from alone import ALONE, world_of_one
from case_runs import ADAMW, Case, prepare
from host_waits import HostWaitError, no_host_waits
from torch import Tensor, nn

from helpers.torch_versions import widens_gradients
from spindle_cli.errors import RunFailedError, StoppedError
from spindle_cli.files.request import RunRequest, stop_path
from spindle_cli.files.run_files import read_metrics
from spindle_cli.runtime.communication import reached
from spindle_cli.runtime.measuring.metrics import MetricsLog
from spindle_cli.runtime.saving.checkpoints import Checkpoints
from spindle_cli.runtime.training import Training
from spindle_cli.runtime.update.update import UpdateGuard
from spindle_cli.runtime.worker import train_plan
from spindle_cli.training.optimizing.optimizer import make_optimizer
from spindle_cli.workload.file import TrainSettings

CPU = torch.device("cpu")
SGD = {"optimizer": "SGD", "lr": 0.1, "optimizer_args": {"momentum": 0.9, "nesterov": True}}
ADAM = {"optimizer": "Adam", "lr": 0.1, "optimizer_args": {"amsgrad": True}}


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


def run(folder: Path, case: Case, **changes: object) -> RunRequest:
    request = prepare(case, 1, folder).model_copy(update={"capture_dir": None, **changes})
    train_plan(request, ALONE, CPU)
    return request


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x[0].item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: bool(x[0] > 0),
        lambda x: float(x.sum()),
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 0),
        lambda x: x[x > 0],
        lambda x: x.index_put_((x > 0,), x[:1]),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: torch.unique(x),
        lambda x: torch.equal(x, x),
    ],
)
def test_what_looks_at_values_is_found(look: Callable[[Tensor], object]) -> None:
    x = torch.arange(3.0)
    look(x)
    with no_host_waits(), pytest.raises(HostWaitError):
        look(x)


def test_what_looks_at_no_values_is_left_alone() -> None:
    x, index = torch.arange(3.0, requires_grad=True), torch.tensor([2, 0])
    with no_host_waits():
        y = torch.where(x > 0, x, 0.0)[index] + x.masked_fill(x > 1, 0.0)[1:]
        y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 1.0, 1.0]


WAYS = {
    "adamw": ADAMW,
    "clipped": {**SGD, "clip_norm": 0.01},
    "accumulated": {**ADAMW, "accumulate": 3},
    "bf16": {**ADAMW, "precision": "bf16", "clip_norm": 0.01, "accumulate": 3},
    "autocast": {**ADAMW, "precision": "bf16-autocast", "schedule": {"name": "StepLR", "step_size": 1}},
    "unfused": {"optimizer": "NAdam", "lr": 1e-3},
    "scaled": {**ADAMW, "precision": "fp16-autocast", "clip_norm": 0.01, "loss_scale": 2.0**50},
    "scaled SGD": {"optimizer": "SGD", "lr": 0.1, "precision": "fp16-autocast"},
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=widens_gradients if way == "bf16" else ()) for way in WAYS]
)
def test_no_step_looks_at_what_is_on_the_device(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With everything recomputed; every parameter is reached, so that no flags are read either."""
    step = Training.step

    def without_waits(self: Training, number: int, *, is_first: bool) -> None:
        with no_host_waits():
            step(self, number, is_first=is_first)

    monkeypatch.setattr(Training, "step", without_waits)
    monkeypatch.setattr(reached, "read_flags", lambda flags: pytest.fail("flags are read"))
    case = Case(way, (0,), "memory_toys", train=WAYS[way], dtype=None, recompute=("describe/tower",), steps=2)
    request = run(tmp_path / "run", case)
    assert [line.step for line in read_metrics(request.run_dir)] == [1, 2]


def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a run does, in order: 'step 1', 'line 1', 'save 1', counted from 1."""
    found: list[str] = []

    def note(owner: type, name: str, label: Callable[..., str]) -> None:
        method = getattr(owner, name)

        def noting(self: Any, *arguments: Any, **named: Any) -> Any:
            found.append(label(*arguments))
            return method(self, *arguments, **named)

        monkeypatch.setattr(owner, name, noting)

    note(Training, "step", lambda step: f"step {step + 1}")
    note(MetricsLog, "write", lambda metrics: f"line {metrics.step}")
    note(Checkpoints, "save", lambda step: f"save {step}")
    return found


def moving(**changes: Any) -> Case:
    return Case("moving", (0,), function="build_moving", **{"train": ADAMW, "steps": 4, **changes})


def test_losses_are_read_one_step_late_but_before_anything_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = notes(monkeypatch)
    run(tmp_path / "run", moving(checkpoint_every=3))
    assert found == [
        *("step 1", "step 2", "line 1", "step 3", "line 2", "line 3", "save 3"),
        *("step 4", "line 4", "save 4"),
    ]


def test_a_stop_is_seen_one_step_late_and_saves_what_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = prepare(moving(), 1, tmp_path / "run").model_copy(update={"capture_dir": None})
    stop_path(request.run_dir).parent.mkdir(parents=True)
    stop_path(request.run_dir).touch()
    found = notes(monkeypatch)
    with pytest.raises(StoppedError, match="after step 2"):
        train_plan(request, ALONE, CPU)
    assert found == ["step 1", "step 2", "line 1", "line 2", "save 2"]


def test_the_users_error_leaves_the_lines_of_the_steps_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Training.step

    def failing(self: Training, number: int, *, is_first: bool) -> None:
        if number == 2:
            raise ValueError("the layer's own error")
        step(self, number, is_first=is_first)

    monkeypatch.setattr(Training, "step", failing)
    with pytest.raises(ValueError, match="own error"):
        run(tmp_path / "run", moving())
    assert [line.step for line in read_metrics(tmp_path / "run")] == [1, 2]


def spoil(monkeypatch: pytest.MonkeyPatch, after: Callable[[], object]) -> list[dict[str, Tensor]]:
    """Let the learning rate make the second step's loss infinite; `after` is called in the third step.

    Returns:
        The parameters before each step that is begun.
    """
    seen: list[dict[str, Tensor]] = []
    step = Training.step

    def noting(self: Training, number: int, *, is_first: bool) -> None:
        seen.append({name: value.detach().clone() for name, value in self.model.parameters.items()})
        if number == 2:
            after()
        step(self, number, is_first=is_first)

    monkeypatch.setattr(Training, "step", noting)
    return seen


DIVERGING = {"optimizer": "SGD", "lr": 1e300}


def test_a_spoilt_step_changes_nothing_and_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = spoil(monkeypatch, lambda: None)
    with pytest.raises(RunFailedError, match=r"step 2: the loss of .* stopped before this step's update"):
        run(tmp_path / "run", moving(train=DIVERGING))
    assert len(seen) == 3
    assert all(torch.equal(seen[1][name], seen[2][name]) for name in seen[1])
    assert not all(torch.equal(seen[0][name], seen[1][name]) for name in seen[1])
    assert [line.step for line in read_metrics(tmp_path / "run")] == [1, 2]


def test_a_spoilt_step_is_never_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = notes(monkeypatch)
    with pytest.raises(RunFailedError, match="step 2"):
        run(tmp_path / "run", moving(train=DIVERGING, checkpoint_every=1))
    assert found == ["step 1", "line 1", "save 1", "step 2", "line 2"]


def test_an_error_that_follows_from_a_spoilt_step_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def assertion() -> None:
        raise ValueError("the layer's own error: a value is no number")

    spoil(monkeypatch, assertion)
    with pytest.raises(RunFailedError, match="step 2: the loss") as caught:
        run(tmp_path / "run", moving(train=DIVERGING))
    assert isinstance(caught.value.__cause__, ValueError)


def test_gradients_without_a_finite_norm_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is finite, its gradient is not."""
    monkeypatch.setattr("spindle_cli.runtime.step.losses.LossAccumulator.seed", lambda *_: float("inf"))
    seen = spoil(monkeypatch, lambda: None)
    with pytest.raises(RunFailedError, match=r"step 1: the norm of the gradients is (inf|nan)"):
        run(tmp_path / "run", moving(train={**ADAMW, "clip_norm": 1.0}))
    assert all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])


@pytest.mark.parametrize("settings", [SGD, ADAM, ADAMW], ids=["SGD", "Adam", "AdamW"])
def test_a_guarded_update_is_the_update_or_none(settings: dict[str, object]) -> None:
    train = TrainSettings.model_validate(settings)
    plain, guarded = (nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2))
    optimizers = [make_optimizer(train.choices[0], [parameter]) for parameter in (plain, guarded)]
    guard = UpdateGuard([optimizers[1]], CPU)

    def step(gradient: Tensor, loss: float, *, also_plain: bool) -> None:
        plain.grad, guarded.grad = gradient.clone(), gradient.clone()
        guard.require_finite(torch.tensor([1.0, loss]), None)
        for optimizer in optimizers if also_plain else optimizers[1:]:
            assert optimizer is not None
            optimizer.step()

    fine, bad = torch.linspace(0, 3, 7), torch.full((7,), float("nan"))
    step(fine, 2.0, also_plain=True)
    step(bad, float("nan"), also_plain=False)
    step(fine, float("inf"), also_plain=False)
    step(fine.square(), -2.0, also_plain=True)
    assert torch.equal(plain, guarded)
    states = [json.dumps(state_of(optimizer)) for optimizer in optimizers]
    assert states[0] == states[1]


def state_of(optimizer: torch.optim.Optimizer | None) -> dict[str, list[float]]:
    assert optimizer is not None
    (state,) = optimizer.state.values()
    return {
        key: torch.as_tensor(value).reshape(-1).tolist() for key, value in state.items() if value is not None
    }
