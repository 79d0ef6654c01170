"""Runs of islands: what is refused, what is said, and that they go on between outer steps as if unbroken."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from helpers.cli import run_spindle
from helpers.island_plans import write_islands
from helpers.toy_plan import write_toy
from spindle_cli.checkpoint.files import find_checkpoint
from spindle_cli.cli import launch_command, output
from spindle_cli.errors import InputError
from spindle_cli.export.run import export_run
from spindle_cli.files.run_files import read_metrics
from spindle_cli.launch import run
from spindle_cli.launch.build import build_launch, going_on
from spindle_cli.launch.checks import find_workload
from spindle_cli.launch.run import samples_per_step
from spindle_cli.launch.run_dir import hand_on, prepare_run_dir
from spindle_cli.launch.start_point import find_start
from spindle_cli.launch.starting.network import whole_cluster_here
from spindle_cli.launch.starting.process import run_launch
from spindle_cli.launch.types import Launch, LaunchOptions
from spindle_cli.plan.file import read_plan
from spindle_cli.profile.types import LocalSgd

ASKED = LocalSgd(islands=2, every=2)
NODE = ("--node-rank", "0", "--master", "127.0.0.1:29599")


def launch_of(folder: Path, run_dir: Path, steps: int, **options: object) -> Launch:
    """Of all islands' workers on this machine, saving after every step."""
    plan = read_plan(folder / "plan.yaml")
    share = whole_cluster_here(plan.whole_cluster)
    asked = LaunchOptions(steps=steps, checkpoint_every=1, keep=2, timeout_s=60, **options)  # type: ignore[arg-type]
    return build_launch(plan, folder / "plan.yaml", str(folder / "toy.yaml"), run_dir, share, asked)


def train(launch: Launch) -> None:
    prepare_run_dir(launch.run_dir)
    folder = launch.request.plan.parent
    found = find_workload(read_plan(launch.request.plan), launch.request.plan, str(folder / "toy.yaml"))
    ending = run_launch(hand_on(launch, found.memo), lambda: None)
    assert ending.code == 0, "".join(log.read_text() for log in launch.run_dir.glob("workers/*.log"))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, ready_pythons: None) -> Path:
    """A folder with a run of four steps, of which the newest two checkpoints are there, and one that has
    gone on from the third.
    """
    folder = tmp_path_factory.mktemp("islands")
    write_islands(
        folder, ASKED, {"optimizer": "AdamW", "lr": 1e-2, "schedule": {"name": "StepLR", "step_size": 1}}
    )
    train(launch_of(folder, folder / "run", 4))
    shutil.copytree(folder / "run", folder / "again")
    for lost in ("checkpoints/step-000004", "islands/1/checkpoints/step-000004"):
        shutil.rmtree(folder / "again" / lost)
    train(going_on(launch_of(folder, folder / "again", 4), 3))
    return folder


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))


@pytest.mark.processes
def test_a_run_goes_on_between_outer_steps_bit_for_bit(ran: Path) -> None:
    """With optimizer state, the common point and the outer momentum, on both islands."""
    compared = 0
    for island in ("", "islands/1"):
        folders = [ran / run / island / "checkpoints" / "step-000004" for run in ("run", "again")]
        for path in folders[0].glob("rank-*.safetensors"):
            first, second = load_file(path), load_file(folders[1] / path.name)
            assert first.keys() == second.keys()
            assert any(key.startswith("optimizer.state.") and key.endswith("outer_momentum") for key in first)
            for key, tensor in first.items():
                assert torch.equal(tensor, second[key]), (island, key)
                compared += 1
    assert compared > 50


@pytest.mark.processes
def test_islands_draw_for_themselves_and_the_first_saves_last(ran: Path) -> None:
    folders = [ran / "run" / island / "checkpoints" / "step-000004" for island in ("", "islands/1")]
    first, second = (load_file(folder / "rank-00000.safetensors") for folder in folders)
    assert not torch.equal(first["random.cpu.0"], second["random.cpu.0"])
    for step in (3, 4):
        written = [
            (folder.with_name(f"step-{step:06}") / "rank-00000.safetensors").stat().st_mtime_ns
            for folder in folders
        ]
        assert written[0] > written[1]


@pytest.mark.processes
def test_islands_are_alike_behind_an_outer_step_alone(ran: Path) -> None:
    for step, alike in ((3, False), (4, True)):
        folders = [ran / "run" / island / "checkpoints" / f"step-{step:06}" for island in ("", "islands/1")]
        both = [
            {
                key: tensor
                for path in sorted(folder.glob("rank-*.safetensors"))
                for key, tensor in load_file(path).items()
                if key.startswith("model.")
            }
            for folder in folders
        ]
        assert all(torch.equal(tensor, both[1][key]) for key, tensor in both[0].items()) is alike


@pytest.mark.processes
def test_the_first_islands_files_are_the_runs(ran: Path) -> None:
    run = ran / "run"
    assert [line.step for line in read_metrics(run)] == [1, 2, 3, 4]
    assert all(line.samples_per_s * line.iteration_s == pytest.approx(12) for line in read_metrics(run))
    assert [line.loss for line in read_metrics(run)] == [
        line.loss for line in read_metrics(run / "islands/1")
    ]
    assert checkpoints(run) == ["step-000003", "step-000004"]
    assert checkpoints(run / "islands" / "1") == ["step-000002", "step-000003", "step-000004"]
    assert sorted(path.name for path in (run / "workers").glob("*.journal")) == [
        f"rank-{rank:05}.journal" for rank in range(4)
    ]


@pytest.mark.processes
def test_the_common_point_is_exported_between_outer_steps(ran: Path, tmp_path: Path) -> None:
    """After step 3 that is the one of step 2, which the islands have left since."""
    inside = tmp_path / "run"
    shutil.copytree(ran / "run", inside)
    shutil.rmtree(inside / "checkpoints" / "step-000004")
    export_run(inside, tmp_path / "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    folder = ran / "run" / "islands" / "1" / "checkpoints" / "step-000002"
    common = {
        key: tensor for path in folder.glob("rank-*.safetensors") for key, tensor in load_file(path).items()
    }
    assert torch.equal(exported["large.blocks.0.norm.weight"], common["model.large.blocks.0.norm.weight"])


@pytest.mark.processes
def test_another_run_begins_behind_an_outer_step_alone(ran: Path) -> None:
    assert find_checkpoint(ran / "run", step=3).checkpoint.train.local_sgd == ASKED
    launch = launch_of(ran, ran / "new", 8, begin_from=ran / "run" / "checkpoints" / "step-000003")
    with pytest.raises(InputError, match="step 3 is between two outer steps, of which"):
        find_start(launch.request, None, 8, {}, or_anew=False, allows_changed_data=False)  # type: ignore[arg-type]


# What a launch refuses and says


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planned")
    write_islands(folder, ASKED)
    return folder


@pytest.mark.usefixtures("ready_here")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--steps", "3"), "--steps 3: it ends between two outer steps, of which there is one after every 2"),
        (
            ("--steps", "4", "--checkpoint-every", "1", "--async-checkpoints"),
            "--async-checkpoints: does not go",
        ),
        (("--steps", "4", "--elastic"), "has several nodes"),
    ],
)
def test_what_islands_cannot_do_is_refused(
    planned: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    ended = run_spindle("launch", planned / "plan.yaml", *NODE, "--run-dir", tmp_path / "run", *options)
    assert ended.code == 2, ended.err
    assert message in " ".join(ended.err.split())
    assert not (tmp_path / "run").exists()


def test_a_plan_with_other_islands_than_the_workload_is_refused(planned: Path, tmp_path: Path) -> None:
    """The workload's fingerprint may be the same: half of 8 samples is as many as all of 4."""
    shutil.copytree(planned, tmp_path / "other")
    source = tmp_path / "other" / "toy.yaml"
    content = yaml.safe_load(source.read_text())
    content["train"]["local_sgd"]["bits"] = 8
    source.write_text(yaml.safe_dump(content))
    ended = run_spindle("launch", tmp_path / "other" / "plan.yaml", *NODE, "--dry-run")
    assert ended.code == 3
    assert "the plan is for train.local_sgd {'islands': 2, 'every': 2" in ended.err
    plain = write_toy(tmp_path)
    content["train"].pop("local_sgd")
    source.write_text(yaml.safe_dump(content))
    ended = run_spindle(
        "launch", planned / "plan.yaml", "--workload", plain.parent / "toy.yaml", *NODE, "--dry-run"
    )
    assert ended.code == 3


def test_all_nodes_of_all_islands_are_launched(planned: Path) -> None:
    ended = run_spindle("launch", planned / "plan.yaml", "--dry-run")
    assert ended.code == 2
    assert "has 2 nodes; expected --node-rank and --master" in ended.err
    ended = run_spindle("launch", planned / "plan.yaml", *NODE, "--dry-run")
    assert ended.code == 0, ended.err
    assert "--nnodes=2" in ended.out
    assert ended.err.startswith("not the model that plain PyTorch trains on whole batches (train.local_sgd)")


def test_a_launch_says_that_another_model_is_trained(planned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = read_plan(planned / "plan.yaml")
    said: list[str] = []
    started = SimpleNamespace(processes=2, run_dir=planned / "run")
    prepared: Any = SimpleNamespace(
        plan=plan, launch=started, workload=SimpleNamespace(initial=()), total_steps=4
    )
    monkeypatch.setattr(run, "require_machine", lambda _: ())
    monkeypatch.setattr(run, "start_point", lambda *_, **__: None)
    monkeypatch.setattr(run, "start", lambda *_: "started")
    monkeypatch.setattr(output, "note", said.append)
    held: Any = None
    kept = {"or_anew": False, "allows_changed_data": False, "hold": held, "head_start": held}
    assert launch_command.train(prepared, **kept) == "started"
    assert said[0].startswith("not the model that plain PyTorch trains on whole batches (train.local_sgd)")
    assert "2 islands of 2 devices train a copy each" in said[0] and "after every 2 steps" in said[0]
    prepared.plan = plan.model_copy(update={"local_sgd": None, "islands": None})
    said.clear()
    assert launch_command.train(prepared, **kept) == "started"
    assert said == [f"training 4 steps with 2 workers in {planned / 'run'}"]
    assert samples_per_step(read_plan(planned / "plan.yaml")) == 8 + 4
