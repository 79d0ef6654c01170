"""Rules for micro-batches, and what a file may say of them."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.cut import cuttable
from helpers.plans import cluster_of, profile_of
from spindle_cli.check.run import check_plan
from spindle_cli.errors import InputError
from spindle_cli.files.artifact import parse_yaml
from spindle_cli.plan.file import plan_text
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import Profile

Data = dict[str, Any]


def profile() -> Profile:
    """Two MetaOps, the second behind the first: 2 s and 1 s for the batch, 1.2 s and 0.6 s for half of it."""
    first = cuttable("t/first", 2, {8: 2.0, 4: 1.2})
    second = cuttable("t/second", 1, {8: 1.0, 4: 0.6}, inputs=("t/first",))
    return profile_of(first, second)


def as_written() -> Data:
    """Two micro-batches on one device, one behind the other, as the file has it."""
    plan = make_plan(profile(), cluster_of(1), micro_batches={"t": 2})
    data: Data = parse_yaml(plan_text(plan), where="plan.yaml")
    return data


def rules_of(data: Data) -> set[str]:
    return {each.rule for each in check_plan(Plan.from_data(data, where="plan.yaml"))}


def pieces_of(data: Data) -> dict[tuple[str, int], Data]:
    pieces = [piece for wave in data["waves"] for piece in wave["slices"]]
    return {(piece["metaop"], piece["micro_batch"]): piece for piece in pieces}


def test_a_file_says_of_how_many_micro_batches_a_slice_is_one_for_all_together() -> None:
    data = as_written()
    assert data["micro_batches"] == {"t": 2}
    assert all("micro_batches" not in piece for piece in pieces_of(data).values())
    plan = Plan.from_data(data, where="plan.yaml")
    assert {(piece.micro_batch, piece.micro_batches) for piece in plan.slices} == {(0, 2), (1, 2)}
    assert {piece.label for piece in plan.slices} == {
        "t/first[0:2] 1/2",
        "t/first[0:2] 2/2",
        "t/second[0:1] 1/2",
        "t/second[0:1] 2/2",
    }
    assert check_plan(plan, profile()) == ()
    assert Plan.from_data(parse_yaml(plan_text(plan), where="plan.yaml"), where="plan.yaml") == plan


def test_every_op_runs_once_in_every_micro_batch() -> None:
    data = as_written()
    pieces_of(data)["t/second", 1]["micro_batch"] = 0
    found = check_plan(Plan.from_data(data, where="plan.yaml"))
    said = [(each.where, each.value) for each in found if each.rule == "coverage"]
    assert ("metaops, t/second, micro-batch 1 of 2", "no slice runs ops [0, 1)") in said
    assert any("a second time" in value for _, value in said)


def test_a_pass_waits_for_its_own_micro_batch_alone() -> None:
    """The first's backward pass of one micro-batch may run before the second has begun the other."""
    data = as_written()
    pieces = pieces_of(data)
    order = [
        ("t/first", 0, "F"),
        ("t/second", 0, "F"),
        ("t/second", 0, "B"),
        ("t/first", 0, "B"),
        ("t/first", 1, "F"),
        ("t/second", 1, "F"),
        ("t/second", 1, "B"),
        ("t/first", 1, "B"),
    ]
    seconds = {("t/first", "F"): 0.8, ("t/first", "B"): 1.6, ("t/second", "F"): 0.2, ("t/second", "B"): 0.4}
    at_s = 0.0
    for name, number, way in order:
        piece, prefix = pieces[name, number], "" if way == "F" else "backward_"
        piece[f"{prefix}start_s"], at_s = at_s, at_s + seconds[name, way]
        piece[f"{prefix}end_s"] = at_s
    for wave in data["waves"]:
        wave["start_s"] = min(piece["start_s"] for piece in wave["slices"])
        wave["end_s"] = max(piece["end_s"] for piece in wave["slices"])
    data["predicted"] |= {"compute_s": at_s, "iteration_s": at_s + 1}
    assert rules_of(data) <= {"peak-memory"}
    pieces["t/first", 1]["backward_start_s"] -= 0.3
    assert "backward" in rules_of(data)


def test_a_pass_lasts_as_long_as_its_share_says() -> None:
    data = as_written()
    assert "duration" not in rules_of(data)
    for metaop in data["metaops"]:
        for share in metaop["shares"]:
            share["forward_s"] *= 1.001
    assert "duration" in rules_of(data)


def test_shares_have_times_and_dp_divides_a_micro_batch() -> None:
    data = as_written()
    data["metaops"][0]["shares"] = []
    (found,) = [each for each in check_plan(Plan.from_data(data, where="p")) if each.rule == "allocation"][:1]
    assert (found.value, found.expected) == (
        "a share of 4 samples, tp 1",
        "within the MetaOp's shares for tp 1: none",
    )
    data = as_written()
    piece = pieces_of(data)["t/first", 0]
    piece |= {"dp": 3, "devices": [0, 1, 2]}
    assert "allocation" in rules_of(data | {"cluster": cluster_of(3).model_dump(by_alias=True)})
    piece |= {"dp": 8, "devices": ["0-7"]}  # divides the batch
    eight = data | {"cluster": cluster_of(8).model_dump(by_alias=True)}
    (found,) = [each for each in check_plan(Plan.from_data(eight, where="p")) if "dp 8" in each.value]
    assert found.expected == "a divisor of the micro-batch of 4 samples"


def test_the_profile_has_the_shares_that_a_plan_says() -> None:
    plan = make_plan(profile(), cluster_of(1), micro_batches={"t": 2})
    data = parse_yaml(plan_text(plan), where="plan.yaml")
    data["metaops"][1]["shares"][0]["backward_s"] *= 0.9
    found = check_plan(Plan.from_data(data, where="plan.yaml"), profile())
    assert [(each.rule, each.where) for each in found if each.rule == "curve"] == [
        ("curve", "metaops, t/second.shares")
    ]


def test_tasks_that_hand_values_to_each_other_are_cut_alike() -> None:
    data = as_written()
    data["metaops"][1]["task"] = "u"
    assert "micro-batches" not in rules_of(data | {"micro_batches": {"t": 2, "u": 2}})
    assert "micro-batches" in rules_of(data | {"micro_batches": {"t": 2, "u": 4}})


@pytest.mark.parametrize(
    "needs", [{"changes_buffers": True}, {"batch_sums": [{"num_bytes": 8, "forward": 1, "backward": 1}]}]
)
def test_what_needs_its_whole_batch_has_one_micro_batch(needs: Data) -> None:
    data = as_written()
    data["metaops"][0] |= needs
    assert "micro-batches" in rules_of(data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"micro_batches": {"t": 3}}, "3 of task 't' does not divide its batch of 8 samples"),
        ({"micro_batches": {"t": 2, "u": 2}}, "no MetaOp is of a task 'u'"),
        ({"micro_batches": {}}, "micro_batch: expected less than 1, its task's micro_batches (found 1)"),
        ({"micro_batches": {"t": 1}}, "greater than or equal to 2"),
        ({"micro_batches": {"t": 2.5}}, "micro_batches.t"),
        ({"micro_batches": [2]}, "micro_batches: expected a mapping"),
        ({"sharding": {"t": "all"}}, "sharding.t: expected 'none', 'optimizer', 'gradients' or 'par"),
    ],
)
def test_what_a_file_says_of_micro_batches_has_to_agree(change: Data, said: str) -> None:
    with pytest.raises(InputError) as raised:
        Plan.from_data(as_written() | change, where="plan.yaml")
    assert said in str(raised.value)
