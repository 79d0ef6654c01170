"""Forward and backward passes as jobs of their own: orders, their times, and what memory makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.plans import cluster_of, metaop_of, profile_of, slice_of
from spindle_cli.account.device_memory import device_memory
from spindle_cli.account.types import Pass
from spindle_cli.check.run import check_plan
from spindle_cli.files.cluster import NodeGroup
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.ordering.orders import as_they_come, in_groups, mirrored
from spindle_cli.plan.ordering.timed import timed
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import Problem, parts_of
from spindle_cli.plan.search.evaluate import measure, measure_as_they_are
from spindle_cli.plan.types import Slice
from spindle_cli.profile.types import MetaOpProfile, Profile, TaskShare
from spindle_cli.units import GIB, MIB

# Three tasks of a MetaOp each, whose ops take 1, 2 and 3 s on one device, a third of it forward.
THREE = tuple(
    metaop_of(f"{task}/net", 1, {1: seconds}) for task, seconds in zip("abc", (1, 2, 3), strict=True)
)


def on_one_device() -> tuple[Problem, list[Slice]]:
    problem = make_problem(profile_of(*THREE), cluster_of(1))
    starts = (0.0, 1.0, 3.0)
    return problem, [slice_of(each, (0, 1), (0,), at) for each, at in zip(THREE, starts, strict=True)]


def written(order: tuple[Pass, ...]) -> str:
    return " ".join(f"{'B' if is_backward else 'F'}{piece}" for piece, is_backward in order)


def test_tasks_go_one_by_one_or_in_groups_but_never_all_at_once() -> None:
    assert [written(order) for order in in_groups(*on_one_device())] == [
        "F0 B0 F1 B1 F2 B2",
        "F0 F1 B1 B0 F2 B2",
    ]
    problem, slices = on_one_device()
    assert [written(order) for order in in_groups(problem, slices[:2])] == ["F0 B0 F1 B1"]
    assert not list(in_groups(problem, slices[:1]))


def test_groups_are_twice_as_large_each_time() -> None:
    tasks = [metaop_of(f"{task}/net", 1, {1: 1.0}) for task in "abcde"]
    problem = make_problem(profile_of(*tasks), cluster_of(1))
    slices = [slice_of(each, (0, 1), (0,), float(at_s)) for at_s, each in enumerate(tasks)]
    assert [written(order) for order in in_groups(problem, slices)] == [
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
        "F0 F1 B1 B0 F2 F3 B3 B2 F4 B4",
        "F0 F1 F2 F3 B3 B2 B1 B0 F4 B4",
    ]


def test_metaops_that_take_from_each_other_are_one_part() -> None:
    a, b = metaop_of("t/a", 1, {1: 1.0}), metaop_of("t/b", 1, {1: 1.0})
    c = metaop_of("t/c", 1, {1: 1.0}, inputs=("t/a", "t/b"))
    alone = metaop_of("u/d", 1, {1: 1.0})
    part_of = parts_of((a, b, alone, c))
    assert part_of["t/a"] == part_of["t/b"] == part_of["t/c"] != part_of["u/d"]


def test_as_they_come_a_device_never_waits_and_gives_memory_back_first() -> None:
    """Two encoders on a device each, whose loss is on the second. While it runs, the first has nothing of
    that task to do, and takes the other task.
    """
    left, right = metaop_of("t/left", 1, {1: 3.0}), metaop_of("t/right", 1, {1: 3.0})
    loss = metaop_of("t/loss", 1, {1: 3.0}, inputs=("t/left", "t/right"))
    other = metaop_of("u/net", 1, {1: 3.0})
    problem = make_problem(profile_of(left, right, loss, other), cluster_of(2))
    slices = [
        slice_of(left, (0, 1), (0,), 0.0),
        slice_of(right, (0, 1), (1,), 0.0),
        slice_of(loss, (0, 1), (1,), 3.0),
        slice_of(other, (0, 1), (0,), 3.0),
    ]
    # forward 1 s, backward 2 s: the loss is backward at 4; the other task is through at 4 on device 0.
    found = written(as_they_come(problem, slices, longest_first=False))
    assert found == "F0 F1 F2 F3 B2 B3 B0 B1"
    longest = written(as_they_come(problem, slices, longest_first=True))
    assert longest == "F0 F1 F2 F3 B2 B3 B0 B1"


def test_a_pass_can_start_when_the_last_of_what_it_takes_has_ended() -> None:
    """The loss takes what ends at 3 s and what ends at 1; what shares its device can start at 2."""
    seconds = {"t/left": 3.0, "t/right": 1.0, "u/first": 2.0, "t/loss": 1.0, "u/second": 1.0}
    inputs = {"t/loss": ("t/left", "t/right"), "u/second": ("u/first",)}
    metaops = [
        metaop_of(name, 1, {1: 3 * forward_s}, inputs=inputs.get(name, ()))
        for name, forward_s in seconds.items()
    ]
    problem = make_problem(profile_of(*metaops), cluster_of(4))
    slices = [
        slice_of(each, (0, 1), (device,), at_s)
        for each, device, at_s in zip(metaops, (0, 1, 3, 2, 2), (0.0, 0.0, 0.0, 3.0, 2.0), strict=True)
    ]
    for longest_first in (False, True):
        found = written(as_they_come(problem, slices, longest_first=longest_first))
        assert found.startswith("F0 F1 F2 F4 ")


def test_of_passes_that_can_start_together_the_backward_one_or_the_longest_chain_goes_first() -> None:
    problem, slices = on_one_device()
    assert written(as_they_come(problem, slices, longest_first=False)) == "F0 B0 F1 B1 F2 B2"
    # to come behind: 3 s of the third, 2 s of the second and of the third's backward pass, ...
    assert written(as_they_come(problem, slices, longest_first=True)) == "F2 F1 B2 B1 F0 B0"
    # Three ops of 1 s are more than one of 2 s.
    three, one = metaop_of("a/net", 3, {1: 1.0}), metaop_of("b/net", 1, {1: 2.0})
    problem = make_problem(profile_of(three, one), cluster_of(1))
    slices = [slice_of(one, (0, 1), (0,), 0.0), slice_of(three, (0, 3), (0,), 2.0)]
    assert written(as_they_come(problem, slices, longest_first=True)).startswith("F1 ")


def test_each_pass_is_as_early_as_its_devices_and_inputs_allow() -> None:
    problem, slices = on_one_device()
    apart = timed(problem, slices, next(in_groups(problem, slices)))
    times = [time_s for piece in apart for each in piece.times_s for time_s in each]
    expected = [0, 1 / 3, 1 / 3, 1, 1, 5 / 3, 5 / 3, 3, 3, 4, 4, 6]
    assert times == pytest.approx(expected, abs=1e-6)
    assert [piece.metaop for piece in apart] == ["a/net", "b/net", "c/net"]


def test_a_pass_waits_for_what_another_device_makes_forward_and_backward() -> None:
    maker, taker = metaop_of("t/maker", 1, {1: 3.0}), metaop_of("t/taker", 1, {1: 1.5}, inputs=("t/maker",))
    problem = make_problem(profile_of(maker, taker), cluster_of(2))
    slices = [slice_of(maker, (0, 1), (0,), 0.0), slice_of(taker, (0, 1), (1,), 3.0)]
    first, second = (piece.times_s for piece in timed(problem, slices, mirrored(range(2))))
    assert first == (pytest.approx((0, 1), abs=1e-6), pytest.approx((2.5, 4.5), abs=1e-6))
    assert second == (pytest.approx((1, 1.5), abs=1e-6), pytest.approx((1.5, 2.5), abs=1e-6))


def test_devices_hold_one_task_s_activations_at_a_time() -> None:
    """Each task keeps 40 MiB; all forward first, three are held at once."""
    _, slices = on_one_device()
    _, problem = short_of_memory(4.0)

    def activations(pieces: list[Slice] | tuple[Slice, ...]) -> float:
        (need,) = device_memory(problem.profile.metaops, pieces, problem.cluster, problem.profile)
        return need.activation_bytes / MIB

    one_by_one, in_pairs = (timed(problem, slices, order) for order in in_groups(problem, slices))
    all_at_once = timed(problem, slices, mirrored(range(3)))
    assert activations(all_at_once) == activations(slices)
    step = activations(all_at_once) - activations(in_pairs)
    assert step == pytest.approx(40)
    assert activations(in_pairs) - activations(one_by_one) == pytest.approx(step)


def short_of_memory(memory_gib: float) -> tuple[Profile, Problem]:
    larger = {"activation_bytes_per_op": 40 * MIB}
    metaops = tuple(each.model_copy(update=larger) for each in THREE)
    profile = profile_of(*metaops)
    return profile, make_problem(profile, cluster_of(1, memory_gib=memory_gib))


def test_where_memory_is_short_tasks_run_one_by_one_and_nothing_is_recomputed() -> None:
    """Three tasks of 40 MiB: all at once they do not fit 128 MiB, one at a time they do."""
    profile, problem = short_of_memory(0.125)
    plan = make_plan(profile, problem.cluster, "sequential")
    assert plan.schema_ == "spindle.plan/2"
    assert not any(piece.recompute for piece in plan.slices)
    assert plan.predicted.compute_s == pytest.approx(6.0, rel=1e-6)
    assert check_plan(plan, profile) == ()
    roomy, problem = short_of_memory(4.0)
    assert make_plan(roomy, problem.cluster, "sequential").schema_ == "spindle.plan/1"


def test_so_they_do_in_plans_for_sets_of_tasks() -> None:
    profile, problem = short_of_memory(0.125)
    sets = (TaskShare(tasks=("a",), share=0.5), TaskShare(tasks=("a", "b", "c"), share=0.5))
    sampled = profile.model_copy(update={"task_sets": sets})
    plan = make_plan(sampled, problem.cluster, "sequential")
    assert plan.schema_ == "spindle.plan/2"
    assert not any(piece.recompute for own in (plan, *plan.set_plans.values()) for piece in own.slices)
    assert [each.predicted.compute_s for each in plan.task_sets] == pytest.approx([1.0, 6.0], rel=1e-6)
    assert check_plan(plan, sampled) == ()


def test_of_groups_that_fit_the_fastest_is_taken() -> None:
    """Two tasks cross two devices in opposite directions, each op 3 s and 40 MiB: one by one the second waits
    for the first on both; two at once they fill each other's gaps. A third one, alone on a device, makes all
    at once too much: 2 x 40 MiB and their gradients fit 160 MiB, 3 x 40 MiB do not.
    """
    larger = {"activation_bytes_per_op": 40 * MIB}
    down, up, rest = (
        tuple(
            metaop_of(f"{task}/{part}", 1, {1: 3.0}, inputs=inputs, **larger)
            for part, inputs in (("first", ()), ("second", (f"{task}/first",)))
        )
        for task in ("down", "up", "rest")
    )
    profile = profile_of(*down, *up, *rest)
    problem = make_problem(profile, cluster_of(2, memory_gib=0.13))
    placed = [(down[0], 0, 0.0), (up[0], 1, 0.0), (down[1], 1, 3.0), (up[1], 0, 3.0)]
    placed += [(rest[0], 0, 6.0), (rest[1], 1, 9.0)]
    slices = tuple(slice_of(each, (0, 1), (device,), at) for each, device, at in placed)
    assert measure_as_they_are(problem, "spindle", slices) is None
    one_by_one, in_pairs = (
        measure_as_they_are(problem, "spindle", timed(problem, slices, order))
        for order in in_groups(problem, slices)
    )
    found = measure(problem, "spindle", slices)
    assert found is not None and one_by_one is not None and in_pairs is not None
    assert found.rank() == in_pairs.rank() < one_by_one.rank()


def test_no_strategy_is_faster_than_spindle_by_the_order_of_its_passes() -> None:
    """Before orders of passes are looked for, the best plan is another than `sequential`'s, whose sums hide
    behind its passes in their best order.
    """

    def metaop(number: int, num_ops: int, on_one_s: float, on_two_s: float, **more: Any) -> MetaOpProfile:
        made = metaop_of(f"t/{number}", num_ops, {1: on_one_s, 2: on_two_s}, **more)
        return made.model_copy(update={"output_bytes": 2**22 if number < 3 else 2**16})

    profile = profile_of(
        metaop(0, 2, 0.0025, 0.001, param_bytes_per_op=2**23),
        metaop(1, 2, 0.002, 0.001, param_bytes_per_op=0),
        metaop(2, 4, 0.002, 0.001, param_bytes_per_op=0, inputs=("t/0",)),
        metaop(3, 2, 0.0025, 0.0015, param_bytes_per_op=2**23, inputs=("t/0", "t/2")),
    ).model_copy(update={"optimizer_s_per_byte": 1e-10})
    plans = [
        make_plan(profile, cluster_of(2), name, effort=0)
        for name in ("spindle", "sequential", "distmm", "optimus")
    ]
    spindle, *others = (plan.predicted.iteration_s for plan in plans)
    assert spindle <= min(others)


def test_what_has_no_room_for_communicators_at_once_may_have_it_task_by_task() -> None:
    """Three tasks on both devices, each with 200 MiB of activations on either: all at once there is a MiB too
    little, once communicators are counted; so tasks run one by one, or in pairs.
    """
    larger = {"activation_bytes_per_op": 400 * MIB}
    metaops = tuple(metaop_of(f"{task}/net", 1, {2: 3.0}, **larger) for task in "abc")
    slices = tuple(slice_of(each, (0, 1), (0, 1), 3.0 * at) for at, each in enumerate(metaops))

    def on(memory_gib: float) -> Problem:
        group = NodeGroup(count=1, devices=2, device="a800-80gb", memory_gib=memory_gib, reserve_gib=1)
        return make_problem(profile_of(*metaops), cluster_of(2).changed(nodes=(group,)))

    ample = on(80)
    at_once = measure(ample, "spindle", slices)
    assert at_once is not None and not at_once.is_apart
    needed = max(need.total_bytes for need in at_once.memory) - MIB
    short = on(needed / GIB)
    without = device_memory(metaops, slices, short.cluster, short.profile)
    assert all(need.total_bytes < needed - 100 * MIB for need in without)
    assert measure_as_they_are(short, "spindle", slices) is None
    found = measure(short, "spindle", slices)
    assert found is not None and found.is_apart
