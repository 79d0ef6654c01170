"""Rich's console, ending like every other program when its reader has gone."""

from __future__ import annotations

from typing import NoReturn

from rich.console import Console


class ReportConsole(Console):
    """For standard output; the text is ours and is not markup."""

    def on_broken_pipe(self) -> NoReturn:
        """Leave it to `cli/failures.py`; rich would end with exit code 1, which is a failed check's."""
        raise BrokenPipeError
