"""Which parameters are summed together, where and in which order."""

from __future__ import annotations

from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.account.groups import ParameterBlock, parameter_groups, sum_bytes
from spindle_cli.files.cluster import Link, Links
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.program.link import link
from spindle_cli.program.types import Kind

MIB = 2**20


def shared_towers() -> Plan:
    """Two tasks over the same two blocks: task a on devices 0-1, task b on 2; then task b's second op on
    3.
    """
    a = metaop_of("a/net", 2, {2: 1.0}, parameters="net", param_bytes_per_op=MIB)
    b = metaop_of("b/net", 2, {1: 1.0}, parameters="net", param_bytes_per_op=MIB)
    waves = [
        [slice_of(a, (0, 2), (0, 1), 0.0), slice_of(b, (0, 1), (2,), 0.0)],
        [slice_of(b, (1, 2), (3,), 1.0)],
    ]
    return plan_of(profile_of(a, b), cluster_of(4), waves)


def test_parameters_are_grouped_by_the_devices_of_all_tasks_that_use_them() -> None:
    groups = link(shared_towers()).groups
    found = {group.blocks: group.devices for group in groups}
    assert found == {(("net", 0),): (0, 1, 2), (("net", 1),): (0, 1, 3)}


def test_the_group_that_is_complete_first_is_summed_first() -> None:
    """One MetaOp per slice, all on the same devices: backward completes the last MetaOp's parameters
    first.
    """
    first = metaop_of("task/first", 1, {2: 1.0}, param_bytes_per_op=MIB)
    second = metaop_of("task/second", 1, {2: 1.0}, param_bytes_per_op=MIB, inputs=(first.name,))
    waves = [[slice_of(first, (0, 1), (0, 1), 0.0)], [slice_of(second, (0, 1), (0, 1), 1.0)]]
    program = link(plan_of(profile_of(first, second), cluster_of(2), waves))
    assert [group.blocks for group in program.groups] == [(("task/second", 0),), (("task/first", 0),)]
    kinds = [action.kind for action in program.actions[0]]
    assert kinds == [Kind.FORWARD] * 2 + [Kind.LOSSES] + [Kind.BACKWARD, Kind.SUM] * 2 + [Kind.STEP]


def test_small_groups_of_the_same_devices_are_summed_together() -> None:
    first = metaop_of("task/first", 1, {2: 1.0}, param_bytes_per_op=1000)
    second = metaop_of("task/second", 1, {2: 1.0}, param_bytes_per_op=1000, inputs=(first.name,))
    waves = [[slice_of(first, (0, 1), (0, 1), 0.0)], [slice_of(second, (0, 1), (0, 1), 1.0)]]
    (group,) = link(plan_of(profile_of(first, second), cluster_of(2), waves)).groups
    assert group.blocks == (("task/second", 0), ("task/first", 0))
    assert (group.num_bytes, group.slices) == (2000, (0, 1))


def test_a_slice_s_sums_begin_with_the_ops_that_complete_them() -> None:
    """Backward runs from the last op to the first, and so do the sums, each ready before the slice is
    through.
    """
    net = metaop_of("task/net", 3, {2: 1.0}, param_bytes_per_op=MIB)
    program = link(plan_of(profile_of(net), cluster_of(2), [[slice_of(net, (0, 3), (0, 1), 0.0)]]))
    sums = [action for action in program.actions[0] if action.kind is Kind.SUM]
    assert [(program.groups[action.group].blocks, action.op) for action in sums] == [
        ((("task/net", 2),), 2),
        ((("task/net", 1),), 1),
        ((("task/net", 0),), 0),
    ]


def test_a_sum_is_large_enough_that_its_latency_does_not_rule() -> None:
    """1 GB/s and 1 ms: a sum over two devices takes 2 x 1 ms + bytes / 1 GB/s, half speed from 2 MB on."""
    slow = Link(latency_us=1000, bandwidth_gb_per_s=1)
    cluster = cluster_of(2).model_copy(update={"links": Links(intra_node=slow, inter_node=slow)})
    assert sum_bytes((0, 1), cluster) == 2 * MIB
    assert sum_bytes((0,), cluster) == 64 * 1024


def test_frozen_parameters_have_no_group() -> None:
    net = metaop_of("task/net", 1, {2: 1.0}, trainable_fraction=0.0)
    program = link(plan_of(profile_of(net), cluster_of(2), [[slice_of(net, (0, 1), (0, 1), 0.0)]]))
    assert program.groups == ()


def test_a_block_used_twice_in_a_slice_is_counted_once() -> None:
    net = metaop_of("task/net", 3, {2: 1.0}, parameters="albert", parameter_blocks=(0, 0, 0))
    program = link(plan_of(profile_of(net), cluster_of(2), [[slice_of(net, (0, 3), (0, 1), 0.0)]]))
    assert [(group.blocks, group.num_bytes) for group in program.groups] == [((("albert", 0),), MIB)]


def test_the_parameters_a_runtime_names_replace_those_of_the_plan() -> None:
    plan = shared_towers()
    named = {(name, op): (ParameterBlock(f"w{op}", 0, 8 * MIB),) for name in plan.by_name for op in range(2)}
    groups = link(plan, named).groups
    assert sorted(key for group in groups for key, _ in group.blocks) == ["w0", "w1"]


def test_with_tensor_parallelism_only_holders_of_the_same_part_are_summed() -> None:
    """tp 2 on devices 0-3, and tp 1 on device 4 over the same parameters: halves on {0, 2, 4} and {1, 3,
    4}.
    """
    split = Slice(metaop="a", ops=(0, 1), devices=(0, 1, 2, 3), dp=2, tp=2, start_s=0, end_s=1)
    whole = Slice(metaop="b", ops=(0, 1), devices=(4,), dp=1, tp=1, start_s=0, end_s=1)
    block = (ParameterBlock("net", 0, 4 * MIB),)
    uses = {("a", 0): block, ("b", 0): block}
    groups = parameter_groups((split, whole), (0, 1), uses, cluster_of(5), 1.0)
    assert [(group.devices, group.fragment, group.num_bytes) for group in groups] == [
        ((0, 2, 4), (0, 2), 2 * MIB),
        ((1, 3, 4), (1, 2), 2 * MIB),
    ]


def test_parameters_that_are_not_split_are_summed_over_all_devices_of_their_slices() -> None:
    split = Slice(metaop="a", ops=(0, 1), devices=(0, 1), dp=1, tp=2, start_s=0, end_s=1)
    whole = Slice(metaop="b", ops=(0, 1), devices=(2,), dp=1, tp=1, start_s=0, end_s=1)
    norm = (ParameterBlock("norm", 0, 4 * MIB, split=False),)
    groups = parameter_groups((split, whole), (0, 1), {("a", 0): norm, ("b", 0): norm}, cluster_of(3), 1.0)
    assert [(group.devices, group.fragment, group.num_bytes) for group in groups] == [
        ((0, 1, 2), (0, 1), 4 * MIB)
    ]
