"""Programs of all ranks run by threads over real process groups, a number for every message: what a backend
makes of the order of their posts, without models.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spindle_cli.program.types import COMPUTES, RECEIVES, Action, Kind, Program, Transfer
from spindle_cli.runtime.backends.strict_backend import SERIAL, STRICT, OperationQueue, StrictGroup

Backend = str  # "gloo", or one of the strict ones


def run_in_threads(program: Program, backend: Backend, timeout_s: float = 30.0) -> None:
    """One step of every rank, each by a thread of its own.

    Raises:
        RuntimeError: what gloo says of an operation that does not end in time.
    """
    store = dist.HashStore()
    queues: dict[int, OperationQueue] = {}

    def run(rank: int) -> None:
        groups = {
            each.index: _group(program, each.index, rank, backend, store, queues, timeout_s)
            for each in program.communicators
            if rank in each.ranks
        }
        _run_rank(program, rank, groups)

    with ThreadPoolExecutor(len(program.actions)) as threads:
        for done in [threads.submit(run, rank) for rank in program.actions]:
            done.result()


def _group(
    program: Program,
    index: int,
    rank: int,
    backend: Backend,
    store: dist.HashStore,
    queues: dict[int, OperationQueue],
    timeout_s: float,
) -> Any:
    ranks = program.communicators[index].ranks
    own, timeout = ranks.index(rank), timedelta(seconds=timeout_s)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore(f"{index}", store), own, len(ranks), timeout)
    if backend == "gloo":
        return gloo
    assert backend in (STRICT, SERIAL)
    queue = queues.setdefault(rank, OperationQueue()) if backend == SERIAL else OperationQueue()
    return StrictGroup(gloo, own, len(ranks), queue)


def _run_rank(program: Program, rank: int, groups: dict[int, Any]) -> None:
    posted: list[Any] = []
    kept: list[torch.Tensor] = []  # as long as they are under way
    receiving: dict[tuple[Kind, int], list[Callable[[], object]]] = {}
    for action in program.actions[rank]:
        if action.kind in COMPUTES and action.slice_index is not None:
            for wait in receiving.pop((action.kind, action.slice_index), ()):
                wait()
        if action.kind in (Kind.NORM, Kind.STEP):
            _wait_for_all(posted)
        if action.communicator is None:
            continue
        work, tensor = _post(program, action, groups[action.communicator])
        kept.append(tensor)
        if action.kind in COMPUTES:
            work.wait()
        elif action.kind in RECEIVES and action.transfer is not None:
            receiving.setdefault(_taker(action.transfer), []).append(_checked(work, tensor, action.transfer))
        else:
            posted.append(work)
    _wait_for_all(posted)


def _post(program: Program, action: Action, group: Any) -> tuple[Any, torch.Tensor]:
    ranks = program.communicators[action.communicator or 0].ranks
    transfer = action.transfer
    if transfer is None:
        tensor = torch.ones(1)
        return group.allreduce([tensor], dist.AllreduceOptions()), tensor
    if action.kind in RECEIVES:
        tensor = torch.empty(1)
        return group.recv([tensor], ranks.index(transfer.source), transfer.key), tensor
    tensor = torch.tensor([float(transfer.key)])
    return group.send([tensor], ranks.index(transfer.destination), transfer.key), tensor


def _checked(work: Any, tensor: torch.Tensor, transfer: Transfer) -> Callable[[], object]:
    def wait() -> None:
        work.wait()
        assert tensor.item() == transfer.key, "a message was taken for another"

    return wait


def _taker(transfer: Transfer) -> tuple[Kind, int]:
    if transfer.is_gradient:
        return Kind.BACKWARD, transfer.producer
    return Kind.FORWARD, transfer.consumer


def _wait_for_all(posted: list[Any]) -> None:
    while posted:  # gloo's own works are waited for once
        posted.pop(0).wait()
