"""Rich's console, ending like every other program when its reader has gone, and steered by nobody's names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from spindle_cli.cli.printable import printable


class PlainConsole(Console):
    """The text is ours and is not markup; names in it are shown as they are printable."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What rich makes of it, with control characters escaped but for rich's own."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


class ReportConsole(PlainConsole):
    """For standard output."""

    def on_broken_pipe(self) -> NoReturn:
        """Leave it to `cli/failures.py`; rich would end with exit code 1, which is a failed check's."""
        raise BrokenPipeError
