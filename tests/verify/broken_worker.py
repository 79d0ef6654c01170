"""The runtime, broken on purpose: `python -m broken_worker REQUEST.json` runs it whole and with every defect.

Each of these runs leaves its files in a folder of the defect's name below the request's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from helpers.analysed_once import in_the_abstract
from spindle_cli.analysis import localise
from spindle_cli.files.request import RunRequest
from spindle_cli.process.environment import WorkerEnvironment
from spindle_cli.process.worker_session import worker_session
from spindle_cli.runtime import assembling, worker
from spindle_cli.runtime.communication.gradients import GradientPool
from spindle_cli.runtime.connecting import connected
from spindle_cli.runtime.part.localise import LocalModel
from spindle_cli.runtime.step.losses import LossAccumulator
from spindle_cli.training.batches import Batches


@contextmanager
def whole(_rank: int) -> Iterator[None]:
    """Nothing is broken."""
    yield


@contextmanager
def gradients_scaled(_rank: int) -> Iterator[None]:
    """Every gradient twice too large: Adam's steps stay the same."""
    right = LossAccumulator.seed
    with mock.patch.object(LossAccumulator, "seed", lambda *arguments: 2 * right(*arguments)):
        yield


@contextmanager
def share_scaled(_rank: int) -> Iterator[None]:
    """A share of the batch counts as if it were the whole: the dp of another slice."""
    right = LossAccumulator.arguments

    def arguments(self: LossAccumulator, task: str, samples: tuple[int, int]) -> tuple[Any, ...]:
        share, *counts = right(self, task, samples)
        return (1.0, *(count * share for count in counts))

    with mock.patch.object(LossAccumulator, "arguments", arguments):
        yield


@contextmanager
def sample_lost(_rank: int) -> Iterator[None]:
    """The last sample of every share is the first once more."""
    right = Batches.rows

    def rows(self: Batches, step: int, first: int, last: int, fields: Any = None) -> dict[str, torch.Tensor]:
        batch = right(self, step, first, last, fields)
        for field in batch.values():
            field[-1] = field[0]
        return batch

    with mock.patch.object(Batches, "rows", rows):
        yield


@contextmanager
def copy_stale(rank: int) -> Iterator[None]:
    """Rank 0 never takes over one of the parameters that rank 1 updates for both."""
    right = assembling.make_pool

    def make_pool(model: LocalModel, *arguments: Any) -> GradientPool:
        pool = right(model, *arguments)
        parameter = next(iter(model.trained.values()))
        initial = parameter.detach().clone()

        def keeping(take_over: Callable[..., None]) -> Callable[..., None]:
            def keep(*which: int) -> None:
                take_over(*which)
                parameter.data.copy_(initial)

            return keep

        pool.await_parameters = keeping(pool.await_parameters)
        pool.await_all_parameters = keeping(pool.await_all_parameters)
        return pool

    if rank == 0:
        with mock.patch.object(assembling, "make_pool", make_pool):
            yield
    else:
        yield


@contextmanager
def step_lost(_rank: int) -> Iterator[None]:
    """Training ends one step early: the last line of metrics and the last update are missing."""
    right = worker.train_plan

    def shorter(request: RunRequest, *rest: Any) -> None:
        right(request.model_copy(update={"steps": (request.steps or 0) - 1}), *rest)

    with mock.patch.object(worker, "train_plan", shorter):
        yield


DEFECTS: Mapping[str, Callable[[int], Any]] = {
    defect.__name__: defect
    for defect in (whole, gradients_scaled, share_scaled, sample_lost, copy_stale, step_lost)
}


def run_all(request: RunRequest, environment: WorkerEnvironment) -> None:
    device = torch.device("cpu")
    with connected(request, environment, device):
        for name, defect in DEFECTS.items():
            folder = request.run_dir / name
            (folder / "captured").mkdir(parents=True, exist_ok=True)
            changed = {"run_dir": folder, "capture_dir": folder / "captured"}
            with defect(environment.rank):
                worker.train_plan(request.model_copy(update=changed), environment, device)


def main(argv: list[str]) -> None:
    request = RunRequest.read(Path(argv[1]))
    me = WorkerEnvironment.read()
    with (
        mock.patch.object(localise, "in_the_abstract", in_the_abstract),  # the same for every defect
        worker_session(request.run_dir, me.rank),
    ):
        run_all(request, me)


if __name__ == "__main__":
    main(sys.argv)
