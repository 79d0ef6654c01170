"""The input pipeline: each rank loads the samples that its slices read, ahead of time, in a thread of its
own.

Generators of random numbers belong to the whole process, and layers draw from them in the main thread. So
what draws while it is read is read by the main thread, when its step begins.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spindle_cli.runtime.communication.rows import Samples
from spindle_cli.runtime.step.compute import LocalSlice
from spindle_cli.workload.training.batches import Batches
from spindle_cli.workload.training.item_draws import DrawsError

if TYPE_CHECKING:
    from torch import Tensor

# Steps that are loaded ahead of the one that runs.
_STEPS_AHEAD = 2


@dataclass(frozen=True)
class Portion:
    """The samples of one task's batch that this rank loads, and the fields that it keeps of them."""

    task: str
    samples: Samples
    fields: tuple[str, ...]


def portions(slices: Iterable[LocalSlice]) -> tuple[Portion, ...]:
    """What this rank's slices read; slices of a task whose samples overlap load them together, once."""
    needs: dict[str, list[tuple[Samples, tuple[str, ...]]]] = {}
    for local in slices:
        if local.wired.fields:
            needs.setdefault(local.wired.task.task.name, []).append((local.samples, local.wired.fields))
    found: list[Portion] = []
    for task, wanted in needs.items():
        merged: list[Portion] = []
        for samples, fields in sorted(wanted):
            if merged and samples[0] < merged[-1].samples[1]:
                last = merged.pop()
                samples = (last.samples[0], max(last.samples[1], samples[1]))
                fields = tuple(dict.fromkeys((*last.fields, *fields)))
            merged.append(Portion(task, samples, fields))
        found.extend(merged)
    return tuple(found)


class StepBatch:
    """What this rank loaded of one step's batches, on its device."""

    def __init__(self, loaded: Mapping[Portion, Mapping[str, Tensor]]) -> None:
        self._loaded = loaded

    def fields(self, task: str, samples: Samples, names: Sequence[str]) -> dict[str, Tensor]:
        """Views of the rows of `samples` of the named fields; a field's first dimension is the sample."""
        if not names:
            return {}
        for portion, tensors in self._loaded.items():
            first, last = portion.samples
            if portion.task == task and first <= samples[0] and samples[1] <= last:
                return {name: tensors[name][samples[0] - first : samples[1] - first] for name in names}
        raise AssertionError(f"samples {samples} of task {task} are part of no portion")


class Feed:
    """Loads one step after another in the background; `take` hands them out in order."""

    def __init__(
        self,
        batches: Mapping[str, Batches],
        wanted: tuple[Portion, ...],
        steps: range,
        device: torch.device,
        dtype: torch.dtype | None = None,
        batches_per_step: int = 1,
    ) -> None:
        """`batches`: by task. `steps`: counted from 0. `dtype`: what floating-point fields are converted to,
        if given. `batches_per_step`: how many are taken for each step.
        """
        self._batches_per_step = batches_per_step
        self._batches = batches
        self._wanted = wanted
        self._device = device
        self._dtype = dtype
        self._next = range(steps.start * batches_per_step, steps.stop * batches_per_step)
        self._ready: queue.Queue[dict[Portion, dict[str, Tensor]] | BaseException] = queue.Queue(_STEPS_AHEAD)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> StepBatch:
        """The next batch, on the device.

        Raises:
            Exception: whatever the user's dataset raised, with a note of which samples were being loaded.
        """
        index, self._next = self._next[0], self._next[1:]
        loaded = self._loaded_ahead()
        for portion in self._wanted:
            if portion not in loaded:
                loaded[portion] = self._load(portion, index)
        if self._thread is None:
            self._start(self._next)
        return StepBatch(
            {
                portion: {
                    name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()
                }
                for portion, tensors in loaded.items()
            }
        )

    def close(self) -> None:
        """Stop loading; the thread ends with the item that it is at."""
        self._stopped.set()

    def _start(self, numbers: range) -> None:
        """Load the batches of these numbers ahead. The first was loaded before, to see which tasks draw."""
        self._thread = threading.Thread(target=self._load_all, args=(numbers,), name="input", daemon=True)
        self._thread.start()

    def _loaded_ahead(self) -> dict[Portion, dict[str, Tensor]]:
        """What the thread has of the next batch: everything but what draws."""
        if self._thread is None:
            return {}
        loaded = self._ready.get()
        if isinstance(loaded, BaseException):
            raise loaded
        return loaded

    def _load_all(self, numbers: range) -> None:
        try:
            for number in numbers:
                if self._stopped.is_set():
                    return
                self._hand_over(self._load_ahead(number))
        except BaseException as error:  # sys.exit too: handed to the training thread, which raises it
            self._hand_over(error)

    def _load_ahead(self, number: int) -> dict[Portion, dict[str, Tensor]]:
        loaded: dict[Portion, dict[str, Tensor]] = {}
        for portion in self._wanted:
            if not self._batches[portion.task].draws:
                with suppress(DrawsError):  # left to the main thread
                    loaded[portion] = self._load(portion, number, is_ahead=True)
        return loaded

    def _load(self, portion: Portion, number: int, *, is_ahead: bool = False) -> dict[str, Tensor]:
        batches = self._batches[portion.task]
        read = batches.rows_without_draws if is_ahead else batches.rows
        try:
            rows = read(number, *portion.samples, portion.fields)
        except Exception as error:
            first, last = portion.samples
            error.add_note(
                f"while loading samples {first} to {last - 1} of task {portion.task!r}, "
                f"step {number // self._batches_per_step + 1}"
            )
            raise
        return {name: self._prepare(tensor) for name, tensor in rows.items()}

    def _prepare(self, tensor: Tensor) -> Tensor:
        if self._dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor

    def _hand_over(self, item: dict[Portion, dict[str, Tensor]] | BaseException) -> None:
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=0.5)
            except queue.Full:
                continue
            return
