"""What a device holds at its fullest moment, on cases computed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from helpers.plans import cluster_of, metaop_of
from spindle_cli.account.device_memory import (
    DeviceMemory,
    device_memory,
    memory_by_pass,
)
from spindle_cli.costs.memory import ALLOCATOR_SHARE, UNCOUNTED_SHARE
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.types import Slice
from spindle_cli.profile.types import MetaOpProfile, OpMemory, OptimizerBytes

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True)
class Optimizer:
    optimizer_state_per_param: float = 2.0
    optimizer_state_sharded: bool = False
    update_bytes_per_param: float = 0.0
    gradient_bytes_per_param: float = 1.0
    updates_by_parts: bool = False
    accumulate: int = 1
    sharding: Mapping[str, Sharding] = field(default_factory=dict)
    shard_weights: tuple[int, ...] = ()


def gpus(count: int) -> Cluster:
    """No buffers for gradient sums there."""
    link = Link(latency_us=0, bandwidth_gb_per_s=100)
    return Cluster(
        name="gpus",
        nodes=(NodeGroup(count=1, devices=count, device="a800-80gb", memory_gib=80),),
        links=Links(intra_node=link, inter_node=link),
    )


def slice_of(
    metaop: str,
    ops: tuple[int, int],
    devices: list[int],
    dp: int,
    tp: int = 1,
    start_s: float = 0,
    **more: Any,
) -> Slice:
    keys = {"metaop": metaop, "ops": ops, "devices": devices, "dp": dp, "tp": tp, "start_s": start_s}
    return Slice.model_validate({**keys, "end_s": start_s + 1, **more})


def op(**whole: float) -> OpMemory:
    """Of one op in MiB: kept, forward, backward and first_backward for the whole batch; other keys as they
    are.
    """
    names = ("kept", "forward", "backward", "first_backward")
    sizes = {f"{name}_bytes": (0, round(whole.pop(name, 0) * MIB)) for name in names}
    return OpMemory.model_validate({**sizes, **whole})


def model(name: str, num_ops: int, *memory: OpMemory, **more: Any) -> MetaOpProfile:
    """A MetaOp whose ops have 1 MiB of parameters unless told, and hand on nothing."""
    settings = {"memory": memory or (op(),), **more}
    made = metaop_of(name, num_ops, {1: 1.0, 2: 1.0}, **settings)
    return made.model_copy(update={"output_bytes": 0})


def needs_of(
    metaops: Sequence[MetaOpProfile], slices: Sequence[Slice], cluster: Cluster, **optimizer: Any
) -> list[DeviceMemory]:
    """Of each device, without the share on top of all."""
    found = device_memory(metaops, slices, cluster, Optimizer(**optimizer))
    plain = []
    for need in found:
        top = need.tensor_bytes * UNCOUNTED_SHARE / (1 + UNCOUNTED_SHARE)
        plain.append(DeviceMemory(**{**vars(need), "buffer_bytes": round(need.buffer_bytes - top)}))
    return plain


def mib(*sizes: int) -> tuple[float, ...]:
    """In MiB, to a byte or two."""
    return tuple(round(size / MIB, 4) for size in sizes)


def test_parameters_are_held_once_however_many_slices_use_them() -> None:
    one = model("a/m", 4, parameters="p")
    two = one.model_copy(update={"name": "b/m"})
    slices = [
        slice_of("a/m", (0, 4), [0], 1),
        slice_of("b/m", (0, 2), [0], 1),
        slice_of("b/m", (2, 4), [1], 1),
    ]
    first, second = needs_of([one, two], slices, cluster_of(2))
    assert mib(first.parameter_bytes, second.parameter_bytes) == (4, 2)
    assert mib(first.gradient_bytes, first.optimizer_bytes) == (4, 8)


def test_frozen_parameters_need_no_gradient_and_no_state() -> None:
    frozen = model("a/m", 2, trainable_fraction=0.5)
    (need,) = needs_of([frozen], [slice_of("a/m", (0, 2), [0], 1)], cluster_of(1))
    assert mib(need.parameter_bytes, need.gradient_bytes, need.optimizer_bytes) == (2, 1, 2)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_parameters_of_two_tasks_count_as_the_task_that_has_more_of_them(order: tuple[int, int]) -> None:
    """One trains a quarter of 1 MiB; the other all, and has 2 MiB of glue's in the same block."""
    quarter = model("a/m", 1, parameters="p", trainable_fraction=0.25)
    whole = model("b/m", 1, parameters="p", extra_param_bytes={0: 2 * MIB})
    slices = [slice_of(metaop.name, (0, 1), [0], 1) for metaop in (quarter, whole)]
    (need,) = needs_of([quarter, whole], [slices[place] for place in order], cluster_of(1))
    assert mib(need.parameter_bytes, need.optimizer_bytes) == (3, 6)


def test_gradients_that_no_other_device_needs_take_the_place_of_activations() -> None:
    """3 ops of 1 MiB of parameters that keep 4 MiB: full when backward begins, and makes the last op's."""
    net = model("a/m", 3, op(kept=4, forward=4.5, backward=1, first_backward=2))
    (need,) = needs_of([net], [slice_of("a/m", (0, 3), [0], 1)], cluster_of(1))
    assert mib(need.gradient_bytes, need.activation_bytes, need.buffer_bytes) == (0, 3 * 4 + 2, 0)
    assert mib(need.lasting_bytes) == (3 + 6,)


def test_gradients_that_other_devices_need_too_are_there_all_the_time() -> None:
    net = model("a/m", 3, op(kept=4, forward=4.5, backward=1, first_backward=2))
    need, _ = needs_of([net], [slice_of("a/m", (0, 3), [0, 1], 2)], gpus(2))
    assert mib(need.gradient_bytes, need.activation_bytes) == (3, (3 * 4 + 1) / 2)
    assert mib(need.lasting_bytes) == (3 + 3 + 6,)


def test_gradients_stay_between_the_batches_of_a_step() -> None:
    net = model("a/m", 3, op(kept=4, forward=4.5, backward=1, first_backward=2))
    (need,) = needs_of([net], [slice_of("a/m", (0, 3), [0], 1)], cluster_of(1), accumulate=2)
    assert mib(need.gradient_bytes, need.activation_bytes) == (3, 3 * 4 + 1)


def test_an_op_that_needs_most_while_it_runs_forward_is_seen() -> None:
    net = model("a/m", 3, op(kept=1), op(first_op=2, kept=1, forward=9))
    (need,) = needs_of([net], [slice_of("a/m", (0, 3), [0], 1)], cluster_of(1), accumulate=2)
    assert need.activation_bytes == (2 + 9) * MIB


def test_each_op_has_its_own_numbers_wherever_its_metaop_is_cut() -> None:
    """The last op keeps 5 MiB, the others 1; some of it whatever the share, and fields of the first op."""
    fixed = OpMemory.model_validate({**op(kept=4).model_dump(), "kept_bytes": (MIB, 4 * MIB), "first_op": 2})
    net = model("a/m", 3, op(kept=1), fixed, field_bytes={0: 2 * MIB})
    slices = [slice_of("a/m", (0, 1), [0], 1), slice_of("a/m", (1, 3), [1, 2], 2, start_s=1)]
    needs = needs_of([net], slices, gpus(3))
    assert [mib(need.activation_bytes) for need in needs] == [(1 + 2 * 2,), (0.5 + 1 + 2,), (3.5,)]


def test_of_a_tasks_fields_the_largest_share_is_there() -> None:
    """An encoder on two devices, a loss on one of them: that reads both's fields for the whole batch. On GPUs
    those of the next batch are on their way, on CPUs they are not copied.
    """
    encoder = model("a/m", 1, op(kept=2), field_bytes={0: 4 * MIB})
    loss = model("a/loss", 1, op(kept=1), field_bytes={0: MIB}, inputs=("a/m",))
    slices = [slice_of("a/m", (0, 1), [0, 1], 2), slice_of("a/loss", (0, 1), [0], 1, start_s=1)]
    for cluster, batches in ((gpus(2), 2), (cluster_of(2), 1)):
        needs = needs_of([encoder, loss], slices, cluster)
        found = [mib(need.activation_bytes) for need in needs]
        assert found == [(1 + 1 + batches * 5,), (1 + batches * 2,)]


def test_the_update_of_masters_takes_gradients_of_their_own() -> None:
    net = model("a/m", 3, op(kept=1))
    (need,) = needs_of([net], [slice_of("a/m", (0, 3), [0], 1)], cluster_of(1), update_bytes_per_param=2.0)
    assert mib(need.gradient_bytes, need.activation_bytes, need.buffer_bytes) == (3, 0, 6)


def test_wide_gradients_take_their_bytes_wherever_gradients_are_counted() -> None:
    """3 ops of 1 MiB, 2 bytes of gradients each: of one device at the end of its backward pass, of two
    devices all the time, and in their sums' buffers (gloo's, at most 32 MiB).
    """
    net = model("a/m", 3, op(kept=1))
    wide = {"gradient_bytes_per_param": 2.0}
    (alone,) = needs_of(
        [net], [slice_of("a/m", (0, 3), [0], 1)], cluster_of(1), update_bytes_per_param=4.0, **wide
    )
    assert mib(alone.gradient_bytes, alone.activation_bytes, alone.buffer_bytes) == (6, 0, 12)
    pair = [slice_of("a/m", (0, 3), [0, 1], 2)]
    for numbers, factor in ((wide, 2), ({}, 1)):
        shared, _ = needs_of([net], pair, cluster_of(2), optimizer_state_sharded=True, **numbers)
        assert mib(shared.gradient_bytes, shared.buffer_bytes) == (3 * factor, 3 * factor)
        assert mib(shared.lasting_bytes - shared.optimizer_bytes) == (3 + 3 * factor,)


def test_tensor_parallelism_leaves_norms_and_glue_whole() -> None:
    """Of 4 MiB an op 1 is not split, nor are 2 of glue."""
    sizes = {"param_bytes_per_op": 4 * MIB, "whole_param_bytes_per_op": MIB}
    net = model("a/m", 1, op(tp=2), extra_param_bytes={0: 2 * MIB}, **sizes)
    needs = needs_of([net], [slice_of("a/m", (0, 1), [0, 1], 1, tp=2)], gpus(2), optimizer_state_sharded=True)
    assert [mib(need.parameter_bytes) for need in needs] == [(1.5 + 1 + 2,)] * 2
    # Both have the whole ones, and share their state.
    assert [mib(need.optimizer_bytes) for need in needs] == [(2 * (1.5 + 3 / 2),)] * 2


def test_shards_of_tensor_parallelism_are_held_as_their_union() -> None:
    net = model("a/m", 1, op(tp=2), param_bytes_per_op=4 * MIB)
    halves = [slice_of("a/m", (0, 1), [0, 1], 1, tp=2)]
    assert [mib(need.parameter_bytes) for need in needs_of([net], halves, gpus(2))] == [(2,), (2,)]
    swapped = [*halves, slice_of("a/m", (0, 1), [1, 0], 1, tp=2)]
    assert [mib(need.parameter_bytes) for need in needs_of([net], swapped, gpus(2))] == [(4,), (4,)]


def test_a_slice_that_joins_fragments_keeps_what_it_joined() -> None:
    """Two tasks on the same parameters: one splits them, so that the other, which does not, joins them."""
    one = model("a/m", 1, op(), op(tp=2), parameters="p", param_bytes_per_op=4 * MIB)
    two = one.model_copy(update={"name": "b/m"})
    slices = [slice_of("a/m", (0, 1), [0, 1], 1, tp=2), slice_of("b/m", (0, 1), [0], 1, start_s=1)]
    first, second = needs_of([one, two], slices, gpus(2))
    assert mib(first.parameter_bytes, first.activation_bytes) == (4, 4)
    assert mib(second.parameter_bytes, second.activation_bytes) == (2, 0)


def test_the_devices_that_hold_a_parameter_share_its_optimizer_state() -> None:
    """Op 0 on three devices, op 1 on one of them, by two MetaOps with the same parameters."""
    one = model("a/m", 2, parameters="p", param_bytes_per_op=6 * MIB)
    two = one.model_copy(update={"name": "b/m"})
    slices = [
        slice_of("a/m", (0, 1), [0, 1], 2),
        slice_of("a/m", (1, 2), [1], 1),
        slice_of("b/m", (0, 1), [2], 1),
    ]
    needs = needs_of([one, two], slices, gpus(3), optimizer_state_sharded=True)
    assert [mib(need.optimizer_bytes) for need in needs] == [(4,), (16,), (4,)]
    assert [mib(need.gradient_bytes) for need in needs] == [(6,), (12,), (6,)]


def test_shards_of_a_parameter_have_each_their_own_owners() -> None:
    """Device 0 holds the first half with device 2, the second half, which it has too, with 1 and 2."""
    net = model("a/m", 1, op(tp=2), param_bytes_per_op=12 * MIB)
    slices = [slice_of("a/m", (0, 1), [0, 1], 1, tp=2), slice_of("a/m", (0, 1), [2, 0], 1, tp=2)]
    sharded = {"optimizer_state_per_param": 1.0, "optimizer_state_sharded": True}
    needs = needs_of([net], slices, gpus(3), **sharded)
    assert [mib(need.optimizer_bytes) for need in needs] == [(6,), (3,), (3,)]


@pytest.mark.parametrize(("op_mib", "expected"), [(4, 12), (20, 32), (50, 50)])
def test_on_cpus_sums_of_sharded_state_take_buffers(op_mib: int, expected: int) -> None:
    """As much as is summed, but no more than is let under way, unless one sum is larger."""
    net = model("a/m", 3, param_bytes_per_op=op_mib * MIB)
    slices = [slice_of("a/m", (0, 3), [0, 1], 2)]
    whole = needs_of([net], slices, cluster_of(2))[0]
    sharded = needs_of([net], slices, cluster_of(2), optimizer_state_sharded=True)[0]
    assert mib(whole.buffer_bytes, sharded.buffer_bytes) == (0, expected)
    assert sharded.optimizer_bytes == whole.optimizer_bytes / 2


def test_sums_take_the_place_of_activations_that_have_been_let_go_of() -> None:
    """Backward goes through one op of 1 MiB activations after the other, each then sums 4 MiB."""
    net = model("a/m", 3, op(kept=2), param_bytes_per_op=4 * MIB)
    slices = [slice_of("a/m", (0, 3), [0, 1], 2)]
    sharded = needs_of([net], slices, cluster_of(2), optimizer_state_sharded=True)[0]
    assert mib(sharded.activation_bytes, sharded.buffer_bytes) == (0, 12)


def test_a_share_that_is_on_the_device_already_is_not_received() -> None:
    """A consumer on the same devices, in another order, on one of them and another, on one alone.

    In another order gradients have to come back, too.
    """
    a = model("a/m", 1, param_bytes_per_op=0).model_copy(update={"output_bytes": 4 * MIB})
    b = model("a/n", 1, op(kept=8), param_bytes_per_op=0, inputs=("a/m",))

    def received(devices: list[int]) -> list[tuple[float, ...]]:
        slices = [
            slice_of("a/m", (0, 1), [0, 1], 2),
            slice_of("a/n", (0, 1), devices, len(devices), start_s=1),
        ]
        needs = needs_of([a, b], slices, gpus(3))
        return [mib(needs[device].buffer_bytes) for device in devices]

    assert received([0, 1]) == [(0,), (0,)]
    assert received([1, 0]) == [(4,), (4,)]
    assert received([0, 2]) == [(0,), (2,)]
    assert received([1]) == [(4,)]


def test_gradients_of_inputs_and_outputs_are_held_where_they_are_not_the_same_memory() -> None:
    """One device hands 4 MiB to another: there they are received, and their gradient made; here that is
    received, and the output held.
    """
    a = model("a/m", 1, op(backward=1), param_bytes_per_op=0).model_copy(update={"output_bytes": 4 * MIB})
    b = model("a/n", 1, param_bytes_per_op=0, inputs=("a/m",))
    slices = [slice_of("a/m", (0, 1), [0], 1), slice_of("a/n", (0, 1), [1], 1, start_s=1)]
    first, second = needs_of([a, b], slices, gpus(2))
    assert mib(first.activation_bytes, first.buffer_bytes) == (1, 4 + 4)
    assert mib(second.buffer_bytes) == (4,)


def test_recomputing_keeps_outputs_and_one_op_at_a_time() -> None:
    net = model("a/m", 10, op(kept=3, forward=4, backward=2), param_bytes_per_op=0)
    net = net.model_copy(update={"output_bytes": MIB})
    slices = [
        slice_of("a/m", (0, 4), [0], 1, recompute=True),
        slice_of("a/m", (4, 10), [0], 1, recompute=True, start_s=1),
    ]
    (need,) = needs_of([net], slices, cluster_of(1))
    states = 10 * 5056 / MIB
    assert mib(need.activation_bytes) == (round(10 + 3 + 2 + states, 4),)


@pytest.mark.parametrize(("inner_mib", "output_mib", "kept"), [(5, 2, 5), (2, 5, 5)])
def test_recomputing_keeps_the_larger_of_what_an_op_takes_and_what_the_slice_hands_on(
    inner_mib: int, output_mib: int, kept: int
) -> None:
    """Of two ops; each runs forward again with 1 MiB, and what hands on is taken by another device."""
    net = model("a/m", 2, op(forward=1), param_bytes_per_op=0, inner_output_bytes=inner_mib * MIB)
    net = net.model_copy(update={"output_bytes": output_mib * MIB})
    taker = model("a/n", 1, param_bytes_per_op=0, inputs=("a/m",))
    slices = [slice_of("a/m", (0, 2), [0], 1, recompute=True), slice_of("a/n", (0, 1), [1], 1, start_s=1)]
    first, _ = needs_of([net, taker], slices, gpus(2))
    assert mib(first.activation_bytes) == (round(2 * (kept + 5056 / MIB) + 1, 4),)


def test_without_a_profile_of_memory_it_is_guessed_from_what_an_op_keeps() -> None:
    """Half of it on the way through an op, and the gradients of an input and an output of 64 KiB."""
    net = metaop_of("a/m", 3, {1: 1.0}, param_bytes_per_op=0, activation_bytes_per_op=4 * MIB)
    (need,) = needs_of([net], [slice_of("a/m", (0, 3), [0], 1)], cluster_of(1))
    assert mib(need.activation_bytes) == (12 + 2 + 0.125,)


def nodes_of(*groups: NodeGroup) -> Cluster:
    return cluster_of(1).model_copy(update={"nodes": groups})


def test_a_gpu_holds_its_reserve_its_communicators_and_what_its_allocator_keeps() -> None:
    """The allocator keeps 7 % more of what stays, of what comes and goes, and of what is not counted."""
    group = NodeGroup(devices=1, device="a800-80gb", memory_gib=80, reserve_gib=1.5)
    metaop = model("a/m", 3, op(kept=4, forward=6))
    slices = [slice_of("a/m", (0, 3), [0], 1)]
    (need,) = device_memory([metaop], slices, nodes_of(group), Optimizer(), (7 * MIB,))
    (on_cpu,) = device_memory([metaop], slices, cluster_of(1), Optimizer())
    assert need.outside_bytes == 1536 * MIB + 7 * MIB
    tensors = need.tensor_bytes
    assert need.allocator_bytes == pytest.approx(ALLOCATOR_SHARE * tensors, abs=1)
    assert need.total_bytes == need.tensor_bytes + need.allocator_bytes + need.outside_bytes
    assert sum(need.parts.values()) == need.total_bytes
    assert (on_cpu.total_bytes, on_cpu.allocator_bytes, on_cpu.outside_bytes) == (need.tensor_bytes, 0, 0)


def test_the_reserve_is_what_the_file_says_or_what_such_a_device_usually_loses() -> None:
    groups = (
        NodeGroup(devices=1, device="h100", memory_gib=80),
        NodeGroup(devices=1, device="h100", memory_gib=8),
        NodeGroup(count=2, devices=1, device="h100", memory_gib=80, reserve_gib=0),
    )
    cluster = nodes_of(*groups)
    assert cluster.reserve_bytes == (int(3.35 * GIB), int(0.8 * GIB), 0, 0)
    usable = (76 * GIB - int(3.35 * GIB), 8 * GIB - int(0.4 * GIB) - int(0.8 * GIB), 80 * GIB, 80 * GIB)
    assert cluster.usable_bytes == usable
    assert cluster_of(2, memory_gib=4).usable_bytes == (4 * GIB, 4 * GIB)
    with pytest.raises(ValueError, match="reserve_gib: 8 of 8 GiB"):
        NodeGroup(devices=1, device="h100", memory_gib=8, reserve_gib=8)


def test_between_its_passes_a_slice_holds_what_it_keeps_and_what_it_received() -> None:
    """Device 1 runs one op that keeps 1 MiB and takes 3 MiB while it runs; its input of 4 MiB comes from
    device 0. After the backward pass the input's gradient, as large, stays to the iteration's end.
    """
    maker = model("a/m", 1).model_copy(update={"output_bytes": 4 * MIB})
    taker = model("a/n", 1, op(kept=1, forward=3), inputs=("a/m",), trainable_fraction=0.0)
    slices = [slice_of("a/m", (0, 1), [0], 1), slice_of("a/n", (0, 1), [1], 1, start_s=1)]
    memory = memory_by_pass([maker, taker], slices, cluster_of(2), Optimizer())[1]

    def held(passing: float) -> int:
        return round((1 + UNCOUNTED_SHARE) * (MIB + passing * MIB))

    assert memory.idle_bytes == held(0)
    assert memory.passes[1, False] == pytest.approx((held(4 + 3), held(4 + 1)), abs=1)
    assert memory.passes[1, True][1] == pytest.approx(held(4), abs=1)


def test_state_that_is_kept_whole_is_on_every_device_that_has_the_parameters() -> None:
    """Of 1,000 bytes, a quarter is stepped whole, with 0.5 of state for each byte of all; two share 1.5."""
    numbers = {"optimizer_state_per_param": 9.0, "optimizer_state_sharded": True}
    net = metaop_of("a/m", 1, {1: 1.0, 2: 0.5}, param_bytes_per_op=1000).model_copy(
        update={"optimizer": OptimizerBytes(state_per_param=1.5, whole_state_per_param=0.5, whole_share=0.25)}
    )
    slices = [slice_of("a/m", (0, 1), [0, 1], 2)]
    for device in needs_of([net], slices, cluster_of(2), **numbers):
        assert device.optimizer_bytes == 1.5 * 500 + 0.5 * 1000
        assert device.updated_bytes == 0.75 * 500 + 0.25 * 1000
    alone = needs_of([net], slices, cluster_of(2), **{**numbers, "optimizer_state_sharded": False})[0]
    assert alone.optimizer_bytes == 2000
    assert alone.updated_bytes == 1000
