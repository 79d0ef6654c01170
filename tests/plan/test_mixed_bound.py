"""Bounds on clusters of several types of device: solved by hand, and below every plan."""

from __future__ import annotations

import pytest

from helpers.plans import cluster_of, metaop_of, profile_of
from helpers.several_types import cluster_of_types, metaop_on_types, on_types, profile_on_types
from spindle_cli.plan.bound.any_cut import AnyCut
from spindle_cli.plan.bound.bound import Bound, lower_bound
from spindle_cli.plan.posing import make_problem
from spindle_cli.profile.types import MetaOpProfile

FAST_AND_SLOW = cluster_of_types({"fast": 1, "slow": 1})


def bound_of(*metaops: MetaOpProfile) -> Bound:
    return lower_bound(make_problem(profile_on_types(*metaops), FAST_AND_SLOW))


def any_s(*metaops: MetaOpProfile) -> float:
    return AnyCut(profile_on_types(*metaops), FAST_AND_SLOW).lower_bound_s


def test_a_chain_is_cut_over_both_types() -> None:
    """Four samples on the fast device take 4 s, two on the slow one 4 s: 6 samples, 4 s an op, two ops."""
    net = metaop_on_types("t/net", 2, {"fast": 1.0, "slow": 2.0}, batch_size=6)
    bound = bound_of(net)
    assert bound.lower_bound_s == pytest.approx(8.0, rel=1e-3)
    assert bound.lower_bound_s <= 8.0
    assert bound.op_s == pytest.approx([4.0], rel=1e-3)
    assert any_s(net) == pytest.approx(8.0)


def test_two_chains_take_the_type_that_each_loses_least_on() -> None:
    """a takes 8 s on the fast device and 16 on the slow one, b 8 and 80: b is for the fast one alone."""
    a = metaop_on_types("a/net", 1, {"fast": 1.0, "slow": 2.0})
    b = metaop_on_types("b/net", 1, {"fast": 1.0, "slow": 10.0})
    bound = bound_of(a, b)
    # x of a's samples on the slow device: 2 x there, 8 + 8 - x on the fast one: x = 16 / 3.
    assert any_s(a, b) == pytest.approx(32 / 3)
    # In whole batches half of a on both, 6 s an op (6 samples and 2), and half on the slow device, 16 s: it
    # is through after 11 s, and the fast device after 3 s of a and 8 s of b.
    assert bound.lower_bound_s == pytest.approx(11.0, rel=1e-3)
    assert set(bound.device_value_s) == {"fast", "slow"}


def test_producers_come_first() -> None:
    first = metaop_on_types("t/first", 1, {"fast": 1.0, "slow": 1.0}, batch_size=2)
    then = metaop_on_types("t/then", 1, {"fast": 1.0, "slow": 1.0}, batch_size=2, inputs=("t/first",))
    assert bound_of(first, then).lower_bound_s == pytest.approx(2.0, rel=1e-3)
    assert any_s(first, then) == pytest.approx(2.0)


def test_a_chain_that_more_devices_do_not_shorten_holds_the_bound() -> None:
    """A sample of 4 s beside one of 1 s, each on a fast device of its own: more devices are worth nothing."""
    long = metaop_on_types("a/long", 1, {"fast": 4.0, "slow": 8.0}, batch_size=1)
    short = metaop_on_types("b/short", 1, {"fast": 1.0, "slow": 2.0}, batch_size=1)
    cluster = cluster_of_types({"fast": 3, "slow": 1})
    bound = lower_bound(make_problem(profile_on_types(long, short), cluster))
    assert bound.lower_bound_s == pytest.approx(4.0, rel=1e-3)
    assert bound.device_value_s == {"fast": pytest.approx(0.0), "slow": pytest.approx(0.0)}


def test_of_equal_types_the_bound_is_that_of_one_type() -> None:
    metaops = (
        metaop_of("a/net", 4, {1: 2.0, 2: 1.1, 4: 0.6, 8: 0.4}),
        metaop_of("b/net", 3, {1: 1.0, 2: 0.5, 4: 0.3}),
    )
    one = lower_bound(make_problem(profile_of(*metaops), cluster_of(4)))
    profile = on_types(profile_of(*metaops), {"one": 1.0, "other": 1.0})
    bound = lower_bound(make_problem(profile, cluster_of_types({"one": 2, "other": 2})))
    assert bound.lower_bound_s == pytest.approx(one.lower_bound_s, rel=2e-3)
    assert bound.lower_bound_s <= one.lower_bound_s * (1 + 1e-9)
    assert 2 * sum(bound.device_value_s.values()) == pytest.approx(
        4 * sum(one.device_value_s.values()), rel=2e-2
    )


def test_work_of_a_tensor_parallel_group_is_that_of_all_its_devices() -> None:
    """Halves of an op take 6 of 10 s: 12 device-seconds against 10, but 6 s for the chain."""
    net = metaop_on_types("t/net", 1, {"fast": 1.25, "slow": 1.25})
    halves = tuple(
        share.model_copy(
            update={"tp": 2, "forward_s": share.forward_s * 0.6, "backward_s": share.backward_s * 0.6}
        )
        for share in net.shares
        if share.samples == 8
    )
    whole = tuple(share for share in net.shares if share.samples == 8)
    split = net.model_copy(
        update={"shares": (*whole, *halves), "curve": tuple(p for p in net.curve if p.dp == 1)}
    )
    cluster = cluster_of_types({"fast": 2, "slow": 2})
    assert AnyCut(profile_on_types(split), cluster).lower_bound_s == pytest.approx(6.0)
    several = [split.model_copy(update={"name": f"{n}/net", "task": str(n)}) for n in range(8)]
    assert AnyCut(profile_on_types(*several), cluster).lower_bound_s == pytest.approx(8 * 10 / 4)
