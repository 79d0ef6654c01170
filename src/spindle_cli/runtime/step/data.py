"""The input pipeline: each rank loads the samples that its slices read, ahead of time, in a thread of its
own.

Generators of random numbers belong to the whole process, and layers draw from them in the main thread. So
what draws while it is read is read by the main thread, when its step begins.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from spindle_cli.errors import WorkloadError
from spindle_cli.runtime.communication.rows import Samples
from spindle_cli.runtime.memory.copy_stream import CopyStream
from spindle_cli.runtime.memory.to_device import pinned
from spindle_cli.runtime.step.compute import LocalSlice
from spindle_cli.runtime.step.counting import Counting, Portion, rows_of
from spindle_cli.training.data.reading import BatchSource
from spindle_cli.training.items import DrawsError
from spindle_cli.training.precision import dtype_in
from spindle_cli.training.sampling import Schedule
from spindle_cli.workload.graph import IGNORED_LABEL

if TYPE_CHECKING:
    from torch import Tensor

    from spindle_cli.analysis.losses.counts import LossCounter

# Shapes of one sample, by task and field -> what counts for the tasks' losses
CountersOf = Callable[[Mapping[str, Mapping[str, tuple[int, ...]]]], Mapping[str, "LossCounter | None"]]

# Steps that are loaded ahead of the one that runs.
_STEPS_AHEAD = 2


def portions(slices: Iterable[LocalSlice]) -> tuple[Portion, ...]:
    """What this rank's slices read; slices of a task whose samples overlap, or follow each other, load them
    together, once.
    """
    needs: dict[str, list[tuple[Samples, tuple[str, ...]]]] = {}
    for local in slices:
        if local.wired.fields or local.wired.task.varying:  # of which the lengths are needed at least
            needs.setdefault(local.wired.task.task.name, []).append((local.samples, local.wired.fields))
    merged_portions: list[Portion] = []
    for task, wanted in needs.items():
        merged: list[Portion] = []
        for samples, fields in sorted(wanted):
            if merged and samples[0] <= merged[-1].samples[1]:
                last = merged.pop()
                samples = (last.samples[0], max(last.samples[1], samples[1]))
                fields = tuple(dict.fromkeys((*last.fields, *fields)))
            merged.append(Portion(task, samples, fields))
        merged_portions.extend(merged)
    return tuple(merged_portions)


class StepBatch:
    """What this rank loaded of one step's batches, on its device."""

    def __init__(
        self,
        loaded: Mapping[Portion, Mapping[str, Tensor]],
        shapes: Mapping[str, Mapping[str, tuple[int, ...]]] | None = None,
    ) -> None:
        """`shapes`: of one sample of each field, of tasks whose batches have several lengths."""
        self._loaded = loaded
        self.shapes = dict(shapes or {})

    def fields(self, task: str, samples: Samples, names: Sequence[str]) -> dict[str, Tensor]:
        """Views of the rows of `samples` of the named fields; a field's first dimension is the sample."""
        if not names:
            return {}
        rows = rows_of(self._loaded, task, samples, names)
        assert rows is not None, f"samples {samples} of task {task} are part of no portion"
        return rows


@dataclass(frozen=True)
class LoadedBatch:
    """What was loaded of one batch, ready to be copied to the device, and what its losses count.

    `states`: of streams behind it, by task. `shapes`: as `StepBatch` has them. `uncounted`: as the datasets
    give it, until it is counted.
    """

    portions: dict[Portion, dict[str, Tensor]]
    counts: Tensor
    states: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    uncounted: dict[Portion, dict[str, Tensor]] = field(default_factory=dict)

    def joined(self, added: LoadedBatch) -> LoadedBatch:
        """This and other portions of the same batch."""
        return LoadedBatch(
            {**self.portions, **added.portions},
            self.counts + added.counts,
            {**self.states, **added.states},
            {**self.shapes, **added.shapes},
            {**self.uncounted, **added.uncounted},
        )


class BatchCopies:
    """Copies batches to the device, on a GPU one ahead of the batch that is computed with, on a stream of its
    own: they are there when it comes to them. On a CPU they are there already.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = CopyStream(device)
        self._begun: dict[int, dict[Portion, _Copied]] = {}  # by batch, what was not asked for yet

    @property
    def is_apart(self) -> bool:
        """Whether anything is copied ahead."""
        return self._stream.is_apart

    def begin(self, number: int, portions: Mapping[Portion, Mapping[str, Tensor]]) -> None:
        """Start to copy portions of a batch, which lie in locked memory, unless that was started."""
        begun = self._begun.setdefault(number, {})
        for portion, tensors in portions.items():
            if portion not in begun:
                there = {
                    name: torch.empty_like(tensor, device=self._device) for name, tensor in tensors.items()
                }
                copied = self._stream.copy((there[name], tensor) for name, tensor in tensors.items())
                begun[portion] = _Copied(there, copied)

    def of(
        self, number: int, portions: Mapping[Portion, Mapping[str, Tensor]]
    ) -> Mapping[Portion, Mapping[str, Tensor]]:
        """A batch on the device, for what is computed next."""
        if not self.is_apart:
            return {
                portion: {name: tensor.to(self._device) for name, tensor in tensors.items()}
                for portion, tensors in portions.items()
            }
        self.begin(number, portions)
        begun = self._begun.pop(number)
        for copied in begun.values():
            self._stream.await_copy(copied.copied)
        return {portion: copied.tensors for portion, copied in begun.items()}

    def close(self) -> None:
        """Give up what nobody has asked for: memory goes back behind the copies into it."""
        for begun in self._begun.values():
            for copied in begun.values():
                self._stream.await_copy(copied.copied)
        self._begun.clear()


@dataclass(frozen=True)
class _Copied:
    """Tensors on the device, and what has happened when they are copied; None: they are."""

    tensors: dict[str, Tensor]
    copied: torch.cuda.Event | None


@dataclass(frozen=True)
class Share:
    """What this rank reads of the batches of steps that run the same tasks. `counting`: of what their losses
    count.
    """

    wanted: tuple[Portion, ...]
    counting: Counting | None = None


class Feed:
    """Loads one step after another in the background; `take` hands them out in order."""

    def __init__(
        self,
        batches: Mapping[str, BatchSource],
        shares: Mapping[tuple[str, ...], Share],
        schedule: Schedule,
        steps: range,
        device: torch.device,
        dtype: torch.dtype | None = None,
        all_must_count: Mapping[str, Collection[str]] | None = None,
        reads_ahead: bool = True,
        states: Mapping[str, Any] | None = None,
        counters_of: CountersOf | None = None,
        varying: Collection[str] = (),
    ) -> None:
        """`batches`: by task. `shares`: by the tasks that a step runs; where losses count anything, all of
        them count, and batches are held one step longer, since they are counted before their step begins.
        `schedule`: of all steps; `steps`: those to load, counted from 0. `dtype`: what floating-point fields
        are converted to, if given. `states`: where streams are at the beginning. `all_must_count`: by task,
        fields in which no label may be ignored. `reads_ahead`: not where passes change the type of constants
        meanwhile, which is the whole process's: a sample made of such constants would be another. `varying`:
        tasks whose batches have several lengths; `counters_of`: what counts for their losses. Which that is,
        is found in the main thread.
        """
        self._varying = frozenset(varying)
        self._counters_of = counters_of
        self._reads_ahead = reads_ahead
        self._all_must_count = all_must_count or {}
        self._shares = shares
        self._schedule = schedule
        self._batches_per_step = batches_per_step = schedule.batches_per_step
        self._batches = batches
        self._nothing = next(
            (share.counting.nothing for share in shares.values() if share.counting is not None), None
        )
        self._device = device
        self._dtype = dtype
        self._numbers = range(steps.start * batches_per_step, steps.stop * batches_per_step)
        self._taken = self._fetched = self._numbers.start
        self._held: dict[int, LoadedBatch] = {}
        self._came: LoadedBatch | BaseException | None = None  # of the thread, and not fetched yet
        self._copies = BatchCopies(device)
        self._error: BaseException | None = None  # of the first batch that cannot be loaded
        self._ready: queue.Queue[LoadedBatch | BaseException] = queue.Queue(_STEPS_AHEAD)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.states = dict(states or {})  # of streams behind the last batch that was taken, by task

    def take(self) -> StepBatch:
        """The next batch, on the device.

        Raises:
            Exception: whatever the user's dataset raised, with a note of which samples were being loaded.
        """
        ahead = self._batches_per_step if self.counts_losses else 0
        self._fetch_up_to(self._taken + ahead)
        loaded = self._held.pop(self._taken, None)
        if loaded is None:
            assert self._error is not None, "without an error every batch that is taken is held"
            raise self._error
        batch = StepBatch(self._copies.of(self._taken, loaded.portions), loaded.shapes)
        self._taken += 1
        self.states.update(loaded.states)
        self._copy_ahead()
        return batch

    @property
    def counts_losses(self) -> bool:
        """Whether the run's losses count anything; the same on every rank."""
        return self._nothing is not None

    def counts(self, step: int) -> Tensor:
        """What this rank's shares of the losses count of a step's batches together, of which none was taken:
        float64. Zeros for a batch that cannot be loaded (to take it raises why), and behind the last step.
        """
        assert self._nothing is not None, "no loss counts anything"
        numbers = range(step * self._batches_per_step, (step + 1) * self._batches_per_step)
        self._fetch_up_to(numbers[-1])
        counts = [self._held[number].counts for number in numbers if number in self._held]
        return sum(counts, self._nothing)

    def close(self) -> None:
        """Stop loading; the thread ends with the item that it is at."""
        self._stopped.set()
        self._copies.close()

    def _copy_ahead(self) -> None:
        """Start to copy what is there of the next batch, without waiting for it to be loaded."""
        if not self._copies.is_apart or self._taken >= self._numbers.stop:
            return
        loaded: LoadedBatch | BaseException | None = self._held.get(self._taken)
        if loaded is None and self._fetched == self._taken:
            with suppress(queue.Empty):
                self._came = self._came or self._ready.get_nowait()
            loaded = self._came
        if isinstance(loaded, LoadedBatch):
            self._copies.begin(self._taken, loaded.portions)

    def _fetch_up_to(self, number: int) -> None:
        """Hold every batch up to this one, or those before the first that cannot be loaded: behind it none
        comes.
        """
        for fetched in range(self._fetched, min(number + 1, self._numbers.stop)):
            if self._error is not None:
                return
            batch = self._fetch(fetched)
            if isinstance(batch, BaseException):
                self._error = batch
                return
            self._held[fetched] = batch
            self._fetched = fetched + 1

    def _fetch(self, number: int) -> LoadedBatch | BaseException:
        loaded = self._loaded_ahead()
        if isinstance(loaded, BaseException):
            return loaded
        try:
            wanted = self._share_of(number).wanted
            missing = [portion for portion in wanted if portion not in loaded.portions]
            loaded = self._counted(loaded.joined(self._load_all(missing, number)), number)
        except BaseException as error:  # sys.exit too: raised when the batch is taken
            return error
        if self._thread is None and self._reads_ahead:
            self._start(self._numbers[number + 1 - self._numbers.start :])
        return loaded

    def _counted(self, loaded: LoadedBatch, number: int) -> LoadedBatch:
        """With what losses count whose batches have several lengths; by the main thread."""
        counting = self._share_of(number).counting
        if counting is None or not loaded.uncounted:
            return loaded
        assert self._counters_of is not None, "tasks with several lengths have counters of them"
        counts = counting.count(loaded.uncounted, self._counters_of(loaded.shapes))
        return replace(loaded, counts=loaded.counts + counts, uncounted={})

    def _share_of(self, number: int) -> Share:
        return self._shares[self._schedule.of_batch(number)]

    def _start(self, numbers: range) -> None:
        """Load the batches of these numbers ahead. The first was loaded before, to see which tasks draw."""
        self._thread = threading.Thread(target=self._run, args=(numbers,), name="input", daemon=True)
        self._thread.start()

    def _loaded_ahead(self) -> LoadedBatch | BaseException:
        """What the thread has of the next batch: everything but what draws."""
        if self._thread is None:
            return self._load_all([], self._numbers.start)
        came, self._came = self._came, None
        return self._ready.get() if came is None else came

    def _run(self, numbers: range) -> None:
        try:
            for number in numbers:
                if self._stopped.is_set():
                    return
                self._hand_over(self._load_ahead(number))
        except BaseException as error:  # sys.exit too: handed to the training thread, which raises it
            self._hand_over(error)

    def _load_ahead(self, number: int) -> LoadedBatch:
        loaded = self._load_all([], number)
        for portion in self._share_of(number).wanted:
            if not self._batches[portion.task].draws:
                with suppress(DrawsError):  # left to the main thread
                    loaded = loaded.joined(self._load_all([portion], number, is_ahead=True))
        return loaded

    def _load_all(self, portions: Sequence[Portion], number: int, *, is_ahead: bool = False) -> LoadedBatch:
        loaded = {portion: self._load(portion, number, is_ahead=is_ahead) for portion in portions}
        tasks = dict.fromkeys(portion.task for portion in portions)
        states = {task: state for task in tasks if (state := self._batches[task].state) is not None}
        later = {portion: tensors for portion, tensors in loaded.items() if portion.task in self._varying}
        now = {portion: tensors for portion, tensors in loaded.items() if portion not in later}
        counting = self._share_of(number).counting
        counts = torch.zeros(0) if counting is None else counting.count(now)
        shapes = {
            task: self._batches[task].shapes(self._schedule.own_number(task, number))
            for task in tasks
            if task in self._varying
        }
        prepared = {
            portion: {name: self._prepare(tensor) for name, tensor in tensors.items()}
            for portion, tensors in loaded.items()
        }
        return LoadedBatch(prepared, counts, states, shapes, {} if counting is None else later)

    def _load(self, portion: Portion, number: int, *, is_ahead: bool) -> dict[str, Tensor]:
        batches = self._batches[portion.task]
        read = batches.rows_without_draws if is_ahead else batches.rows
        try:
            task_number = self._schedule.own_number(portion.task, number)
            loaded = read(task_number, *portion.samples, portion.fields)
            self._require_labels(portion.task, loaded)
            return loaded
        except Exception as error:
            first, last = portion.samples
            error.add_note(
                f"while loading samples {first} to {last - 1} of task {portion.task!r}, "
                f"step {number // self._batches_per_step + 1}"
            )
            raise

    def _require_labels(self, task: str, loaded: Mapping[str, Tensor]) -> None:
        for name in self._all_must_count.get(task, ()):
            if name in loaded and bool((loaded[name] == IGNORED_LABEL).any()):
                raise WorkloadError(
                    f"task {task!r}: field {name!r} has labels of {IGNORED_LABEL}, which a mean inside an "
                    "operator ignores, so that its shares do not add up",
                    hint="Compute the loss in the task's own forward, where a mean over labels that count is "
                    "split exactly, or list its operator in `coupled`, which leaves it whole.",
                )

    def _prepare(self, tensor: Tensor) -> Tensor:
        return pinned(tensor.to(dtype_in(tensor.dtype, self._dtype)), self._device)

    def _hand_over(self, item: LoadedBatch | BaseException) -> None:
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=0.5)
            except queue.Full:
                continue
            return
