"""Tasks in little room for activations: micro-batches and recomputed ops, by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from helpers.cut import cuttable, shares_of
from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.check.run import check_plan
from spindle_cli.errors import NoPlanError
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.best.micro_batches import cuts_of_parts, in_micro_batches
from spindle_cli.plan.best.sharding import shardings_to_try
from spindle_cli.plan.cutting.on_all import on_all_devices
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.problem import MemoryFallback, Point
from spindle_cli.plan.search.room import CutPart, FittedPart, all_within
from spindle_cli.profile.types import MetaOpProfile, Profile

MIB = 2**20
PARAMETERS = Sharding.PARAMETERS
ONE, TWO = cluster_of(1), cluster_of(2)
FOUR = cluster_of(4)


def net(name: str, num_ops: int, kept_mib: int, *, batch_size: int = 8) -> MetaOpProfile:
    """Ops that hand on 1 MiB of the so many that they keep."""
    sizes = {"activation_bytes_per_op": kept_mib * MIB, "inner_output_bytes": MIB}
    return metaop_of(name, num_ops, {1: 3.0}, batch_size=batch_size, **sizes)


def way(metaop: MetaOpProfile, seconds: float, count: int = 1, *, dp: int = 1) -> CutPart:
    """One MetaOp whose ops take 1 s forward, in micro-batches of this size."""
    point = Point(num_devices=dp, dp=dp, tp=1, forward_s=1.0, backward_s=2.0, op_s=3.0)
    return CutPart({metaop.task: count}, (metaop,), {metaop.name: point}, seconds)


def test_what_is_kept_beyond_the_room_is_recomputed_and_no_more() -> None:
    """10 ops keep 5 MiB, of which 4 can be saved: 50 MiB, and no less than 10."""
    part = way(net("a/m", 10, 5), seconds=30.0)
    assert part.kept_bytes == 50 * MIB
    for room_mib, ops in ((60, 0), (50, 0), (49, 1), (46, 1), (45, 2), (10, 10)):
        found = part.within(room_mib * MIB)
        expected = {"a/m": ops} if ops else {}
        assert found == FittedPart(30.0 + ops, {"a": 1}, MemoryFallback(recompute=expected))
    assert part.within(9.9 * MIB) is None


def test_every_micro_batch_computes_again() -> None:
    found = way(net("a/m", 10, 5), seconds=32.0, count=3).within(45 * MIB)
    assert found == FittedPart(32.0 + 3 * 2, {"a": 3}, MemoryFallback(recompute={"a/m": 2}))


def test_the_largest_share_counts() -> None:
    """Of 8 samples one of three devices has 3: as if all had, 9 samples' 56.25 MiB. To keep 45 of these, of
    what 8 samples keep 10 MiB go: 3 ops'.
    """
    part = way(net("a/m", 10, 5), seconds=30.0, dp=3)
    assert part.kept_bytes == 50 * MIB * 9 / 8
    found = part.within(45 * MIB)
    assert found is not None
    assert found.fallback.recompute == {"a/m": 3}
    found = part.within(42 * MIB)
    assert found is not None
    assert found.fallback.recompute == {"a/m": 4}  # 14.25 MiB of nine samples, 12.67 of eight


def test_of_shares_by_speed_the_largest_counts() -> None:
    """Of 8 samples one of two devices has 6: as if both had, 12 samples'."""
    metaop = net("a/m", 10, 5)
    point = Point(2, 2, 1, 1.0, 2.0, 3.0, counts=(1, 1), rows=(0, 6, 8))
    assert CutPart({"a": 1}, (metaop,), {"a/m": point}, 30.0).kept_bytes == 50 * MIB * 12 / 8


def test_each_part_does_what_is_fastest_in_the_same_room() -> None:
    """Of 50 MiB 10 remain: a recomputes for 10 s or takes 3 s longer in five; b, whose micro-batches take
    longer, recomputes. In 30 MiB a is as fast either way and stays whole; in 9 b has none.
    """
    whole, fifths = net("a/m", 10, 5), net("a/m", 10, 1)
    a = [way(whole, 30.0), way(fifths, 35.0, 5)]
    b = [way(net("b/m", 10, 5), 30.0), way(net("b/m", 10, 1), 41.0, 5)]
    found = all_within([a, b], 10 * MIB)
    assert found is not None
    assert found.counts == {"a": 5}
    assert found.fallback == MemoryFallback(recompute={"b/m": 10})
    found = all_within([a, b], 30 * MIB)
    assert found is not None
    assert (found.counts, dict(found.fallback.recompute)) == ({}, {"a/m": 5, "b/m": 5})
    assert all_within([a, b[:1]], 9 * MIB) is None
    assert all_within([a, b], 50 * MIB) == all_within([a, b], 99 * MIB)


def shared(*metaops: MetaOpProfile) -> Profile:
    return profile_of(*metaops).model_copy(update={"optimizer_state_sharded": True})


def test_every_way_to_cut_a_part_on_all_devices() -> None:
    """Shares of 1, 2, 4 and 8 samples take 1.5, 2, 3 and 5 s; a whole batch on two devices 3, in two
    micro-batches 2 each, in four 1.5 each; one sample is not cut.
    """
    net = cuttable("t/net", 4, {1: 1.5, 2: 2.0, 4: 3.0, 8: 5.0}, activation_bytes_per_op=8 * MIB)
    cut = partial(in_micro_batches, cluster=TWO)
    (ways,) = cuts_of_parts(shared(net).sharded({"t/net": PARAMETERS}), cut)
    assert [each.counts["t"] for each in ways] == [1, 2, 4]
    assert [each.kept_bytes for each in ways] == [32 * MIB, 16 * MIB, 8 * MIB]
    assert [each.seconds for each in ways] == pytest.approx([4 * 3.0, 2 * 4 * 2.0, 4 * 4 * 1.5], abs=0.02)
    (ways,) = cuts_of_parts(shared(net), cut, {"t": 2})
    assert [each.counts["t"] for each in ways] == [2]


def test_what_is_shared_out_runs_on_all_devices_in_any_shares() -> None:
    """Six samples on four devices: shares of two; not where shares are to be equal, nor unknown."""
    net = cuttable("t/net", 4, {1: 1.0, 2: 1.5, 3: 2.0, 6: 3.0})
    profile = shared(net).sharded({"t/net": PARAMETERS})
    (found,) = on_all_devices(profile, FOUR).metaops
    assert [(each.num_devices, each.dp, each.op_s) for each in found.curve] == [(4, 4, 1.5)]
    for refused in (
        profile.in_equal_shares(),
        shared(net.model_copy(update={"shares": ()})).sharded({"t/net": PARAMETERS}),
    ):
        with pytest.raises(NoPlanError, match="has no allocation on all 4 devices"):
            on_all_devices(refused, FOUR)


def test_split_shares_of_any_size_are_weighed_too() -> None:
    """Of five samples two groups of two have 3 at most, four devices 2: whichever is faster."""
    net = cuttable("t/net", 4, {1: 1.0, 2: 2.0, 3: 3.0, 5: 5.0})
    for split_s, tp in ((1.9, 2), (2.1, 1)):
        both = net.model_copy(update={"shares": (*net.shares, *shares_of({3: split_s}, tp=2))})
        (found,) = on_all_devices(shared(both).sharded({"t/net": PARAMETERS}), FOUR).metaops
        assert [(each.dp, each.tp, each.op_s) for each in found.curve] == [(4 // tp, tp, min(split_s, 2.0))]


def test_one_task_recomputes_beside_another_in_micro_batches() -> None:
    """A task keeps 300 MiB on each of two devices, which have room for about 180. a's two micro-batches take
    as long as its batch, b's nearly twice as long, so that b computes five of ten ops again.
    """
    sizes: dict[str, Any] = {"activation_bytes_per_op": 60 * MIB, "inner_output_bytes": MIB}
    a = cuttable("a/net", 10, {2: 0.51, 4: 1.0, 8: 2.0}, **sizes, param_bytes_per_op=100 * MIB)
    b = cuttable("b/net", 10, {2: 0.95, 4: 1.0, 8: 2.0}, **sizes, param_bytes_per_op=100 * MIB)
    profile = shared(a, b)
    request = dict.fromkeys(("a/net", "b/net"), PARAMETERS)
    plan = make_plan(profile, cluster_of(2, memory_gib=4700 / 1024), effort=0, sharding=request)
    assert check_plan(plan, profile) == ()
    assert plan.micro_batches == {"a": 2}
    assert {piece.metaop for piece in plan.slices if piece.recompute} == {"b/net"}
    again_s = 5 / 3
    assert plan.predicted.compute_s == pytest.approx(10 * 1.02 + 10 * 1.0 + again_s, rel=1e-6)


def test_where_shares_are_to_be_equal_a_component_without_them_is_not_shared_out() -> None:
    """Six samples on four devices."""
    net = cuttable("t/net", 4, {1: 1.0, 2: 1.5, 3: 2.0, 6: 3.0}, param_bytes_per_op=100 * MIB)
    profile = shared(net)
    assert shardings_to_try(profile, FOUR) == [
        {"t/net": PARAMETERS},
        {"t/net": Sharding.GRADIENTS},
    ]
    assert shardings_to_try(profile.in_equal_shares(), FOUR) == []
    request = {"t/net": PARAMETERS}
    plan = make_plan(profile, FOUR, effort=0, sharding=request)
    assert check_plan(plan, profile) == ()
    assert {piece.rows for piece in plan.slices} == {(0, 1, 3, 4, 6)}
    with pytest.raises(NoPlanError, match="has no allocation on all 4 devices, and") as refused:
        make_plan(profile, FOUR, effort=0, sharding=request, equal_shares=True)
    assert "a batch that all devices divide" in str(refused.value.hint)


def test_micro_batches_of_fewer_samples_than_devices_are_named_where_a_component_is_shared_out() -> None:
    """Six samples on four devices, three at a time."""
    net = cuttable("t/net", 4, {1: 1.0, 2: 1.5, 3: 2.0, 6: 3.0})
    with pytest.raises(NoPlanError, match="on all 4 devices for 3 samples at a time, and") as refused:
        make_plan(shared(net), FOUR, effort=0, sharding={"t/net": PARAMETERS}, micro_batches={"t": 2})
    assert "fewer micro-batches" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        ((3, 2), "b/net has no allocation on all 4 devices for 2 samples at a time, and"),
        ((6, 4), "b/net has no allocation on all 4 devices, and"),
    ],
)
def test_of_metaops_without_an_allocation_on_all_devices_that_with_fewest_samples_is_named(
    samples: tuple[int, int], told: str
) -> None:
    """On four devices: where there is a sample for each, their number is not what is wrong."""
    nets = [
        metaop_of(f"{task}/net", 4, {1: 1.0}, batch_size=count, parameters="net")
        for task, count in zip("ab", samples, strict=True)
    ]
    with pytest.raises(NoPlanError, match=told):
        make_plan(shared(*nets), FOUR, effort=0, sharding={"net": PARAMETERS})
