"""`spindle launch` and `spindle verify` from end to end, with the real runtime."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.cli import Ended, run_spindle
from helpers.ready_commands import ReadyCommand
from helpers.toy_plan import write_toy
from spindle_cli.analysis.analyse import analyse
from spindle_cli.analysis.memo import AnalysisMemo
from spindle_cli.checkpoint.files import checkpoint_folder, find_checkpoint
from spindle_cli.files.request import RunRequest
from spindle_cli.files.run_files import METRICS_FILE, newest_model, read_metrics
from spindle_cli.files.runs.records import MeasuredTimeline, read_attempts
from spindle_cli.plan.file import read_plan
from spindle_cli.workload.building.load import load

pytestmark = pytest.mark.processes


@dataclass(frozen=True)
class Trained:
    """A run of the toy workload, with dropout, from `folder`, with a checkpoint every second step."""

    folder: Path
    ended: Ended
    took_s: float

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / "toy-1"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("launch")
    write_toy(folder, dropout=0.3)
    with contextlib.chdir(folder):
        options = ("--checkpoint-every", 2, "--trace", "trace.json", "--trace-steps", 2, "--json")
        begin = time.monotonic()
        ended = run_spindle("launch", "plan.yaml", *options)
        return Trained(folder, ended, time.monotonic() - begin)


def test_launch_trains_and_reports_in_one_json_document(trained: Trained) -> None:
    ended = trained.ended
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert report["steps"] == 4  # as the workload's train settings say
    assert report["run_dir"] == str(trained.run_dir)
    assert {"large", "small"} == set(report["last"]["task_losses"])
    compared = {entry["metaop"] for entry in report["predicted_vs_measured"]["metaops"]}
    assert compared == {"large/blocks", "large/head", "small/blocks", "small/head"}
    assert "training 4 steps with 2 workers" in ended.err
    noted = [(event.event, event.step, event.total_steps) for event in read_attempts(trained.run_dir)]
    assert noted == [("started", 0, 4), ("done", 0, None)]


def test_the_report_says_what_the_time_until_the_first_step_went_into(trained: Trained) -> None:
    report = json.loads(trained.ended.out)
    start_up = report["predicted_vs_measured"]["start_up"]
    stages = start_up["stages"]
    assert list(stages) == ["checks", "processes", "workload", "connect", "set-up", "first step"]
    assert sum(stages.values()) == pytest.approx(start_up["first_step_s"])
    assert stages["first step"] >= report["first"]["iteration_s"]
    assert 0 < start_up["first_step_s"] <= trained.took_s


def test_workers_are_handed_what_the_launcher_found_of_the_workload(trained: Trained) -> None:
    request = RunRequest.read(trained.run_dir / "workers" / "node-0.request.json")
    assert request.memo is not None
    memo = AnalysisMemo.read(request.memo)
    analysed = analyse(load(request.workload).workload, memo)
    assert analysed.fingerprint == read_plan(trained.folder / "plan.yaml").workload.fingerprint
    assert memo.observed


def test_the_trace_and_the_timeline_have_every_slice_and_sum_of_the_last_steps(trained: Trained) -> None:
    timeline = MeasuredTimeline.read(trained.run_dir / "timeline.json")
    assert [step.step for step in timeline.steps] == [3, 4]
    # Half of the quickest answer: one process here may keep the other waiting, but not for all of the run.
    assert 0 <= timeline.clock_error_s < trained.took_s
    plan = read_plan(trained.folder / "plan.yaml")
    for step in timeline.steps:
        for device, spans in enumerate(step.devices):
            own = [index for index, piece in enumerate(plan.slices) if device in piece.devices]
            for kind in ("forward", "backward"):
                ran = {span.slice for span in spans if span.kind == kind}  # in pieces where it waits between
                assert ran == set(own)
            assert [span.kind for span in spans].count("optimizer") == 1
            assert all(span.start_s <= span.end_s for span in spans)
    assert any(span.kind == "sum" for step in timeline.steps for span in step.devices[0])
    events = json.loads((trained.folder / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}


def test_export_writes_what_each_task_s_module_loads(trained: Trained, tmp_path: Path) -> None:
    ended = run_spindle("export", trained.run_dir, "-o", tmp_path / "all.safetensors", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["step"] == 4
    run_spindle("export", trained.run_dir, "-o", tmp_path / "small.safetensors", "--task", "small")
    exported = load_file(tmp_path / "all.safetensors")
    for name, tensor in load_file(newest_model(trained.run_dir)).items():
        assert torch.equal(exported[name], tensor), name
    small = load_file(tmp_path / "small.safetensors")
    for task in load(str(trained.folder / "toy.yaml")).workload.tasks:
        prefix = f"{task.name}."
        own = {name.removeprefix(prefix): t for name, t in exported.items() if name.startswith(prefix)}
        task.module.load_state_dict(own)
        if task.name == "small":
            assert all(torch.equal(own[name], tensor) for name, tensor in small.items())
            task.module.load_state_dict(small)
    assert run_spindle("export", trained.run_dir, "-o", tmp_path / "x", "--task", "tiny").code == 2
    assert "no checkpoint" in run_spindle("export", tmp_path, "-o", tmp_path / "x").err


def test_sigterm_ends_a_resumed_run_with_a_checkpoint_and_143(
    trained: Trained, forker: socket.socket, tmp_path: Path
) -> None:
    """Going on from step 2 the same dropout is drawn, so the losses that follow are the same to the bit."""
    run_dir = tmp_path / "run"
    shutil.copytree(trained.run_dir, run_dir)
    (checkpoint_folder(run_dir, 4) / "rank-00001.safetensors").unlink()
    plan = trained.folder / "plan.yaml"
    process = ReadyCommand(forker, "launch", plan, "--resume", "--run-dir", run_dir, "--steps", 10**6)
    wait_for_step(run_dir, 6)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143
    assert "step-000004 cannot be used: rank-00001.safetensors is missing" in err
    assert f"going on from {checkpoint_folder(run_dir, 2)}" in err
    lines = list(read_metrics(run_dir))
    assert [line.step for line in lines] == list(range(1, len(lines) + 1))
    assert [line.task_losses for line in lines[:4]] == [
        line.task_losses for line in read_metrics(trained.run_dir)
    ]
    assert f"stopped by SIGTERM after step {len(lines)}; a checkpoint is saved" in err
    assert find_checkpoint(run_dir).checkpoint.step == len(lines)


def wait_for_step(run_dir: Path, step: int) -> None:
    """Until the run has written this step down."""
    give_up_at = time.monotonic() + 120
    while time.monotonic() < give_up_at:
        if (run_dir / METRICS_FILE).read_text().count("\n") >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached")


@pytest.mark.usefixtures("ready_here")
def test_verify_ends_with_0_for_the_same_model_and_shows_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_toy(tmp_path)
    ended = run_spindle("verify", "plan.yaml", "--dtype", "float64", "--steps", 2)
    assert ended.code == 0, ended.err
    assert "same model: toy under the spindle plan, over 2 steps on 2 workers" in ended.out
    assert "gradients of step 1" in ended.out
