"""What a worker does before it touches its device and meets others: processes that load are forked then."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from alone import ALONE
from case_runs import ADAMW, Case, prepare

from spindle_cli.files.run_files import read_metrics
from spindle_cli.process.environment import WorkerEnvironment
from spindle_cli.runtime import connecting, trainer
from spindle_cli.runtime.ready import make_ready
from spindle_cli.runtime.trainer import Trainer

LOADED = {**ADAMW, "loader": {"workers": 1}}


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a process does with CUDA, with forks and with other workers, in order."""
    order: list[str] = []
    parent = os.getpid()

    def note(owner: Any, name: str, label: str, then: Callable[..., Any] | None = None) -> None:
        real = then or getattr(owner, name)

        def noting(*arguments: Any, **named: Any) -> Any:
            if os.getpid() == parent:
                order.append(label)
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, noting)

    def select_as_on_a_gpu(*arguments: Any) -> torch.device:
        torch.cuda._lazy_init()  # type: ignore[no-untyped-call]  # as torch.cuda.set_device does
        return connecting.select_device(*arguments)

    note(os, "fork", "fork")
    note(torch.cuda, "_lazy_init", "CUDA is started", lambda: None)
    note(trainer, "select_device", "a device is taken", select_as_on_a_gpu)
    note(trainer, "connected", "others are met")
    return order


@pytest.mark.parametrize("evaluated", [False, True])
def test_loaders_are_forked_before_cuda_starts_and_others_are_met(
    evaluated: bool, noted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for the task's batches, and one for those that it is evaluated on."""
    case = Case("moving", (0,), function="build_moving", train=LOADED, steps=2)
    if evaluated:
        case = replace(case, toys="gradient_toys", function="build_asking")
    request = prepare(case, 1, tmp_path / "run").model_copy(update={"capture_dir": None})
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    with Trainer.of_request(request, ALONE) as training:
        training.train()
    assert noted == [*["fork"] * (1 + evaluated), "a device is taken", "CUDA is started", "others are met"]
    assert [line.step for line in read_metrics(request.run_dir)] == [1, 2]


def test_only_the_first_rank_of_a_node_forks_them(
    noted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("moving", (0,), function="build_moving", train=LOADED, steps=2)
    request = prepare(case, 1, tmp_path / "run")
    ready = make_ready(request, WorkerEnvironment(0, 1, 1, 2, "127.0.0.1", 0))
    assert noted == []
    assert [task.name for task in ready.readers.trained] == ["moving"]
