"""What ends a run is said by the worker it happened to, with the place; nothing goes on after it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from case_runs import HERE, Case, captured, prepare, run_cases, run_workers
from hand_plans import place, whole

from spindle_cli.errors import InputError
from spindle_cli.plan.types import Plan, Wave
from spindle_cli.request import RunRequest, WorkerError, error_path
from spindle_cli.run_files import PREDICTED_FILE, read_metrics
from spindle_cli.runtime.localise import require_same_workload
from spindle_cli.runtime.worker import require_runnable, require_supported
from spindle_cli.workload.analyse import analyse
from spindle_cli.workload.load import load


@pytest.mark.processes
def test_what_all_workers_see_stops_them_all_before_the_update(tmp_path: Path) -> None:
    diverging = Case("diverging", (0, 1), train={"optimizer": "SGD", "lr": 1e300})
    unseeded = Case("unseeded", (0, 1), function="build_anew")
    run_cases((diverging, unseeded), 2, tmp_path)

    for rank in range(2):
        error = WorkerError.read(error_path(tmp_path / "diverging", rank))
        assert error.type == "RunFailedError"
        assert "step 2: the loss of" in error.message
        error = WorkerError.read(error_path(tmp_path / "unseeded", rank))
        assert "does not start with the same values on every rank" in error.message
    lines = list(read_metrics(tmp_path / "diverging"))
    assert [line.step for line in lines] == [1, 2]
    assert math.isfinite(lines[0].loss)
    assert not math.isfinite(lines[1].loss)
    assert not (tmp_path / "diverging" / PREDICTED_FILE).exists()


@pytest.mark.processes
def test_an_error_in_the_users_layer_names_the_slice_that_ran(tmp_path: Path) -> None:
    case = Case(
        "broken",
        (
            ("pairs/vision", (0, 3), (0,)),
            ("pairs/vision-2", (0, 1), (1,)),
            *((name, ops, (0,)) for name, ops, _ in whole(analyse_toy("build_broken"), (0,))[2:]),
        ),
        function="build_broken",
    )
    folder = tmp_path / "broken"
    prepare(case, 2, folder)
    done = run_workers(["-m", "spindle_cli.runtime.worker", str(folder / "request.json")], folder, 2)
    assert done.returncode != 0
    error = WorkerError.read(error_path(folder, 1))
    assert error.type == "ValueError"
    assert error.message.startswith("the layer's own error")
    assert "in the forward pass of slice pairs/vision-2[0:1]" in error.message
    assert error.place is not None
    assert "runtime_toys.py" in error.place
    assert captured(folder, "initial", 2), "it failed in the first step, not before"


def analyse_toy(function: str):
    return analyse(load(f"{HERE / 'runtime_toys.py'}:{function}").workload)


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


def test_what_workers_cannot_run_is_refused_by_name(plan: Plan, request_: RunRequest) -> None:
    wave = plan.waves[0]
    for change, message in (({"recompute": True}, "recomputation of activations"), ({"tp": 2}, "tp 2")):
        piece = wave.slices[0].model_copy(update=change)
        changed = with_waves(plan, (wave.model_copy(update={"slices": (piece,)}), *plan.waves[1:]))
        with pytest.raises(InputError, match=f"{message}.* which workers cannot run yet"):
            require_supported(changed, request_)
    with pytest.raises(InputError, match="cannot resume"):
        require_supported(plan, request_.model_copy(update={"resume": True}))


def test_an_invalid_plan_is_refused(plan: Plan, request_: RunRequest) -> None:
    with pytest.raises(InputError, match="the plan is not valid"):
        require_runnable(with_waves(plan, plan.waves[1:]), request_, world_size=2)


def test_a_changed_workload_is_refused(plan: Plan, request_: RunRequest) -> None:
    require_same_workload(plan, analyse_toy("build"), request_)
    with pytest.raises(InputError, match="fingerprint"):
        require_same_workload(plan, analyse_toy("build_broken"), request_)
