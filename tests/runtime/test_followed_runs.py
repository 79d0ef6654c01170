"""Averages that follow trained parameters, and bounds on these, are what a plain loop makes by hand, wherever
teacher and student run and whatever devices share out.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from case_runs import ADAMW, Case, captured, run_cases
from following_toys import DECAY, HIGH, LOW, grows
from hand_plans import Placement
from plain_loop import PlainTraining
from safetensors.torch import load_file
from test_training_is_exact import close
from torch import nn

from spindle_cli.checkpoint.files import find_checkpoint
from spindle_cli.checkpoint.tensors import WholeTensors
from spindle_cli.export.run import export_run
from spindle_cli.export.types import ExportOptions
from spindle_cli.files.run_files import read_metrics
from spindle_cli.files.runs.records import read_evaluations
from spindle_cli.files.sharding import Sharding
from spindle_cli.files.tensors import parse_key
from spindle_cli.workload.types import Task

pytestmark = pytest.mark.processes

MOMENTUM = {"optimizer": "SGD", "lr": 0.3, "optimizer_args": {"momentum": 0.9}}
TOYS = "following_toys"
# Teacher and student on devices of their own, on common ones, and partly so.
APART: tuple[Placement, ...] = (
    ("one/teacher", (0, 2), (2, 3)),
    ("one/teacher", (2, 3), (3,)),
    ("one/student", (0, 3), (0, 1)),
    ("two/teacher", (0, 3), (1,)),
    ("two/student", (0, 1), (0,)),
    ("two/student", (1, 3), (3, 2)),
    ("one/loss", (0, 1), (0, 3)),
    ("two/loss", (0, 1), (1,)),
)
# All by one replica group, so that what teacher and student have is shared out as ops use it.
TOGETHER: tuple[Placement, ...] = tuple(
    (f"{task}/{part}", (0, length), (0, 1, 2, 3))
    for part, length in (("teacher", 3), ("student", 3), ("loss", 1))
    for task in ("one", "two")
)
# The teacher in two parts, the student in four and in two; neither everywhere.
SPLIT: tuple[Placement, ...] = (
    ("one/teacher", (0, 3), (2, 3), 2),
    ("one/student", (0, 2), (0, 1, 2, 3), 4),
    ("one/student", (2, 3), (0, 1), 2),
    ("two/teacher", (0, 3), (0, 1)),
    ("two/student", (0, 3), (2, 3), 2),
    ("one/loss", (0, 1), (1,)),
    ("two/loss", (0, 1), (0, 2)),
)
BEFORE = {"when": "before_forward"}
FROM_THE_FIRST = Case("saved", APART, TOYS, args=BEFORE, train=ADAMW, steps=2, checkpoint_every=1)
CASES = (
    Case("apart", APART, TOYS, train=MOMENTUM),
    Case("ahead", APART, TOYS, args=BEFORE, train={**ADAMW, "accumulate": 2}, apart=1, steps=2),
    Case("whole", APART, TOYS, args={"schedule": True}, train={**MOMENTUM, "shard_optimizer": False}),
    Case(
        "by-parts", APART, TOYS, train={**MOMENTUM, "shard_optimizer": False}, by_parts=True, apart=2, steps=2
    ),
    Case("clipped", APART, TOYS, args=BEFORE, train={**MOMENTUM, "clip_norm": 0.2}, steps=2),
    Case("gradients", TOGETHER, TOYS, train=MOMENTUM, sharding=Sharding.GRADIENTS, apart=3, steps=2),
    Case(
        "parameters",
        TOGETHER,
        TOYS,
        args={"schedule": True, **BEFORE},
        train={**ADAMW, "accumulate": 2},
        sharding=Sharding.PARAMETERS,
        weights=(1, 3, 2, 5),
        micro_batches={"one": 2},
        apart=4,
        steps=2,
    ),
    Case("kept", TOGETHER, TOYS, train=MOMENTUM, sharding=Sharding.KEPT, apart=5, steps=2),
    Case("split", SPLIT, TOYS, train=MOMENTUM, steps=2),
    Case("split-ahead", SPLIT, TOYS, args={"schedule": True, **BEFORE}, train=ADAMW, steps=2),
    FROM_THE_FIRST,
    Case("gone-on", APART, TOYS, args=BEFORE, train=ADAMW, goes_on_with="saved"),
    Case(
        "saved-shared-out",
        TOGETHER,
        TOYS,
        train=MOMENTUM,
        steps=2,
        checkpoint_every=1,
        sharding=Sharding.PARAMETERS,
        apart=6,
    ),
    Case("gone-on-split", SPLIT, TOYS, train=MOMENTUM, goes_on_with="saved-shared-out"),
    Case(
        "written",
        tuple(placement for placement in APART if placement[0].startswith("one/")),
        TOYS,
        args={"written": True},
        train={**MOMENTUM, "accumulate": 2},
        steps=2,
    ),
    Case(
        "written-shared-out",
        tuple(placement for placement in TOGETHER if placement[0].startswith("one/")),
        TOYS,
        args={"written": True},
        train={**ADAMW, "eval_every": 1, "accumulate": 2},
        micro_batches={"one": 2},
        sharding=Sharding.PARAMETERS,
        apart=7,
        steps=2,
    ),
    Case("evaluated", APART, TOYS, train={**MOMENTUM, "eval_every": 1}, steps=2),
)


def named(name: str) -> Case:
    """A case by its name."""
    return next(case for case in CASES if case.name == name)


@pytest.fixture(scope="module")
def followed(forker: socket.socket, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("followed")
    run_cases(forker, CASES, 4, folder, fails=False)
    return folder


@dataclass(frozen=True)
class ByHand:
    """What a plain loop makes: losses by step, those of the first task's evaluations behind each step, and
    all parameters at the end.
    """

    losses: list[dict[str, float]]
    evaluations: list[float]
    values: dict[str, torch.Tensor]


def by_hand(case: Case, folder: Path) -> ByHand:
    """A plain loop."""
    training = PlainTraining(str(folder / case.name / "workload.yaml"), torch.float64)
    model = training.tasks[0].module

    @torch.no_grad()
    def follow(step: int) -> None:
        decay = grows(step) if case.args.get("schedule") else DECAY
        for slow, fast in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            slow.mul_(decay).add_(fast, alpha=1 - decay)

    @torch.no_grad()
    def constrain() -> None:
        model.scale.clamp_(LOW, HIGH)
        for parameter in model.student.blocks[1].down.parameters():
            parameter.clamp_(max=HIGH)
        model.prototypes.copy_(nn.functional.normalize(model.prototypes, dim=1))

    losses, evaluations = [], []
    ahead = case.args.get("when") == "before_forward"
    for step in range(3 if case.goes_on_with else case.steps):
        if ahead and not case.args.get("written"):
            follow(step)
        losses.append(training.step(step)[0])
        constrain()
        if not ahead and not case.args.get("written"):
            follow(step)
        evaluations.append(evaluated(training.tasks[0]))
    return ByHand(losses, evaluations, training.values)


@torch.no_grad()
def evaluated(task: Task) -> float:
    """The mean of the losses of a task's evaluation, batch by batch."""
    items, size = [task.eval_dataset[index] for index in range(len(task.eval_dataset))], task.batch_size
    task.module.eval()
    found = [
        task.module(**{name: torch.stack([item[name] for item in batch]).double() for name in batch[0]})
        for batch in (items[first : first + size] for first in range(0, len(items), size))
    ]
    task.module.train()
    return torch.stack(found).mean().item()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_what_a_plain_loop_makes_by_hand(case: Case, followed: Path) -> None:
    expectation = by_hand(case, followed)
    losses, values = expectation.losses, expectation.values
    if case.goes_on_with is None and not any(each.goes_on_with == case.name for each in CASES):
        for line, expected in zip(read_metrics(followed / case.name), losses, strict=True):
            assert line.task_losses == pytest.approx(expected, rel=1e-10)
    held = captured(followed / case.name, "final", 4)
    seen = set()
    for rank, tensors in enumerate(held):
        for key, tensor in tensors.items():
            name, part = parse_key(key)
            expected = values[name]
            if part is not None:
                expected = expected.narrow(part.dim, part.first, part.last - part.first)
            assert close(tensor, expected, 1e-10), f"{case.name}: {key} on rank {rank}"
            seen.add(name)
    assert seen == set(values)


def test_the_bounds_are_reached_and_the_teacher_has_moved(followed: Path) -> None:
    values = by_hand(CASES[0], followed).values
    assert values["one.scale"].item() in (LOW, HIGH)
    assert (values["one.student.blocks.1.down.weight"] == HIGH).sum() > 3
    initial = captured(followed / "apart", "initial", 4)[3]
    for name in ("mix", "spare", "blocks.0.up.bias"):  # the others follow what stays as it is
        assert not torch.allclose(initial[f"one.teacher.{name}"], values[f"one.teacher.{name}"], atol=1e-3)


def test_a_checkpoint_has_the_teacher_as_it_was_moved(followed: Path) -> None:
    found = find_checkpoint(followed / "saved-shared-out", step=2)
    values = by_hand(named("saved-shared-out"), followed).values
    with WholeTensors(found.folder, found.checkpoint) as saved:
        for name in ("one.teacher.mix", "one.teacher.blocks.0.up.weight"):
            assert close(saved.read(f"model.{name}"), values[name], 1e-10)


def test_a_run_goes_on_with_the_teacher_that_it_had(followed: Path) -> None:
    losses = by_hand(named("gone-on"), followed).losses
    assert [line.step for line in read_metrics(followed / "saved")] == [1, 2, 3]
    for line, expected in zip(read_metrics(followed / "saved"), losses, strict=True):
        assert line.task_losses == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("name", ["evaluated", "written-shared-out"])
def test_an_evaluation_has_the_teacher_as_the_step_before_has_left_it(name: str, followed: Path) -> None:
    expected = by_hand(named(name), followed).evaluations
    found = [each.loss for each in read_evaluations(followed / name)]
    assert found == pytest.approx(expected, rel=1e-10)


def test_an_export_has_the_teacher(followed: Path, tmp_path: Path) -> None:
    export_run(followed / "saved", tmp_path / "model", ExportOptions())
    exported = load_file(tmp_path / "model")
    values = by_hand(named("saved"), followed).values  # "gone-on" saves no checkpoint
    for name in ("one.teacher.mix", "one.teacher.spare", "one.teacher.blocks.0.up.bias", "one.prototypes"):
        assert close(exported[name].double(), values[name], 1e-6), name
