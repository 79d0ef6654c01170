"""A process group for tests that is as strict as NCCL, over gloo on a CPU.

gloo forgives what NCCL does not: its messages wait for nobody but their own two ends, and its collectives for
nobody who sends. Here every communicator runs its operations one after another in the order in which its rank
posted them, whatever their peers; a send ends when its receiver has taken it; tags say nothing; types of
numbers that NCCL does not know are refused. With `SERIAL` all communicators of a process share one queue, as
on a device with room for one operation alone.

Gathers and reduce-scatters of unequal ranges, which gloo has not, are as torch makes them over NCCL: a
broadcast of each range, or a reduction of each, in the order of the ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from spindle_cli.operators.tensor_group import KNOWN

STRICT = "strict"
SERIAL = "strict-serial"
STRICT_BACKENDS = (STRICT, SERIAL)
# torch's names for gloo's collectives, beside gloo's own where they differ.
_COLLECTIVES = {
    **{
        name: name
        for name in ("allreduce", "alltoall", "barrier", "broadcast", "gather", "reduce", "scatter")
    },
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}


def gather(gloo: Any, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> None:
    """An `allgather` over torch's group for gloo, to its end."""
    (ranges,), (local,) = outputs, inputs
    if _are_equal(ranges):
        gloo.allgather(outputs, inputs, *_given(options)).wait()
        return
    ranges[gloo.rank()].copy_(local)  # nothing, where it is a part of what is gathered
    for root, part in enumerate(ranges):
        if part.numel():  # gloo has no message of nothing
            gloo.broadcast([part], _from(root)).wait()


def reduce_scatter(gloo: Any, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any = None) -> None:
    """A `reduce_scatter` over torch's group for gloo, to its end."""
    (local,), (ranges,) = outputs, inputs
    if _are_equal(ranges):
        gloo.reduce_scatter(outputs, inputs, *_given(options)).wait()
        return
    for root, part in enumerate(ranges):
        if part.numel():
            total = part.clone()  # gloo leaves sums of some ranks in what the others gave
            gloo.reduce([total], _to(root, options)).wait()
            if root == gloo.rank():
                local.copy_(total)


def _are_equal(ranges: Sequence[Tensor]) -> bool:
    return len({part.numel() for part in ranges}) == 1


def _given(options: Any) -> tuple[Any, ...]:
    return () if options is None else (options,)


def _from(root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options


def _to(root: int, of_all: Any) -> Any:
    options = dist.ReduceOptions()
    options.rootRank = root
    if of_all is not None:
        options.reduceOp = of_all.reduceOp
    return options


_DATA, _TAKEN = 0, 1  # gloo's tags: of a message, and of the answer to it


def register_strict_backends() -> None:
    """Let torch.distributed know these backends, by their names."""
    for name, queue_of in ((STRICT, OperationQueue), (SERIAL, _process_queue)):
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, partial(_make_group, queue_of), devices=["cpu"])


def _make_group(
    queue_of: Callable[[], OperationQueue], store: Any, rank: int, size: int, timeout: timedelta
) -> StrictGroup:
    return StrictGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size, queue_of())


class QueuedWork(dist.Work):
    """An operation that waits for its turn, or runs."""

    def __init__(self, run: Callable[[], object]) -> None:
        super().__init__()
        self._run = run
        self._future: torch.futures.Future[None] = torch.futures.Future()
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run it to its end; `wait` raises what it raises."""
        try:
            self._run()
        except Exception as error:
            self._error = error
        self._done.set()
        self._future.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it has ended.

        Raises:
            RuntimeError: what gloo says of a peer that is lost or does not answer; or it has not ended in
                `timeout`, as gloo's own work says.
        """
        if not self._done.wait(timeout.total_seconds() if timeout else None):
            raise RuntimeError(f"Timed out waiting {timeout} for an operation to complete")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Say whether the operation has ended."""
        return self._done.is_set()

    def get_future(self) -> torch.futures.Future[None]:
        """Return a future that is done when the operation has ended."""
        return self._future


class OperationQueue:
    """A thread that runs operations in the order in which they come, none before the one ahead has ended."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[QueuedWork] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def post(self, run: Callable[[], object]) -> QueuedWork:
        """Have an operation run behind all that were posted before."""
        work = QueuedWork(run)
        self._waiting.put(work)
        return work

    def _run(self) -> None:
        while True:
            self._waiting.get().run()


@cache
def _process_queue() -> OperationQueue:
    return OperationQueue()


class StrictGroup(dist.ProcessGroup):
    """One communicator."""

    def __init__(self, gloo: dist.ProcessGroupGloo, rank: int, size: int, queue: OperationQueue) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub knows one of its two forms
        self._gloo: Any = gloo  # torch's stub has none of its operations
        self._queue = queue

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:  # noqa: ARG002 - NCCL ignores it
        """Post a send that ends when its receiver has taken the tensors."""
        _require_known(tensors)

        def run() -> None:
            self._gloo.send(tensors, dst, _DATA).wait()
            self._gloo.recv([torch.empty(1, dtype=torch.uint8)], dst, _TAKEN).wait()

        return self._queue.post(run)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:  # noqa: ARG002
        """Post a receive that tells its sender when it has taken the tensors."""
        _require_known(tensors)

        def run() -> None:
            self._gloo.recv(tensors, src, _DATA).wait()
            self._gloo.send([torch.zeros(1, dtype=torch.uint8)], src, _TAKEN).wait()

        return self._queue.post(run)

    def shutdown(self) -> None:
        """Nothing is left to do: who ends a run has waited for its operations."""


def _require_known(tensors: object) -> None:
    """Refuse numbers that NCCL knows no type for, as torch's group for it does.

    Raises:
        TypeError: there are some.
    """
    for leaf in tree_leaves(tensors):
        if isinstance(leaf, Tensor) and leaf.dtype not in KNOWN:
            raise TypeError(f"Unconvertible NCCL type {leaf.dtype}")


def _of_gloo(name: str) -> Callable[..., object]:
    return lambda gloo, *args, **options: getattr(gloo, name)(*args, **options).wait()


def _queued(operation: Callable[..., object]) -> Callable[..., dist.Work]:
    def collective(self: StrictGroup, *args: Any, **options: Any) -> dist.Work:
        _require_known(args)
        return self._queue.post(partial(operation, self._gloo, *args, **options))

    return collective


for _name, _gloo_name in _COLLECTIVES.items():
    setattr(StrictGroup, _name, _queued(_of_gloo(_gloo_name)))
# Groups of broadcasts or reductions over NCCL, where sizes differ: one operation here too.
for _name, _operation in (("allgather", gather), ("reduce_scatter", reduce_scatter)):
    setattr(StrictGroup, _name, _queued(_operation))
