"""The strict backend stops what NCCL would stop, by its timeout, and the runtime trains the same model over
it: one process run, and programs without models in threads.
"""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from case_runs import run_cases
from shard_cases import BY_TEAMS, SHARED_OUT
from split_cases import EXACT as EXACT_SPLIT
from test_split_layers import check_split_against, plain_run
from test_training_is_exact import check_against

from helpers.hanging_programs import (
    chain,
    cycle,
    over_one_communicator,
    with_early_receive,
    with_receives_ahead,
)
from helpers.strict_threads import run_in_threads
from spindle_cli.plan.file import read_plan
from spindle_cli.process.worker_session import is_lost_peer
from spindle_cli.program.link import link
from spindle_cli.program.proof.proof import prove
from spindle_cli.program.types import Program, StepSettings
from spindle_cli.runtime.backends.strict_backend import SERIAL, STRICT, OperationQueue

SHORT_S = 0.5
# All that a step can communicate: transfers, losses, sums, flags, norm, gathers, split passes; and
# gatherings and sums of unequal ranges, within replica groups and between them.
CASE = next(case for case in EXACT_SPLIT if case.name == "accumulated")
UNEQUAL = next(case for case in SHARED_OUT if case.name == "kept-shared-out")
TEAMS = next(case for case in BY_TEAMS if case.name == "uneven-replica_groups")
PLAN = Path(__file__).parents[2] / "examples" / "ci" / "plan.yaml"


@pytest.mark.parametrize("backend", ["gloo", STRICT, SERIAL])
@pytest.mark.parametrize("program", [chain(), cycle()], ids=["chain", "cycle"])
def test_linked_programs_run_over_every_backend(program: Program, backend: str) -> None:
    run_in_threads(program, backend)


@pytest.mark.parametrize(
    ("program", "backend"),
    [
        (over_one_communicator(with_early_receive(chain())), STRICT),
        (over_one_communicator(with_receives_ahead(cycle())), STRICT),
        (with_receives_ahead(cycle()), SERIAL),
        (with_early_receive(chain()), SERIAL),
    ],
    ids=["chain", "cycle", "cycle-one-room", "one-room"],
)
def test_programs_in_other_orders_hang_over_a_strict_backend_alone(program: Program, backend: str) -> None:
    """As transfers once were: on the losses' communicator, receives as early as there is memory for them."""
    run_in_threads(program, "gloo")
    begin_s = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)timed? ?out|closed"):
        run_in_threads(program, backend, SHORT_S)
    assert time.monotonic() - begin_s >= SHORT_S


@pytest.mark.processes
def test_workers_train_the_model_of_a_plain_loop_with_room_for_one_operation(
    forker: socket.socket, tmp_path: Path
) -> None:
    """A step's programs in full, by workers that each run all that they post one after another."""
    run_cases(forker, [CASE, UNEQUAL, TEAMS], 4, tmp_path, fails=False, backend=SERIAL)
    folder = tmp_path / CASE.name
    check_split_against(plain_run(tmp_path, CASE), CASE, folder)
    for case in (UNEQUAL, TEAMS):
        check_against(plain_run(tmp_path, case), case, 4, tmp_path / case.name)


def test_the_plan_of_the_example_for_ci_is_proved_and_runs_with_room_for_one_operation() -> None:
    """16 devices, shared towers, encoders on other devices than the losses."""
    program = link(read_plan(PLAN), settings=StepSettings(sharded=True, clips=True))
    prove(program)
    run_in_threads(program, SERIAL)


def test_work_that_has_not_ended_in_time_says_so() -> None:
    """As gloo's does, with the words by which a lost peer is known."""
    go_on = threading.Event()
    work = OperationQueue().post(go_on.wait)
    with pytest.raises(RuntimeError) as caught:
        work.wait(timedelta(milliseconds=20))
    assert is_lost_peer(caught.value) and not work.is_completed()
    go_on.set()
    assert work.wait(timedelta(seconds=60)) and work.is_completed()
