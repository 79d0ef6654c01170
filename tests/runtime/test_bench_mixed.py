"""The benchmark of two unequal hosts: what it makes of its runs, and the groups that slow them down."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from runtime_bench import quota
from runtime_bench.contestants import Run
from runtime_bench.errors import BenchError
from runtime_bench.mixed_page import BEGIN, END, FAST, SLOW, Outcome, Trial, read_outcome, write_outcome
from runtime_bench.quota import Quota, granting


def run(*iterations_s: float, loss: float = 2.0) -> Run:
    return Run(list(iterations_s), [{"a": loss}], 0.1, {FAST: 1.0, SLOW: 0.9})


def trial(spindle_s: float = 0.7, even_compute_s: float = 0.95, ddp_s: float = 1.1) -> Trial:
    """Of half the speed: even shares take 1 s, and what is 1.35 times as fast meets the target."""
    runs = {
        "ddp": [run(ddp_s)],
        "dp-even": [run(1.0, 1.0, 1.5), run(0.9)],
        "spindle": [run(spindle_s, loss=2.002)],
    }
    predicted = {"dp-even": (1.0, even_compute_s), "spindle": (0.7, 0.7)}
    return Trial.of(("net", 0.5, 500), "here", runs, predicted)


def test_medians_are_over_all_steps_of_all_runs_and_losses_are_set_against_even_shares() -> None:
    found = trial().results
    assert (found["dp-even"].iteration_s, found["dp-even"].rounds_s) == (1.0, [1.0, 0.9])
    assert found["spindle"].worst_loss_difference == pytest.approx(1e-3)
    assert found["spindle"].speeds == {FAST: 1.0, SLOW: 0.9}
    assert (found["ddp"].predicted_s, found["ddp"].off_by) == (None, None)


@pytest.mark.parametrize(
    ("made", "misses"),
    [
        (trial(), []),
        (trial(spindle_s=0.7699), ["1.30 times as fast as even shares, not 1.35"]),
        (trial(spindle_s=0.7699, even_compute_s=0.89), []),  # there, compute does not rule
        (trial(spindle_s=0.63), []),
        (trial(spindle_s=0.629), ["off its prediction by -10.1%"]),
        (trial(ddp_s=0.7), []),
        (trial(ddp_s=0.69), ["1.014 times as long as DDP"]),
    ],
)
def test_targets_are_the_prediction_the_gain_over_even_shares_and_the_best_baseline(
    made: Trial, misses: list[str]
) -> None:
    assert list(made.misses()) == misses
    last = list(made.lines())[-2]
    assert ("All targets met" in last) == (not misses)
    assert all(miss in last for miss in misses)


def test_even_shares_lose_by_how_unequal_hosts_are() -> None:
    assert trial().best_gain == 1.5
    assert trial().model_copy(update={"ratio": 0.25}).best_gain == 2.5


def test_new_results_take_the_places_of_old_ones_and_leave_the_others(tmp_path: Path) -> None:
    page = tmp_path / "mixed-devices.md"
    page.write_text(f"# Before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    other = trial().model_copy(update={"mbit_per_s": 2000})
    write_outcome(tmp_path, Outcome(trials={each.name: each for each in (trial(), other)}))
    write_outcome(tmp_path, Outcome(trials={trial().name: trial(spindle_s=0.65)}))
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# Before\n{BEGIN}\n") and text.endswith(f"{END}\nafter\n") and "old" not in text
    assert "| `spindle` | 650 ms | 650 | 700 ms | -7.1% | 100%, 90% | 1e-03 |" in text
    assert text.index("500 Mbit/s**") < text.index("2000 Mbit/s**")
    assert list(read_outcome(tmp_path).trials) == [trial().name, other.name]


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of the kernel's, whose groups are folders without any files of their own."""
    monkeypatch.setattr(quota, "ROOT", tmp_path)
    return tmp_path


def test_a_group_is_granted_its_part_of_each_period(groups: Path) -> None:
    with granting(0.25) as slow:
        assert slow.folder.parent == groups
        assert (slow.folder / "cpu.max").read_text() == "2500 10000"
    (groups / "cpu").mkdir()
    (groups / "cpu" / "cpu.cfs_quota_us").write_text("-1")
    with granting(0.5) as older, granting(0.5) as another:
        assert older.folder != another.folder
        assert older.folder.parent == groups / "cpu"
        assert (older.folder / "cpu.cfs_period_us").read_text() == "10000"
        assert (older.folder / "cpu.cfs_quota_us").read_text() == "5000"


def test_commands_and_running_processes_join_a_group(tmp_path: Path) -> None:
    group = Quota(tmp_path, 0.5)
    said = subprocess.run(group.command(["echo", "a b", "$c"]), capture_output=True, text=True, check=True)
    assert said.stdout == "a b $c\n"
    assert int((tmp_path / "cgroup.procs").read_text()) != os.getpid()
    group.take([os.getpid()])
    assert (tmp_path / "cgroup.procs").read_text() == str(os.getpid())
    with pytest.raises(BenchError, match="cannot be moved there"):
        Quota(tmp_path / "none", 0.5).take([os.getpid()])


def test_where_no_group_can_be_made_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quota, "ROOT", tmp_path / "none")
    with pytest.raises(BenchError, match="no control group with a quota"), granting(0.5):
        pytest.fail("there is none")
