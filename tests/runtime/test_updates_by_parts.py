"""Workers that update each part of the parameters when it is summed train what they train with one update."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from case_runs import ADAMW, SGD, STEPS, Case, captured, dtype_of, run_cases
from plain_loop import train_plainly
from runtime_cases import APART
from test_training_is_exact import check_against

from spindle_cli.files.runs.records import TIMELINE_FILE, MeasuredTimeline
from spindle_cli.workload.file import TrainSettings

WHOLE = {"shard_optimizer": False}
HALVING = {"schedule": {"name": "StepLR", "step_size": 1, "gamma": 0.5}}
MOMENTUM = {**SGD, "optimizer_args": {"momentum": 0.9, "weight_decay": 0.1}}
GROUPED = {
    **ADAMW,
    "groups": [
        "no_decay",
        {"name": "towers", "modules": ["Linear"], "kinds": ["matrices"], "optimizer": "SGD", "lr": 3e-2},
        {"name": "others", "rest": True, "optimizer": "RMSprop", "lr": 1e-3},
    ],
}
SAMPLED = {**MOMENTUM, "accumulate": 2, "sampling": {"every": {"classify": 2, "caption": 3}}}
SETS = {"pairs": None, "pairs+classify": None, "pairs+caption": None}
CASES = (
    Case("accumulated", (0, 1), train={**ADAMW, **WHOLE, **HALVING, "accumulate": 2}),
    Case(
        "apart", APART, args={"frozen_tower": True}, train={**ADAMW, **WHOLE, "ema": {"decay": 0.5}}, steps=2
    ),
    Case("grouped", APART, train={**GROUPED, **WHOLE, **HALVING}, apart=2),
    Case("sampled", APART, train={**SAMPLED, **WHOLE}, sets=SETS),
    Case("bf16", (0, 1), train={**ADAMW, **WHOLE, "precision": "bf16"}, dtype=None, steps=2),
    Case("rows", (0, 1), toys="../helpers/rows_toy", train={**MOMENTUM, **WHOLE}, gathers=True, steps=2),
)
# Cut short after two steps, and gone on from there.
SAVED = replace(CASES[0], name="saved", steps=2, checkpoint_every=1, by_parts=True)
GONE_ON = replace(CASES[0], name="gone-on", goes_on_with=SAVED.name, by_parts=True)
# Where an update may not come before all sums, whatever the plan says.
SHARED = Case("shared", (0, 1), train=ADAMW, by_parts=True, steps=2)
CLIPPED = Case("clipped", APART, train={**ADAMW, **WHOLE, "clip_norm": 0.5}, by_parts=True, steps=2)
OWN_CLASS = Case(
    "own-class",
    (0, 1),
    train={**ADAMW, **WHOLE, "optimizer": "torch.optim:AdamW"},
    by_parts=True,
    steps=2,
)


def by_parts(case: Case) -> Case:
    return replace(case, name=f"{case.name}-by-parts", by_parts=True)


@pytest.fixture(scope="module")
def workers(forker: socket.socket, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    both = [each for case in CASES for each in (case, by_parts(case))]
    run_cases(
        forker, [*both, SAVED, GONE_ON, SHARED, CLIPPED, OWN_CLASS], 2, folder, fails=False, fine_sums=True
    )
    return folder


def updates_of(folder: Path) -> list[list[int]]:
    """Of the last steps of a run, how often each device is at an update, with what it takes from its masters,
    and what it does behind the update.
    """
    timeline = MeasuredTimeline.read(folder / TIMELINE_FILE)
    return [
        [sum(span.kind == "optimizer" for span in spans) for spans in step.devices] for step in timeline.steps
    ]


def assert_same(folder: Path, other: Path) -> None:
    for stage in ("gradients", "final"):
        for expected, found in zip(captured(folder, stage, 2), captured(other, stage, 2), strict=True):
            assert expected.keys() == found.keys()
            for name, tensor in expected.items():
                assert torch.equal(found[name], tensor), f"{stage}: {name}"


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bit_for_bit_what_one_update_of_all_makes(case: Case, workers: Path) -> None:
    assert_same(workers / case.name, workers / by_parts(case).name)


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parts_are_updated_apart(case: Case, workers: Path) -> None:
    once, apart = updates_of(workers / case.name), updates_of(workers / by_parts(case).name)
    at_ends = [step for step, devices in enumerate(once) if any(devices)]
    assert at_ends
    for step in at_ends:
        assert sum(apart[step]) > sum(once[step])


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_sum_is_waited_for_ahead_of_the_first_part(case: Case, workers: Path) -> None:
    """Nor what was sent: the losses alone are."""
    timeline = MeasuredTimeline.read(workers / by_parts(case).name / TIMELINE_FILE)
    for spans in (spans for step in timeline.steps for spans in step.devices):
        kinds = [(span.kind, span.cause) for span in spans]
        if ("optimizer", None) not in kinds:
            continue  # of a batch that ends no step
        before = kinds[: kinds.index(("optimizer", None))]
        told = before.index(("wait", "losses"))
        last = max(place for place, kind in enumerate(before) if kind == ("backward", None))
        assert ("wait", "sum") not in before[last:told]


@pytest.mark.processes
@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=lambda case: case.name)
def test_it_is_what_a_plain_loop_trains(case: Case, workers: Path) -> None:
    folder = workers / by_parts(case).name
    plain = train_plainly(str(folder / "workload.yaml"), STEPS, dtype_of(case))
    check_against(plain, by_parts(case), 2, folder)


@pytest.mark.processes
def test_it_goes_on_from_a_checkpoint_bit_for_bit(workers: Path) -> None:
    for expected, found in zip(
        captured(workers / CASES[0].name, "final", 2),
        captured(workers / GONE_ON.name, "final", 2),
        strict=True,
    ):
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


@pytest.mark.processes
@pytest.mark.parametrize("case", [SHARED, CLIPPED, OWN_CLASS], ids=lambda case: case.name)
def test_there_is_one_update_where_all_gradients_are_awaited(case: Case, workers: Path) -> None:
    once = updates_of(workers / CASES[0].name)[-1]
    assert all(each <= most + 1 for each, most in zip(updates_of(workers / case.name)[-1], once, strict=True))


IMPORTED = {"optimizer": "torch.optim:AdamW"}


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({}, True),
        ({"optimizer": "SGD", "ema": {"decay": 0.5}, "accumulate": 3, "precision": "bf16"}, True),
        ({"clip_norm": 1.0}, False),
        ({"precision": "fp16-autocast"}, False),
        ({"shard_optimizer": True}, False),
        ({"optimizer": "Adafactor"}, False),
        (IMPORTED, False),
        ({**IMPORTED, "contract": "element-wise"}, False),
        ({"local_sgd": {"islands": 2, "every": 4}}, False),
        ({"groups": [{"name": "a", "parameters": ["x"], "optimizer": "Muon"}, "rest"]}, False),
        ({"groups": [{"name": "a", "parameters": ["x"], "optimizer": "SGD"}, "rest"]}, True),
    ],
)
def test_which_settings_let_parts_be_updated(settings: Mapping[str, object], allowed: bool) -> None:
    assert TrainSettings.model_validate({**WHOLE, **settings}).updates_by_parts is allowed
