"""Plans that leave nodes of one type idle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.find import PlanResult
from spindle_cli.plan.best.find_as_requested import find_as_requested
from spindle_cli.plan.best.idle_nodes import or_on_fewer
from spindle_cli.plan.best.request import PlanRequest
from spindle_cli.plan.search.posed import NO_SEARCH

# Two tasks of the same parameters. On one device 2 x 4 x 6 s, on two half of it, on three a third.
LINEAR = {1: 6.0, 2: 3.0, 3: 2.0, 6: 1.0}
SETTINGS = {"batch_size": 6, "parameters": "net", "param_bytes_per_op": 400 * 2**20}
PROFILE = profile_of(*(metaop_of(f"{task}/net", 4, LINEAR, **SETTINGS) for task in "ab"))
ASKED = PlanRequest(effort=0)


def odd(gb_per_s: float) -> Cluster:
    """A node of one device, and one of two, with a link between them."""
    cluster = cluster_of(1, memory_gib=400)
    (group,) = cluster.nodes
    link = cluster.links.inter_node.model_copy(update={"bandwidth_gb_per_s": gb_per_s})
    return cluster.changed(
        nodes=(group, group.model_copy(update={"devices": 2, "name": "pair"})),
        links=cluster.links.model_copy(update={"inter_node": link}),
    )


def found_on(cluster: Cluster, request: PlanRequest) -> PlanResult | None:
    return find_as_requested(PROFILE, cluster, request)


def planned(cluster: Cluster, request: PlanRequest = ASKED) -> PlanResult:
    found = found_on(cluster, request)
    assert found is not None
    return found


def test_devices_behind_a_slow_link_stay_idle_where_the_others_are_faster_by_themselves() -> None:
    """Two devices take 24 s and their sums. Three compute for 16 s, and sum 1.6 GiB over 0.1 GB/s."""
    cluster = odd(0.1)
    whole = planned(cluster, replace(ASKED, strategy="sequential"))
    assert whole.best.prediction.iteration_s > 30
    best = or_on_fewer(PROFILE, cluster, ASKED, whole, found_on)
    assert {device for piece in best.best.slices for device in piece.devices} == {1, 2}
    alone_s = planned(cluster_of(2, memory_gib=400)).best.prediction.iteration_s
    assert best.best.prediction.iteration_s == pytest.approx(alone_s, rel=1e-3)
    assert best.note == (
        "1 device stays idle: sums over the links to more nodes would take longer than these save."
    )
    for other in (replace(ASKED, strategy="sequential"), replace(ASKED, effort=NO_SEARCH)):
        assert or_on_fewer(PROFILE, cluster, other, whole, found_on) is whole


def test_no_part_is_planned_for_in_which_no_schedule_ends_before_the_best_plan() -> None:
    """Three devices need 16 s for the work, two 24."""
    cluster = odd(100.0)
    whole = planned(cluster)
    assert whole.best.prediction.iteration_s < 20

    def find(part: Cluster, request: PlanRequest) -> PlanResult | None:
        raise AssertionError(f"planned for {part.num_devices} devices by {request.strategy}")

    assert or_on_fewer(PROFILE, cluster, ASKED, whole, find) is whole


@pytest.mark.parametrize(("times", "is_taken"), [(0.999, False), (1.009, False), (1.011, True)])
def test_a_part_has_to_be_a_hundredth_faster_than_the_best_plan(times: float, is_taken: bool) -> None:
    """`times`: the iteration of the plan on all devices over that on two of them."""
    cluster = odd(0.1)
    whole = planned(cluster, replace(ASKED, strategy="sequential"))
    alone_s = or_on_fewer(PROFILE, cluster, ASKED, whole, found_on).best.prediction.iteration_s
    prediction = replace(whole.best.prediction, iteration_s=times * alone_s)
    known = replace(whole, best=replace(whole.best, prediction=prediction))
    assert (or_on_fewer(PROFILE, cluster, ASKED, known, found_on) is not known) == is_taken
