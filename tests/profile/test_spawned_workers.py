"""How profiling processes start, forked or not, and end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import spindle_cli
from spindle_cli.process.devices import may_fork
from spindle_cli.profile.measuring import pool
from spindle_cli.profile.measuring.messages import WorkerSettings
from spindle_cli.profile.measuring.pool import WorkerPool
from spindle_cli.profile.op.stand_ins import load_analysed

TINY = str(Path(__file__).parent / "tiny_workload.py") + ":build"


@pytest.mark.parametrize(
    ("platform", "accelerator", "may"),
    [("linux", None, True), ("linux", torch.device("cuda"), False), ("darwin", None, False)],
)
def test_processes_are_forked_on_linux_by_a_torch_that_is_built_for_no_accelerator(
    monkeypatch: pytest.MonkeyPatch, platform: str, accelerator: torch.device | None, *, may: bool
) -> None:
    """What autograd starts for an accelerator it starts in the process that forks."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    monkeypatch.setattr(sys, "platform", platform)
    assert may_fork() is may


@pytest.mark.processes
def test_forked_processes_end_when_nobody_asks_them_any_more() -> None:
    """Each holds what the one that forks it has open, its own pipe's other end and those of all before it."""
    here = Path.cwd()
    settings = WorkerSettings(
        source=TINY, folder=here, device="cpu", threads=1, processes_per_core=1.0, stand_ins={}, lengths={}
    )
    with WorkerPool(2, settings, load_analysed(TINY, here, {})) as workers:
        workers.wait_until_started()
    assert [worker.exitcode for worker in workers._workers] == [0, 0]


@pytest.mark.long
@pytest.mark.processes
def test_processes_that_are_not_forked_measure_the_same_points(monkeypatch: pytest.MonkeyPatch) -> None:
    def points() -> set[tuple[str, int, int]]:
        made = spindle_cli.profile(TINY, nproc=2, threads=1, time_limit=0.02, accept_noise=True)
        return {
            (each.name, point.dp, point.tp)
            for each in made.metaops
            for point in each.curve
            if point.source == "measured"
        }

    forked = points()
    monkeypatch.setattr(pool, "may_fork", lambda: False)
    assert points() == forked != set()
