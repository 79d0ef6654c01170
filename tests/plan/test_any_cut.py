"""The bound of every schedule, however batches are cut, by hand."""

from __future__ import annotations

import pytest

from helpers.cut import cuttable, shares_of
from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.check.run import check_plan
from spindle_cli.plan.bound.any_cut import lower_bound_any_s
from spindle_cli.plan.make import make_plan


def test_work_goes_by_the_share_that_takes_least_for_a_sample() -> None:
    """A sample takes 0.25 s on shares of 8, 0.2 s on shares of 4 and 0.3 s on shares of 2."""
    net = cuttable("t/net", 3, {8: 2.0, 4: 0.8, 2: 0.6})
    assert lower_bound_any_s(profile_of(net), 1) == pytest.approx(3 * 8 * 0.2)
    assert lower_bound_any_s(profile_of(net), 2) == pytest.approx(3 * 8 * 0.2 / 2)
    # on three devices the chain of ops on shares of 2 is longer than a third of the work
    assert lower_bound_any_s(profile_of(net), 3) == pytest.approx(3 * 0.6)


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
