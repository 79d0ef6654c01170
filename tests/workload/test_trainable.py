"""Train settings that torch cannot follow are refused before anything is started."""

from __future__ import annotations

import pytest

from spindle_cli.errors import WorkloadError
from spindle_cli.training.optimizing.schedules import require_trainable
from spindle_cli.workload.file import Schedule, TrainSettings


def test_settings_that_torch_can_follow_pass() -> None:
    require_trainable(TrainSettings())
    schedule = Schedule.model_validate({"name": "CosineAnnealingLR", "T_max": 10})
    require_trainable(TrainSettings(optimizer="SGD", optimizer_args={"momentum": 0.9}, schedule=schedule))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer": "Adamw"}, "has no optimizer 'Adamw'"),
        ({"optimizer": "LBFGS"}, "cannot be used"),
        ({"optimizer_args": {"beta": 3}}, "does not take"),
        ({"schedule": {"name": "Cosine"}}, "has no schedule 'Cosine'"),
        ({"schedule": {"name": "CosineAnnealingLR"}}, "does not take"),
    ],
)
def test_settings_that_it_cannot_are_named(settings: dict[str, object], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        require_trainable(TrainSettings.model_validate(settings))


def test_a_groups_rate_that_the_schedule_would_write_over_is_refused() -> None:
    settings = {
        "optimizer": "Adam",
        "groups": [{"name": "n", "kinds": ["norms"], "lr": 0.1}, "rest"],
        "schedule": {"name": "OneCycleLR", "max_lr": 0.1, "total_steps": 5},
    }
    with pytest.raises(WorkloadError, match=r"n: lr: 0.1 would never be used: OneCycleLR gives all groups"):
        require_trainable(TrainSettings.model_validate(settings))
    settings["schedule"] = {"name": "ExponentialLR", "gamma": 0.5}
    require_trainable(TrainSettings.model_validate(settings))
