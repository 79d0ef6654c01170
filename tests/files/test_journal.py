"""What a worker was doing is read from its journal, whatever it hangs in."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spindle_cli.files.request import journal_path, workers_dir
from spindle_cli.files.run_files import Journal, JournalWriter, Note
from spindle_cli.launch.watching.stuck import doing_of_all

ACTIONS = ("the forward pass of slice a/b[0:2]", "the backward pass of slice a/b[0:2]", "the gradient sums")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-00000.journal"


@pytest.mark.parametrize(
    ("begun", "done", "current"),
    [
        (None, None, None),
        ((6, 0), None, (6, 0)),  # the first action of a run that goes on from step 3
        ((6, 1), (6, 0), (6, 1)),
        ((6, 2), (6, 0), (6, 1)),  # the host is ahead of its device
        ((7, 1), (6, 2), (7, 0)),  # by more than a batch's end
        ((8, 0), (6, 1), (6, 2)),
        ((6, 2), (6, 2), None),  # between two batches
    ],
)
def test_the_first_action_that_is_not_done_is_current(
    path: Path, begun: tuple[int, int] | None, done: tuple[int, int] | None, current: tuple[int, int] | None
) -> None:
    writer = JournalWriter(path, ACTIONS, batches_per_step=2, first_batch=6)
    if begun is not None:
        writer.begun(Note(*begun, 1.0))
    if done is not None:
        writer.done(Note(*done, 2.0))
    journal = Journal.read(path)
    assert journal is not None
    assert journal.current == current


def test_a_place_is_a_step_and_an_action(path: Path) -> None:
    """Batches 6 and 7 of two a step are the fourth step's."""
    writer = JournalWriter(path, ACTIONS, batches_per_step=2, first_batch=6)
    for batch in (6, 7):
        writer.begun(Note(batch, 1, 0.0))
        writer.done(Note(batch, 0, 0.0))
        journal = Journal.read(path)
        assert journal is not None
        assert journal.place() == "step 4, in the backward pass of slice a/b[0:2]"
    writer.done(Note(7, 1, 0.0))
    journal = Journal.read(path)
    assert journal is not None
    assert journal.place() is None


@pytest.mark.parametrize("content", [None, b"", b"spindle1", b"x" * 100])
def test_what_is_no_journal_says_nothing(path: Path, content: bytes | None) -> None:
    if content is not None:
        path.write_bytes(content)
    assert Journal.read(path) is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=120), st.integers(-1, 3))
def test_any_bytes_are_a_journal_or_none(path: Path, content: bytes, batches: int) -> None:
    path.write_bytes(content)
    assert Journal.read(path) is None or content.startswith(b"spindle1")
    path.write_bytes(b"spindle1" + batches.to_bytes(8, "little", signed=True) + content)
    journal = Journal.read(path)
    assert journal is None or (batches > 0 and isinstance(journal.place(), str | None))


@pytest.mark.parametrize(("action", "is_read"), [(-1, True), (2, True), (3, False), (-2, False)])
def test_a_journal_whose_last_action_is_none_of_its_actions_is_none(
    path: Path, action: int, is_read: bool
) -> None:
    writer = JournalWriter(path, ACTIONS, 1)
    writer.done(Note(0, action, 0.0))
    assert (Journal.read(path) is not None) == is_read


def test_every_worker_that_was_at_something_is_told(tmp_path: Path) -> None:
    workers_dir(tmp_path).mkdir()
    for rank in range(3):
        writer = JournalWriter(journal_path(tmp_path, rank), ACTIONS, 1)
        if rank:
            writer.begun(Note(rank, 2, 0.0))
            writer.done(Note(rank, rank - 1, 0.0))
    assert doing_of_all(tmp_path) == {
        1: "step 2, in the backward pass of slice a/b[0:2]",
        2: "step 3, in the gradient sums",
    }
