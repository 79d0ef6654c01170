"""What devices hold that share out gradients and parameters, op by op, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.account.device.account import MemoryByPass
from spindle_cli.account.device_memory import DeviceMemory, device_memory, find_needs, memory_by_pass
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.types import Slice
from spindle_cli.profile.types import MetaOpProfile, OpMemory, OptimizerBytes, Profile
from spindle_cli.units import MIB

GRADIENTS, PARAMETERS, KEPT = Sharding.GRADIENTS, Sharding.PARAMETERS, Sharding.KEPT


def op(**more: Any) -> OpMemory:
    """Of one op, which needs nothing unless told."""
    names = ("kept", "forward", "backward", "first_backward")
    return OpMemory.model_validate({**{f"{name}_bytes": (0, 0) for name in names}, **more})


def net_of(name: str, num_ops: int, **more: Any) -> MetaOpProfile:
    """Ops of 1 MiB of parameters that keep nothing, on 1, 2 or 4 devices."""
    settings: dict[str, Any] = {"memory": (op(),), "activation_bytes_per_op": 0, **more}
    made = metaop_of(name, num_ops, {1: 1.0, 2: 1.0, 4: 1.0}, **settings)
    return made.model_copy(update={"output_bytes": 0})


def on(metaop: MetaOpProfile, num_devices: int, start_s: float = 0.0, **more: Any) -> Slice:
    devices = tuple(range(num_devices))
    tp = more.get("tp", 1)
    keys = {"metaop": metaop.name, "ops": (0, metaop.num_ops), "devices": devices, "dp": num_devices // tp}
    return Slice.model_validate({**keys, "start_s": start_s, "end_s": start_s + 1, **more})


def sharded(level: Sharding, *metaops: MetaOpProfile, **more: Any) -> Profile:
    keys = {metaop.parameters or metaop.name for metaop in metaops}
    settings = {"optimizer_state_sharded": True, **more}
    return profile_of(*metaops).model_copy(update=settings).sharded(dict.fromkeys(keys, level))


def nccl(num_devices: int) -> Cluster:
    """Without receive buffers, and without what the allocator of GPUs holds besides."""
    return cluster_of(num_devices).model_copy(update={"backend": "nccl"})


def need(profile: Profile, slices: Sequence[Slice], cluster: Cluster) -> DeviceMemory:
    return device_memory(profile.metaops, slices, cluster, profile)[0]


def gathered(profile: Profile, slices: Sequence[Slice], cluster: Cluster) -> float:
    """MiB of the memory that parameters are gathered into, which is there all the time."""
    found = find_needs(profile.metaops, slices, cluster, profile, None)[0]
    return found.gathered / MIB


def passes(profile: Profile, slices: Sequence[Slice], cluster: Cluster) -> list[tuple[float, float]]:
    """MiB at most in each pass of device 0, and behind it, beyond what lasts: forward, then backward."""
    found: MemoryByPass = memory_by_pass(profile.metaops, slices, cluster, profile)[0]
    order = [(index, False) for index in range(len(slices))]
    order += [(index, True) for index in reversed(range(len(slices)))]
    return [
        (
            pytest.approx((found.passes[each][0] - found.idle_bytes) / 1.01 / MIB, abs=1e-4),
            pytest.approx((found.passes[each][1] - found.idle_bytes) / 1.01 / MIB, abs=1e-4),
        )
        for each in order
    ]


def test_each_device_keeps_its_range_of_parameters_gradients_and_state() -> None:
    """3 MiB of parameters on 2 devices, with twice as much of state; the fullest moment is the backward pass
    of the middle op: its parameters and the next op's, its gradients and those of the op before.
    """
    net = net_of("a/m", 3)
    found = need(sharded(PARAMETERS, net), [on(net, 2)], nccl(2))
    assert found.parameter_bytes == 1.5 * MIB
    assert found.optimizer_bytes == 3 * MIB
    assert found.gradient_bytes == (1.5 + 2) * MIB
    assert found.buffer_bytes == pytest.approx(2 * MIB + 0.01 * 10 * MIB, abs=2)
    assert found.updated_bytes == 1.5 * MIB
    assert found.lasting_bytes == (6 + 2) * MIB


def test_gradients_alone_leave_parameters_whole() -> None:
    net = net_of("a/m", 3)
    found = need(sharded(GRADIENTS, net), [on(net, 4)], nccl(4))
    assert found.parameter_bytes == 3 * MIB
    assert found.optimizer_bytes == 1.5 * MIB
    assert found.gradient_bytes == (0.75 + 2) * MIB
    assert found.buffer_bytes == pytest.approx(0.01 * 7.25 * MIB, abs=2)


@pytest.mark.parametrize(
    ("num_ops", "room", "backward", "under_gloo"),
    [
        (1, 1.0, 1.0, 2.0),  # behind the op its gradients and their buffer
        (2, 2.0, 2.0, 3.0),  # of the first op: 2 of gradients; a scatter's buffer besides
        (3, 2.0, 2.0, 3.0),
        (9, 2.0, 2.0, 3.0),
    ],
)
def test_gradients_come_and_go_with_their_ops_and_parameters_have_room_for_two(
    num_ops: int, room: float, backward: float, under_gloo: float
) -> None:
    net = net_of("a/m", num_ops)
    profile = sharded(PARAMETERS, net)
    assert gathered(profile, [on(net, 2)], nccl(2)) == room
    assert passes(profile, [on(net, 2)], nccl(2)) == [(0.0, 0.0), (backward, 0.0)]
    assert passes(profile, [on(net, 2)], cluster_of(2)) == [(0.0, 0.0), (under_gloo, 0.0)]


def test_of_gradients_alone_nothing_is_gathered() -> None:
    net = net_of("a/m", 3)
    assert gathered(sharded(GRADIENTS, net), [on(net, 2)], nccl(2)) == 0
    assert passes(sharded(GRADIENTS, net), [on(net, 2)], nccl(2)) == [(0.0, 0.0), (2.0, 0.0)]
    assert passes(sharded(GRADIENTS, net), [on(net, 2)], cluster_of(2)) == [(0.0, 0.0), (3.0, 0.0)]


def test_wide_gradients_are_wide_while_they_are_whole_too() -> None:
    """Backward of the middle op: two gradients of 2 MiB each; parameters are no wider."""
    net = net_of("a/m", 3)
    profile = sharded(PARAMETERS, net, gradient_bytes_per_param=2.0)
    assert gathered(profile, [on(net, 2)], nccl(2)) == 2
    assert passes(profile, [on(net, 2)], nccl(2)) == [(0.0, 0.0), (4.0, 0.0)]
    assert passes(profile, [on(net, 2)], cluster_of(2)) == [(0.0, 0.0), (6.0, 0.0)]
    assert need(profile, [on(net, 2)], nccl(2)).gradient_bytes == (2 * 1.5 + 4) * MIB


def test_ops_of_uneven_sizes() -> None:
    """1, 4, 1 MiB, as glue makes the middle op larger, on 4 devices: room for it and one more; backward of
    the middle one 4 + 1 of gradients, of which 1 is on its way.
    """
    net = net_of("a/m", 3, extra_param_bytes={1: 3 * MIB})
    profile = sharded(PARAMETERS, net)
    assert gathered(profile, [on(net, 4)], nccl(4)) == 5
    assert passes(profile, [on(net, 4)], nccl(4)) == [(0.0, 0.0), (5.0, 0.0)]
    # behind the middle op, before the first: 1 + 4 of gradients, and 4 that come for the range
    assert passes(profile, [on(net, 4)], cluster_of(4)) == [(0.0, 0.0), (9.0, 0.0)]
    assert need(profile, [on(net, 4)], nccl(4)).parameter_bytes == 1.5 * MIB


def test_the_largest_op_last() -> None:
    """1, 1, 4 MiB: the last two together; backward of the middle one 1 + 4 of gradients, under gloo with a
    buffer of 4.
    """
    net = net_of("a/m", 3, extra_param_bytes={2: 3 * MIB})
    profile = sharded(PARAMETERS, net)
    assert gathered(profile, [on(net, 2)], nccl(2)) == 5
    assert passes(profile, [on(net, 2)], nccl(2)) == [(0.0, 0.0), (5.0, 0.0)]
    assert passes(profile, [on(net, 2)], cluster_of(2)) == [(0.0, 0.0), (9.0, 0.0)]


def test_parameters_of_several_ops_stay_from_the_first_to_the_last() -> None:
    """Blocks 7 8 9 7: 7, 8 and 9 at the second op. Backward the gradient of 7 all along; at the second op
    also that of 8, and that of 9, which is under way.
    """
    net = net_of("a/m", 4, parameter_blocks=(7, 8, 9, 7))
    profile = sharded(PARAMETERS, net)
    assert gathered(profile, [on(net, 2)], nccl(2)) == 3
    assert passes(profile, [on(net, 2)], nccl(2)) == [(0.0, 0.0), (3.0, 0.0)]
    assert passes(profile, [on(net, 2)], cluster_of(2)) == [(0.0, 0.0), (4.0, 0.0)]


def test_a_scatter_is_under_way_until_the_next_one() -> None:
    """Blocks 7 7 7 8 on two devices, with 4 MiB of 8: its gradients may be there until those of 7 follow,
    also while the first op runs backward, which takes 10 MiB.
    """
    memory = (op(backward_bytes=(0, 20 * MIB)), op(first_op=1))
    net = net_of("a/m", 4, parameter_blocks=(7, 7, 7, 8), extra_param_bytes={3: 3 * MIB}, memory=memory)
    assert passes(sharded(GRADIENTS, net), [on(net, 2)], nccl(2)) == [(0.0, 0.0), (15.0, 0.0)]


def test_behind_the_last_op_its_scatter_ends_the_pass() -> None:
    net = net_of("a/m", 1)
    assert passes(sharded(GRADIENTS, net), [on(net, 2)], nccl(2)) == [(0.0, 0.0), (1.0, 0.0)]
    assert passes(sharded(GRADIENTS, net), [on(net, 2)], cluster_of(2)) == [(0.0, 0.0), (2.0, 0.0)]


def test_nothing_is_left_for_passes_that_follow() -> None:
    """Backward, what shares out its parameters runs before what does not."""
    one, other = net_of("a/m", 2), net_of("b/m", 2)
    profile = sharded(PARAMETERS, one, other).sharded({"b/m": PARAMETERS})
    assert gathered(profile, [on(one, 2), on(other, 2, 1.0)], nccl(2)) == 2
    assert passes(profile, [on(one, 2), on(other, 2, 1.0)], nccl(2)) == [
        (0.0, 0.0),
        (0.0, 0.0),
        (2.0, 0.0),
        (0.0, 0.0),
    ]


def test_activations_count_beside_gradients_where_they_are_most() -> None:
    """3 ops that keep 10 MiB each: fullest at the last op, backward with 1 of gradients."""
    net = net_of("a/m", 3, memory=(op(kept_bytes=(0, 20 * MIB), forward_bytes=(0, 20 * MIB)),))
    profile = sharded(PARAMETERS, net)
    assert passes(profile, [on(net, 2)], nccl(2)) == [(30.0, 30.0), (31.0, 0.0)]


def test_what_is_recomputed_runs_while_its_parameters_are_there() -> None:
    """Ops that need 6 MiB to run forward; in the backward pass again, with 2 of gradients."""
    net = net_of("a/m", 3, memory=(op(forward_bytes=(0, 12 * MIB)),))
    profile = sharded(PARAMETERS, net)
    state = 5056 / MIB  # of the random numbers, of each op
    forward, backward = passes(profile, [on(net, 2, recompute=True)], nccl(2))
    assert forward == (6 + 2 * state, 3 * state)  # at the last op
    assert backward == (6 + 2 + 2 * state, 0.0)


def test_what_is_stepped_whole_stays_whole_and_what_is_frozen_has_neither_gradients_nor_state() -> None:
    """Of 2 x 4 MiB a quarter is frozen; of the 3 that are trained a third is stepped whole, 2 are shared."""
    kept = OptimizerBytes(state_per_param=2.0, whole_share=1 / 3)
    net = net_of("a/m", 2, param_bytes_per_op=4 * MIB, trainable_fraction=0.75, optimizer=kept)
    found = need(sharded(PARAMETERS, net), [on(net, 2)], nccl(2))
    assert found.parameter_bytes == 2 * (0.5 + 1 + 1) * MIB
    # backward of the first op: two gradients of 2
    assert found.gradient_bytes == pytest.approx(2 * (1 + 1) * MIB + 2 * 2 * MIB, abs=1)
    assert gathered(sharded(PARAMETERS, net), [on(net, 2)], nccl(2)) == pytest.approx(2 * (2 + 1))
    assert found.optimizer_bytes == 2 * 3 * MIB
    assert found.updated_bytes == 2 * (1 + 1) * MIB


@pytest.mark.parametrize("level", [GRADIENTS, PARAMETERS])
def test_what_one_device_holds_is_as_without(level: Sharding) -> None:
    net = net_of("a/m", 3)
    plain = profile_of(net).model_copy(update={"optimizer_state_sharded": True})
    assert need(sharded(level, net), [on(net, 1)], nccl(1)) == need(plain, [on(net, 1)], nccl(1))


def test_components_that_are_not_named_are_as_without() -> None:
    """Two of 2 MiB on 2 devices, of which one is shared out: 1 + 2 of parameters, and of gradients; backward
    2 more of these.
    """
    one, other = net_of("a/m", 2), net_of("b/m", 2)
    profile = sharded(PARAMETERS, one, other)
    profile = profile.sharded({"a/m": PARAMETERS})
    found = need(profile, [on(one, 2), on(other, 2, 1.0)], nccl(2))
    assert (found.parameter_bytes, found.gradient_bytes - 3 * MIB) == (3 * MIB, 2 * MIB)
    # under gloo, the sums of the other's gradients take their buffers from the first op on that is through
    assert passes(profile, [on(one, 2), on(other, 2, 1.0)], cluster_of(2)) == [
        (0.0, 0.0),
        (0.0, 0.0),
        (1.0, 2.0),
        (2 + 3.0, 2.0),
    ]


def test_devices_with_the_same_part_share_it_out() -> None:
    """4 devices, tensor parallelism of 2: of each 4 MiB one is whole on all four, a half of 3 on two."""
    net = net_of("a/m", 1, param_bytes_per_op=4 * MIB, whole_param_bytes_per_op=MIB, memory=(op(tp=2),))
    found = need(sharded(PARAMETERS, net), [on(net, 4, tp=2)], nccl(4))
    assert found.parameter_bytes == (0.25 + 0.75) * MIB
    assert found.gradient_bytes == (1 + 2.5) * MIB
    assert found.buffer_bytes == pytest.approx(2.5 * MIB + found.tensor_bytes / 101, abs=3)


def test_what_is_kept_is_whole_from_the_forward_pass_to_the_end_of_the_backward_pass() -> None:
    """Three ops of 1 MiB, of which each device has a half all the time; no memory is set apart."""
    net = net_of("a/m", 3)
    profile = sharded(KEPT, net)
    assert gathered(profile, [on(net, 2)], nccl(2)) == 0
    assert passes(profile, [on(net, 2)], nccl(2)) == [(3.0, 3.0), (5.0, 0.0)]
    assert need(profile, [on(net, 2)], nccl(2)).parameter_bytes == 1.5 * MIB


def test_what_is_kept_has_no_part_in_the_memory_of_gathers() -> None:
    """Of components of 3 and of 12 MiB the larger one is kept: room for two ops of the other."""
    one, other = net_of("a/m", 3), net_of("b/m", 3, param_bytes_per_op=4 * MIB)
    profile = sharded(PARAMETERS, one, other).sharded({"a/m": PARAMETERS, "b/m": KEPT})
    slices = [on(one, 2), on(other, 2, 1.0)]
    assert gathered(profile, slices, nccl(2)) == 2
    assert passes(profile, slices, nccl(2)) == [(0.0, 0.0), (12.0, 12.0), (20.0, 0.0), (2.0, 0.0)]


def test_what_several_slices_keep_is_there_once_and_what_runs_apart_not_at_once() -> None:
    one = net_of("a/m", 2, parameters="shared")
    other, third = one.model_copy(update={"name": "b/m"}), net_of("c/m", 3)
    profile = sharded(KEPT, one, other, third)
    slices = [on(one, 2), on(other, 2, 1.0)]
    assert passes(profile, slices, nccl(2)) == [(2.0, 2.0), (2.0, 2.0), (4.0, 2.0), (4.0, 0.0)]
    # forward and backward of the one, then of the other
    times = {"backward_start_s": 1.0, "backward_end_s": 2.0}
    apart = [
        on(one, 2, **times),
        on(third, 2, 2.0, backward_start_s=3.0, backward_end_s=4.0),
    ]
    order = [(0, False), (0, True), (1, False), (1, True)]
    found = memory_by_pass(profile.metaops, apart, nccl(2), profile)[0]
    behind = [(found.passes[each][1] - found.idle_bytes) / 1.01 / MIB for each in order]
    assert behind == pytest.approx([2.0, 0.0, 3.0, 0.0], abs=1e-4)


@pytest.mark.parametrize(
    ("sizes", "blocks", "at_most"),
    [
        ((1, 4, 2), (), 6.0),  # the middle one with the last
        ((3, 4, 1), (), 7.0),
        ((1, 4, 1), (7, 8, 7), 5.0),
        ((4, 4, 4), (7, 7, 7), 4.0),
        ((1, 1, 1, 1, 1), (), 2.0),  # in one go
    ],
)
def test_what_no_gradients_come_to_is_kept_by_nobody(
    sizes: tuple[int, ...], blocks: tuple[int, ...], at_most: float
) -> None:
    """A frozen tower, of ops of so many MiB, below a head of 3 MiB, which is kept. Nothing is set apart."""
    more: dict[str, Any] = {"parameter_blocks": blocks} if blocks else {}
    extra = {op: (size - 1) * MIB for op, size in enumerate(sizes) if size > 1}
    tower = net_of("a/tower", len(sizes), trainable_fraction=0.0, extra_param_bytes=extra, **more)
    head = net_of("a/head", 3, inputs=("a/tower",))
    profile = sharded(KEPT, tower, head)
    slices = [on(tower, 2), on(head, 2, 1.0)]
    assert gathered(profile, slices, nccl(2)) == 0
    assert passes(profile, slices, nccl(2)) == [(at_most, 0.0), (3.0, 3.0), (5.0, 0.0), (0.0, 0.0)]


def test_what_another_slice_keeps_is_there_for_one_that_no_gradients_come_to() -> None:
    """A frozen tower of 2 MiB, which one task uses behind 1 MiB that are trained, the other on its own."""
    below = net_of("a/below", 1)
    tower = net_of("a/tower", 2, parameters="tower", trainable_fraction=0.0, inputs=("a/below",))
    alone = tower.model_copy(update={"name": "b/tower", "task": "b", "inputs": ()})
    profile = sharded(KEPT, below, tower, alone)
    slices = [on(below, 2), on(tower, 2, 1.0), on(alone, 2, 2.0)]
    found = passes(profile, slices, nccl(2))
    assert found[:3] == [(1.0, 1.0), (3.0, 3.0), (3.0, 3.0)]
    # backward the other one first, which has nothing to do; then the trained block's gradients
    assert found[3:] == [(3.0, 3.0), (3.0, 1.0), (2.0, 0.0)]


def test_slices_one_after_the_other_gather_by_themselves() -> None:
    """Two tasks' slices of one component: a gather ahead ends with its slice."""
    one = net_of("a/m", 2, parameters="shared")
    other = one.model_copy(update={"name": "b/m"})
    profile = sharded(PARAMETERS, one, other)
    slices = [on(one, 2), on(other, 2, 1.0)]
    assert gathered(profile, slices, nccl(2)) == 2
    assert passes(profile, slices, nccl(2)) == [(0.0, 0.0), (0.0, 0.0), (2.0, 0.0), (2.0, 0.0)]
    assert need(profile, slices, nccl(2)).parameter_bytes == MIB
