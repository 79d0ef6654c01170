"""What a device holds whose ops' activations are in host memory meanwhile, and what its node does."""

from __future__ import annotations

from typing import Any

import pytest
from test_device_memory import MIB, Optimizer, gpus, model, op, slice_of

from helpers.plans import cluster_of
from spindle_cli.account.device_memory import device_memory, host_memory, memory_by_pass
from spindle_cli.files.cluster import Cluster
from spindle_cli.profile.types import MetaOpProfile

# Of an op that is recomputed, the state of random numbers.
STATE = 5056 / MIB


def net(num_ops: int) -> MetaOpProfile:
    """Ops that hand 1 MiB to the next one, keep 3, take 4 forward and 2 more backward."""
    memory = op(kept=3, forward=4, backward=2)
    return model("a/m", num_ops, memory, param_bytes_per_op=0, inner_output_bytes=MIB)


def activations_mib(num_ops: int, on: Cluster, **more: Any) -> float:
    (need,) = device_memory([net(num_ops)], [slice_of("a/m", (0, num_ops), [0], 1, **more)], on, Optimizer())
    return need.activation_bytes / MIB


def test_ops_behind_those_that_are_moved_keep_theirs() -> None:
    """The first four of six are moved. Fullest as the last one runs backward with 2: two that keep 3, 1 that
    the fourth hands on, and 3 of its own on their way back.
    """
    assert activations_mib(6, gpus(1), offload=[[0, 4]]) == 2 * 3 + 1 + 3 + 2


def test_what_is_on_its_way_out_counts_while_later_ops_run_forward() -> None:
    """The first of two is moved, and takes 1 backward where the last takes 4 forward."""
    slim = net(2).model_copy(update={"memory": (op(kept=3, forward=8, backward=1),)})
    (need,) = device_memory([slim], [slice_of("a/m", (0, 2), [0], 1, offload=[[0, 1]])], gpus(1), Optimizer())
    assert need.activation_bytes / MIB == 1 + 3 + 8


def test_a_device_that_moves_all_has_what_is_under_way() -> None:
    """As the last op runs backward: what it hands on, its own, and the one's before."""
    for num_ops in (3, 6, 12):
        assert activations_mib(num_ops, gpus(1), offload=[[0, num_ops]]) == 1 + 3 + 3 + 2


def test_what_is_no_neighbour_comes_when_the_op_behind_it_is_through() -> None:
    """The first and the third of three are moved: as that runs backward with 6, what both hand on is there, 3
    of the second and 3 of its own.
    """
    deep = net(3).model_copy(update={"memory": (op(kept=3, forward=3, backward=6),)})
    moved = slice_of("a/m", (0, 3), [0], 1, offload=[[0, 1], [2, 3]])
    (need,) = device_memory([deep], [moved], gpus(1), Optimizer())
    assert need.activation_bytes / MIB == 1 + 3 + 1 + 3 + 6


def test_a_forward_pass_has_one_op_on_its_way_out() -> None:
    pieces = [
        slice_of("a/m", (0, 4), [0], 1, offload=[[0, 4]], backward_start_s=5, backward_end_s=6),
        slice_of("a/m", (4, 5), [0], 1, start_s=1, backward_start_s=3, backward_end_s=4),
    ]
    (found,) = memory_by_pass([net(5)], pieces, gpus(1), Optimizer())
    idle = found.idle_bytes

    def over_idle(key: tuple[int, bool]) -> tuple[float, ...]:
        # 1 % is not counted, and of all that the allocator has 7 %.
        return tuple(round((size - idle) / MIB / 1.01 / 1.07, 3) for size in found.passes[key])

    assert over_idle((0, False)) == (3 + 4, 1)  # which waits for what is on its way out
    assert over_idle((1, False)) == (1 + 4, 1 + 3)
    # The gradient of what the second slice has taken stays, 1 MiB; while it is handed on it is there twice.
    assert over_idle((1, True)) == (1 + 3 + 2, 1 + 1)
    assert over_idle((0, True)) == (1 + 1 + 1 + 3 + 3 + 2, 1)


def test_moved_and_recomputed_ops_take_turns() -> None:
    """Each keeps what it takes or hands on; the last one runs forward again while the third comes back."""
    found = activations_mib(4, gpus(1), recompute=True, offload=[[0, 1], [2, 3]])
    assert found == pytest.approx(4 + 2 * STATE + 3 + (3 + 2), abs=1e-5)


def test_the_node_has_what_is_moved_in_whole_blocks() -> None:
    """3 MiB are two blocks of 2."""
    three = [slice_of("a/m", (0, 6), [device], 1, offload=[[1, 4]]) for device in range(1)]
    needs = device_memory([net(6)], three, gpus(1), Optimizer())
    assert host_memory(needs, gpus(1)) == (3 * 4 * MIB,)
    two = cluster_of(4, devices_per_node=2)
    spread = [slice_of("a/m", (0, 6), [1, 2, 3], 3, offload=[[0, 6]])]
    wide = net(6).model_copy(update={"batch_size": 9})
    needs = device_memory([wide], spread, two, Optimizer())
    assert host_memory(needs, two) == (6 * 2 * MIB, 2 * 6 * 2 * MIB)


def test_a_node_has_them_until_their_backward_pass() -> None:
    """Two tasks one behind the other, forward and then backward: at no time both."""
    nets = [net(4), model("b/m", 4, op(kept=3), param_bytes_per_op=0)]
    apart = [
        slice_of("a/m", (0, 4), [0], 1, offload=[[0, 4]], backward_start_s=1, backward_end_s=2),
        slice_of("b/m", (0, 4), [0], 1, start_s=2, offload=[[0, 3]], backward_start_s=3, backward_end_s=4),
    ]
    (need,) = device_memory(nets, apart, gpus(1), Optimizer())
    assert need.host_bytes == 4 * 4 * MIB


def test_on_a_cpu_they_are_in_the_same_memory() -> None:
    """As the last op runs backward: all six in blocks, its own and the one's before back in place."""
    assert activations_mib(6, cluster_of(1), offload=[[0, 6]]) == 6 * 4 + 1 + 3 + 3 + 2


def test_each_device_has_its_own_share_of_what_is_moved_on_its_node() -> None:
    """Of 8 samples 6 are on a device of the first node, 2 on one of the second: of six ops that keep 3 MiB of
    the whole batch in blocks of 2 MiB each, of which the first four are moved, 4 x 4 MiB and 4 x 2 MiB are in
    host memory. On the devices three quarters and one quarter of what one with the whole batch would have.
    """
    cluster = gpus(2)
    nodes = (cluster.nodes[0].model_copy(update={"count": 2, "devices": 1}),)
    on = cluster.model_copy(update={"nodes": nodes})
    piece = slice_of("a/m", (0, 6), [0, 1], 2, offload=[[0, 4]], rows=(0, 6, 8))
    needs = device_memory([net(6).model_copy(update={"batch_size": 8})], [piece], on, Optimizer())
    assert host_memory(needs, on) == (16 * MIB, 8 * MIB)
    assert [need.activation_bytes / MIB for need in needs] == [12 * 6 / 8, 12 * 2 / 8]
