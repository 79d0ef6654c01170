"""Two things that a plan can say, each with each, train the same model as a plain loop; or the plan is refused."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from case_runs import Case, dtype_of, prepare, run_cases
from pair_cases import FEATURES, NOT_TOGETHER, PAIRS, WORKERS, case_of
from plain_loop import train_plainly
from test_split_layers import check_split_against

from spindle_cli.check.run import check_plan
from spindle_cli.plan.file import read_plan

pytestmark = [pytest.mark.processes, pytest.mark.pairs]

TOGETHER = [case_of(pair) for pair in PAIRS if frozenset(pair) not in NOT_TOGETHER]


@pytest.fixture(scope="module")
def trained(forker: socket.socket, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a folder for each case."""
    folder = tmp_path_factory.mktemp("pairs")
    run_cases(forker, TOGETHER, WORKERS, folder, fails=False, limit_s=1200)
    return folder


@pytest.mark.parametrize("case", TOGETHER, ids=lambda case: case.name)
def test_a_plan_that_says_both_trains_the_model_of_a_plain_loop(case: Case, trained: Path) -> None:
    plan = read_plan(trained / case.name / "plan.yaml")
    assert all(FEATURES[name].says(plan) for name in case.name.split("+"))
    plain = train_plainly(str(trained / case.name / "workload.yaml"), case.steps, dtype_of(case))
    check_split_against(plain, case, trained / case.name)


@pytest.mark.parametrize("pair", sorted(map(sorted, NOT_TOGETHER)), ids="+".join)
def test_a_plan_of_two_that_do_not_go_together_is_refused(pair: list[str], tmp_path: Path) -> None:
    prepare(case_of(pair), WORKERS, tmp_path / "case")
    refused = check_plan(read_plan(tmp_path / "case" / "plan.yaml"))
    assert {violation.rule for violation in refused} == {NOT_TOGETHER[frozenset(pair)].rule}
