"""Runs in micro-batches and in shares of unequal size: what they took corrects the shares. By hand.

The MetaOp of these has a batch of 8, one op, and a curve on 1 and 2 devices; a third of its seconds is
forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from calibration.made_runs import made_run
from helpers.cut import cuttable
from helpers.plans import cluster_of, profile_of
from helpers.random_plans import plan_on
from helpers.uneven import uneven_plan
from spindle_cli.calibrate.history import from_history
from spindle_cli.calibrate.predicting import predicted_again
from spindle_cli.calibrate.run import calibrate
from spindle_cli.costs.shares import times_of
from spindle_cli.errors import InputError
from spindle_cli.files.artifact import write_json
from spindle_cli.files.run_files import PREDICTED_FILE, PassTimes, PredictedVsMeasured, SliceTimes
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan
from spindle_cli.profile.batch_sums import BatchSum
from spindle_cli.profile.types import MetaOpProfile, Profile

SHARE_S = {8: 9.0, 4: 5.4, 2: 3.0, 1: 1.8}
Both = tuple[float, float]  # seconds forward and backward


def net(share_s: dict[int, float] | None = None, **more: object) -> MetaOpProfile:
    made = cuttable("t/net", 1, share_s or SHARE_S, **more)
    return made.model_copy(update={"curve": tuple(each for each in made.curve if each.dp <= 2)})


def in_micro_batches(profile: Profile, count: int, num_devices: int = 1) -> Plan:
    return make_plan(profile, cluster_of(num_devices), micro_batches={"t": count})


def run_that_took(
    folder: Path, plan: Plan, profile: Profile, slices: Sequence[Both], shares: Sequence[Both] = ()
) -> Path:
    """The folder of a run whose slices took so long, and the shares of each."""
    made = made_run(folder, plan, profile)
    measured = PredictedVsMeasured.read(made / PREDICTED_FILE)
    own = tuple(PassTimes(forward_s=forward, backward_s=backward) for forward, backward in shares)
    took = tuple(
        SliceTimes(slice=number, forward_s=forward, backward_s=backward, shares=own)
        for number, (forward, backward) in enumerate(slices)
    )
    write_json(made / PREDICTED_FILE, measured.model_copy(update={"slices": took}))
    return made


def calibrated(profile: Profile, *folders: Path) -> MetaOpProfile:
    (metaop,) = calibrate(folders, profile, Path("profile.json")).profile.metaops
    return metaop


def shares_of(metaop: MetaOpProfile) -> dict[int, Both]:
    return {share.samples: (share.forward_s, share.backward_s) for share in metaop.shares}


def sources_of(metaop: MetaOpProfile) -> dict[int, str]:
    return {share.samples: share.source for share in metaop.shares}


def curve_of(metaop: MetaOpProfile) -> dict[int, Both]:
    return {point.dp: (point.forward_s, point.backward_s) for point in metaop.curve}


def times(factors: Both, *sizes: int) -> dict[int, object]:
    """What shares take that take so many times as long as before, forward and backward."""
    forward, backward = factors
    return {n: pytest.approx((SHARE_S[n] / 3 * forward, SHARE_S[n] * 2 / 3 * backward)) for n in sizes}


def test_a_micro_batch_corrects_the_share_that_it_is(tmp_path: Path) -> None:
    """Four of 2 samples, which the curve does not have: 1 s forward and 2 s backward become, on average, 2 s
    and 3 s. All else is nearest to it.
    """
    profile = profile_of(net())
    plan = in_micro_batches(profile, 4)
    took = [(1.0, 2.0), (3.0, 4.0), (1.5, 2.5), (2.5, 3.5)]
    found = calibrated(profile, run_that_took(tmp_path / "run", plan, profile, took))
    assert shares_of(found) == times((2.0, 1.5), 1, 2, 4, 8)
    assert sources_of(found) == {1: "fitted", 2: "measured", 4: "fitted", 8: "fitted"}
    assert curve_of(found) == {1: shares_of(found)[8], 2: shares_of(found)[4]}


def test_a_micro_batchs_share_that_the_curve_has_corrects_the_curve(tmp_path: Path) -> None:
    """Two of 4 samples on one device are the curve's shares of a whole batch on two."""
    profile = profile_of(net())
    run = run_that_took(tmp_path / "run", in_micro_batches(profile, 2), profile, [(3.6, 1.8)] * 2)
    found = calibrated(profile, run)
    assert curve_of(found)[2] == shares_of(found)[4] == pytest.approx((3.6, 1.8))
    assert [point.source for point in found.curve] == ["fitted", "measured"]
    assert shares_of(found) == times((2.0, 0.5), 1, 2, 4, 8)


def test_micro_batches_on_several_devices_are_so_much_smaller_shares(tmp_path: Path) -> None:
    """Two of 4 samples over two devices: shares of 2."""
    profile = profile_of(net())
    plan = in_micro_batches(profile, 2, num_devices=2)
    assert [(piece.dp, piece.micro_batches) for piece in plan.slices] == [(2, 2), (2, 2)]
    found = calibrated(profile, run_that_took(tmp_path / "run", plan, profile, [(3.0, 1.0)] * 2))
    assert shares_of(found)[2] == pytest.approx((3.0, 1.0))
    assert sources_of(found)[4] == "fitted"


def test_whole_batches_and_micro_batches_of_several_runs_each_correct_their_own_share(
    tmp_path: Path,
) -> None:
    """8 samples take twice as long, 2 thrice, and 4 between them 2.5 times; 1 follows 2."""
    profile = profile_of(net())
    whole = run_that_took(
        tmp_path / "whole", make_plan(profile, cluster_of(1)), profile, [(2 * 3.0, 2 * 6.0)]
    )
    cut = run_that_took(tmp_path / "cut", in_micro_batches(profile, 4), profile, [(3.0, 6.0)] * 4)
    found = shares_of(calibrated(profile, whole, cut))
    assert found == times((2.0, 2.0), 8) | times((2.5, 2.5), 4) | times((3.0, 3.0), 1, 2)


ROWS = (0, 3, 6, 8)


def test_unequal_shares_correct_each_its_own_size(tmp_path: Path) -> None:
    """Of 3, 3 and 2 samples: 3 lie between 2 and 4 at 1.4 s and 2.8 s, and take what the slowest device took,
    2.8 s and 4.2 s; 2 took 1 s and 2 s, as they should. 3 are a share of their own from then on.
    """
    profile = profile_of(net())
    shares = [(2.7, 4.2), (2.8, 4.1), (1.0, 2.0)]
    run = run_that_took(tmp_path / "run", uneven_plan(net(), ROWS), profile, [(2.8, 4.2)], shares)
    found = calibrated(profile, run)
    assert shares_of(found) == (
        {3: pytest.approx((2.8, 4.2))} | times((1.0, 1.0), 1, 2) | times((2.0, 1.5), 4, 8)
    )
    assert sources_of(found) == {1: "measured", 2: "measured", 3: "measured", 4: "fitted", 8: "fitted"}
    assert [share.samples for share in found.shares] == [1, 2, 3, 4, 8]


def test_the_largest_share_takes_what_its_slice_did_whichever_device_was_slow(tmp_path: Path) -> None:
    """By its largest a plan says how long a slice takes: with the device of 2 samples slower than the others,
    the slice is predicted as it was.
    """
    profile, plan = profile_of(net()), uneven_plan(net(), ROWS)
    shares = [(1.4, 2.8), (1.4, 2.8), (2.1, 4.0)]
    run = run_that_took(tmp_path / "run", plan, profile, [(2.1, 4.0)], shares)
    found = shares_of(calibrated(profile, run))
    assert (found[3], found[2]) == (pytest.approx((2.1, 4.0)), pytest.approx((2.1, 4.0)))


def test_unequal_shares_of_micro_batches_count_their_own_samples(tmp_path: Path) -> None:
    """Two micro-batches of 4 samples in shares of 3 and 1."""
    profile, plan = profile_of(net()), uneven_plan(net(), (0, 3, 4), micro_batches=2)
    shares = [(2.8, 5.6), (1.2, 2.4)]
    run = run_that_took(tmp_path / "run", plan, profile, [(2.8, 5.6)] * 2, shares)
    found = shares_of(calibrated(profile, run))
    assert found == {3: pytest.approx((2.8, 5.6))} | times((2.0, 2.0), 1, 2, 4, 8)


def test_a_size_that_is_another_slices_largest_takes_what_that_one_did(tmp_path: Path) -> None:
    """Two ops: one in shares of 3, 3 and 2 samples, the other on four devices with 2 each, which took longer
    for them. Both slices are predicted as they were.
    """
    two = net().model_copy(update={"num_ops": 2, "curve": cuttable("t/net", 2, SHARE_S).curve[:3]})
    profile, like = profile_of(two), uneven_plan(two, ROWS)
    (first,) = like.slices
    rows = first.model_copy(update={"ops": (0, 1)})
    even = first.model_copy(update={"ops": (1, 2), "devices": (0, 1, 2, 3), "dp": 4, "rows": None})
    plan = plan_on(cluster_of(4), like.metaops, [rows, even])
    plan = plan.model_copy(update={"workload": like.workload})
    made = made_run(tmp_path / "run", plan, profile)
    measured = PredictedVsMeasured.read(made / PREDICTED_FILE)
    shares = [PassTimes(forward_s=s, backward_s=2 * s) for s in (1.5, 1.5, 1.0)]
    took = (
        SliceTimes(slice=0, forward_s=1.5, backward_s=3.0, shares=tuple(shares)),
        SliceTimes(slice=1, forward_s=2.0, backward_s=5.0),
    )
    write_json(made / PREDICTED_FILE, measured.model_copy(update={"slices": took}))
    found = calibrated(profile, made)
    times = [times_of(found, piece, plan.cluster) for piece in plan.slices]
    assert [(each.forward_s, each.backward_s) for each in times if each] == [
        pytest.approx((1.5, 3.0)),
        pytest.approx((2.0, 5.0)),
    ]


def test_a_share_that_took_what_lies_between_its_neighbours_is_not_told_apart(tmp_path: Path) -> None:
    profile, plan = profile_of(net()), uneven_plan(net(), ROWS)
    found = calibrated(profile, made_run(tmp_path / "run", plan, profile))
    assert found.shares == profile.metaops[0].shares
    assert curve_of(found) == curve_of(net())


def test_a_smaller_share_of_which_nothing_is_known_says_nothing(tmp_path: Path) -> None:
    """The profile's smallest has 3 samples: its largest is corrected all the same."""
    small = net({8: 9.0, 4: 5.4, 3: 4.2})
    profile, plan = profile_of(small), uneven_plan(small, ROWS)
    shares = [(2.8, 5.6), (2.8, 5.6), (0.1, 0.1)]
    run = run_that_took(tmp_path / "run", plan, profile, [(2.8, 5.6)], shares)
    found = shares_of(calibrated(profile, run))
    assert found[3] == pytest.approx((2.8, 5.6))
    assert min(found) == 3


def test_where_shares_wait_for_each_other_inside_of_passes_the_largest_alone_says_something(
    tmp_path: Path,
) -> None:
    """They sum over all, or gather parameters that all have parts of: the device of 2 samples is as slow."""
    sums = (BatchSum(num_bytes=4, forward=1, backward=1),)
    norms = net(batch_sums=sums)
    plan = uneven_plan(norms, ROWS)
    shares = [(2.8, 5.6)] * 3
    run = run_that_took(tmp_path / "norms", plan, profile_of(norms), [(2.8, 5.6)], shares)
    assert sources_of(calibrated(profile_of(norms), run))[2] == "fitted"

    profile = profile_of(net()).model_copy(update={"optimizer_state_sharded": True})
    plain = uneven_plan(net(), ROWS)
    fields = {name: getattr(plain, name) for name in Plan.model_fields}
    for level, source in ((Sharding.OPTIMIZER, "measured"), (Sharding.GRADIENTS, "fitted")):
        fields |= {"sharding": {"t/net": level}, "optimizer_state_sharded": True}
        run = run_that_took(tmp_path / level, Plan(**fields), profile, [(2.8, 5.6)], shares)
        found = calibrated(profile, run)
        assert sources_of(found)[3] == "measured"
        assert sources_of(found)[2] == source


def slower_by_size(profile: Profile) -> Profile:
    """A profile of which shares of so many samples take so many times as long; 3 as it lies between."""
    longer = {8: (1.1, 1.2), 4: (1.3, 1.5), 2: (1.6, 2.0), 1: (2.5, 3.0)}

    def entry(metaop: MetaOpProfile) -> MetaOpProfile:
        def seconds(samples: int) -> dict[str, float]:
            forward, backward = longer[samples]
            op_s = SHARE_S[samples]
            return {"forward_s": op_s / 3 * forward, "backward_s": op_s * 2 / 3 * backward}

        curve = tuple(each.model_copy(update=seconds(8 // each.dp)) for each in metaop.curve)
        shares = tuple(each.model_copy(update=seconds(each.samples)) for each in metaop.shares)
        return metaop.model_copy(update={"curve": curve, "shares": shares})

    fields = {name: getattr(profile, name) for name in Profile.model_fields}
    return Profile(**{**fields, "metaops": tuple(map(entry, profile.metaops))})


@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_next_plan_in_as_many_micro_batches_predicts_what_was_measured(
    tmp_path: Path, count: int
) -> None:
    profile = profile_of(net())
    truth = slower_by_size(profile)
    plan = in_micro_batches(profile, count)
    found = calibrate([made_run(tmp_path / "run", plan, truth)], profile, Path("profile.json")).profile
    measured_s = predicted_again(plan, truth).iteration_s
    assert predicted_again(plan, found).iteration_s == pytest.approx(measured_s, rel=1e-9)
    again = in_micro_batches(found, count)
    assert again.predicted.iteration_s == pytest.approx(measured_s, rel=1e-6)
    assert plan.predicted.iteration_s != pytest.approx(measured_s, rel=0.05)


def test_a_plan_in_unequal_shares_predicts_what_was_measured(tmp_path: Path) -> None:
    profile, plan = profile_of(net()), uneven_plan(net(), ROWS)
    truth = slower_by_size(profile)
    found = calibrate([made_run(tmp_path / "run", plan, truth)], profile, Path("profile.json")).profile
    measured_s = predicted_again(plan, truth).iteration_s
    assert predicted_again(plan, found).iteration_s == pytest.approx(measured_s, rel=1e-9)
    assert predicted_again(plan, profile).iteration_s != pytest.approx(measured_s, rel=0.05)


def test_a_folders_runs_in_micro_batches_and_unequal_shares_are_taken(tmp_path: Path) -> None:
    """The one in micro-batches on one device, the other on three: each is nearest to its own number."""
    profile = profile_of(net())
    truth = slower_by_size(profile)
    made_run(tmp_path / "one", in_micro_batches(profile, 4), truth)
    made_run(tmp_path / "three", uneven_plan(net(), ROWS), truth)
    expected = shares_of(truth.metaops[0])
    for num_devices, name, samples in ((1, "one", 2), (3, "three", 2)):
        history = from_history(tmp_path, profile, Path("profile.json"), cluster_of(num_devices))
        assert history.passed_over == ()
        assert f"calibrated by {name} (" in history.note
        assert shares_of(history.profile.metaops[0])[samples] == pytest.approx(expected[samples])


@pytest.mark.parametrize("kept", [0, 2])
def test_a_run_that_does_not_say_what_unequal_shares_took_is_refused(tmp_path: Path, kept: int) -> None:
    profile, plan = profile_of(net()), uneven_plan(net(), ROWS)
    run = run_that_took(tmp_path / "run", plan, profile, [(2.8, 5.6)], [(2.8, 5.6)] * kept)
    with pytest.raises(
        InputError,
        match=rf"predicted.json: slices: slice 0, t/net\[0:1\]: what each share took is not said \({kept} "
        r"found, expected 3\), and they are not equal; the run is of an older version",
    ) as refused:
        calibrated(profile, run)
    assert refused.value.hint == "Run the plan again with this version."


def test_shares_that_the_profile_has_no_times_of_are_refused(tmp_path: Path) -> None:
    profile = profile_of(net())
    few = profile_of(net({8: 9.0, 4: 5.4}))
    cut = made_run(tmp_path / "cut", in_micro_batches(profile, 4), profile)
    uneven = made_run(tmp_path / "uneven", uneven_plan(net(), ROWS), profile)
    with pytest.raises(InputError, match=r"slice t/net\[0:1\] 1/4 ran on dp 1, tp 1, in shares of 2 samples"):
        calibrated(few, cut)
    with pytest.raises(InputError, match=r"dp 3, tp 1, in shares of 3 and 2 samples, which profile.json has"):
        calibrated(few, uneven)
