"""Commands that make plans look for garbage rarely."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from spindle_cli.cli import app
from spindle_cli.process.lifetime import MADE_IN_BETWEEN, look_for_garbage_rarely


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_the_newest_objects_are_looked_through_rarely_and_older_ones_as_before() -> None:
    _, *older = gc.get_threshold()
    look_for_garbage_rarely()
    assert gc.get_threshold() == (MADE_IN_BETWEEN, *older)
    assert gc.isenabled()


@pytest.mark.parametrize("command", app.COMMANDS)
def test_only_commands_that_plan_do_so(command: str) -> None:
    gc.set_threshold(700, 10, 10)
    CliRunner().invoke(app.app, [command, "--help"])
    assert (gc.get_threshold()[0] == MADE_IN_BETWEEN) == (command in ("plan", "compare", "sweep", "explain"))
