"""Runs whose steps ran several sets of tasks: each set's steps by its plan, all together by their numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calibration.made_runs import made_run_of_sets, slower, slower_on
from helpers.plans import cluster_of, metaop_of, profile_of
from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.account.joint import joint_groups
from spindle_cli.account.traffic import traffic_of, uses_of
from spindle_cli.account.types import ParameterGroup
from spindle_cli.calibrate.history import from_history
from spindle_cli.calibrate.predicting import predicted_again
from spindle_cli.calibrate.reading import read_run
from spindle_cli.calibrate.run import Calibrated, calibrate, report_on, summary_lines
from spindle_cli.errors import InputError
from spindle_cli.files.artifact import write_json
from spindle_cli.files.run_files import (
    PLAN_FILE,
    PREDICTED_FILE,
    Comparison,
    DeviceTimes,
    PredictedVsMeasured,
    SetMeasured,
    SliceTimes,
)
from spindle_cli.files.runs.records import MeasuredSpan, MeasuredStep, MeasuredTimeline
from spindle_cli.plan.file import write_plan
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import MetaOpProfile, Profile
from spindle_cli.workload.settings.types import TaskShare

A, AB = ("a",), ("a", "b")
STEPS = {A: 6, AB: 2}
WHERE = Path("profile.json")
TWICE = {1: 2.0, 2: 1.0}


# Four of five steps run task a alone.
SETS = TaskShare(tasks=A, share=0.8), TaskShare(tasks=AB, share=0.2)


def sampled(*metaops: MetaOpProfile, **more: Any) -> Profile:
    return profile_of(*metaops).model_copy(update={"task_sets": SETS, **more})


def on_one_device_each() -> tuple[Profile, Plan]:
    """Four ops of a, two of b, of 2 s and no other size, side by side."""
    profile = sampled(metaop_of("a/m", 4, {1: 2.0}), metaop_of("b/m", 2, {1: 2.0}))
    return profile, make_plan(profile, cluster_of(2))


def by_hand(folder: Path, plan: Plan) -> Path:
    """Alone an op of a takes 1 s forward and 2 backward, with b beside it 2 and 3; an op of b 1.5 and 2.5. An
    iteration is 13 and 21 s, of which the update takes 0.25 and 0.5 s on the device of a.
    """

    def devices(optimizer_s: float, compute_s: float) -> tuple[DeviceTimes, ...]:
        one, other = (
            {"device": n, "wait_s": 0.0, "data_s": 0.0, "compute_s": compute_s * (1 - n)} for n in (0, 1)
        )
        own = DeviceTimes(**one, optimizer_s=optimizer_s, other_s=0.125)
        return own, DeviceTimes(**other)

    order = {piece.metaop: index for index, piece in enumerate(plan.set_plans[AB].slices)}
    both = {"a/m": (8.0, 12.0), "b/m": (3.0, 5.0)}
    sets = (
        SetMeasured(
            tasks=A,
            steps=6,
            iteration=Comparison(predicted_s=8.0, measured_s=13.0),
            slices=(SliceTimes(slice=0, forward_s=4.0, backward_s=8.0),),
            devices=devices(0.25, 12.0),
        ),
        SetMeasured(
            tasks=AB,
            steps=2,
            iteration=Comparison(predicted_s=8.0, measured_s=21.0),
            slices=tuple(
                SliceTimes(slice=order[name], forward_s=both[name][0], backward_s=both[name][1])
                for name in sorted(both, key=order.__getitem__)
            ),
            devices=devices(0.5, 20.0),
        ),
    )
    folder.mkdir()
    write_plan(folder / PLAN_FILE, plan)
    iteration = Comparison(predicted_s=8.0, measured_s=15.0)
    found = PredictedVsMeasured(steps=8, iteration=iteration, task_sets=sets, plan_sha256=plan.sha256())
    write_json(folder / PREDICTED_FILE, found)
    return folder


@pytest.fixture
def made(tmp_path: Path) -> Calibrated:
    profile, plan = on_one_device_each()
    return calibrate([by_hand(tmp_path / "run", plan)], profile, WHERE)


def test_slices_of_all_sets_count_together_by_their_steps(made: Calibrated) -> None:
    """a: six steps of 1 and 2 s, and two of 2 and 3: 1.25 and 2.25 s. b is in two steps alone."""
    points = {key[0]: each for key, each in made.points["cpu"].items()}
    a, b = points["a/m"], points["b/m"]
    assert (a.times.forward_s, a.times.backward_s) == pytest.approx((1.25, 2.25))
    assert (b.times.forward_s, b.times.backward_s) == pytest.approx((1.5, 2.5))
    assert (a.steps, b.steps) == (8, 2)
    assert made.profile.by_name["a/m"].curve[0].op_s == pytest.approx(3.5)


def test_the_update_is_that_of_the_bytes_of_each_set(made: Calibrated) -> None:
    """Six times 0.25 s and twice 0.5 s, for 4 MiB each: b's device has told nothing."""
    assert made.s_per_byte == pytest.approx(2.5 / (8 * 4 * 2**20))


def test_what_is_left_is_that_of_all_steps(made: Calibrated) -> None:
    """6 x 13 + 2 x 21 s were measured. By the profile a's four ops take 14 s, b's two 8, and the update of
    a's 4 MiB 2.5 / 8 s.
    """
    assert made.profile.calibration is not None
    accounted_s = 8 * (4 * 3.5 + 2.5 / 8)
    assert made.profile.calibration.held_up == pytest.approx((6 * 13 + 2 * 21) / accounted_s - 1, rel=1e-6)


def test_each_set_has_a_row_and_the_run_is_their_mean_by_their_shares(made: Calibrated) -> None:
    (run,) = report_on(made, Path("out.json"), None).iterations
    assert [(each.tasks, each.share, each.steps) for each in run.task_sets] == [(A, 0.8, 6), (AB, 0.2, 2)]
    assert [each.measured_s for each in run.task_sets] == [13.0, 21.0]
    assert run.measured_s == pytest.approx(0.8 * 13 + 0.2 * 21)
    assert [each.before_s for each in run.task_sets] == pytest.approx([8.0, 8.0], rel=1e-6)
    assert run.plan_s == pytest.approx(8.0) and run.other_s == pytest.approx(0.125)
    alone_s, both_s = (each.after_s for each in run.task_sets)
    assert alone_s == pytest.approx((6 * 13 + 2 * 21) / 8, rel=1e-6) == both_s
    lines = summary_lines(report_on(made, Path("out.json"), None)).splitlines()
    assert "iteration (mean of the steps) 14.6 s measured" in lines[-3]
    assert lines[-2].startswith("  80% of the steps run a: 13 s measured, 8 s by its plan")
    assert lines[-1].startswith("  20% of the steps run a, b: 21 s measured")


def test_a_set_of_few_steps_is_warned_of(made: Calibrated) -> None:
    (warning,) = made.warnings
    assert ", steps of a, b: only 2 steps measured" in warning


def test_the_record_is_of_the_run(made: Calibrated) -> None:
    """Of a's op by 1 / 2 and 3 / 2 in the two sets, and b's by 2: (3 / 2 - 1, 5 / 2 - 1, 4 / 2 - 1)."""
    assert made.profile.calibration is not None
    (record,) = made.profile.calibration.runs
    assert (record.steps, record.measured_s, record.predicted_s) == (8, 15.0, 8.0)
    assert (record.metaop_error, record.worst_metaop_error) == pytest.approx((1.0, 1.5))


def shared(**more: Any) -> Profile:
    """Ops whose parameters a and b share, so that what one device holds in one set it sums in the other."""
    a, b = (metaop_of(f"{task}/m", 4, TWICE, parameters="net") for task in "ab")
    last = metaop_of("b/last", 1, {1: 0.5}, inputs=("b/m",))
    costs = {"optimizer_s_per_byte": 2e-9, "optimizer_state_sharded": True, **more}
    return sampled(a, b, last, **costs)


def held_by_others() -> Profile:
    """On one device each with the same parameters, of which each device steps half in every step."""
    a, b = (metaop_of(f"{task}/m", 4, {1: 2.0}, parameters="net") for task in "ab")
    return sampled(a, b, optimizer_s_per_byte=2e-9, optimizer_state_sharded=True)


@pytest.mark.parametrize("of", [shared, held_by_others])
def test_every_set_is_predicted_again_as_it_was_planned(of: Callable[[], Profile]) -> None:
    """With the sums, and the update, of what devices hold in any set."""
    profile = of()
    plan = make_plan(profile, cluster_of(2))
    devices = {device for piece in plan.set_plans[A].slices for device in piece.devices}
    assert len(devices) == (2 if of is shared else 1)
    for own in plan.set_plans.values():
        again = predicted_again(own, profile)
        assert again.iteration_s == pytest.approx(own.predicted.iteration_s, rel=1e-8)
        assert again.gradient_sum_s == pytest.approx(own.predicted.gradient_sum_s, abs=1e-7)
        assert again.optimizer_s == pytest.approx(own.predicted.optimizer_s, abs=1e-7)
        assert min(own.predicted.gradient_sum_s, own.predicted.optimizer_s) > 1e-4


@pytest.mark.parametrize("of", [shared, held_by_others])
def test_what_was_measured_is_predicted_of_every_set_and_once_more_changes_nothing(
    of: Callable[[], Profile], tmp_path: Path
) -> None:
    profile = of()
    plan = make_plan(profile, cluster_of(2))
    truth = slower(profile, {"a/m": (1.5, 3.0), "b/m": (0.5, 2.0), "b/last": (4.0, 4.0)})
    truth = Profile(**{**dict(truth), "optimizer_s_per_byte": 5e-9})
    run = made_run_of_sets(tmp_path / "run", plan, truth, STEPS)
    found = calibrate([run], profile, WHERE).profile
    for own in plan.set_plans.values():
        true_s = predicted_again(own, truth).iteration_s
        assert predicted_again(own, found).iteration_s == pytest.approx(true_s, rel=1e-6)
    again = calibrate([run], found, WHERE).profile
    assert (again.metaops, again.links, again.processor) == (found.metaops, found.links, found.processor)
    assert again.optimizer_s_per_byte == found.optimizer_s_per_byte == pytest.approx(5e-9)
    late = made_run_of_sets(tmp_path / "late", plan, truth, STEPS, longer=1.5)
    made = calibrate([late], profile, WHERE).profile
    assert made.calibration is not None
    assert made.calibration.held_up == pytest.approx(0.5, rel=1e-5)


def test_sets_that_did_not_run_say_nothing(tmp_path: Path) -> None:
    """The run is that of the others, with all of the steps."""
    profile = shared()
    plan = make_plan(profile, cluster_of(2))
    run = made_run_of_sets(tmp_path / "run", plan, slower(profile, {"b/m": (9.0, 9.0)}), {A: 4})
    made = calibrate([run], profile, WHERE)
    assert {key[0] for key in made.points["cpu"]} == {"a/m"}
    (row,) = report_on(made, Path("out.json"), None).iterations[0].task_sets
    assert (row.tasks, row.share) == (A, 1.0)


def test_history_takes_such_runs(tmp_path: Path) -> None:
    profile = shared()
    plan = make_plan(profile, cluster_of(2))
    made_run_of_sets(tmp_path / "runs/one", plan, slower(profile, {"a/m": (2.0, 2.0)}), STEPS)
    found = from_history(tmp_path / "runs", profile, WHERE, cluster_of(2))
    assert found.passed_over == ()
    assert "one (8 steps on 2 devices" in found.note
    assert found.profile.by_name["a/m"].curve[1].op_s == pytest.approx(2.0, rel=1e-6)
    planned = make_plan(found.profile, cluster_of(2))
    assert planned.task_sets


def span(kind: str, start_s: float, end_s: float, **more: Any) -> MeasuredSpan:
    return MeasuredSpan.model_validate({"kind": kind, "start_s": start_s, "end_s": end_s, **more})


def all_in(own: Plan, number: int) -> MeasuredStep:
    """A step that runs a set's slices, each forward on its devices and with a transfer from it to itself; and
    in which all parameter groups of all plans are summed, the n-th in n bytes.
    """
    assert own.joint is not None
    devices: list[list[MeasuredSpan]] = [[], []]
    for place, piece in zip(own.joint.members[own.member], own.slices, strict=True):
        for device in piece.devices:
            devices[device].append(span("forward", 0.0, 1.0, slice=place))
            moved = span("transfer", 1.0, 1.5, slice=place, source_slice=place, peer=0, num_bytes=1)
            devices[device].append(moved)
    for index, _ in enumerate(groups_of_all(own)):
        devices[0].append(span("sum", 2.0, 3.0, group=index, num_bytes=index))
    spans = tuple(map(tuple, devices))
    return MeasuredStep(step=number, start_s=0.0, end_s=4.0, devices=spans)


def groups_of_all(own: Plan) -> tuple[ParameterGroup, ...]:
    assert own.joint is not None
    return joint_groups(own.joint, uses_of(own), own.cluster, own.gradient_bytes_per_param)


def test_steps_of_the_timeline_are_of_the_set_that_they_ran(tmp_path: Path) -> None:
    """Slices and parameter groups are numbered as the set's plan has them; what it does not sum has none."""
    profile = shared()
    plan = make_plan(profile, cluster_of(2))
    of_a, of_both = plan.set_plans[A], plan.set_plans[AB]
    timeline = MeasuredTimeline(
        plan_sha256=plan.sha256(),
        clock_error_s=0.0,
        steps=(all_in(of_both, 7), all_in(of_a, 8), all_in(of_a, 9)),
    )
    run = read_run(made_run_of_sets(tmp_path / "run", plan, profile, STEPS, timeline=timeline))
    steps = {part.tasks: part.timeline.steps for part in run.parts if part.timeline is not None}
    assert {tasks: [step.step for step in own] for tasks, own in steps.items()} == {A: [8, 9], AB: [7]}
    of_set = {}
    for part in run.parts:
        spans = [(n, each) for n, own in enumerate(steps[part.tasks][0].devices) for each in own]
        places = {(device, n) for n, piece in enumerate(part.plan.slices) for device in piece.devices}
        assert {(device, each.slice) for device, each in spans if each.kind == "forward"} == places
        moved = [each for _, each in spans if each.kind == "transfer"]
        assert all(each.source_slice == each.slice is not None for each in moved)
        known = traffic_of(part.plan).groups
        sums = [each for _, each in spans if each.kind == "sum"]
        found = {each.num_bytes: known[each.group].blocks for each in sums if each.group is not None}
        every = groups_of_all(part.plan)
        assert found == {index: every[index].blocks for index in found}
        assert len(found) == len(known)
        of_set[part.tasks] = set(found)
    assert of_set[A] < of_set[AB] == set(range(len(groups_of_all(of_a))))
    assert 0 not in of_set[A]


def without(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda found: found.update(changes)


def of_first(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda found: found["task_sets"][0].update(changes)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            without(task_sets=[]),
            "in the steps of each set of tasks is missing; the run is of an older version",
        ),
        (of_first(tasks=["b"]), "task_sets: b: the plan that was run has nothing for them"),
        (of_first(tasks=["a", "b"]), "task_sets: a, b: there twice"),
        (of_first(slices=[]), "task_sets: a: slices: what each slice took is missing"),
        (
            of_first(slices=[{"slice": 1, "forward_s": 1, "backward_s": 1}]),
            "task_sets: a: slices: expected each of the plan's 1 slices once",
        ),
        (of_first(iteration={"predicted_s": 1, "measured_s": 2e9}), "2e+09 s are no measurement"),
        (
            of_first(devices=[{"device": 2, "compute_s": 1, "wait_s": 0, "data_s": 0}]),
            "device 2 is not in the plan",
        ),
    ],
)
def test_what_is_not_of_the_plans_sets_is_refused(
    tmp_path: Path, damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    _, plan = on_one_device_each()
    path = by_hand(tmp_path / "run", plan) / PREDICTED_FILE
    found = json.loads(path.read_text())
    damage(found)
    path.write_text(json.dumps(found))
    with pytest.raises(InputError, match=re.escape(message)):
        read_run(tmp_path / "run")


def test_on_several_types_each_share_of_a_sets_slices_is_of_its_type(tmp_path: Path) -> None:
    """Whole batches cut by speed, by a plan whose slices say when each pass runs."""
    fast, slow = "a100-80gb", "v100-32gb"
    nets = [
        metaop_on_types(f"{task}/net", ops, {fast: 0.01, slow: 0.02}, batch_size=6)
        for task, ops in (("a", 2), ("b", 3))
    ]
    profile = profile_on_types(*nets).model_copy(update={"task_sets": SETS})
    plan = make_plan(profile, cluster_of_types({fast: 1, slow: 1}))
    assert any(piece.rows for own in plan.set_plans.values() for piece in own.slices)
    for own in plan.set_plans.values():
        assert predicted_again(own, profile).iteration_s == pytest.approx(own.predicted.iteration_s, rel=1e-8)
    truth = slower_on(profile, slow, {"a/net": (1.5, 2.0), "b/net": (3.0, 0.5)})
    run = made_run_of_sets(tmp_path / "run", plan, truth, STEPS)
    found = calibrate([run], profile, WHERE).profile
    for own in plan.set_plans.values():
        true_s = predicted_again(own, truth).iteration_s
        assert predicted_again(own, found).iteration_s == pytest.approx(true_s, rel=1e-6)
        assert true_s != pytest.approx(own.predicted.iteration_s, rel=0.01)
