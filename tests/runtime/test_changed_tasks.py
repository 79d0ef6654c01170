"""A run begun from another one, of other tasks or settings, trains what plain PyTorch would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from case_runs import Case, captured
from plain_loop import PlainTraining
from runtime_cases import CHANGED, SAVED
from test_training_is_exact import close
from torch import nn

from spindle_cli.files.run_files import read_metrics

pytestmark = pytest.mark.processes

BEFORE = 2  # steps of the run that is begun from


def take_over(old: PlainTraining, new: PlainTraining) -> set[int]:
    """Parameters and optimizer state of the tasks in both, by plain PyTorch alone; ids of what is new."""
    tasks = {task.name: task.module for task in old.tasks}
    state = {}
    for task in new.tasks:
        if task.name in tasks:
            task.module.load_state_dict(tasks[task.name].state_dict())
            before = dict(tasks[task.name].named_parameters())
            state.update({p: old.optimizer.state[before[name]] for name, p in task.module.named_parameters()})
    for parameter, values in state.items():
        if values:
            new.optimizer.state[parameter] = {key: value.clone() for key, value in values.items()}
    return {id(p) for p in new.parameters.values()} - {id(p) for p in state}


def by_hand(
    case: Case, folder: Path
) -> tuple[PlainTraining, list[dict[str, float]], dict[str, nn.Parameter]]:
    """The case in one process: train the run before, take over, train on; and the parameters that are new."""
    old = PlainTraining(str(folder.with_name(str(case.begins_from)) / "workload.yaml"), torch.float64)
    for step in range(BEFORE):
        old.step(step)
    new = PlainTraining(str(folder / "workload.yaml"), torch.float64)
    fresh = take_over(old, new)
    started = {name: p.detach().clone() for name, p in new.parameters.items() if id(p) in fresh}
    losses = []
    for step in range(BEFORE, case.steps):
        if new.train.schedule is not None:  # as if it had been in force from the first step
            new.optimizer.param_groups[0]["lr"] = new.train.lr * 0.5**step
        losses.append(new.step(step)[0])
    return new, losses, started


@pytest.mark.parametrize("case", CHANGED, ids=lambda case: case.name)
def test_what_both_have_goes_on_and_what_is_new_begins(case: Case, four_workers: Path) -> None:
    folder = four_workers / case.name
    plain, losses, fresh = by_hand(case, folder)
    metrics = list(read_metrics(folder))
    assert [line.step for line in metrics] == [3, 4]
    for line, expected in zip(metrics, losses, strict=True):
        assert line.task_losses == pytest.approx(expected, rel=1e-10)
    final = plain.values
    for tensors in captured(folder, "final", 4):
        for name, tensor in tensors.items():
            assert close(tensor, final[name], 1e-10), name
    begun = {name: t for tensors in captured(folder, "initial", 4) for name, t in tensors.items()}
    assert (case.name == "task-added") == bool(fresh)
    for name, value in fresh.items():
        assert torch.equal(begun[name], value), name


def test_the_run_before_is_left_as_it_was(four_workers: Path) -> None:
    for case in CHANGED:
        before = four_workers / str(case.begins_from)
        assert [line.step for line in read_metrics(before)] == [1, 2]
        assert not (four_workers / case.name / "checkpoints" / "step-000002").exists()
    assert (four_workers / SAVED.name / "checkpoints").is_dir()
