"""Of everything that goes wrong when a run fails, the first cause is shown."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from pydantic import ValidationError

from helpers.plans import two_towers
from spindle_cli.errors import ExitCode, RunFailedError, WorkerLostError, WorkloadError
from spindle_cli.files.request import WorkerError, journal_path, log_path
from spindle_cli.files.run_files import JournalWriter, Note
from spindle_cli.launch.build import build_launch
from spindle_cli.launch.types import Address, Launch, LaunchOptions, NodeShare, WorkerExit
from spindle_cli.launch.watching.cause import describe_failure
from spindle_cli.process.worker_session import describe_error, is_lost_peer


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    _, plan = two_towers()
    share = NodeShare(0, 1, 4, Address("127.0.0.1", 0), "lo")
    made = build_launch(plan, Path("plan.yaml"), "toy:build", tmp_path, share, LaunchOptions())
    made.log.parent.mkdir()
    return made


def error(rank: int, time_s: float, *, lost_peer: bool = False) -> WorkerError:
    return WorkerError(
        rank=rank,
        type="ValueError",
        message="bad value",
        place="model.py:3 in forward",
        lost_peer=lost_peer,
        time_s=time_s,
    )


def died(rank: int, code: int, time_s: float) -> WorkerExit:
    return WorkerExit(rank=rank, exit_code=code, time_s=time_s)


def test_the_earliest_error_is_shown_with_its_place_and_log(launch: Launch) -> None:
    failure = describe_failure(launch, [error(2, 10.0), error(0, 10.5)], [])
    assert failure.message == "worker 2 failed: ValueError: bad value\n  at model.py:3 in forward"
    assert failure.hint == f"The whole traceback is in {log_path(launch.run_dir, 2)}"


def test_a_lost_connection_gives_way_to_an_error_and_to_a_death(launch: Launch) -> None:
    lost = error(0, 10.0, lost_peer=True)
    assert describe_failure(launch, [lost, error(1, 11.0)], []).message.startswith("worker 1 failed")
    killed = describe_failure(launch, [lost], [died(0, 1, 10.0), died(3, -signal.SIGKILL, 11.0)])
    assert killed.message == "worker 3 was killed by signal 9 (out of memory?)"
    assert "lost its connection" in describe_failure(launch, [lost], []).message


def test_workers_that_torchrun_ended_after_an_error_are_no_cause(launch: Launch) -> None:
    ended = [died(1, 1, 10.0), died(2, -signal.SIGTERM, 10.0), died(3, -signal.SIGKILL, 14.0)]
    assert describe_failure(launch, [error(1, 9.9)], ended).message.startswith("worker 1 failed")


def test_a_death_before_the_first_error_is_the_cause(launch: Launch) -> None:
    deaths = [died(1, -signal.SIGSEGV, 9.0), died(0, 1, 10.0)]
    message = describe_failure(launch, [error(0, 10.0)], deaths).message
    assert message == "worker 1 was killed by signal 11 (SIGSEGV)"


def test_a_death_without_an_error_shows_the_end_of_its_log(launch: Launch) -> None:
    log_path(launch.run_dir, 0).write_text("\n".join(f"line {number}" for number in range(30)))
    failure = describe_failure(launch, [], [died(0, 7, 1.0)])
    assert failure.message.startswith("worker 0 ended with exit code 7 and no error of its own\n  | line 18")
    assert failure.message.endswith("| line 29")


def test_a_launcher_that_could_not_start_shows_the_nodes_log(launch: Launch) -> None:
    launch.log.write_text("OSError: address already in use\n")
    assert "| OSError: address already in use" in describe_failure(launch, [], []).message


def test_a_refusal_keeps_its_message_hint_and_exit_code(launch: Launch) -> None:
    refused = describe_error(WorkloadError("the dataset is empty", hint="Fill it."), rank=3)
    failure = describe_failure(launch, [refused], [])
    assert (failure.message, failure.hint) == ("worker 3: the dataset is empty", "Fill it.")
    assert failure.exit_code is ExitCode.BAD_INPUT


def test_a_killed_loader_may_be_started_again_and_a_failed_one_not(launch: Launch) -> None:
    for kind in (WorkerLostError, RunFailedError):
        told = describe_error(kind("its loader worker has gone", hint="Less memory."), rank=1)
        failure = describe_failure(launch, [told], [])
        assert type(failure) is kind
        assert failure.message == "worker 1: its loader worker has gone"


def test_a_lost_connection_is_known_through_what_was_raised_from_it() -> None:
    try:
        try:
            raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4711")
        except RuntimeError as lost:
            raise ValueError("the gradient sum failed") from lost
    except ValueError as wrapped:
        assert is_lost_peer(wrapped)
    assert not is_lost_peer(ValueError("bad value"))


def test_an_errors_place_is_the_users_own_line() -> None:
    try:
        int("x")
    except ValueError as raised:
        place = describe_error(raised, 0).place
    assert place is not None
    assert place.startswith(__file__)


def test_an_aborted_worker_and_a_lost_one_say_what_all_were_doing(launch: Launch) -> None:
    """As when NCCL's watchdog gives up: rank 1's device is behind."""
    for rank, done in ((0, 1), (1, 0)):
        writer = JournalWriter(
            journal_path(launch.run_dir, rank), ("the forward pass", "B", "the sums"), 1, 4
        )
        writer.begun(Note(4, 2, 0.0))
        writer.done(Note(4, done, 0.0))
    places = "\n  worker 0 was at step 5, in the sums\n  worker 1 was at step 5, in B"
    aborted = describe_failure(launch, [], [died(0, -signal.SIGABRT, 10.0)])
    assert aborted.message.startswith(f"worker 0 was killed by signal 6 (SIGABRT){places}")
    lost = describe_failure(launch, [error(0, 10.0, lost_peer=True)], [])
    assert lost.message.endswith(places)
    segfault = describe_failure(launch, [], [died(0, -signal.SIGSEGV, 10.0)])
    assert places not in segfault.message


def test_a_signal_without_a_name_is_told_by_its_number(launch: Launch) -> None:
    failure = describe_failure(launch, [], [died(1, -33, 1.0)])
    assert "worker 1 was killed by signal 33 (which has no name)" in failure.message


@pytest.mark.parametrize("code", [-65, 256])
def test_no_process_ends_with_such_a_code(code: int) -> None:
    assert died(0, -64, 1.0).exit_code == -64 and died(0, 255, 1.0).exit_code == 255
    with pytest.raises(ValidationError):
        died(0, code, 1.0)


def test_a_command_ends_with_none_but_our_codes() -> None:
    with pytest.raises(ValidationError):
        WorkerError(rank=0, type="a", message="b", exit_code=7, time_s=0.0)
