"""Why a batch could not be loaded, from the process that loads it to the ranks that wait for it."""

from __future__ import annotations

import traceback
from dataclasses import asdict, dataclass
from typing import Any

from spindle_cli.errors import InputError, RunFailedError, SpindleError, WorkerLostError, WorkloadError
from spindle_cli.workload.refuse import place_of_error

_KINDS = {kind.__name__: kind for kind in (WorkloadError, InputError, WorkerLostError, RunFailedError)}


@dataclass(frozen=True)
class Failure:
    """An error as text. `kind`: the class of ours that it is raised as."""

    message: str
    hint: str | None
    kind: str

    @classmethod
    def of(cls, task: str, error: BaseException) -> Failure:
        """Describe what loading a batch has raised; what code of the user's raises is named with its place,
        and its traceback is in this process's output.
        """
        notes = getattr(error, "__notes__", ())
        if isinstance(error, SpindleError):
            kind = next((k for k in _KINDS if isinstance(error, _KINDS[k])), RunFailedError.__name__)
            return cls("\n  ".join((error.message, *notes)), error.hint, kind)
        traceback.print_exception(error)
        place = place_of_error(error)
        text = str(error).strip().split("\n")[0]
        raised = f"{type(error).__name__}: {text}" if text else type(error).__name__
        message = f"{f'{place}: ' if place else ''}task {task!r}: its dataset raised {raised}"
        hint = "The whole traceback is in the worker's output (workers/ of the run's folder)."
        return cls("\n  ".join((message, *notes)), hint, RunFailedError.__name__)

    def raised(self) -> SpindleError:
        """The error to raise where the batch was waited for."""
        return _KINDS[self.kind](self.message, hint=self.hint)

    def to_json(self) -> dict[str, Any]:
        """Gives the arguments that `Failure` makes the same failure of."""
        return asdict(self)
