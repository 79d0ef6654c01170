"""Exchanges of devices that change nothing are left out, and that changes no arrangement."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plans import cluster_of, metaop_of, profile_of, slice_of
from spindle_cli.account.traffic import Traffic
from spindle_cli.plan.placing import arrange as arranging
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.types import Slice

NUM_DEVICES = 8


def placed(seed: int) -> tuple[Problem, tuple[Slice, ...]]:
    """MetaOps one behind the other on any devices, some of which share parameters, or take from another."""
    random = Random(seed)
    curve = dict.fromkeys((1, 2, 4, 8), 1.0)
    metaops = [
        metaop_of(
            f"t{number % 2}/net{number}",
            2,
            curve,
            parameters=random.choice(("shared", "wide", None)),
            inputs=(f"t{number % 2}/net{number - 2}",) if number > 1 and random.random() < 0.4 else (),
        )
        for number in range(4)
    ]
    slices = tuple(
        slice_of(each, (0, 2), sorted(random.sample(range(NUM_DEVICES), random.choice((1, 2, 4, 8)))), at)
        for at, each in zip((0.0, 2.0, 4.0, 6.0), metaops, strict=True)
    )
    problem = make_problem(profile_of(*metaops), cluster_of(NUM_DEVICES, devices_per_node=2))
    return problem, slices


class EveryExchange(arranging._Arrangement):
    """Takes every device for one that exchanges something, so that every exchange is tried."""

    def _make_neighbours(self, traffic: Traffic) -> None:
        super()._make_neighbours(traffic)
        for device, others in enumerate(self.neighbours):
            others.append((device, 0.0))


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_the_same_devices_are_found(seed: int) -> None:
    problem, slices = placed(seed)
    found, expected = arranging._Arrangement(problem, slices), EveryExchange(problem, slices)
    random = Random(seed)
    for number in range(60):
        a, b = random.randrange(NUM_DEVICES), random.randrange(NUM_DEVICES)
        for each in (found, expected):
            if not each.on_one_node(a, b):
                each.try_exchange(each.all_alike(a, b) if number % 2 else each.alone(a, b))
    assert found.place == expected.place
    assert found.on_node == expected.on_node
    assert found.cost_s == expected.cost_s


def handing_on(large: int, small: int) -> arranging._Arrangement:
    """On two nodes of two devices: device 0 hands 4 MiB to device `large`, and 1 KiB to device `small`."""
    curve = {1: 1.0}
    first = metaop_of("t0/a", 1, curve).model_copy(update={"output_bytes": 2**22})
    second = metaop_of("t1/c", 1, curve).model_copy(update={"output_bytes": 2**10})
    metaops = [
        first,
        metaop_of("t0/b", 1, curve, inputs=("t0/a",)),
        second,
        metaop_of("t1/d", 1, curve, inputs=("t1/c",)),
    ]
    slices = tuple(
        slice_of(each, (0, 1), [device], at)
        for at, each, device in zip((0.0, 1.0, 2.0, 3.0), metaops, (0, large, 0, small), strict=True)
    )
    return arranging._Arrangement(
        make_problem(profile_of(*metaops), cluster_of(4, devices_per_node=2)), slices
    )


def test_devices_that_sum_nothing_are_exchanged_for_their_messages() -> None:
    arrangement = handing_on(large=2, small=2)
    arrangement.try_exchange([(1, 2)])
    assert arrangement.place == [0, 2, 1, 3]
    assert arrangement.on_one_node(0, 2)


def test_what_would_part_more_than_it_brings_together_is_left() -> None:
    arrangement = handing_on(large=1, small=2)
    arrangement.try_exchange([(1, 2)])
    assert arrangement.place == [0, 1, 2, 3]
    assert arrangement.on_one_node(0, 1)
