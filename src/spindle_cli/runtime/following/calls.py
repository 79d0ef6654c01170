"""Call the callbacks of a run, say of what one raises whose it is, and hand numbers that they set on rank 0
to every rank before the next step reads them.

Code of the user's that reads a parameter that is shared out is told that it is not there, and what changes
one is refused: other devices have it, or a part of it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from spindle_cli.errors import RunFailedError, SpindleError, UsageError, WorkloadError
from spindle_cli.files.artifact import shown
from spindle_cli.runtime.following.callback import Callback, RunInfo
from spindle_cli.runtime.following.changes import RefusingWhatIsAbsent, refusing_changes
from spindle_cli.runtime.results import Step
from spindle_cli.training.callbacks import ABSENT, is_absent
from spindle_cli.workload.building.load import built_modules
from spindle_cli.workload.refuse import place_of_error
from spindle_cli.workload.step_values import StepValues, is_number

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


class SetValues:
    """One rank's side of it. Nothing is sent where no task declares such a number."""

    def __init__(self, values: StepValues, rank: int, kept: Mapping[str, float] | None = None) -> None:
        """Collective. `kept`: what a checkpoint has of them."""
        self._values = values
        self._rank = rank
        self._settable = {name: value for name, value in values.by_name.items() if value.is_set_by_callbacks}
        self._group = dist.new_group(backend="gloo") if self._settable and dist.get_world_size() > 1 else None
        for name, number in (kept or {}).items():
            if name in self._settable:
                self._settable[name].put(number)
        self._requested: dict[str, float] = {}

    def ask(self, name: str, number: float) -> None:
        """Let steps that have not begun read a number; what other ranks than 0 ask for counts nothing.

        Raises:
            UsageError: no task declares a number of this name that callbacks set, or it is no finite number.
        """
        if name not in self._settable:
            names = ", ".join(self._settable) or "there is none"
            raise UsageError(
                f"set_value: there is no number {shown(name)} for callbacks to set; those declared: {names}",
                hint="Declare it with a number to begin with: Task(..., step_values={'beta': 0.0}), by "
                "'task/beta'.",
            )
        if not is_number(number) or not isfinite(number):
            raise UsageError(f"set_value: {name} is to be {number!r:.80}, expected a finite number")
        if self._rank == 0:
            self._requested[name] = float(number)

    def saved(self) -> dict[str, float]:
        """What a checkpoint keeps: what the next step reads."""
        return {name: self._requested.get(name, value.now) for name, value in self._settable.items()}

    def share(self) -> None:
        """Let every rank have what rank 0 was asked for; collective."""
        if not self._settable:
            return
        told: list[Any] = [self._requested]
        if self._group is not None:
            dist.broadcast_object_list(told, src=0, group=self._group)
        for name, number in told[0].items():
            self._settable[name].put(number)
        self._requested = {}
