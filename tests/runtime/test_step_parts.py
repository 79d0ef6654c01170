"""Stepping parameters part by part is stepping all of them, for every optimizer that this is done with."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from spindle_cli.account.step_end import UpdatePart
from spindle_cli.errors import RunFailedError
from spindle_cli.runtime.step.step_end import rank_parts
from spindle_cli.runtime.training import Training
from spindle_cli.runtime.update.gradient_check import GradientCheck
from spindle_cli.runtime.update.masters import Masters
from spindle_cli.runtime.update.optimizers import Optimizers
from spindle_cli.runtime.update.owned_ranges import OwnedRange
from spindle_cli.runtime.update.update import Update
from spindle_cli.training.optimizing.groups import OptimizerGroups
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.settings.updates import STATE_PER_PARAM

CPU = torch.device("cpu")
SIZES = {"a": 7, "b": 130, "c": 33, "d": 1, "e": 64}
PARTS = (frozenset("ac"), frozenset("e"))
LEFT = frozenset("bd")
FINE = torch.tensor([1.0])
# Arguments that choose other ways through torch's code.
ARGUMENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    ("AdamW", {"foreach": True, "amsgrad": True}),
    ("AdamW", {"foreach": False, "fused": False}),
    ("RMSprop", {"centered": True, "momentum": 0.5}),
)


class Trained:
    """Some parameters with all that updates them; two optimizer groups where `name` is None."""

    def __init__(
        self, name: str | None, arguments: dict[str, Any], dtype: torch.dtype = torch.float32
    ) -> None:
        draw = torch.Generator().manual_seed(0)
        self.parameters = {
            key: nn.Parameter(torch.randn(size, generator=draw).to(dtype)) for key, size in SIZES.items()
        }
        settings: dict[str, Any] = {
            "shard_optimizer": False,
            "lr": 0.1,
            "schedule": {"name": "StepLR", "step_size": 1, "gamma": 0.5},
            "ema": {"decay": 0.5},
            "precision": "bf16" if dtype is torch.bfloat16 else "full",
        }
        if name is None:
            settings["groups"] = [
                {"name": "few", "parameters": ["a", "b"], "optimizer": "SGD", "lr": 0.3},
                "rest",
            ]
        else:
            settings |= {"optimizer": name, "optimizer_args": arguments}
        train = TrainSettings.model_validate(settings)
        assert train.updates_by_parts
        few = {"a", "b"} if name is None else set()
        of = {key: int(bool(few) and key not in few) for key in SIZES}
        held = [OwnedRange(key, None, parameter) for key, parameter in self.parameters.items()]
        self.masters = Masters(held) if dtype is torch.bfloat16 else None
        owned = held if self.masters is None else list(self.masters.owned_ranges)
        self.optimizers = Optimizers.of(train, OptimizerGroups(train.choices, of), owned)
        self.update = Update(self.optimizers, owned, self.masters, None, None, None, CPU)

    def take_gradients(self, step: int) -> None:
        """'e' has none in the second step."""
        draw = torch.Generator().manual_seed(step + 1)
        for key, parameter in self.parameters.items():
            gradient = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
            parameter.grad = None if (key, step) == ("e", 1) else gradient

    def assert_like(self, other: Trained) -> None:
        for key, parameter in self.parameters.items():
            assert torch.equal(parameter, other.parameters[key]), key
        for one, two in zip(self.optimizers.groups, other.optimizers.groups, strict=True):
            own, others = (each.optimizer.state_dict() for each in (one, two))
            assert own["param_groups"] == others["param_groups"]
            assert own["state"].keys() == others["state"].keys()
            for place, state in own["state"].items():
                for key, value in state.items():
                    assert torch.equal(
                        torch.as_tensor(value), torch.as_tensor(others["state"][place][key])
                    ), key
        assert self.optimizers.average is not None
        assert other.optimizers.average is not None
        for owned, alike in zip(
            (each for group in self.optimizers.groups for each in group.owned_ranges),
            (each for group in other.optimizers.groups for each in group.owned_ranges),
            strict=True,
        ):
            mine, theirs = self.optimizers.average.of(owned), other.optimizers.average.of(alike)
            assert mine is not None
            assert theirs is not None
            assert torch.equal(mine, theirs)
        assert self.optimizers.learning_rates == other.optimizers.learning_rates


def step_in_parts(trained: Trained, losses: torch.Tensor = FINE) -> None:
    for names in PARTS:
        trained.update.step_part(losses, names)
    trained.update.step(losses, GradientCheck(), LEFT)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [*((name, {}) for name in sorted(STATE_PER_PARAM)), *ARGUMENTS, (None, {})],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_step_of_all(name: str | None, arguments: dict[str, Any], dtype: torch.dtype) -> None:
    whole, apart = Trained(name, arguments, dtype), Trained(name, arguments, dtype)
    for step in range(4):
        whole.take_gradients(step)
        apart.take_gradients(step)
        whole.update.step(FINE, GradientCheck())
        step_in_parts(apart)
        apart.assert_like(whole)
        assert not apart.update.is_begun
        if apart.masters is not None:  # what they take is given up
            assert all(owned.tensor.grad is None for owned in apart.masters.owned_ranges)


def test_a_part_leaves_all_else_as_it_is() -> None:
    """Also what is masters and their gradients; the learning rate stays until the step is done."""
    trained = Trained("AdamW", {}, torch.bfloat16)
    trained.take_gradients(0)
    before = {key: parameter.detach().clone() for key, parameter in trained.parameters.items()}
    trained.update.step_part(FINE, PARTS[0])
    moved = {key for key, value in before.items() if not torch.equal(value, trained.parameters[key])}
    assert moved == PARTS[0]
    assert trained.masters is not None
    assert all(owned.tensor.grad is None for owned in trained.masters.owned_ranges)
    assert trained.optimizers.learning_rates == {"all": 0.1}
    (group,) = trained.optimizers.groups
    assert len(group.optimizer.param_groups[0]["params"]) == len(SIZES)
    assert len(group.optimizer.state) == len(PARTS[0])


def test_a_loss_that_is_not_finite_keeps_all_parts_away() -> None:
    trained = Trained("AdamW", {})
    trained.take_gradients(0)
    before = {key: parameter.detach().clone() for key, parameter in trained.parameters.items()}
    step_in_parts(trained, torch.tensor([1.0, math.nan]))
    assert all(torch.equal(value, trained.parameters[key]) for key, value in before.items())
    trained.take_gradients(1)
    step_in_parts(trained)  # the next one is checked anew
    assert not torch.equal(before["a"], trained.parameters["a"])


def test_the_parameters_of_an_optimizer_are_there_again_when_its_step_fails() -> None:
    trained = Trained("AdamW", {})
    trained.take_gradients(0)
    trained.parameters["a"].grad = torch.zeros(7).to_sparse()
    (group,) = trained.optimizers.groups
    with pytest.raises(RuntimeError):
        trained.update.step_part(FINE, PARTS[0])
    assert len(group.optimizer.param_groups[0]["params"]) == len(SIZES)
    assert trained.update.is_begun


class Pool:
    """Two groups, one parameter that no other rank has, and one of a group that this step leaves out."""

    owned_ranges = tuple(OwnedRange(key, None, nn.Parameter(torch.zeros(1))) for key in "abcdef")
    local_names = frozenset("a")

    def names_of(self, part: int, groups: tuple[int, ...]) -> frozenset[str]:
        assert part == 3
        return frozenset(name for group in groups for name in {4: "bc", 5: "d", 7: "e"}[group])


def test_what_no_update_has_is_left_to_the_step() -> None:
    pool = cast("Any", Pool())
    parts = [UpdatePart((4, 5), 0.5, 0.0), UpdatePart((7,), 0.25, 0.0), UpdatePart((), 0.25, 0.0)]
    first, second, last = rank_parts(parts, pool, 3)
    assert (first.groups, first.names) == ((4, 5), frozenset("abcd"))
    assert (second.groups, second.names) == ((7,), frozenset("e"))
    assert last.names == frozenset("f")
    (whole,) = rank_parts(parts[:1], pool, 3)
    assert whole.names is None


def test_nothing_is_saved_of_a_step_that_was_given_up_between_its_parts() -> None:
    """Some parameters are those of the next step already."""
    trained = Trained("AdamW", {})
    trained.take_gradients(0)
    trained.update.step_part(FINE, PARTS[0])
    training = cast("Any", SimpleNamespace(update=trained.update, done=6, outer_steps=None))
    with pytest.raises(RunFailedError, match="step 7 has updated some parameters and not the others"):
        Training.save_in_order(training)
