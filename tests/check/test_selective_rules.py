"""Rules of ops that are recomputed but for what takes longest."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from helpers.plans import two_towers
from spindle_cli.check.run import check_plan
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import MetaOp

SHARE = 0.25
KNOWN = {
    "kept_bytes": [0, 2**18],
    "forward_bytes": [0, 2**18],
    "backward_bytes": [0, 0],
    "first_backward_bytes": [0, 0],
}


def edited(length: float, *, share: float | None = SHARE, **piece: Any) -> Plan:
    """The two-tower plan alone with its last slice, which recomputes in part, `length` times as long as it
    has to be.
    """
    data = two_towers()[1].model_dump(mode="json", by_alias=True)
    last = data["waves"][-1]["slices"][-1]
    last |= {"recompute": True, "selective": True, **piece}
    metaop = next(each for each in data["metaops"] if each["name"] == last["metaop"])
    if share is not None:
        metaop |= {"selective_share": share, "memory": [KNOWN | {"selective_bytes": [0, 2**17]}]}
    point = next(each for each in metaop["curve"] if each["num_devices"] == len(last["devices"]))
    num_ops = last["ops"][1] - last["ops"][0]
    least_s = num_ops * ((1 + (share or 1.0)) * point["forward_s"] + point["backward_s"])
    last["end_s"] = last["start_s"] + length * least_s
    data["waves"][-1]["end_s"] = last["end_s"]
    data["predicted"] |= {"compute_s": last["end_s"], "iteration_s": last["end_s"]}
    return Plan.model_validate(data)


def rules(plan: Plan) -> set[str]:
    return {violation.rule for violation in check_plan(plan)} - {"peak-memory"}


def test_a_slice_lasts_what_runs_again_and_no_more() -> None:
    assert rules(edited(1.0)) == set()
    assert rules(edited(0.999)) == {"duration"}
    assert rules(edited(1.0, selective=False)) == {"duration"}  # all of it would take longer


def test_what_that_takes_has_to_be_known() -> None:
    (violation,) = [each for each in check_plan(edited(1.0, share=None)) if each.rule == "selective"]
    assert violation.value == "selective: true"
    assert "selective_share" in violation.expected


def test_only_what_recomputes_may_keep_what_takes_longest() -> None:
    with pytest.raises(ValidationError, match="selective: expected only with `recompute: true`"):
        edited(1.0, recompute=False)


def metaop(**more: Any) -> MetaOp:
    return MetaOp.model_validate({"name": "t/m", "task": "t", "num_ops": 2, "batch_size": 4, **more})


@pytest.mark.parametrize(
    "memory",
    [
        [],
        [KNOWN],
        [KNOWN | {"selective_bytes": [0, 1]}, KNOWN | {"first_op": 1}],
        [KNOWN | {"tp": 2, "selective_bytes": [0, 1]}],
    ],
)
def test_a_share_needs_the_bytes_of_all_ops_that_are_not_split(memory: list[dict[str, Any]]) -> None:
    with pytest.raises(ValidationError, match="expected selective_bytes in all entries of 't/m' with tp 1"):
        metaop(selective_share=SHARE, memory=memory)
    known = [KNOWN | {"selective_bytes": [0, 1]}, KNOWN | {"tp": 2}]
    assert metaop(selective_share=SHARE, memory=known).selective_share == SHARE


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_no_more_than_a_whole_forward_pass_runs_again(share: float) -> None:
    with pytest.raises(ValidationError, match="selective_share"):
        metaop(selective_share=share, memory=[KNOWN | {"selective_bytes": [0, 1]}])
