"""`spindle launch --from`: a run that begins with what another one has trained, and what is refused."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.cli import Ended, run_spindle
from helpers.toy_plan import write_toy
from spindle_cli.checkpoint.files import find_checkpoint
from spindle_cli.files.run_files import newest_model, read_metrics

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("ready_pythons")]


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps on the tasks large and small, which share all but their heads."""
    folder = tmp_path_factory.mktemp("before")
    write_toy(folder, steps=2)
    with contextlib.chdir(folder):
        ended = run_spindle("launch", "plan.yaml")
    assert ended.code == 0, ended.err
    return folder / "runs" / "toy-1"


def launch_from(before: Path, folder: Path, *options: object, **toy: object) -> Ended:
    write_toy(folder, **{"steps": 4, **toy})  # type: ignore[arg-type]
    with contextlib.chdir(folder):
        return run_spindle("launch", "plan.yaml", *(options or ("--from", before)))


def test_a_task_ends_and_what_it_shared_goes_on(before: Path, tmp_path: Path) -> None:
    files = {path: path.read_bytes() for path in before.rglob("*") if path.is_file()}
    ended = launch_from(before, tmp_path, ended="large", train={"lr": 2e-3})
    assert ended.code == 0, ended.err
    folder = find_checkpoint(before).folder
    said = f"""beginning from {folder}, after step 2
  kept, with optimizer state: 18 parameters and buffers, 16 of them saved under another task's name
  left out: 2 parameters and buffers of task large
  task large has ended
  train.lr: 0.001 -> 0.002"""
    assert said in ended.err
    run_dir = tmp_path / "runs" / "toy-1"
    assert [line.step for line in read_metrics(run_dir)] == [3, 4]
    assert files == {path: path.read_bytes() for path in before.rglob("*") if path.is_file()}
    old, new = load_file(newest_model(before)), load_file(newest_model(run_dir))
    assert set(new) == {name.replace("large.", "small.") for name in old if not name.startswith("large.head")}
    # Two steps of Adam move an element by no more than twice the learning rate (and weight decay).
    moved = [
        (new[name.replace("large.", "small.")] - old[name]).abs().max() for name in old if "blocks" in name
    ]
    assert 0 < torch.stack(moved).max() < 5e-3


@pytest.mark.parametrize(
    ("toy", "said"),
    [
        ({"train": {"optimizer": "SGD"}}, "train.optimizer = 'AdamW', but the workload now says 'SGD'"),
        ({"train": {"optimizer_args": {"amsgrad": True}}}, "AdamW keeps max_exp_avg_sq of each parameter"),
        (
            {"classes": 5},
            "parameter large.head.classify.weight has shape (4, 16); the workload's has (5, 16)",
        ),
        ({"steps": 2}, "the run has done 2 steps already"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_what_cannot_be_taken_over_is_refused(
    before: Path, tmp_path: Path, toy: dict[str, object], said: str
) -> None:
    ended = launch_from(before, tmp_path, **toy)
    assert (ended.code, "Traceback" in ended.err) == (3, False)
    assert said in ended.err


def test_a_run_is_not_resumed_with_other_tasks(before: Path, tmp_path: Path) -> None:
    ended = launch_from(before, tmp_path, "--resume", "--run-dir", before, ended="large")
    assert ended.code == 3
    assert "the run has other tasks than the plan" in ended.err
    assert "--from" in ended.err


def test_one_of_a_run_s_checkpoints_may_be_named(before: Path, tmp_path: Path) -> None:
    options = ("--from", find_checkpoint(before).folder, "--dry-run", "--json")
    ended = launch_from(before, tmp_path, *options)
    assert ended.code == 0, ended.err
    assert f'"begin_from": "{before}"' in ended.out
    assert '"begin_step": 2' in ended.out
