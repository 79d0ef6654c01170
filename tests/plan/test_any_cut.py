"""The bound of every schedule, however batches are cut: by hand, and below all plans."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.cut import cuttable, shares_of
from helpers.examples import examples
from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.check.run import check_plan
from spindle_cli.plan.bound.any_cut import AnyCut
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan, StrategyName
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, Profile


def lower_bound_any_s(profile: Profile, num_devices: int) -> float:
    return AnyCut(profile, cluster_of(num_devices)).lower_bound_s


def test_work_goes_by_the_share_that_takes_least_for_a_sample() -> None:
    """A sample takes 0.25 s on shares of 8, 0.2 s on shares of 4 and 0.3 s on shares of 2."""
    net = cuttable("t/net", 3, {8: 2.0, 4: 0.8, 2: 0.6})
    assert lower_bound_any_s(profile_of(net), 1) == pytest.approx(3 * 8 * 0.2)
    assert lower_bound_any_s(profile_of(net), 2) == pytest.approx(3 * 8 * 0.2 / 2)
    # On three devices samples are on shares of 2 and 3, of 0.6 and 0.7 s an op: the chain takes 2.1 - 0.3 x s
    # for a part x on shares of 2, and the work 8 (0.7 / 3 (1 - x) + 0.3 x): as long for x = 0.28.
    assert lower_bound_any_s(profile_of(net), 3) == pytest.approx(2.1 - 0.3 * 0.28)


def test_shares_of_two_devices_count_for_both_and_only_where_there_are_two() -> None:
    net = cuttable("t/net", 1, {8: 2.0})
    split = net.model_copy(update={"shares": (*shares_of({6: 0.5}, tp=2), *net.shares)})
    assert lower_bound_any_s(profile_of(split), 2) == pytest.approx(8 * 2 * (0.5 / 6) / 2)
    assert lower_bound_any_s(profile_of(split), 1) == pytest.approx(2.0)


def test_chains_add_up_and_what_cannot_be_cut_is_whole() -> None:
    first, second = (
        cuttable("t/a", 2, {8: 2.0, 1: 0.4}),
        cuttable("t/b", 1, {8: 1.0, 1: 0.3}, inputs=("t/a",)),
    )
    loss = metaop_of("t/loss", 1, {1: 0.5}, inputs=("t/b",))
    aside = cuttable("u/c", 1, {8: 0.6, 1: 0.2})
    profile = profile_of(first, second, loss, aside)
    assert lower_bound_any_s(profile, 100) == pytest.approx(2 * 0.4 + 0.3 + 0.5)
    work_s = 2 * 2.0 + 1.0 + 0.5 + 0.6
    assert lower_bound_any_s(profile, 1) == pytest.approx(work_s)


def test_plans_say_it_and_are_not_below_it() -> None:
    profile = profile_of(cuttable("t/net", 3, {8: 2.0, 4: 0.8, 2: 0.6}))
    plan = make_plan(profile, cluster_of(1), micro_batches={"t": 2})
    assert plan.predicted.lower_bound_any_s == pytest.approx(4.8)
    assert plan.predicted.compute_s == pytest.approx(4.8, rel=1e-6)  # below that of whole batches, 6 s
    assert check_plan(plan, profile) == ()
    wrong = plan.predicted.model_copy(update={"lower_bound_any_s": plan.predicted.compute_s * 1.001})
    found = check_plan(plan.model_copy(update={"predicted": wrong}))
    assert [(each.rule, each.where) for each in found] == [("lower-bound", "predicted.lower_bound_any_s")]


STRATEGIES: tuple[StrategyName, ...] = ("spindle", "sequential", "distmm", "optimus")
BATCH = 10
SIZES = (10, 5, 2, 1)  # of shares; on three or four devices they lie between these
# Bytes of a micro-batch are rounded up, which a check of memory would find of so small ops.
IN_WHOLE_SAMPLES = {"param_bytes_per_op": 0, "activation_bytes_per_op": BATCH * 1000}


def any_net(random: Random, name: str, sizes: Sequence[int], inputs: tuple[str, ...] = ()) -> MetaOpProfile:
    """Ops on shares of these sizes, on some of which a sample may take less than on all others; whole batches
    may run on a group of two devices, too.
    """
    fixed_s, sample_s = random.uniform(0, 3), random.uniform(0.1, 1)
    share_s = {size: (fixed_s + sample_s * size) * random.uniform(0.7, 1.3) for size in sizes}
    made = cuttable(name, random.randint(1, 3), share_s, inputs=inputs, **IN_WHOLE_SAMPLES)
    made = made.model_copy(update={"output_bytes": BATCH * 1000})
    if random.random() < 0.5:
        return made
    (split,) = shares_of({BATCH: share_s[BATCH] * random.uniform(0.3, 0.7)}, tp=2)
    seconds = {"forward_s": split.forward_s, "backward_s": split.backward_s}
    point = CurvePoint(num_devices=2, dp=1, tp=2, source="measured", **seconds)
    curve = sorted([*made.curve, point], key=lambda each: (each.num_devices, each.tp))
    shares = sorted([*made.shares, split], key=lambda each: (each.samples, each.tp))
    return made.model_copy(update={"curve": tuple(curve), "shares": tuple(shares)})


def any_plan(random: Random) -> tuple[Plan, Profile]:
    """Of two tasks, one of them of two MetaOps one behind the other, and the profile that it is of; some in
    micro-batches that are asked for.
    """
    sizes = {task: SIZES[: random.randint(1, len(SIZES))] for task in "ab"}
    first, then = (
        any_net(random, name, sizes["a"], inputs) for name, inputs in (("a/net", ()), ("a/head", ("a/net",)))
    )
    profile = profile_of(first, then, any_net(random, "b/net", sizes["b"]))
    counts = {task: BATCH // random.choice(own) for task, own in sizes.items()}
    made = make_plan(
        profile,
        cluster_of(random.randint(1, 4)),
        random.choice(STRATEGIES),
        effort=random.choice((0, 1)),
        micro_batches=random.choice((None, counts)),
    )
    return made, profile


@examples(300)
@given(st.integers(0, 10**6))
def test_no_plan_computes_faster_than_the_bound(seed: int) -> None:
    plan, profile = any_plan(Random(seed))
    bound_s = lower_bound_any_s(profile, plan.cluster.num_devices)
    assert check_plan(plan, profile) == ()
    assert plan.predicted.lower_bound_any_s == bound_s
    assert 0 < bound_s <= plan.predicted.compute_s <= plan.predicted.iteration_s
