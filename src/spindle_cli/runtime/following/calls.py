"""Call the callbacks of a run, and say of what one raises whose it is.

Code of the user's that reads a parameter that is shared out is told that it is not there, and what changes
one is refused: other devices have it, or a part of it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from spindle_cli.errors import RunFailedError, SpindleError, WorkloadError
from spindle_cli.runtime.following.callback import Callback, RunInfo
from spindle_cli.runtime.following.changes import RefusingWhatIsAbsent, refusing_changes
from spindle_cli.runtime.results import Step
from spindle_cli.training.callbacks import ABSENT, is_absent
from spindle_cli.workload.building.load import built_modules
from spindle_cli.workload.refuse import place_of_error

if TYPE_CHECKING:
    from spindle_cli.files.runs.records import Evaluation


class Callbacks:
    """Those of this rank, in their order; raises RunFailedError where one of them raises anything."""

    def __init__(self, callbacks: Sequence[Callback], rank: int, source: str | None = None) -> None:
        """`source`: of the workload, whose builds they leave as they are."""
        self._source = source
        self._callbacks = tuple(callback for callback in callbacks if callback.on_every_rank or rank == 0)

    def at_start(self, run: RunInfo) -> None:
        """See `Callback`."""
        self._call("at_start", "before the first step", lambda callback: callback.at_start(run))

    def after_step(self, step: Step) -> None:
        """See `Callback`."""
        self._call("after_step", f"step {step.number}", lambda callback: callback.after_step(step))

    def at_checkpoint(self, step: int, folder: Path) -> None:
        """See `Callback`."""
        self._call("at_checkpoint", f"step {step}", lambda callback: callback.at_checkpoint(step, folder))

    def at_evaluation(self, evaluation: Evaluation) -> None:
        """See `Callback`."""
        when = f"task {evaluation.task!r} after step {evaluation.step}"
        self._call("at_evaluation", when, lambda callback: callback.at_evaluation(evaluation))

    def at_end(self) -> None:
        """See `Callback`."""
        self._call("at_end", "after the last step", lambda callback: callback.at_end())

    def _call(self, name: str, when: str, call: Callable[[Callback], None]) -> None:
        for callback in self._callbacks:
            held = [] if self._source is None else built_modules(self._source)
            said = f"the callback {type(callback).__name__} changes {{}} in {name} ({when})"
            with _blaming(callback, name, when), refusing_changes(held, said), RefusingWhatIsAbsent():
                call(callback)


@contextmanager
def _blaming(callback: Callback, name: str, when: str) -> Iterator[None]:
    try:
        yield
    except SpindleError:
        raise
    except Exception as error:  # code of the user's
        place = place_of_error(error)
        where = f", at {place}" if place else ""
        raise RunFailedError(
            f"the callback {type(callback).__name__} failed in {name} ({when}): "
            f"{type(error).__name__}: {error}{where}",
            hint=ABSENT
            if is_absent(error)
            else "Checkpoints from before are there: go on from one with --resume, once it is mended.",
        ) from error


def require_callbacks(callbacks: Sequence[object]) -> tuple[Callback, ...]:
    """Give what was found, once it is known that all are callbacks.

    Raises:
        WorkloadError: one is something else.
    """
    for callback in callbacks:
        if not isinstance(callback, Callback):
            made = (
                f"the class {callback.__name__}"
                if isinstance(callback, type)
                else f"a {type(callback).__name__}"
            )
            raise WorkloadError(
                f"callbacks: found {made}, expected an object of a class derived from spindle_cli.Callback",
                hint="Derive the class from spindle_cli.Callback, and give an object of it.",
            )
    return tuple(callback for callback in callbacks if isinstance(callback, Callback))
