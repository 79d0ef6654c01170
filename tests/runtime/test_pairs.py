"""Two things that a plan can say, each with each, train the model of a plain loop; or the plan is refused."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from case_runs import Case, dtype_of, prepare, run_cases
from pair_cases import FEATURES, NOT_TOGETHER, PAIRS, WORKERS, case_of, num_devices
from plain_loop import train_plainly
from test_split_layers import check_split_against

from spindle_cli.check.run import check_plan
from spindle_cli.errors import InputError
from spindle_cli.plan.file import read_plan
from spindle_cli.plan.types import Plan
from spindle_cli.verify.run import verify_plan
from spindle_cli.verify.types import VerifyOptions

pytestmark = [pytest.mark.processes, pytest.mark.long]

TOGETHER = [case_of(pair) for pair in PAIRS if frozenset(pair) not in NOT_TOGETHER]
ALONE = [case for case in TOGETHER if case.islands is None]
ON_ISLANDS = [case for case in TOGETHER if case.islands is not None]


def says_both(case: Case, plan: Plan) -> bool:
    return all(FEATURES[name].says(plan) for name in case.name.split("+"))


@pytest.fixture(scope="module")
def trained(forker: socket.socket, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a folder for each case."""
    folder = tmp_path_factory.mktemp("pairs")
    run_cases(forker, ALONE, WORKERS, folder, fails=False, limit_s=1200)
    return folder


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
def test_a_plan_that_says_both_trains_the_model_of_a_plain_loop(case: Case, trained: Path) -> None:
    assert says_both(case, read_plan(trained / case.name / "plan.yaml"))
    plain = train_plainly(str(trained / case.name / "workload.yaml"), case.steps, dtype_of(case))
    check_split_against(plain, case, trained / case.name)


@pytest.mark.usefixtures("ready_pythons")
@pytest.mark.parametrize("case", ON_ISLANDS, ids=lambda case: case.name)
def test_islands_by_such_a_plan_train_what_plain_pytorch_makes_of_their_rules(
    case: Case, tmp_path: Path
) -> None:
    prepare(case, num_devices(case.name.split("+")), tmp_path / "case")
    plan = tmp_path / "case" / "plan.yaml"
    assert says_both(case, read_plan(plan))
    options = VerifyOptions(steps=3, dtype="float64", run_dir=tmp_path / "runs")
    report = verify_plan(plan, str(tmp_path / "case" / "workload.yaml"), options, lambda line: None)
    assert report.same, report


@pytest.mark.parametrize("pair", sorted(map(sorted, NOT_TOGETHER)), ids="+".join)
def test_a_plan_of_two_that_do_not_go_together_is_refused(pair: list[str], tmp_path: Path) -> None:
    rule = NOT_TOGETHER[frozenset(pair)].rule
    if rule is None:
        # By the workload's file, or by the plan where an equal workload was analysed before.
        with pytest.raises((InputError, ValueError), match=r"does not go with|expected no task_sets"):
            prepare(case_of(pair), num_devices(pair), tmp_path / "case")
        return
    prepare(case_of(pair), num_devices(pair), tmp_path / "case")
    plan = read_plan(tmp_path / "case" / "plan.yaml")
    assert all(FEATURES[name].says(plan) for name in pair)
    assert {violation.rule for violation in check_plan(plan)} == {rule}
