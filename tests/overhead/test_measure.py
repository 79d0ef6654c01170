"""What the runtime takes of a processor, measured by running it; and profiles that ask for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from torch import Tensor

from helpers.made import made_plan
from helpers.plans import cluster_of
from spindle_cli import api
from spindle_cli.errors import RunFailedError
from spindle_cli.overhead import measure, toy
from spindle_cli.overhead.measure import measure_overhead, overhead_of
from spindle_cli.process.devices import cores_of_time
from spindle_cli.profile.profiling import Audience, ProfileOptions, estimate_profile, profile_workload
from spindle_cli.profile.types import Profile, RuntimeOverhead
from spindle_cli.workload.types import Workload

TINY = str(Path(__file__).parents[1] / "profile" / "tiny_workload.py") + ":build"
SECONDS = RuntimeOverhead(step_s=0.25, pass_s=0.125)


@pytest.fixture
def audience() -> Audience:
    return Audience(Console(quiet=True), note=lambda _: None)


@pytest.mark.processes
def test_a_step_and_a_slice_take_time_beside_plain_pytorch() -> None:
    """A step does what no toy's layers do: batches, sums of losses, guards, logs; and so does a slice."""
    overhead = measure_overhead(2, 1)
    assert 1e-4 < overhead.step_s < 1.0
    assert 0.0 <= overhead.pass_s < overhead.step_s


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a test needs whose toys take so long that noise is nothing beside."""
    monkeypatch.setattr(measure, "_WARM_UP_STEPS", 2)
    monkeypatch.setattr(measure, "_STEPS", 10)
    monkeypatch.setattr(measure, "may_fork", lambda: True)


def computing(forward: Callable[..., Tensor], seconds: float) -> Callable[..., Tensor]:
    """A forward that keeps a processor busy for some seconds before."""

    def slow(layer: toy.Layer, x: Tensor) -> Tensor:
        end_s = time.process_time() + seconds
        while time.process_time() < end_s:
            pass
        return forward(layer, x)

    return slow


@pytest.mark.processes
@pytest.mark.usefixtures("few_steps")
def test_what_layers_of_their_own_slices_take_longer_is_the_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other of the eight layers that have a slice each takes 5 ms more: 20 ms, of seven more slices."""
    monkeypatch.setattr(toy.OtherLayer, "forward", computing(toy.Layer.forward, 0.005))
    assert measure_overhead(2, 1).pass_s > 0.9 * 0.020 / 7


@pytest.mark.processes
@pytest.mark.usefixtures("few_steps")
def test_what_layers_take_in_plain_pytorch_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the eight layers takes 5 ms more in both."""
    monkeypatch.setattr(toy.Layer, "forward", computing(toy.Layer.forward, 0.005))
    assert measure_overhead(2, 1).step_s < 0.040


@pytest.mark.processes
def test_a_profile_made_in_python_has_it_too() -> None:
    profile = api.profile(TINY, nproc=2, threads=1, time_limit=0.01, accept_noise=True, check=False)
    assert (profile.processor.step_s > 0.0) == (cores_of_time() <= 2)


@pytest.fixture
def failing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of the toy fail in what is forked from this process, and nowhere else."""
    here, read = os.getpid(), toy.Numbers.__getitem__

    def sample(numbers: toy.Numbers, index: int) -> dict[str, Tensor]:
        assert os.getpid() == here
        return read(numbers, index)

    monkeypatch.setattr(toy.Numbers, "__getitem__", sample)
    monkeypatch.setattr(measure, "may_fork", lambda: True)


@pytest.mark.processes
@pytest.mark.usefixtures("capfd", "failing_elsewhere")
def test_a_process_that_dies_ends_it_with_an_error() -> None:
    with pytest.raises(RunFailedError, match="what the runtime takes has died"):
        measure_overhead(2, 1)


@pytest.mark.processes
@pytest.mark.usefixtures("failing_elsewhere")
def test_processes_of_several_threads_are_not_forked() -> None:
    """This process may have a pool of threads then, which a fork would wait for."""
    assert measure_overhead(2, 2).step_s > 1e-4


def test_slices_take_what_steps_of_more_of_them_take_longer() -> None:
    """Of five ranks 0, 2 and 4 train one slice and 1 and 3 eight, by their medians 1.0 and 3.1 s: seven more
    slices take 2.1 s, and without its slice a step takes 0.7 s.
    """
    overhead = overhead_of([7.0, 3.0, 0.5, 3.2, 1.0])
    assert (overhead.step_s, overhead.pass_s) == pytest.approx((0.7, 0.3))
    assert overhead_of([-0.1, -0.2]) == RuntimeOverhead(step_s=0.0, pass_s=0.0), "noise is no gain"


@pytest.mark.parametrize(("build", "count"), [(toy.one_slice, 1), (toy.slice_per_layer, toy.NUM_LAYERS)])
def test_a_toy_runs_as_one_slice_or_as_one_for_each_layer(
    build: Callable[[], Workload], count: int, tmp_path: Path, audience: Audience
) -> None:
    source, cluster = f"{build.__module__}:{build.__name__}", cluster_of(1)
    profile = estimate_profile(source, tmp_path / "p.json", audience, cluster=cluster, check=False)
    assert len(made_plan(profile, cluster, "sequential").slices) == count


def profiled(tmp_path: Path, audience: Audience, asked: list[tuple[int, int]], **more: object) -> Profile:
    """A tiny workload measured; `asked`: the processes that measured the runtime, and threads."""

    def overhead(processes: int, threads: int) -> RuntimeOverhead:
        asked.append((processes, threads))
        return SECONDS

    options = partial(ProfileOptions, time_limit_s=0.01, accept_noise=True, check=False, overhead=overhead)
    return profile_workload(TINY, tmp_path / "p.json", audience, options(**more))


@pytest.mark.processes
def test_it_is_measured_where_all_cores_compute(tmp_path: Path, audience: Audience) -> None:
    asked: list[tuple[int, int]] = []
    processes = max(2, round(cores_of_time()))
    profile = profiled(tmp_path, audience, asked, nproc=processes, threads=1)
    turns = max(1.0, processes / cores_of_time())
    assert asked == [(processes, 1)]
    assert (profile.processor.step_s, profile.processor.pass_s) == (0.25 * turns, 0.125 * turns)


@pytest.mark.processes
@pytest.mark.skipif(cores_of_time() <= 1, reason="one process leaves no core")
def test_it_is_not_where_a_core_is_left(tmp_path: Path, audience: Audience) -> None:
    asked: list[tuple[int, int]] = []
    profile = profiled(tmp_path, audience, asked, nproc=1, threads=1)
    assert asked == [] and profile.processor.step_s == profile.processor.pass_s == 0.0
