"""predicted.json as the runtime makes it of what its ranks have measured: hand-solved."""

from __future__ import annotations

import pytest
import torch

from helpers.cut import cuttable, shares_of
from helpers.plans import SELECTIVE, cluster_of, metaop_of, plan_of, profile_of, slice_of, two_towers
from helpers.several_types import metaop_on_types, plan_in_rows
from helpers.uneven import uneven_plan
from spindle_cli.files.run_files import Comparison, PredictedVsMeasured, SliceTimes, slow_devices
from spindle_cli.plan.make import make_plan
from spindle_cli.runtime.measuring.comparison import Measured, RankReport, compare
from spindle_cli.runtime.measuring.timing import Activity, Lap, Stopwatch
from spindle_cli.workload.settings.types import TaskShare

FAST, SLOW = "a100-80gb", "v100-32gb"
ITERATIONS = [Measured(9.0, 1.0), Measured(2.0, 1.0), Measured(4.0, 1.0)]


def rank(least_s: float = 0.0, **times: float) -> RankReport:
    """Of 'f0' forward and 'b0' backward of slice 0, and so on."""
    kinds = {"f": Activity.FORWARD, "b": Activity.BACKWARD}
    return RankReport({(kinds[name[0]], int(name[1:])): seconds for name, seconds in times.items()}, least_s)


def test_a_slice_takes_as_long_as_its_slowest_device_in_each_direction() -> None:
    _, plan = two_towers()
    ranks = [
        rank(f0=1.0, b0=5.0, f2=1.0, b2=1.0, f3=0.5, b3=0.25),
        rank(f0=2.0, b0=4.0, f2=3.0, b2=1.0),
        rank(f1=1.0, b1=2.0),
        rank(f1=1.5, b1=2.5),
    ]
    found = compare(plan, ITERATIONS, ranks, None)
    assert found.plan_sha256 == plan.sha256()
    assert (found.steps, found.iteration.measured_s) == (2, 3.0)
    assert found.slices == (
        SliceTimes(slice=0, forward_s=2.0, backward_s=5.0),
        SliceTimes(slice=1, forward_s=1.5, backward_s=2.5),
        SliceTimes(slice=2, forward_s=3.0, backward_s=1.0),
        SliceTimes(slice=3, forward_s=0.5, backward_s=0.25),
    )
    vision = next(each for each in found.metaops if each.metaop == "pairs/vision")
    assert (vision.forward, vision.backward) == (
        Comparison(predicted_s=3 * (1.0 / 3) + 0.6 / 3, measured_s=5.0),
        Comparison(predicted_s=3 * (2.0 / 3) + 0.6 * 2 / 3, measured_s=6.0),
    )


@pytest.mark.parametrize(("selective", "again"), [(False, 1.0), (True, 0.25)])
def test_what_is_computed_again_is_predicted_as_part_of_the_backward_pass(
    selective: bool, again: float
) -> None:
    layers = metaop_of("a/x", 2, {1: 3.0}, **SELECTIVE)
    profile = profile_of(layers)
    piece = slice_of(layers, (0, 2), (0,), 0.0, recompute=True, selective=selective)
    plan = plan_of(profile, cluster_of(1), [(piece,)])
    (metaop,) = compare(plan, ITERATIONS, [rank(f0=1.0, b0=1.0)], None).metaops
    assert metaop.forward is not None
    assert metaop.backward is not None
    assert (metaop.forward.predicted_s, metaop.backward.predicted_s) == (2.0, 4.0 + 2 * again)


def several_types() -> PredictedVsMeasured:
    """Two ops on 6 and 2 samples of 8 by a fast device and a slow one, which takes 3.3 s a sample, not 3."""
    plan = plan_in_rows(metaop_on_types("t/net", 2, {FAST: 1.0, SLOW: 3.0}), (0, 6, 8))
    ranks = [rank(f0=4.0, b0=8.0, least_s=11.5), rank(f0=4.4, b0=8.8, least_s=13.2)]
    return compare(plan, ITERATIONS, ranks, None)


def test_of_several_types_each_share_and_the_speed_of_each_type_are_left() -> None:
    found = several_types()
    (piece,) = found.slices
    assert (piece.forward_s, piece.backward_s) == (4.4, 8.8)
    assert [(each.forward_s, each.backward_s) for each in piece.shares] == [(4.0, 8.0), (4.4, 8.8)]
    assert [(each.type, each.num_devices) for each in found.types] == [(FAST, 1), (SLOW, 1)]
    assert [each.predicted_s for each in found.types] == pytest.approx([12.0, 12.0])
    assert [each.speed for each in found.types] == pytest.approx([1.0, 12.0 / 13.2])
    assert [each.type for each in found.devices] == [FAST, SLOW]


def test_each_micro_batch_is_a_slice_and_of_unequal_shares_each_is_left() -> None:
    """Two micro-batches of 8 samples, over two devices in shares of 5 and 3."""
    net = cuttable("t/net", 2, {16: 4.0, 8: 2.2, 4: 1.2, 2: 0.8})
    ranks = [rank(f0=1.0, b0=2.0, f1=1.5, b1=2.5), rank(f0=0.6, b0=2.25, f1=0.75, b1=1.0)]
    uneven = compare(uneven_plan(net, (0, 5, 8), micro_batches=2), ITERATIONS, ranks, None).slices
    assert [(each.forward_s, each.backward_s) for each in uneven] == [(1.0, 2.25), (1.5, 2.5)]
    assert [[(each.forward_s, each.backward_s) for each in piece.shares] for piece in uneven] == [
        [(1.0, 2.0), (0.6, 2.25)],
        [(1.5, 2.5), (0.75, 1.0)],
    ]
    plan = make_plan(profile_of(net), cluster_of(2), micro_batches={"t": 2})
    equal = compare(plan, ITERATIONS, ranks, None).slices
    assert [each.shares for each in equal] == [(), ()]


def test_of_a_share_that_several_devices_hold_the_slowest_counts() -> None:
    net = cuttable("t/net", 1, {8: 4.0, 4: 2.2})
    shares = shares_of({8: 4.0, 5: 2.6, 3: 2.0}, tp=2)
    plan = uneven_plan(net.model_copy(update={"shares": shares}), (0, 5, 8), tp=2)
    ranks = [rank(f0=1.0, b0=4.0), rank(f0=2.0, b0=3.0), rank(f0=0.5, b0=0.5), rank(f0=0.75, b0=0.25)]
    (piece,) = compare(plan, ITERATIONS, ranks, None).slices
    assert [(each.forward_s, each.backward_s) for each in piece.shares] == [(2.0, 4.0), (0.75, 0.5)]


def test_devices_of_a_type_count_together() -> None:
    _, plan = two_towers()
    ranks = [rank(f0=1.0), rank(f0=2.0), rank(f1=4.0), rank()]
    (kind,) = compare(plan, ITERATIONS, ranks, None).types
    assert (kind.num_devices, kind.measured_s) == (4, 7.0)
    assert kind.predicted_s == pytest.approx(
        sum(len(piece.devices) * (piece.end_s - piece.start_s) for piece in plan.slices)
    )
    assert compare(plan, ITERATIONS, ranks, None).slices[0].shares == ()


def test_a_device_is_slow_that_took_a_tenth_longer_all_through_the_run() -> None:
    fast, slow = several_types().devices
    assert (fast.predicted_compute_s, fast.slower) == (pytest.approx(12.0), pytest.approx(11.5 / 12 - 1))
    assert slow.slower == pytest.approx(0.1)
    for least_s, named in ((13.2001, True), (13.1999, False)):
        device = slow.model_copy(update={"least_compute_s": least_s, "predicted_compute_s": 12.0})
        assert slow_devices([fast, device]) == ((device,) if named else ())
    assert slow_devices([slow.model_copy(update={"least_compute_s": None})]) == ()
    assert slow_devices([slow.model_copy(update={"predicted_compute_s": 0.0})]) == ()


def test_of_several_sets_of_tasks_each_has_what_its_own_slices_took() -> None:
    """Three steps of a alone, the first of which is left out, and one of both; slices by the set's plan."""
    profile = profile_of(metaop_of("a/m", 2, {1: 2.0}), metaop_of("b/m", 3, {1: 2.0}))
    sets = tuple(TaskShare(tasks=tuple(tasks), share=0.5) for tasks in ("a", "ab"))
    plan = make_plan(profile.model_copy(update={"task_sets": sets}), cluster_of(2))
    iterations = [
        Measured(seconds, 4.0, tuple(tasks))
        for seconds, tasks in ((9.0, "a"), (8.0, "ab"), (3.0, "a"), (5.0, "a"))
    ]
    place = {piece.metaop: index for index, piece in enumerate(plan.set_plans["a", "b"].slices)}
    device = {piece.metaop: piece.devices[0] for piece in plan.set_plans["a", "b"].slices}
    ranks = []
    for number in range(2):
        both = {
            (kind, place[name]): seconds
            for name, seconds in (("a/m", 2.0), ("b/m", 3.0))
            for kind in (Activity.FORWARD, Activity.BACKWARD)
            if device[name] == number
        }
        runs_a = number == plan.set_plans["a",].slices[0].devices[0]
        alone = {(Activity.FORWARD, 0): 1.0, (Activity.BACKWARD, 0): 1.5} if runs_a else {}
        ranks.append(RankReport({}, 0.0, {("a",): alone, ("a", "b"): both}))
    found = compare(plan, iterations, ranks, None)
    assert (found.slices, found.metaops, found.types) == ((), (), ())
    alone, both = found.task_sets
    assert (alone.tasks, alone.steps, alone.iteration.measured_s) == (("a",), 2, 4.0)
    assert (both.tasks, both.steps, both.iteration.measured_s) == (("a", "b"), 1, 8.0)
    assert [each.iteration.predicted_s for each in (alone, both)] == pytest.approx([4.0, 6.0])
    assert alone.slices == (SliceTimes(slice=0, forward_s=1.0, backward_s=1.5),)
    assert [(each.slice, each.forward_s) for each in both.slices] == sorted(
        (place[name], seconds) for name, seconds in (("a/m", 2.0), ("b/m", 3.0))
    )
    assert sorted(each.compute_s for each in both.devices) == [4.0, 6.0]
    assert (found.steps, found.iteration.measured_s) == (3, pytest.approx((8 + 3 + 5) / 3))


def test_a_stopwatch_tells_steps_apart_by_their_tasks() -> None:
    """Slice 0 of one set is another than slice 0 of the other."""
    stopwatch = Stopwatch(torch.device("cpu"))
    for step, (tasks, seconds) in enumerate((("a", 9.0), ("ab", 2.0), ("a", 4.0), ("a", 6.0), ("ab", 1.0))):
        stopwatch.begin_step(tuple(tasks))
        stopwatch._open.append(Lap(Activity.FORWARD, 0.0, seconds, slice_index=0))
        stopwatch.end_step(step)
    key = Activity.FORWARD, 0
    assert (stopwatch.medians(("a",))[key], stopwatch.medians(("a", "b"))[key]) == (5.0, 1.0)
    assert stopwatch.medians()[key] == 3.0
    report = RankReport.of(stopwatch)
    assert {tasks: times[key] for tasks, times in report.of_sets.items()} == {("a",): 5.0, ("a", "b"): 1.0}


def test_where_every_step_runs_all_tasks_nothing_is_kept_apart() -> None:
    stopwatch = Stopwatch(torch.device("cpu"))
    stopwatch.begin_step()
    stopwatch.end_step(0)
    assert RankReport.of(stopwatch).of_sets == {}
    _, plan = two_towers()
    assert compare(plan, ITERATIONS, [rank() for _ in range(4)], None).task_sets == ()
