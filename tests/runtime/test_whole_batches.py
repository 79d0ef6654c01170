"""Plans that cut what needs its whole batch: written by hand, as the planner makes none."""

from __future__ import annotations

from collections.abc import Mapping

import norm_toys
import pytest
import runtime_toys
from hand_plans import Placement, in_micro_batches, place, whole

from helpers.analysed import analysed
from spindle_cli.errors import InputError
from spindle_cli.plan.types import Plan
from spindle_cli.program.link import link
from spindle_cli.runtime.communication.wiring import wire
from spindle_cli.runtime.part.whole_batches import require_whole_batches
from spindle_cli.workload.graph import WorkloadGraph


def require(graph: WorkloadGraph, plan: Plan) -> None:
    require_whole_batches(wire(graph, link(plan)).slices, "plan.yaml")


def cut(graph: WorkloadGraph, counts: Mapping[str, int]) -> Plan:
    return in_micro_batches(place(graph, 1, whole(graph, (0,))), counts, seed=1)


@pytest.fixture(scope="module")
def graph() -> WorkloadGraph:
    return analysed(runtime_toys.build())


def test_what_may_be_cut_is_cut(graph: WorkloadGraph) -> None:
    require(graph, place(graph, 4, whole(graph, (0, 1))))
    require(graph, cut(graph, {"classify": 3}))


def test_operators_whose_samples_depend_on_each_other_have_all_of_them(graph: WorkloadGraph) -> None:
    with pytest.raises(InputError, match=r"plan.yaml: slice pairs/contrast\[0:1\] 1/2 is given 1/2 of its"):
        require(graph, cut(graph, {"pairs": 2}))
    two: list[Placement] = [
        (name, ops, (0, 1) if name == "pairs/contrast" else devices)
        for name, ops, devices, *_ in whole(graph, (0,))
    ]
    with pytest.raises(InputError, match=r"a batch in 2 shares, and .* depends on all of its samples"):
        require(graph, place(graph, 2, two))


def test_statistics_are_of_all_samples_together() -> None:
    """Shares of a batch sum them, micro-batches would each have their own."""
    graph = analysed(norm_toys.build())
    require(graph, place(graph, 2, whole(graph, (0, 1))))
    with pytest.raises(InputError, match=r"1/2 of its batch, and .* sums or gathers something over all"):
        require(graph, cut(graph, {"many": 2}))
