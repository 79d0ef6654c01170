"""What the runtime takes of a processor, measured by running it; and profiles that ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from helpers.made import made_plan
from spindle_cli.errors import RunFailedError
from spindle_cli.overhead import measure, toy
from spindle_cli.overhead.measure import measure_overhead
from spindle_cli.process.devices import cores_of_time
from spindle_cli.profile.profiling import Audience, ProfileOptions, estimate_profile, profile_workload
from spindle_cli.profile.types import Profile, RuntimeOverhead

TINY = str(Path(__file__).parents[1] / "profile" / "tiny_workload.py") + ":build"
SECONDS = RuntimeOverhead(step_s=0.25, pass_s=0.125)


@pytest.fixture
def audience() -> Audience:
    return Audience(Console(quiet=True), note=lambda _: None)


@pytest.mark.processes
def test_a_step_and_a_slice_take_time_beside_plain_pytorch() -> None:
    """A step does what no toy's layers do: batches, sums of losses, guards, logs; and so does a slice."""
    overhead = measure_overhead(2)
    assert 1e-4 < overhead.step_s < 1.0
    assert 0.0 <= overhead.pass_s < overhead.step_s


@pytest.mark.processes
@pytest.mark.usefixtures("capfd")
def test_a_process_that_dies_ends_it_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(folder: Path, build: object, rank: int) -> Iterator[object]:
        raise RuntimeError(f"rank {rank}")

    monkeypatch.setattr(measure, "_planned", dies)
    monkeypatch.setattr(measure, "may_fork", lambda: True)  # so that it has what was put in its place
    with pytest.raises(RunFailedError, match="what the runtime takes has died"):
        measure_overhead(2)


@pytest.mark.processes
def test_processes_train_the_toys_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0, 2 and 4 train one, ranks 1 and 3 the other; of each the median counts."""
    told_s = [7.0, 1.0, 5.0, 2.0, 6.0]
    monkeypatch.setattr(measure, "_train", lambda rank, folder, pipe: pipe.send(told_s[rank]))
    monkeypatch.setattr(measure, "may_fork", lambda: True)
    assert measure._beside_plain_s(5, Path()) == (6.0, 1.5)


def test_slices_take_what_steps_of_more_of_them_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 slices take 2.1 s more than one, 0.3 s each; of the 1.0 s of one with its step 0.7 s are left."""
    monkeypatch.setattr(measure, "_beside_plain_s", lambda processes, folder: (1.0, 3.1))
    overhead = measure_overhead(4)
    assert (overhead.step_s, overhead.pass_s) == pytest.approx((0.7, 0.3))
    monkeypatch.setattr(measure, "_beside_plain_s", lambda processes, folder: (-0.1, -0.2))
    assert measure_overhead(4) == RuntimeOverhead(step_s=0.0, pass_s=0.0), "noise is no gain"


def test_one_toy_runs_as_one_slice_and_one_as_a_slice_for_each_layer(
    tmp_path: Path, audience: Audience
) -> None:
    cluster = measure._ONE_DEVICE
    counts = []
    for build in (toy.one_slice, toy.slice_per_layer):
        source = f"{build.__module__}:{build.__name__}"
        profile = estimate_profile(source, tmp_path / "p.json", audience, cluster=cluster, check=False)
        counts.append(len(made_plan(profile, cluster, "sequential").slices))
    assert counts == [1, toy.NUM_LAYERS]


def profiled(tmp_path: Path, audience: Audience, asked: list[int], **more: object) -> Profile:
    """A tiny workload measured; `asked` becomes the numbers of processes that the runtime was measured in."""

    def overhead(processes: int) -> RuntimeOverhead:
        asked.append(processes)
        return SECONDS

    options = partial(ProfileOptions, time_limit_s=0.01, accept_noise=True, check=False, overhead=overhead)
    return profile_workload(TINY, tmp_path / "p.json", audience, options(**more))


@pytest.mark.processes
def test_it_is_measured_where_all_cores_compute(tmp_path: Path, audience: Audience) -> None:
    asked: list[int] = []
    processes = max(2, round(cores_of_time()))
    profile = profiled(tmp_path, audience, asked, nproc=processes, threads=1)
    turns = max(1.0, processes / cores_of_time())
    assert asked == [processes]
    assert (profile.processor.step_s, profile.processor.pass_s) == (0.25 * turns, 0.125 * turns)


@pytest.mark.processes
@pytest.mark.skipif(cores_of_time() <= 1, reason="one process leaves no core")
def test_it_is_not_where_a_core_is_left(tmp_path: Path, audience: Audience) -> None:
    asked: list[int] = []
    profile = profiled(tmp_path, audience, asked, nproc=1, threads=1)
    assert asked == [] and profile.processor.step_s == profile.processor.pass_s == 0.0
