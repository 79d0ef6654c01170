"""Unequal parts of what devices share out: in plans, their account and check, by memory and as asked."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.account.device_memory import device_memory
from spindle_cli.account.holdings import Held, Sharers
from spindle_cli.account.traffic import traffic_of
from spindle_cli.check.run import check_plan
from spindle_cli.errors import InputError, NoPlanError, UsageError
from spindle_cli.files.cluster import Cluster, NodeGroup
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.best.request import parse_shard_by
from spindle_cli.plan.file import plan_text, read_plan
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.plan_report import PlanReport
from spindle_cli.plan.types import Plan
from spindle_cli.plan.weights.choose import by_free_memory, by_speed
from spindle_cli.plan.weights.on_part import weights_on
from spindle_cli.profile.mixed.seen import seen_on
from spindle_cli.profile.types import Profile
from spindle_cli.program.link import link, link_sets
from spindle_cli.program.proof.faults import ProgramError
from spindle_cli.program.proof.proof import prove
from spindle_cli.show.picture import footer
from spindle_cli.show.summary import summarise
from spindle_cli.simulate.run import simulate
from spindle_cli.units import GIB


def profile(*, is_sharded: bool = True) -> Profile:
    """2 ops with 1 GiB of parameters each, and twice as much of optimizer state; on one device of each type 4
    samples on the fast one, 2 on the slow one.
    """
    times = {"fast": 1.0, "slow": 2.0}
    net = metaop_on_types(
        "t/net", 2, times, batch_size=6, param_bytes_per_op=GIB, activation_bytes_per_op=GIB // 2
    )
    settings = {"optimizer_state_sharded": is_sharded, "optimizer_state_per_param": 2.0}
    return profile_on_types(net).model_copy(update=settings)


def cluster(fast_gib: float, slow_gib: float) -> Cluster:
    links = cluster_of_types({"fast": 1, "slow": 1}).links
    groups = (("fast", fast_gib), ("slow", slow_gib))
    nodes = tuple(NodeGroup(count=1, devices=1, device=kind, memory_gib=gib) for kind, gib in groups)
    return Cluster(name="mixed", nodes=nodes, links=links)


def state_gib(plan: Plan) -> list[float]:
    held = device_memory(plan.metaops, plan.slices, plan.cluster, plan)
    return [need.optimizer_bytes / GIB for need in held]


def sound(plan: Plan, of: Profile) -> Plan:
    """The plan, which passes its check, and does so from its file."""
    assert check_plan(plan, of) == ()
    return plan


def test_state_and_update_follow_the_weights() -> None:
    """Of 4 GiB of state 3 and 1; the update takes as long as that of 3/4 of the parameters."""
    own = profile().model_copy(update={"optimizer_s_per_byte": 1 / GIB})
    plan = sound(make_plan(own, cluster(40, 40), shard_by={"slow": 2, "fast": 6}), own)
    evenly = make_plan(own, cluster(40, 40), shard_by="even")
    assert plan.shard_weights == (3, 1)
    assert (state_gib(plan), state_gib(evenly)) == ([3.0, 1.0], [2.0, 2.0])
    assert (plan.predicted.optimizer_s, evenly.predicted.optimizer_s) == (1.5, 1.0)
    groups = [each for each in traffic_of(plan).groups if len(each.devices) > 1]
    assert [each.weights for each in groups] == [(3, 1), (3, 1)]
    assert not any(each.pads_sum or each.pads_gather for each in groups)  # of 1 GiB each
    assert [each.weights for each in link_sets(plan).groups] == [(3, 1), (3, 1)]
    # The update, and of two scatters and gathers at most 1/4 GiB more each, none of it at the least.
    longer_s = simulate(plan).iteration_s - simulate(evenly).iteration_s
    assert 0.5 < longer_s < 0.5 + 4 * 0.25 * GIB / 10e9 + 1e-3


def test_what_plan_and_show_say_of_weights() -> None:
    """Once for neighbours that are alike; nothing where all parts are equal."""
    own = cluster_of_types({"fast": 2, "slow": 1})
    plan = make_plan(profile(), own, shard_by={"slow": 2, "fast": 6})
    said = "shared out in ranges of 3 on each of devices 0-1 (fast), 1 on device 2 (slow)"
    assert said in footer(summarise(plan))
    assert said.replace("out in", "out  in") in str(PlanReport.of("plan.yaml", plan))
    evenly = make_plan(profile(), own, shard_by="even")
    assert "shared out" not in footer(summarise(evenly)) + str(PlanReport.of("plan.yaml", evenly))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": (3,)}, "group 1 is of devices (0, 1), its weights are (3,)"),
        ({"weights": (3, 0)}, "group 1 is of devices (0, 1), its weights are (3, 0)"),
        (
            {"weights": (3, 2)},
            "groups 0 and 1 are of the same devices, (0, 1); their weights are (3, 1) and (3, 2)",
        ),
        ({"weights": (), "pads_sum": True}, "group 1 is padded, and its ranges are equal"),
        ({"sharding": Sharding.NONE}, "group 1 has weights, (3, 1), and no ranges"),
    ],
)
def test_the_proof_asks_all_devices_for_the_same_ranges(change: dict[str, Any], message: str) -> None:
    program = link(make_plan(profile(), cluster(40, 40), shard_by={"slow": 2, "fast": 6}))
    prove(program)
    first, second = program.groups
    with pytest.raises(ProgramError, match=re.escape(message)):
        prove(replace(program, groups=(first, replace(second, **change))))


def test_a_file_says_weights_only_where_parts_are_unequal() -> None:
    evenly = make_plan(profile(), cluster(40, 40))
    assert evenly.shard_weights == ()
    assert "shard_weights" not in plan_text(evenly)
    assert plan_text(make_plan(profile(), cluster(40, 40), shard_by={"fast": 7, "slow": 7})) == plan_text(
        evenly
    )
    assert "shard_weights: [3, 1]" in plan_text(
        make_plan(profile(), cluster(40, 40), shard_by={"fast": 3, "slow": 1})
    )


def test_memory_asks_for_unequal_parts_where_equal_ones_are_short() -> None:
    """With equal parts the slow device of 7 GiB, of which a tenth is reserved and a twentieth left free, has
    room for one of the two ops alone, in two micro-batches: 6 s on the fast device, and 4 s on both. With 8.5
    all fits as it is.
    """
    roomy, short = (make_plan(profile(), cluster(20, gib)) for gib in (8.5, 7))
    assert roomy.shard_weights == ()
    fast, slow = short.shard_weights
    assert fast > slow
    assert sound(short, profile()).predicted.compute_s == roomy.predicted.compute_s == pytest.approx(8.0)
    evenly = make_plan(profile(), cluster(20, 7), shard_by="even")
    assert evenly.predicted.compute_s == pytest.approx(10.0)
    assert sum(state_gib(short)) == pytest.approx(4.0)
    assert state_gib(short)[0] == pytest.approx(4 * fast / (fast + slow))
    assert any("free memory" in note for note in short.notes)
    with pytest.raises(NoPlanError):
        make_plan(profile(), cluster(9.4, 6.9), shard_by="even")
    assert sound(make_plan(profile(), cluster(9.4, 6.9)), profile()).shard_weights
    # What is compared with is as it is.
    assert make_plan(profile(), cluster(20, 7), "sequential").shard_weights == ()


def test_memory_is_shared_out_alike_where_it_is_asked_for() -> None:
    """Until the weights stay: each device's state is as large a part of what plans may fill with it."""
    plan = make_plan(profile(), cluster(20, 8), shard_by="memory")
    held = device_memory(plan.metaops, plan.slices, plan.cluster, plan)
    peaks = plan.predicted.peak_memory_bytes
    most = plan.cluster.fill_bytes
    free = [each - peak + need.optimizer_bytes for each, peak, need in zip(most, peaks, held, strict=True)]
    filled = [need.optimizer_bytes / own for need, own in zip(held, free, strict=True)]
    assert filled[0] == pytest.approx(filled[1], rel=0.03)


def test_weights_by_memory_are_of_the_fullest_device_of_each_kind() -> None:
    four = cluster_of_types({"fast": 2, "slow": 2})
    assert by_free_memory([400, 200, 50, 80], four) == (4, 4, 1, 1)
    assert by_free_memory([300, 300, 300, 300], four) == ()
    assert by_free_memory([1000, 1000, 3, -7], four) == (100, 100, 1, 1)
    assert by_free_memory([-1, -1, -7, -7], four) == ()
    one = cluster_of_types({"slow": 2})
    assert weights_on(one, (3, 3, 1, 1), four) == ()
    both = cluster_of_types({"fast": 1, "slow": 1})
    assert weights_on(both, (3, 3, 1, 1), four) == (3, 1)
    assert weights_on(both, (), four) == ()


@pytest.mark.parametrize("text", ["", "fast", "fast=0", "fast=1.5", "=3", "fast=3,", "fast=1000001", "Speed"])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--shard-by .*expected even, memory, speed, or TYPE=WEIGHT"):
        parse_shard_by(text)


def test_parts_by_speed_are_by_the_best_allocation_of_every_op() -> None:
    """2 ops of 6 samples take 12 s on the fast type and 24 s on the slow one, 3 of another net 9 s on both,
    but on one device alone: 21 s and 33 s, 100 and 64 per cent.
    """
    net = metaop_on_types("t/net", 2, {"fast": 1.0, "slow": 2.0}, batch_size=6)
    same = metaop_on_types("u/net", 3, {"fast": 0.5, "slow": 0.5}, batch_size=6)
    slower_on_one = tuple(
        point.model_copy(update={"forward_s": 2 * point.forward_s}) if point.num_devices == 1 else point
        for point in same.curve
    )
    own = profile_on_types(net, same.model_copy(update={"curve": slower_on_one}))
    on = cluster_of_types({"fast": 2, "slow": 1})
    assert by_speed(seen_on(own, on), on) == (25, 25, 16)
    assert by_speed(seen_on(own, cluster_of_types({"fast": 2})), cluster_of_types({"fast": 2})) == ()
    assert parse_shard_by("speed") == "speed"
    plan = sound(make_plan(profile(), cluster(40, 40), shard_by="speed"), profile())
    assert plan.shard_weights == (2, 1)


def test_the_best_allocation_by_speed_is_the_one_that_takes_least_of_a_devices_time() -> None:
    """6 samples take 6 s on a fast device, and 12 s on a slow one, or 3 s on all six."""
    net = metaop_on_types("t/net", 1, {"fast": 1.0, "slow": 2.0}, batch_size=6)
    by_many = [
        point.model_copy(update={"forward_s": 1.0, "backward_s": 2.0}) if point.num_devices == 6 else point
        for point in net.curve
        if point.device == "slow"
    ]
    on = cluster_of_types({"fast": 1, "slow": 6})
    own = profile_on_types(net.model_copy(update={"curve": (net.curve[0], *by_many)}))
    assert by_speed(seen_on(own, on), on) == (2, 1, 1, 1, 1, 1, 1)


def test_parts_are_asked_for_of_every_type_once() -> None:
    assert parse_shard_by("fast=3, slow=1") == {"fast": 3, "slow": 1}
    with pytest.raises(UsageError, match="'fast' is named twice"):
        parse_shard_by("fast=3,fast=1")
    for weights in ({"fast": 3}, {"fast": 3, "slow": 1, "other": 2}):
        with pytest.raises(UsageError, match="one for each type of device of 'mixed': fast, slow"):
            make_plan(profile(), cluster(40, 40), shard_by=weights)
    on_cpu = profile(is_sharded=False)
    with pytest.raises(NoPlanError, match="shard_optimizer"):
        make_plan(on_cpu, cluster(40, 40), shard_by="memory")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("[3]", "shard_weights: found 1; expected one for each of the 2 devices of cluster 'mixed'"),
        ("[3, 1, 1]", "shard_weights: found 3; expected one for each of the 2 devices"),
        ("[3, 0]", "shard_weights"),
        ("[3, -1]", "shard_weights"),
        ("[3, 1.5]", "shard_weights"),
        ("[3, 1000001]", "shard_weights"),
    ],
)
def test_a_file_with_other_weights_is_refused(tmp_path: Path, weights: str, message: str) -> None:
    text = plan_text(make_plan(profile(), cluster(40, 40), shard_by={"fast": 3, "slow": 1}))
    path = tmp_path / "plan.yaml"
    path.write_text(text.replace("shard_weights: [3, 1]", f"shard_weights: {weights}"))
    with pytest.raises(InputError, match=re.escape(message)):
        read_plan(path)
    path.write_text(text.replace("optimizer_state_sharded: true\n", ""))
    with pytest.raises(InputError, match="shard_weights: expected none where the train settings do not let"):
        read_plan(path)


def test_a_sum_takes_a_buffer_as_if_all_had_the_largest_part() -> None:
    """Of two with 1 and 3 of 4 parts: 2 x 3/4 of the gradients."""
    held = Held(num_bytes=8.0, trained_bytes=8.0, count=1, last_part=0, is_whole=True)
    held.divide([Sharers(2, 4, 3)], 1)
    assert (held.owned, held.share, held.summed_bytes) == (0.25, 1.0, 12.0)


def test_a_check_finds_more_memory_than_was_said() -> None:
    """Weights that are changed by hand change what the devices need."""
    plan = make_plan(profile(), cluster(20, 8), shard_by={"fast": 3, "slow": 1})
    turned = plan.model_copy(update={"shard_weights": (1, 30)})
    assert {violation.rule for violation in check_plan(turned, profile())} & {"memory", "predicted"}
