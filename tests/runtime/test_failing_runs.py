"""What ends a run is said by the worker it happened to, with the place; nothing goes on after it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from case_runs import HERE
from hand_plans import place, whole
from runtime_cases import BROKEN, DIVERGING, UNSEEDED

from helpers.analysed import analysed
from spindle_cli.errors import InputError
from spindle_cli.files.request import RunRequest, WorkerError, error_path
from spindle_cli.files.run_files import PREDICTED_FILE, read_metrics
from spindle_cli.operators.tensor_parallel import plan_splits
from spindle_cli.plan.types import Plan, Wave
from spindle_cli.runtime.part.localise import require_same_workload
from spindle_cli.runtime.ready import require_runnable
from spindle_cli.workload.building.load import load


@pytest.mark.processes
def test_a_loss_that_is_no_number_stops_all_workers_before_the_update(two_workers: Path) -> None:
    folder = two_workers / DIVERGING.name
    for rank in range(2):
        error = WorkerError.read(error_path(folder, rank))
        assert error.type == "RunFailedError"
        assert "step 2: the loss of" in error.message
    lines = list(read_metrics(folder))
    assert [line.step for line in lines] == [1, 2]
    assert math.isfinite(lines[0].loss)
    assert not math.isfinite(lines[1].loss)
    assert not (folder / PREDICTED_FILE).exists()


@pytest.mark.processes
def test_initial_values_that_differ_between_workers_are_refused(two_workers: Path) -> None:
    for rank in range(2):
        error = WorkerError.read(error_path(two_workers / UNSEEDED.name, rank))
        assert "does not start with the same values on every rank" in error.message


@pytest.mark.processes
def test_an_error_in_the_users_layer_names_the_slice_that_ran(two_workers: Path) -> None:
    error = WorkerError.read(error_path(two_workers, 1))
    assert error.type == "ValueError"
    assert error.message.startswith("the layer's own error")
    assert "in the forward pass of slice pairs/vision-2[0:1]" in error.message
    assert error.place is not None
    assert "runtime_toys.py" in error.place
    peer = error_path(two_workers / BROKEN.name, 0)
    assert not peer.exists() or WorkerError.read(peer).lost_peer  # torchrun may end it before it notices


def analyse_toy(function: str):
    return analysed(load(f"{HERE / 'runtime_toys.py'}:{function}").workload)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return place(analyse_toy("build"), 2, whole(analyse_toy("build"), (0, 1)))


@pytest.fixture
def request_(tmp_path: Path) -> RunRequest:
    return RunRequest(plan=tmp_path / "plan.yaml", workload="toy", run_dir=tmp_path)


def with_waves(plan: Plan, waves: tuple[Wave, ...]) -> Plan:
    return Plan.model_validate(
        {**plan.model_dump(by_alias=True), "waves": [wave.model_dump() for wave in waves]}
    )


def test_a_plan_for_other_devices_is_refused(plan: Plan, request_: RunRequest) -> None:
    require_runnable(plan, request_, world_size=2)
    with pytest.raises(InputError, match="for 2 devices, but 3 workers"):
        require_runnable(plan, request_, world_size=3)


def test_layers_without_a_plan_for_it_are_not_split(plan: Plan) -> None:
    wave = plan.waves[0]
    piece = wave.slices[0].model_copy(update={"dp": 1, "tp": 2})
    changed = with_waves(plan, (wave.model_copy(update={"slices": (piece,)}), *plan.waves[1:]))
    with pytest.raises(
        InputError, match=r"split 2 ways by tensor parallelism.* Block has no plan in tp_plans"
    ):
        plan_splits(changed, analyse_toy("build"), "plan.yaml")


def test_an_invalid_plan_is_refused(plan: Plan, request_: RunRequest) -> None:
    with pytest.raises(InputError, match="the plan is not valid"):
        require_runnable(with_waves(plan, plan.waves[1:]), request_, world_size=2)


def test_a_changed_workload_is_refused(plan: Plan, request_: RunRequest) -> None:
    require_same_workload(plan, analyse_toy("build"), request_)
    with pytest.raises(InputError, match="fingerprint"):
        require_same_workload(plan, analyse_toy("build_broken"), request_)
