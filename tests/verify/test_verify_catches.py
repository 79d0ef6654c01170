"""`verify` passes what is right and fails each way to train another model, saying what differs and where."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from broken_worker import DEFECTS

from helpers.analysed import analyses
from helpers.toy_plan import write_toy
from spindle_cli.plan.file import read_plan
from spindle_cli.verify.compare import compare_runs
from spindle_cli.verify.runs import Runs, build_runs, train
from spindle_cli.verify.types import Check, VerifyOptions, VerifyReport
from spindle_cli.workload.building.load import load

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("ready_pythons")]
STALE = "large.blocks.0.norm.weight"
OPTIONS = VerifyOptions(worker_module="broken_worker")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, VerifyReport]:
    """The plain run once, every defect once; a report on each."""
    folder = tmp_path_factory.mktemp("verify")
    plan_path = write_toy(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        runs = build_runs(read_plan(plan_path), plan_path, str(folder / "toy.yaml"), folder, OPTIONS)
        memo = analyses().of(load(str(folder / "toy.yaml")).workload)[1]
        train(runs.plain, "plain", memo)
        train(runs.ours, "plan", memo)
    return {name: compare_runs(defective(runs, name), OPTIONS) for name in DEFECTS}


def defective(runs: Runs, name: str) -> Runs:
    """The same runs, with the files that one defect has left."""
    folder = runs.ours.run_dir / name
    request = runs.ours.request.model_copy(update={"run_dir": folder, "capture_dir": folder / "captured"})
    return Runs(
        runs.plan,
        runs.ours.model_copy(update={"run_dir": folder, "request": request}),
        runs.plain,
        runs.rounded,
        runs.arithmetic,
    )


def checks(report: VerifyReport) -> dict[str, Check]:
    return {check.what: check for check in report.checks}


def failed(report: VerifyReport) -> set[str]:
    return {check.what for check in report.checks if not check.passed}


def test_the_whole_runtime_trains_the_same_model(reports: dict[str, VerifyReport]) -> None:
    report = reports["whole"]
    assert report.same, report
    # Two blocks and the large task's head on both ranks, the small task's on one, without the two key biases.
    per_block = 2 + 4 + 1  # norm, attention, key's weight
    assert checks(report)["final parameters"].compared == 2 * (2 * per_block + 2) + 2


def test_key_biases_are_compared_by_gradient_and_listed(reports: dict[str, VerifyReport]) -> None:
    report = reports["whole"]
    listed = {entry.name: entry for entry in report.noise}
    for block in range(2):
        whole = listed[f"large.blocks.{block}.key.bias"]
        assert whole.left_out == whole.elements == 16
        assert whole.largest_gradient < 1e-6
    assert checks(report)["gradients near zero"].passed


def test_gradients_scaled_alike_are_caught_although_adam_hides_them(
    reports: dict[str, VerifyReport],
) -> None:
    report = reports["gradients_scaled"]
    assert not report.same
    assert "losses" not in failed(report)  # the steps were the same
    largest = checks(report)["gradients of step 1"].largest
    assert largest is not None
    assert largest.relative == pytest.approx(1.0, rel=1e-3)  # twice the gradient


def test_a_share_scaled_by_another_dp_is_caught(reports: dict[str, VerifyReport]) -> None:
    report = reports["share_scaled"]
    assert "gradients of step 1" in failed(report)
    named = {difference.name for difference in checks(report)["gradients of step 1"].failures}
    assert "large.head.classify.weight" in named  # two shares
    assert "small.head.classify.weight" not in named  # one share: right by chance


def test_a_lost_sample_is_caught_from_the_first_loss_on(reports: dict[str, VerifyReport]) -> None:
    report = reports["sample_lost"]
    assert {"losses", "gradients of step 1", "final parameters"} <= failed(report)
    assert any(difference.where == "step 1" for difference in checks(report)["losses"].failures)


def test_a_stale_copy_of_a_shared_parameter_is_named_with_its_rank(
    reports: dict[str, VerifyReport],
) -> None:
    report = reports["copy_stale"]
    assert "gradients of step 1" not in failed(report)
    assert str(checks(report)["final parameters"].largest).startswith(
        f"{STALE} (rank 0): relative difference"
    )
    copies = {
        difference.where: difference.relative or 0.0
        for difference in checks(report)["final parameters"].failures
        if difference.name == STALE
    }
    # Rank 1's copy is off as well, by what the stale one did to the next steps' losses.
    assert copies["rank 0"] > 10 * copies.get("rank 1", 0.0)


def test_a_lost_step_is_caught(reports: dict[str, VerifyReport]) -> None:
    report = reports["step_lost"]
    assert {"losses", "final parameters"} <= failed(report)
    missing = checks(report)["losses"].failures[0]
    assert (missing.where, missing.problem) == ("step 3", "missing in the plan's run")
