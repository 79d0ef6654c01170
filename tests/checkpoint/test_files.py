"""Which checkpoints are kept when a newer one has been saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.checkpoints import write_checkpoint
from spindle_cli.checkpoint.files import forget_old
from spindle_cli.checkpoint.index import INDEX_FILE


def steps_in(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [12]), (2, [10, 12]), (3, [9, 10, 12]), (4, [8, 9, 10, 12]), (5, [8, 9, 10, 12])]
)
def test_the_newest_are_kept_by_number(keep: int, left: list[int], tmp_path: Path) -> None:
    for step in (8, 9, 10, 12):
        write_checkpoint(tmp_path, step)
    forget_old(tmp_path, 12, keep, saved_steps=(), began=10)
    assert steps_in(tmp_path) == left


def test_what_is_damaged_does_not_count(tmp_path: Path) -> None:
    """The run went on from 9; 8 and 10 have lost their index, and 11 is the one just saved."""
    for step in (7, 8, 9, 11):
        write_checkpoint(tmp_path, step)
    (write_checkpoint(tmp_path, 10) / INDEX_FILE).unlink()
    (tmp_path / "checkpoints" / "step-000008" / INDEX_FILE).unlink()
    forget_old(tmp_path, 11, 3, saved_steps=(), began=9)
    assert steps_in(tmp_path) == [7, 8, 9, 10, 11]
    forget_old(tmp_path, 11, 2, saved_steps=(), began=9)
    assert steps_in(tmp_path) == [9, 10, 11]


def test_what_an_attempt_that_was_given_up_left_does_not_count(tmp_path: Path) -> None:
    """A bit of 10 has flipped, which only all of its bytes tell, so that the run went on from 9: so it lies
    behind where the run began, and is not its own.
    """
    for step in (8, 9, 10, 12):
        write_checkpoint(tmp_path, step)
    forget_old(tmp_path, 12, 2, saved_steps=(), began=9)
    assert steps_in(tmp_path) == [9, 10, 12]
    forget_old(tmp_path, 12, 2, saved_steps=(10,), began=9)
    assert steps_in(tmp_path) == [10, 12]


def test_the_one_just_saved_stays_whatever_else_there_is(tmp_path: Path) -> None:
    """Newer ones are of an attempt that was given up: they are trained again."""
    for step in (3, 8, 9):
        write_checkpoint(tmp_path, step)
    (write_checkpoint(tmp_path, 5) / INDEX_FILE).unlink()
    forget_old(tmp_path, 5, 1, saved_steps=(), began=3)
    assert steps_in(tmp_path) == [5, 8, 9]
