"""`spindle calibrate`: what it writes, and every run that it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from calibration.made_runs import made_run, slower
from calibration.test_moving import INSIDE_S, chain, transfer, wait
from helpers.cli import Ended, run_spindle
from helpers.cut import cuttable
from helpers.plans import cluster_of, profile_of, two_towers
from helpers.uneven import uneven_plan
from spindle_cli.calibrate.predicting import predicted_again
from spindle_cli.errors import ExitCode
from spindle_cli.files.artifact import write_json
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.run_files import PLAN_FILE, PREDICTED_FILE
from spindle_cli.plan.file import write_plan
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan, PlannedSet
from spindle_cli.profile.types import Profile

TIMES = {"pairs/vision": (1.5, 0.8), "pairs/text": (2.0, 3.0)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """profile.json, and run/ in which things took other times."""
    profile, plan = two_towers()
    write_json(tmp_path / "profile.json", profile)
    made_run(tmp_path / "run", plan, slower(profile, TIMES), iteration_s=5.0)
    return tmp_path


def calibrate(folder: Path, *more: object, out: str = "out.json") -> Ended:
    return run_spindle("calibrate", folder / "run", folder / "profile.json", "-o", folder / out, *more)


def test_it_writes_the_profile_and_says_what_changed(folder: Path) -> None:
    ended = calibrate(folder)
    assert ended.code == 0, ended.err
    assert "4 points as measured" in ended.out
    assert "iteration 5 s measured, 3.8 s by its plan" in ended.out
    found = Profile.read(folder / "out.json")
    assert found.calibration is not None
    assert found.calibration.runs[0].error == pytest.approx(5.0 / 3.8 - 1)
    # vision: 2 s of an op on 1 device, 2/3 forward and 4/3 backward, times as those that ran.
    assert found.by_name["pairs/vision"].curve[0].forward_s == pytest.approx(2 / 3 * 1.5)


def test_json_is_one_document(folder: Path) -> None:
    ended = calibrate(folder, "--json")
    report = json.loads(ended.out)
    assert report["schema"] == "spindle.calibration/1"
    assert report["profile"] == str(folder / "out.json")
    assert (len(report["points"]), report["scaled_points"], report["points_left"]) == (4, 3, 0)
    (iteration,) = report["iterations"]
    assert (iteration["plan_s"], iteration["measured_s"]) == pytest.approx((3.8, 5.0))
    assert iteration["before_s"] == pytest.approx(3.8, rel=1e-3)
    # Of the first wave vision is last forward (1.0 s x 1.5), text backward (1.0 s x 3).
    forward_s, backward_s = max(1.5, 0.5 * 2), max(2 * 0.8, 1.0 * 3)
    expected_s = forward_s + backward_s + 0.6 * (1.5 + 2 * 0.8) / 3 + 0.2
    assert iteration["after_s"] == pytest.approx(expected_s, rel=1e-3)
    assert report["link_times"] == {}
    assert report["warnings"] == []


def test_the_same_inputs_give_the_same_bytes(folder: Path) -> None:
    calibrate(folder)
    calibrate(folder, out="again.json")
    assert (folder / "out.json").read_bytes() == (folder / "again.json").read_bytes()


def test_the_profile_itself_is_written_over_where_it_is_named(folder: Path) -> None:
    (folder / "link.json").symlink_to(folder / "profile.json")
    before = (folder / "profile.json").read_bytes()
    ended = calibrate(folder, out="link.json")
    assert ended.code == ExitCode.USAGE
    assert (folder / "profile.json").read_bytes() == before
    assert calibrate(folder, out="profile.json").code == 0
    assert Profile.read(folder / "profile.json").calibration is not None


@pytest.mark.parametrize("name", ["run/run-plan.yaml", "run/predicted.json"])
def test_a_runs_files_are_not_written_over(folder: Path, name: str) -> None:
    before = (folder / name).read_bytes()
    assert calibrate(folder, out=name).code == ExitCode.USAGE
    assert calibrate(folder, "--write-cluster", folder / name).code == ExitCode.USAGE
    assert (folder / name).read_bytes() == before


def test_an_output_that_cannot_be_written_leaves_nothing(folder: Path) -> None:
    ended = calibrate(folder, out="none/out.json")
    assert ended.code == ExitCode.BAD_INPUT
    assert "none/out.json: cannot be written" in ended.err
    assert calibrate(folder, "--write-cluster", folder / "out.json").code == ExitCode.USAGE


def test_a_run_given_twice_is_refused(folder: Path) -> None:
    ended = run_spindle(
        "calibrate", folder / "run", folder / "x/../run", folder / "profile.json", "-o", folder / "out.json"
    )
    (folder / "x").mkdir()
    assert ended.code == ExitCode.USAGE
    assert "given twice" in ended.err


def test_a_short_run_is_warned_of_on_standard_error(folder: Path) -> None:
    profile, plan = two_towers()
    made_run(folder / "run", plan, profile, steps=1)
    ended = calibrate(folder, "--json")
    assert ended.code == 0
    assert "warning:" in ended.err
    assert "only 1 step measured" in ended.err
    assert len(json.loads(ended.out)["warnings"]) == 1


def replaced(**changes: object) -> Callable[[Path], None]:
    """Another plan in the run's folder, with its hash in predicted.json."""

    def change(folder: Path) -> None:
        profile, plan = two_towers()
        fields = {name: getattr(plan, name) for name in Plan.model_fields}
        made_run(folder / "run", Plan(**{**fields, **changes}), profile)

    return change


def edited(**changes: object) -> Callable[[Path], None]:
    """predicted.json with other values."""

    def change(folder: Path) -> None:
        path = folder / "run" / PREDICTED_FILE
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "run" / name).unlink()


def other_workload(folder: Path) -> None:
    _, plan = two_towers()
    other = plan.workload.model_copy(update={"fingerprint": "sha256:" + "1" * 64, "name": "other"})
    replaced(workload=other)(folder)


def other_device(folder: Path) -> None:
    cluster = cluster_of(4)
    node = cluster.nodes[0].model_copy(update={"device": "h100-80gb", "memory_gib": 80.0})
    replaced(cluster=cluster.model_copy(update={"nodes": (node,)}))(folder)


def sampled(folder: Path) -> None:
    _, plan = two_towers()
    only = PlannedSet(tasks=("pairs",), share=1.0, predicted=plan.predicted, waves=plan.waves)
    path = folder / "run" / PLAN_FILE
    fields = {name: getattr(plan, name) for name in Plan.model_fields}
    changed = Plan(**{**fields, "task_sets": (only,)})
    write_plan(path, changed)
    edited(plan_sha256=changed.sha256())(folder)


def another_plan(folder: Path) -> None:
    _, plan = two_towers()
    write_plan(folder / "run" / PLAN_FILE, plan.model_copy(update={"notes": ("other",)}))


def no_such_share(folder: Path) -> None:
    profile, _ = two_towers()
    vision = profile.metaops[0]
    few = vision.model_copy(update={"curve": vision.curve[:1]})
    write_json(folder / "profile.json", profile.model_copy(update={"metaops": (few, *profile.metaops[1:])}))


def uneven_of_an_older_version(folder: Path) -> None:
    net = cuttable("t/net", 1, {8: 1.0, 4: 0.6})
    made_run(folder / "run", uneven_plan(net, (0, 5, 8)), profile_of(net))
    write_json(folder / "profile.json", profile_of(net))
    edited(slices=[{"slice": 0, "forward_s": 1, "backward_s": 1}])(folder)


def test_micro_batches_and_unequal_shares_are_said_by_their_samples(tmp_path: Path) -> None:
    """Of a batch of 8: two micro-batches, and shares of 5 and 3."""
    net = cuttable("t/net", 1, {8: 1.2, 4: 0.9, 2: 0.6})
    profile = profile_of(net)
    write_json(tmp_path / "profile.json", profile)
    plan = make_plan(profile, cluster_of(1), micro_batches={"t": 2})
    made_run(tmp_path / "run", plan, slower(profile, {"t/net": (2.0, 2.0)}, shares=True))
    made_run(tmp_path / "uneven", uneven_plan(net, (0, 5, 8)), profile)
    ended = run_spindle(
        *("calibrate", tmp_path / "run", tmp_path / "uneven", tmp_path / "profile.json"),
        *("-o", tmp_path / "out.json"),
    )
    assert ended.code == 0, ended.err
    rows = [row.split() for row in ended.out.splitlines() if row.split()[:1] == ["t/net"]]
    assert [(row[1], row[-1]) for row in rows] == [("5", "1.00"), ("4", "2.00"), ("3", "1.00")]
    assert "3 points as measured, 0 scaled, 2 as they were" in ended.out
    assert Profile.read(tmp_path / "out.json").by_name["t/net"].shares[-2].samples == 4


def cut_off(folder: Path) -> None:
    path = folder / "run" / PREDICTED_FILE
    path.write_text(path.read_text()[:200])


def timeline_of_another(folder: Path) -> None:
    profile, plan = chain(cluster_of(2))
    made_run(folder / "other", plan, profile, spans=[[], []])
    (folder / "other/timeline.json").rename(folder / "run/timeline.json")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without(PREDICTED_FILE), "predicted.json is not in it: the run has not come to its end"),
        (without(PLAN_FILE), "the plan of this run is not in it (run-plan.yaml)"),
        (other_workload, "a run of workload 'other'"),
        (other_device, "a run on devices 'h100-80gb'"),
        (sampled, "what slices took in the steps of each set of tasks is missing"),
        (another_plan, "it is not the plan that was run"),
        (no_such_share, "slice pairs/vision[0:3] ran on dp 2, tp 1, which"),
        (uneven_of_an_older_version, "slice 0, t/net[0:1]: what each share took is not said"),
        (replaced(compile="inductor"), "of compile inductor"),
        (replaced(loss_chunks=4), "of loss_chunks 4"),
        (replaced(accumulate=2), "of accumulate 2"),
        (replaced(threads_per_process=3), "of threads_per_process 3"),
        (cut_off, "predicted.json"),
        (edited(slices=[]), "what each slice took is missing"),
        (edited(slices=[{"slice": 1, "forward_s": 1, "backward_s": 1}]), "each of the plan's 4 slices once"),
        (edited(steps=0), "steps"),
        (edited(iteration={"predicted_s": 1, "measured_s": 1.1e9}), "1.1e+09 s are no measurement"),
        (edited(iteration={"predicted_s": 1e-6, "measured_s": 1e8}), "make no profile: held_up would be"),
        (
            edited(devices=[{"device": 4, "compute_s": 1, "wait_s": 0, "data_s": 0}]),
            "device 4 is not in the plan",
        ),
        (timeline_of_another, "it is of a run by another plan"),
        (lambda folder: (folder / "run/timeline.json").write_text("{"), "timeline.json"),
        (lambda folder: (folder / "run/run-plan.yaml").write_text("waves: ["), "run-plan.yaml"),
    ],
)
def test_what_says_nothing_of_the_profile_is_refused(
    folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(folder)
    ended = calibrate(folder)
    assert ended.code == ExitCode.BAD_INPUT, ended.err
    assert message in ended.err
    assert "Traceback" not in ended.err
    assert not (folder / "out.json").exists()


def test_a_folder_that_is_no_runs_is_refused(folder: Path) -> None:
    ended = run_spindle("calibrate", folder, folder / "profile.json", "-o", folder / "out.json")
    assert ended.code == ExitCode.BAD_INPUT
    assert "neither metrics.jsonl nor predicted.json is in it" in ended.err


def test_the_cluster_is_written_with_links_as_slow_as_they_were(tmp_path: Path) -> None:
    profile, plan = chain(cluster_of(2))
    write_json(tmp_path / "profile.json", profile)
    spans = [[transfer(1.0)], [wait(0.5, 1.0 + 3 * INSIDE_S)]]
    made_run(tmp_path / "run", plan, profile, spans=spans)
    ended = calibrate(tmp_path, "--write-cluster", tmp_path / "cluster.yaml")
    assert ended.code == 0, ended.err
    assert "messages over intra_node: 1 seen, 3.00 times as long as by the plan's links" in ended.out
    assert Cluster.read(tmp_path / "cluster.yaml").links.intra_node.latency_us == pytest.approx(30)
    assert yaml.safe_load((tmp_path / "cluster.yaml").read_text())["name"] == "test"


def test_what_messages_took_is_not_held_up_too_where_links_are_written_as_slow_as_they_were(
    tmp_path: Path,
) -> None:
    profile, plan = chain(cluster_of(2))
    write_json(tmp_path / "profile.json", profile)
    slow_s = predicted_again(plan, profile, {"intra_node": 3.0}).iteration_s
    assert slow_s > predicted_again(plan, profile).iteration_s
    spans = [[transfer(1.0)], [wait(0.5, 1.0 + 3 * INSIDE_S)]]
    made_run(tmp_path / "run", plan, profile, spans=spans, iteration_s=slow_s)
    for more, is_held_up in (((), True), (("--write-cluster", tmp_path / "cluster.yaml"), False)):
        document = json.loads(calibrate(tmp_path, *more, "--json").out)
        assert document["iterations"][0]["after_s"] == pytest.approx(slow_s)
        calibration = Profile.read(tmp_path / "out.json").calibration
        assert calibration is not None
        assert (calibration.held_up > 1e-6) == is_held_up


def test_a_cluster_is_only_written_where_something_was_seen_to_move_over_one(folder: Path) -> None:
    ended = calibrate(folder, "--write-cluster", folder / "cluster.yaml")
    assert ended.code == ExitCode.BAD_INPUT
    assert "nothing was seen to move" in ended.err
    assert not (folder / "out.json").exists()
    profile, plan = two_towers()
    fields = {name: getattr(plan, name) for name in Plan.model_fields}
    made_run(folder / "more", Plan(**{**fields, "cluster": cluster_of(4, devices_per_node=2)}), profile)
    ended = calibrate(folder, "--write-cluster", folder / "cluster.yaml")
    both = run_spindle(
        "calibrate",
        folder / "run",
        folder / "more",
        folder / "profile.json",
        *("-o", folder / "out.json", "--write-cluster", folder / "cluster.yaml"),
    )
    assert both.code == ExitCode.BAD_INPUT
    assert "over other links" in both.err
