"""What a few samples of a dataset are, so that one that has changed is noticed before a run goes on."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from spindle_cli.files.request import SeenData
from spindle_cli.workload.data.kind import is_stream
from spindle_cli.workload.training.batches import num_samples
from spindle_cli.workload.training.epochs import Epochs
from spindle_cli.workload.training.item_draws import SeededCalls, generators_kept
from spindle_cli.workload.types import FlowTask, Task

UNREADABLE = "unreadable"  # in place of a digest: whoever trains on the sample says why


class Digest(Protocol):
    """One of hashlib's."""

    def update(self, content: bytes, /) -> None:
        """Take these bytes in."""


def look_at(task: Task | FlowTask, indices: Collection[int] | None = None) -> SeenData:
    """A dataset's length, and digests of its first and last sample and two between, or of those named, in its
    first epoch; of a stream, one of its first sample.

    What a sample draws it draws here from the same seed each time; the process's generators go on as if
    nothing had been drawn.

    Raises:
        WorkloadError: it cannot be read.
    """
    if is_stream(task):
        return _look_at_stream(task)
    count = num_samples(task)
    reads = SeededCalls(0, task.name, "sample")

    def digest(index: int) -> str:
        try:
            return digest_of(reads.call(partial(operator.getitem, task.dataset, index), 0, index))
        except Exception:  # anything that code of the user's raises
            return UNREADABLE

    with generators_kept(), Epochs(task, 0).at(0):
        usual = {0, count // 3, 2 * count // 3, count - 1} if count else ()
        chosen = sorted(usual if indices is None else indices)
        return SeenData(num_samples=count, samples={index: digest(index) for index in chosen})


def _look_at_stream(task: Task | FlowTask) -> SeenData:
    reads = SeededCalls(0, task.name, "sample")
    with generators_kept():
        try:
            first = reads.call(lambda: next(iter(task.dataset), None))
        except Exception:  # anything that code of the user's raises
            return SeenData(num_samples=None, samples={0: UNREADABLE})
        return SeenData(num_samples=None, samples={0: digest_of(first)})


def changes(before: SeenData, now: SeenData) -> tuple[str, ...]:
    """How a dataset differs from what it was, for people; nothing: in nothing that was looked at."""
    if before.num_samples is None or now.num_samples is None:
        if before.num_samples != now.num_samples:
            was, is_ = ("by index", "as a stream") if now.num_samples is None else ("as a stream", "by index")
            return (f"it was read {was}, and is {is_} now",)
    elif before.num_samples != now.num_samples:
        return (f"it had {before.num_samples:,} samples, and has {now.num_samples:,} now",)
    return tuple(
        f"sample {index:,} is another than it was"
        for index, digest in now.samples.items()
        if before.samples.get(index, digest) != digest
    )


def digest_of(item: Any) -> str:
    """A digest of an item's values. Of types that are neither tensors, arrays, numbers and texts nor made of
    them, it knows the type alone.
    """
    digest = hashlib.sha256()
    _put(digest, item)
    return digest.hexdigest()[:32]


def _put(digest: Digest, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        if not value.is_meta:
            flat = value.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray | np.generic):
        digest.update(f"array {value.dtype} {value.shape};".encode())
        digest.update(value.tobytes() if value.dtype != object else b"")
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)};".encode())
        for key, each in value.items():
            _put(digest, key)
            _put(digest, each)
    elif isinstance(value, list | tuple):
        digest.update(f"list {len(value)};".encode())
        for each in value:
            _put(digest, each)
    elif isinstance(value, bytes | str | int | float | complex | bool | None):
        digest.update(f"{type(value).__name__} {value!r};".encode(errors="backslashreplace"))
    else:
        digest.update(f"{type(value).__module__}.{type(value).__qualname__};".encode())
