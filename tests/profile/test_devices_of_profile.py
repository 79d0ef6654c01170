"""Profiles of several types of device: what a cluster sees of them, and putting them together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.plans import SELECTIVE, cluster_of, metaop_of, profile_of
from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.errors import InputError
from spindle_cli.profile.mixed.merging import merge
from spindle_cli.profile.mixed.seen import seen_on
from spindle_cli.profile.moving import ProcessorCosts
from spindle_cli.profile.numeric_check import NumericCheck
from spindle_cli.profile.points import OpMemory
from spindle_cli.profile.types import Device, LocalSgd, Profile, TaskShare
from spindle_cli.workload.settings.types import TaskLengths

FAST, SLOW = "a100-80gb", "v100-32gb"


def both() -> Profile:
    net = metaop_on_types("t/net", 2, {FAST: 1.0, SLOW: 3.0}, batch_size=4)
    return profile_on_types(net)


def of_one(device: str, op_s: float, **more: Any) -> Profile:
    profile = profile_of(metaop_of("t/net", 2, {1: op_s, 2: op_s / 2}, **more))
    return profile.model_copy(update={"device": Device(type=device, name=device, memory_bytes=2**35)})


def test_a_cluster_of_one_type_sees_its_entries_alone() -> None:
    seen = seen_on(both(), cluster_of_types({SLOW: 2}))
    (net,) = seen.metaops
    assert [point.op_s for point in net.curve] == pytest.approx([12.0, 6.0, 3.0])
    assert [share.samples for share in net.shares] == [1, 2, 3, 4]
    assert {entry.device for entry in (*net.curve, *net.shares)} == {None}
    assert seen.device.type == SLOW
    assert seen.devices == ()
    assert seen.sha256() == both().sha256()  # it is of that file


def test_a_cluster_of_several_types_sees_all_by_its_own_names() -> None:
    seen = seen_on(both(), cluster_of_types({"v100": 1, FAST: 1}))
    (net,) = seen.metaops
    assert [device.type for device in seen.devices] == ["v100", FAST]
    assert [point.device for point in net.curve] == ["v100"] * 3 + [FAST] * 3
    assert seen_on(seen, cluster_of_types({"v100": 1, FAST: 1})).metaops == seen.metaops


def test_entries_without_a_device_are_of_the_first() -> None:
    net = both().metaops[0]
    curve = tuple(
        point.model_copy(update={"device": None}) if point.device == FAST else point for point in net.curve
    )
    shares = tuple(share for share in net.shares if share.device == SLOW)
    profile = both().model_copy(
        update={"metaops": (net.model_copy(update={"curve": curve, "shares": shares}),)}
    )
    assert [p.op_s for p in seen_on(profile, cluster_of_types({FAST: 2})).metaops[0].curve] == [4, 2, 1]


def test_a_profile_of_one_type_stays_as_it_is() -> None:
    profile = profile_of(metaop_of("t/net", 2, {1: 1.0}))
    assert seen_on(profile, cluster_of(2)) is profile


def test_a_type_without_curves_is_refused_with_the_way_out() -> None:
    with pytest.raises(InputError, match=r"'h20', of which the profile has no curves.*'a100-80gb'") as error:
        seen_on(both(), cluster_of_types({FAST: 1, "h20": 1}))
    assert "--merge" in str(error.value.hint)
    net = both().metaops[0]
    half = net.model_copy(update={"curve": tuple(p for p in net.curve if p.device == FAST)})
    with pytest.raises(InputError, match=r"t/net: no point of its curve is of 'v100-32gb'"):
        seen_on(both().model_copy(update={"metaops": (half,)}), cluster_of_types({FAST: 1, SLOW: 1}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": []}, r"an entry for 'v100-32gb'; expected one of .*a100-80gb"),
        ({"device": {"type": SLOW, "name": SLOW, "memory_bytes": 1}}, "expected `device`, .* first"),
        ({"devices": [both().devices[0].model_dump()] * 2}, "expected each type once"),
    ],
)
def test_devices_that_do_not_fit_the_entries_are_refused(changes: dict[str, Any], message: str) -> None:
    data = both().model_dump(mode="json", by_alias=True) | changes
    with pytest.raises(InputError, match=message):
        Profile.from_data(data, where="p.json")


def test_entries_say_their_device_all_or_none() -> None:
    data = both().model_dump(mode="json", by_alias=True)
    data["metaops"][0]["curve"][0]["device"] = None
    with pytest.raises(InputError, match=r"t/net.curve: entries without a device.*one way for all"):
        Profile.from_data(data, where="p.json")


def test_curves_ascend_for_each_type() -> None:
    data = both().model_dump(mode="json", by_alias=True)
    data["metaops"][0]["curve"].reverse()
    with pytest.raises(InputError, match="each allocation once, of the points for 'v100-32gb'"):
        Profile.from_data(data, where="p.json")


def merged(*profiles: Profile) -> Profile:
    return merge([(Path(f"{number}.json"), profile) for number, profile in enumerate(profiles)])


def test_merging_keeps_every_curve_and_the_most_that_ops_hold() -> None:
    memory = {"kept_bytes": (0, 10), "forward_bytes": (0, 20), "backward_bytes": (0, 5)}
    one = OpMemory(**memory, first_backward_bytes=(7, 0))
    two = OpMemory(**memory | {"kept_bytes": (1, 8)}, first_backward_bytes=(6, 9), joined_bytes=3)
    fast = of_one(FAST, 1.0, memory=(one,), activation_bytes_per_op=5)
    slow = of_one(SLOW, 3.0, memory=(two,), activation_bytes_per_op=9)
    fast = fast.model_copy(
        update={
            "optimizer_s_per_byte": 1e-9,
            "processor": ProcessorCosts(message_s=2, pass_s=5, load_s={"t": 1}),
        }
    )
    slow = slow.model_copy(
        update={"optimizer_s_per_byte": 3e-9, "processor": ProcessorCosts(s_per_byte=4, step_s=6)}
    )
    made = merged(fast, slow)
    (net,) = made.metaops
    assert [(point.device, point.op_s) for point in net.curve] == [
        (FAST, pytest.approx(1.0)),
        (FAST, pytest.approx(0.5)),
        (SLOW, pytest.approx(3.0)),
        (SLOW, pytest.approx(1.5)),
    ]
    assert made.device == made.devices[0]
    assert [device.type for device in made.devices] == [FAST, SLOW]
    assert net.activation_bytes_per_op == 9
    (held,) = net.memory
    assert (held.kept_bytes, held.first_backward_bytes, held.joined_bytes) == ((1, 10), (7, 9), 3)
    assert made.optimizer_s_per_byte == 3e-9
    assert made.processor == ProcessorCosts(message_s=2, s_per_byte=4, load_s={"t": 1}, step_s=6, pass_s=5)


def test_a_merged_profile_can_be_merged_again() -> None:
    three = merged(merged(of_one(FAST, 1.0), of_one(SLOW, 3.0)), of_one("h20", 2.0))
    assert [device.type for device in three.devices] == [FAST, SLOW, "h20-96gb"]
    assert seen_on(three, cluster_of_types({"h20": 1})).metaops[0].curve[0].op_s == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (of_one("a100", 2.0), r"1.json: it has curves of 'a100-80gb', which 0.json has too"),
        (
            of_one(SLOW, 2.0).model_copy(
                update={"workload": both().workload.model_copy(update={"fingerprint": "sha256:" + "1" * 64})}
            ),
            "1.json: a profile of the workload 'test'",
        ),
        (of_one(SLOW, 2.0, param_bytes_per_op=1), r"1.json: metaops: t/net.param_bytes_per_op is 1"),
        (
            of_one(SLOW, 2.0).model_copy(update={"optimizer_state_per_param": 0.0}),
            r"1.json: optimizer_state_per_param is 0.0; expected 2.0, as in 0.json",
        ),
        (
            of_one(SLOW, 2.0).model_copy(update={"scales_losses": True}),
            r"1.json: scales_losses is true; expected false, as in 0.json",
        ),
        (
            of_one(SLOW, 2.0).model_copy(update={"environment": {"precision": "float32"}}),
            r"1.json: environment.precision is 'float32'; expected nothing, as in 0.json",
        ),
        (
            profile_of(metaop_of("t/other", 2, {1: 1.0})).model_copy(
                update={"device": Device(type=SLOW, name="s", memory_bytes=1)}
            ),
            "1.json: metaops: t/net, t/other: not the MetaOps of 0.json",
        ),
    ],
)
def test_profiles_that_do_not_belong_together_are_refused(other: Profile, message: str) -> None:
    with pytest.raises(InputError, match=message):
        merged(of_one(FAST, 1.0), other)


@pytest.mark.parametrize("known", [(True, True), (True, False), (False, True)])
def test_parts_are_updated_early_if_every_profile_says_so(known: tuple[bool, bool]) -> None:
    """One that was made before profiles said it can be merged with newer ones all the same."""
    profiles = [
        of_one(device, 1.0).model_copy(update={"updates_by_parts": says})
        for device, says in zip((FAST, SLOW), known, strict=True)
    ]
    assert merged(*profiles).updates_by_parts is all(known)


@pytest.mark.parametrize(
    ("own", "theirs", "expected"), [(0.25, 0.5, 0.5), (0.5, 0.25, 0.5), (0.25, None, None), (None, 0.5, None)]
)
def test_of_what_runs_again_in_part_the_most_is_merged_if_both_know_it(
    own: float | None, theirs: float | None, expected: float | None
) -> None:
    memory = SELECTIVE["memory"]
    profiles = (
        of_one(device, 1.0, memory=memory, selective_share=share)
        for device, share in (("v100", own), (FAST, theirs))
    )
    assert merged(*profiles).metaops[0].selective_share == expected


@pytest.mark.parametrize(
    ("key", "own", "other"),
    [
        ("optimizer_state_sharded", False, True),
        ("update_bytes_per_param", 2.0, 3.0),
        ("gradient_bytes_per_param", 1.0, 2.0),
        ("clips_gradients", False, True),
        ("accumulate", 1, 2),
        ("loss_chunks", 1, 2),
        ("local_sgd", None, LocalSgd(islands=2, every=4)),
        ("task_sets", (), (TaskShare(tasks=("t",), share=1.0),)),
    ],
)
def test_profiles_of_other_trainings_are_refused(key: str, own: object, other: object) -> None:
    one, two = (
        of_one(kind, 1.0).model_copy(update={key: each}) for kind, each in ((FAST, own), (SLOW, other))
    )
    with pytest.raises(InputError, match=f"1.json: {key} is .*; expected .*, as in 0.json"):
        merged(one, two)


@pytest.mark.parametrize(("key", "other"), [("compile", "inductor"), ("float32_matmul", "high")])
def test_profiles_of_other_arithmetic_are_refused(key: str, other: str) -> None:
    two = of_one(SLOW, 1.0).model_copy(update={"environment": {key: other}})
    with pytest.raises(
        InputError, match=f"1.json: environment.{key} is '{other}'; expected nothing, as in 0.json"
    ):
        merged(of_one(FAST, 1.0), two)


def split_in_two(profile: Profile, **more: Any) -> Profile:
    """With times of layers that two devices have a part each of, and what is known of those."""
    (net,) = profile.metaops
    halves = net.curve[0].model_copy(update={"num_devices": 2, "dp": 1, "tp": 2})
    known = {"curve": (*net.curve, halves), "whole_param_bytes_per_op": 16, "num_experts": 4, **more}
    return profile.with_metaops([net.model_copy(update=known)])


@pytest.mark.parametrize("is_first", [True, False])
def test_what_splits_leave_whole_is_known_from_the_type_whose_nodes_have_room_for_them(
    is_first: bool,
) -> None:
    """Of a type with one device in a node no splits are looked at."""
    split, alone = split_in_two(of_one(FAST, 1.0)), of_one(SLOW, 3.0)
    (net,) = merged(*((split, alone) if is_first else (alone, split))).metaops
    assert (net.whole_param_bytes_per_op, net.num_experts) == (16, 4)
    assert {(point.device, point.tp) for point in net.curve} == {(FAST, 1), (FAST, 2), (SLOW, 1)}


def test_profiles_that_split_layers_otherwise_are_refused() -> None:
    other = split_in_two(of_one(SLOW, 3.0), num_experts=8)
    with pytest.raises(InputError, match=r"1.json: metaops: t/net.num_experts is 8; expected 4, as in 0"):
        merged(split_in_two(of_one(FAST, 1.0)), other)
    with pytest.raises(InputError, match=r"2.json: metaops: t/net.num_experts is 8; expected 4, as in 1"):
        merged(of_one("h20", 2.0), split_in_two(of_one(FAST, 1.0)), other)


def test_what_any_profile_has_checked_by_numbers_is_kept() -> None:
    check = NumericCheck(skipped="--no-check")
    unchecked, checked = of_one(FAST, 1.0), of_one(SLOW, 3.0).model_copy(update={"numeric_check": check})
    assert merged(unchecked, checked).numeric_check == merged(checked, unchecked).numeric_check == check
    assert merged(unchecked, of_one(SLOW, 3.0)).numeric_check is None


def test_profiles_of_other_lengths_are_refused_with_the_options_that_choose_them() -> None:
    def of_length(device: str, percentile: float, planned: int) -> Profile:
        field = {"planned": [planned], "shortest": [4], "longest": [20]}
        lengths = TaskLengths(batches=3, percentile=percentile, fields={"tokens": field})
        fingerprint = "sha256:" + str(planned % 10) * 64
        seen = {"fingerprint": fingerprint, "lengths": {"t": lengths}}
        profile = of_one(device, 1.0)
        return profile.model_copy(update={"workload": profile.workload.model_copy(update=seen)})

    with pytest.raises(InputError, match=r"1\.json: a profile of the workload") as refused:
        merged(of_length(FAST, 100, 20), of_length(SLOW, 50, 19))
    assert "the same --batches and the same --length-percentile" in (refused.value.hint or "")
