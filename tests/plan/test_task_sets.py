"""Plans for sets of tasks: what is left of the plan of all, plans of their own, and how they are chosen."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.plans import cluster_of, metaop_of, profile_of, slice_of
from spindle_cli.account.device_memory import device_memory
from spindle_cli.check.run import check_plan, require_planned
from spindle_cli.errors import InputError
from spindle_cli.files.artifact import parse_yaml
from spindle_cli.plan.best.posed import ProblemPoser
from spindle_cli.plan.file import plan_text, read_plan, write_plan
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.plan_report import PlanReport
from spindle_cli.plan.sets.choose import with_sets
from spindle_cli.plan.sets.restrict import as_early_as_possible, restricted
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import MetaOpProfile, Profile
from spindle_cli.simulate.run import simulate
from spindle_cli.workload.settings.types import TaskShare

LINEAR = {1: 2.0, 2: 1.0}
ALONE = {1: 2.0}


def sampled(*shares: tuple[str, float], curve: dict[int, float] = LINEAR, **more: Any) -> Profile:
    """Tasks a and b of four ops each; `shares`: sets by the letters of their tasks."""
    profile = profile_of(metaop_of("a/m", 4, curve, **more), metaop_of("b/m", 4, curve, **more))
    sets = tuple(TaskShare(tasks=tuple(tasks), share=share) for tasks, share in shares)
    return profile.model_copy(update={"task_sets": sets})


def devices_of(plan: Plan, metaop: str) -> set[int]:
    return {device for piece in plan.slices if piece.metaop == metaop for device in piece.devices}


def by_name(*metaops: MetaOpProfile) -> dict[str, MetaOpProfile]:
    return {metaop.name: metaop for metaop in metaops}


def test_what_is_left_starts_as_early_as_devices_and_inputs_allow() -> None:
    """a waited for b on device 0, and then for its own first part; without b it starts at 0."""
    first, last = metaop_of("a/first", 2, {1: 1.0}), metaop_of("a/last", 1, {1: 1.0}, inputs=("a/first",))
    other = metaop_of("b/m", 3, {1: 1.0})
    slices = [
        slice_of(other, (0, 3), [0], 0.0),
        slice_of(first, (0, 1), [0], 3.0),
        slice_of(first, (1, 2), [1], 4.0),
        slice_of(last, (0, 1), [0], 5.0),
    ]
    left = restricted(slices, {"a"}, by_name(first, last, other))
    assert [(piece.label, piece.devices) for piece in left] == [
        ("a/first[0:1]", (0,)),
        ("a/first[1:2]", (1,)),
        ("a/last[0:1]", (0,)),
    ]
    assert [(piece.start_s, piece.end_s) for piece in left] == [
        pytest.approx((0, 1), abs=1e-9),
        pytest.approx((1, 2), abs=1e-9),
        pytest.approx((2, 3), abs=1e-9),
    ]
    assert all(piece.start_s >= before.end_s for before, piece in pairwise(left))


def test_slices_side_by_side_stay_so() -> None:
    a, b = metaop_of("a/m", 1, {1: 1.0}), metaop_of("b/m", 1, {1: 3.0})
    moved = as_early_as_possible(
        [slice_of(a, (0, 1), [0], 7.0), slice_of(b, (0, 1), [1], 7.0)], by_name(a, b)
    )
    assert [piece.start_s for piece in moved] == [0.0, 0.0]
    assert [piece.end_s for piece in moved] == pytest.approx([1.0, 3.0])


def test_what_is_left_is_in_order_of_start() -> None:
    a, b = metaop_of("a/m", 2, {1: 2.0}), metaop_of("b/m", 1, {1: 1.0})
    slices = [
        slice_of(a, (0, 1), [0], 0.0),
        slice_of(a, (1, 2), [0], 2.0),
        slice_of(b, (0, 1), [1], 5.0),
    ]
    moved = as_early_as_possible(slices, by_name(a, b))
    assert [(piece.label, piece.start_s) for piece in moved] == [
        ("a/m[0:1]", 0.0),
        ("b/m[0:1]", 0.0),
        ("a/m[1:2]", pytest.approx(2.0)),
    ]


def test_a_task_that_runs_alone_takes_all_devices() -> None:
    """Both together are as fast side by side; alone, a is twice as fast on both."""
    plan = make_plan(sampled(("a", 0.5), ("ab", 0.5)), cluster_of(2))
    alone = plan.set_plans["a",]
    assert devices_of(alone, "a/m") == {0, 1}
    assert alone.predicted.compute_s == pytest.approx(4.0, rel=1e-6)
    assert plan.set_plans["a", "b"].predicted.compute_s == pytest.approx(8.0, rel=1e-3)
    assert check_plan(plan) == ()


def test_the_time_is_the_mean_and_the_memory_the_worst() -> None:
    plan = make_plan(sampled(("a", 0.75), ("ab", 0.25)), cluster_of(2))
    of_a, of_both = (each.predicted for each in plan.task_sets)
    assert plan.mean_iteration_s == pytest.approx(0.75 * of_a.iteration_s + 0.25 * of_both.iteration_s)
    report = PlanReport.of("p", plan)
    assert report.mean_iteration_s == plan.mean_iteration_s
    assert report.peak_memory_bytes == max(*of_a.peak_memory_bytes, *of_both.peak_memory_bytes)
    assert "in the mean of the steps" in str(report)
    assert "75.0%" in str(report)


def test_a_plan_of_its_own_that_lengthens_the_others_sums_is_not_taken() -> None:
    """a runs alone once in a thousand steps. On both devices its 400 MiB would be summed over both in every
    step, which takes longer than what is saved.
    """
    rare = sampled(("ab", 0.999), ("a", 0.001), param_bytes_per_op=100 * 2**20)
    plan = make_plan(rare, cluster_of(2))
    often = make_plan(sampled(("ab", 0.5), ("a", 0.5)), cluster_of(2))
    alone = plan.set_plans["a",]
    assert devices_of(alone, "a/m") == devices_of(plan, "a/m")
    assert len(devices_of(often.set_plans["a",], "a/m")) == 2


def test_a_plan_of_its_own_that_does_not_fit_beside_the_others_is_not_taken() -> None:
    """a alone is faster on both devices, of which each holds 1.6 GiB for a task: parameters, gradients and
    state of 4 x 100 MiB. Device 1 has b's already.
    """
    large = sampled(("ab", 0.5), ("a", 0.5), param_bytes_per_op=100 * 2**20)
    tight, ample = (make_plan(large, cluster_of(2, memory_gib=gib)) for gib in (3.0, 4.0))
    assert len(devices_of(ample.set_plans["a",], "a/m")) == 2
    assert devices_of(tight.set_plans["a",], "a/m") == devices_of(tight, "a/m")
    assert len(devices_of(tight, "a/m")) == 1
    assert check_plan(tight) == ()


def test_what_devices_hold_for_other_sets_is_counted() -> None:
    plan = make_plan(sampled(("a", 0.5), ("ab", 0.5)), cluster_of(2))
    assert plan.joint is not None
    both = device_memory(plan.metaops, plan.slices, plan.cluster, plan)
    in_turn = device_memory(plan.metaops, plan.slices, plan.cluster, plan, turn=plan.turn)
    held = [sum(p.startswith("a") for p in {s.metaop for s in plan.slices if d in s.devices}) for d in (0, 1)]
    assert sorted(held) == [0, 1], "one device has a in the plan of all tasks"
    other = held.index(0)
    assert in_turn[other].parameter_bytes - both[other].parameter_bytes == 4 * 2**20
    assert in_turn[1 - other].parameter_bytes == both[1 - other].parameter_bytes
    # It updates a's parameters too: half of them where the state is shared, else all.
    assert in_turn[other].updated_bytes - both[other].updated_bytes == 4 * 2**20


def test_only_what_is_due_is_updated() -> None:
    plan = make_plan(sampled(("a", 0.5), ("b", 0.5)), cluster_of(2))
    alone = plan.set_plans["a",]
    memory = device_memory(alone.metaops, alone.slices, alone.cluster, alone, turn=alone.turn)
    assert [each.parameter_bytes for each in memory] == [8 * 2**20] * 2
    assert [each.updated_bytes for each in memory] == [4 * 2**20] * 2


def test_without_steps_of_all_tasks_their_plan_holds_nothing_more() -> None:
    """Parameters that b uses on device 0 alone would be on both if the plan of all tasks had its way."""
    plan = make_plan(sampled(("a", 0.5), ("b", 0.5)), cluster_of(2))
    assert plan.joint is not None
    own = {(p.metaop, p.devices) for each in plan.set_plans.values() for p in each.slices}
    assert {(p.metaop, p.devices) for p in plan.every_slice} == own


def test_what_changes_buffers_stays_where_it_is() -> None:
    plan = make_plan(sampled(("a", 0.5), ("ab", 0.5), changes_buffers=True), cluster_of(2), "optimus")
    assert devices_of(plan.set_plans["a",], "a/m") == devices_of(plan, "a/m")
    assert len(devices_of(plan, "a/m")) == 1


@pytest.mark.parametrize("alone", ["a", "b"])
def test_the_check_refuses_buffers_elsewhere_and_wrong_shares(alone: str) -> None:
    plan = make_plan(sampled((alone, 0.5), ("ab", 0.5)), cluster_of(2))
    fields = {name: getattr(plan, name) for name in plan.model_fields_set}
    changing = tuple(each.model_copy(update={"changes_buffers": True}) for each in plan.metaops)
    violations = check_plan(Plan(**{**fields, "metaops": changing}))
    assert {(found.rule, found.where) for found in violations} == {("buffers", f"task_sets, {alone}")}
    assert all(found.value.startswith(f"{alone}/m ") for found in violations)
    short = (plan.task_sets[0], plan.task_sets[1].model_copy(update={"share": 0.25}))
    (found,) = check_plan(Plan(**{**fields, "task_sets": short}))
    assert (found.rule, found.value) == ("task-sets", "the shares add up to 0.75")


def test_what_two_sets_run_is_in_the_plan_of_all_tasks_once() -> None:
    metaops = [metaop_of(f"{task}/m", 4, LINEAR) for task in "abc"]
    sets = tuple(TaskShare(tasks=(task, "c"), share=0.5) for task in "ab")
    plan = make_plan(profile_of(*metaops).model_copy(update={"task_sets": sets}), cluster_of(2))
    assert check_plan(plan) == ()
    assert sum(piece.ops[1] - piece.ops[0] for piece in plan.slices if piece.metaop == "c/m") == 4


def test_the_check_looks_into_every_set() -> None:
    plan = make_plan(sampled(("a", 0.5), ("ab", 0.5)), cluster_of(2))
    fields = {name: getattr(plan, name) for name in plan.model_fields_set}
    predicted = plan.task_sets[0].predicted.model_copy(update={"peak_memory_bytes": (1, 1)})
    sets = (plan.task_sets[0].model_copy(update={"predicted": predicted}), plan.task_sets[1])
    (found,) = check_plan(Plan(**{**fields, "task_sets": sets}))
    assert found.rule == "peak-memory"
    assert found.where.startswith("task_sets, a, ")


def test_a_plan_with_sets_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = make_plan(sampled(("a", 0.5), ("ab", 0.5)), cluster_of(2))
    write_plan(tmp_path / "plan.yaml", plan)
    read = read_plan(tmp_path / "plan.yaml")
    assert read == plan
    assert plan_text(read) == plan_text(plan)
    data = parse_yaml(plan_text(plan), where="plan.yaml")
    assert [each["tasks"] for each in data["task_sets"]] == [["a"], ["a", "b"]]


def test_sets_with_slices_of_other_tasks_and_twice_the_same_are_refused(tmp_path: Path) -> None:
    plan = make_plan(sampled(("a", 0.5), ("ab", 0.5)), cluster_of(2))
    data = parse_yaml(plan_text(plan), where="plan.yaml")
    path = tmp_path / "plan.yaml"
    data["task_sets"][1]["tasks"] = ["a"]
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(InputError, match="task_sets: a is there twice"):
        read_plan(path)
    data["task_sets"] = data["task_sets"][1:]
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(InputError, match="the slices of a are of a/m, b/m; expected a/m"):
        read_plan(path)


def edited(path: Path, plan: Plan, edit: Callable[[dict[str, Any]], object]) -> Plan:
    data = parse_yaml(plan_text(plan), where="plan.yaml")
    edit(data)
    path.write_text(yaml.safe_dump(data))
    return Plan.read(path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("devices", [7], "device 7: not in the cluster"),
        ("ops", [0, 9], "ops [0, 9]; expected"),
    ],
)
def test_a_set_on_what_is_not_there_is_a_violation_of_its_own(
    key: str, value: Any, said: str, tmp_path: Path
) -> None:
    def edit(data: dict[str, Any]) -> None:
        data["task_sets"][0]["waves"][0]["slices"][0][key] = value

    plan = make_plan(sampled(("a", 0.5), ("ab", 0.5)), cluster_of(2))
    (found,) = check_plan(edited(tmp_path / "p.yaml", plan, edit))
    assert found.where.startswith("task_sets, a, wave 0, a/m")
    assert said in str(found)


def test_a_plan_of_sets_without_metaops_is_checked_and_split_as_far_as_it_tells(tmp_path: Path) -> None:
    plan = make_plan(sampled(("a", 0.5), ("ab", 0.5)), cluster_of(2))
    bare = edited(tmp_path / "p.yaml", plan, lambda data: data.pop("metaops"))
    assert check_plan(bare) == ()
    assert list(bare.set_plans) == [("a",), ("a", "b")]
    strange = edited(
        tmp_path / "p.yaml",
        plan,
        lambda data: (data.pop("metaops"), data["task_sets"][0].update(tasks=["x"])),
    )
    with pytest.raises(InputError, match="the slices of x are of a/m; expected those of tasks in metaops"):
        check_plan(strange)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ([("a", 1.0), ("ab", 1.0)], "the shares add up to 2; expected 1"),
        ([("a", 0.5)], "the shares add up to 0.5; expected 1"),
        ([("a", 0.5), ("a", 0.5)], "a is there twice"),
        ([("ax", 1.0)], "'x' is no task; expected one of a, b"),
        ([("aa", 1.0)], "expected each task once"),
    ],
)
def test_a_profile_whose_sets_are_not_all_steps_is_refused(sets: list[tuple[str, float]], said: str) -> None:
    data = sampled().model_dump(mode="json", by_alias=True)
    data["task_sets"] = [{"tasks": list(tasks), "share": share} for tasks, share in sets]
    with pytest.raises(InputError, match=said):
        Profile.from_data(data, where="profile.json")


def test_shares_may_be_off_by_rounding() -> None:
    data = sampled().model_dump(mode="json", by_alias=True)
    data["task_sets"] = [{"tasks": [task], "share": 0.5 - 4e-7} for task in "ab"]
    assert len(Profile.from_data(data, where="profile.json").task_sets) == 2


def test_a_plan_without_a_set_that_occurs_is_refused() -> None:
    plan = make_plan(sampled(("a", 0.5), ("ab", 0.5)), cluster_of(2))
    needed = [TaskShare(tasks=("b",), share=1.0)]
    with pytest.raises(InputError, match=r"p\.yaml: some steps run b alone .* it is for a; a, b"):
        require_planned(plan, needed, "p.yaml")
    require_planned(plan, [TaskShare(tasks=("a",), share=1.0)], "p.yaml")
    whole = make_plan(sampled(), cluster_of(2))
    require_planned(whole, [TaskShare(tasks=("a", "b"), share=1.0)], "p.yaml")
    with pytest.raises(InputError, match="it is for all tasks at every step"):
        require_planned(whole, needed, "p.yaml")


def test_every_set_is_simulated_by_itself() -> None:
    plan = make_plan(sampled(("a", 0.5), ("ab", 0.5)), cluster_of(2))
    alone = simulate(plan.set_plans["a",])
    assert alone.iteration_s < 0.75 * simulate(plan).iteration_s


def test_no_set_changes_the_plan_of_all_tasks_where_steps_run_them_all() -> None:
    profile = sampled(("a", 0.5), ("ab", 0.5), curve=ALONE)
    plain = make_plan(profile.model_copy(update={"task_sets": ()}), cluster_of(2))
    plan = with_sets(plain, profile, lambda some: make_plan(some, cluster_of(2)), ProblemPoser())
    assert [(p.label, p.devices) for p in plan.slices] == [(p.label, p.devices) for p in plain.slices]
    assert plan.predicted.iteration_s == pytest.approx(plain.predicted.iteration_s)
