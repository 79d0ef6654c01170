"""What is worked out once and asked many times: times of shares, cuts, and which allocations have room."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.costs.same import Same
from spindle_cli.costs.share_times import share_on_type, share_seconds, shares_on_type
from spindle_cli.plan.best.micro_batches import in_micro_batches
from spindle_cli.plan.mixed.bound import mixed_bound
from spindle_cli.plan.mixed.cutting import allocations as allocations_module
from spindle_cli.plan.mixed.cutting.allocations import allocations
from spindle_cli.plan.mixed.cutting.cuts import cutter_of
from spindle_cli.plan.mixed.cutting.shares import share_times
from spindle_cli.plan.mixed.dispatch import LEAST_PRICE, MixedDispatcher, MixedGuide, _Choices
from spindle_cli.plan.mixed.pricing import pricing_of
from spindle_cli.plan.mixed.problem import make_mixed_problem
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


def test_choices_are_the_cheapest_within_a_time_and_of_equals_the_first() -> None:
    op_s = [4.0, 3.0, 3.0, 1.0]
    cost = [2.0, 5.0, 5.0, 9.0]
    choices = _Choices([3, 1, 2, 0], op_s, cost)
    assert choices.op_s == [1.0, 3.0, 3.0, 4.0]
    assert [choices.cheapest_within(s) for s in (0.99, 1.0, 2.9, 3.0, 4.0)] == [None, 3, 3, 1, 0]
    # what costs the same later in the order and earlier among the node's is the one
    assert _Choices([2, 0], [4.0, 0.0, 3.0], [5.0, 0.0, 5.0]).cheapest_within(4.0) == 0
    assert _Choices([], op_s, cost).cheapest_within(inf) is None


def test_tables_say_what_every_allocation_says_by_itself() -> None:
    """Also with other prices, which replace what is known of the ones before."""
    problem = make_mixed_problem(profile_on_types(net()), TWO)
    bound = mixed_bound(problem)
    dispatcher = MixedDispatcher(problem, bound)
    (points,) = (node.points for node in problem.nodes)
    random = Random(0)
    mean = sum(bound.prices) / 2
    for by in ((1.0, 1.0), (1.0, 5.0), (1.0, 1.0)):
        guide = MixedGuide(0.0, 2.0, (1.0,), (1.0,), by)
        dispatcher.costs(guide)
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
            choices = dispatcher.choices(0, free)
            assert sorted(choices.fastest_first) == room
            assert choices.op_s == sorted(points[number].op_s for number in room)
            fast = [number for number in room if points[number].op_s <= wanted_s]
            worth = {
                number: (counts[0] * fast_s + counts[1] * slow_s) * points[number].op_s
                for number in fast
                for counts in [points[number].counts or ()]
            }
            chosen = choices.cheapest_within(wanted_s)
            assert (chosen is None) == (not fast)
            assert chosen is None or worth[chosen] == pytest.approx(min(worth.values()))


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
    net = metaop_on_types("t/net", 1, {"cpu-a": 1.0, "cpu-b": 2.0, "cpu-c": 3.0}, batch_size=40)
    third = {point.counts[2] for point in allocations(net, cluster) if point.counts is not None}
    assert sorted(third) == of_third
