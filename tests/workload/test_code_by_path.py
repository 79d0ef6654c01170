"""Code that train settings name by a file's path, as the workload file names its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from helpers.toy_plan import HERE
from spindle_cli.errors import WorkloadError
from spindle_cli.training.optimizing.groups import optimizer_groups
from spindle_cli.training.optimizing.optimizer import imported, make_optimizer, optimizer_class
from spindle_cli.training.optimizing.schedules import TaskWeights, make_schedule
from spindle_cli.verify.stepping.update import named
from spindle_cli.workload.building.load import LoadedWorkload, load

CODE = """
import torch

class Slow(torch.optim.SGD):
    pass

def is_head(name, parameter):
    return ".head." in name

def weights(step):
    return {"small": 2.0 + step}

def halving(update):
    return 0.5 ** update
"""
TRAIN = {
    "groups": [
        {"name": "heads", "function": "parts/code.py:is_head", "optimizer": "./parts/code.py:Slow"},
        "rest",
    ],
    "task_weights": "parts/code.py:weights",
    "schedule": {"name": "LambdaLR", "lr_lambda": "parts/code.py:halving"},
}


@pytest.fixture(autouse=True)
def own_sys_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workloads make their folders importable."""
    with monkeypatch.context() as patch:
        import sys

        patch.setattr(sys, "path", list(sys.path))
        yield


def workload(folder: Path, train: dict[str, object]) -> LoadedWorkload:
    """Its model is elsewhere: only the workload file and the code are in the folder."""
    (folder / "parts").mkdir(parents=True)
    (folder / "parts" / "code.py").write_text(CODE)
    source = folder / "workload.yaml"
    content = {"schema": "spindle.workload/1", "model": f"{HERE / 'toy_workload.py'}:build", "train": train}
    source.write_text(yaml.safe_dump(content))
    return load(str(source))


def test_paths_start_from_the_workload_files_folder(tmp_path: Path) -> None:
    loaded = workload(tmp_path, TRAIN)
    groups = optimizer_groups(loaded.train, {task.name: task.module for task in loaded.workload.tasks})
    assert groups.names()["heads"] == tuple(
        f"{task}.head.classify.{kind}" for task in ("large", "small") for kind in ("weight", "bias")
    )
    assert optimizer_class(groups.choices[0]).__name__ == "Slow"
    assert TaskWeights(loaded.train, loaded.workload.tasks).at(3) == {"large": 1.0, "small": 5.0}
    optimizer = make_optimizer(groups.choices[0], [nn.Parameter(torch.zeros(2, 2))])
    assert optimizer is not None
    schedule = make_schedule(loaded.train, optimizer, groups.choices[0].name)
    assert schedule is not None
    assert schedule.get_last_lr() == [1e-3]
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [5e-4]
    # The plain run finds the same.
    assert named("./parts/code.py:Slow") is imported("parts/code.py:Slow", "train.optimizer")


def test_which_of_two_files_is_meant_is_not_guessed(tmp_path: Path) -> None:
    workload(tmp_path / "first", TRAIN)
    workload(tmp_path / "second", TRAIN)
    with pytest.raises(WorkloadError, match=r"parts/code\.py' may be .*first.* or .*second") as caught:
        imported("parts/code.py:weights", "train.task_weights")
    assert caught.value.hint is not None and "whole path" in caught.value.hint
    whole = tmp_path / "second" / "parts" / "code.py"
    assert imported(f"{whole}:weights", "train.task_weights")(1) == {"small": 3.0}
    shutil.rmtree(tmp_path / "second")
    assert imported("parts/code.py:weights", "train.task_weights")(1) == {"small": 3.0}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("absent.py:weights", "train.task_weights: there is no file 'absent.py'"),
        ("parts/code.py:wieghts", "train.task_weights: 'parts/code.py' has no class or function 'wieghts'"),
        ("parts/code:weights", "train.task_weights"),
        ("parts/code.py", "train.task_weights"),
    ],
)
def test_what_is_not_there_is_said(path: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=said) as caught:
        loaded = workload(tmp_path, {"task_weights": path})
        TaskWeights(loaded.train, loaded.workload.tasks)
    assert getattr(caught.value, "exit_code", None) == 3
