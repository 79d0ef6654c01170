"""The tensors that a run has written, read one at a time: two models need not fit in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from spindle_cli.errors import RunFailedError
from spindle_cli.files.artifact import shown
from spindle_cli.files.request import CaptureStage, capture_path
from spindle_cli.files.tensors import Fragment, fragment_key, joined, parse_key

# Characters of what the reader of a damaged file says, which may quote all of it.
MOST_SHOWN = 200


@dataclass(frozen=True)
class Captured:
    """One stage of a run: the ranks that hold each name, and their tensors.

    Attributes:
        files: by rank.
        holders: by name, the ranks that have the tensor or fragments of it.
        fragments: by name, who has which; None is the whole tensor.
    """

    files: dict[int, Any]
    holders: dict[str, tuple[int, ...]]
    fragments: dict[str, dict[Fragment | None, tuple[int, ...]]]

    def copies(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield every rank's copy of a tensor, and who has it; of fragments, whole tensors that hold every
        rank's copy of each.

        Raises:
            RunFailedError: the fragments do not fit together: a file is damaged.
        """
        fragments = self.fragments[name]
        for number in range(max(len(ranks) for ranks in fragments.values())):
            holders = {fragment: ranks[number % len(ranks)] for fragment, ranks in fragments.items()}
            taken = {
                fragment: self.files[rank].get_tensor(fragment_key(name, fragment))
                for fragment, rank in holders.items()
            }
            where = _where(sorted(set(holders.values())))
            try:
                whole = joined(taken)
            except (RuntimeError, IndexError) as error:  # torch's, of shapes that do not fit
                shapes = ", ".join(str(list(tensor.shape)) for tensor in taken.values())
                raise RunFailedError(
                    f"{where}: the parts of {shown(name)} do not fit together, of shapes {shown(shapes)}",
                    hint="The run's files are damaged: verify again.",
                ) from error
            yield where, whole

    def first(self, name: str) -> Tensor:
        """Return the copy of the first rank that has one."""
        return next(self.copies(name))[1]


def _where(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


@dataclass(frozen=True)
class CapturedRun:
    """The stages of a run; see `request.capture_path`."""

    initial: Captured
    gradients: Captured
    final: Captured
    initial_buffers: Captured
    final_buffers: Captured
    average: Captured | None = None


@contextmanager
def open_run(capture_dir: Path, workers: int, *, averages: bool = False) -> Iterator[CapturedRun]:
    """A run's files, open inside the block. `averages`: the run keeps an average of the weights.

    Raises:
        RunFailedError: a rank has not written one of them, or it is damaged.
    """
    with ExitStack() as stack:
        yield CapturedRun(
            initial=_open(capture_dir, "initial", workers, stack),
            gradients=_open(capture_dir, "gradients", workers, stack),
            final=_open(capture_dir, "final", workers, stack),
            initial_buffers=_open(capture_dir, "initial-buffers", workers, stack),
            final_buffers=_open(capture_dir, "final-buffers", workers, stack),
            average=_open(capture_dir, "average", workers, stack) if averages else None,
        )


def _open(capture_dir: Path, stage: CaptureStage, workers: int, stack: ExitStack) -> Captured:
    files: dict[int, Any] = {}
    fragments: dict[str, dict[Fragment | None, tuple[int, ...]]] = {}
    for rank in range(workers):
        path = capture_path(capture_dir, stage, rank)
        if not path.exists():
            raise RunFailedError(f"rank {rank} has not written {path}", hint="Its log says how far it got.")
        try:
            files[rank] = stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise RunFailedError(
                f"{path}: not what rank {rank} has written: {str(error)[:MOST_SHOWN]}"
            ) from error
        for key in files[rank].keys():  # noqa: SIM118 - a safetensors file is not a mapping
            name, fragment = parse_key(key)
            ranks_by_fragment = fragments.setdefault(name, {})
            ranks_by_fragment[fragment] = (*ranks_by_fragment.get(fragment, ()), rank)
    holders = {
        name: tuple(sorted({rank for ranks in ranks_by_fragment.values() for rank in ranks}))
        for name, ranks_by_fragment in fragments.items()
    }
    return Captured(files, holders, fragments)
