"""Plans that cut what needs its whole batch: written by hand, as the planner makes none."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import norm_toys
import pytest
import runtime_toys
import torch
from hand_plans import Placement, in_micro_batches, place, whole

from helpers.analysed import analysed
from spindle_cli.errors import InputError, WorkloadError
from spindle_cli.plan.types import Plan
from spindle_cli.program.link import link
from spindle_cli.runtime.communication.wiring import wire
from spindle_cli.runtime.part.localise import require_whole_batches
from spindle_cli.runtime.step.compute import check_shapes
from spindle_cli.workload.graph import ValueSpec, WorkloadGraph


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


def _handing_on(coupled: bool, shape: tuple[int, ...], varies: bool = False) -> None:
    spec = ValueSpec("h", (4, 3), torch.float32, 0, 1, requires_grad=False)
    task = SimpleNamespace(task=SimpleNamespace(name="t"), varying={"x": (True,)} if varies else {})
    wired = SimpleNamespace(task=task, ops=[SimpleNamespace(coupled=coupled)], outputs=[spec])
    check_shapes(SimpleNamespace(wired=wired), {"h": torch.zeros(shape)})  # type: ignore[arg-type]


def test_what_an_op_that_runs_whole_hands_on_has_the_shape_that_was_seen() -> None:
    """Its code may decide otherwise for a later batch, and other devices wait for so many entries."""
    _handing_on(True, (4, 3))
    with pytest.raises(WorkloadError, match=r"has shape \(4, 2\) for this batch, and \(4, 3\) for"):
        _handing_on(True, (4, 2))
    _handing_on(True, (4, 2), varies=True)
    _handing_on(False, (2, 3))
