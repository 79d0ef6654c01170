"""Plans that leave nodes idle: where sums over the links to them cost more than they bring."""

from __future__ import annotations

import pytest

from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.check.run import check_plan
from spindle_cli.files.cluster import BetweenLink, Cluster, Link, Links
from spindle_cli.plan.best.find import PlanResult
from spindle_cli.plan.best.idle_nodes import on_best_part, parts_that_could_be_faster
from spindle_cli.plan.best.parts import parts_of
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.schedule import Candidate, whole_slice
from spindle_cli.plan.search.evaluate import evaluate_as_placed
from spindle_cli.plan.types import Plan
from spindle_cli.profile.mixed.seen import seen_on
from spindle_cli.profile.types import Profile
from spindle_cli.simulate.run import simulate

FAST_AND_SLOW = cluster_of_types({"fast": 1, "slow": 1})


def net(param_bytes: int, num_ops: int = 1, **sample_s: float) -> Profile:
    times = sample_s or {"fast": 1.0, "slow": 2.0}
    return profile_on_types(
        metaop_on_types("t/net", num_ops, times, batch_size=6, param_bytes_per_op=param_bytes)
    )


def devices_of(plan: Plan) -> list[tuple[int, ...]]:
    return [piece.devices for piece in plan.slices]


@pytest.mark.parametrize(
    ("sum_s", "devices", "iteration_s"), [(1.95, (0, 1), 5.95), (2.07, (0,), 6.0), (100.0, (0,), 6.0)]
)
def test_a_node_is_left_idle_where_its_sums_take_longer_than_it_saves(
    sum_s: float, devices: tuple[int, ...], iteration_s: float
) -> None:
    """Both take 4 s, one alone 6; each half of the sum goes each way at 10 GB/s, before the forward pass or
    behind the backward pass.
    """
    profile = net(int(sum_s * 1e10))
    plan = make_plan(profile, FAST_AND_SLOW)
    assert devices_of(plan) == [devices]
    assert plan.predicted.iteration_s == pytest.approx(iteration_s, rel=1e-4)
    assert simulate(plan).iteration_s == pytest.approx(iteration_s, rel=1e-3)
    assert check_plan(plan, profile) == ()
    said = [note for note in plan.notes if "idle:" in note]
    assert bool(said) == (devices == (0,))
    assert all(note.startswith("1 device stays idle") for note in said)


def test_what_is_planned_for_a_part_is_placed_on_its_devices() -> None:
    """Not the first ones; and those that stay idle are counted."""
    profile = net(10**12)
    plan = make_plan(profile, cluster_of_types({"slow": 2, "fast": 1}))
    assert devices_of(plan) == [(2,)]
    assert any(note.startswith("2 devices stay idle") for note in plan.notes)
    assert check_plan(plan, profile) == ()


def test_other_strategies_use_all_devices_whatever_sums_cost() -> None:
    plan = make_plan(net(10**12), FAST_AND_SLOW, "sequential")
    assert devices_of(plan) == [(0, 1)]


def behind_a_slow_link() -> Cluster:
    """Two types that are near each other, behind one that is not."""
    near = Link(latency_us=1, bandwidth_gb_per_s=100)
    links = Links(
        intra_node=near,
        inter_node=near,
        between=tuple(
            BetweenLink(groups=(kind, "far"), latency_us=1, bandwidth_gb_per_s=0.1)
            for kind in ("fast", "slow")
        ),
    )
    cluster: Cluster = cluster_of_types({"far": 1, "fast": 1, "slow": 1})
    return cluster.with_links(links)


def test_a_part_may_have_several_types() -> None:
    """With the third, 10/3 s of compute and 2 s of sums; without, 4 s and 2 ms; one alone takes 6."""
    profile = net(2 * 10**8, fast=1.0, slow=2.0, far=2.0)
    plan = make_plan(profile, behind_a_slow_link())
    assert [(piece.devices, piece.rows) for piece in plan.slices] == [((1, 2), (0, 4, 6))]
    assert plan.predicted.iteration_s == pytest.approx(4.002, rel=1e-3)
    assert check_plan(plan, profile) == ()


def test_parts_are_the_first_nodes_of_each_group_and_never_all() -> None:
    cluster = cluster_of_types({"fast": 2, "slow": 6}, devices_per_node=2)
    found = {part.devices for part in parts_of(cluster)}
    slow = [(), (2, 3), (2, 3, 4, 5), (2, 3, 4, 5, 6, 7)]
    everything = {(*fast, *some) for fast in ((), (0, 1)) for some in slow}
    assert found == everything - {(), tuple(range(8))}


def test_a_part_knows_the_links_of_its_own_groups_alone() -> None:
    by_devices = {part.devices: part.cluster for part in parts_of(behind_a_slow_link())}
    assert by_devices[1, 2].links.between == ()
    assert [link.groups for link in by_devices[0, 1].links.between] == [("fast", "far")]


def test_a_part_is_looked_at_only_where_a_schedule_in_it_could_be_faster() -> None:
    """Alone the fast one takes 6 s, the slow one 12 and both 4."""
    problem = make_problem(net(2**10), FAST_AND_SLOW)
    bound = lower_bound(problem)
    by_bound = parts_that_could_be_faster(problem, bound, 13.0)
    assert [(part.devices, pytest.approx(part.bound_s)) for part in by_bound] == [((0,), 6.0), ((1,), 12.0)]
    assert [part.devices for part in parts_that_could_be_faster(problem, bound, 12.0)] == [(0,)]
    assert parts_that_could_be_faster(problem, bound, 6.0) == []


def test_a_part_has_all_ops_to_run_on_what_its_devices_do_together() -> None:
    """Two ops of six samples: a sample of each second on the fast one, of every other on each of the others;
    all three take 3 s for an op and no fewer devices of them less than 4.
    """
    problem = make_problem(net(2**10, 2, fast=1.0, slow=2.0, far=2.0), behind_a_slow_link())
    parts = parts_that_could_be_faster(problem, lower_bound(problem), 100.0)
    assert {part.devices: pytest.approx(part.bound_s) for part in parts} == {
        (1, 2): 8.0,
        (0, 1): 8.0,
        (1,): 12.0,
        (0, 2): 12.0,
        (0,): 24.0,
        (2,): 24.0,
    }


@pytest.mark.parametrize(("sum_s", "leaves_idle"), [(2.05, False), (2.07, True)])
def test_a_part_is_planned_for_where_it_is_faster_by_a_hundredth(sum_s: float, leaves_idle: bool) -> None:
    """Both take 4 s and the sum, one alone 6: less than 99 % of it where the sum takes more than 2.0606 s."""
    problem = make_problem(net(int(sum_s * 1e10)), FAST_AND_SLOW)
    planned: list[Cluster] = []

    def plan_for(part: Cluster) -> PlanResult:
        planned.append(part)
        return on_devices(make_problem(seen_on(net(int(sum_s * 1e10)), part), part), (0,))

    found = on_best_part(problem, lower_bound(problem), on_devices(problem, (0, 1)), plan_for)
    assert [part.num_devices for part in planned] == [1] * leaves_idle
    assert [piece.devices for piece in found.best.slices] == [(0,) if leaves_idle else (0, 1)]


SAID = "idle: sums over the links to more nodes would take longer than these save."


def on_devices(problem: Problem, devices: tuple[int, ...], note: str | None = None) -> PlanResult:
    """The only MetaOp's plan on these."""
    (node,) = problem.nodes
    kinds = [problem.cluster.type_of[device] for device in devices]
    counts = tuple(kinds.count(kind) for kind in problem.cluster.types)
    point = next(point for point in node.points if point.of_types == counts)
    candidate = Candidate("spindle", (whole_slice(node, point, 0.0, point.op_s),), (devices,))
    evaluated = evaluate_as_placed(problem, candidate)
    assert evaluated is not None
    return PlanResult(evaluated, is_short=False, note=note)


def said_of(
    profile: Profile, cluster: Cluster, devices: tuple[int, ...], note: str | None = None
) -> PlanResult:
    """The best plan where one on these devices is that of a search, and no part has a plan."""
    problem = make_problem(profile, cluster)
    whole = on_devices(problem, devices, note)
    found = on_best_part(problem, lower_bound(problem), whole, lambda _: None)
    assert found.best is whole.best
    return found


@pytest.mark.parametrize(
    ("devices", "note", "expected"),
    [
        ((0,), None, f"2 devices stay {SAID}"),
        ((1, 2), None, f"1 device stays {SAID}"),
        ((0,), "Memory asks for less.", f"Memory asks for less. 2 devices stay {SAID}"),
        ((0, 1), None, None),  # of the second node's devices one: the other is not idle for its link
        ((0, 1), "Memory asks for less.", "Memory asks for less."),
    ],
)
def test_a_plan_of_a_search_that_leaves_nodes_idle_says_so(
    devices: tuple[int, ...], note: str | None, expected: str | None
) -> None:
    """By itself, not because a part of the cluster is planned for."""
    cluster = cluster_of_types({"fast": 1, "slow": 2})
    assert said_of(net(2**10), cluster, devices, note).note == expected


def test_a_node_that_would_not_compute_anyway_is_not_said_to_be_idle() -> None:
    """It takes longer for one of six samples than the fast ones for all of them; or else it would."""
    cluster = cluster_of_types({"fast": 2, "slow": 1})
    assert said_of(net(2**10, fast=1.0, slow=100.0), cluster, (0, 1)).note is None
    assert said_of(net(2**10, fast=1.0, slow=1.0), cluster, (0, 1)).note == f"1 device stays {SAID}"
