"""Learning rates at the steps where they change, solved by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from spindle_cli.errors import WorkloadError
from spindle_cli.runtime.saving.restore import same_rate
from spindle_cli.training.optimizing.optimizer import make_optimizer
from spindle_cli.training.optimizing.schedules import advance, make_schedule, resume_schedule
from spindle_cli.verify.stepping import update as plain
from spindle_cli.workload.file import TrainSettings


def halved_every_second(update: int) -> float:
    return 0.5 ** (update // 2)


def one(update: int) -> float:
    return 1.0


def nine_tenths(update: int) -> float:
    return 0.9


def rates(train: TrainSettings, count: int, group: int = 0) -> list[float]:
    """Of the first updates, which are those of the plain run too."""
    found: list[list[float]] = []
    choice = train.choices[group]
    for making in (make_schedule, plain.make_schedule):
        optimizer = make_optimizer(choice, [nn.Parameter(torch.ones(2))])
        assert optimizer is not None
        which: Any = group if making is plain.make_schedule else choice.name
        schedule = making(train, optimizer, which)
        own = []
        for _ in range(count):
            own.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            if schedule is not None:
                schedule.step()
        found.append(own)
    assert found[0] == pytest.approx(found[1], rel=1e-14, abs=1e-16)
    return found[0]


def settings(**keys: object) -> TrainSettings:
    return TrainSettings.model_validate({"optimizer": "SGD", "lr": 8.0, "steps": 7, **keys})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # Three updates below the rate, the fourth has it; then a quarter of it less with each.
        ({"warmup_steps": 3, "decay": "linear"}, [2, 4, 6, 8, 6, 4, 2, 0, 0]),
        ({"warmup_steps": 3, "decay": "linear", "min_lr": 4}, [2, 4, 6, 8, 7, 6, 5, 4, 4]),
        ({"warmup_steps": 3, "decay": "linear", "final_fraction": 0.5}, [2, 4, 6, 8, 7, 6, 5, 4, 4]),
        ({"warmup_steps": 3, "decay": "linear", "decay_steps": 5}, [2, 4, 6, 8, 4, 0, 0]),
        # cos(0), cos(60), cos(90), cos(120), cos(180) degrees are 1, 1/2, 0, -1/2, -1.
        ({"warmup_steps": 1, "decay": "cosine"}, [4, 8, None, 6, 4, 2, None, 0, 0]),
        ({"warmup_steps": 1, "decay": "cosine", "min_lr": 2}, [4, 8, None, 6.5, 5, 3.5, None, 2, 2]),
        ({"warmup_steps": 0, "decay": "linear", "decay_steps": 2}, [8, 4, 0]),
        ({"decay": "linear", "decay_steps": 4}, [8, 6, 4, 2, 0]),
        ({"warmup_steps": 1}, [4, 8, 8, 8]),
        ({"warmup_steps": 3, "decay": "constant"}, [2, 4, 6, 8, 8]),
        ({"warmup_steps": 0}, [8, 8]),
        ({}, [8, 8]),
    ],
)
def test_warm_up_and_decay(keys: dict[str, object], expected: list[float | None]) -> None:
    found = rates(settings(**keys), len(expected))
    known = [(rate, hand) for rate, hand in zip(found, expected, strict=True) if hand is not None]
    assert [rate for rate, _ in known] == pytest.approx([hand for _, hand in known], abs=1e-14)


def test_every_group_is_warmed_up_to_its_own_rate() -> None:
    groups = [{"name": "n", "kinds": ["norms"], "lr": 2.0}, "rest"]
    train = settings(groups=groups, warmup_steps=1, decay="linear", min_lr=1.0, decay_steps=3)
    found = []
    for choice in train.choices:
        optimizer = make_optimizer(choice, [nn.Parameter(torch.ones(2))])
        assert optimizer is not None
        schedule = make_schedule(train, optimizer, None)
        assert schedule is not None
        found.append([])
        for _ in range(4):
            found[-1].append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
    assert found == [[1.0, 2.0, 1.5, 1.0], [4.0, 8.0, 4.5, 1.0]]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"warmup_steps": 7, "decay": "linear"}, "warmup_steps 7 leaves nothing to decay: steps is 7"),
        (
            {"warmup_steps": 5, "decay": "cosine", "decay_steps": 5},
            "warmup_steps 5 leaves nothing to decay: decay_steps is 5",
        ),
        ({"warmup_steps": -1}, "greater than or equal to 0"),
        ({"warmup_steps": 1.5}, "integer"),
        ({"decay": "exponential"}, "'linear', 'cosine' or 'constant'"),
        ({"decay": "constant", "min_lr": 1}, "min_lr goes with decay: linear or cosine"),
        ({"warmup_steps": 1, "decay_steps": 5}, "decay_steps goes with decay"),
        ({"final_fraction": 0.1}, "final_fraction goes with decay"),
        ({"decay": "linear", "min_lr": 1, "final_fraction": 0.1}, "both say where the decay ends"),
        ({"decay": "linear", "final_fraction": 1.1}, "less than or equal to 1"),
        ({"decay": "linear", "min_lr": 9}, "min_lr 9 is more than lr 8"),
        (
            {
                "decay": "linear",
                "min_lr": 1,
                "groups": [{"name": "n", "kinds": ["norms"], "lr": 0.5}, "rest"],
            },
            "min_lr 1 is more than lr 0.5 of group 'n'",
        ),
        ({"warmup_steps": 1, "schedule": {"name": "StepLR", "step_size": 1}}, "give one"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        settings(**keys)


def test_a_schedule_is_made_of_others() -> None:
    """A third, then the whole of it from the second on; halved with each from the fourth on."""
    recipe = {
        "name": "SequentialLR",
        "schedulers": [
            {"name": "ConstantLR", "factor": 0.25, "total_iters": 2},
            {"name": "ExponentialLR", "gamma": 0.5},
        ],
        "milestones": [3],
    }
    assert rates(settings(schedule=recipe), 6) == [2, 2, 8, 8, 4, 2]


def test_schedules_are_chained_and_nested() -> None:
    recipe = {
        "name": "ChainedScheduler",
        "schedulers": [
            {"name": "MultiplicativeLR", "lr_lambda": f"{__name__}:nine_tenths"},
            {"name": "StepLR", "step_size": 2, "gamma": 0.5},
        ],
    }
    assert rates(settings(schedule=recipe), 4) == pytest.approx([8, 7.2, 3.24, 2.916])


def test_a_function_of_the_users_is_called_by_its_import_path() -> None:
    recipe = {"name": "LambdaLR", "lr_lambda": f"{__name__}:halved_every_second"}
    assert rates(settings(schedule=recipe), 5) == [8, 8, 4, 4, 2]


GROUPS = ["no_decay", {"name": "heads", "kinds": ["matrices"], "lr": 2.0}, "rest"]
FUNCTIONS = [f"{__name__}:{name}" for name in ("halved_every_second", "nine_tenths", "one")]


def test_each_group_has_its_own_of_a_list_of_functions_as_with_torch() -> None:
    train = settings(groups=GROUPS, schedule={"name": "LambdaLR", "lr_lambda": FUNCTIONS})
    found = [rates(train, 5, group) for group in range(3)]
    assert found == [[8, 8, 4, 4, 2], [1.8] * 5, [8] * 5]
    optimizer = torch.optim.SGD(
        [{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for lr in (8.0, 2.0, 8.0)], lr=8.0
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [halved_every_second, nine_tenths, one])
    for step in range(5):
        assert schedule.get_last_lr() == [own[step] for own in found]
        optimizer.step()
        schedule.step()


def test_lists_in_schedules_that_others_are_made_of_are_by_group_too() -> None:
    parts = [
        {"name": "MultiplicativeLR", "lr_lambda": FUNCTIONS},
        {"name": "StepLR", "step_size": 2, "gamma": 0.5},
    ]
    train = settings(groups=GROUPS, schedule={"name": "ChainedScheduler", "schedulers": parts})
    assert rates(train, 4, 1) == pytest.approx([2, 1.8, 0.81, 0.729])
    assert rates(train, 4, 2) == pytest.approx([8, 8, 4, 4])


def test_numbers_by_group_are_lists_too() -> None:
    keys = {"name": "OneCycleLR", "max_lr": [4.0, 2.0], "total_steps": 5, "cycle_momentum": False}
    train = settings(groups="no_decay", schedule=keys)
    first, second = (rates(train, 5, group) for group in (0, 1))
    assert first == pytest.approx([2 * rate for rate in second])
    assert first[0] == pytest.approx(4.0 / 25)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"groups": GROUPS, "schedule": {"name": "LambdaLR", "lr_lambda": FUNCTIONS[:2]}},
            "schedule: lr_lambda is a list of 2, and there are 3 groups (no_decay, heads, rest): expected an "
            "entry for each",
        ),
        (
            {"schedule": {"name": "LambdaLR", "lr_lambda": FUNCTIONS[:2]}},
            "lr_lambda is a list of 2, and there is one group",
        ),
        (
            {
                "groups": "no_decay",
                "schedule": {
                    "name": "SequentialLR",
                    "milestones": [1],
                    "schedulers": [
                        {"name": "ConstantLR"},
                        {"name": "SequentialLR", "schedulers": [{"name": "OneCycleLR", "max_lr": [1.0]}]},
                    ],
                },
            },
            "max_lr is a list of 1, and there are 2 groups",
        ),
    ],
)
def test_a_list_of_another_length_than_the_groups_is_refused(keys: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        settings(**keys)


def test_a_list_without_groups_has_one_entry() -> None:
    train = settings(schedule={"name": "LambdaLR", "lr_lambda": FUNCTIONS[:1]})
    assert rates(train, 3) == [8, 8, 4]


def test_a_group_goes_on_as_it_was_if_its_own_function_is_the_same() -> None:
    def train(groups: list[str], functions: list[str]) -> TrainSettings:
        return settings(groups=groups, schedule={"name": "LambdaLR", "lr_lambda": functions})

    before = train(["no_decay", "rest"], FUNCTIONS[:2])
    assert same_rate(before, train(["rest", "no_decay"], FUNCTIONS[1::-1]), "rest")
    for now in (train(["rest", "no_decay"], FUNCTIONS[:2]), train(["no_decay", "rest"], FUNCTIONS[::2])):
        assert not same_rate(before, now, "rest")
    assert same_rate(before, train(["no_decay", "rest"], FUNCTIONS[::2]), "no_decay")
    assert not same_rate(settings(), before, "rest")


@pytest.mark.parametrize(
    "keys",
    [
        {"warmup_steps": 2, "decay": "cosine"},
        {"schedule": {"name": "LambdaLR", "lr_lambda": f"{__name__}:halved_every_second"}},
        {
            "schedule": {
                "name": "SequentialLR",
                "schedulers": [
                    {"name": "LinearLR", "total_iters": 3},
                    {"name": "CosineAnnealingLR", "T_max": 4},
                ],
                "milestones": [3],
            }
        },
    ],
)
@pytest.mark.parametrize("done", [1, 3, 5])
def test_a_schedule_goes_on_where_a_saved_one_was(keys: dict[str, object], done: int) -> None:
    train = settings(**keys)
    made = []
    for _ in range(2):
        optimizer = make_optimizer(train.choices[0], [nn.Parameter(torch.ones(2))])
        assert optimizer is not None
        schedule = make_schedule(train, optimizer, None)
        assert schedule is not None
        made.append((optimizer, schedule))
    (first, old), (second, new) = made
    advance(old, done)
    saved = {key: value for key, value in old.state_dict().items() if isinstance(value, int)}
    resume_schedule(new, saved, done)
    second.param_groups[0]["lr"] = first.param_groups[0]["lr"]  # a checkpoint has it
    for _ in range(3):
        advance(old, 1)
        advance(new, 1)
        assert second.param_groups[0]["lr"] == first.param_groups[0]["lr"]


def test_old_files_mean_what_they_meant() -> None:
    """A schedule by name, and none."""
    assert rates(settings(schedule={"name": "StepLR", "step_size": 2, "gamma": 0.5}), 5) == [8, 8, 4, 4, 2]
    assert settings().ramp is None


def settings_with(schedule: dict[str, object]) -> TrainSettings:
    return TrainSettings.model_validate({"optimizer": "SGD", "lr": 0.1, "schedule": schedule})


def test_a_schedule_is_found_by_name_and_moves_the_learning_rate() -> None:
    train = settings_with({"name": "CosineAnnealingLR", "T_max": 2})
    optimizer = make_optimizer(train.choices[0], [nn.Parameter(torch.ones(2))])
    schedule = make_schedule(train, optimizer, None)
    assert optimizer is not None
    assert schedule is not None
    lrs = []
    for _ in range(3):
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert lrs == pytest.approx([0.1, 0.05, 0.0])
    assert make_schedule(train, None, None) is None
    assert make_schedule(TrainSettings(), optimizer, None) is None


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"name": "LambdaLR"}, "lr_lambda: found None, expected the import path of a function"),
        ({"name": "LambdaLR", "lr_lambda": "nix:f"}, "lr_lambda: there is no module 'nix'"),
        ({"name": "LambdaLR", "lr_lambda": "math:factorial", "x": 1}, "does not take .*x"),
        ({"name": "LambdaLR", "lr_lambda": "math:log"}, "math:log failed for update 0: ValueError"),
        ({"name": "LambdaLR", "lr_lambda": "builtins:str"}, "gave '0' for update 0; expected a number"),
        ({"name": "SequentialLR"}, "schedulers: found None, expected a list of schedules"),
        ({"name": "SequentialLR", "schedulers": [{}]}, r"schedulers\[0\]: found {}, expected a `name` in it"),
        (
            {"name": "SequentialLR", "schedulers": [{"name": "StepL", "step_size": 1}], "milestones": []},
            r"schedulers\[0\].name: torch.optim.lr_scheduler has no schedule 'StepL'",
        ),
        (
            {
                "name": "SequentialLR",
                "schedulers": [{"name": "ConstantLR"}, {"name": "ExponentialLR", "gamma": 0.5}],
                "milestones": [1, 2],
            },
            "SequentialLR does not take .*milestones",
        ),
        ({"name": "ReduceLROnPlateau"}, "it asks for a measure of success"),
        ({"name": "CosineAnealingLR"}, "has no schedule 'CosineAnealingLR'"),
        ({"name": "steplr", "step_size": 3}, "Did you mean StepLR"),
        ({"name": "StepLR", "size": 3}, "does not take .*size"),
    ],
)
def test_other_schedules_are_refused_with_what_to_do(schedule: dict[str, object], message: str) -> None:
    train = settings_with(schedule)
    with pytest.raises(WorkloadError) as caught:
        make_schedule(train, make_optimizer(train.choices[0], [nn.Parameter(torch.ones(2))]), None)
    assert re.search(message, str(caught.value))
