"""An optimizer class by import path keeps the contract that the file states, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import toy_workload
from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.training.optimizing.groups import (
    KeptState,
    StateSizes,
    groups_of_graph,
    optimizer_groups,
    stepped_whole,
)
from spindle_cli.training.optimizing.optimizer import (
    number_keys,
    require_contract,
    state_keys,
    state_per_param,
)
from spindle_cli.training.optimizing.schedules import require_trainable
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.settings.updates import OptimizerChoice


class Little(torch.optim.Optimizer):
    """A step along the gradient, which a subclass changes."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * self.direction(parameter))

    def direction(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad


class Momentum(Little):
    def direction(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["sum"], state["n"] = torch.zeros_like(parameter), 0
        state["sum"] += super().direction(parameter)
        state["n"] += 1
        mean: Tensor = state["sum"] / state["n"]
        return mean


class Normed(Little):
    def direction(self, parameter: Tensor) -> Tensor:
        gradient = super().direction(parameter)
        return gradient / gradient.norm()


class Coupled(Little):
    def direction(self, parameter: Tensor) -> Tensor:
        first = self.param_groups[0]["params"][0]
        return super().direction(parameter) * first.grad.norm()


class Hidden(Little):
    """Counts its steps where no checkpoint sees it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.calls = 0

    def direction(self, parameter: Tensor) -> Tensor:
        self.calls += 1
        return super().direction(parameter) * self.calls


class Masterful(Little):
    def direction(self, parameter: Tensor) -> Tensor:
        self.state[parameter]["master"] = torch.zeros_like(parameter)
        return super().direction(parameter)


class Listing(Little):
    def direction(self, parameter: Tensor) -> Tensor:
        self.state[parameter]["history"] = [1.0]
        return super().direction(parameter)


class Broken(Little):
    def direction(self, parameter: Tensor) -> Tensor:
        raise IndexError("gone")


def choice(name: str, contract: str | None = None, **more: object) -> OptimizerChoice:
    return TrainSettings.model_validate(
        {"optimizer": f"{__name__}:{name}", "contract": contract, **more}
    ).choices[0]


def test_classes_that_keep_their_contract_pass() -> None:
    require_contract(choice("Momentum", "element-wise"))
    require_contract(choice("Momentum", "whole"))
    require_contract(choice("Normed"))


@pytest.mark.parametrize(
    ("name", "contract", "said"),
    [
        ("Normed", "element-wise", "Normed steps a parameter otherwise than its parts"),
        ("Coupled", "whole", "Coupled steps two parameters together otherwise than each by itself"),
        ("Hidden", "whole", "Hidden"),
        ("Masterful", "whole", "keeps state named 'master', which checkpoints use themselves"),
        ("Listing", "whole", "keeps 'history' as a list; expected tensors and numbers"),
        (
            "Broken",
            "whole",
            r"Broken failed in a step .*IndexError: gone \(.*test_optimizer_contracts.py:\d+",
        ),
        ("Missing", "whole", "has no class or function 'Missing'"),
        ("choice", "whole", "is not a class derived from torch.optim.Optimizer"),
    ],
)
def test_other_classes_are_refused(name: str, contract: str, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        require_contract(choice(name, contract))


class Forgetful(Momentum):
    """What it counts is no part of its state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.seen: dict[int, int] = {}

    def direction(self, parameter: Tensor) -> Tensor:
        self.seen[id(parameter)] = self.seen.get(id(parameter), 0) + 1
        return super().direction(parameter) / self.seen[id(parameter)]


def test_what_a_checkpoint_would_not_bring_back_is_refused() -> None:
    with pytest.raises(WorkloadError, match="steps otherwise once its state is loaded again"):
        require_contract(choice("Forgetful", "element-wise"))


def test_the_contract_decides_whether_elements_may_be_spread() -> None:
    assert choice("Momentum", "element-wise").treats_elements_alone
    assert not choice("Momentum", "whole").treats_elements_alone
    assert not choice("Momentum").treats_elements_alone
    assert not TrainSettings(optimizer=f"{__name__}:Momentum").shards_optimizer_state


def test_arguments_that_a_class_does_not_take_are_named() -> None:
    with pytest.raises(WorkloadError, match=r"Momentum does not take lr=0.001 and optimizer_args=\{'x': 1\}"):
        require_trainable(
            TrainSettings.model_validate({"optimizer": f"{__name__}:Momentum", "optimizer_args": {"x": 1}})
        )


def test_what_a_class_keeps_is_looked_at() -> None:
    assert state_keys(choice("Momentum")) == {"sum", "n"}
    assert number_keys(choice("Momentum")) == {"n": int}
    assert state_per_param(choice("Momentum")) == 1.0
    assert state_per_param(choice("Normed")) == 0.0


def test_state_that_devices_do_not_share_is_said_with_its_size() -> None:
    """Of the toy: in each of two blocks 48 x 16 and twice 16 x 16, and two heads of 4 x 16: 10,752 bytes."""
    muon = [{"name": "m", "kinds": ["matrices"], "optimizer": "Muon"}, "rest"]
    graph = analysed(toy_workload.build())

    def said(**train: object) -> tuple[str, ...]:
        settings = TrainSettings.model_validate({"groups": muon, **train})
        return stepped_whole(settings, groups_of_graph(settings, graph), graph)

    whole = "Muon (group m) steps whole parameters: every device that holds one of these 8 "
    rest = "of all) and steps it, and shares neither with others"
    assert said() == (f"{whole}(10.5 KiB) keeps its state (10.5 KiB {rest}",)
    # State in float32, and masters: 4 bytes for 1.
    assert said(precision="bf16") == (f"{whole}(5.25 KiB) keeps its state (21 KiB {rest}",)
    assert said(shard_optimizer=False) == said(groups=None) == ()


def test_bytes_of_state_are_counted_by_group() -> None:
    """60 bytes of matrix under AdamW, 12 of bias under Muon's like, which keeps as much whole."""
    train = TrainSettings.model_validate(
        {
            "groups": [
                {"name": "b", "kinds": ["biases"], "optimizer": f"{__name__}:Momentum"},
                "rest",
            ]
        }
    )
    root = nn.Linear(5, 3)
    found = StateSizes(train, optimizer_groups(train, {"t": root}))
    parameters = [(f"t.{name}", parameter) for name, parameter in root.named_parameters()]
    assert found.of(parameters) == KeptState(120 / 72, 12 / 72, 12 / 72)
    assert found.of(parameters[1:]) == KeptState(0.0, 1.0, 1.0)
    assert found.of([("t.frozen", root.bias)]) is None
    alone = train.model_copy(update={"shard_optimizer": False})
    assert StateSizes(alone, optimizer_groups(alone, {"t": root})).of(parameters) == KeptState(132 / 72)
    masters = train.model_copy(update={"precision": "bf16"})
    assert StateSizes(masters, optimizer_groups(masters, {"t": root})).of(parameters[1:]) == KeptState(
        0.0, 4.0, 1.0
    )
