"""The search over everything at once where memory is short: cases solved by hand, and what it estimates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from candidates import problem_of
from estimates import estimated

from helpers.plans import cluster_of, metaop_of, slice_of
from spindle_cli.account.types import Pass
from spindle_cli.check.run import check_plan
from spindle_cli.files.cluster import Cluster, GroupLinks, Link, Links, NodeGroup
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.best.find import PlanResult, find
from spindle_cli.plan.best.in_memory import LINKS_DECIDE
from spindle_cli.plan.best.posed import ProblemPoser
from spindle_cli.plan.best.written import Bounds, plan_of
from spindle_cli.plan.bound.any_cut import AnyCut
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.compiled import sources_digest
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.ordering.orders import mirrored
from spindle_cli.plan.ordering.timed import timed
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.refine.evaluate import SLICE_COST
from spindle_cli.plan.refine.moves import SCALE, draw_what_gains
from spindle_cli.plan.refine.schedule import OFTEN
from spindle_cli.plan.refine.search import Search, refined
from spindle_cli.plan.refine.tables import MOST_KINDS
from spindle_cli.plan.search.evaluate import EvaluatedCandidate, measure_as_they_are
from spindle_cli.plan.types import Slice
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, Profile
from spindle_cli.simulate.run import simulate
from spindle_cli.units import GIB

PASSES = 100_000
MIB_OF_OP = 64


def gpus(num_devices: int, memory_gib: float = 24.0, *, per_node: int | None = None) -> Cluster:
    per_node = per_node or num_devices
    group = NodeGroup(
        count=num_devices // per_node, devices=per_node, device="a800-80gb", memory_gib=memory_gib
    )
    return Cluster(
        name="gpus",
        nodes=(group,),
        links=Links(
            intra_node=Link(latency_us=3, bandwidth_gb_per_s=160),
            inter_node=Link(latency_us=14, bandwidth_gb_per_s=46),
        ),
    )


def evaluated(problem: Problem, slices: list[Slice], order: list[Pass] | None = None) -> EvaluatedCandidate:
    in_order = order or mirrored(range(len(slices)))
    found = measure_as_they_are(problem, "by hand", timed(problem, slices, in_order))
    assert found is not None, "it fits"
    return found


def gib_op(name: str, num_ops: int, op_s: dict[int, float], gib: float, **more: Any) -> MetaOpProfile:
    """A MetaOp whose activations take so many GiB an op on one device."""
    return metaop_of(name, num_ops, op_s, activation_bytes_per_op=int(gib * GIB), **more)


def two_tasks() -> tuple[Problem, EvaluatedCandidate]:
    """Two tasks that gain nothing by a second device, one after the other on both; side by side they take
    half as long.
    """
    tasks = [gib_op(f"{name}/net", 4, {1: 1.0, 2: 0.999}, 1.0) for name in "ab"]
    problem = problem_of(gpus(2), *tasks)
    slices = [slice_of(task, (0, 4), (0, 1), at_s) for task, at_s in zip(tasks, (0.0, 4.0), strict=True)]
    return problem, evaluated(problem, slices)


def test_tasks_that_gain_nothing_by_more_devices_run_side_by_side() -> None:
    problem, begun = two_tasks()
    found = refined(problem, [begun], 0)
    assert found is not None
    assert begun.prediction.compute_s == pytest.approx(2 * 4 * 0.999)
    assert found.prediction.compute_s == pytest.approx(4.0)
    assert sorted(len(piece.devices) for piece in found.slices) == [1, 1]


def test_a_task_goes_to_the_device_that_is_free() -> None:
    """Nothing else is to be changed: both run on one device, of two."""
    tasks = [gib_op(f"{name}/net", 1, {1: 1.0}, 1.0) for name in "ab"]
    problem = problem_of(gpus(2), *tasks)
    begun = evaluated(
        problem, [slice_of(task, (0, 1), (0,), at_s) for task, at_s in zip(tasks, (0.0, 1.0), strict=True)]
    )
    found = refined(problem, [begun], 0)
    assert found is not None
    assert found.prediction.compute_s == pytest.approx(0.5 * begun.prediction.compute_s)


def recomputing() -> tuple[Problem, MetaOpProfile]:
    """Eight ops with 4 GiB of activations each, on a device that has no room for all."""
    task = gib_op("a/net", 8, {1: 3.0}, 4.0)
    return problem_of(gpus(1, 24.0), task), task


def part_recomputed(problem: Problem, task: MetaOpProfile, count: int) -> EvaluatedCandidate | None:
    """Its first so many ops recompute."""
    slices = [slice_of(task, (0, count), (0,), 0.0, recompute=True)]
    if count < task.num_ops:
        slices.append(slice_of(task, (count, task.num_ops), (0,), 4.0 * count))
    return measure_as_they_are(problem, "by hand", timed(problem, slices, mirrored(range(len(slices)))))


def test_no_more_is_recomputed_than_memory_asks_for() -> None:
    problem, task = recomputing()
    by_count = [part_recomputed(problem, task, count) for count in range(1, 9)]
    fitting = [each for each in by_count if each is not None]
    assert 1 < len(fitting) < 8, "some counts fit, and some do not"
    begun = fitting[-1]
    assert begun.prediction.compute_s == pytest.approx(8 * 4.0)
    found = refined(problem, [begun], 0)
    assert found is not None
    assert found.prediction.iteration_s <= fitting[0].prediction.iteration_s * (1 + 1e-6)


def test_of_several_plans_the_one_that_leads_furthest_is_gone_on_with() -> None:
    """The first begins where nothing is to be gained: it is the optimum already."""
    problem, begun = two_tasks()
    best = refined(problem, [begun], 0)
    assert best is not None
    again = refined(problem, [begun, best], 0)
    assert again is None or again.rank() < best.rank()
    assert refined(problem, [], 0) is None


def graph(num_tasks: int = 3) -> Profile:
    """Tasks that share a component, whose curves flatten, with memory for some of what they keep."""
    curve = {1: 0.08, 2: 0.045, 4: 0.026, 8: 0.018}
    metaops = []
    for number in range(num_tasks):
        name = f"t{number}"
        own = gib_op(f"{name}/own", 6, curve, 3.0 + number, param_bytes_per_op=MIB_OF_OP * 2**20)
        shared = gib_op(
            f"{name}/shared",
            8,
            {count: seconds / (1 + number) for count, seconds in curve.items()},
            4.0,
            parameters="shared",
            param_bytes_per_op=MIB_OF_OP * 2**20,
            inputs=(f"{name}/own",),
        )
        metaops += [own, shared]
    profile = problem_of(gpus(8), *metaops).profile
    return profile.model_copy(update={"optimizer_state_sharded": True})


def begun_on_all(problem: Problem) -> EvaluatedCandidate:
    """Everything on all devices, a task at a time, all of it recomputed."""
    metaops = problem.profile.metaops
    slices = [
        slice_of(metaop, (0, metaop.num_ops), range(8), float(at_s), recompute=True)
        for at_s, metaop in enumerate(metaops)
    ]
    order = []
    for task in range(0, len(slices), 2):
        order += mirrored((task, task + 1))
    return evaluated(problem, slices, order)


def test_what_is_found_is_found_again_and_more_effort_finds_no_less() -> None:
    problem = make_problem(graph(), gpus(8, 16.0))
    begun = begun_on_all(problem)
    once, twice, longer = (refined(problem, [begun], effort) for effort in (0, 0, 1))
    assert once is not None and twice is not None and longer is not None
    assert once.slices == twice.slices
    assert longer.rank() <= once.rank() < begun.rank()


@pytest.mark.parametrize("per_node", [8, 4])
def test_estimates_are_near_the_prediction_and_the_account(per_node: int) -> None:
    problem = make_problem(graph(), gpus(8, 16.0, per_node=per_node))
    under_way = Search.of(problem, begun_on_all(problem))
    assert under_way is not None
    for _ in range(3):
        under_way.go_on(PASSES)
    slices = under_way.translation.slices_of(under_way.kept)
    found = measure_as_they_are(problem, "by hand", slices)
    assert found is not None, "what was kept has been evaluated to fit"
    peaks = under_way._peaks(under_way.kept)
    reserve = np.array(problem.cluster.reserve_bytes)
    needed = np.array([need.total_bytes for need in found.memory]) - reserve
    assert peaks == pytest.approx(needed, rel=0.1)
    under_way.costs[:] = np.inf
    under_way._run(under_way.kept, 0)
    pieces = 1 + SLICE_COST * len(slices)
    assert under_way.costs[0] / pieces == pytest.approx(found.prediction.iteration_s, rel=0.02)


# The sum that tells which parameters have gradients, where optimizer state is shared out, is not estimated.
FLAGS_S = 6.1e-6


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize(("op_s", "param_mib"), [(1e-5, 0.0625), (1e-2, 256)])
def test_sums_and_parameters_of_two_devices_are_estimated_as_predicted(
    op_s: float, param_mib: float, is_sharded: bool
) -> None:
    """Small ones are summed together, when the last is complete, which takes as long as the passes here;
    large ones op by op, and their gradients stay.
    """
    own = {"param_bytes_per_op": int(param_mib * 2**20)}
    task = metaop_of("a/net", 8, {1: op_s, 2: 0.6 * op_s}, **own)
    problem = problem_of(gpus(2), task, optimizer_state_sharded=is_sharded)
    begun = evaluated(problem, [slice_of(task, (0, 8), (0, 1), 0.0)])
    seconds, filled = estimated(problem, begun)
    flags_s = FLAGS_S if is_sharded else 0.0
    assert seconds == pytest.approx(begun.prediction.iteration_s - flags_s, rel=1e-6, abs=1e-7)
    assert filled == pytest.approx([1.0, 1.0], rel=1e-3)


def test_what_is_handed_on_is_estimated_as_predicted() -> None:
    """A GiB goes from one device to another, and its gradient back."""
    made = metaop_of("a/one", 1, {1: 0.1}).model_copy(update={"output_bytes": GIB})
    taking = metaop_of("a/two", 1, {1: 0.1}, inputs=("a/one",))
    problem = problem_of(gpus(2), made, taking)
    slices = [slice_of(made, (0, 1), (0,), 0.0), slice_of(taking, (0, 1), (1,), 0.1)]
    begun = evaluated(problem, slices)
    seconds, filled = estimated(problem, begun)
    assert seconds == pytest.approx(begun.prediction.iteration_s, rel=1e-6)
    assert begun.prediction.transfer_s == pytest.approx(2 * (3e-6 + GIB / 160e9))
    assert filled == pytest.approx([1.0, 1.0], rel=2e-3)


def test_sums_of_devices_in_many_homes_are_estimated_as_predicted() -> None:
    """Of seven homes the first device is in the numbers 0, 4 and 5, the second in 1, 2 and 6: as many, with
    the same sum and the same sum of squares. Each sums one after another.
    """
    tasks = [metaop_of(f"t{number}/net", 1, {2: 0.01}, param_bytes_per_op=GIB // 4) for number in range(7)]
    problem = problem_of(gpus(16), *tasks)
    first = {0: 0, 4: 0, 5: 0, 1: 1, 2: 1, 6: 1, 3: 2}
    slices = [
        slice_of(task, (0, 1), (first[number], 3 + number), 0.01 * number)
        for number, task in enumerate(tasks)
    ]
    begun = evaluated(problem, slices)
    seconds, _ = estimated(problem, begun)
    assert seconds == pytest.approx(begun.prediction.iteration_s, rel=1e-3)


@pytest.mark.parametrize(("num_between", "starts_s"), [(0, 0.01), (2, 0.01), (3, 0.01), (4, 0.02), (6, 0.04)])
def test_what_comes_early_waits_for_its_takers_buffers(num_between: int, starts_s: float) -> None:
    """What a device makes in its first pass is on its way for three passes and a half. Its taker, which has
    other passes to run before, holds a buffer from two passes ahead on.
    """
    made = metaop_of("t/made", 1, {1: 0.03}).model_copy(update={"output_bytes": 56 * 10**8})
    between = [metaop_of(f"t{number}/between", 1, {1: 0.03}) for number in range(num_between)]
    taking = metaop_of("t/taking", 1, {1: 0.03}, inputs=("t/made",))
    problem = problem_of(gpus(2, 200.0), made, *between, taking)
    slices = [
        slice_of(made, (0, 1), (0,), 0.0),
        *(slice_of(task, (0, 1), (1,), 0.03 * number) for number, task in enumerate(between)),
        slice_of(taking, (0, 1), (1,), 0.03 * max(1, num_between)),
    ]
    begun = evaluated(problem, slices)
    seconds, _ = estimated(problem, begun)
    assert seconds == pytest.approx(begun.prediction.iteration_s, rel=1e-6)
    # The taker's pass and its backward pass, and all other backward passes of its device, or, while these
    # run, the gradient's way back and the maker's backward pass.
    behind_s = 0.01 + 0.02 + max(0.02 * num_between, 0.035 + 0.02)
    assert begun.prediction.iteration_s == pytest.approx(starts_s + 0.035 + behind_s, abs=1e-5)
    bounds = Bounds(0.0, AnyCut(problem.profile, problem.cluster))
    plan = plan_of(problem.profile, problem.cluster, "spindle", PlanResult(begun, is_short=False), bounds)
    assert simulate(plan).iteration_s == pytest.approx(begun.prediction.iteration_s, rel=1e-3)


def test_of_several_takers_all_have_to_hold_buffers() -> None:
    """Each of two devices takes half of what a third has made, for half as long as the maker sends. One has
    four passes to run before, and holds its buffer from the third on; the other has one.
    """
    made = metaop_of("t/made", 1, {1: 0.03}).model_copy(update={"output_bytes": 56 * 10**8})
    before = [metaop_of(f"t{number}/before", 1, {1: 0.03}) for number in range(5)]
    taking = metaop_of("t/taking", 1, {1: 0.06, 2: 0.03}, inputs=("t/made",))
    problem = problem_of(gpus(3, 200.0), made, *before, taking)
    slices = [
        slice_of(made, (0, 1), (0,), 0.0),
        slice_of(before[4], (0, 1), (2,), 0.0),
        *(slice_of(task, (0, 1), (1,), 0.03 * number) for number, task in enumerate(before[:4])),
        slice_of(taking, (0, 1), (1, 2), 0.12),
    ]
    begun = evaluated(problem, slices)
    # From the third pass on 35 ms of messages, the taker's passes, and four backward passes.
    assert begun.prediction.iteration_s == pytest.approx(0.02 + 0.035 + 0.03 + 4 * 0.02, abs=1e-4)
    seconds, _ = estimated(problem, begun)
    assert seconds == pytest.approx(begun.prediction.iteration_s, rel=1e-6)


def test_over_nccl_what_one_pass_sends_another_starts_on_all_ways_together() -> None:
    """The first device sends 35 ms long, so what it and the second one send together waits for that, and what
    the second one sends alone for both, as the estimate has it, too.
    """
    sent = {"output_bytes": 56 * 10**8}
    first, both, alone = (
        metaop_of(f"t{number}/made", 1, {1: 0.06, 2: 0.03}).model_copy(update=sent) for number in range(3)
    )
    before = metaop_of("t3/before", 1, {1: 0.06, 2: 0.03})
    taking = [
        metaop_of(f"t{number}/taking", 1, {1: 0.06, 2: 0.03}, inputs=(f"t{number}/made",))
        for number in range(3)
    ]
    problem = problem_of(gpus(4, 200.0), first, both, alone, before, *taking)
    slices = [
        slice_of(first, (0, 1), (0,), 0.0),
        slice_of(before, (0, 1), (2, 3), 0.0),
        slice_of(both, (0, 1), (0, 1), 0.06),
        slice_of(taking[0], (0, 1), (2,), 0.06),
        slice_of(alone, (0, 1), (1,), 0.09),
        slice_of(taking[1], (0, 1), (2, 3), 0.12),
        slice_of(taking[2], (0, 1), (3,), 0.15),
    ]
    begun = evaluated(problem, slices)
    seconds, _ = estimated(problem, begun)
    assert seconds == pytest.approx(begun.prediction.iteration_s, rel=1e-6)


def test_every_schedule_that_is_come_to_is_a_plan() -> None:
    """Also such as do not fit: every op runs once, behind what it takes, on devices that run nothing else."""
    problem = make_problem(graph(), gpus(8, 40.0))
    under_way = Search.of(problem, begun_on_all(problem))
    assert under_way is not None
    for _ in range(20):
        under_way._run(under_way.current, 20_000)
        slices = under_way.translation.slices_of(under_way.current)
        for metaop in problem.profile.metaops:
            own = sorted(piece.ops for piece in slices if piece.metaop == metaop.name)
            assert [first for first, _ in own] == [0, *(last for _, last in own[:-1])]
            assert own[-1][1] == metaop.num_ops
        runs = sorted((*times, index) for index, each in enumerate(slices) for times in each.times_s)
        free_s = dict.fromkeys(range(8), 0.0)
        for start_s, end_s, index in runs:
            for device in slices[index].devices:
                assert free_s[device] <= start_s
                free_s[device] = end_s


def test_plans_with_short_memory_pass_check() -> None:
    profile, cluster = graph(), gpus(8, 16.0)
    plan = make_plan(profile, cluster)
    assert not check_plan(plan, profile)


@pytest.mark.parametrize(("gb_per_s", "is_searched"), [(46.0, False), (0.05, True)])
def test_with_ample_memory_it_goes_on_where_links_decide(
    gb_per_s: float, is_searched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tasks that are faster on both nodes are 20 % longer than by compute alone where sums are slow."""
    task = {1: 1.0, 2: 0.4}
    tasks = [gib_op(f"{name}/net", 4, task, 0.1, param_bytes_per_op=MIB_OF_OP * 2**20) for name in "ab"]
    cluster = gpus(2, 80.0, per_node=1)
    links = cluster.links
    slow = links.inter_node.model_copy(update={"bandwidth_gb_per_s": gb_per_s})
    cluster = cluster.changed(links=links.model_copy(update={"inter_node": slow}))
    problem = problem_of(cluster, *tasks)
    begun: list[Problem] = []

    def noted(problem: Problem, begins: list[EvaluatedCandidate], effort: int) -> None:
        begun.append(problem)

    monkeypatch.setattr("spindle_cli.plan.refine.search.refined", noted)
    found = find(problem.profile, cluster, "spindle", 0, ProblemPoser())
    assert found is not None
    assert not found.is_short
    above = found.best.prediction.iteration_s / lower_bound(problem).lower_bound_s
    assert (above > LINKS_DECIDE) == is_searched == bool(begun)


@pytest.mark.parametrize("what", ["processors", "shared out", "host memory", "too many kinds of links"])
def test_what_tables_cannot_say_is_left_to_others(what: str) -> None:
    problem, begun = two_tasks()
    if what == "processors":
        problem = replace(problem, cluster=cluster_of(2))
    elif what == "shared out":
        sharding = {"a/net": Sharding.PARAMETERS}
        problem = replace(problem, profile=problem.profile.sharded(sharding))
    elif what == "host memory":
        moved = [piece.model_copy(update={"offload": ((0, 2),)}) for piece in begun.slices]
        begun = replace(begun, slices=tuple(moved))
    else:
        inside = GroupLinks(intra_node=problem.cluster.links.intra_node)
        nodes = [
            NodeGroup(count=1, devices=1, device="a800-80gb", memory_gib=24, name=f"n{number}", links=inside)
            for number in range(MOST_KINDS + 1)
        ]
        problem = replace(problem, cluster=problem.cluster.changed(nodes=tuple(nodes)))
    assert refined(problem, [begun], 0) is None


def test_another_text_is_another_function(tmp_path: Path) -> None:
    """What is kept of a compiled function is told by the texts of all that it calls."""
    modules = []
    for name, text in (("one", "a = 1\n"), ("other", "a = 2\n"), ("same", "a = 1\n")):
        module = ModuleType(name)
        module.__file__ = str(tmp_path / f"{name}.py")
        Path(module.__file__).write_text(text, encoding="utf-8")
        modules.append(module)
    one, other, same = (sources_digest([module]) for module in modules)
    assert one == same != other
    assert sources_digest(modules[:2]) not in (one, other)


def test_moves_that_gain_are_drawn_more_and_all_go_on_being_drawn() -> None:
    """Half of the draws stay as they were; of the others a move that gains three times as much for each pass
    as another gets three quarters, and one that made the plan longer none. What they gained then counts half.
    """
    gained, spent = np.zeros(len(OFTEN)), np.full(len(OFTEN), 100.0)
    gained[:3] = 6.0, 1.0, -5.0
    spent[0] = 200.0
    work = SimpleNamespace(often=np.array(OFTEN), gained=gained, spent=spent)
    draw_what_gains.py_func(work)  # type: ignore[attr-defined]  # of numba's functions
    half = np.array(OFTEN) / 2
    half[:2] += sum(OFTEN) / 2 * np.array([0.75, 0.25])
    assert work.often / SCALE == pytest.approx(half, abs=1 / SCALE)
    assert (work.gained[0], work.spent[0]) == (3.0, 100.0)


@pytest.mark.parametrize(("tp", "within"), [(1, 1e-3), (2, 0.2)])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_layers_that_tasks_share_in_part_are_estimated_as_the_account_has_them(
    tp: int, within: float, is_sharded: bool
) -> None:
    """One task trains layers, the fourth of which has more parameters; another has the first five frozen, all
    on devices that train two of them. With tensor parallelism it is estimated less exactly.
    """
    layers: dict[str, Any] = {"parameters": "net", "param_bytes_per_op": GIB // 8}
    layers |= {"extra_param_bytes": {3: GIB // 4}, "split_extra_param_bytes": {3: GIB // 4}}
    curve = (
        CurvePoint(num_devices=2, dp=2 // tp, tp=tp, forward_s=0.004, backward_s=0.006, source="measured"),
    )
    trained = metaop_of("a/net", 8, {2: 0.01}, **layers).model_copy(update={"curve": curve})
    frozen = metaop_of("b/net", 5, {2: 0.01}, trainable_fraction=0.0, **layers).model_copy(
        update={"curve": curve}
    )
    problem = problem_of(gpus(4), trained, frozen, optimizer_state_sharded=is_sharded)
    begun = evaluated(
        problem,
        [
            slice_of(trained, (0, 2), (0, 1), 0.0, tp=tp),
            slice_of(trained, (2, 8), (2, 3), 0.02, tp=tp),
            slice_of(frozen, (0, 5), (0, 1), 0.1, tp=tp),
        ],
    )
    assert estimated(problem, begun)[1] == pytest.approx([1.0] * 4, rel=within)
