"""What gathers and scatters of shared-out parameters add to passes, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.plans import cluster_of, metaop_of, profile_of, slice_of
from spindle_cli.costs.beyond_curve import BeyondCurve
from spindle_cli.costs.links import all_gather_s
from spindle_cli.costs.parameters import Moved, moved_in_passes
from spindle_cli.files.sharding import Sharding
from spindle_cli.profile.types import MetaOpProfile, OptimizerBytes
from spindle_cli.units import MIB

# Of 1 MiB over two devices of a node: a hop of 10 us, and half of it at 5 GB/s.
MIB_S = 10e-6 + MIB / 2 / 5e9
PARAMETERS, GRADIENTS = Sharding.PARAMETERS, Sharding.GRADIENTS


def net_of(num_ops: int, **more: Any) -> MetaOpProfile:
    return metaop_of("task/net", num_ops, {1: 3.0, 2: 3.0, 4: 3.0}, **more)


def moved(
    metaop: MetaOpProfile,
    ops: tuple[int, int],
    level: Sharding = PARAMETERS,
    devices: tuple[int, ...] = (0, 1),
    tp: int = 1,
    *,
    is_reached: bool = True,
    **profile: Any,
) -> Moved | None:
    whole = profile_of(metaop).model_copy(update=profile).sharded({"task/net": level})
    at = slice_of(metaop, ops, devices, 0.0)
    piece = at.model_copy(update={"tp": tp, "dp": len(devices) // tp})
    return moved_in_passes(piece, metaop, cluster_of(4, devices_per_node=2), whole, is_reached=is_reached)


def test_each_op_gathers_and_scatters_its_own_parameters() -> None:
    found = moved(net_of(3), (0, 2))
    assert found is not None
    assert found.forward == found.backward == found.scatters == pytest.approx((MIB_S, MIB_S))


def test_unequal_parts_take_as_long_as_the_largest() -> None:
    """3/4 of a MiB over one link, in either way; equal weights among those that share are equal parts."""
    metaop = net_of(1)
    piece, cluster = slice_of(metaop, (0, 1), (0, 1), 0.0), cluster_of(4, devices_per_node=2)
    shared_out = profile_of(metaop).sharded({"task/net": PARAMETERS})
    for weights, seconds in (((1, 3, 1, 1), 10e-6 + 0.75 * MIB / 5e9), ((3, 3, 1, 9), MIB_S)):
        found = moved_in_passes(piece, metaop, cluster, shared_out.weighted(weights))
        assert found is not None
        assert found.forward == found.scatters == pytest.approx((seconds,))


def test_gradients_alone_are_scattered_and_nothing_is_gathered() -> None:
    found = moved(net_of(2), (0, 2), GRADIENTS, gradient_bytes_per_param=2.0)
    assert found is not None
    assert found.forward == found.backward == (0.0, 0.0)
    assert found.scatters == pytest.approx([10e-6 + 2 * MIB / 2 / 5e9] * 2)


def test_what_is_kept_is_gathered_forward_alone() -> None:
    found = moved(net_of(3), (0, 2), Sharding.KEPT)
    assert found is not None
    assert found.forward == found.scatters == pytest.approx((MIB_S, MIB_S))
    assert found.backward == (0.0, 0.0)


def test_nothing_moves_where_nothing_is_shared_out_or_one_device_holds_it() -> None:
    assert moved(net_of(1), (0, 1), Sharding.OPTIMIZER) is None
    assert moved(net_of(1), (0, 1), devices=(0,)) is None
    whole = profile_of(net_of(1)).sharded({"another": PARAMETERS})
    assert moved_in_passes(slice_of(net_of(1), (0, 1), (0, 1), 0.0), net_of(1), cluster_of(2), whole) is None


def test_what_is_stepped_whole_is_not_gathered_and_what_is_frozen_by_itself_but_never_scattered() -> None:
    """A quarter is frozen; of the rest a third is stepped whole: half a MiB is gathered, and a quarter."""
    kept = OptimizerBytes(state_per_param=2.0, whole_share=1 / 3)
    found = moved(net_of(1, trainable_fraction=0.75, optimizer=kept), (0, 1))
    assert found is not None
    assert found.forward == found.backward == pytest.approx((2 * 10e-6 + (MIB / 4 + MIB / 8) / 5e9,))
    assert found.scatters == pytest.approx((10e-6 + 0.75 * MIB / 2 / 5e9,))


def test_what_is_all_frozen_is_gathered_once_a_pass_to_which_gradients_come() -> None:
    frozen = moved(net_of(2, trainable_fraction=0.0), (0, 2))
    assert frozen is not None
    assert frozen.forward == frozen.backward == pytest.approx((MIB_S, MIB_S))
    assert frozen.scatters == (0.0, 0.0)
    unreached = moved(net_of(2, trainable_fraction=0.0), (0, 2), is_reached=False)
    assert unreached is not None
    assert unreached.forward == pytest.approx((MIB_S, MIB_S))
    assert unreached.backward == unreached.scatters == (0.0, 0.0)


def test_gradients_come_behind_what_trains() -> None:
    """A frozen encoder, a frozen trunk behind an adapter that trains: the encoder's pass back is empty."""
    encoder = metaop_of("t/encoder", 2, {1: 1.0, 2: 1.0}, trainable_fraction=0.0)
    adapter = metaop_of("t/adapter", 1, {1: 1.0, 2: 1.0}, inputs=("t/encoder",))
    trunk = metaop_of("t/trunk", 2, {1: 1.0, 2: 1.0}, inputs=("t/adapter",), trainable_fraction=0.0)
    keys = dict.fromkeys(("t/encoder", "t/trunk"), PARAMETERS)
    profile = profile_of(encoder, adapter, trunk).sharded(keys)
    beyond = BeyondCurve(profile.by_name, cluster_of(4, devices_per_node=2), profile)

    def longer(metaop: MetaOpProfile) -> tuple[float, float]:
        return beyond.op_s(slice_of(metaop, (0, 2), (0, 1), 0.0), metaop, 1.0, 1.0)

    assert longer(encoder) == (pytest.approx(MIB_S / 2), 0.0)
    assert longer(trunk) == pytest.approx((MIB_S / 2, MIB_S / 2))


def test_a_block_of_several_ops_moves_once_a_pass() -> None:
    """Ops 0 and 2 share block 7; glue makes op 1 larger."""
    net = net_of(3, parameter_blocks=(7, 8, 7), extra_param_bytes={1: MIB})
    found = moved(net, (0, 3))
    assert found is not None
    own_s, glue_s = MIB_S, MIB_S  # two gathers: tensor parallelism would split the one and not the other
    assert found.forward == pytest.approx((own_s, own_s + glue_s, 0.0))
    assert found.backward == pytest.approx((0.0, own_s + glue_s, own_s))
    assert found.scatters == pytest.approx((own_s, own_s + glue_s, 0.0))


def test_parts_are_gathered_by_those_that_hold_the_same_the_rest_by_all() -> None:
    """4 devices on two nodes, split by 2: device 0's part is on device 2 too, and both parts cross at once,
    over one card; a quarter is whole on all.
    """
    net = net_of(1, whole_param_bytes_per_op=MIB // 4)
    cluster = cluster_of(4, devices_per_node=2)
    found = moved(net, (0, 1), devices=(0, 1, 2, 3), tp=2)
    assert found is not None
    part_s = 20e-6 + 2 * 3 * MIB / 16 / 1e9
    assert found.forward == pytest.approx((part_s + all_gather_s(MIB / 4, (0, 1, 2, 3), cluster),))


def test_a_pass_is_longer_by_what_its_ops_do_not_hide() -> None:
    """Gathers of 1, 5, 2 and compute of 3: 1 before, 2 beside the first, nothing beside the others.

    Backward, with scatters of 4, 1, 2 and compute of 4: 2 before; gather 5 beside the last op; 1 and scatter
    2 beside the middle one; scatter 1 beside the first; its own scatter of 4 behind.
    """
    found = Moved((1.0, 5.0, 2.0), (1.0, 5.0, 2.0), (4.0, 1.0, 2.0))
    assert found.longer_s(3.0, 4.0) == (3.0, 7.0)
    assert found.longer_s(0.0, 0.0) == (8.0, 15.0)
    assert found.longer_s(10.0, 10.0) == (1.0, 6.0)
    # to the second: 1 + 2 gathers and scatters beside the middle op
    assert found.longer_s(3.0, 2.0) == (3.0, 2 + 3 + 1 + 0 + 4)


def test_a_single_op_hides_nothing() -> None:
    assert Moved((1.0,), (1.0,), (4.0,)).longer_s(100.0, 100.0) == (1.0, 5.0)


def test_ops_take_longer_on_average_by_what_the_slice_does() -> None:
    """Two ops of 1 and 2 s: nothing but the first gather and the last scatter shows."""
    net = net_of(2)
    whole = profile_of(net).sharded({"task/net": PARAMETERS})
    piece = slice_of(net, (0, 2), (0, 1), 0.0)
    beyond = BeyondCurve(whole.by_name, cluster_of(2), whole)
    assert beyond.op_s(piece, net, 1.0, 2.0) == pytest.approx((MIB_S / 2, MIB_S))
    plain = BeyondCurve(whole.by_name, cluster_of(2), profile_of(net))
    assert plain.op_s(piece, net, 1.0, 2.0) == (0.0, 0.0)
