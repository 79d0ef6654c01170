"""A task's batches through torchdata's StatefulDataLoader, with processes that load them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor
from torch.utils.data import Dataset

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.data.state_json import from_json, to_json
from spindle_cli.workload.data.streams import Make, StreamPass
from spindle_cli.workload.settings.loader import Loading
from spindle_cli.workload.types import FlowTask, Task

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader

T = TypeVar("T")


class LoaderWorkers:
    """A loader's worker processes: what each does first, given its number, and those that were started."""

    def __init__(self, begin: Callable[[int], None] | None = None) -> None:
        self.begin = begin
        self.processes: list[BaseProcess] = []


class Numbered(Protocol):
    """Batches of a map-style dataset, by number."""

    @property
    def task(self) -> Task | FlowTask: ...

    def rows(self, number: int, first: int, last: int, /) -> dict[str, Tensor]:
        """Samples [first, last) of a batch."""


def read_by_index(
    batches: Numbered, numbers: range, loading: Loading, make: Make[T], workers: LoaderWorkers | None = None
) -> Iterator[T]:
    """What is made of each of these batches of a map-style dataset, in order."""
    yield from _started(_loader(_Numbered(batches, make), loading, workers, sampler=numbers), workers)


def read_stream(
    task: Task | FlowTask,
    seed: int,
    loading: Loading,
    make: Make[T],
    state: Mapping[str, Any] | None = None,
    workers: LoaderWorkers | None = None,
) -> Iterator[tuple[T, dict[str, Any]]]:
    """What is made of each batch of a stream, without end: behind its last a stream is read anew. With it the
    place behind the batch, to go on from: JSON, the `state` to begin at.

    With several workers each reads its own part of the stream, and they take turns.

    Raises:
        WorkloadError: the stream has no batch, or none any more; or workers read the same samples.
    """
    epoch = 0 if state is None else int(state["epoch"])
    while True:
        loader = _loader(StreamPass(task, seed, epoch, make), loading, workers)
        found = state is not None
        if state is not None:
            loader.load_state_dict(from_json(state["loader"]))
            state = None
        digests: set[str] = set()
        for piece in _started(loader, workers):
            found = True
            _require_other_samples(task, piece.digest, digests)
            place = to_json(loader.state_dict(), task.name)
            yield piece.made, {"epoch": epoch, "workers": loading.workers, "loader": place}
        if not found:
            raise _ended(task, epoch)
        epoch += 1


def _started(loader: StatefulDataLoader, workers: LoaderWorkers | None) -> Iterator[Any]:
    """The loader's items; its workers are told to `workers`."""
    iterator = iter(loader)
    if workers is not None:
        workers.processes = list(getattr(iterator, "_workers", ()))
    yield from iterator


def _require_other_samples(task: Task | FlowTask, digest: str | None, digests: set[str]) -> None:
    if digest in digests:
        raise WorkloadError(
            f"task {task.name!r}: several loader workers read the same samples of the stream",
            hint="Let its __iter__ give each its own part by torch.utils.data.get_worker_info(), or set "
            "`train: {loader: {workers: 1}}`.",
        )
    if digest is not None:
        digests.add(digest)


def _ended(task: Task | FlowTask, epoch: int) -> WorkloadError:
    if epoch == 0:
        return WorkloadError(
            f"task {task.name!r}: the stream ends before it has given a batch of {task.batch_size} samples",
            hint="Use a smaller batch_size, or give it more samples"
            " (with several loader workers each needs a batch of its own).",
        )
    return WorkloadError(
        f"task {task.name!r}: the stream has ended, and gives no batch of {task.batch_size} samples when it "
        f"is read again (pass {epoch + 1})",
        hint="Let its __iter__ begin anew each time, give it more samples, or train fewer steps.",
    )


class _Numbered(Dataset[T]):
    """Batches of a map-style dataset as its items."""

    def __init__(self, batches: Numbered, make: Make[T]) -> None:
        self._batches = batches
        self._make = make

    def __getitem__(self, number: int) -> T:
        made = self._make(lambda: self._batches.rows(number, 0, self._batches.task.batch_size))
        assert made is not None, "a map-style dataset has every batch"
        return made


def _loader(
    dataset: Dataset[Any],
    loading: Loading,
    workers: LoaderWorkers | None,
    sampler: Iterable[int] | None = None,
) -> StatefulDataLoader:
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11, torch 2.13
        return StatefulDataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=loading.workers,
            prefetch_factor=loading.prefetch if loading.workers else None,
            worker_init_fn=None if workers is None else workers.begin,
            # Datasets need not be picklable, and what they have loaded is not loaded again.
            multiprocessing_context="fork" if loading.workers else None,
        )
