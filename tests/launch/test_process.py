"""A launch's life with real worker processes: it ends well, or at once with the first cause."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from helpers.plans import two_towers
from spindle_cli.errors import RunFailedError, WorkerLostError
from spindle_cli.files.request import log_path
from spindle_cli.files.run_files import METRICS_FILE, read_metrics
from spindle_cli.launch.attempts import MetricsFollower, Watch
from spindle_cli.launch.build import build_launch
from spindle_cli.launch.run_dir import prepare_run_dir
from spindle_cli.launch.starting.head_start import HeadStart
from spindle_cli.launch.starting.network import LOOPBACK, interface_of, listen
from spindle_cli.launch.starting.process import run_launch
from spindle_cli.launch.types import Address, Launch, LaunchOptions, NodeShare
from spindle_cli.launch.watching.cause import failure_of
from spindle_cli.launch.watching.signals import Signals

pytestmark = pytest.mark.processes
WORKERS = 2
TIMEOUT_S = 100.0
AT_ONCE_S = 30.0  # it takes 5 s at most where a processor is free


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


def launch_of(
    run_dir: Path, deed: str, *, steps: int = 3, share: NodeShare | None = None, timeout_s: float = TIMEOUT_S
) -> Launch:
    share = share or NodeShare(0, 1, WORKERS, Address(LOOPBACK, 0), interface_of(LOOPBACK))
    options = LaunchOptions(steps=steps, worker_module="fake_worker", timeout_s=timeout_s)
    _, plan = two_towers()
    launch = build_launch(plan, Path("plan.yaml"), deed, run_dir, share, options)
    prepare_run_dir(launch.run_dir)
    return launch


def fail(launch: Launch) -> tuple[RunFailedError, float]:
    """Run to a failure: what it was, and how many seconds after the first step's line, which is the last."""
    ending = run_launch(launch, lambda: None)
    assert ending.code != 0
    took = time.time() - (launch.run_dir / METRICS_FILE).stat().st_mtime
    assert living_workers(launch) == []
    return failure_of(launch, ending.stuck), took


def living_workers(launch: Launch) -> list[int]:
    pids = [int(path.read_text()) for path in (launch.run_dir / "workers").glob("pid-*")]
    return [pid for pid in pids if _lives(pid)]


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_good_run_leaves_metrics_and_logs_and_never_listens_beyond_loopback(tmp_path: Path) -> None:
    launch = launch_of(tmp_path / "run", "train", steps=10)
    listened: set[str] = set()

    def poll() -> None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it may end while it is looked at
                for connection in process.net_connections(kind="tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        listened.add(connection.laddr.ip)

    assert run_launch(launch, poll).code == 0
    assert listened == {LOOPBACK}
    assert [metrics.step for metrics in read_metrics(launch.run_dir)] == list(range(1, 11))
    for rank in range(WORKERS):
        assert f"rank {rank} of {WORKERS} done" in log_path(launch.run_dir, rank).read_text()


@pytest.mark.usefixtures("ready_here")
def test_workers_that_are_not_forked_are_pythons_of_their_own(tmp_path: Path) -> None:
    launch = launch_of(tmp_path / "run", "kill:1")
    assert "--start-method=fork" in launch.argv
    spawned = tuple("--start-method=spawn" if "--start-method" in word else word for word in launch.argv)
    ending = run_launch(launch.model_copy(update={"argv": spawned}), lambda: None)
    commands = [path.read_text() for path in (launch.run_dir / "workers").glob("command-*")]
    assert len(commands) == WORKERS
    assert all(" -u -m fake_worker " in command for command in commands)
    assert failure_of(launch, ending.stuck).message == "worker 1 was killed by signal 9 (out of memory?)"


def test_a_run_leaves_nothing_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    launch = launch_of(tmp_path / "run", "train")
    with HeadStart() as head_start:
        head_start.begin(("fake_worker",), launch.environment)
        assert run_launch(launch, lambda: None, head_start).code == 0
    assert [metrics.step for metrics in read_metrics(launch.run_dir)] == [1, 2, 3]
    left = [path.name for path in temporary.iterdir()]
    assert [name for name in left if not name.startswith("torchinductor_")] == []  # torch's cache: one a user


def test_a_head_start_that_is_not_taken_ends_with_its_launcher() -> None:
    code = (
        "import time\nfrom spindle_cli.launch.starting.head_start import HeadStart\n"
        "head_start = HeadStart()\n"
        "head_start.begin((), {}); print(head_start._process.pid, flush=True); time.sleep(60)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    waiting = int(launcher.stdout.readline())
    assert _lives(waiting)
    launcher.kill()
    launcher.communicate()
    give_up_at = time.monotonic() + 50
    while _lives(waiting) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    assert not _lives(waiting)


@pytest.mark.usefixtures("ready_here")
def test_a_workers_exception_is_the_runs_error_and_ends_it_at_once(tmp_path: Path) -> None:
    launch = launch_of(tmp_path / "run", "raise:1", steps=1000)
    error, took = fail(launch)
    assert error.message.startswith("worker 1 failed: ValueError: the worker's own error\n  at ")
    assert "fake_worker.py:" in error.message
    assert error.hint is not None and str(log_path(launch.run_dir, 1)) in error.hint
    assert "Traceback" in log_path(launch.run_dir, 1).read_text()
    assert took < AT_ONCE_S


@pytest.mark.usefixtures("ready_here")
def test_a_killed_worker_is_named_although_the_other_lost_its_connection(tmp_path: Path) -> None:
    error, took = fail(launch_of(tmp_path / "run", "kill:1", steps=1000))
    assert error.message == "worker 1 was killed by signal 9 (out of memory?)"
    assert took < AT_ONCE_S


@pytest.mark.usefixtures("ready_here")
def test_a_worker_that_hangs_is_named_with_its_line_after_the_timeout(tmp_path: Path) -> None:
    error, took = fail(launch_of(tmp_path / "run", "hang:1", steps=1000, timeout_s=2))
    assert isinstance(error, WorkerLostError)
    assert re.fullmatch(
        r"worker 1 hangs at .*fake_worker.py:\d+ in misbehave: no answer within the run's timeout of 2 s",
        error.message,
    )
    assert 2 < took < 2 + AT_ONCE_S


@pytest.mark.usefixtures("ready_here")
def test_a_run_that_falls_silent_is_noticed_and_ended_by_the_launcher_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only worker hangs, so no other one gives it up."""
    monkeypatch.setattr("spindle_cli.launch.attempts.SILENCE_S", 1.0)
    monkeypatch.setattr("spindle_cli.launch.attempts.MARGIN_S", 1.0)
    share = NodeShare(0, 1, 1, Address(LOOPBACK, 0), interface_of(LOOPBACK))
    launch = launch_of(tmp_path / "run", "hang:0", steps=1000, share=share, timeout_s=4)
    said: list[str] = []
    follower = MetricsFollower(launch.run_dir)
    watch = Watch(launch, follower, Signals(), lambda metrics: None, said.append, [])
    place = r"worker 0 {} at .*fake_worker.py:\d+ in misbehave"
    with pytest.raises(WorkerLostError, match=place.format("hangs") + ": no answer within .* of 4 s"):
        run_launch(launch, watch.poll)
    assert said
    assert all(re.match("no step for .*; " + place.format("is"), line) for line in said), said
    assert living_workers(launch) == []


@pytest.mark.usefixtures("ready_here")
def test_ctrl_c_ends_every_worker_within_seconds_even_one_that_ignores_it(tmp_path: Path) -> None:
    launch = launch_of(tmp_path / "run", "hang:1", steps=1000)
    pressed = [0.0]

    def poll() -> None:
        if not pressed[0] and any(read_metrics(launch.run_dir)):
            pressed[0] = time.monotonic()
            threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()

    with pytest.raises(KeyboardInterrupt):
        run_launch(launch, poll)
    assert time.monotonic() - pressed[0] < AT_ONCE_S
    assert living_workers(launch) == []


def test_the_dry_runs_scripts_of_two_nodes_train_as_one_run(tmp_path: Path) -> None:
    with listen(LOOPBACK, 0) as probe:
        master = Address(LOOPBACK, probe.getsockname()[1])
    shares = [NodeShare(rank, 2, 1, master, interface_of(LOOPBACK)) for rank in range(2)]
    scripts = [launch_of(tmp_path / "a run", "train", share=share).shell_script() for share in shares]
    nodes = [subprocess.Popen(["/bin/sh", "-c", script]) for script in scripts]
    assert [node.wait(timeout=120) for node in nodes] == [0, 0]
    assert [metrics.step for metrics in read_metrics(tmp_path / "a run")] == [1, 2, 3]
    assert "rank 1 of 2 done" in log_path(tmp_path / "a run", 1).read_text()
