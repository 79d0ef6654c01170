"""What is worked out once and asked many times: times of shares, cuts, and which allocations have room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from random import Random

import pytest

from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.costs.shares import Same, share_on_type, share_seconds, shares_on_type
from spindle_cli.plan.best.micro_batches import in_micro_batches
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.bound.pricing import pricing_of
from spindle_cli.plan.cutting import allocations as allocations_module
from spindle_cli.plan.cutting.allocations import allocations
from spindle_cli.plan.cutting.cuts import cutter_of
from spindle_cli.plan.cutting.shares import share_times
from spindle_cli.plan.mixed.dispatch import LEAST_PRICE, Choices, MixedDispatcher, MixedGuide
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import Point
from spindle_cli.profile.types import MetaOpProfile

TIMES = {"fast": 1.0, "slow": 2.0}
TWO = cluster_of_types({"fast": 3, "slow": 2})


def net(**more: object) -> MetaOpProfile:
    return metaop_on_types("t/net", 2, TIMES, batch_size=6, **more)


def test_a_key_is_equal_to_that_of_the_same_object_alone() -> None:
    one, alike = [1, 2], [1, 2]
    assert Same(one) == Same(one)
    assert hash(Same(one)) == hash(Same(one))
    assert Same(one) != Same(alike)
    assert Same(one) != one


def test_shares_are_kept_by_the_objects_that_hold_them() -> None:
    """Another batch, other shares or another curve of the same size are not those that are known."""
    own = net()
    assert shares_on_type(own, "fast", 1) is shares_on_type(own.model_copy(), "fast", 1)
    assert shares_on_type(own, "fast", 1) is not shares_on_type(own, "slow", 1)
    for samples, seconds in ((3, 3.0), (3.0, 3.0), (2.5, 2.5)):
        for _ in range(2):  # found, and known
            found = share_on_type(own, "fast", samples, 1)
            assert found is not None
            assert found.forward_s + found.backward_s == pytest.approx(seconds)
    slower = own.model_copy(
        update={"shares": tuple(each.model_copy(update={"forward_s": 7.0}) for each in own.shares)}
    )
    found = share_on_type(slower, "fast", 3, 1)
    assert found is not None
    assert found.forward_s == 7.0
    assert share_on_type(own, "fast", 7, 1) is None
    assert share_on_type(own, "fast", 7, 1) is None
    # beyond the shares the curve says it, by the batch
    few = own.model_copy(update={"shares": own.shares[:1]})
    assert share_on_type(few, "fast", 6, 1) is not None
    assert share_on_type(few.model_copy(update={"batch_size": 13}), "fast", 6, 1) is None
    of_fast = tuple(share for share in own.shares if share.device == "fast")
    assert [share_seconds(of_fast, samples, 1) is None for samples in (1, 6, 7)] == [False, False, True]
    assert share_seconds(of_fast, 1, 2) is None


def test_what_is_made_of_the_same_curve_and_shares_is_the_same_object() -> None:
    own = net()
    (plain,), (again,) = share_times(own, TWO), share_times(own, TWO, forwards=2)
    assert share_times(own.model_copy(), TWO)[0].of_types[0] is plain.of_types[0]
    assert again.of_types[0] is not plain.of_types[0]
    assert again.of_types[0].op_s[3] == pytest.approx(plain.of_types[0].op_s[3] * 4 / 3)
    assert cutter_of(plain) is cutter_of(share_times(own, TWO)[0])
    assert pricing_of(plain, (3, 2)) is pricing_of(plain, (3, 2))
    assert pricing_of(plain, (3, 2)) is not pricing_of(plain, (3, 1))
    assert allocations(own, TWO) is allocations(own, TWO)
    fewer = allocations(own, cluster_of_types({"fast": 1, "slow": 2}))
    assert {point.counts for point in fewer} == {(1, 0), (0, 1), (0, 2), (1, 1)}


def test_micro_batches_of_one_size_have_one_curve() -> None:
    profile = profile_on_types(net())
    first, again = (in_micro_batches(profile, {"t": 2}, TWO).one.metaops[0] for _ in range(2))
    assert first.curve is again.curve
    others = in_micro_batches(profile, {"t": 3}, TWO).one.metaops[0]
    assert max(point.op_s for point in others.curve) == pytest.approx(4.0)  # 2 samples on the slow type
    narrow = in_micro_batches(profile, {"t": 2}, cluster_of_types({"fast": 1, "slow": 1})).one.metaops[0]
    assert max(point.num_devices for point in narrow.curve) == 1  # 3 samples are no two equal shares
    assert max(point.num_devices for point in first.curve) == 3


def test_a_mix_is_of_the_two_allocations_that_cost_least_at_its_time() -> None:
    """1 s for 9, 2 s for 4, 4 s for 2; 3 s for 3.5 costs more than the mix of its neighbours, 3."""
    op_s, cost = [4.0, 3.0, 2.0, 1.0], [2.0, 3.5, 4.0, 9.0]
    choices = Choices([3, 2, 1, 0], op_s, cost)
    assert choices.op_s == [1.0, 2.0, 3.0, 4.0]
    assert choices.mixed(0.99) is None
    assert choices.mixed(1.0) == (3, 1.0)
    assert choices.mixed(1.75) == (3, 0.25)  # a quarter of the ops take 1 s, the others 2 s
    assert choices.mixed(2.0) == (2, 1.0)
    assert choices.mixed(3.0) == (2, 0.5)
    assert choices.mixed(4.0) == choices.mixed(inf) == (0, 1.0)
    below = Choices([3, 2, 1, 0], op_s, [2.0, 2.99, 4.0, 9.0])
    assert below.mixed(3.0) == (1, 1.0)


def test_a_mix_has_nothing_that_costs_as_much_as_what_is_faster() -> None:
    assert Choices([0, 1, 2], [1.0, 2.0, 3.0], [5.0, 5.0, 4.0]).mixed(2.0) == (0, 0.5)
    assert Choices([0, 1], [1.0, 1.0], [5.0, 4.0]).mixed(1.0) == (1, 1.0)
    assert Choices([], [], []).mixed(inf) is None


def test_choices_are_the_cheapest_within_a_time_and_of_equals_the_first() -> None:
    choices = Choices([3, 1, 2, 0], [4.0, 3.0, 3.0, 1.0], [2.0, 5.0, 5.0, 9.0])
    assert choices.op_s == [1.0, 3.0, 3.0, 4.0]
    assert [choices.cheapest(s) for s in (0.99, 1.0, 2.9, 3.0, 4.0)] == [None, 3, 3, 1, 0]
    # what costs the same later in the order and earlier among the node's is the one
    assert Choices([2, 0], [4.0, 0.0, 3.0], [5.0, 0.0, 5.0]).cheapest(4.0) == 0
    assert Choices([], [], []).cheapest(inf) is None


def test_mixes_cost_as_little_as_the_best_of_all_pairs() -> None:
    """Also with other prices, and with those of before again."""
    problem = make_problem(profile_on_types(net()), TWO)
    bound = lower_bound(problem)
    dispatcher = MixedDispatcher(problem, bound)
    (points,) = (node.points for node in problem.nodes)
    random = Random(0)
    mean = sum(bound.prices) / 2
    for by in ((1.0, 1.0), (1.0, 5.0), (1.0, 1.0)):
        priced = dispatcher.priced(MixedGuide(0.0, 2.0, (1.0,), (1.0,), by))
        own = [max(price, LEAST_PRICE * mean) for price in bound.prices]
        fast_s, slow_s = (price * times for price, times in zip(own, by, strict=True))
        for _ in range(40):
            free = (random.randint(0, 3), random.randint(0, 2))
            wanted_s = random.uniform(0.5, 12.0)
            room = [
                number
                for number, point in enumerate(points)
                if all(own <= most for own, most in zip(point.counts or (), free, strict=True))
            ]
            choices = dispatcher.choices(0, free, priced)
            assert sorted(choices.fastest_first) == room
            assert choices.op_s == sorted(points[number].op_s for number in room)
            worth = {
                number: (counts[0] * fast_s + counts[1] * slow_s) * points[number].op_s
                for number in room
                for counts in [points[number].counts or ()]
            }
            fast = [number for number in room if points[number].op_s <= wanted_s]
            chosen = choices.mixed(wanted_s)
            assert (chosen is None) == (not fast)
            if chosen is not None:
                best = min(_mix(points, worth, one, other, wanted_s) for one in fast for other in room)
                point, share = chosen
                assert points[point].op_s <= wanted_s
                others = (_mix(points, worth, point, other, wanted_s, share) for other in room)
                assert min(others) == pytest.approx(best)


def _mix(
    points: Sequence[Point],
    worth: Mapping[int, float],
    one: int,
    other: int,
    seconds: float,
    share: float | None = None,
) -> float:
    """What ops cost of which so many run on `one`, and the rest on `other`, that they take so long on average
    or less; infinite where they do not.

    Args:
        share: of the ops, on `one`; None: as few as will do.
    """
    one_s, other_s = points[one].op_s, points[other].op_s
    if share is None:
        share = (other_s - seconds) / (other_s - one_s) if other_s > seconds else 0.0
    if share * one_s + (1 - share) * other_s > seconds * (1 + 1e-9):
        return inf
    return share * worth[one] + (1 - share) * worth[other]


@pytest.mark.parametrize(
    ("most", "of_third"),
    [
        # 10 x 10 x 14 combinations of the fine list, with none and all; 8 x 8 x 10 of the middle one.
        (1400, [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20]),
        (1399, [0, 1, 2, 3, 4, 6, 8, 12, 16, 20]),
        (640, [0, 1, 2, 3, 4, 6, 8, 12, 16, 20]),
        (639, [0, 1, 2, 4, 8, 16, 20]),
        (1, [0, 1, 2, 4, 8, 16, 20]),
    ],
)
def test_so_fine_a_list_of_numbers_of_devices_is_tried_as_has_no_more_combinations(
    monkeypatch: pytest.MonkeyPatch, most: int, of_third: list[int]
) -> None:
    monkeypatch.setattr(allocations_module, "MOST_COMBINATIONS", most)
    cluster = cluster_of_types({"cpu-a": 10, "cpu-b": 10, "cpu-c": 20})
    # Of equal shares what was worked out is kept, so each case has its own.
    times = {kind: seconds * most for kind, seconds in (("cpu-a", 1.0), ("cpu-b", 2.0), ("cpu-c", 3.0))}
    net = metaop_on_types("t/net", 1, times, batch_size=40)
    third = {point.counts[2] for point in allocations(net, cluster) if point.counts is not None}
    assert sorted(third) == of_third
