"""Clocks, processes, files and the system's chance: refused between operators where forward computes with
them, since a trace has one answer.
"""

from __future__ import annotations

import datetime
import functools
import gc
import importlib.util
import json
import logging
import operator
import os
import random
import socket
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.analysis.analyse import analyse
from spindle_cli.analysis.outside import heard, noting_outside_reads
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.types import Task, Workload

WIDTH = 4
Asks = Callable[[], float]
HERE = Path(__file__).name


class Layer(nn.Module):
    def __init__(self, asks: Asks = lambda: 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.asks()


class Net(nn.Module):
    def __init__(self, asks: Asks, layer: Layer | None = None) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer() if layer is None else layer
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.first(x) * self.asks())).pow(2).mean()  # type: ignore[no-any-return]


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))}


def workload(net: nn.Module) -> Workload:
    return Workload("w", [Task("t", net, 4, Rows())], (Layer,))


STARTED = time.time()
CLOCKS: dict[str, tuple[Asks, str]] = {
    "seconds": (lambda: 1 + 1e-3 * (time.time() - STARTED), "time.time"),
    "by a name of the file's": (lambda: perf_counter(), "time.perf_counter"),
    "nanoseconds": (lambda: time.monotonic_ns() * 1e-15, "time.monotonic_ns"),
    "which branch": (lambda: 0.1 if time.time() - STARTED > 3600 else 1.0, "time.time"),
    "date": (lambda: float(datetime.datetime.now().month), "datetime.now"),
    "day": (lambda: float(datetime.date.today().day), "datetime.date.today"),
    "hour as text": (lambda: 1.0 + float(time.strftime("%j")), "time.strftime"),
    "process": (lambda: os.getpid() * 1e-5, "os.getpid"),
    "machine": (lambda: float(len(socket.gethostname())), "socket.gethostname"),
    "seed": (lambda: float(torch.initial_seed() % 7), "torch.initial_seed"),
    "whether a file is there": (lambda: 0.1 if Path("slower").exists() else 1.0, "os.stat"),
}


@pytest.mark.parametrize(("asks", "name"), CLOCKS.values(), ids=CLOCKS)
def test_what_forward_computes_with_between_operators_is_refused(asks: Asks, name: str) -> None:
    with pytest.raises(WorkloadError, match=rf"{HERE}:\d+: .* forward asks {name} between operators") as said:
        analyse(workload(Net(asks)))
    assert "step_values" in str(said.value)


@pytest.mark.parametrize("asks", [asks for asks, _ in CLOCKS.values()], ids=CLOCKS)
def test_an_operator_that_computes_with_it_is_not_split(asks: Asks) -> None:
    graph = analysed(workload(Net(lambda: 1.0, Layer(asks))))
    assert [op.coupled for op in graph.tasks["t"].ops] == [False, True]


def test_what_looks_on_as_garbage_is_collected_is_not_forward() -> None:
    def timed(phase: str, info: dict[str, int]) -> None:
        assert perf_counter() > 0 and phase and info

    gc.callbacks.append(timed)
    try:
        with pytest.raises(WorkloadError, match=rf"{HERE}:\d+: .* forward asks time.time between operators"):
            analyse(workload(Net(lambda: 1 + 1e-3 * (gc.collect(0) * 0 + time.time() - STARTED))))
    finally:
        gc.callbacks.remove(timed)


def noted(times: list[float] = []) -> float:  # noqa: B006 - what forward keeps, and never reads
    times.append(time.perf_counter())
    if time.time() - STARTED > 3600:
        logging.getLogger(__name__).info("%s: slow in process %d", socket.gethostname(), os.getpid())
    return 1.0


def test_what_is_only_noted_is_taken() -> None:
    graph = analysed(workload(Net(noted, Layer(noted))))
    assert [op.coupled for op in graph.tasks["t"].ops] == [False, False]


def test_numbers_beside_the_loss_are_nobodys() -> None:
    class Timed(Net):
        def forward(self, x: Tensor) -> dict[str, object]:  # type: ignore[override]
            begun = time.perf_counter()
            loss = super().forward(x)
            return {"loss": loss, "seconds": time.perf_counter() - begun}

    assert len(analysed(workload(Timed(lambda: 1.0))).tasks["t"].ops) == 2


CHANCE: dict[str, Asks] = {
    "bytes": lambda: os.urandom(1)[0] / 255,
    "an identifier": lambda: uuid.uuid4().int % 7 / 7,
    "the system's": lambda: random.SystemRandom().random(),
}


@pytest.mark.parametrize("asks", CHANCE.values(), ids=CHANCE)
def test_the_systems_random_numbers_are_refused(asks: Asks) -> None:
    said = rf"{HERE}:\d+: .* draws random numbers by os\.urandom between operators"
    with pytest.raises(WorkloadError, match=said):
        analyse(workload(Net(asks)))
    with pytest.raises(WorkloadError, match=r"'second' \(Layer\) draws random numbers by os\.urandom"):
        analyse(workload(Net(lambda: 1.0, Layer(asks))))


def test_a_library_may_take_a_name_by_chance_for_what_it_makes_once() -> None:
    """Where it keeps what it has made, nobody looks."""
    code = compile(
        "def name():\n    global NAME\n    NAME = NAME or uuid4().hex\n    return NAME", "einx.py", "exec"
    )
    library: dict[str, Any] = {"uuid4": uuid.uuid4, "NAME": ""}
    exec(code, library)
    makes = functools.partial(operator.call, library["name"])
    graph = analysed(workload(Net(lambda: 1.0, Layer(lambda: float(len(makes()))))))
    assert [op.coupled for op in graph.tasks["t"].ops] == [False, False]


@pytest.mark.parametrize("by_torch", [False, True])
def test_a_file_that_forward_reads_is_refused_between_operators_alone(tmp_path: Path, by_torch: bool) -> None:
    file = tmp_path / "beta"
    torch.save(0.5, file) if by_torch else file.write_text("0.5")

    def reads() -> float:
        return float(torch.load(file)) if by_torch else float(json.loads(file.read_text()))

    with pytest.raises(WorkloadError, match=rf"{HERE}:\d+: .* forward reads the file '.*beta'") as said:
        analyse(workload(Net(reads)))
    assert "where the model is built" in str(said.value)
    graph = analysed(workload(Net(lambda: 1.0, Layer(reads))))
    assert [op.coupled for op in graph.tasks["t"].ops] == [False, False]


def test_all_is_as_it_was_behind_an_analysis() -> None:
    kinds = time.time, os.getpid, os.stat, datetime.datetime, datetime.date, open, perf_counter
    analysed(workload(Net(noted)))
    assert kinds == (time.time, os.getpid, os.stat, datetime.datetime, datetime.date, open, perf_counter)
    assert abs(time.time() - datetime.datetime.now().timestamp()) < 60


def test_a_name_that_an_installed_library_takes_later_is_heard_too(tmp_path: Path) -> None:
    """Modules of libraries are looked through again once they have more names, not each time."""
    file = tmp_path / "site-packages" / "lib_of_clocks.py"
    file.parent.mkdir()
    file.write_text("def asks():\n    return clock() % 2\n")
    spec = importlib.util.spec_from_file_location("lib_of_clocks", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "lib_of_clocks", module)
        spec.loader.exec_module(module)
        with heard():
            assert "clock" not in vars(module)
        for _ in range(2):
            module.clock = time.perf_counter
            with noting_outside_reads() as questions:
                module.asks()
            assert list(questions.places) == ["time.perf_counter"]
            assert module.clock is time.perf_counter


def test_a_module_in_the_place_of_another_is_heard_too(tmp_path: Path) -> None:
    """As many modules as at the last look need not be the same ones."""
    first, second = (import_from(tmp_path / name / "users_clock.py") for name in ("first", "second"))
    with pytest.MonkeyPatch.context() as patch:
        for module in (first, second):
            patch.setitem(sys.modules, "users_clock", module)
            with noting_outside_reads() as questions:
                module.asks()
            assert list(questions.places) == ["time.perf_counter"]


def import_from(path: Path) -> ModuleType:
    path.parent.mkdir()
    path.write_text("from time import perf_counter as clock\n\ndef asks():\n    return clock() % 2\n")
    spec = importlib.util.spec_from_file_location("users_clock", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
