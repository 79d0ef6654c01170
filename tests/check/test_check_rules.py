"""Every rule of the checker: a valid plan passes, and each way to break one is named with its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.examples import examples
from helpers.plans import FINGERPRINT, two_towers
from spindle_cli.check.run import check_plan
from spindle_cli.errors import InputError
from spindle_cli.plan.types import Plan

Edit = Callable[[dict[str, Any]], None]


def edited(edit: Edit) -> Plan:
    """The two-tower plan as a person would edit its file."""
    data = two_towers()[1].model_dump(mode="json", by_alias=True)
    edit(data)
    return Plan.model_validate(data)


def slices_of(data: dict[str, Any], wave: int) -> list[dict[str, Any]]:
    slices: list[dict[str, Any]] = data["waves"][wave]["slices"]
    return slices


def test_a_valid_plan_has_no_violations() -> None:
    profile, plan = two_towers()
    assert check_plan(plan) == ()
    assert check_plan(plan, profile) == ()


def lose_an_op(data: dict[str, Any]) -> None:
    slices_of(data, 0)[0]["ops"] = [0, 2]


def run_an_op_twice(data: dict[str, Any]) -> None:
    slices_of(data, 1)[0]["ops"] = [2, 4]


def lose_a_metaop(data: dict[str, Any]) -> None:
    del data["waves"][2]


def use_a_device_in_two_slices_of_a_wave(data: dict[str, Any]) -> None:
    slices_of(data, 0)[1]["devices"] = [1, 2]


def list_a_device_twice(data: dict[str, Any]) -> None:
    slices_of(data, 0)[1]["devices"] = [2, 2]


def start_before_the_previous_slice_ends(data: dict[str, Any]) -> None:
    slices_of(data, 1)[0].update(start_s=2.5, end_s=3.6)
    data["waves"][1]["start_s"] = 2.5


def start_before_an_input_ends(data: dict[str, Any]) -> None:
    slices_of(data, 2)[0].update(start_s=3.5, end_s=3.7, devices=[0])
    data["waves"][2].update(start_s=3.5, end_s=3.8)


def use_a_device_outside_the_cluster(data: dict[str, Any]) -> None:
    slices_of(data, 0)[1]["devices"] = [3, 4]


def name_an_unknown_metaop(data: dict[str, Any]) -> None:
    slices_of(data, 0)[1]["metaop"] = "pairs/audio"


def take_an_allocation_off_the_curve(data: dict[str, Any]) -> None:
    slices_of(data, 2)[0].update(devices=[0, 1], dp=2)


def take_a_share_that_does_not_divide_the_batch(data: dict[str, Any]) -> None:
    slices_of(data, 1)[0].update(devices=[0, 1, 2], dp=3)


def give_fewer_devices_than_shares(data: dict[str, Any]) -> None:
    slices_of(data, 0)[0]["devices"] = [0]


def shorten_a_slice(data: dict[str, Any]) -> None:
    slices_of(data, 0)[0]["end_s"] = 2.9


def reverse_a_slice(data: dict[str, Any]) -> None:
    slices_of(data, 0)[0]["ops"] = [3, 1]


def renumber_a_wave(data: dict[str, Any]) -> None:
    data["waves"][1]["index"] = 5


def swap_waves(data: dict[str, Any]) -> None:
    data["waves"][1], data["waves"][2] = data["waves"][2], data["waves"][1]
    data["waves"][1]["index"], data["waves"][2]["index"] = 1, 2


def end_a_wave_too_early(data: dict[str, Any]) -> None:
    data["waves"][0]["end_s"] = 2.0


def claim_a_shorter_schedule(data: dict[str, Any]) -> None:
    data["predicted"]["compute_s"] = 3.0


def claim_a_bound_above_the_schedule(data: dict[str, Any]) -> None:
    data["predicted"]["lower_bound_s"] = 3.9


def claim_an_iteration_shorter_than_its_compute(data: dict[str, Any]) -> None:
    data["predicted"]["iteration_s"] = 1.0


def shrink_the_devices(data: dict[str, Any]) -> None:
    data["cluster"]["nodes"][0]["memory_gib"] = 0.001


def claim_less_memory(data: dict[str, Any]) -> None:
    data["predicted"]["peak_memory_bytes"][2] = 1


def forget_a_device_in_the_memory(data: dict[str, Any]) -> None:
    data["predicted"]["peak_memory_bytes"].pop()


def give_too_few_parameter_blocks(data: dict[str, Any]) -> None:
    data["metaops"][0]["parameter_blocks"] = [0, 0]


def put_a_split_share_on_two_nodes(data: dict[str, Any]) -> None:
    data["cluster"]["nodes"] = [{"count": 2, "devices": 2, "device": "cpu", "memory_gib": 4}]
    slices_of(data, 1)[0].update(devices=[0, 3, 1, 2], dp=2, tp=2)


@pytest.mark.parametrize(
    ("edit", "rule", "named"),
    [
        (lose_an_op, "coverage", "no slice runs ops [2, 3)"),
        (run_an_op_twice, "coverage", "wave 1, pairs/vision[2:4]: runs ops [2, 3) a second time"),
        (lose_a_metaop, "coverage", "pairs/loss: no slice runs ops [0, 1)"),
        (use_a_device_in_two_slices_of_a_wave, "wave-devices", "device 1: also used by pairs/vision[0:3]"),
        (use_a_device_in_two_slices_of_a_wave, "device-busy", "device 1"),
        (list_a_device_twice, "device-twice", "device 2: listed twice"),
        (start_before_the_previous_slice_ends, "order", "pairs/vision[0:3] has ended at 3 s"),
        (start_before_an_input_ends, "producer", "not before its input pairs/vision has ended at 3.6 s"),
        (use_a_device_outside_the_cluster, "unknown-device", "device 4: not in the cluster"),
        (name_an_unknown_metaop, "unknown-metaop", "'pairs/audio'"),
        (take_an_allocation_off_the_curve, "allocation", "dp 2 x tp 1 has no point"),
        (take_a_share_that_does_not_divide_the_batch, "allocation", "a divisor of the batch of 8"),
        (give_fewer_devices_than_shares, "allocation", "1 devices; expected dp 2 x tp 1 = 2"),
        (shorten_a_slice, "duration", "lasts 2.9 s"),
        (reverse_a_slice, "ops-range", "ops [3, 1]"),
        (renumber_a_wave, "wave-index", "waves[1]: index is 5; expected 1"),
        (swap_waves, "wave-order", "not before wave 1, which starts at 3.6 s"),
        (end_a_wave_too_early, "wave-times", "within its wave, 0 s (0 s) to 2 s"),
        (claim_a_shorter_schedule, "compute", "predicted.compute_s: 3 s"),
        (claim_a_bound_above_the_schedule, "lower-bound", "at most compute_s"),
        (claim_an_iteration_shorter_than_its_compute, "iteration", "at least compute_s"),
        (shrink_the_devices, "memory", "expected at most 1.02 MiB"),
        (claim_less_memory, "peak-memory", "1 bytes on device 2"),
        (forget_a_device_in_the_memory, "peak-memory", "3 entries; expected one for each of the 4 devices"),
        (
            put_a_split_share_on_two_nodes,
            "tensor-parallel",
            "wave 1, pairs/vision[3:4], devices 1, 2: hold share 1 together, on nodes 0, 1; expected the 2",
        ),
        (give_too_few_parameter_blocks, "parameter-blocks", "2 parameter_blocks"),
    ],
)
def test_each_broken_rule_is_found_and_placed(edit: Edit, rule: str, named: str) -> None:
    found = [violation for violation in check_plan(edited(edit)) if violation.rule == rule]
    assert any(named in str(violation) for violation in found), [str(violation) for violation in found]


def test_split_shares_inside_nodes_break_no_rule_of_theirs() -> None:
    def inside(data: dict[str, Any]) -> None:
        put_a_split_share_on_two_nodes(data)
        slices_of(data, 1)[0]["devices"] = [1, 0, 2, 3]

    assert "tensor-parallel" not in {violation.rule for violation in check_plan(edited(inside))}


def test_devices_of_one_collision_are_one_violation() -> None:
    def overlap(data: dict[str, Any]) -> None:
        slices_of(data, 1)[0].update(start_s=2.0, end_s=3.6)
        data["waves"][1]["start_s"] = 2.0

    busy = [violation for violation in check_plan(edited(overlap)) if violation.rule == "device-busy"]
    assert [violation.devices for violation in busy] == [(0, 1)]


def test_a_recomputed_slice_must_last_a_second_forward_pass() -> None:
    def recompute(data: dict[str, Any]) -> None:
        slices_of(data, 1)[0]["recompute"] = True

    assert "duration" in {violation.rule for violation in check_plan(edited(recompute))}


def test_a_profile_of_another_workload_is_refused() -> None:
    profile, plan = two_towers()
    other = profile.model_copy(
        update={"workload": profile.workload.model_copy(update={"fingerprint": FINGERPRINT[:-1] + "1"})}
    )
    with pytest.raises(InputError, match="the plan is for 'test'"):
        check_plan(plan, other)


def test_a_profile_measured_again_differs_in_hash_and_curve() -> None:
    profile, plan = two_towers()
    data = profile.model_dump(mode="json", by_alias=True)
    data["metaops"][0]["curve"][1]["forward_s"] *= 1.1
    found = check_plan(plan, type(profile).model_validate(data))
    assert {violation.rule for violation in found} == {"profile", "curve"}
    assert "pairs/vision.curve: dp 2 x tp 1" in " ".join(map(str, found))


def test_a_metaop_edited_in_the_plan_is_found_against_the_profile() -> None:
    def edit(data: dict[str, Any]) -> None:
        data["metaops"][0]["param_bytes_per_op"] = 1

    found = check_plan(edited(edit), two_towers()[0])
    assert any("pairs/vision.param_bytes_per_op: 1" in str(violation) for violation in found)


def test_a_bound_below_the_work_that_must_be_done_is_found() -> None:
    def edit(data: dict[str, Any]) -> None:
        data["predicted"]["lower_bound_s"] = 2.0

    plan = edited(edit)
    assert check_plan(plan) == ()
    found = check_plan(plan, two_towers()[0])
    assert [violation.rule for violation in found] == ["lower-bound"]
    assert "2.8 s" in found[0].expected


NUMBERS = st.integers(0, 6)


@examples(150)
@given(
    wave=st.integers(0, 2),
    changes=st.fixed_dictionaries(
        {},
        optional={
            "ops": st.tuples(NUMBERS, st.integers(1, 6)),
            "devices": st.lists(NUMBERS, min_size=1, max_size=4),
            "dp": st.integers(1, 5),
            "tp": st.integers(1, 3),
            "start_s": st.floats(0, 5),
            "end_s": st.floats(0, 5),
            "metaop": st.sampled_from(["pairs/vision", "pairs/text", "pairs/loss", "pairs/none"]),
        },
    ),
)
def test_any_edit_of_a_slice_is_judged_without_failing(wave: int, changes: dict[str, Any]) -> None:
    """Every plan that can be read gets an answer; a slice of another MetaOp or other ops is never valid."""
    before = two_towers()[1].waves[wave].slices[0]
    plan = edited(lambda data: slices_of(data, wave)[0].update(changes))
    after = plan.waves[wave].slices[0]
    found = check_plan(plan, two_towers()[0])
    if (after.metaop, after.ops) != (before.metaop, before.ops):
        assert found


def test_memory_by_an_earlier_formula_is_not_compared_but_devices_still_hold_what_they_need() -> None:
    def as_before(data: dict[str, Any]) -> None:
        claim_less_memory(data)
        del data["predicted"]["memory_formula"]

    assert check_plan(edited(as_before)) == ()

    def on_small_devices(data: dict[str, Any]) -> None:
        as_before(data)
        data["cluster"]["nodes"][0]["memory_gib"] = 0.001

    assert {violation.rule for violation in check_plan(edited(on_small_devices))} == {"memory"}
