"""A run is finished when its work is done, not when its processes have ended with 0."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.plans import two_towers
from spindle_cli.errors import RunFailedError, WorkerLostError
from spindle_cli.files.artifact import write_json
from spindle_cli.files.request import WorkerError, done_path, error_path, pid_path
from spindle_cli.files.run_files import METRICS_FILE, StepMetrics, model_path
from spindle_cli.launch.build import build_launch
from spindle_cli.launch.run_dir import forget_attempt, forget_errors, prepare_run_dir
from spindle_cli.launch.types import Address, Launch, LaunchOptions, NodeShare, WorkerExit, WorkerExits
from spindle_cli.launch.watching.cause import failure_of, require_done, require_trained

LEFT = r"worker 1 ended with exit code 0 before its work was done"


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Of two workers, which have begun."""
    _, plan = two_towers()
    share = NodeShare(0, 1, 2, Address("127.0.0.1", 0), "lo")
    made = build_launch(plan, Path("plan.yaml"), "toy:build", tmp_path, share, LaunchOptions())
    prepare_run_dir(made.run_dir)
    for rank in range(2):
        pid_path(tmp_path, rank).write_text("1")
    return made


def test_a_worker_without_its_mark_has_not_done_its_work(launch: Launch) -> None:
    for rank in range(2):
        done_path(launch.run_dir, rank).touch()
    require_done(launch, range(2))
    done_path(launch.run_dir, 1).unlink()
    with pytest.raises(RunFailedError, match=LEFT) as failed:
        require_done(launch, range(2))
    assert failed.value.exit_code == 1
    assert not isinstance(failed.value, WorkerLostError)  # it would come again


@pytest.mark.parametrize("forget", [lambda launch: forget_attempt(launch.run_dir, range(2), 0), None])
def test_marks_of_an_earlier_attempt_do_not_count(forget, launch: Launch) -> None:
    done_path(launch.run_dir, 0).touch()
    forget_errors(launch.run_dir) if forget is None else forget(launch)
    with pytest.raises(RunFailedError, match="worker 0 ended"):
        require_done(launch, range(2))


@pytest.mark.parametrize(("end", "is_done"), [("pass", True), ("import os; os._exit(0)", False)])
def test_a_worker_leaves_its_mark_at_its_end_alone(end: str, is_done: bool, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from spindle_cli.process.worker_session import worker_session\n"
        f"with worker_session(Path(sys.argv[1]), 1):\n    {end}\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, tmp_path], check=False, timeout=120)
    assert (ended.returncode, done_path(tmp_path, 1).exists()) == (0, is_done)


def test_the_last_step_and_the_model_after_it_are_there(tmp_path: Path) -> None:
    metrics = tmp_path / METRICS_FILE
    with pytest.raises(RunFailedError, match=r"metrics.jsonl: is not there, or empty"):
        require_trained(tmp_path, 10)
    lines = [StepMetrics(step=step, loss=1.0, iteration_s=0.1).to_line() for step in range(1, 11)]
    metrics.write_text("".join(lines[:9]) + lines[9][:-1])  # the last one is cut short
    with pytest.raises(RunFailedError, match="ends with step 9 of 10"):
        require_trained(tmp_path, 10)
    metrics.write_text("".join(lines))
    model_path(tmp_path, 9).parent.mkdir(parents=True)
    model_path(tmp_path, 9).touch()
    with pytest.raises(RunFailedError, match=r"step-000010/model.safetensors: no such file"):
        require_trained(tmp_path, 10)
    model_path(tmp_path, 10).parent.mkdir(parents=True)
    model_path(tmp_path, 10).touch()
    require_trained(tmp_path, 10)


def lost_peer(launch: Launch, rank: int) -> None:
    error = WorkerError(rank=rank, type="RuntimeError", message="gone", lost_peer=True, time_s=1.0)
    write_json(error_path(launch.run_dir, rank), error)


def test_a_worker_that_left_is_the_cause_where_the_others_lost_their_connection(launch: Launch) -> None:
    lost_peer(launch, 0)
    write_json(launch.exits_file, WorkerExits(exits=(WorkerExit(rank=0, exit_code=1, time_s=1.0),)))
    assert failure_of(launch, code=1, ranks=range(2)).message == LEFT
    assert "worker 0 lost its connection" in failure_of(launch, code=1, ranks=range(1)).message
    done_path(launch.run_dir, 1).touch()
    assert "worker 0 lost its connection" in failure_of(launch, code=1, ranks=range(2)).message
    done_path(launch.run_dir, 1).unlink()
    killed = (WorkerExit(rank=0, exit_code=1, time_s=1.0), WorkerExit(rank=1, exit_code=-9, time_s=2.0))
    write_json(launch.exits_file, WorkerExits(exits=killed))
    assert failure_of(launch, code=1, ranks=range(2)).message.startswith("worker 1 was killed by signal 9")


def test_what_starts_the_workers_is_named_where_it_was_killed(launch: Launch) -> None:
    """The workers end with it, and say nothing. To start again may help."""
    failure = failure_of(launch, code=-9, ranks=range(2))
    assert (
        failure.message == "the process that starts the workers (torchrun) was killed by signal 9 (SIGKILL)"
    )
    assert isinstance(failure, WorkerLostError)
    lost_peer(launch, 0)
    assert "worker 0 lost its connection" in failure_of(launch, code=-9, ranks=range(2)).message
