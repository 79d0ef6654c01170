"""What users rely on: after calibrating, the plan's own slices, and the next plan, take what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from calibration.made_runs import made_run, slower
from helpers.plans import SELECTIVE, cluster_of, metaop_of, plan_of, profile_of, slice_of, two_towers
from spindle_cli.calibrate.predicting import predicted_again
from spindle_cli.calibrate.reading import read_run
from spindle_cli.calibrate.run import Calibrated, calibrate, calibrated_by
from spindle_cli.files.run_files import SliceTimes
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan
from spindle_cli.profile.batch_sums import BatchSum
from spindle_cli.profile.types import MetaOpProfile, ProcessorCosts, Profile

PROFILE = Path("profile.json")
UNEVEN = {"pairs/vision": (1.5, 0.8), "pairs/text": (2.0, 3.0), "pairs/loss": (0.25, 1.0)}


def calibrated(profile: Profile, *folders: Path) -> Calibrated:
    return calibrate(folders, profile, PROFILE)


def seconds(profile: Profile) -> list[tuple[str, int, int, float, float]]:
    return [
        (metaop.name, point.dp, point.tp, point.forward_s, point.backward_s)
        for metaop in profile.metaops
        for point in metaop.curve
    ]


def require_equal(found: Profile, truth: Profile) -> None:
    for (*place, forward_s, backward_s), (*other, true_forward_s, true_backward_s) in zip(
        seconds(found), seconds(truth), strict=True
    ):
        assert place == other
        assert (forward_s, backward_s) == pytest.approx((true_forward_s, true_backward_s), rel=1e-9), place


def with_costs(profile: Profile, **costs: object) -> Profile:
    return profile.model_copy(update=costs)


def shared(op_s: dict[int, float] | None = None) -> tuple[Profile, Plan]:
    """Two tasks on one trunk: messages, sums of parameters, reading and updates, on two devices."""
    curve = op_s or {1: 1.0, 2: 0.6}
    more = {"parameters": "trunk", "field_bytes": {0: 4096}}
    first = metaop_of("a/trunk", 3, curve, **more)
    head = metaop_of("a/head", 1, {1: 0.5, 2: 0.3}, inputs=(first.name,))
    second = metaop_of("b/trunk", 2, curve, **more)
    profile = profile_of(first, head, second).model_copy(
        update={
            "optimizer_s_per_byte": 1e-8,
            "processor": ProcessorCosts(message_s=0.01, s_per_byte=1e-7, load_s={"a": 0.02, "b": 0.01}),
        }
    )
    slices = [
        slice_of(first, (0, 1), (0, 1), 0.0),
        slice_of(first, (1, 3), (0,), 0.6),
        slice_of(second, (0, 2), (1,), 0.6),
        slice_of(head, (0, 1), (1,), 2.6),
    ]
    return profile, plan_of(profile, cluster_of(2), [(each,) for each in slices])


def test_the_next_plan_predicts_what_was_measured(tmp_path: Path) -> None:
    profile, _ = two_towers()
    plan = make_plan(profile, cluster_of(4))
    truth = slower(profile, UNEVEN)
    found = calibrated(profile, made_run(tmp_path / "run", plan, truth)).profile
    require_equal(found, truth)
    again, true = make_plan(found, cluster_of(4)).predicted, make_plan(truth, cluster_of(4)).predicted
    assert again.iteration_s == pytest.approx(true.iteration_s, rel=1e-6)
    assert again.iteration_s != pytest.approx(plan.predicted.iteration_s, rel=0.01)


def test_the_same_slices_are_predicted_as_they_were_measured(tmp_path: Path) -> None:
    profile, plan = shared()
    truth = slower(profile, {"a/trunk": (1.2, 1.5), "b/trunk": (0.7, 0.9), "a/head": (3.0, 1.0)})
    truth = with_costs(truth, optimizer_s_per_byte=3e-8)
    found = calibrated(profile, made_run(tmp_path / "run", plan, truth)).profile
    require_equal(found, truth)
    assert found.optimizer_s_per_byte == pytest.approx(3e-8)
    assert predicted_again(plan, found).iteration_s == pytest.approx(
        predicted_again(plan, truth).iteration_s, rel=1e-9
    )


@pytest.mark.parametrize("made", [two_towers, shared])
def test_a_run_as_predicted_changes_nothing(tmp_path: Path, made: object) -> None:
    profile, plan = made()  # type: ignore[operator]
    found = calibrated(profile, made_run(tmp_path / "run", plan, profile))
    assert seconds(found.profile) == seconds(profile)
    assert (found.profile.processor, found.profile.links) == (profile.processor, profile.links)
    assert found.profile.optimizer_s_per_byte == profile.optimizer_s_per_byte
    assert found.processor_times == 1.0
    assert found.profile.calibration is not None
    assert found.profile.calibration.held_up == 0.0


def test_a_plan_with_passes_apart_is_calibrated_too(tmp_path: Path) -> None:
    profile, plan = shared()
    pieces = [
        piece.model_copy(
            update={
                "end_s": piece.start_s + (piece.end_s - piece.start_s) / 3,
                "backward_start_s": 20.0 - piece.end_s,
                "backward_end_s": 20.0 - piece.end_s + (piece.end_s - piece.start_s) * 2 / 3,
            }
        )
        for piece in plan.slices
    ]
    waves = [
        wave.model_copy(update={"slices": (piece,)}) for wave, piece in zip(plan.waves, pieces, strict=True)
    ]
    fields = {name: getattr(plan, name) for name in Plan.model_fields}
    apart = Plan(**{**fields, "schema_": "spindle.plan/2", "waves": tuple(waves)})
    truth = slower(profile, {"a/trunk": (1.2, 1.5)})
    found = calibrated(profile, made_run(tmp_path / "run", apart, truth)).profile
    require_equal(found, truth)
    assert predicted_again(apart, found).iteration_s == pytest.approx(
        predicted_again(apart, truth).iteration_s, rel=1e-9
    )


def test_calibrating_again_by_the_same_run_changes_nothing_more(tmp_path: Path) -> None:
    profile, plan = shared()
    run = made_run(tmp_path / "run", plan, slower(profile, {"a/trunk": (1.2, 1.5)}))
    once = calibrated(profile, run).profile
    again = calibrated(once, run).profile
    require_equal(again, once)
    assert once.calibration is not None and again.calibration is not None
    assert [each.name for each in again.calibration.runs] == ["run"]


@pytest.mark.parametrize("selective", [False, True])
def test_recomputed_ops_and_sums_inside_passes_are_taken_out(tmp_path: Path, selective: bool) -> None:
    sums = (BatchSum(num_bytes=2**20, forward=1, backward=2),)
    metaop = metaop_of("a/norms", 4, {1: 1.0, 2: 0.6}, batch_sums=sums)
    layers = metaop_of("b/layers", 2, {1: 1.0, 2: 0.6}, **SELECTIVE)
    profile = profile_of(metaop, layers)
    slices = [
        slice_of(metaop, (0, 4), (0, 1), 0.0),
        slice_of(layers, (0, 2), (0,), 3.0, recompute=True, selective=selective),
    ]
    plan = plan_of(profile, cluster_of(2), [(each,) for each in slices])
    truth = slower(profile, {metaop.name: (1.1, 1.3), layers.name: (2.0, 1.5)})
    require_equal(calibrated(profile, made_run(tmp_path / "run", plan, truth)).profile, truth)


def test_what_ran_says_so_and_what_was_scaled_too(tmp_path: Path) -> None:
    profile, plan = two_towers()
    found = calibrated(profile, made_run(tmp_path / "run", plan, slower(profile, UNEVEN), steps=7)).profile
    points = {(name, dp): point for name, dp, point in _points(found)}
    assert points["pairs/vision", 2].source == "measured"
    assert points["pairs/vision", 2].repeats == 7
    assert points["pairs/vision", 1].source == "fitted"
    assert points["pairs/text", 2].source == "measured"
    assert found.calibration is not None
    (run,) = found.calibration.runs
    assert (run.name, run.steps, run.num_devices, run.num_nodes) == ("run", 7, 4, 1)
    assert run.plan_sha256 == plan.sha256()
    # Off by ops' seconds: vision (1.5 + 2 x 0.8) / 3, text (2 + 2 x 3) / 3, loss (0.25 + 2) / 3.
    assert run.worst_metaop_error == pytest.approx(8 / 3 - 1)
    # The points: vision on 2 and on 4, text, loss.
    assert run.metaop_error == pytest.approx((3.1 / 3 - 1 + 1 - 2.25 / 3) / 2)


def _points(profile: Profile) -> list[tuple[str, int, object]]:
    return [(metaop.name, point.dp, point) for metaop in profile.metaops for point in metaop.curve]


def test_runs_count_by_their_steps(tmp_path: Path) -> None:
    profile, plan = two_towers()
    short = made_run(tmp_path / "short", plan, slower(profile, {"pairs/text": (1.0, 1.0)}), steps=10)
    long = made_run(tmp_path / "long", plan, slower(profile, {"pairs/text": (2.0, 3.0)}), steps=30)
    found = calibrated(profile, short, long)
    require_equal(found.profile, slower(profile, {"pairs/text": (1.75, 2.5)}))
    assert found.profile.calibration is not None
    assert [each.name for each in found.profile.calibration.runs] == ["short", "long"]
    assert {each.steps for own in found.points.values() for each in own.values()} == {40}


def test_a_later_calibration_keeps_the_names_of_earlier_runs(tmp_path: Path) -> None:
    profile, plan = two_towers()
    once = calibrated(profile, made_run(tmp_path / "one", plan, slower(profile, UNEVEN))).profile
    truth = slower(profile, {"pairs/text": (5.0, 5.0)})
    twice = calibrated(once, made_run(tmp_path / "two", plan, truth)).profile
    require_equal(twice, truth)
    assert twice.calibration is not None
    assert [each.name for each in twice.calibration.runs] == ["one", "two"]


def test_slices_that_took_no_time_say_nothing(tmp_path: Path) -> None:
    profile, plan = two_towers()
    run = made_run(tmp_path / "run", plan, slower(profile, {"pairs/loss": (0.0, 0.0), "pairs/text": (2, 2)}))
    require_equal(calibrated(profile, run).profile, slower(profile, {"pairs/text": (2, 2)}))


def test_a_short_run_is_warned_of(tmp_path: Path) -> None:
    profile, plan = two_towers()
    runs = [made_run(tmp_path / str(steps), plan, profile, steps=steps) for steps in (2, 3)]
    (warning,) = calibrated(profile, *runs).warnings
    assert warning.startswith(f"{runs[0]}: only 2 steps measured")


def test_the_curve_of_a_metaop_with_another_fit_has_none(tmp_path: Path) -> None:
    from spindle_cli.profile.types import Fit

    def fitted(metaop: MetaOpProfile) -> MetaOpProfile:
        return metaop.model_copy(update={"fit": Fit(segments=())})

    profile, plan = two_towers()
    profile = profile.model_copy(update={"metaops": tuple(map(fitted, profile.metaops))})
    run = made_run(tmp_path / "run", plan, slower(profile, {"pairs/text": (2.0, 2.0)}))
    fits = {each.name: each.fit for each in calibrated(profile, run).profile.metaops}
    assert fits["pairs/text"] is None
    assert fits["pairs/vision"] is not None


def test_what_nothing_accounts_for_is_a_share_of_the_next_iterations(tmp_path: Path) -> None:
    """Of a tenth more and, with thrice the steps, of half more."""
    profile, plan = two_towers()
    accounted_s = predicted_again(plan, profile).iteration_s
    runs = [
        made_run(tmp_path / "one", plan, profile, steps=10, iteration_s=1.1 * accounted_s),
        made_run(tmp_path / "two", plan, profile, steps=30, iteration_s=1.5 * accounted_s),
    ]
    found = calibrated(profile, *runs).profile
    assert seconds(found) == seconds(profile)
    assert found.calibration is not None
    assert found.calibration.held_up == pytest.approx(0.4)
    assert predicted_again(plan, found).iteration_s == pytest.approx(1.4 * accounted_s)
    before, after = (make_plan(each, cluster_of(4)).predicted for each in (profile, found))
    assert after.held_up_s == pytest.approx(0.4 * before.iteration_s)
    assert after.iteration_s == pytest.approx(1.4 * before.iteration_s)
    assert after.compute_s == before.compute_s
    # Once more, by one that took as long as accounted for: nothing is left of it.
    again = calibrated(found, made_run(tmp_path / "three", plan, profile)).profile
    assert again.calibration is not None
    assert again.calibration.held_up == 0.0


def test_a_run_that_was_faster_than_accounted_for_holds_nothing_up(tmp_path: Path) -> None:
    profile, plan = two_towers()
    found = calibrated(profile, made_run(tmp_path / "run", plan, profile, iteration_s=0.5)).profile
    assert found.calibration is not None
    assert found.calibration.held_up == 0.0


def test_slices_on_the_same_share_count_by_their_ops(tmp_path: Path) -> None:
    """One op in 1 s forward and 2 s backward, three in 6 s and 3 s: 7 / 4 and 5 / 4 s an op."""
    layers = metaop_of("a/x", 4, {1: 3.0})
    profile = profile_of(layers)
    slices = [slice_of(layers, (0, 1), (0,), 0.0), slice_of(layers, (1, 4), (1,), 3.0)]
    plan = plan_of(profile, cluster_of(2), [(each,) for each in slices])
    run = read_run(made_run(tmp_path / "run", plan, profile))
    took = (
        SliceTimes(slice=0, forward_s=1.0, backward_s=2.0),
        SliceTimes(slice=1, forward_s=6.0, backward_s=3.0),
    )
    run = replace(run, measured=run.measured.model_copy(update={"slices": took}))
    (metaop,) = calibrated_by((run,), profile).profile.metaops
    assert [(each.forward_s, each.backward_s) for each in metaop.curve] == [(1.75, 1.25)]


def test_processor_costs_that_cannot_be_are_written_smaller(tmp_path: Path) -> None:
    """Two seconds of messages and reading beside each that a device was seen to compute."""
    profile, plan = shared()
    run = made_run(tmp_path / "run", plan, profile)
    many = profile.processor.model_copy(
        update={"message_s": 1.0, "load_s": {"a": 1.0, "b": 1.0}, "step_s": 0.5, "pass_s": 0.25}
    )
    found = calibrated(with_costs(profile, processor=many), run)
    assert 0 < found.processor_times < 1
    processor = found.profile.processor
    assert processor.message_s == pytest.approx(found.processor_times)
    assert processor.load_s == pytest.approx({"a": found.processor_times, "b": found.processor_times})
    assert (processor.step_s, processor.pass_s) == pytest.approx(
        (found.processor_times / 2, found.processor_times / 4)
    )


def test_an_update_that_was_not_measured_stays_as_it_is(tmp_path: Path) -> None:
    profile, plan = shared()
    run = read_run(made_run(tmp_path / "run", plan, profile))
    run = replace(run, measured=run.measured.model_copy(update={"devices": ()}))
    found = calibrated_by((run,), profile)
    assert (found.s_per_byte, found.profile.optimizer_s_per_byte) == (None, 1e-8)


def test_a_plan_is_predicted_with_the_profiles_update() -> None:
    layers = metaop_of("a/x", 2, {1: 3.0}, param_bytes_per_op=10**6)
    profile = profile_of(layers)
    plan = plan_of(profile, cluster_of(1), [(slice_of(layers, (0, 2), (0,), 0.0),)])
    slow = with_costs(profile, optimizer_s_per_byte=1e-6)
    assert predicted_again(plan, profile).iteration_s == pytest.approx(6.0)
    assert predicted_again(plan, slow).iteration_s == pytest.approx(8.0)


def test_a_plan_is_predicted_in_its_own_order_of_passes() -> None:
    """On device 1 y runs forward and backward, then z: x is through at 6 s, z at 7 s. In the order of version
    1 y's backward pass is behind z's, and x ends at 9 s.
    """
    x = metaop_of("a/x", 1, {1: 3.0}, param_bytes_per_op=0, inner_output_bytes=0)
    y = metaop_of("a/y", 1, {1: 3.0}, param_bytes_per_op=0, inputs=(x.name,))
    z = metaop_of("b/z", 1, {1: 3.0}, param_bytes_per_op=0)
    profile = profile_of(x, y, z)
    times = {x.name: (0.0, 4.0), y.name: (1.0, 2.0), z.name: (4.0, 5.0)}
    devices = {x.name: 0, y.name: 1, z.name: 1}
    first = [slice_of(each, (0, 1), (devices[each.name],), times[each.name][0]) for each in (x, y, z)]
    plan = plan_of(profile, cluster_of(2), [(each,) for each in first])
    assert predicted_again(plan, profile).iteration_s == pytest.approx(9.0, rel=1e-3)
    waves = []
    for wave, piece in zip(plan.waves, first, strict=True):
        start_s, back_s = times[piece.metaop]
        changed = {"end_s": start_s + 1, "backward_start_s": back_s, "backward_end_s": back_s + 2}
        waves.append(wave.model_copy(update={"slices": (piece.model_copy(update=changed),)}))
    fields = {name: getattr(plan, name) for name in Plan.model_fields}
    apart = Plan(**{**fields, "schema_": "spindle.plan/2", "waves": tuple(waves)})
    assert predicted_again(apart, profile).iteration_s == pytest.approx(7.0, rel=1e-3)
