"""`spindle profile` with real processes: interrupted, gone on with, complete."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from helpers.cli import run_spindle, spindle_process
from helpers.ready_commands import ReadyCommand
from spindle_cli.files.cluster import Cluster
from spindle_cli.process.devices import cores_of_time
from spindle_cli.profile.types import Profile

TINY = str(Path(__file__).parent / "tiny_workload.py") + ":build"
ENOUGH_MEASUREMENTS = 3


@dataclass(frozen=True)
class Resumed:
    """A profile that was killed in its middle and started again."""

    profile: Profile
    cluster: Cluster
    summary: dict[str, object]
    messages: str
    kept: int
    left_running: list[int]
    files: list[str]


def wait_for(partial: Path, measurements: int, process: subprocess.Popen[str] | ReadyCommand) -> None:
    """Return when so many measurements are kept; fail if the process ends before."""
    deadline = time.monotonic() + 120
    while not (partial.exists() and partial.read_text().count("slowest") >= measurements):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def resumed(forker: socket.socket, tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    """The second time by a Python of its own."""
    folder = tmp_path_factory.mktemp("profile")
    out, cluster, partial = (folder / name for name in ("p.json", "cluster.yaml", "p.partial.json"))
    options = ("--nproc", 2, "--write-cluster", cluster, "--time-limit", 0.05, "--accept-noise", "--json")
    first = ReadyCommand(forker, "profile", TINY, "-o", out, *options)
    wait_for(partial, ENOUGH_MEASUREMENTS, first)
    workers = psutil.Process(first.pid).children(recursive=True)
    first.kill()
    first.communicate(timeout=120)
    _, running = psutil.wait_procs(workers, timeout=120)
    kept = partial.read_text().count("slowest")
    second = spindle_process("profile", TINY, "-o", out, *options)
    printed, messages = second.communicate(timeout=120)
    assert second.returncode == 0, messages
    return Resumed(
        Profile.read(out),
        Cluster.read(cluster),
        json.loads(printed),
        messages,
        kept,
        [process.pid for process in running],
        sorted(path.name for path in folder.iterdir()),
    )


@pytest.mark.processes
def test_a_killed_profile_leaves_no_process_and_goes_on_where_it_was(resumed: Resumed) -> None:
    assert resumed.left_running == []
    assert f"{resumed.kept} measurements were already made" in resumed.messages
    assert resumed.files == ["cluster.yaml", "p.json"]


@pytest.mark.processes
def test_points_on_real_processes_are_measured_with_their_spread(resumed: Resumed) -> None:
    layers = resumed.profile.by_name["classify/layers"]
    assert [(point.num_devices, point.source) for point in layers.curve] == [(1, "measured"), (2, "measured")]
    for metaop in resumed.profile.metaops:
        for point in metaop.curve:
            assert point.forward_s > 0 and point.backward_s > 0
            assert point.repeats is not None and point.repeats >= 3
            assert point.spread is not None
    assert resumed.profile.environment["threads_per_process"] == 1
    assert resumed.profile.environment["processes"] == 2
    assert resumed.profile.noise is not None and 0 <= resumed.profile.noise.others_share <= 1


@pytest.mark.processes
def test_kept_bytes_and_sizes_are_those_of_the_model(resumed: Resumed) -> None:
    layers = resumed.profile.by_name["spread/layers"]
    assert layers.inner_output_bytes == layers.output_bytes == 8 * 8 * 4
    # Each op keeps its output, the first one also the batch's field.
    assert layers.activation_bytes_per_op == (4 * 8 * 8 * 4 + 8 * 8 * 4) / 4


@pytest.mark.processes
def test_the_measured_link_is_in_the_profile_and_in_the_cluster_file(resumed: Resumed) -> None:
    link = resumed.profile.links[0]
    assert 0 < link.latency_s < 1 and link.points[-1][1] > 1e6
    assert resumed.cluster.num_devices == 2
    assert resumed.cluster.device_type == "cpu"
    assert resumed.cluster.links.intra_node.latency_us == pytest.approx(link.latency_s * 1e6, rel=1e-3)


@pytest.mark.processes
def test_what_the_runtime_takes_is_in_the_profile_where_both_cores_compute(resumed: Resumed) -> None:
    assert (resumed.profile.processor.step_s > 0.0) == (cores_of_time() <= 2)


def test_json_says_what_was_made(resumed: Resumed) -> None:
    assert resumed.summary["fingerprint"] == resumed.profile.workload.fingerprint
    assert resumed.summary["sources"] == ["measured"]


@pytest.mark.processes
def test_an_interrupt_ends_with_130_and_no_traceback(forker: socket.socket, tmp_path: Path) -> None:
    running = ReadyCommand(forker, "profile", TINY, "-o", tmp_path / "p.json", "--nproc", 2)
    wait_for(tmp_path / "p.partial.json", 0, running)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=120)
    assert running.returncode == 130, errors
    assert "Traceback" not in errors and "interrupted" in errors
    assert (tmp_path / "p.partial.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--estimate", "--write-cluster", "c.yaml"), "--write-cluster"),
        (("--device", "h200"), "--estimate"),
        (("--nproc", "1", "--write-cluster", "c.yaml"), "--nproc 2 or more"),
        (("--nproc", "100000"), "--nproc 100000"),
        (("--estimate",), "--cluster"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    ended = run_spindle("profile", TINY, "-o", tmp_path / "p.json", *arguments)
    assert ended.code == 2
    assert said in ended.err
