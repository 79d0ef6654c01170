"""predicted.json as the runtime makes it of what its ranks have measured: hand-solved."""

from __future__ import annotations

from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of, two_towers
from spindle_cli.files.run_files import Comparison, SliceTimes
from spindle_cli.runtime.measuring.comparison import Measured, RankTimes, compare
from spindle_cli.runtime.measuring.timing import Activity

ITERATIONS = [Measured(9.0, 1.0), Measured(2.0, 1.0), Measured(4.0, 1.0)]


def rank(**times: float) -> RankTimes:
    """Of 'f0' forward and 'b0' backward of slice 0, and so on."""
    kinds = {"f": Activity.FORWARD, "b": Activity.BACKWARD}
    return {(kinds[name[0]], int(name[1:])): seconds for name, seconds in times.items()}


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


def test_what_is_computed_again_is_predicted_as_part_of_the_backward_pass() -> None:
    layers = metaop_of("a/x", 2, {1: 3.0})
    profile = profile_of(layers)
    piece = slice_of(layers, (0, 2), (0,), 0.0, recompute=True)
    plan = plan_of(profile, cluster_of(1), [(piece,)])
    (metaop,) = compare(plan, ITERATIONS, [rank(f0=1.0, b0=1.0)], None).metaops
    assert metaop.forward is not None
    assert metaop.backward is not None
    assert (metaop.forward.predicted_s, metaop.backward.predicted_s) == (2.0, 6.0)
