"""Where output goes: a report on standard output (text, or one JSON document); all else on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

from pydantic import BaseModel
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from spindle_cli.cli.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from spindle_cli.questions.answers import Answer


class PlainConsole(Console):
    """The text is ours and is not markup; names in it are shown as they are printable."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What rich makes of it, with control characters escaped but for rich's own."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


class ReportConsole(PlainConsole):
    """Prints reports on standard output."""

    def on_broken_pipe(self) -> NoReturn:
        """Leave it to `cli/failures.py`; rich would end with exit code 1, which is a failed check's."""
        raise BrokenPipeError


PIPE_WIDTH = 120  # characters in a line where there is no terminal to ask


def print_json(document: BaseModel) -> None:
    """One JSON document on standard output."""
    from spindle_cli.files.artifact import to_json

    sys.stdout.write(to_json(document))


def report(as_json: bool, document: BaseModel, *text: RenderableType) -> None:
    """What a command reports: `document` with `--json`, else each `text` (a string or what rich draws)."""
    if as_json:
        print_json(document)
        return
    console = out()
    for part in text:
        console.print(part)


def answer(as_json: bool, given: Answer) -> None:
    """What a command reports of an answer, with the notes beside it."""
    report(as_json, given.document, *given.printed)
    for text in given.notes:
        note(text)


def note(text: str) -> None:
    """A message, warning or sign of progress for people, on standard error."""
    print(printable(text), file=sys.stderr)


def out(width: int | None = None) -> Console:
    """Standard output for text and tables: colours on a terminal only, lines unbroken in a file or pipe.

    `width`: characters in a line; by default the terminal's, or `PIPE_WIDTH`.
    """
    from spindle_cli.cli.output import ReportConsole

    is_terminal = sys.stdout.isatty()
    if width is None and not is_terminal:
        width = PIPE_WIDTH
    return ReportConsole(highlight=False, markup=False, soft_wrap=not is_terminal, width=width)


def err() -> Console:
    """Standard error for progress bars; draws them only when it is a terminal (`err().is_terminal`)."""
    from spindle_cli.cli.output import PlainConsole

    return PlainConsole(stderr=True, highlight=False, markup=False)
