"""When gradient sums are predicted to run."""

from __future__ import annotations

import pytest
from drafts import draft_of, predicted, problem_of

from helpers.plans import cluster_of, metaop_of
from spindle_cli.costs.links import all_reduce_s
from spindle_cli.plan.schedule import Placed
from spindle_cli.profile.batch_sums import BatchSum


def test_sums_go_in_the_order_in_which_they_are_complete() -> None:
    """Device 1 shares parameters with device 0, which is through after 3 s, and others with device 2, which
    takes 30 s: the first sum is long over when the second one starts, though its parameters are used first.
    """
    problem = problem_of(
        cluster_of(3),
        metaop_of("a/m", 1, {1: 3.0}, parameters="p"),
        metaop_of("b/m", 1, {1: 30.0}, parameters="q"),
        metaop_of("c/m", 1, {1: 3.0}, parameters="p"),
        metaop_of("d/m", 1, {1: 3.0}, parameters="q"),
    )
    draft = draft_of(problem, (0, 0, 1, 1, 0.0), (1, 0, 1, 1, 0.0), (2, 0, 1, 1, 0.0), (3, 0, 1, 1, 3.0))
    prediction = predicted(problem, Placed(draft, ((0,), (2,), (1,), (1,))), 30.0)
    assert prediction.gradient_sum_s == pytest.approx(2 * (10e-6 + 2**19 / 5e9))


def test_statistics_summed_by_devices_further_apart_than_the_curve_has_them_come_on_top() -> None:
    sums = (BatchSum(num_bytes=1000, forward=2, backward=3),)
    cluster = cluster_of(4, devices_per_node=2)
    found = {}
    for devices in ((0, 1), (1, 2)):
        problem = problem_of(cluster, metaop_of("a/m", 4, {2: 3.0}, batch_sums=sums, param_bytes_per_op=0))
        draft = draft_of(problem, (0, 0, 4, 2, 0.0))
        found[devices] = predicted(problem, Placed(draft, (devices,)), 12.0)
        more_s = 4 * 5 * all_reduce_s(1000, devices, cluster)
        assert found[devices].transfer_s == pytest.approx(more_s)
    assert found[1, 2].iteration_s > found[0, 1].iteration_s > 12
