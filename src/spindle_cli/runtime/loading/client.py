"""A rank's side: samples of batches that another process loads."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from spindle_cli.errors import PeerLostError, SpindleError
from spindle_cli.runtime.loading import wire
from spindle_cli.runtime.loading.packed import PackedBatch
from spindle_cli.runtime.loading.wire import Failure, death_of
from spindle_cli.training.batches import SampleShape, SampleShapes

if TYPE_CHECKING:
    from torch import Tensor

_DIES_WITHIN_S = 2.0  # after its socket is closed


class NodeBatches:
    """A task's batches, as `Batches` gives them, from the process that loads them for this node.

    Steps are asked for in order. `state`: where the dataset is behind the last batch that was asked for.
    """

    draws = False  # in that process

    def __init__(
        self,
        task: str,
        address: str,
        child: int | None,
        shapes: Mapping[str, SampleShape] | None = None,
    ) -> None:
        """`child`: the process, if it is this one's own. `shapes`: of one sample, as `Batches` has them;
        None: whoever takes the rows looks at them.
        """
        self._task = task
        self._shapes = None if shapes is None else SampleShapes(task, shapes)
        self._child = child
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(address)
        self._lock = threading.Lock()
        self._held: tuple[int, PackedBatch] | None = None
        self._error: SpindleError | None = None
        self.state: dict[str, Any] | None = None

    def rows(
        self, step: int, first: int, last: int, fields: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Samples [first, last) of a step's batch; only the named fields if given.

        Raises:
            SpindleError: it could not be loaded, or whoever loads it has died.
        """
        with self._lock:
            if self._held is None or self._held[0] != step:
                self._ask(step)
            assert self._held is not None
            return self._held[1].rows(first, last, fields)

    def size(self, step: int) -> int:
        """Samples of a batch; 0: it has no fields. Raises what `rows` raises."""
        with self._lock:
            if self._held is None or self._held[0] != step:
                self._ask(step)
            assert self._held is not None
            return min((field.shape[0] for field in self._held[1].fields), default=0)

    def rows_without_draws(
        self, step: int, first: int, last: int, fields: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Give rows as `rows` does: nothing is drawn in this process."""
        return self.rows(step, first, last, fields)

    def shapes(self, step: int) -> dict[str, tuple[int, ...]]:
        """The shape of one sample of each field of the step that was asked for last."""
        with self._lock:
            assert self._held is not None and self._held[0] == step, "its rows were asked for"
            return {field.name: field.shape[1:] for field in self._held[1].fields}

    def close(self) -> None:
        """Tell the loading process that this rank takes no more batches."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _ask(self, step: int) -> None:
        if self._held is not None:
            self._held[1].close()
            self._held = None
        if self._error is not None:
            raise self._error
        try:
            wire.ask(self._connection, step)
            answer = wire.receive_answer(self._connection)
        except ConnectionError:
            answer = None
        if answer is None:
            self._error = self._lost()
            raise self._error
        document, descriptor = answer
        if descriptor is None:
            self._error = Failure(**document["failure"]).raised()
            raise self._error
        self._held = step, PackedBatch.from_json(descriptor, document["fields"])
        if self._shapes is not None:
            self._shapes.require({field.name: field.shape[1:] for field in self._held[1].fields})
        self.state = document["state"]

    def _lost(self) -> SpindleError:
        if self._child is None:
            return PeerLostError(f"lost contact with the process that loads task {self._task!r}")
        until = time.monotonic() + _DIES_WITHIN_S
        status = 0
        while time.monotonic() < until:
            with suppress(ChildProcessError):
                ended, status = os.waitpid(self._child, os.WNOHANG)
                if ended:
                    break
            time.sleep(0.01)
        return death_of(
            f"task {self._task!r}: the process that loads its batches (process {self._child})",
            os.waitstatus_to_exitcode(status),
            "a smaller `prefetch` in `train: {loader: ...}` takes less",
        )
