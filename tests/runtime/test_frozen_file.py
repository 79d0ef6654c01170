"""Weights that a run does not train: in one file, which all of its checkpoints name by its checksum."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import eval_toys
import pytest
import torch
from alone import run_case, world_of_one
from case_runs import ADAMW, Case
from safetensors.torch import load_file
from torch import nn

from spindle_cli.checkpoint.files import checkpoint_folder, find_checkpoint
from spindle_cli.checkpoint.index import checksum
from spindle_cli.errors import InputError
from spindle_cli.export.run import export_run
from spindle_cli.files.run_files import model_path
from spindle_cli.workload.building.load import load
from spindle_cli.workload.types import Task, Workload

STEPS = 3
CASE = Case(
    "frozen",
    (0,),
    args={"frozen_tower": True},
    train=ADAMW,
    steps=STEPS,
    checkpoint_every=1,
    dtype=None,
)
THAWED = replace(CASE, args={"frozen_tower": False})


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with world_of_one():
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps."""
    folder = tmp_path_factory.mktemp("frozen") / "run"
    with world_of_one():
        run_case(CASE, folder, capture_dir=None)
    return folder


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def frozen_file(run: Path) -> Path:
    return run / "checkpoints" / "frozen.safetensors"


def plain(run: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Initial values of the parameters that are not trained, and of those that are, by their saved names."""
    found: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
    seen: set[int] = set()
    for task in load(str(run / "workload.yaml")).workload.tasks:
        for name, parameter in task.module.named_parameters():
            if id(parameter) not in seen:
                found[parameter.requires_grad][f"model.{task.name}.{name}"] = parameter.detach()
            seen.add(id(parameter))
    return found


def test_they_are_in_no_shard_and_have_no_state_and_stay_as_they_were(trained: Path) -> None:
    frozen, moving = plain(trained)
    assert frozen and moving
    saved = load_file(frozen_file(trained))
    assert set(saved) <= set(frozen)
    assert set(frozen) - set(saved) <= {name for name in frozen if "unused" in name}
    assert all(torch.equal(value, frozen[name]) for name, value in saved.items())
    for step in (1, 2, 3):
        shard = load_file(checkpoint_folder(trained, step) / "rank-00000.safetensors")
        models = {name for name in shard if name.startswith("model.")}
        assert models <= set(moving) and models
        states = {name for name in shard if name.startswith("optimizer.")}
        assert not any(name.removeprefix("model.") in state for name in saved for state in states)
    end = load_file(model_path(trained, STEPS))
    assert {f"model.{name}" for name in end} == models


def test_every_checkpoint_names_the_file_by_its_checksum(trained: Path) -> None:
    for step in (1, 3):
        found = find_checkpoint(trained, step=step, reads_all=True).checkpoint
        assert found.frozen is not None
        assert found.frozen.sha256 == checksum(frozen_file(trained))
        assert set(found.frozen.keys) == set(load_file(frozen_file(trained))) < set(found.tensors)
    summed = ["sha256sum", "-c", "SHA256SUMS"]
    said = subprocess.run(
        summed, cwd=checkpoint_folder(trained, 3), capture_output=True, text=True, check=True
    )
    assert "../frozen.safetensors: OK" in said.stdout


def test_a_run_that_goes_on_writes_no_second_one_and_ends_the_same(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_case(replace(CASE, steps=1), run, capture_dir=None)
    written = frozen_file(run).stat()
    run_case(CASE, run, resume=True, capture_dir=None)
    assert (frozen_file(run).stat().st_mtime_ns, frozen_file(run).stat().st_ino) == (
        written.st_mtime_ns,
        written.st_ino,
    )
    expected, found = (load_file(model_path(folder, STEPS)) for folder in (trained, run))
    assert {name for name in expected if not torch.equal(expected[name], found[name])} == set()
    assert find_checkpoint(run, reads_all=True).checkpoint.frozen is not None


def damaged(run: Path, how: str) -> None:
    path = frozen_file(run)
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[:-4])
    else:
        content[-1] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("missing", "../frozen.safetensors is missing, with the weights that the run does not train"),
        ("cut", "../frozen.safetensors has "),
        ("flipped", "../frozen.safetensors is not what was written: its checksum differs"),
    ],
)
def test_a_damaged_file_is_said_once_for_all_checkpoints(how: str, problem: str, copy: Path) -> None:
    damaged(copy, how)
    with pytest.raises(InputError) as caught:
        find_checkpoint(copy, reads_all=True)
    lines = caught.value.message.splitlines()
    assert lines[0] == f"{copy}: there is no checkpoint to go on from"
    steps = ", ".join(f"step-{step:06d}" for step in (3, 2, 1))
    assert len(lines) == 2 and lines[1].startswith(f"  {steps} cannot be used: {problem}")


def test_another_run_takes_them_over_whether_it_trains_them_or_not(trained: Path, tmp_path: Path) -> None:
    for name, case in (("again", CASE), ("thawed", THAWED)):
        run_case(replace(case, steps=STEPS + 1), tmp_path / name, begin_from=trained, capture_dir=None)
    assert load_file(frozen_file(tmp_path / "again")).keys() == load_file(frozen_file(trained)).keys()
    assert checksum(frozen_file(tmp_path / "again")) == checksum(frozen_file(trained))
    moved = load_file(checkpoint_folder(tmp_path / "thawed", STEPS + 1) / "rank-00000.safetensors")
    before = load_file(frozen_file(trained))
    thawed = [name for name in before if name in moved and name.endswith(".linear.weight")]
    assert thawed and not any(torch.equal(moved[name], before[name]) for name in thawed)


def test_an_export_has_them(trained: Path, tmp_path: Path) -> None:
    frozen, _ = plain(trained)
    export_run(trained, tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name.removeprefix("model.")], value) for name, value in frozen.items())


def test_a_run_that_trains_everything_has_no_such_file(tmp_path: Path) -> None:
    case = Case("moving", (0,), function="build_moving", train=ADAMW, steps=1, checkpoint_every=1, dtype=None)
    run_case(case, tmp_path / "run", capture_dir=None)
    assert not frozen_file(tmp_path / "run").exists()
    assert find_checkpoint(tmp_path / "run").checkpoint.frozen is None


class Codebook(nn.Module):
    """Moves what is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(eval_toys.WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.codes.data.mul_(0.9).add_(x.detach().mean(0) + 1, alpha=0.1)
        return x + self.codes


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.codebook, self.head = eval_toys.Layer(False), Codebook(), eval_toys.Head()

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        x = self.codebook(self.layer(x))
        return nn.functional.cross_entropy(self.head(x), label)


def build_moving() -> Workload:
    data = eval_toys.Items(16, 1)
    return Workload("moving", [Task("t", Quantised(), 4, data)], (eval_toys.Layer, Codebook))


def test_what_an_operator_moves_is_in_every_checkpoint(tmp_path: Path) -> None:
    case = Case(
        "moving",
        (0,),
        "test_frozen_file",
        "build_moving",
        train=ADAMW,
        steps=3,
        checkpoint_every=1,
        dtype=None,
    )
    run_case(case, tmp_path / "run")
    folders = [checkpoint_folder(tmp_path / "run", step) for step in (1, 2, 3)]
    at = [load_file(folder / "rank-00000.safetensors")["model.t.codebook.codes"] for folder in folders]
    assert not torch.equal(at[0], at[1]) and not torch.equal(at[1], at[2])
    assert not frozen_file(tmp_path / "run").exists()
    export_run(tmp_path / "run", tmp_path / "model.safetensors")
    assert torch.equal(load_file(tmp_path / "model.safetensors")["t.codebook.codes"], at[2])
