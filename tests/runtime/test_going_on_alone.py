"""Checkpoints of one worker, in this process: all that moves in training goes on, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from case_runs import Case, captured, prepare
from safetensors.torch import load_file

from spindle_cli.checkpoint_files import checkpoint_folder, find_checkpoint
from spindle_cli.environment import WorkerEnvironment
from spindle_cli.errors import InputError, StoppedError
from spindle_cli.request import RunRequest, stop_path
from spindle_cli.run_files import model_path
from spindle_cli.runtime.worker import train_plan

ALONE = WorkerEnvironment(0, 0, 1, 1, "127.0.0.1", 0)
STEPS = 6
# The learning rate and a momentum move; one tensor of the state is not in the parameters' dtype.
TRAIN = {
    "optimizer": "NAdam",
    "schedule": {"name": "OneCycleLR", "max_lr": 0.05, "total_steps": 8},
    "clip_norm": 1.0,
}


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """A world of one rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run(
    folder: Path, steps: int = STEPS, train: Mapping[str, object] = TRAIN, **changes: object
) -> RunRequest:
    """Train the moving workload in a folder, which may hold a run that is gone on with."""
    case = Case("moving", (0,), function="build_moving", train=train, steps=steps, checkpoint_every=1)
    if folder.exists():
        request = RunRequest.read(folder / "request.json").model_copy(update={"steps": steps, **changes})
    else:
        request = prepare(case, 1, folder).model_copy(update=changes)
    train_plan(request, ALONE, torch.device("cpu"))
    return request


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was not disturbed, with the last three checkpoints."""
    folder = tmp_path_factory.mktemp("alone") / "whole"
    run(folder)
    return folder


def test_chance_buffers_schedule_and_optimizer_go_on_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    run(folder, steps=3)
    run(folder, resume=True)
    expected = load_file(checkpoint_folder(whole, STEPS) / "rank-00000.safetensors")
    found = load_file(checkpoint_folder(folder, STEPS) / "rank-00000.safetensors")
    assert {key.split(".")[0] for key in expected} == {"model", "optimizer", "buffers", "random"}
    assert {key for key in expected if not torch.equal(expected[key], found[key])} == set()
    assert expected.keys() == found.keys()
    before, after = (find_checkpoint(each).checkpoint for each in (whole, folder))
    assert (before.hyperparameters, before.schedule) == (after.hyperparameters, after.schedule)


def test_masters_go_on_bit_for_bit(tmp_path: Path) -> None:
    """The parameters are in bfloat16, and the rounded masters."""
    train = {**TRAIN, "precision": "bf16"}
    run(tmp_path / "whole", train=train, dtype=None)
    run(tmp_path / "parts", steps=3, train=train, dtype=None)
    run(tmp_path / "parts", resume=True, dtype=None)
    expected, found = (
        load_file(checkpoint_folder(tmp_path / name, STEPS) / "rank-00000.safetensors")
        for name in ("whole", "parts")
    )
    assert {key for key in expected if not torch.equal(expected[key], found[key])} == set()
    masters = {key: tensor for key, tensor in expected.items() if key.endswith(".master")}
    assert len(masters) > 4
    for key, master in masters.items():
        name = key.removeprefix("optimizer.state.").removesuffix(".master")
        parameter = expected[f"model.{name}"]
        assert (parameter.dtype, master.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(parameter, master.bfloat16())
        assert not torch.equal(parameter.float(), master)


def test_only_the_last_checkpoints_are_kept(whole: Path) -> None:
    kept = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert kept == ["step-000004", "step-000005", "step-000006"]


def test_a_run_asked_to_stop_saves_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "stopped"
    stop_path(tmp_path / "elsewhere").parent.mkdir(parents=True)
    stop_path(tmp_path / "elsewhere").touch()
    with pytest.raises(StoppedError, match="after step 1; a checkpoint is saved"):
        run(folder, run_dir=tmp_path / "elsewhere")
    assert find_checkpoint(tmp_path / "elsewhere").checkpoint.step == 1


def test_a_checkpoint_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    with pytest.raises(InputError, match=r"the checkpoint cannot be saved: .*checkpoints"):
        run(tmp_path / "settings", run_dir=tmp_path / "run")


def test_going_on_with_other_settings_or_no_steps_left_is_refused(whole: Path) -> None:
    with pytest.raises(InputError, match="has done 6 steps already"):
        run(whole, resume=True)
    source = whole / "workload.yaml"
    before = source.read_text()
    source.write_text(before.replace("clip_norm: 1.0", "clip_norm: 2.0"))
    with pytest.raises(InputError, match=r"train.clip_norm = 1.0, but the workload now says 2.0"):
        run(whole, steps=8, resume=True)
    source.write_text(before)


def test_a_captured_run_leaves_its_model(whole: Path) -> None:
    final = captured(whole, "final", 1)[0]
    saved = load_file(model_path(whole, STEPS))
    assert saved.keys() == final.keys()
