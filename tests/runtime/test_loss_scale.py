"""One rank's loss scale: torch's own, by the check of all ranks; a skipped step leaves everything."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from alone import run_case, world_of_one
from case_runs import Case
from torch import Tensor, nn
from torch.amp import GradScaler

from spindle_cli.checkpoint.index import SavedLossScale
from spindle_cli.errors import RunFailedError
from spindle_cli.files.run_files import read_metrics
from spindle_cli.runtime.step.compute import ForwardRun, run_backward
from spindle_cli.runtime.step.losses import MOST_SKIPPED, step_failure
from spindle_cli.runtime.update.gradient_check import GradientChecker
from spindle_cli.runtime.update.loss_scale import LossScale
from spindle_cli.runtime.update.optimizers import Optimizers, skips_by_itself
from spindle_cli.runtime.update.owned_ranges import OwnedRange
from spindle_cli.runtime.update.update import Update
from spindle_cli.training.optimizing.groups import OptimizerGroups
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.settings.updates import LossScaleSettings

CPU = torch.device("cpu")
INF = math.inf


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


def owned(name: str, gradient: list[float] | None, *, counted: bool = True) -> OwnedRange:
    parameter = nn.Parameter(torch.zeros(len(gradient or [0.0])))
    parameter.grad = None if gradient is None else torch.tensor(gradient)
    return OwnedRange(name, None, parameter, counted=counted)


def test_the_scale_moves_as_torchs_does() -> None:
    """Growing after two steps without an overflow in a row, falling to a quarter at once."""
    settings = {"init_scale": 32.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 2}
    ours, theirs = LossScale(LossScaleSettings(**settings), CPU), GradScaler("cpu", **settings)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    seen = []
    for overflows in (False, False, True, False, True, True, False, False, False, False, True):
        parameter.grad = theirs.scale(torch.ones(1)) * (INF if overflows else 1.0)
        theirs.unscale_(optimizer)
        theirs.step(optimizer)
        theirs.update()
        ours.update(torch.tensor(float(overflows), dtype=torch.float64))
        seen.append(ours.now.item())
        assert seen[-1] == theirs.get_scale()
    assert seen == [32, 96, 24, 24, 6, 1.5, 1.5, 4.5, 4.5, 13.5, 3.375]


def test_a_fixed_scale_stays() -> None:
    scale = LossScale(LossScaleSettings(init_scale=8.0, fixed=True, growth_interval=2000), CPU)
    for overflowed in (1.0, 0.0, 1.0):
        scale.update(torch.tensor(overflowed))
    assert scale.now.item() == 8.0


def test_a_saved_scale_goes_on_with_its_count_of_steps() -> None:
    settings = LossScaleSettings(init_scale=32.0, growth_interval=3)
    first, second = LossScale(settings, CPU), LossScale(settings, CPU)
    for overflowed in (1.0, 0.0, 0.0):
        first.update(torch.tensor(overflowed))
    assert first.saved() == SavedLossScale(scale=16.0, growing_steps=2)
    second.resume(first.saved())
    second.update(torch.tensor(0.0))
    assert second.now.item() == 32.0


@pytest.mark.parametrize("clip_norm", [None, 2.0])
def test_gradients_are_unscaled_before_their_norm_is_taken(clip_norm: float | None) -> None:
    """(3, 4) times 8, of which another rank's copy is not counted: norm 5."""
    scale = LossScale(LossScaleSettings(init_scale=8.0), CPU)
    ranges = [owned("a", [24.0, 32.0]), owned("b", [96.0], counted=False), owned("none", None)]
    gradient_check = GradientChecker(ranges, clip_norm, scale, CPU).check()
    assert gradient_check.scaling is not None and gradient_check.scaling.tolist() == [8.0, 0.0]
    factor = 1.0 if clip_norm is None else clip_norm / 5
    assert (gradient_check.norm is None) if clip_norm is None else (gradient_check.norm == 5.0)
    assert torch.allclose(ranges[0].tensor.grad, torch.tensor([3.0, 4.0]) * factor)
    assert torch.allclose(ranges[1].tensor.grad, torch.tensor([12.0]) * factor)


@pytest.mark.parametrize("bad", [INF, -INF, math.nan])
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("clip_norm", [None, 2.0])
def test_one_element_that_is_not_finite_is_found(bad: float, counted: bool, clip_norm: float | None) -> None:
    scale = LossScale(LossScaleSettings(init_scale=8.0), CPU)
    ranges = [owned("a", [1.0, 2.0]), owned("b", [0.0, bad, 0.0], counted=counted)]
    gradient_check = GradientChecker(ranges, clip_norm, scale, CPU).check()
    assert gradient_check.overflowed is not None and gradient_check.overflowed.item() == 1.0


def test_an_overflow_of_another_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks have found one each; the sum of the squares is beside it."""

    def all_reduce(tensor: Tensor) -> None:
        tensor += torch.tensor([3.0, 16.0], dtype=torch.float64)

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    scale = LossScale(LossScaleSettings(init_scale=8.0), CPU)
    gradient_check = GradientChecker([owned("a", [24.0])], 10.0, scale, CPU).check()
    assert gradient_check.scaling is not None and gradient_check.scaling.tolist() == [8.0, 1.0]
    assert gradient_check.norm == 5.0


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "AdamW"},
    "amsgrad": {"optimizer": "Adam", "optimizer_args": {"amsgrad": True}},
    "sgd": {"optimizer": "SGD"},
    "momentum": {"optimizer": "SGD", "optimizer_args": {"momentum": 0.9, "dampening": 0.5}},
    "nadam": {"optimizer": "NAdam"},
    "rprop": {"optimizer": "Rprop"},
}


def updates(name: str, value: nn.Parameter) -> tuple[Update, LossScale, Optimizers]:
    train = TrainSettings.model_validate(
        {
            "precision": "fp16-autocast",
            "loss_scale": {"init_scale": 8.0},
            "lr": 0.1,
            "schedule": {"name": "StepLR", "step_size": 1, "gamma": 0.5},
            **OPTIMIZERS[name],
        }
    )
    ranges = [OwnedRange("w", None, value)]
    optimizers = Optimizers.of(train, OptimizerGroups(train.choices, {"w": 0}), ranges)
    scale = LossScale.of(train, CPU)
    assert scale is not None
    return Update(optimizers, ranges, None, scale, None, None, CPU), scale, optimizers


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_leaves_parameters_and_state_wherever_it_comes(name: str) -> None:
    """With overflows before the first update, and between two, it is trained as without them, but that the
    schedule has moved on.
    """
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2))
    update, scale, optimizers = updates(name, ours)
    choice = OPTIMIZERS[name]
    plain = getattr(torch.optim, choice["optimizer"])([theirs], lr=0.1, **choice.get("optimizer_args", {}))
    for number, overflows in enumerate((True, True, False, True, False, False)):
        gradient = torch.linspace(-1, 2, 7) * (number + 1)
        ours.grad = gradient * scale.now
        if overflows:
            ours.grad[3] = INF
        before = ours.detach().clone()
        update.step(torch.tensor([1.0]), update.check_gradients())
        assert torch.equal(before, ours) == overflows
        if not overflows:
            theirs.grad = gradient.clone()
            plain.param_groups[0]["lr"] = 0.1 * 0.5**number
            plain.step()
        assert torch.allclose(ours, theirs, rtol=1e-6)
    assert scale.now.item() == 1.0
    assert optimizers.learning_rates == {"all": pytest.approx(0.1 * 0.5**6)}
    state = optimizers.groups[0].optimizer.state[ours]
    assert "step" not in state or float(state["step"]) == 3.0


def test_only_momenta_without_values_make_torchs_fused_sgd_wait() -> None:
    value = nn.Parameter(torch.ones(3))
    update, _, optimizers = updates("momentum", value)
    (group,) = optimizers.groups
    assert not skips_by_itself(group.optimizer)
    value.grad = torch.ones(3)
    update.step(torch.tensor([1.0]), update.check_gradients())
    assert skips_by_itself(group.optimizer)
    for name, by_itself in (("adamw", True), ("sgd", True), ("nadam", False)):
        _, _, optimizers = updates(name, nn.Parameter(torch.ones(3)))
        assert skips_by_itself(optimizers.groups[0].optimizer) == by_itself


def test_a_loss_that_is_not_finite_still_keeps_the_update_away() -> None:
    value = nn.Parameter(torch.ones(3))
    update, scale, _ = updates("adamw", value)
    value.grad = torch.ones(3)
    update.step(torch.tensor([math.nan]), update.check_gradients())
    assert value.tolist() == [1.0] * 3
    assert scale.now.item() == 8.0  # nothing has overflowed


@pytest.mark.parametrize(
    ("dtype", "scale", "weight", "expected"),
    [
        (torch.float32, 65536.0, 0.5, 32768.0),
        (torch.float16, 65536.0, 0.5, INF),  # as plain PyTorch: the scale itself is too large for the loss
        (torch.float16, 32768.0, 0.5, 16384.0),
    ],
)
def test_a_backward_pass_begins_with_the_weight_times_the_scale(
    dtype: torch.dtype, scale: float, weight: float, expected: float
) -> None:
    value = torch.ones((), dtype=dtype, requires_grad=True)
    loss = value.clone()
    run_backward(ForwardRun({}, {}, loss), {}, weight, torch.tensor(scale))
    theirs = torch.ones((), dtype=dtype, requires_grad=True)
    scaler = GradScaler("cpu", init_scale=scale)
    scaler.scale(theirs.clone() * weight).backward()
    assert value.grad is not None and theirs.grad is not None
    assert value.grad.item() == theirs.grad.item() == expected


def test_skipped_steps_end_a_run_only_where_there_are_many_in_a_row() -> None:
    assert step_failure({"a": math.nan}, INF, 70, 1) is None
    assert step_failure({"a": 1.0}, INF, 70, MOST_SKIPPED - 1) is None
    failure = step_failure({"a": math.nan, "b": 1.0}, INF, 70, MOST_SKIPPED)
    assert failure is not None
    assert f"step 70: gradients have overflowed in {MOST_SKIPPED} steps in a row" in failure.message
    assert failure.message.endswith("the loss of a is nan")
    assert step_failure({"a": math.nan}, None, 70, 0) is not None


@pytest.mark.parametrize(("overflowing", "ends_at"), [((1, 3), None), ((1, 2), 3)])
def test_only_steps_in_a_row_are_counted(
    overflowing: tuple[int, int], ends_at: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two skipped steps in a row end this run. In others gradients are large, too, but can be said."""
    monkeypatch.setattr("spindle_cli.runtime.step.losses.MOST_SKIPPED", 2)
    points = [[step, 1e30 if step in overflowing else 1.0] for step in range(5)]
    train = {
        "precision": "fp16-autocast",
        "loss_scale": 1,
        "optimizer": "SGD",
        "lr": 1e-3,
        "task_weights": {"moving": points},
    }
    case = Case("moving", (0,), function="build_moving", train=train, dtype=None, steps=5)
    ends = nullcontext() if ends_at is None else pytest.raises(RunFailedError, match=f"step {ends_at}: grad")
    with ends:
        run_case(case, tmp_path / "run", capture_dir=None)
    skipped = [line.step - 1 for line in read_metrics(tmp_path / "run") if line.skipped]
    assert skipped == list(overflowing)
