"""The cost formulas on cases computed by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from helpers.plans import cluster_of, metaop_of
from spindle_cli.cluster import Cluster, Link, Links, NodeGroup
from spindle_cli.costs.device_memory import device_memory
from spindle_cli.costs.links import all_gather_s, all_reduce_s, bandwidth_bytes_per_s, transfer_s
from spindle_cli.costs.memory import activation_bytes
from spindle_cli.plan.types import Slice

MIB = 2**20


@dataclass(frozen=True)
class Optimizer:
    optimizer_state_per_param: float
    optimizer_state_sharded: bool = False


def gpus(nodes: int, per_node: int) -> Cluster:
    return Cluster(
        name="gpus",
        nodes=(NodeGroup(count=nodes, devices=per_node, device="a800-80gb", memory_gib=80),),
        links=Links(
            intra_node=Link(latency_us=0, bandwidth_gb_per_s=100),
            inter_node=Link(latency_us=0, bandwidth_gb_per_s=10),
        ),
    )


def test_a_message_takes_latency_and_bytes() -> None:
    link = Link(latency_us=10, bandwidth_gb_per_s=2)
    assert transfer_s(4e9, link) == pytest.approx(2.00001)
    assert transfer_s(0, link) == 0.0


def test_bandwidth_follows_the_curve_over_the_logarithm_of_bytes() -> None:
    link = Link(latency_us=0, bandwidth_gb_per_s=9, curve=((10.0, 1.0), (1000.0, 3.0)))
    assert bandwidth_bytes_per_s(1, link) == 1e9
    assert bandwidth_bytes_per_s(100, link) == pytest.approx(2e9)
    assert bandwidth_bytes_per_s(10**6, link) == 3e9


def test_a_ring_moves_its_share_of_the_bytes_twice() -> None:
    """4 devices of one CPU node at 5 GB/s, 10 us: 6 steps of a quarter."""
    assert all_reduce_s(4e9, range(4), cluster_of(4)) == pytest.approx(6 * (10e-6 + 1e9 / 5e9))
    assert all_gather_s(4e9, range(4), cluster_of(4)) == pytest.approx(3 * (10e-6 + 1e9 / 5e9))
    assert all_reduce_s(4e9, [3], cluster_of(4)) == 0.0


def test_a_ring_over_two_cpu_nodes_is_as_slow_as_their_link() -> None:
    cluster = cluster_of(4, devices_per_node=2)
    assert all_reduce_s(4e9, range(4), cluster) == pytest.approx(6 * (15e-6 + 1e9 / 1e9))


def test_every_network_card_carries_a_ring_of_its_own() -> None:
    """2 x 4 devices: 4 rings at 10 GB/s between the nodes, so 40; one device on a node: 10."""
    even = all_reduce_s(8e9, range(8), gpus(2, 4))
    assert even <= 14 / 8 * 8e9 / 40e9 + 1e-12
    assert all_reduce_s(8e9, [0, 1, 2, 3, 4], gpus(2, 4)) == pytest.approx(8 / 5 * 8e9 / 10e9)


def test_more_devices_never_sum_faster() -> None:
    for num_bytes in (1e3, 1e6, 1e9):
        seconds = [all_reduce_s(num_bytes, range(n), gpus(1, 8)) for n in range(1, 9)]
        assert seconds == sorted(seconds)


def slice_of(
    metaop: str, ops: tuple[int, int], devices: list[int], dp: int, tp: int = 1, **more: bool
) -> Slice:
    return Slice.model_validate(
        {
            "metaop": metaop,
            "ops": ops,
            "devices": devices,
            "dp": dp,
            "tp": tp,
            "start_s": 0,
            "end_s": 1,
            **more,
        }
    )


def test_parameters_are_held_once_however_many_slices_use_them() -> None:
    one = metaop_of("a/m", 4, {1: 1.0}, parameters="p", param_bytes_per_op=MIB, activation_bytes_per_op=0)
    two = one.model_copy(update={"name": "b/m"})
    slices = [
        slice_of("a/m", (0, 4), [0], 1),
        slice_of("b/m", (0, 2), [0], 1),
        slice_of("b/m", (2, 4), [1], 1),
    ]
    first, second = device_memory([one, two], slices, cluster_of(2), Optimizer(2.0))
    assert (first.parameter_bytes, second.parameter_bytes) == (4 * MIB, 2 * MIB)
    assert first.gradient_bytes == 4 * MIB
    assert first.optimizer_bytes == 8 * MIB


def test_frozen_parameters_need_no_gradient_and_no_state() -> None:
    metaop = metaop_of("a/m", 2, {1: 1.0}, param_bytes_per_op=MIB, trainable_fraction=0.5)
    (need,) = device_memory([metaop], [slice_of("a/m", (0, 2), [0], 1)], cluster_of(1), Optimizer(2.0))
    assert (need.parameter_bytes, need.gradient_bytes, need.optimizer_bytes) == (2 * MIB, MIB, 2 * MIB)


def test_a_device_keeps_its_share_of_the_activations_and_of_what_it_received() -> None:
    a = metaop_of("a/m", 3, {2: 1.0}, param_bytes_per_op=0, activation_bytes_per_op=4 * MIB)
    b = metaop_of("a/n", 1, {1: 1.0}, param_bytes_per_op=0, activation_bytes_per_op=0, inputs=("a/m",))
    slices = [slice_of("a/m", (0, 3), [0, 1], 2), slice_of("a/n", (0, 1), [2], 1)]
    needs = device_memory([a, b], slices, cluster_of(3), Optimizer(2.0))
    assert [need.activation_bytes for need in needs] == [6 * MIB, 6 * MIB, 0]
    # The output of 64 KiB: half of it handed on by each of two; received, and its gradient beside a gradient
    # of its own. And the gradients inside of one op.
    assert [need.buffer_bytes for need in needs] == [MIB + 2**15, MIB + 2**15, 3 * 2**16]


def test_shards_of_tensor_parallelism_are_held_as_their_union() -> None:
    metaop = metaop_of("a/m", 1, {1: 1.0}, param_bytes_per_op=4 * MIB)
    halves = [slice_of("a/m", (0, 1), [0, 1], 1, tp=2)]
    assert [
        need.parameter_bytes for need in device_memory([metaop], halves, cluster_of(2), Optimizer(0.0))
    ] == [2 * MIB, 2 * MIB]
    swapped = [*halves, slice_of("a/m", (0, 1), [1, 0], 1, tp=2)]
    assert [
        need.parameter_bytes for need in device_memory([metaop], swapped, cluster_of(2), Optimizer(0.0))
    ] == [4 * MIB, 4 * MIB]


def test_the_devices_that_hold_a_parameter_share_its_optimizer_state() -> None:
    """Op 0 on three devices, op 1 on one of them, by two MetaOps with the same parameters; not on CPU."""
    one = metaop_of("a/m", 2, {1: 1.0}, parameters="p", activation_bytes_per_op=0, param_bytes_per_op=6 * MIB)
    two = one.model_copy(update={"name": "b/m"})
    slices = [
        slice_of("a/m", (0, 1), [0, 1], 2),
        slice_of("a/m", (1, 2), [1], 1),
        slice_of("b/m", (0, 1), [2], 1),
    ]
    needs = device_memory([one, two], slices, gpus(1, 3), Optimizer(2.0, True))
    assert [need.optimizer_bytes for need in needs] == [4 * MIB, 16 * MIB, 4 * MIB]
    assert [need.gradient_bytes for need in needs] == [6 * MIB, 12 * MIB, 6 * MIB]


def test_shards_of_a_parameter_have_each_their_own_owners() -> None:
    """Device 0 holds the first half with device 2, the second half, which it has too, with 1 and 2."""
    metaop = metaop_of("a/m", 1, {1: 1.0}, activation_bytes_per_op=0, param_bytes_per_op=12 * MIB)
    slices = [slice_of("a/m", (0, 1), [0, 1], 1, tp=2), slice_of("a/m", (0, 1), [2, 0], 1, tp=2)]
    needs = device_memory([metaop], slices, gpus(1, 3), Optimizer(1.0, True))
    assert [need.optimizer_bytes for need in needs] == [(3 + 3) * MIB, 3 * MIB, 3 * MIB]


def test_on_cpus_sums_of_sharded_state_take_buffers() -> None:
    """As much as is summed, but no more than is let under way, unless one sum is larger."""
    for op_bytes, expected in ((4 * MIB, 12 * MIB), (20 * MIB, 32 * MIB), (50 * MIB, 50 * MIB)):
        metaop = metaop_of("a/m", 3, {2: 1.0}, activation_bytes_per_op=0, param_bytes_per_op=op_bytes)
        slices = [slice_of("a/m", (0, 3), [0, 1], 2)]
        whole = device_memory([metaop], slices, cluster_of(2), Optimizer(2.0))[0]
        sharded = device_memory([metaop], slices, cluster_of(2), Optimizer(2.0, True))[0]
        assert sharded.buffer_bytes - whole.buffer_bytes == expected
        assert sharded.optimizer_bytes == whole.optimizer_bytes / 2


def test_sums_take_the_place_of_activations_that_have_been_let_go_of() -> None:
    """Backward goes through one op of 1 MiB activations after the other, each then sums 4 MiB."""
    metaop = metaop_of("a/m", 3, {2: 1.0}, activation_bytes_per_op=2 * MIB, param_bytes_per_op=4 * MIB)
    slices = [slice_of("a/m", (0, 3), [0, 1], 2)]
    whole = device_memory([metaop], slices, cluster_of(2), Optimizer(2.0))[0]
    sharded = device_memory([metaop], slices, cluster_of(2), Optimizer(2.0, True))[0]
    assert sharded.activation_bytes == 3 * MIB
    assert sharded.buffer_bytes - whole.buffer_bytes == 3 * (4 - 1) * MIB


def test_a_share_that_is_on_the_device_already_is_not_received() -> None:
    """A consumer on the same devices, in another order, on one of them and another, on one alone."""
    a = metaop_of("a/m", 1, {2: 1.0}, param_bytes_per_op=0, activation_bytes_per_op=0)
    b = a.model_copy(update={"name": "a/n", "inputs": ("a/m",)})
    first = slice_of("a/m", (0, 1), [0, 1], 2)

    def received(devices: list[int]) -> list[int]:
        slices = [first, slice_of("a/n", (0, 1), devices, len(devices))]
        needs = device_memory([a, b], slices, cluster_of(3), Optimizer(2.0))
        passing = 2 * 2**16 // len(devices)
        return [needs[device].buffer_bytes - passing for device in devices]

    assert received([0, 1]) == [0, 0]
    assert received([1, 0]) == [2**15, 2**15]
    assert received([0, 2]) == [0, 2**15]
    assert received([1]) == [2**16]


def test_recomputing_keeps_inputs_and_one_op_at_a_time() -> None:
    metaop = metaop_of("a/m", 10, {1: 1.0}, param_bytes_per_op=0, activation_bytes_per_op=MIB)
    assert activation_bytes(metaop, 10, 1, 1) == 10 * MIB
    slices = [
        slice_of("a/m", (0, 4), [0], 1, recompute=True),
        slice_of("a/m", (4, 10), [0], 1, recompute=True),
    ]
    (need,) = device_memory([metaop], slices, cluster_of(1), Optimizer(2.0))
    assert need.activation_bytes == MIB + 10 * 2**16
