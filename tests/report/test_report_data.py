"""What the report says about a plan: by hand for two towers on four devices, and for any valid plan."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.examples import examples
from helpers.plans import cluster_of, metaop_of, profile_of, two_towers
from helpers.random_plans import plans
from helpers.timelines import simulated_timeline
from spindle_cli.errors import InputError, NoPlanError
from spindle_cli.files.artifact import to_compact_json, write_json
from spindle_cli.files.cluster import NodeGroup
from spindle_cli.files.run_files import (
    Comparison,
    DeviceTimes,
    MetaOpComparison,
    PredictedVsMeasured,
    SetMeasured,
    StepMetrics,
)
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan, StrategyName
from spindle_cli.profile.types import Profile
from spindle_cli.report.build import build_report, rows_by
from spindle_cli.report.run import flops_by_task, run_view
from spindle_cli.report.series import MAX_POINTS
from spindle_cli.report.timeline import timeline_of
from spindle_cli.report.types import equal_runs, runs_of
from spindle_cli.simulate.run import simulate


def write_metrics(folder: Path, metrics: list[StepMetrics]) -> None:
    (folder / "metrics.jsonl").write_text("".join(each.to_line() for each in metrics))


def step(number: int, loss: float = 1.0, iteration_s: float = 0.5) -> StepMetrics:
    return StepMetrics(step=number, loss=loss, task_losses={"pairs": loss}, iteration_s=iteration_s)


def edited(plan: Plan, **slice_changes: object) -> Plan:
    """The plan with its first slice changed."""
    data = plan.model_dump(mode="json", by_alias=True)
    data["waves"][0]["slices"][0].update(slice_changes)
    return Plan.from_data(data, where="test")


@given(st.sets(st.integers(0, 60)))
def test_runs_hold_exactly_the_devices(devices: set[int]) -> None:
    runs = runs_of(devices)
    assert [device for first, last in runs for device in range(first, last + 1)] == sorted(devices)
    assert all(later[0] > earlier[1] + 1 for earlier, later in pairwise(runs))


def test_equal_neighbours_are_one_run() -> None:
    assert equal_runs("aabba") == (((0, 1), "a"), ((2, 3), "b"), ((4, 4), "a"))


def test_two_towers_are_drawn_as_planned() -> None:
    profile, plan = two_towers()
    data = build_report(plan, profile=profile)
    vision, text, wide, loss = data.slices
    assert (vision.runs, vision.wave, vision.start_s, vision.end_s) == (((0, 1),), 0, 0.0, 3.0)
    assert (text.runs, wide.runs, loss.runs) == (((2, 3),), ((0, 3),), ((0, 0),))
    assert data.gap == pytest.approx(3.8 / 2.8 - 1)
    assert [metaop.short for metaop in data.metaops] == ["vision", "text", "loss"]
    assert data.metaops[2].inputs == (0, 1)
    assert data.metaops[0].device_s == pytest.approx(3 * 2 + 0.6 * 4)


def test_rows_of_a_task_are_as_many_as_it_uses_at_once() -> None:
    """Vision on 2 devices beside text on 2, then vision on 4, then the loss on 1: four rows."""
    _, plan = two_towers()
    data = build_report(plan)
    (band,) = data.task_bands
    assert (band.name, band.first_row, band.num_rows) == ("pairs", 0, 4)
    assert [piece.task_row for piece in data.slices] == [0, 2, 0, 0]
    assert [(band.name, band.num_rows) for band in data.component_bands] == [
        ("vision", 4),
        ("text", 2),
        ("loss", 1),
    ]


@examples(30)
@given(plans())
def test_slices_never_overlap_in_their_rows(plan: Plan) -> None:
    rows = rows_by(plan, {metaop.name: metaop.task for metaop in plan.metaops})
    for (i, a), (j, b) in combinations(enumerate(plan.slices), 2):
        apart = a.end_s <= b.start_s or b.end_s <= a.start_s
        first, second = rows.row_of[i], rows.row_of[j]
        assert apart or first + len(a.devices) <= second or second + len(b.devices) <= first


@examples(20)
@given(plans())
def test_the_timeline_is_the_whole_simulation(plan: Plan) -> None:
    """Merging devices that do the same loses no compute and no byte."""
    simulation = simulate(plan)
    timeline = timeline_of(simulation)
    computed_s = sum(
        (what.end_s - what.start_s) * sum(last - first + 1 for first, last in what.runs)
        for what in timeline.happenings
        if what.kind in ("forward", "backward", "optimizer")
    )
    assert computed_s == pytest.approx(sum(simulation.busy_s), abs=1e-6)
    moved = sum(what.num_bytes for what in timeline.happenings if what.kind == "transfer")
    assert moved == timeline.transferred_bytes == sum(each.num_bytes for each in simulation.passages)
    assert sum(use.run[1] - use.run[0] + 1 for use in timeline.use) == plan.cluster.num_devices


def test_memory_is_the_plan_s_prediction() -> None:
    _, plan = two_towers()
    data = build_report(plan)
    for use in data.memory:
        total = use.parameter_bytes + use.gradient_bytes + use.optimizer_bytes
        total += use.activation_bytes + use.buffer_bytes + use.allocator_bytes + use.outside_bytes
        for device in range(use.run[0], use.run[1] + 1):
            assert total == plan.predicted.peak_memory_bytes[device]


def test_the_profile_brings_every_strategy() -> None:
    profile, plan = two_towers()
    data = build_report(plan, profile=profile)
    assert data.strategies is not None
    assert [each.strategy for each in data.strategies] == ["spindle", "sequential", "distmm", "optimus"]
    assert [each.is_this for each in data.strategies] == [True, False, False, False]
    assert data.strategies[0].predicted == plan.predicted
    assert all(each.predicted or each.failure for each in data.strategies)
    assert build_report(plan).strategies is None


def counted(profile: Profile, **environment: object) -> Profile:
    """The profile with 8 GFLOP forward for every op."""
    metaops = tuple(metaop.model_copy(update={"flops_per_op": 8e9}) for metaop in profile.metaops)
    return profile.model_copy(update={"metaops": metaops, "environment": environment})


def of_h100s(profile: Profile, strategy: StrategyName) -> Plan:
    """A plan for two of them."""
    group = NodeGroup(count=1, devices=2, device="h100-80gb", memory_gib=80)
    return make_plan(profile, cluster_of(2).changed(nodes=(group,)), strategy)


def test_the_cluster_s_work_is_told_of_the_plan_and_of_sequential() -> None:
    """8 ops of 3 x 8 GFLOP, the loss's too, whose product has two operands that take gradients."""
    profile = counted(two_towers()[0], precision="bf16-autocast")
    plan = of_h100s(profile, "spindle")
    own, beside = build_report(plan, profile=profile).work
    assert (own.strategy, own.is_this, beside.strategy, beside.is_this) == (
        "spindle",
        True,
        "sequential",
        False,
    )
    for view, simulation in ((own, simulate(plan)), (beside, simulate(of_h100s(profile, "sequential")))):
        assert view.step_s == simulation.step_s
        assert view.mean_flops_per_s == pytest.approx(8 * 24e9 / simulation.step_s)
        assert view.peak_share == pytest.approx(8 * 24e9 / simulation.step_s / (2 * 989e12))
        assert view.flops_per_s is not None
        assert view.flops_per_s[0][0] == 0.0
        for held in view.memory:
            for device in range(held.run[0], held.run[1] + 1):
                bytes_of = [step.num_bytes for step in simulation.memory[device]]
                assert (held.least_bytes, held.most_bytes) == (min(bytes_of), max(bytes_of))
        assert sum(held.run[1] - held.run[0] + 1 for held in view.memory) == 2


def test_the_peak_is_that_of_the_profile_s_arithmetic() -> None:
    shares = {}
    for precision in ("float32", "bfloat16", None):
        profile = counted(two_towers()[0], precision=precision)
        shares[precision] = build_report(of_h100s(profile, "spindle"), profile=profile).work[0].peak_share
    assert shares["float32"] == pytest.approx(shares["bfloat16"] * 989 / 67)
    assert shares[None] is None
    # Of a CPU none is published, without the profile none is known.
    profile = counted(two_towers()[0], precision="float32")
    assert build_report(make_plan(profile, cluster_of(2)), profile=profile).work[0].peak_share is None
    assert [view.peak_share for view in build_report(of_h100s(profile, "spindle")).work] == [None]


def test_operations_that_are_not_counted_are_not_told_but_memory_is() -> None:
    profile, plan = two_towers()
    own, beside = build_report(plan, profile=profile).work
    assert (own.flops_per_s, own.mean_flops_per_s, own.peak_share) == (None, None, None)
    assert beside.flops_per_s is None
    assert own.memory[0].most_bytes > own.memory[0].least_bytes > 0


def test_sequential_has_nobody_beside_it_and_a_plan_that_breaks_rules_no_work() -> None:
    profile, plan = two_towers()
    sequential = make_plan(profile, cluster_of(4), "sequential")
    assert [view.strategy for view in build_report(sequential, profile=profile).work] == ["sequential"]
    assert build_report(edited(plan, end_s=1.0)).work == ()


def test_where_sequential_has_no_plan_the_other_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_fits(profile: Profile, cluster: object, strategy: str) -> Plan:
        raise NoPlanError(f"no plan of {strategy} fits", hint="")

    profile, plan = two_towers()
    monkeypatch.setattr("spindle_cli.report.build.make_plan", none_fits)
    data = build_report(plan, profile=profile)
    assert [view.strategy for view in data.work] == ["spindle"]
    assert data.strategies is not None
    assert data.strategies[1].failure == "no plan of sequential fits"


def test_another_profile_is_refused() -> None:
    _, plan = two_towers()
    with pytest.raises(InputError, match="another profile"):
        build_report(plan, profile=profile_of(metaop_of("pairs/vision", 4, {1: 2.0})))


def test_a_plan_that_breaks_rules_is_drawn_with_them_and_not_simulated() -> None:
    _, plan = two_towers()
    data = build_report(edited(plan, end_s=1.0))
    assert data.timeline is None
    assert any("vision" in violation for violation in data.violations)


def test_a_plan_that_names_what_does_not_exist_is_refused() -> None:
    _, plan = two_towers()
    for change in ({"metaop": "pairs/sound"}, {"devices": [0, 9]}, {"ops": [0, 30]}):
        with pytest.raises(InputError, match="cannot be drawn"):
            build_report(edited(plan, **change))


def test_what_is_left_out_of_the_json_is_a_default() -> None:
    _, plan = two_towers()
    data = build_report(plan)
    text = json.dumps(data.model_dump(mode="json", by_alias=True))
    assert '"is_gradient": false' not in text
    assert type(data).from_data(json.loads(text), where="test") == data


def test_a_long_run_is_thinned_to_means(tmp_path: Path) -> None:
    _, plan = two_towers()
    write_metrics(tmp_path, [step(number, loss=float(number)) for number in range(1, 2 * MAX_POINTS + 2)])
    view = run_view(plan, tmp_path)
    assert (view.num_steps, view.steps_per_point) == (2 * MAX_POINTS + 1, 4)
    assert (view.points[0].step, view.points[0].loss) == (4, 2.5)
    assert view.points[-1].step == 2 * MAX_POINTS + 1
    assert view.iteration is None


def test_a_loss_that_is_not_finite_is_seen_and_a_step_done_again_counts_once(tmp_path: Path) -> None:
    _, plan = two_towers()
    write_metrics(tmp_path, [step(1), step(2, loss=float("nan")), step(3, loss=9.0), step(3, loss=4.0)])
    view = run_view(plan, tmp_path)
    assert [point.loss for point in view.points] == [1.0, None, 4.0]
    assert view.points[1].task_losses == {"pairs": None}


def predicted(metaop: str, device: int = 0) -> PredictedVsMeasured:
    return PredictedVsMeasured(
        steps=2,
        iteration=Comparison(predicted_s=3.8, measured_s=4.0),
        metaops=(MetaOpComparison(metaop=metaop, predicted_s=3.0, measured_s=2.5),),
        devices=(DeviceTimes(device=device, compute_s=3.0, wait_s=0.9, data_s=0.1),),
    )


def test_an_ended_run_is_compared(tmp_path: Path) -> None:
    _, plan = two_towers()
    write_metrics(tmp_path, [step(1), step(2)])
    write_json(tmp_path / "predicted.json", predicted("pairs/vision"))
    view = run_view(plan, tmp_path)
    assert view.iteration is not None
    assert (view.iteration.predicted_s, view.iteration.measured_s, view.measured_steps) == (3.8, 4.0, 2)
    assert view.metaops[0].name == "pairs/vision"
    assert view.devices[0].wait_s == 0.9


def test_of_a_run_of_sets_of_tasks_each_set_is_compared(tmp_path: Path) -> None:
    _, plan = two_towers()
    pairs = SetMeasured(
        tasks=("pairs",), steps=2, iteration=Comparison(predicted_s=1.5, measured_s=2.0), slices=()
    )
    compared = predicted("pairs/vision").model_copy(update={"metaops": (), "task_sets": (pairs,)})
    write_metrics(tmp_path, [step(1), step(2)])
    write_json(tmp_path / "predicted.json", compared)
    view = run_view(plan, tmp_path)
    (found,) = view.task_sets
    assert (found.name, found.tasks, found.steps) == ("iteration of pairs", ("pairs",), 2)
    assert (found.predicted_s, found.measured_s) == (1.5, 2.0)
    assert view.metaops == ()
    other = compared.model_copy(update={"task_sets": (pairs.model_copy(update={"tasks": ("texts",)}),)})
    write_json(tmp_path / "predicted.json", other)
    with pytest.raises(InputError, match="task 'texts' is not in the plan"):
        run_view(plan, tmp_path)


def test_the_measured_iteration_is_the_kept_step_that_is_most_like_the_others(tmp_path: Path) -> None:
    _, plan = two_towers()
    timeline = simulated_timeline(plan, {}, (1.0, 3.0, 1.1))
    (tmp_path / "timeline.json").write_text(to_compact_json(timeline), encoding="utf-8")
    write_metrics(tmp_path, [step(1), step(2), step(3)])
    measured = run_view(plan, tmp_path).timeline
    assert measured is not None
    simulation = simulate(plan)
    assert measured.step == 3
    assert measured.iteration_s == pytest.approx(1.1 * simulation.iteration_s)
    computes = [what for what in measured.happenings if what.kind in ("forward", "backward")]
    assert len(computes) == len(simulation.spans)
    assert max(what.end_s for what in computes) <= measured.iteration_s + 1e-6
    assert min(what.start_s for what in computes) == pytest.approx(0, abs=1e-8)


def test_a_timeline_of_another_plan_s_run_is_refused(tmp_path: Path) -> None:
    _, plan = two_towers()
    timeline = simulated_timeline(plan, {}).model_copy(update={"plan_sha256": "sha256:" + "1" * 64})
    (tmp_path / "timeline.json").write_text(to_compact_json(timeline), encoding="utf-8")
    write_metrics(tmp_path, [step(1)])
    with pytest.raises(InputError, match="another plan"):
        run_view(plan, tmp_path)


@pytest.mark.parametrize("other", [predicted("pairs/sound"), predicted("pairs/vision", device=7)])
def test_a_run_of_another_plan_is_refused(tmp_path: Path, other: PredictedVsMeasured) -> None:
    _, plan = two_towers()
    write_json(tmp_path / "predicted.json", other)
    with pytest.raises(InputError, match="not in the plan"):
        run_view(plan, tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    _, plan = two_towers()
    with pytest.raises(InputError, match=r"metrics\.jsonl"):
        run_view(plan, tmp_path)


def test_operations_are_three_times_the_forward_ones_of_each_task_over_the_devices() -> None:
    _, plan = two_towers()
    counted = tuple(metaop.model_copy(update={"flops_per_op": 8.0}) for metaop in plan.metaops)
    ops = sum(metaop.num_ops for metaop in counted)
    assert flops_by_task(plan.model_copy(update={"metaops": counted})) == {"pairs": 3 * ops * 8.0 / 4}
    assert flops_by_task(plan) is None
