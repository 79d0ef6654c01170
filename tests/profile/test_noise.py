"""A machine that was busy while it was measured: seen, said, refused, accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.cli import run_spindle
from helpers.plans import cluster_of
from spindle_cli.errors import RunFailedError
from spindle_cli.profile import profiling
from spindle_cli.profile.measuring import measure, noise
from spindle_cli.profile.measuring.noise import (
    Work,
    is_unsteady,
    noise_of,
    require_quiet,
    steadier,
    taken_by_others,
    warning,
    work_so_far,
)
from spindle_cli.profile.measuring.partial import ResumeFile
from spindle_cli.profile.types import Noise, OpTiming, PhaseTimes, Profile


def timing(spread: float) -> OpTiming:
    """One process's times are steady, those of the slowest of two are not."""
    alone = PhaseTimes(forward_s=1.0, backward_s=2.0, spread=0.0, repeats=5)
    both = alone.model_copy(update={"spread": spread})
    return OpTiming(slowest=(alone, both), activation_bytes=0)


def test_what_is_busy_beyond_our_own_processes_is_others() -> None:
    """10 s on 4 cores: 26 s busy, of which we took 20; the other 6 of 40."""
    before, after = Work(100.0, 1000.0, 50.0), Work(110.0, 1026.0, 70.0)
    assert taken_by_others(before, after, 4) == pytest.approx(0.15)
    assert taken_by_others(before, Work(110.0, 1020.0, 75.0), 4) == 0.0, "clocks of different grain"
    assert taken_by_others(before, before, 4) == 0.0


def test_time_of_other_cores_and_of_guests_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Times(tuple):  # as psutil's: a tuple with names
        idle, iowait, guest, guest_nice = 50.0, 5.0, 2.0, 0.0

    monkeypatch.setattr(noise, "own_cores", lambda: frozenset({1}))
    monkeypatch.setattr(
        noise.psutil, "cpu_times", lambda percpu: [Times((999.0,)), Times((30.0, 50.0, 5.0, 2.0, 0.0))]
    )
    assert work_so_far(7.0, ()).all_s == pytest.approx(30.0)
    assert work_so_far(7.0, ()).at_s == 7.0


def test_a_quiet_profile_says_nothing_and_a_noisy_one_by_how_much() -> None:
    assert warning(Noise(others_share=0.05, spread=0.10)) is None
    assert warning(Noise(others_share=0.06, spread=0.10)) == (
        "measured while the machine was busy: other processes took 6% of the cores' time"
    )
    said = warning(Noise(others_share=0.2, spread=0.11, worst_spread=0.7))
    assert said is not None and "20%" in said and "more than 11% (at worst 70%)" in said


@pytest.mark.parametrize("busy", [Noise(others_share=0.26), Noise(spread=0.31)])
def test_beyond_the_bounds_it_is_refused(busy: Noise) -> None:
    require_quiet(Noise(others_share=0.25, spread=0.30))
    with pytest.raises(RunFailedError, match="too busy to measure") as caught:
        require_quiet(busy)
    assert caught.value.exit_code == 1 and "--accept-noise" in str(caught.value)


def test_the_spread_is_that_of_the_slowest_processes() -> None:
    found = noise_of(0.12345, [timing(0.1), timing(0.4), timing(0.2)], 3)
    assert found == Noise(others_share=0.1235, spread=0.2, worst_spread=0.4, measured_again=3)
    assert noise_of(0.0, [], 0) == Noise()


def test_of_two_measurements_the_steadier_is_kept() -> None:
    steady, unsteady = timing(0.2), timing(0.21)
    assert is_unsteady(unsteady) and not is_unsteady(steady)
    assert steadier(steady, unsteady) is steadier(unsteady, steady) is steady


def test_what_was_refused_is_gone_on_with_only_where_noise_is_accepted(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    kept = ResumeFile(out, "same")
    kept.add_timing("op", timing(0.5))
    kept.add_noise(Noise(others_share=0.4))
    accepted = ResumeFile(out, "same", accepts_noise=True)
    assert (accepted.resumed, accepted.noise) == (1, Noise(others_share=0.4))
    anew = ResumeFile(out, "same", accepts_noise=False)
    assert (anew.resumed, anew.noise) == (0, None)


@pytest.mark.parametrize(
    ("devices", "per_node", "processes", "threads"),
    [(2, 1, 1, 4), (2, 2, 2, 4), (16, 8, 8, 1), (4, 4, 4, 2), (1, 1, 1, 8)],
)
def test_threads_are_a_devices_share_of_the_cores_as_if_all_devices_were_here(
    devices: int, per_node: int, processes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "usable_cores", lambda: 8)
    cluster = cluster_of(devices, devices_per_node=per_node)
    assert profiling._share_of_cores("cpu", processes, cluster) == threads
    assert profiling._share_of_cores("cpu", processes, None) == 8 // processes
    assert profiling._share_of_cores("cuda", processes, cluster) == 8 // processes


def test_a_noisy_profile_is_refused_and_goes_on_where_noise_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "taken_by_others", lambda before, after, cores: 0.5)
    workload, out = str(Path(__file__).parent / "tiny_workload.py") + ":build", tmp_path / "p.json"
    asked = ("profile", workload, "-o", out, "--nproc", 1, "--threads", 1, "--time-limit", 0.02)
    refused = run_spindle(*asked)
    assert refused.code == 1 and "took 50% of the cores' time" in refused.err
    assert not out.exists()
    accepted = run_spindle(*asked, "--accept-noise")
    assert accepted.code == 0, accepted.err
    assert "measurements were already made" in accepted.err
    assert "measured while the machine was busy: other processes took 50%" in accepted.err
    made = Profile.read(out)
    assert made.noise is not None and made.noise.others_share == 0.5


def test_ops_take_as_much_longer_as_processes_are_granted_less_than_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def op_s(granted: float) -> float:
        monkeypatch.setattr(measure, "cores_of_time", lambda: granted)
        out = tmp_path / f"{granted}.json"
        asked = ("profile", workload, "-o", out, "--nproc", 1, "--threads", 1, "--time-limit", 0.02)
        ended = run_spindle(*asked, "--accept-noise")
        assert ended.code == 0, ended.err
        return max(point.op_s for metaop in Profile.read(out).metaops for point in metaop.curve)

    workload = str(Path(__file__).parent / "tiny_workload.py") + ":build"
    assert op_s(0.01) > 20 * op_s(1.0)
