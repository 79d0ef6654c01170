"""The tensors that a run has written, read one at a time: two models need not fit in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from spindle_cli.errors import RunFailedError
from spindle_cli.request import CaptureStage, capture_path


@dataclass(frozen=True)
class Captured:
    """One stage of a run: the ranks that hold each name, and their tensors."""

    files: dict[int, Any]
    holders: dict[str, tuple[int, ...]]

    def copies(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Every rank's copy of a tensor."""
        for rank in self.holders[name]:
            yield rank, self.files[rank].get_tensor(name)

    def first(self, name: str) -> Tensor:
        """The copy of the first rank that has one."""
        return next(self.copies(name))[1]


@dataclass(frozen=True)
class CapturedRun:
    """The three stages of a run; see `request.capture_path`."""

    initial: Captured
    gradients: Captured
    final: Captured


@contextmanager
def open_run(capture_dir: Path, workers: int) -> Iterator[CapturedRun]:
    """A run's files, open inside the block.

    Raises:
        RunFailedError: a rank has not written one of them.
    """
    with ExitStack() as stack:
        yield CapturedRun(
            initial=_open(capture_dir, "initial", workers, stack),
            gradients=_open(capture_dir, "gradients", workers, stack),
            final=_open(capture_dir, "final", workers, stack),
        )


def _open(capture_dir: Path, stage: CaptureStage, workers: int, stack: ExitStack) -> Captured:
    files: dict[int, Any] = {}
    holders: dict[str, tuple[int, ...]] = {}
    for rank in range(workers):
        path = capture_path(capture_dir, stage, rank)
        if not path.exists():
            raise RunFailedError(f"rank {rank} has not written {path}", hint="Its log says how far it got.")
        files[rank] = stack.enter_context(safe_open(path, framework="pt"))
        for name in files[rank].keys():  # noqa: SIM118 - a safetensors file is not a mapping
            holders[name] = (*holders.get(name, ()), rank)
    return Captured(files, holders)
