"""Exchanges of devices that change nothing are left out, and that changes no arrangement."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plans import cluster_of, metaop_of, profile_of, slice_of
from spindle_cli.account.traffic import Traffic
from spindle_cli.plan.placing import arrange as arranging
from spindle_cli.plan.problem import Problem, make_problem
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
