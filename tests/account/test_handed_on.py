"""What replica groups hand each other of what they have stepped takes buffers until a pass gathers it, by
hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.account.device.iteration import PassBytes
from spindle_cli.account.device_memory import find_needs, memory_by_pass
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import MetaOpProfile, OpMemory
from spindle_cli.runtime.communication.replica_groups.between_replica_groups import BetweenReplicaGroups
from spindle_cli.runtime.communication.replica_groups.group_ranges import ReplicaGroups
from spindle_cli.units import MIB

SIZES = {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}
UNEVEN = ((0, 1), (2, 3, 4))


def op_memory(kept: float, forward: float, tp: int = 1) -> OpMemory:
    """Of an op on any share: MiB kept, and taken forward; backward what it keeps."""
    taken = {"kept": kept, "forward": forward, "backward": 0, "first_backward": 0}
    sizes: dict[str, Any] = {f"{name}_bytes": (round(size * MIB), 0) for name, size in taken.items()}
    return OpMemory.model_validate({**sizes, "tp": tp})


def net(task: str, memory: tuple[OpMemory, ...], op_bytes: int = 12 * MIB) -> MetaOpProfile:
    """Three ops of 12 MiB of parameters each that all tasks use."""
    keys: dict[str, Any] = {"parameters": "net", "param_bytes_per_op": op_bytes, "batch_size": 12}
    made = metaop_of(f"{task}/net", 3, SIZES, activation_bytes_per_op=0, memory=memory, **keys)
    return made.model_copy(update={"output_bytes": 0})


def other() -> MetaOpProfile:
    """An op without parameters that takes 20 MiB forward and keeps 2."""
    keys: dict[str, Any] = {"parameters": None, "param_bytes_per_op": 0, "batch_size": 12}
    made = metaop_of("z/before", 1, SIZES, memory=(op_memory(2, 20),), **keys)
    return made.model_copy(update={"output_bytes": 0})


def planned(
    *replica_groups: Sequence[int],
    memory: tuple[OpMemory, ...] = (op_memory(0, 0),),
    first: MetaOpProfile | None = None,
    op_bytes: int = 12 * MIB,
    **more: Any,
) -> Plan:
    """A task for each of these sets of devices. `first`: what the first one's run before."""
    nets = [net(chr(ord("a") + number), memory, op_bytes) for number in range(len(replica_groups))]
    pieces = [
        slice_of(each, (0, 3), tuple(replica_group), 9.0)
        for each, replica_group in zip(nets, replica_groups, strict=True)
    ]
    waves = [[piece] for piece in pieces]
    if first is not None:
        waves.insert(0, [slice_of(first, (0, 1), tuple(replica_groups[0]), 0.0)])
    num_devices = max(device for replica_group in replica_groups for device in replica_group) + 1
    metaops = [*nets, *(() if first is None else (first,))]
    profile = profile_of(*metaops).model_copy(update={"optimizer_state_sharded": True})
    plan = plan_of(profile, cluster_of(num_devices), waves)
    shared_out = {"net": Sharding.PARAMETERS}
    return plan.model_copy(update={"optimizer_state_sharded": True, "sharding": shared_out, **more})


def passes(plan: Plan, device: int = 0) -> tuple[PassBytes, ...]:
    """Over NCCL, where sums inside of passes take nothing."""
    cluster = plan.cluster.model_copy(update={"backend": "nccl"})
    return find_needs(plan.metaops, plan.slices, cluster, plan, None)[device].passes


def handed_on(plan: Plan, device: int = 0) -> float:
    """MiB of buffers that are left behind the update."""
    return passes(plan, device)[-1].after.buffers / MIB


@pytest.mark.parametrize(
    ("replica_groups", "device", "mib"),
    [
        # Of each op's 12 MiB a device of two keeps 6, steps 3 of them and sends these, and gets 3.
        (UNEVEN, 0, 3 * 6),
        # One of three keeps 4.
        (UNEVEN, 4, 3 * 4),
        # It steps a third of 6, and sends that to two; gets two thirds.
        (((0, 1), (2, 3), (4, 5)), 5, 3 * 8),
        # From where it is to where it belongs.
        (((0, 1), (2, 3)), 0, 0),
        # In passes alone.
        (((0, 1),), 0, 0),
    ],
)
def test_a_device_has_what_it_sends_to_other_replica_groups_and_gets_of_them(
    replica_groups: tuple[tuple[int, ...], ...], device: int, mib: float
) -> None:
    assert handed_on(planned(*replica_groups), device) == pytest.approx(mib)


@pytest.mark.parametrize(
    ("weights", "mib"),
    [
        ((1, 3, 3, 1), (9, 27, 27, 9)),  # of 12 MiB a fourth and three fourths; each as much again
        ((1, 3, 2, 6), (0, 0, 0, 0)),  # the same ranges
        ((2, 2, 5, 5), (0, 0, 0, 0)),
    ],
)
def test_replica_groups_with_other_weights_have_other_ranges(
    weights: tuple[int, ...], mib: tuple[int, ...]
) -> None:
    plan = planned((0, 1), (2, 3), shard_weights=weights)
    assert [handed_on(plan, device) for device in range(4)] == [pytest.approx(each) for each in mib]


def test_fragments_of_tensor_parallelism_are_compared_each() -> None:
    """Where both replica groups split layers in two, devices 0 and 2 have a half with 4 and 6. Where the
    other replica group
    has them whole, four devices meet two for each half: of 6 MiB each of these keeps 3 and exchanges as many.
    """
    both = op_memory(0, 0), op_memory(0, 0, tp=2)

    def split(plan: Plan, *tasks: str) -> Plan:
        waves = tuple(
            wave.model_copy(
                update={
                    "slices": tuple(
                        each.model_copy(update={"dp": 2, "tp": 2}) if each.metaop[0] in tasks else each
                        for each in wave.slices
                    )
                }
            )
            for wave in plan.waves
        )
        return Plan.model_construct(**{**dict(plan), "waves": waves})

    plan = planned((0, 1, 2, 3), (4, 5, 6, 7), memory=both)
    assert handed_on(split(plan, "a", "b")) == 0
    assert handed_on(split(plan, "a")) == pytest.approx(3 * 3)
    # Of the other half, devices 1 and 3 have a third and two thirds, 5 and 7 a half each.
    weighted = planned((0, 1, 2, 3), (4, 5, 6, 7), memory=both, shard_weights=(1, 1, 1, 2, 1, 1, 1, 1))
    assert handed_on(split(weighted, "a", "b"), 3) == pytest.approx(3 * 4)


def test_buffers_go_one_op_before_the_one_that_uses_the_parameters() -> None:
    """18 MiB of three ops. While the first runs, which takes 13, those of the third are there alone: 6; while
    the second does, beside 1 that the first keeps, none. So the most is 19, and nothing of it stays.
    """
    forward = passes(planned(*UNEVEN, memory=(op_memory(1, 13),)))[0]
    most = forward.fullest
    assert (most.activations / MIB, most.buffers / MIB) == (pytest.approx(13), pytest.approx(6))
    assert forward.after.buffers == 0 and forward.after.activations / MIB == pytest.approx(3)


def test_before_the_first_op_all_buffers_are_there() -> None:
    most = passes(planned(*UNEVEN))[0].fullest
    assert (most.activations, most.buffers / MIB) == (0, pytest.approx(18))


def test_passes_that_do_not_use_the_parameters_have_the_buffers_beside_them() -> None:
    """Before the net a device runs an op that takes 20 MiB and keeps 2: with 18 of buffers beside both."""
    plan = planned(*UNEVEN, first=other())
    first, second, *_ = passes(plan)
    assert (first.fullest.activations / MIB, first.fullest.buffers / MIB) == (20, pytest.approx(18))
    assert (first.after.activations / MIB, first.after.buffers / MIB) == (2, pytest.approx(18))
    assert (second.fullest.activations / MIB, second.after.buffers) == (2, 0)


def test_backward_passes_before_the_first_use_have_them_too() -> None:
    """What runs forward and backward in its own time, before the net does."""
    plan = planned(*UNEVEN, first=other())
    apart = iter([(1.0, 2.0), (20.0, 22.0), (20.0, 22.0)])
    waves = tuple(
        wave.model_copy(
            update={
                "slices": tuple(
                    each.model_copy(
                        update=dict(zip(("backward_start_s", "backward_end_s"), next(apart), strict=True))
                    )
                    for each in wave.slices
                )
            }
        )
        for wave in plan.waves
    )
    found = passes(Plan.model_construct(**{**dict(plan), "waves": waves}))
    assert [each.is_backward for each in found[:3]] == [False, True, False]
    assert found[1].after.buffers / MIB == pytest.approx(18)
    assert found[2].after.buffers == 0


def test_behind_the_update_they_are_more_than_sums_may_take_before_it() -> None:
    """Of ops of 24 MiB: 36, all at once; of sums, as many, 32 at most are under way."""
    found = passes(planned(*UNEVEN, op_bytes=24 * MIB))
    assert (found[1].after.buffers / MIB, found[2].fullest.buffers / MIB) == (32, pytest.approx(36))


def test_behind_the_update_nothing_else_is_there_but_what_lasts() -> None:
    """By pass: 18 MiB more between iterations than behind the forward pass, less 3 that this keeps; with 1 %
    on top of both.
    """
    plan = planned(*UNEVEN, memory=(op_memory(1, 1),))
    cluster = plan.cluster.model_copy(update={"backend": "nccl"})
    found = memory_by_pass(plan.metaops, plan.slices, cluster, plan)[0]
    assert found.idle_bytes - found.passes[0, False][1] == pytest.approx(15 * 1.01 * MIB, abs=4)


@pytest.mark.parametrize("members", [((0, 1), (2, 3, 4)), ((0, 1), (2, 3)), ((0, 1), (2, 3), (4, 5))])
def test_what_is_counted_is_what_ranks_take(members: tuple[tuple[int, ...], ...]) -> None:
    """No rank takes more, and some rank of each replica group as much; of sums likewise."""
    sizes, width = {"a": 3 * MIB}, 4
    replica_groups = ReplicaGroups(members, ((),) * len(members))
    ranges, count = replica_groups.ranges(sizes, width), sum(map(len, members))
    taken = [BetweenReplicaGroups.of(ranges, rank, count, None) for rank in range(count)]
    plan = planned(*members)
    for replica_group in members:
        counted = [handed_on(plan, rank) / 3 * MIB for rank in replica_group]
        found = [width * taken[rank].handed_on_elements for rank in replica_group]
        assert max(found) == pytest.approx(max(counted), rel=1e-4)
        assert all(said >= 0.9999 * each for said, each in zip(counted, found, strict=True))
        summed = [width * taken[rank].sum_elements for rank in replica_group]
        backward = [passes(plan, rank)[1].after.buffers / 3 for rank in replica_group]
        assert max(summed) == pytest.approx(max(backward), rel=1e-4)
