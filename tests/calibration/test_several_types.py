"""Runs on devices of several types, and of one of the types that a profile has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calibration.made_runs import made_run, slower_on
from helpers.cli import run_spindle
from helpers.random_plans import plan_on
from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.calibrate.history import from_history
from spindle_cli.calibrate.predicting import predicted_again
from spindle_cli.calibrate.run import Calibrated, calibrate
from spindle_cli.errors import InputError
from spindle_cli.files.artifact import write_json
from spindle_cli.files.run_files import PREDICTED_FILE, PassTimes, PredictedVsMeasured
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan, PlanMetaOp
from spindle_cli.profile.mixed.seen import of_types, seen_on
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, ProcessorCosts, Profile, ShareTime

FAST, SLOW = "a100-80gb", "v100-32gb"
NET = "t/net"
BOTH = cluster_of_types({FAST: 1, SLOW: 1})
LONGER = {NET: (1.2, 1.5)}


def profile() -> Profile:
    """One MetaOp, on a fast device and one that takes three times as long."""
    return profile_on_types(metaop_on_types(NET, 4, {FAST: 0.01, SLOW: 0.03}))


def planned(profile: Profile, rows: tuple[int, ...] = (0, 6, 8)) -> Plan:
    plan = make_plan(profile, BOTH, "sequential")
    assert [piece.rows for piece in plan.slices] == [rows]
    return plan


def calibrated(profile: Profile, *folders: Path) -> Calibrated:
    return calibrate(folders, profile, Path("profile.json"))


def times(entry: CurvePoint | ShareTime) -> tuple[float, float]:
    return entry.forward_s, entry.backward_s


def entries(profile: Profile, device: str) -> dict[str, tuple[float, float]]:
    """Of points ('dp 2') and shares ('3')."""
    (net,) = profile.metaops
    points = {f"dp {point.dp}": times(point) for point in net.curve if point.device == device}
    return points | {str(share.samples): times(share) for share in net.shares if share.device == device}


def sources(profile: Profile, device: str) -> dict[int, str]:
    (net,) = profile.metaops
    return {share.samples: share.source for share in net.shares if share.device == device}


def test_what_ran_on_a_type_is_of_that_type(tmp_path: Path) -> None:
    truth = slower_on(profile(), SLOW, LONGER)
    found = calibrated(profile(), made_run(tmp_path / "run", planned(profile()), truth)).profile
    assert entries(found, FAST) == entries(profile(), FAST)
    slow = entries(found, SLOW)
    for name, expected in entries(truth, SLOW).items():
        assert slow[name] == pytest.approx(expected), name
    assert sources(found, SLOW) == {n: "measured" if n == 2 else "fitted" for n in range(1, 9)}
    assert found.devices == profile().devices
    plan = planned(profile())
    assert predicted_again(plan, found).iteration_s == pytest.approx(
        predicted_again(plan, truth).iteration_s, rel=1e-9
    )


def test_a_share_that_no_point_of_the_curve_has_takes_what_was_measured(tmp_path: Path) -> None:
    """Of 8 samples 6 ran on the fast device: others follow it, and a run of 8 goes before it."""
    truth = slower_on(profile(), FAST, LONGER, samples=6)
    found = calibrated(profile(), made_run(tmp_path / "run", planned(profile()), truth)).profile
    fast = entries(found, FAST)
    assert fast["6"] == pytest.approx((6 * 0.01 / 3 * 1.2, 6 * 0.02 / 3 * 1.5))
    assert fast["5"] == pytest.approx((5 * 0.01 / 3 * 1.2, 5 * 0.02 / 3 * 1.5))
    assert fast["dp 1"] == fast["8"] == pytest.approx((8 * 0.01 / 3 * 1.2, 8 * 0.02 / 3 * 1.5))
    assert sources(found, FAST)[6] == "measured"
    assert entries(found, SLOW) == entries(profile(), SLOW)

    alone = make_plan(profile(), cluster_of_types({FAST: 1}), "sequential")
    whole = made_run(tmp_path / "alone", alone, slower_on(profile(), FAST, {NET: (2.0, 3.0)}))
    fast = entries(calibrated(profile(), tmp_path / "run", whole).profile, FAST)
    assert fast["dp 1"] == fast["8"] == pytest.approx((8 * 0.01 / 3 * 2, 8 * 0.02 / 3 * 3))
    assert fast["6"] == pytest.approx((6 * 0.01 / 3 * 1.2, 6 * 0.02 / 3 * 1.5))
    assert fast["7"] == pytest.approx((7 * 0.01 / 3 * 2, 7 * 0.02 / 3 * 3))  # by ratio nearer to 8


def test_a_share_between_two_of_a_type_becomes_one_of_that_type(tmp_path: Path) -> None:
    """Of the fast type 4 and 8 samples are known, and 6 between them; the slow one keeps its own."""
    (net,) = profile().metaops
    few = tuple(share for share in net.shares if share.device == SLOW or share.samples in (1, 2, 4, 8))
    by_size = sorted(few, key=lambda share: share.samples)  # types take turns
    known = profile_on_types(net.model_copy(update={"shares": tuple(by_size)}))
    truth = slower_on(profile(), FAST, LONGER, samples=6)
    made = calibrated(known, made_run(tmp_path / "run", planned(profile()), truth)).profile
    assert entries(made, FAST)["6"] == pytest.approx(entries(truth, FAST)["6"])
    assert sorted(sources(made, FAST)) == [1, 2, 4, 6, 8]
    assert entries(made, SLOW) == entries(known, SLOW)
    order = [(each.samples, each.device) for each in made.metaops[0].shares]
    assert [each for each in order if each != (6, FAST)] == [(each.samples, each.device) for each in by_size]
    assert order[-3:] == [(6, FAST), (8, FAST), (8, SLOW)]
    plan = planned(profile())
    again, true = predicted_again(plan, made), predicted_again(plan, truth)
    assert again.iteration_s == pytest.approx(true.iteration_s, rel=1e-9)


def test_a_share_that_several_devices_hold_is_of_their_type(tmp_path: Path) -> None:
    """Two devices of each type hold a share together: 6 samples the fast ones, 2 the slow ones."""
    (net,) = profile().metaops
    split = net.model_copy(
        update={
            "shares": tuple(share.model_copy(update={"tp": 2}) for share in net.shares),
            "curve": tuple(
                point.model_copy(update={"tp": 2, "num_devices": 2 * point.dp}) for point in net.curve
            ),
        }
    )
    known = profile_on_types(split)
    cluster = cluster_of_types({FAST: 2, SLOW: 2})
    piece = planned(profile()).slices[0].model_copy(update={"devices": (0, 1, 2, 3), "tp": 2})
    plan = plan_on(cluster, tuple(PlanMetaOp(**_needed(each)) for each in known.metaops), [piece])
    plan = plan.model_copy(update={"workload": known.workload})
    truth = slower_on(known, SLOW, LONGER)
    found = calibrated(known, made_run(tmp_path / "run", plan, truth)).profile
    assert entries(found, FAST) == entries(known, FAST)
    assert entries(found, SLOW)["2"] == pytest.approx(entries(truth, SLOW)["2"])


def test_equal_shares_on_several_types_are_told_apart(tmp_path: Path) -> None:
    """4 samples on each type, of which the slow one takes longer than it should."""
    piece = planned(profile()).slices[0].model_copy(update={"rows": None})
    plan = plan_on(BOTH, tuple(PlanMetaOp(**_needed(each)) for each in profile().metaops), [piece])
    plan = plan.model_copy(update={"workload": profile().workload})
    truth = slower_on(profile(), SLOW, LONGER)
    found = calibrated(profile(), made_run(tmp_path / "run", plan, truth)).profile
    assert entries(found, FAST) == entries(profile(), FAST)
    assert entries(found, SLOW)["4"] == pytest.approx(entries(truth, SLOW)["4"])


def _needed(metaop: MetaOpProfile) -> dict[str, object]:
    return {name: getattr(metaop, name) for name in PlanMetaOp.model_fields}


def test_a_run_in_unequal_shares_on_one_of_the_types_is_of_that_type(tmp_path: Path) -> None:
    """Two slow devices with 5 and 3 samples, of which the profile has neither."""
    (net,) = profile().metaops
    few = tuple(share for share in net.shares if share.samples in (1, 2, 4, 8))
    known = profile_on_types(net.model_copy(update={"shares": few}))
    equal = make_plan(known, cluster_of_types({SLOW: 2}), "sequential")
    piece = planned(profile()).slices[0].model_copy(update={"rows": (0, 5, 8)})
    own = seen_on(profile(), equal.cluster)
    plan = plan_on(equal.cluster, tuple(PlanMetaOp(**_needed(each)) for each in own.metaops), [piece])
    plan = plan.model_copy(update={"workload": known.workload})
    truth = slower_on(profile(), SLOW, LONGER)
    found = calibrated(known, made_run(tmp_path / "run", plan, truth)).profile
    assert entries(found, FAST) == entries(known, FAST)
    slow, expected = entries(found, SLOW), entries(truth, SLOW)
    assert sorted(sources(found, SLOW)) == [1, 2, 3, 4, 5, 8]
    assert (slow["5"], slow["3"]) == (pytest.approx(expected["5"]), pytest.approx(expected["3"]))


def test_of_shares_that_are_alike_the_slowest_counts(tmp_path: Path) -> None:
    """Two slow devices with 3 samples each: the slice waits for the slower one, forward and backward."""
    plan = make_plan(profile(), cluster_of_types({FAST: 1, SLOW: 2}), "dp-even")
    assert [piece.rows for piece in plan.slices] == [(0, 2, 5, 8)]
    folder = made_run(tmp_path / "run", plan, profile())
    measured = PredictedVsMeasured.read(folder / PREDICTED_FILE)
    (piece,) = measured.slices
    shares = (PassTimes(forward_s=0.4, backward_s=0.5), PassTimes(forward_s=0.3, backward_s=0.7))
    slices = (piece.model_copy(update={"shares": (piece.shares[0], *shares)}),)
    write_json(folder / PREDICTED_FILE, measured.model_copy(update={"slices": slices}))
    found = calibrated(profile(), folder).profile
    assert entries(found, SLOW)["3"] == pytest.approx((0.4 / 4, 0.7 / 4))
    assert entries(found, FAST) == entries(profile(), FAST)


def test_a_run_on_one_of_the_types_changes_that_one_alone(tmp_path: Path) -> None:
    plan = make_plan(profile(), cluster_of_types({SLOW: 2}), "sequential")
    made = calibrated(profile(), made_run(tmp_path / "run", plan, slower_on(profile(), SLOW, LONGER)))
    assert entries(made.profile, FAST) == entries(profile(), FAST)
    assert entries(made.profile, SLOW)["dp 2"] == pytest.approx((0.04 * 1.2, 0.08 * 1.5))
    assert made.warnings == (f"no run had devices of type {FAST}, whose times stay as they were",)


def test_a_run_as_predicted_changes_nothing(tmp_path: Path) -> None:
    made = calibrated(profile(), made_run(tmp_path / "run", planned(profile()), profile()))
    for device in (FAST, SLOW):
        assert entries(made.profile, device) == entries(profile(), device)
    assert made.warnings == ()


def test_what_processors_do_beside_is_no_part_of_any_share(tmp_path: Path) -> None:
    own = profile().model_copy(update={"processor": ProcessorCosts(s_per_byte=1e-6, message_s=1e-3)})
    truth = slower_on(own, SLOW, LONGER)
    plan = planned(own)
    found = calibrated(own, made_run(tmp_path / "run", plan, truth)).profile
    assert entries(found, SLOW)["2"] == pytest.approx(entries(truth, SLOW)["2"])
    assert entries(found, FAST)["6"] == pytest.approx(entries(own, FAST)["6"])
    again, true = predicted_again(plan, found), predicted_again(plan, truth)
    assert again.iteration_s == pytest.approx(true.iteration_s, rel=1e-9)


def update_of(
    tmp_path: Path, cluster_types: dict[str, int], steps_s: dict[str, float], before: float
) -> float:
    """The update's seconds a byte after a run in which each type's devices took so long for theirs."""
    own = profile().model_copy(update={"optimizer_s_per_byte": before})
    plan = make_plan(own, cluster_of_types(cluster_types), "dp-even" if len(cluster_types) > 1 else "spindle")
    folder = made_run(tmp_path / "run", plan, own)
    measured = PredictedVsMeasured.read(folder / PREDICTED_FILE)
    devices = tuple(
        each.model_copy(update={"optimizer_s": steps_s[plan.cluster.type_of[each.device]]})
        for each in measured.devices
    )
    write_json(folder / PREDICTED_FILE, measured.model_copy(update={"devices": devices}))
    return calibrated(own, folder).profile.optimizer_s_per_byte


def test_the_update_is_that_of_the_slowest_type(tmp_path: Path) -> None:
    """Four ops of 1 KiB each, of which either device updates half."""
    assert update_of(tmp_path, {FAST: 1, SLOW: 1}, {FAST: 1.0, SLOW: 3.0}, 9.0) == 3.0 / 2**11


@pytest.mark.parametrize(("before", "after"), [(9.0, 9.0), (1e-9, 1.0 / 2**12)])
def test_the_update_is_never_less_than_before_while_a_type_has_not_run(
    tmp_path: Path, before: float, after: float
) -> None:
    assert update_of(tmp_path, {FAST: 1}, {FAST: 1.0}, before) == after


def test_runs_without_their_shares_are_refused(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", planned(profile()), profile())
    measured = PredictedVsMeasured.read(folder / PREDICTED_FILE)
    (piece,) = measured.slices
    for shares in ((), piece.shares[:1]):
        slices = (piece.model_copy(update={"shares": shares}),)
        write_json(folder / PREDICTED_FILE, measured.model_copy(update={"slices": slices}))
        with pytest.raises(InputError, match="what each share took is not said"):
            calibrated(profile(), folder)


def test_runs_on_shares_that_the_profile_does_not_have_are_refused(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", planned(profile()), profile())
    (net,) = profile().metaops
    shares = tuple(share for share in net.shares if share.device == FAST or share.samples > 2)
    curve = tuple(point for point in net.curve if point.device == FAST or point.dp < 4)
    less = profile_on_types(net.model_copy(update={"shares": shares, "curve": curve}))
    with pytest.raises(InputError, match=r"slice t/net\[0:4\] ran on dp 2, tp 1, in shares of 6 and 2 "):
        calibrated(less, folder)


def test_a_profile_that_lacks_a_type_of_the_run_is_refused(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", planned(profile()), profile())
    fast = of_types(profile())[FAST]
    with pytest.raises(
        InputError, match=rf"on devices '{FAST}' and '{SLOW}'; profile.json is of '{FAST}' \("
    ):
        calibrated(fast, folder)


def test_of_a_folders_runs_those_on_the_same_types_count(tmp_path: Path) -> None:
    alone = make_plan(profile(), cluster_of_types({SLOW: 2}), "sequential")
    made_run(tmp_path / "slow", alone, slower_on(profile(), SLOW, {NET: (7.0, 7.0)}))
    for goal in (BOTH, cluster_of_types({FAST: 2})):
        found = from_history(tmp_path, profile(), Path("profile.json"), goal)
        assert "No run or calibrated profile" in found.note
    made_run(tmp_path / "both", planned(profile()), slower_on(profile(), SLOW, LONGER))
    found = from_history(tmp_path, profile(), Path("profile.json"), BOTH)
    assert entries(found.profile, SLOW)["2"] == pytest.approx((0.02 * 1.2, 0.04 * 1.5))
    found = from_history(tmp_path, profile(), Path("profile.json"), cluster_of_types({"v100": 2}))
    assert entries(found.profile, SLOW)["dp 2"] == pytest.approx((0.04 * 7, 0.08 * 7))


def test_the_command_says_which_type_took_what(tmp_path: Path) -> None:
    made_run(tmp_path / "run", planned(profile()), slower_on(profile(), SLOW, LONGER))
    write_json(tmp_path / "p.json", profile())
    asked = ("calibrate", tmp_path / "run", tmp_path / "p.json", "-o", tmp_path / "c.json")
    said = run_spindle(*asked)
    assert said.code == 0, said.err
    assert any(
        row[:4] == [NET, SLOW, "2", "1"] and row[-1] == "1.40"
        for row in map(str.split, said.out.splitlines())
    )
    report = json.loads(run_spindle(*asked, "--json").out)
    assert [(each["device"], each["samples"], each["dp"]) for each in report["points"]] == [
        (FAST, 6, None),
        (SLOW, 2, 4),
    ]
    assert (report["scaled_points"], report["points_left"]) == (3, 4)
    assert Profile.read(tmp_path / "c.json").devices == profile().devices
