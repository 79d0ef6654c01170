"""What takes a processor's time beside the ops: when it counts, and what reading samples takes."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from spindle_cli.profile.measuring.measure import (
    DeviceType,
    ProcessorCosts,
    _load_s,
    processor_costs,
    turns_beside,
)
from spindle_cli.profile.types import MeasuredLink, RuntimeOverhead
from spindle_cli.training.batches import Batches
from spindle_cli.workload.types import Task

LINK = MeasuredLink(
    kind="intra_node", latency_s=1e-4, points=(), message_processor_s=2e-5, processor_s_per_byte=1e-9
)


@pytest.mark.parametrize(
    ("device", "processes", "threads", "cores", "turns"),
    [
        ("cpu", 4, 1, 2, 2.0),
        ("cpu", 2, 1, 2, 1.0),
        ("cpu", 1, 2, 2, 1.0),
        ("cpu", 1, 1, 2, 0.0),  # the other core does it
        ("cpu", 1, 1, 0.5, 2.0),  # of a quota
        ("cpu", 2, 1, 1.5, 4 / 3),
        ("cuda", 8, 1, 2, 0.0),
    ],
)
def test_it_counts_where_every_core_computes(
    device: DeviceType, processes: int, threads: int, cores: float, turns: float
) -> None:
    assert turns_beside(device, processes, threads, cores) == turns


def test_processes_that_take_turns_multiply_it() -> None:
    costs = processor_costs(2.0, LINK, {"a": 1e-3})
    assert (costs.message_s, costs.s_per_byte, costs.load_s) == (4e-5, 2e-9, {"a": 2e-3})
    assert processor_costs(0.0, LINK, {"a": 1e-3}) == ProcessorCosts()
    assert processor_costs(1.0, None, {}).message_s == 0.0
    overhead = RuntimeOverhead(step_s=3e-3, pass_s=1e-4)
    costs = processor_costs(2.0, LINK, {}, overhead)
    assert (costs.step_s, costs.pass_s) == (6e-3, 2e-4)
    assert processor_costs(0.0, LINK, {}, overhead) == ProcessorCosts()


class Items(Dataset[dict[str, torch.Tensor]]):
    """Every item takes 1 ms of the clock that the test gives."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.clock[0] += 1e-3
        return {"x": torch.zeros(2)}


@pytest.mark.parametrize("batch_size", [4, 32])
def test_reading_is_timed_for_each_sample(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: clock[0])
    task = Task("t", nn.Linear(2, 1), batch_size, Items(clock))
    assert _load_s(Batches(task, 0)) == pytest.approx(1e-3)


class Readers(Dataset[dict[str, torch.Tensor]]):
    """Notes which threads read it, and draws a random number where it is told to."""

    def __init__(self, *, draws: bool) -> None:
        self.draws = draws
        self.threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.threads.append(threading.current_thread())
        return {"x": torch.rand(2) if self.draws else torch.zeros(2)}


@pytest.mark.parametrize("draws", [False, True])
def test_samples_are_read_beside_the_main_thread_as_in_training(*, draws: bool) -> None:
    """The first by the main thread; then by one other, but for what draws random numbers."""
    data = Readers(draws=draws)
    assert _load_s(Batches(Task("t", nn.Linear(2, 1), 4, data), 0)) > 0.0
    assert data.threads[0] is threading.main_thread()
    behind = set(data.threads[4:])
    assert len(behind) == 1
    assert (threading.main_thread() in behind) is draws
