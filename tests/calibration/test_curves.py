"""Points that did not run: hand-solved."""

from __future__ import annotations

from fractions import Fraction

import pytest

from helpers.cut import cuttable, shares_of
from helpers.plans import metaop_of, profile_of
from spindle_cli.calibrate.times.curves import Factor, calibrated_metaops, neighbours
from spindle_cli.calibrate.times.points import Measured, OpTimes
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, Profile

CURVE = {1: 8.0, 2: 4.0, 4: 2.0, 8: 1.0}


def ran(op_s: float, times: tuple[float, float]) -> Measured:
    """What a third of an op's seconds forward and two thirds backward become."""
    return Measured(OpTimes(op_s / 3 * times[0], op_s * 2 / 3 * times[1]), weight=1, steps=5)


def factors(
    profile: Profile, measured: dict[tuple[str, int, int], Measured]
) -> dict[tuple[str, int], tuple[float, float]]:
    found = {}
    for before, after in zip(profile.metaops, calibrated_metaops(profile, measured), strict=True):
        for old, new in zip(before.curve, after.curve, strict=True):
            found[after.name, new.num_devices] = (
                new.forward_s / old.forward_s,
                new.backward_s / old.backward_s,
            )
    return found


def point(n: int, tp: int = 1) -> CurvePoint:
    return CurvePoint(num_devices=n, dp=n // tp, tp=tp, forward_s=1, backward_s=2, source="composed")


def test_between_two_that_ran_the_factor_goes_with_the_logarithm_and_beyond_it_stays() -> None:
    profile = profile_of(metaop_of("a/x", 1, CURVE))
    measured = {("a/x", 2, 1): ran(4.0, (1.0, 3.0)), ("a/x", 8, 1): ran(1.0, (2.0, 2.0))}
    assert {n: pytest.approx(times) for (_, n), times in factors(profile, measured).items()} == {
        1: (1.0, 3.0),
        2: (1.0, 3.0),
        4: (1.5, 2.5),
        8: (2.0, 2.0),
    }


def test_other_points_follow_those_of_their_own_degree_of_tensor_parallelism() -> None:
    own = {(4, 1): Factor(2, 2), (2, 2): Factor(3, 5)}
    assert neighbours(own, point(8, tp=2)) == Factor(3, 5)
    assert neighbours(own, point(8, tp=1)) == Factor(2, 2)
    # None of its own: the mean of those on so many devices.
    assert neighbours(own, point(4, tp=4)) == Factor(2.5, 3.5)
    assert neighbours({}, point(4)) is None


def test_metaops_of_the_same_kind_follow_those_that_ran_on_the_same_share() -> None:
    """b has half of a's batch: its point on 2 devices is a's share on 4."""
    a = metaop_of("a/x", 1, {2: 4.0, 4: 2.0}, op_kind="layer", flops_per_op=800.0)
    b = metaop_of("b/x", 1, {1: 4.0, 2: 2.0, 4: 1.0}, op_kind="layer", flops_per_op=400.0, batch_size=4)
    other = metaop_of("c/x", 1, {2: 2.0}, op_kind="layer", flops_per_op=800.0, batch_size=4)
    measured = {("a/x", 4, 1): ran(2.0, (7.0, 9.0)), ("b/x", 4, 1): ran(1.0, (2.0, 3.0))}
    found = factors(profile_of(a, b, other), measured)
    assert found["b/x", 2] == pytest.approx((7.0, 9.0))
    assert found["b/x", 1] == pytest.approx((2.0, 3.0))
    assert found["a/x", 2] == pytest.approx((7.0, 9.0))
    assert found["c/x", 2] == (1.0, 1.0)  # more work for each sample: another kind


def test_shares_of_the_same_kind_follow_those_that_ran_on_as_many_samples() -> None:
    """a runs in micro-batches of 2 samples. b's curve has no such share; its own 4, which ran, is nearer."""
    work = {"op_kind": "layer", "flops_per_op": 800.0}
    a, b = (cuttable(f"{task}/x", 1, {8: 8.0, 4: 4.0, 2: 2.0, 1: 1.0}, **work) for task in "ab")
    a, b = (each.model_copy(update={"curve": each.curve[:2]}) for each in (a, b))
    measured = {("a/x", 4, 1): ran(2.0, (7.0, 9.0)), ("b/x", 2, 1): ran(4.0, (2.0, 3.0))}
    _, found = calibrated_metaops(profile_of(a, b), measured)
    times = {share.samples: (share.forward_s, share.backward_s) for share in found.shares}
    assert times[4] == pytest.approx((4 / 3 * 2, 8 / 3 * 3))
    assert times[2] == pytest.approx((2 / 3 * 7, 4 / 3 * 9))
    assert times[1] == pytest.approx((1 / 3 * 2, 2 / 3 * 3))


def test_a_share_of_another_degree_of_tensor_parallelism_is_one_of_its_own() -> None:
    """3 samples ran on two devices each; on one, nothing is known of them but what lies between 2 and 4."""
    net = cuttable("a/net", 1, {8: 8.0, 4: 4.0, 2: 2.4})
    net = net.model_copy(update={"shares": (*net.shares, *shares_of({9: 5.0, 2: 1.5}, tp=2))})
    net = net.model_copy(
        update={"shares": tuple(sorted(net.shares, key=lambda each: (each.samples, each.tp)))}
    )
    split = Measured(OpTimes(3.0, 4.0), weight=1, steps=5)
    (found,) = calibrated_metaops(profile_of(net), {("a/net", Fraction(8, 3), 2): split})
    shares = [(each.samples, each.tp) for each in found.shares]
    assert shares == [(2, 1), (2, 2), (3, 2), (4, 1), (8, 1), (9, 2)]
    times = {(each.samples, each.tp): (each.forward_s, each.backward_s) for each in found.shares}
    assert times[3, 2] == (3.0, 4.0)
    assert [each.source for each in found.shares if each.tp == 2] == ["fitted", "measured", "fitted"]
    # Between 2 and 9 were 2 s at 3 samples: 2/3 s forward and 4/3 s backward.
    assert times[2, 2] == pytest.approx((0.5 * 4.5, 1.0 * 3.0))


def test_what_ran_counts_to_a_thousandth() -> None:
    """3 samples lie at 3.2 s, a third of it forward, between 2 and 4: 2 and 3 took a thousandth longer."""
    net = cuttable("a/net", 1, {8: 8.0, 4: 4.0, 2: 2.4})
    measured = {("a/net", Fraction(8, 3), 1): ran(3.2, (1.001, 1.0)), ("a/net", 4, 1): ran(2.4, (1.0, 1.001))}
    (found,) = calibrated_metaops(profile_of(net), measured)
    times = {each.samples: (each.forward_s, each.backward_s) for each in found.shares}
    assert times[3] == pytest.approx((3.2 / 3 * 1.001, 6.4 / 3))
    assert times[2] == pytest.approx((0.8, 1.6 * 1.001))


def test_equal_ops_split_in_as_many_parts_alone_are_followed() -> None:
    """a ran on shares of 4 samples that two devices hold; b's of 4 samples on one device each follow b."""
    points = (point(1), point(2), point(4, tp=2))
    work = {"op_kind": "layer", "flops_per_op": 800.0}
    a, b = (metaop_of(f"{task}/x", 1, {1: 3.0}, **work) for task in "ab")
    a, b = (each.model_copy(update={"curve": points}) for each in (a, b))
    measured = {("a/x", 2, 2): ran(3.0, (7.0, 9.0)), ("b/x", 1, 1): ran(3.0, (2.0, 4.0))}
    _, found = calibrated_metaops(profile_of(a, b), measured)
    times = [(each.forward_s, each.backward_s) for each in found.curve]
    assert times == [pytest.approx(each) for each in ((2, 8), (2, 8), (7, 18))]


def test_a_share_that_the_profile_has_at_its_degree_stays_one() -> None:
    net = cuttable("a/net", 1, {8: 8.0, 4: 4.0})
    net = net.model_copy(update={"shares": shares_of({8: 5.0, 4: 3.0, 2: 1.5}, tp=2)})
    split = Measured(OpTimes(3.0, 4.0), weight=1, steps=5)
    (found,) = calibrated_metaops(profile_of(net), {("a/net", 2, 2): split})
    shares = [(each.samples, each.tp, each.source) for each in found.shares]
    assert shares == [(2, 2, "fitted"), (4, 2, "measured"), (8, 2, "fitted")]


def test_collectives_of_a_share_that_ran_take_no_more_than_it_did() -> None:
    net = cuttable("a/net", 1, {8: 8.0, 4: 4.0, 2: 2.0})
    shares = tuple(each.model_copy(update={"communication_s": 0.5}) for each in net.shares)
    measured = {("a/net", Fraction(8, 3), 1): Measured(OpTimes(0.125, 0.125), weight=1, steps=5)}
    (found,) = calibrated_metaops(profile_of(net.model_copy(update={"shares": shares})), measured)
    share = next(each for each in found.shares if each.samples == 3)
    assert (share.forward_s, share.communication_s) == (0.125, 0.25)


@pytest.mark.parametrize("op_kind", [None, "other"])
def test_metaops_of_other_kinds_and_of_none_that_is_known_do_not_follow(op_kind: str | None) -> None:
    a = metaop_of("a/x", 1, {2: 4.0}, op_kind=op_kind)
    b = metaop_of("b/x", 1, {2: 4.0}, op_kind=None if op_kind is None else "layer")
    found = factors(profile_of(a, b), {("a/x", 2, 1): ran(4.0, (2.0, 2.0))})
    assert found["b/x", 2] == (1.0, 1.0)


def test_a_pass_that_the_profile_has_at_no_time_follows_both_together() -> None:
    frozen = MetaOpProfile(
        name="a/x",
        task="a",
        num_ops=1,
        batch_size=8,
        curve=tuple(
            CurvePoint(num_devices=n, dp=n, forward_s=2 / n, backward_s=0, source="measured") for n in (1, 2)
        ),
    )
    measured = {("a/x", 1, 1): Measured(OpTimes(5.0, 1.0), 1, 5)}
    (found,) = calibrated_metaops(profile_of(frozen), measured)
    assert [(each.forward_s, each.backward_s) for each in found.curve] == [(5.0, 1.0), (2.5, 0.0)]


def test_collectives_take_no_more_than_the_op() -> None:
    split = metaop_of("a/x", 1, {1: 3.0, 2: 3.0})
    curve = tuple(each.model_copy(update={"communication_s": 2.0}) for each in split.curve)
    split = split.model_copy(update={"curve": curve})
    (found,) = calibrated_metaops(profile_of(split), {("a/x", 2, 1): ran(3.0, (0.5, 0.5))})
    assert [each.communication_s for each in found.curve] == [1.5, 1.5]
    assert [each.source for each in found.curve] == ["fitted", "measured"]


def test_shares_follow_the_curve() -> None:
    """Of a batch of 8: those that the curve has are the curve's; a smaller one goes with the nearest."""
    share_s = {8: 8.0, 4: 4.0, 2: 2.4}
    net = cuttable("a/net", 1, share_s)
    net = net.model_copy(update={"curve": net.curve[:2], "shares": (*net.shares, *shares_of({9: 1.0}, tp=2))})
    (found,) = calibrated_metaops(profile_of(net), {("a/net", 2, 1): ran(4.0, (2.0, 3.0))})
    times = {share.samples: (share.forward_s, share.backward_s, share.source) for share in found.shares}
    assert times[4] == pytest.approx((8 / 3, 8.0, "measured"))
    assert times[8] == (found.curve[0].forward_s, found.curve[0].backward_s, "fitted")
    assert times[2] == (pytest.approx(1.6), pytest.approx(4.8), "fitted")
    assert times[9] == (pytest.approx(1 / 3), pytest.approx(2 / 3), "measured")  # nothing of its tp has run
    (same,) = calibrated_metaops(profile_of(net), {("a/net", 2, 1): ran(4.0, (1.0, 1.0))})
    assert same.shares == net.shares
