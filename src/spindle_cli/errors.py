"""Errors that a user can cause, and the exit code each one ends the command with.

Every error here is shown as one message without a traceback. `assert` and other exceptions are for our own
bugs.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every command (docs/contracts: fixed)."""

    DONE = 0
    FAILED = 1  # the thing itself failed: a worker died, a verification differs, a check found a violation
    USAGE = 2  # wrong use of the command
    BAD_INPUT = 3  # an input file is missing, malformed or does not belong to the other inputs
    NO_PLAN = 4  # no plan fits (memory or valid allocations)
    STOPPED = 143  # asked to end by SIGTERM, after a checkpoint was saved (128 + 15, as shells count signals)


class SpindleError(Exception):
    """A mistake or failure that the user can act on.

    Args:
        message: what is wrong: the file and place, the value, and what was expected.
        hint: what to do about it; shown on a line of its own.
    """

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  {self.hint}"


class RunFailedError(SpindleError):
    """The thing itself failed: a worker died, a verification differs, a check found a violation."""

    exit_code = ExitCode.FAILED


class WorkerLostError(RunFailedError):
    """A worker is gone, hangs, or was cut off: to start again from the last checkpoint may help."""


class PeerLostError(RunFailedError):
    """Another worker is gone or does not answer: what ended or holds up that one is the cause, not this."""


class StoppedError(SpindleError):
    """The run was asked to end before its last step, and has ended in order."""

    exit_code = ExitCode.STOPPED


class UsageError(SpindleError):
    """The command was used wrongly."""

    exit_code = ExitCode.USAGE


class InputError(SpindleError):
    """An input file is missing, malformed, or does not belong to the other inputs."""

    exit_code = ExitCode.BAD_INPUT


class WorkloadError(InputError):
    """A workload cannot be built, traced or run as it is written."""


class NoPlanError(SpindleError):
    """No plan fits the devices' memory or the valid allocations."""

    exit_code = ExitCode.NO_PLAN
