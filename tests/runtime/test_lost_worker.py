"""A loader's worker that dies is named, whatever its death looks like where its items are taken."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.process import BaseProcess

import pytest
import torch

from helpers import data_toys
from helpers.loading import SEED, read, task_of
from spindle_cli.errors import RunFailedError, WorkerLostError, WorkloadError
from spindle_cli.runtime.loading import reader
from spindle_cli.runtime.loading.packed import PackedBatch
from spindle_cli.runtime.loading.reader import Loaded
from spindle_cli.runtime.loading.wire import cause_of
from spindle_cli.training.batches import Batches


def test_a_worker_that_is_killed_is_named_with_the_signal() -> None:
    order = Batches(task_of(data_toys.ByIndex()), SEED)
    task = task_of(data_toys.Killed(fails_at=order.indices(1)[0]))
    with (
        read(task, range(4), workers=1) as (one,),
        pytest.raises(  # which is started again, where that is asked for
            WorkerLostError, match=r"task 't': its loader worker \(process \d+\) was killed by SIGKILL"
        ),
    ):
        for number in range(4):
            one.rows(number, 0, 4)


def test_a_dead_worker_is_told_though_its_signal_comes_while_another_error_is_handled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raised(*_: object) -> None:
        raise RuntimeError("DataLoader worker is killed")

    def load(*_: object) -> Iterator[Loaded]:
        signal.signal(signal.SIGCHLD, raised)  # as torch's own
        yield Loaded(PackedBatch.of({"x": torch.zeros(1)}), None)
        raise ConnectionResetError

    def cause(task: str, *_: object) -> Exception:
        signal.raise_signal(signal.SIGCHLD)
        return WorkerLostError(f"{task} lost it")

    monkeypatch.setattr(reader, "_load", load)
    monkeypatch.setattr(reader, "cause_of", cause)
    with read(task_of(data_toys.ByIndex()), range(4)) as (one,):
        one.rows(0, 0, 1)
        with pytest.raises(WorkerLostError, match="t lost it"):
            one.rows(1, 0, 1)


def ends(*how: int) -> list[BaseProcess]:
    """Processes that end with these codes (below 0: by a signal), a little later."""

    def end(code: int) -> None:
        time.sleep(0.2)
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)

    found: list[BaseProcess] = [get_context("fork").Process(target=end, args=(code,)) for code in how]
    for each in found:
        each.start()
    return found


@pytest.mark.parametrize("error", [EOFError(), ConnectionResetError(), RuntimeError("received 0 items")])
def test_an_error_before_a_worker_has_ended_is_that_worker_s_death(error: Exception) -> None:
    workers = ends(0, -signal.SIGKILL)
    found = cause_of("t", error, workers)
    assert isinstance(found, WorkerLostError)
    assert found.message == f"task 't': its loader worker (process {workers[1].pid}) was killed by SIGKILL"


def test_a_worker_that_ends_itself_is_told_with_its_code() -> None:
    found = cause_of("t", EOFError(), ends(3))
    assert isinstance(found, RunFailedError) and "has ended (exit code 3)" in found.message


def test_an_error_that_no_worker_has_died_of_stays_what_it_is() -> None:
    error = EOFError("of the dataset's")
    assert cause_of("t", error, []) is error
    assert cause_of("t", error, ends(0)) is error
    for own in (WorkloadError("several workers read the same"), SystemExit(3)):
        dead = ends(-signal.SIGKILL)
        dead[0].join()
        assert cause_of("t", own, dead) is own
